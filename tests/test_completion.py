"""The manual page and the shells' completion, made from where the commands are defined."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from uma_trio.cli.main import main
from uma_trio.cli.parser import commands

MANUAL = Path(__file__).resolve().parent.parent / "docs" / "uma-trio.1"
SHELLS = ("bash", "zsh", "fish", "powershell")


@cache
def flags() -> list[tuple[str, str]]:
    """Return each flag of each verb, as it is spelled."""
    app = commands()
    return [
        (verb, spelling)
        for verb in app
        if not verb.startswith("-")
        for argument in app[verb].assemble_argument_collection()
        if argument.show
        for spelling in argument.names
        if spelling.startswith("--")
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


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_is_completed(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`uma-trio completion SHELL` prints a script that knows all verbs and flags."""
    monkeypatch.setattr(sys, "argv", ["uma-trio", "completion", shell])
    with pytest.raises(SystemExit, match="0"):
        main()
    script = capsys.readouterr().out
    # fish names a flag without its dashes, after -l.
    wanted = {flag.removeprefix("--") if shell == "fish" else flag for _, flag in flags()}
    assert not sorted(flag for flag in wanted if flag not in script)
    assert not [verb for verb, _ in flags() if verb not in script]


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
    assert "--latency-cap".removeprefix("--") in written.read_text(encoding="utf-8")
    assert str(written) in capsys.readouterr().out.replace("\n", "")
