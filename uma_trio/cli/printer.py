"""What `uma-trio run` prints of an answer: its text, the thoughts before it, and what it took."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from uma_trio.cli.output import complain, harmless, print_json

if TYPE_CHECKING:
    from uma_protocol import Eos, Token

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Printer:
    """Puts the answer where it belongs: as text, or as one JSON object at its end.

    Text goes to standard output. What the model thinks before it answers goes to standard error,
    and only where that is a terminal: a reader would see nothing for minutes.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self._terminal = sys.stdout.isatty()
        self._watched = sys.stderr.isatty()
        self._dim = self._watched and "NO_COLOR" not in os.environ and _has_colour()
        self._thinking = False
        self._open_line = False

    def token(self, token: Token) -> None:
        """Print a piece of the answer now, unless it waits for the JSON."""
        if self._as_json:
            self._pieces.append(token.text)
            self._thoughts.append(token.reasoning or "")
            return
        if token.reasoning and self._watched:
            self._think(harmless(token.reasoning))
        if token.text:
            if self._thinking:
                self.end_line()
                self._thinking = False
            self._say(token.text)

    def interrupted(self) -> None:
        """Take note that the terminal has shown ^C, which the next line must not follow."""
        self._open_line = True

    def end_line(self) -> None:
        """Let what comes next stand on a line of its own. Idempotent."""
        if self._open_line and not self._as_json:
            if self._terminal:
                _put(sys.stdout, "\n")
            elif self._watched and self._thinking:
                _put(sys.stderr, "\n")
        self._open_line = False

    def finish(self, eos: Eos | None) -> None:
        """End the line, and tell what the answer took to whoever looks at standard error."""
        self.end_line()
        if self._as_json:
            thoughts = "".join(self._thoughts)
            more = {"reasoning": thoughts} if thoughts else {}
            print_json({"text": "".join(self._pieces), **more, **_summary(eos)})
        elif eos is not None and self._watched:
            complain(figures(eos))

    def _say(self, text: str) -> None:
        shown = harmless(text) if self._terminal else text
        sys.stdout.buffer.write(shown.encode())
        sys.stdout.buffer.flush()
        self._open_line = not text.endswith("\n")

    def _think(self, text: str) -> None:
        self._thinking = True
        _put(sys.stderr, f"{_DIM}{text}{_PLAIN}" if self._dim else text)
        self._open_line = not text.endswith("\n")


def figures(eos: Eos) -> str:
    """Return one line about a finished answer."""
    usage, timings = eos.usage, eos.timings
    parts = [] if timings.ttft_ms is None else [f"first token after {timings.ttft_ms:.0f} ms"]
    parts += [f"{timings.tokens_per_s:.1f} tokens/s"] if usage.completion_tokens else []
    parts += [f"{usage.prompt_tokens} in", f"{usage.completion_tokens} out"]
    return ", ".join([*parts, f"ended by {eos.reason}"])


def _put(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _has_colour() -> bool:
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _summary(eos: Eos | None) -> dict[str, Any]:
    import msgspec

    if eos is None:
        return {"reason": "cancelled"}
    known: dict[str, Any] = msgspec.to_builtins(eos)
    left_out = {"event", "text", "reasoning"}
    return {k: value for k, value in known.items() if k not in left_out and value is not None}
