"""`uma-trio run` between standard input and a terminal, and verbs whose streams are not sound."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from cli_kit import PATIENCE_S, answer, command, double, environment, eos, run

from uma_protocol import Generate, Token
from uma_trio.cli.answer_flags import left_unread, prompt_of
from uma_trio.cli.output import is_write_error
from uma_trio.cli.printer import Printer, figures
from uma_trio.config.option import ConfigError

FULL = Path("/dev/full")  # on Linux and the BSDs; what is written there finds no room


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma-") as made:
        yield Path(made)


class Screen(io.TextIOWrapper):
    """A terminal that remembers what was printed."""

    def __init__(self, *, terminal: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._is_terminal = terminal

    def isatty(self) -> bool:
        """Whether it is one."""
        return self._is_terminal

    @property
    def text(self) -> str:
        """What was printed."""
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]  # it is a BytesIO


def screens(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True) -> tuple[Screen, Screen]:
    """Put two screens without colours in the place of standard output and error."""
    out, err = Screen(terminal=terminal), Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("NO_COLOR", "1")
    return out, err


@pytest.mark.parametrize(
    "flag", ["--chat", "--raw", "--no-stream", "--json", "--no-start", "--max-tokens=5"]
)
async def test_a_dash_behind_a_flag_that_awaits_no_value_is_standard_input(
    folder: Path, flag: str
) -> None:
    """Such a flag takes no value, or has it."""
    async with double(folder, answer("ok")) as daemon:
        status, _, errors = await run(
            "uma-trio", "run", flag, "-", stdin=b"a text\n", UMA_SOCK=str(daemon.path)
        )
    assert status == 0, errors
    (asked,) = daemon.heard
    assert isinstance(asked, Generate)
    assert [asked.prompt, *(turn.content for turn in asked.messages or ())] in (
        ["a text"],
        [None, "a text"],
    )


async def test_a_request_is_labelled_by_the_program_that_sends_it(folder: Path) -> None:
    """`--app` goes before that."""
    asked = (["uma-trio", "run"], ["uma-cli"], ["uma-cli", "--app", "mine"])
    async with double(folder, *[answer("ok")] * 3) as daemon:
        for program, *words in asked:
            await run(program, *words, "hi", UMA_SOCK=str(daemon.path))
        labels = [heard.app for heard in daemon.heard if isinstance(heard, Generate)]
    assert labels == ["uma-trio", "uma-cli", "mine"]


async def test_a_dash_among_words_is_standard_input(folder: Path) -> None:
    """A paragraph of its own, where it stands; without it words are all of the prompt."""
    asked = []
    async with double(folder, answer("ok"), answer("ok"), answer("ok")) as daemon:
        for words in (["Sum", "up:", "-"], ["-", "In a word?"], ["Sum up:"]):
            await run("uma-cli", *words, stdin=b"a text\n", UMA_SOCK=str(daemon.path))
        asked = [heard.prompt for heard in daemon.heard if isinstance(heard, Generate)]
    assert asked == ["Sum up:\n\na text", "a text\n\nIn a word?", "Sum up:"]


async def test_a_dash_behind_a_flag_may_be_its_value(folder: Path) -> None:
    """And within a word it is a letter."""
    async with double(folder, answer("ok")) as daemon:
        await run("uma-cli", "--stop", "-", "a - b", UMA_SOCK=str(daemon.path))
        (asked,) = daemon.heard
    assert isinstance(asked, Generate)
    assert (asked.stop, asked.prompt) == (("-",), "a - b")


def test_words_that_are_not_text_are_refused() -> None:
    """In other words than those of the wire format."""
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        prompt_of(["a", os.fsdecode(b"\xff")], None)


def test_piped_text_that_no_prompt_has_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty pipe and a file read to its end hold none."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as pipe, open(writing, "w", encoding="utf-8") as end:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert not left_unread()
        end.write("text")
        end.flush()
        assert left_unread()
    with tempfile.TemporaryFile("w+") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert not left_unread()


async def test_a_prompt_longer_than_any_request_is_refused_here() -> None:
    """With its own length, not that of a frame."""
    status, _, errors = await run("uma-cli", stdin=b"a" * 2_000_000)
    assert status == 1
    assert "The prompt is 2000000 bytes long" in errors


@pytest.mark.skipif(not FULL.exists(), reason="this system has no disk that is always full")
@pytest.mark.parametrize("verb", [["ps"], ["run", "hi"], ["run", "--json", "hi"]])
async def test_a_full_disk_is_a_sentence(folder: Path, verb: list[str]) -> None:
    """Whatever the answer is written into has no room; the exit status says so."""
    async with double(folder, answer("text")) as daemon:
        with FULL.open("wb") as full, trio.fail_after(PATIENCE_S):  # noqa: ASYNC230 - no disk
            done = await trio.run_process(
                command("uma-trio", *verb),
                check=False,
                stdin=b"",
                stdout=full,
                capture_stderr=True,
                env=environment(UMA_SOCK=str(daemon.path)),
            )
    assert done.returncode == 74
    assert done.stderr == b"Standard output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["ps", "run hi"])
async def test_closed_streams_are_no_fault(folder: Path, verb: str, closed: str) -> None:
    """As a shell or a supervisor may start us; what nobody wants is dropped."""
    async with double(folder, answer("text")) as daemon:
        shell = f'"$0" -c "$1" {verb} {closed}'
        start = ["sh", "-c", shell, *command("uma-trio")[::2]]
        with trio.fail_after(PATIENCE_S):
            done = await trio.run_process(
                start,
                check=False,
                capture_stderr=True,
                capture_stdout=True,
                env=environment(UMA_SOCK=str(daemon.path)),
            )
    assert (done.returncode, done.stderr) == (0, b"")


async def test_a_terminal_without_unicode_gets_what_it_can_show(folder: Path) -> None:
    """Tables have question marks for what it lacks; JSON is escaped, not altered."""
    play = [Token("", "é", 1), eos()]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    async with double(folder, play) as daemon:
        sock = str(daemon.path)
        told = await run("uma-cli", "--json", "hi", UMA_SOCK=sock, **ascii_only)
        status, out, errors = await run("uma-trio", "--help", **ascii_only)
    assert told[0] == 0
    assert '"text": "\\u00e9"' in told[1]
    assert (status, errors) == (0, "")
    assert "serve" in out


def test_what_comes_behind_half_an_answer_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as that the daemon closed the connection."""
    out, _ = screens(monkeypatch)
    printer = Printer(as_json=False)
    printer.token(Token("", "half", 1))
    printer.end_line()
    printer.end_line()
    assert out.text == "half\n"


def test_words_are_not_broken_at_the_edge_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that does not fit goes to the next line; a file gets the text as it is."""
    monkeypatch.setenv("COLUMNS", "20")
    text = "The fox walks everywhere today."
    for terminal in (True, False):
        out, _ = screens(monkeypatch, terminal=terminal)
        printer = Printer(as_json=False)
        for number, letter in enumerate(text):
            printer.token(Token("", letter, number))
        printer.finish(None)
        assert ("\neverywhere today." in out.text) is terminal


def test_figures_do_not_stand_behind_the_echo_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal has put ^C where the cursor was; nothing is said of the rate of no tokens."""
    out, err = screens(monkeypatch)
    printer = Printer(as_json=False)
    printer.interrupted()
    printer.finish(eos("cancelled"))
    assert out.text == "\n"
    assert err.text.endswith("ended by cancelled\n")


def test_thoughts_are_shown_to_who_looks_and_are_no_part_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On standard error, on lines of their own."""
    out, err = screens(monkeypatch)
    printer = Printer(as_json=False)
    for token in (Token("", "", 1, reasoning="Let me "), Token("", "", 2, reasoning="see.")):
        printer.token(token)
    printer.token(Token("", "Yes.", 3))
    printer.finish(None)
    assert err.text == "Let me see."
    assert out.text == "\nYes.\n", "one terminal shows both"


def test_thoughts_are_not_written_into_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither into that of the answer nor into that of errors; JSON has them apart."""
    out, err = screens(monkeypatch, terminal=False)
    for as_json in (False, True):
        printer = Printer(as_json=as_json)
        printer.token(Token("", "", 1, reasoning="Hm."))
        printer.token(Token("", "Yes.", 2))
        printer.finish(None)
    assert out.text == 'Yes.{"text": "Yes.", "reasoning": "Hm.", "reason": "cancelled"}\n'
    assert err.text == ""


def test_the_figures_say_what_an_answer_took() -> None:
    """In one line."""
    assert figures(eos()) == ("first token after 12 ms, 80.0 tokens/s, 3 in, 2 out, ended by stop")


def test_only_errors_of_a_stream_are_about_standard_output() -> None:
    """A file that cannot be written has a name."""
    assert is_write_error(OSError(28, "No space left on device"))
    assert not is_write_error(OSError(28, "No space left on device", "a file"))
    assert not is_write_error(OSError(2, "No such file or directory"))
