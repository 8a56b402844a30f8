"""`uma-trio chat`: the conversation that is sent, its commands, and words kept whole on a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal_kit import Terminal

from uma_trio.cli.chat import _HELP, Talk, _Sampling, chat
from uma_trio.cli.conversation import Conversation
from uma_trio.cli.wrapped import Wrapped
from uma_trio.client import ServerError

HERE = Path(__file__).parent


# --- words ---


def shown(text: str, width: int, cut: Callable[[str], list[str]] = list) -> list[str]:
    """Return the lines that a terminal shows of a text that came in pieces."""
    written: list[str] = []
    wrapped = Wrapped(written.append, lambda: width, len)
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
    sampling = _Sampling(0.0, None, None)
    return Talk(Path("s"), Conversation("Be brief."), sampling, stats=False, wait=False)


def test_again_that_fails_keeps_the_earlier_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is away for a moment costs no answer."""
    talk = talking(monkeypatch, [], ["one", "", "two"])
    talk._conversation.ask("?")
    talk._answer()
    talk._obey("/again")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "one")]
    talk._obey("/again")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "two")]


def test_the_system_message_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dash stands for none, as without a text it is shown."""
    said: list[str] = []
    talk = talking(monkeypatch, said, [])
    talk._obey("/system")
    talk._obey("/system -")
    assert said == ["System message: Be brief.\n", "System message: none\n"]


def test_another_model_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next question on; one that is not listed may be an alias or a variant."""
    said: list[str] = []
    talk = talking(monkeypatch, said, [])

    async def models(_socket: Path) -> tuple[str, ...]:
        return ("a", "b")

    monkeypatch.setattr("uma_trio.cli.chat._models", models)
    talk._obey("/model")
    talk._obey("/model b")
    talk._obey("/model a:polite")
    assert said == [
        "Model: a\n",
        "Others: b\n",
        "Model: b\n",
        "Others: a\n",
        "Model: a:polite\n",
        "Others: a, b\n",
    ]
    assert talk._sampling.model == "a:polite"


def test_every_other_command_does_what_help_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one that is not there is named."""
    said: list[str] = []
    talk = talking(monkeypatch, said, ["one"])
    talk._conversation.ask("?")
    talk._obey("/again")
    talk._obey(f"/save {tmp_path / 'talk.json'}")
    talk._obey("/more")
    talk._obey("/clear")
    assert talk._conversation.turns == []
    talk._obey(f"/load {tmp_path / 'talk.json'}")
    assert talk._conversation.turns == [("user", "?"), ("assistant", "one")]
    talk._obey("/stats")
    assert talk._stats
    talk._obey("/moel")
    assert said[-1] == "There is no command /moel; /help lists them.\n"
    talk._obey("/help")
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
