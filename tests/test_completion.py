"""The manual page and the shells' completion, made from where the commands are defined."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from uma_trio.cli.main import main
from uma_trio.cli.parser import COMPLETE_VARIABLE, commands

MANUAL = Path(__file__).resolve().parent.parent / "docs" / "uma-trio.1"
SHELLS = ("bash", "zsh", "fish", "powershell")


@cache
def flags() -> list[tuple[str, str]]:
    """Return each flag of each verb, as it is spelled."""
    group = commands()
    context = click.Context(group)
    return [
        (name, spelling)
        for name in group.list_commands(context)
        if (command := group.get_command(context, name)) is not None
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for spelling in parameter.opts
        if spelling.startswith("--") and spelling != "--help-all"  # the page has them all
    ]


def test_flags_are_found() -> None:
    """Or the tests below would be about nothing."""
    assert ("serve", "--llama") in flags()
    assert ("run", "--max-tokens") in flags()
    assert len(flags()) > 80


def test_every_flag_is_in_the_manual_page() -> None:
    """Under the heading of its verb."""
    page = MANUAL.read_text(encoding="utf-8").replace("\\-", "-")
    sections = {part.split()[1].rstrip('"'): part for part in page.split('.SS "')[1:]}
    missing = [pair for pair in flags() if f"\\fB{pair[1]}\\fR" not in sections[pair[0]]]
    assert not missing


def test_every_verb_and_flag_is_completed() -> None:
    def completed(*words: str, incomplete: str) -> set[str]:
        shell = ShellComplete(commands(), {}, "uma-trio", COMPLETE_VARIABLE)
        return {str(found.value) for found in shell.get_completions(list(words), incomplete)}

    verbs = {verb for verb, _ in flags()}
    assert verbs <= completed(incomplete="")
    for verb in verbs:
        assert {flag for other, flag in flags() if other == verb} <= completed(
            verb, incomplete="--"
        )


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_asks_the_program(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["uma-trio", "completion", shell])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert COMPLETE_VARIABLE in capsys.readouterr().out


def test_completion_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is where the shell looks, and its place is told."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["uma-trio", "completion", "fish", "--install"])
    with pytest.raises(SystemExit, match="0"):
        main()
    (written,) = (path for path in tmp_path.rglob("*uma-trio*") if path.is_file())
    assert COMPLETE_VARIABLE in written.read_text(encoding="utf-8")
    assert str(written) in capsys.readouterr().out.replace("\n", "")
