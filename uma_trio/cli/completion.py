"""`uma-trio completion`: the completion of commands and options, for a shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from uma_trio.cli.output import OK, REFUSED, complain, say
from uma_trio.cli.parser import COMPLETE_VARIABLE, Parameter, commands

Shell = Literal["bash", "zsh", "fish", "powershell"]
_PROGRAM = "uma-trio"


def completion(
    shell: Annotated[Shell, Parameter(help="The shell that is to complete.")],
    /,
    *,
    install: Annotated[
        bool,
        Parameter(
            help="Write it where the shell finds it, and have the shell's start-up file load it if necessary."
        ),
    ] = False,
) -> int:
    """Print the completion of commands and options for a shell, or install it for this user.

    For example: uma-trio completion bash >~/.local/share/bash-completion/completions/uma-trio
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        complain(f"There is no completion for {shell} here; update the package click.")
        return REFUSED
    script = kind(commands(), {}, _PROGRAM, COMPLETE_VARIABLE).source()
    if not install:
        sys.stdout.write(script)
        return OK
    path, startup = _places(shell)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
        if startup is not None:
            _load_from(startup, path)
    except OSError as error:
        complain(f"{error.filename} cannot be written: {error.strerror}.")
        return REFUSED
    say(f"Wrote {path}; new shells complete {_PROGRAM}.")
    return OK


def _places(shell: Shell) -> tuple[Path, Path | None]:
    """Return the file of the script, and the start-up file that has to load it if the shell does not."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if shell == "bash":
        return data / "bash-completion" / "completions" / _PROGRAM, None
    if shell == "fish":
        return config / "fish" / "completions" / f"{_PROGRAM}.fish", None
    if shell == "zsh":
        startup = Path(os.environ.get("ZDOTDIR") or home, ".zshrc")
        return data / _PROGRAM / "completion.zsh", startup
    return data / _PROGRAM / "completion.ps1", config / "powershell" / "profile.ps1"


def _load_from(startup: Path, script: Path) -> None:
    """Append a line that loads `script` to a start-up file, once."""
    line = f'. "{script}"'
    before = startup.read_text(encoding="utf-8") if startup.exists() else ""
    if line not in before.splitlines():
        startup.parent.mkdir(parents=True, exist_ok=True)
        with startup.open("a", encoding="utf-8") as file:
            file.write(f"{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n")
