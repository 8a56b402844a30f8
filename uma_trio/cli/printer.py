"""Output of `uma-trio run`: text, reasoning and figures of answers, and the line about what a request waits for."""

from __future__ import annotations

import os
import shutil
import sys
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from uma_trio.cli.output import complain, print_json
from uma_trio.words import harmless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from uma_protocol import End, Eos, Sessions, Token, ToolCall

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
PATIENCE_S: Final = 1.5
_AGAIN_S: Final = 1.0
_CLEAR: Final = "\r\x1b[K"


class Printer:
    """Prints `n` answers as text, or as one JSON object at their end.

    Several answers are printed one after the other, each under a heading with its number: the first as it is
    generated. Text goes to standard output; reasoning goes to standard error, and only to a terminal.
    """

    def __init__(self, *, as_json: bool, n: int = 1) -> None:
        self._as_json = as_json
        self._n = n
        self._waiting: list[list[Token]] = [[] for _ in range(n)]
        self._turn = -1 if n > 1 else 0  # the answer that is printed
        self._wrapped = Wrapped(_write) if sys.stdout.isatty() else None
        self._watched = sys.stderr.isatty()
        self._dim = self._watched and "NO_COLOR" not in os.environ and _has_colour()
        self._thinking = False
        self._open_line = False
        self._unended = False  # whether the last line of standard output has no end
        self._calls: dict[int, Sequence[ToolCall]] = {}

    def token(self, token: Token) -> None:
        """Print a piece of an answer now, unless it waits for its turn or for the JSON."""
        self._waiting[token.choice].append(token)
        if not self._as_json:
            self._take_turns(())

    def over(self, ends: Sequence[End]) -> None:
        """Continue with the next answer if the printed one is among those that ended."""
        if not self._as_json and self._n > 1:
            self._keep_calls(ends)
            self._take_turns([end.choice for end in ends])

    def _take_turns(self, over: Iterable[int]) -> None:
        if self._turn < 0:
            self._next()
        self._print_waiting()
        while self._turn in over and self._turn < self._n - 1:
            self._print_calls()
            self._next()
            self._print_waiting()

    def _next(self) -> None:
        self._turn += 1
        self._say(("\n" if self._open_line else "") + f"--- {self._turn + 1} of {self._n} ---\n")

    def _print_waiting(self) -> None:
        waiting, self._waiting[self._turn] = self._waiting[self._turn], []
        for token in waiting:
            self._print(token)

    def _keep_calls(self, ends: Iterable[End]) -> None:
        self._calls |= {end.choice: end.calls for end in ends}

    def _print_calls(self) -> None:
        calls = self._calls.pop(self._turn, ())
        if calls and self._unended:
            self._say("\n")
        for call in calls:
            self._say(f"{dumps({'name': call.name, 'arguments': _decoded(call.arguments)})}\n")

    def _print(self, token: Token) -> None:
        if token.reasoning and self._watched:
            self._think(harmless(token.reasoning))
        if token.text:
            if self._thinking:
                self.end_line()
                self._thinking = False
            self._say(token.text)

    def interrupted(self) -> None:
        """Note that the terminal has shown ^C on the current line."""
        self._open_line = True

    def end_line(self) -> None:
        """Begin a new line unless the current one is empty."""
        if self._open_line and not self._as_json:
            if self._wrapped is not None:
                _put(sys.stdout, "\n")
                self._wrapped.reset()
                self._unended = False
            elif self._watched and self._thinking:
                _put(sys.stderr, "\n")
        self._open_line = False

    def rest(self) -> None:
        """Print the rest of all answers: there are no more tokens."""
        if not self._as_json and self._turn >= 0:
            self._take_turns(range(self._n))
        self.end_line()

    def finish(self, eos: Eos | None, ends: Sequence[End] = ()) -> None:
        """End the line, print calls, and print figures to standard error if that is a terminal."""
        self._keep_calls(ends)
        if eos is not None and self._n == 1:
            self._calls[0] = eos.calls
        self.rest()
        if not self._as_json:
            self._print_calls()
        if self._as_json:
            print_json({**self._answers(ends), **_summary(eos)})
        elif eos is not None and self._watched:
            complain(figures(eos))

    def _answers(self, ends: Sequence[End]) -> dict[str, Any]:
        answers = [_whole(tokens) for tokens in self._waiting]
        if self._n == 1:
            return answers[0]
        for choice, one in enumerate(answers):
            one["choice"] = choice
        for end in ends:
            answers[end.choice].update(_plain(end))
        return {"choices": answers}

    def _say(self, text: str) -> None:
        if self._wrapped is not None:
            self._wrapped.put(harmless(text))
        else:
            _write(text)
        sys.stdout.buffer.flush()
        self._open_line = self._unended = not text.endswith("\n")

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


def _decoded(arguments: str) -> Any:
    try:
        return loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())


def _put(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _has_colour() -> bool:
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _summary(eos: Eos | None) -> dict[str, Any]:
    return {"reason": "cancelled"} if eos is None else _plain(eos)


def _whole(tokens: Sequence[Token]) -> dict[str, Any]:
    thoughts = "".join([token.reasoning or "" for token in tokens])
    more = {"reasoning": thoughts} if thoughts else {}
    return {"text": "".join([token.text for token in tokens]), **more}


def _plain(event: Eos | End) -> dict[str, Any]:
    import msgspec

    known: dict[str, Any] = msgspec.to_builtins(event)
    left_out = {"event", "text", "reasoning"}
    return {k: value for k, value in known.items() if k not in left_out and value is not None}


def wait_of(found: Sessions, pid: int) -> str:
    """Return what the requests of a process wait for, "" if nothing."""
    return next((one.waits for one in found.sessions if one.pid == pid and one.waits), "")


class WaitLine:
    """A line about what a request waits for, until its first token. Only on a terminal."""

    def __init__(self, socket: Path) -> None:
        import trio

        self._socket, self._shown = socket, ""
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Show the line from :data:`PATIENCE_S` on, until :meth:`end`."""
        import trio

        from uma_trio.client import Client, ConnectionFailed, ServerError

        if not sys.stderr.isatty():
            return
        client = Client(self._socket)
        with self._scope:
            await trio.sleep(PATIENCE_S)
            while True:
                try:
                    self._show(wait_of(await client.overview(), os.getpid()))
                except (ConnectionFailed, ServerError):
                    self._show("")  # the request itself reports it
                await trio.sleep(_AGAIN_S)

    def end(self) -> None:
        """Remove the line."""
        self._scope.cancel()
        self._show("")

    def _show(self, wait: str) -> None:
        if wait != self._shown:
            self._shown = wait
            sys.stderr.write(f"{_CLEAR}{harmless(wait)}")
            sys.stderr.flush()


_FENCE = "```"


def _window_width() -> int:
    return shutil.get_terminal_size().columns


class Wrapped:
    """Writes pieces at once; a word that does not fit is erased and written on the next line.

    Lines between code fences are not wrapped.
    """

    def __init__(
        self, write: Callable[[str], object], width: Callable[[], int] = _window_width
    ) -> None:
        from rich.cells import cell_len

        self._write, self._width = write, width
        self._cells = cell_len
        self._line = ""  # the current line of the text
        self._column = 0
        self._word = ""
        self._in_code = False

    def put(self, text: str) -> None:
        """Show the next piece."""
        width = max(20, self._width())
        for character in text:
            if character == "\n":
                self._end_line()
            elif character.isspace():
                self._space(character, width)
            else:
                self._letter(character, width)

    def end(self) -> None:
        """End the line if it has begun."""
        if self._column or self._line:
            self._end_line()
        self._in_code = False

    def reset(self) -> None:
        """Note that something else has begun a new line."""
        self._line = self._word = ""
        self._column = 0

    def _end_line(self) -> None:
        if self._line.lstrip().startswith(_FENCE):
            self._in_code = not self._in_code
        self._write("\n")
        self.reset()

    def _space(self, character: str, width: int) -> None:
        self._line += character
        self._word = ""
        if self._in_code or self._column + 1 < width:
            self._write(character)
            self._column += 1
        elif self._column:  # the line break replaces the space
            self._write("\n")
            self._column = 0

    def _letter(self, character: str, width: int) -> None:
        self._line += character
        size = self._cells(character)
        if not self._in_code and self._column + size > width - 1:
            begun = self._word if self._cells(self._word) < width - 2 else ""
            back = self._cells(begun)
            if back and back < self._column:
                self._write(f"\x1b[{back}D\x1b[K\n{begun}")
            else:
                self._write("\n")
                begun = ""
            self._word, self._column = begun, self._cells(begun)
        self._write(character)
        self._word += character
        self._column += size
