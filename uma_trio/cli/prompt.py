"""Where the prompt of `uma-trio run` comes from: words, --prompt, standard input, or some of each."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
from collections.abc import Sequence

from uma_trio.config.errors import ConfigError

STDIN = "-"
"""The word that stands for standard input."""
_MARK = "\0"  # no argument of a program can hold it
_BETWEEN = "\n\n"
#: The flags of `uma-trio run` that take no value. Here, since the parser of flags is slow to import.
SWITCHES = frozenset(
    {"--chat", "--raw", "--stream", "--no-stream", "--json", "--metrics", "--wait", "--no-wait"}
    | {"--start", "--no-start"}
)


def mark_stdin(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with each word ``-`` marked: a parser of flags would take it for one.

    The value of a flag is left alone.
    """
    before = ("", *arguments)
    return [
        _MARK if word == STDIN and not _awaits_value(earlier) else word
        for earlier, word in zip(before, arguments, strict=False)
    ]


def _awaits_value(word: str) -> bool:
    return word.startswith("--") and "=" not in word and word not in {"--", *SWITCHES}


def prompt_of(words: Sequence[str], given: str | None) -> str:
    """Return the prompt: `given`, the words, or standard input where there are none.

    The first word ``-`` is replaced by standard input, as a paragraph of its own. Without it the
    words are all: in a shell's loop over the lines of a file standard input is that file.

    Raises:
        ConfigError: some of it is not UTF-8 text.
    """
    if given is not None:
        return _text(given)
    if not words:
        return _standard_input()
    if _MARK not in words:
        return _text(" ".join(words))
    at = words.index(_MARK)
    before, after = (
        _text(" ".join(some).replace(_MARK, STDIN)) for some in (words[:at], words[at + 1 :])
    )
    return _BETWEEN.join(part for part in (before, _standard_input(), after) if part)


def left_unread() -> bool:
    """Whether somebody piped text in that is in no prompt. A terminal's keys are not meant."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return False
        waiting = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, b"\0" * 4)
    except (OSError, ValueError):
        return False
    return any(waiting)


def _standard_input() -> str:
    if sys.stdin.isatty():
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"Standard input is not UTF-8 text (byte {error.start}); convert it first."
        raise ConfigError(message) from error
    return text.removesuffix("\n")


def _text(typed: str) -> str:
    """Return `typed`. The shell's bytes that are not UTF-8 come as halves of surrogate pairs."""
    try:
        typed.encode()
    except UnicodeEncodeError as error:
        message = f"The prompt is not UTF-8 text (character {error.start}); convert it first."
        raise ConfigError(message) from error
    return typed
