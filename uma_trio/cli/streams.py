"""The three standard streams as a shell may leave them: closed, full, or not in UTF-8."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def make_sound() -> None:
    """Let every later write to the streams succeed as far as the system lets it.

    A closed stream (``>&-``) becomes the null device: Python has None there, and the first file
    that is opened would get its number, so that a library's message would go into that file.
    Characters that a terminal's encoding lacks are shown as ``?``.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def is_unicode() -> bool:
    """Whether standard output takes every character."""
    return (sys.stdout.encoding or "utf-8").lower().replace("_", "-").startswith("utf-")


def cannot_write(error: BaseException) -> bool:
    """Whether an error says that standard output takes no more: its disk is full, or it is gone.

    Errors about a file have its name; those of a stream have none.
    """
    return isinstance(error, OSError) and error.errno in _FULL and error.filename is None


def forget_output() -> None:
    """Drop what standard output still holds, so that the interpreter does not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
