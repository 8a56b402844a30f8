"""A terminal for tests of commands that talk with a person."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

PATIENCE_S = 50.0
ASKING = "\x1b[?2004h"  # bracketed paste is on: the question can be read


class Terminal:
    """A terminal with the command in it; what it shows is read until some words are there."""

    def __init__(
        self,
        *command: str,
        home: Path,
        rows: int = 24,
        columns: int = 80,
        cwd: Path | None = None,
    ) -> None:
        self._end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        env = {**os.environ, "HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        env.pop("XDG_STATE_HOME", None)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        os.close(theirs)
        self._seen, self._at = "", 0

    def answer(self, text: str) -> None:
        """Press keys when it asks: what is typed before goes to a terminal that is being set up."""
        self.until(ASKING)
        self.press(text)

    def press(self, text: str) -> None:
        """Press keys."""
        os.write(self._end, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)

    @property
    def modes(self) -> list[Any]:
        """The modes of the terminal."""
        return termios.tcgetattr(self._end)

    def until(self, words: str) -> None:
        """Read until the terminal has shown some words, behind those that were waited for before."""
        while (found := self._seen.find(words, self._at)) < 0:
            if not self._read():
                raise AssertionError(f"{words!r} is not in {self._seen[self._at :]!r}")
        self._at = found + len(words)

    def leave(self) -> int:
        """Press Ctrl-D; return the exit status."""
        self.answer("\x04")
        return self.end()

    def end(self) -> int:
        """Read to the end; return the exit status."""
        while self._read():
            pass
        os.close(self._end)
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Take what has been written; False if nothing comes, or nobody is there any more."""
        if not select.select([self._end], [], [], PATIENCE_S)[0]:
            return False
        try:
            data = os.read(self._end, 65536)
        except OSError:  # Linux's word for a terminal that nobody has open
            return False
        self._seen += data.decode(errors="replace")
        return bool(data)
