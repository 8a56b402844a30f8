"""`uma-trio top`: requests, batch, memory and models of the daemon, refreshed until q."""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from attrs import define, field

from uma_trio.cli.attempt import attempt
from uma_trio.cli.output import (
    OK,
    USAGE,
    SocketFlag,
    WaitFlag,
    complain,
    console,
    is_unicode,
    print_json,
    socket_path,
)
from uma_trio.cli.parser import Parameter
from uma_trio.cli.top_view import SORTS, Shown, render

if TYPE_CHECKING:
    from rich.live import Live

    from uma_trio.client import Client
    from uma_trio.words import Lane

_TICKS = 192  # as many as a wide window shows
_SCHEMA = "uma-trio.top/1"
_FIGURES = (
    "step_ms", "interactive_shown_ms", "late_tokens_total", "ttft_ms", "active_sessions", "slots_total",
    "queued_sessions", "shown_ratio_p95", "latency_cap",
)  # fmt: skip
_SCORES = ("interactive_p95_ms", "tokens_per_s", "tokens_generated_per_s")
_KEYS: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b": "escape",
}


def top(
    *,
    once: Annotated[bool, Parameter(help="Print one picture and end.")] = False,
    json: Annotated[bool, Parameter(help="With --once: print it as one line of JSON.")] = False,
    every: Annotated[float, Parameter(help="Seconds between two pictures, 0.2 to 60.")] = 0.5,
    socket: SocketFlag = None,
    wait: WaitFlag = True,
) -> int:
    """Watch requests, the batch, memory and models, until q. Without a terminal: once."""
    if json and not once:
        complain("--json prints one picture; give --once, too.")
        return USAGE
    if not 0.2 <= every <= 60:
        complain(f"--every: {every:g} is out of range, 0.2 to 60 seconds.")
        return USAGE
    path = socket_path(socket)
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return attempt(_once, path, json, wait_at=path if wait else None)
    return attempt(_watch, path, every, wait_at=path if wait else None)


async def _once(path: Path, as_json: bool) -> int:
    shown = Shown(is_unicode=is_unicode())
    await _update(_client(path), shown)
    if as_json:
        print_json(document(shown))
    else:
        console().print(render(shown, footer=False))
    return OK


def document(shown: Shown) -> dict[str, Any]:
    """Return what is shown as a document for programs."""
    import msgspec

    found = msgspec.to_builtins(shown.found) if shown.found is not None else {}
    found.pop("event", None)
    models = shown.figures.get("models") or {}
    each = {name: _figures(figures) for name, figures in models.items()}
    return {
        "schema": _SCHEMA,
        "figures": _figures(shown.figures),
        **({"figures_of_models": each} if each else {}),
        **found,
    }


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    card = found.get("scorecard") or {}
    return {name: found.get(name) for name in _FIGURES} | {name: card.get(name) for name in _SCORES}


async def _update(client: Client, shown: Shown) -> None:
    shown.found = await client.overview(ticks=_TICKS)
    shown.figures = await client.metrics()


def _client(path: Path) -> Client:
    from uma_trio.client import Client

    return Client(path)


async def _watch(path: Path, every: float) -> int:
    from rich.live import Live

    client = _client(path)
    shown = Shown(is_unicode=is_unicode())
    await _update(client, shown)  # an error now ends the verb, a later one is shown
    window = console()
    with _single_keys():
        live = Live(
            console=window,
            screen=True,
            auto_refresh=False,
            get_renderable=lambda: render(shown, height=window.height),
        )
        with live:
            await _Watch(client, shown, live, every).run()
    return OK


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys one by one without echo; Ctrl-C and Ctrl-Z stay signals."""
    before = termios.tcgetattr(sys.stdin.fileno())
    tty.setcbreak(sys.stdin.fileno(), termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def keys_of(data: str) -> list[str]:
    """Return what a terminal sent as names of keys; a letter is its own name."""
    found = []
    while data:
        sequence = data[:3] if data[:3] in _KEYS else data[:1]
        found.append(_KEYS.get(sequence, sequence))
        data = data[len(sequence) :]
    return found


@define
class _Watch:
    """The pictures in turn, keys and signals."""

    _client: Client
    _shown: Shown
    _live: Live
    _every: float
    _question: str = field(default="", init=False)  # what y confirms

    async def run(self) -> None:
        """Return at q, at the end of the terminal, or at a signal."""
        import trio

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pictures)
            nursery.start_soon(self._signals, nursery.cancel_scope)
            await self._keys()
            nursery.cancel_scope.cancel()

    async def _pictures(self) -> None:
        import trio

        while True:
            await self._look()
            self._live.refresh()
            await trio.sleep(self._every)

    async def _look(self) -> None:
        """Fetch the state; a daemon that cannot be reached is tried again the next time."""
        from uma_protocol import ProtocolError
        from uma_trio.client import ConnectionFailed, ServerError

        shown = self._shown
        try:
            await _update(self._client, shown)
            if shown.view == "story":
                await self._explain()
        except (ConnectionFailed, ServerError, ProtocolError) as error:
            if isinstance(error, ConnectionFailed):
                shown.found = None
            shown.message = f"{error}; trying again"
        else:
            shown.message = self._question

    async def _keys(self) -> None:
        import trio

        while True:
            await trio.lowlevel.wait_readable(sys.stdin)
            try:
                data = os.read(sys.stdin.fileno(), 256).decode(errors="replace")
            except BlockingIOError:
                continue
            if not data:
                return
            for key in keys_of(data):
                if key in ("q", "Q"):
                    return
                await self._press(key)
            self._live.refresh()

    async def _press(self, key: str) -> None:
        shown = self._shown
        if self._question:
            self._question = shown.message = ""
            if key in ("y", "Y"):
                await self._try(self._end)
        elif key in ("up", "down"):
            shown.move(-1 if key == "up" else 1)
        elif key == "s":
            shown.sort = (shown.sort + 1) % len(SORTS)
        elif key == "m":
            shown.view = "requests" if shown.view == "models" else "models"
        elif key in ("e", "escape", "\n"):
            shown.view = "requests" if shown.view == "story" or key == "escape" else "story"
            if shown.view == "story":
                await self._try(self._explain)
        elif key == "p":
            await self._try(self._move_lane)
        elif key == "k" and (chosen := shown.selected()) is not None:
            shown.chosen = chosen.request
            self._question = shown.message = f"End request {chosen.request}? y or n"

    async def _try(self, act: Any) -> None:
        """Do something; a refusal is shown until the next picture."""
        from uma_protocol import ProtocolError
        from uma_trio.cli.attempt import sentence
        from uma_trio.client import ConnectionFailed, ServerError

        try:
            await act()
        except (ConnectionFailed, ServerError, ProtocolError) as error:
            self._shown.message = sentence(error)

    async def _explain(self) -> None:
        from uma_trio.observe.sentences import sentences

        chosen = self._shown.selected()
        handle = self._shown.chosen or (None if chosen is None else chosen.request)
        if handle is None:
            self._shown.story = ("Nothing is running.",)
            return
        self._shown.chosen = handle
        found = await self._client.explain(handle)
        self._shown.story = sentences(found.requests[0], found.ticks)

    async def _move_lane(self) -> None:
        chosen = self._shown.selected()
        if chosen is not None:
            other: Lane = "background" if chosen.lane == "interactive" else "interactive"
            await self._client.set_priority(chosen.request, other)

    async def _end(self) -> None:
        if self._shown.chosen is not None:
            await self._client.cancel(self._shown.chosen)

    async def _signals(self, scope: Any) -> None:
        import trio

        handled = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGWINCH, signal.SIGTSTP)
        with trio.open_signal_receiver(*handled, signal.SIGCONT) as signals:
            await self._handle(signals, scope)

    async def _handle(self, signals: AsyncIterator[int], scope: Any) -> None:
        """End, suspend as a job of a shell, or draw again in another size."""
        async for number in signals:
            if number == signal.SIGTSTP:
                self._live.stop()
                os.kill(os.getpid(), signal.SIGSTOP)
                tty.setcbreak(sys.stdin.fileno(), termios.TCSADRAIN)
                self._live.start()
            elif number not in (signal.SIGWINCH, signal.SIGCONT):
                scope.cancel()
                return
            self._live.refresh()
