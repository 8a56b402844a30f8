"""`uma-trio chat`: the conversation that is sent, its commands, and words kept whole on a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import fields
from cli_kit import answer, double
from hypothesis import given
from hypothesis import strategies as st
from terminal_kit import Terminal

from uma_protocol import Generate
from uma_trio.cli.answer_flags import AnswerFlags
from uma_trio.cli.chat import _HELP, Conversation, Talk, chat
from uma_trio.cli.printer import Wrapped
from uma_trio.client import ServerError

HERE = Path(__file__).parent


# --- words ---


def shown(text: str, width: int, cut: Callable[[str], list[str]] = list) -> list[str]:
    """Return the lines that a terminal shows of a text that came in pieces."""
    written: list[str] = []
    wrapped = Wrapped(written.append, lambda: width)
    for piece in cut(text):
        wrapped.put(piece)
    return screen("".join(written))


def screen(written: str) -> list[str]:
    """Do what a terminal does with the only sequence that is used: back, and erase to the end."""
    lines = [""]
    for back, character in re.findall(r"\x1b\[(\d+)D\x1b\[K|([\s\S])", written):
        if back:
            lines[-1] = lines[-1][: -int(back)]
        elif character == "\n":
            lines.append("")
        else:
            lines[-1] += character
    return lines


@given(st.text(alphabet="ab \n", max_size=200), st.integers(20, 40))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(text: str, width: int) -> None:
    """Whatever comes: the same words in the same order, each whole unless it is wider than a line."""
    lines = shown(text, width)
    assert all(len(line) < width for line in lines)
    if all(len(word) < width - 2 for word in text.split()):
        assert " ".join(lines).split() == text.split()


@given(st.text(alphabet="abc \n`", max_size=120), st.integers(1, 7))
def test_pieces_are_shown_as_the_whole_would_be(text: str, size: int) -> None:
    """Where a token ends is nobody's business."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert shown(text, 24, lambda _: pieces) == shown(text, 24)


def test_code_is_left_as_it_is() -> None:
    """A line of a program must be copied as it was written."""
    line = "x = " + "1 + " * 20 + "1"
    assert line in shown(f"```python\n{line}\n```\n", 30)


# --- the conversation ---


def test_a_question_without_an_answer_is_replaced() -> None:
    """Templates want the turns to alternate."""
    talk = Conversation("Be brief.")
    talk.ask("one")
    talk.ask("two")
    talk.answered("2")
    assert talk.messages == [("system", "Be brief."), ("user", "two"), ("assistant", "2")]


def test_an_answer_can_be_given_again_and_gone_on_with() -> None:
    """Again takes it back; more adds to it."""
    talk = Conversation()
    assert not talk.again()
    talk.ask("one")
    talk.answered("1")
    talk.continued(".5")
    assert talk.turns[-1] == ("assistant", "1.5")
    assert talk.again()
    assert talk.turns == [("user", "one")]


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    """With its system message; as Markdown it can be read."""
    talk, other = Conversation("Be brief."), Conversation()
    talk.ask("é?")
    talk.answered("è!")
    talk.save(tmp_path / "talk.json")
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages
    talk.save(tmp_path / "talk.md")
    assert "## assistant\n\nè!" in (tmp_path / "talk.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"role": "tool", "content": ""}]', "no"])
def test_what_is_no_conversation_changes_nothing(tmp_path: Path, text: str) -> None:
    """Loading it is refused."""
    (tmp_path / "x.json").write_text(text if text != "{}" else '{"a": 1}')
    talk = Conversation("kept")
    with pytest.raises(ValueError, match=r"."):
        talk.load(tmp_path / "x.json")
    assert talk.system == "kept"


# --- the terminal ---


def test_without_a_terminal_there_is_no_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    """It names the command for scripts."""
    assert chat() == 1
    assert "uma-trio run" in capsys.readouterr().err


def talk_and_leave(path: Path, folder: Path) -> None:
    """Ask one question, save the conversation, and press Ctrl-D."""
    command = (sys.executable, "-m", "uma_trio", "chat", "--socket", str(path), "--stats")
    terminal = Terminal(*command, home=folder)
    terminal.until("Ctrl-D leaves.")
    terminal.answer("hello\r")
    terminal.until("hello back")
    terminal.until("of the prompt cached")
    terminal.answer(f"/save {folder}/talk.json\r")
    terminal.until("2 turns")
    assert terminal.leave() == 0


def talking(monkeypatch: pytest.MonkeyPatch, said: list[str], answers: list[str]) -> Talk:
    """Return a conversation whose daemon gives `answers`; `said` is what is shown."""

    async def generate(*arguments: Any) -> None:
        if answers and (answer := answers.pop(0)):
            arguments[-1].append(answer)
            return
        raise ServerError("E_RUNTIME_001", "no")

    monkeypatch.setattr("uma_trio.cli.chat._generate", generate)
    monkeypatch.setattr("uma_trio.cli.chat._keys_unseen", nullcontext)
    monkeypatch.setattr("uma_trio.cli.chat._say", said.append)
    return Talk(Path("s"), AnswerFlags(system="Be brief.", temperature=0.0, wait=False))


def test_again_that_fails_keeps_the_earlier_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is away for a moment costs no answer."""
    talk = talking(monkeypatch, [], ["one", "", "two"])
    talk._conversation.ask("?")
    talk._answer()
    talk._run_command("/again")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "one")]
    talk._run_command("/again")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "two")]


def test_again_without_a_question_keeps_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A conversation that was loaded may begin with an answer, or have two in a row."""
    said: list[str] = []
    talk = talking(monkeypatch, said, ["three"])
    path = tmp_path / "talk.json"
    one, two = [{"role": "assistant", "content": text} for text in ("one", "two")]
    path.write_text(json.dumps([one]))
    talk._run_command(f"/load {path}")
    talk._run_command("/again")
    assert said[-1] == "There is no question yet.\n"
    assert talk._conversation.turns == [("assistant", "one")]
    path.write_text(json.dumps([{"role": "user", "content": "?"}, one, two]))
    talk._run_command(f"/load {path}")
    talk._run_command("/again")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "three")]


#: A value of each flag of an answer, and what it is in the request.
FLAGS: dict[str, tuple[str, Any]] = {
    "max_tokens": ("9", 9),
    "temperature": ("0.9", 0.9),
    "top_p": ("0.8", 0.8),
    "top_k": ("40", 40),
    "min_p": ("0.1", 0.1),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("0.25", 0.25),
    "repeat_penalty": ("1.5", 1.5),
    "repeat_last_n": ("32", 32),
    "min_tokens": ("2", 2),
    "seed": ("7", 7),
    "stop": ("END", ("END",)),
    "schema": ("schema.json", {"type": "object"}),
    "grammar": ("answer.gbnf", 'root ::= "a"'),
    "model": ("code", "code"),
    "priority": ("background", "background"),
    "session": ("mine", "mine"),
    "cache": ("ours", "ours"),
    "speculation": ("off", "off"),
    "pace": ("asap", "asap"),
    "awaits": ("nothing", "nothing"),
    "app": ("editor", "editor"),
}


@pytest.mark.parametrize("verb", ["run", "chat"])
@pytest.mark.parametrize("without", ["schema", "grammar"])
async def test_a_conversation_has_every_flag_of_an_answer(verb: str, without: str) -> None:
    """Also the one that begins because `run` has no prompt."""
    others = {"socket", "wait", "start", "system"}
    assert {each.name for each in fields(AnswerFlags)} == FLAGS.keys() | others
    asked = {name: flag for name, flag in FLAGS.items() if name != without}
    flags = [f"--{name.replace('_', '-')}={text}" for name, (text, _) in asked.items()]
    with tempfile.TemporaryDirectory(prefix="uma") as name:
        folder = Path(name)
        (folder / "schema.json").write_text('{"type": "object"}')
        (folder / "answer.gbnf").write_text('root ::= "a"')
        async with double(folder, answer("well")) as daemon:
            command = [sys.executable, "-m", "uma_trio", verb, f"--socket={daemon.path}", *flags]
            terminal = Terminal(*command, "--system", "Be brief.", home=folder, cwd=folder)
            await trio.to_thread.run_sync(partial(ask_and_leave, terminal))
        (request,) = [each for each in daemon.heard if isinstance(each, Generate)]
    assert {name: getattr(request, name) for name in asked} == {
        name: value for name, (_, value) in asked.items()
    }
    messages = [(turn.role, turn.content) for turn in request.messages or ()]
    assert messages == [("system", "Be brief."), ("user", "hello")]


def ask_and_leave(terminal: Terminal) -> None:
    """Ask one question, and press Ctrl-D behind its answer."""
    terminal.until("Ctrl-D leaves.")
    terminal.answer("hello\r")
    terminal.until("well")
    assert terminal.leave() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--n", "2"], "has no --n."),
        (["--json", "--no-stream", "--raw"], "has no --stream or --json or --raw."),
        (["--tools", "x.json", "--tool-choice", "auto"], "has no --tools."),
        (["--top-p", "7"], "--top-p must be a number from 0 to 1"),
    ],
)
def test_a_flag_that_a_conversation_cannot_have_is_refused(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    """By its name, before a question is asked."""
    command = [
        sys.executable,
        "-m",
        "uma_trio",
        "run",
        "--socket",
        str(tmp_path / "s"),
        "--no-wait",
    ]
    terminal = Terminal(*command, *flags, home=tmp_path, columns=200)
    terminal.until(said)
    assert terminal.end() == 1


def test_the_system_message_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dash stands for none, as without a text it is shown."""
    said: list[str] = []
    talk = talking(monkeypatch, said, [])
    talk._run_command("/system")
    talk._run_command("/system -")
    assert said == ["System message: Be brief.\n", "System message: none\n"]


def test_another_model_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next question on; one that is not listed may be an alias or a variant."""
    said: list[str] = []
    talk = talking(monkeypatch, said, [])

    async def models(_socket: Path) -> tuple[str, ...]:
        return ("a", "b")

    monkeypatch.setattr("uma_trio.cli.chat._models", models)
    talk._run_command("/model")
    talk._run_command("/model b")
    talk._run_command("/model a:polite")
    assert said == [
        "Model: a\n",
        "Others: b\n",
        "Model: b\n",
        "Others: a\n",
        "Model: a:polite\n",
        "Others: a, b\n",
    ]
    assert talk._asking.model == "a:polite"


def test_every_other_command_does_what_help_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one that is not there is named."""
    said: list[str] = []
    talk = talking(monkeypatch, said, ["one"])
    talk._conversation.ask("?")
    talk._run_command("/again")
    talk._run_command(f"/save {tmp_path / 'talk.json'}")
    talk._run_command("/more")
    talk._run_command("/clear")
    assert talk._conversation.turns == []
    talk._run_command(f"/load {tmp_path / 'talk.json'}")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "one")]
    talk._run_command("/stats")
    assert talk._stats
    talk._run_command("/moel")
    assert said[-1] == "There is no command /moel (did you mean /model?); /help lists them.\n"
    talk._run_command("/help")
    assert said[-1] == f"{_HELP}\n"


def test_help_fits_a_terminal_of_80_columns() -> None:
    """Its lines are written as they are."""
    assert max(map(len, _HELP.splitlines())) < 80


def test_a_conversation_in_a_terminal() -> None:
    """A question, its answer, the figures, a saved file, and Ctrl-D."""
    with tempfile.TemporaryDirectory(prefix="uma") as name:
        folder = Path(name)
        script, path = folder / "script", folder / "s"
        script.write_text(json.dumps(["hello back", "and again"]))
        serving = [sys.executable, str(HERE / "fake_daemon.py"), str(path), f"script={script}"]
        with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                assert daemon.stdout.readline().strip() == "ready"
                talk_and_leave(path, folder)
            finally:
                daemon.terminate()
        said = json.loads((folder / "talk.json").read_text())
        assert [turn["role"] for turn in said] == ["user", "assistant"]
        history = folder / ".local" / "state" / "uma-trio" / "chat-history"
        assert history.stat().st_mode & 0o777 == 0o600
        assert "+hello" in history.read_text()
