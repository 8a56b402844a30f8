"""`uma-trio completion`: the completion of commands and flags, for a shell."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from uma_trio.cli.output import OK, REFUSED, complain, console

Shell = Literal["bash", "zsh", "fish", "powershell"]


def completion(
    shell: Annotated[Shell, Parameter(help="The shell that is to complete.")],
    /,
    *,
    install: Annotated[
        bool,
        Parameter(
            help="Write it where the shell finds it, and have the shell's start-up file load it if it must.",
            negative="",
        ),
    ] = False,
) -> int:
    """Print the completion of commands and flags for a shell, or install it for this user.

    For example: uma-trio completion bash >~/.local/share/bash-completion/completions/uma-trio
    """
    from uma_trio.cli.parser import commands

    app = commands()
    if not install:
        sys.stdout.write(app.generate_completion(prog_name="uma-trio", shell=shell))
        return OK
    try:
        path = app.install_completion(shell=shell)
    except OSError as error:
        complain(f"{error.filename} cannot be written: {error.strerror}.")
        return REFUSED
    console().print(f"Wrote {path}; new shells complete uma-trio.")
    return OK
