"""A window that `uma-trio top` has for itself: keys one by one, and what was there before afterwards."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from uma_trio.cli.top_view import Line

_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_STYLES: Final = {"bold": "1", "dim": "2", "bad": "31", "good": "32", "chosen": "7"}
_KEYS: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b": "escape",
}


class Window:
    """The terminal, from :meth:`enter` to :meth:`leave`; each may be called again after the other."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._drawn: list[str] = []

    def enter(self) -> None:
        """Take the window: its own screen, no echo, each key at once. Ctrl-C and Ctrl-Z stay signals."""
        self._before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno(), termios.TCSADRAIN)
        self._write(_ENTER)
        self._drawn = []

    def leave(self) -> None:
        """Give it back as it was. Idempotent."""
        if self._before is None:
            return
        self._write(_LEAVE)
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)
        self._before = None

    def forget(self) -> None:
        """Draw every line anew the next time: the window has another size."""
        self._drawn = []

    def draw(self, lines: Sequence[Line]) -> None:
        """Show lines, from the top; those that are as before are not written again."""
        now = [_styled(line) for line in lines]
        out = [] if self._drawn else ["\x1b[2J"]
        for n, line in enumerate(now):
            if n >= len(self._drawn) or self._drawn[n] != line:
                out.append(f"\x1b[{n + 1};1H{line}\x1b[K")
        if len(now) < len(self._drawn):
            out.append(f"\x1b[{len(now) + 1};1H\x1b[J")
        self._drawn = now
        if out:
            self._write("".join(out))

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def window() -> Iterator[Window]:
    """Have the terminal, and give it back however the block ends."""
    found = Window()
    found.enter()
    try:
        yield found
    finally:
        found.leave()


def keys() -> list[str]:
    """Return the keys that were pressed; nothing if there are none, or the terminal has gone."""
    try:
        data = os.read(sys.stdin.fileno(), 256).decode(errors="replace")
    except BlockingIOError:
        return []
    return split(data)


def split(data: str) -> list[str]:
    """Return what a terminal sent as the names of keys: a letter is its own name."""
    found = []
    while data:
        sequence = data[:3] if data[:3] in _KEYS else data[:1]
        found.append(_KEYS.get(sequence, sequence))
        data = data[len(sequence) :]
    return found


def _styled(line: Line) -> str:
    return "".join(f"\x1b[{_STYLES[style]}m{text}\x1b[m" if style else text for text, style in line)
