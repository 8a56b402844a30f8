"""`uma-trio top`: what the daemon computes, for whom, and who waits, as long as one looks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import define, field

from uma_trio.cli.attempt import attempt
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import OK, USAGE, SocketFlag, WaitFlag, complain, print_json, socket_path
from uma_trio.cli.streams import is_unicode
from uma_trio.cli.top_terminal import Window, keys, window
from uma_trio.cli.top_view import SORTS, Shown, frame, lines

if TYPE_CHECKING:
    from uma_trio.client import Client
    from uma_trio.words import Lane

_TICKS = 192  # as many as a wide window shows
_SCHEMA = "uma-trio.top/1"
_FIGURES = (
    *("step_ms", "interactive_shown_ms", "late_tokens_total", "ttft_ms", "active_sessions"),
    *("slots_total", "queued_sessions", "shown_ratio_p95", "latency_cap"),
)


def top(
    *,
    once: Annotated[bool, Parameter(help="Print one picture and end.", negative="")] = False,
    json: Annotated[
        bool, Parameter(help="With --once: print it as one line of JSON.", negative="")
    ] = False,
    every: Annotated[float, Parameter(help="Seconds between two pictures, 0.2 to 60.")] = 0.5,
    socket: SocketFlag = None,
    wait: WaitFlag = True,
) -> int:
    """Watch requests, the batch, memory and models, until q. Where there is no terminal: once."""
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
    await _learn(_client(path), shown)
    if as_json:
        print_json(picture(shown))
        return OK
    height = len(shown.rows()) + 11
    for line in frame(shown, shutil.get_terminal_size((160, 0)).columns, height)[:-1]:
        sys.stdout.write(f"{line}\n")
    return OK


def picture(shown: Shown) -> dict[str, Any]:
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
    speeds = ("interactive_p95_ms", "tokens_per_s", "tokens_generated_per_s")
    return {name: found.get(name) for name in _FIGURES} | {name: card.get(name) for name in speeds}


async def _learn(client: Client, shown: Shown) -> None:
    shown.found = await client.overview(ticks=_TICKS)
    shown.figures = await client.metrics()


def _client(path: Path) -> Client:
    from uma_trio.client import Client

    return Client(path)


async def _watch(path: Path, every: float) -> int:
    client = _client(path)
    shown = Shown(is_unicode=is_unicode())
    await _learn(client, shown)  # what fails at once is told as by every other verb
    with window() as terminal:
        watching = _Watching(client, shown, terminal, every)
        await watching.run()
    return OK


@define
class _Watching:
    """One look at the daemon: pictures in turn, keys as they come, signals."""

    _client: Client
    _shown: Shown
    _window: Window
    _every: float
    _asked: str = field(default="", init=False)  # what y would do

    async def run(self) -> None:
        """Return when the person leaves, or is told to."""
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
            self.draw()
            await trio.sleep(self._every)

    async def _look(self) -> None:
        """Learn how things stand; a daemon that is not there is asked again the next time."""
        from uma_protocol import ProtocolError
        from uma_trio.client import ConnectionFailed, ServerError

        shown = self._shown
        try:
            await _learn(self._client, shown)
            if shown.view == "story":
                await self._explain()
        except (ConnectionFailed, ServerError, ProtocolError) as error:
            if isinstance(error, ConnectionFailed):
                shown.found = None
            shown.message = f"{error}; trying again"
        else:
            shown.message = self._asked

    def draw(self) -> None:
        """Show what is known."""
        size = shutil.get_terminal_size()
        self._window.draw(lines(self._shown, size.columns, size.lines))

    async def _keys(self) -> None:
        import trio

        while True:
            await trio.lowlevel.wait_readable(sys.stdin)
            pressed = keys()
            if not pressed:
                return  # the terminal has gone
            for key in pressed:
                if key in ("q", "Q"):
                    return
                await self._obey(key)
            self.draw()

    async def _obey(self, key: str) -> None:
        shown = self._shown
        if self._asked:
            await self._confirmed(key)
            return
        if key in ("up", "down"):
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
            self._asked = shown.message = f"End request {chosen.request}? y or n"

    async def _confirmed(self, key: str) -> None:
        self._asked = self._shown.message = ""
        if key in ("y", "Y"):
            await self._try(self._end)

    async def _try(self, act: Any) -> None:
        """Do something; what the daemon says against it is shown until the next picture."""
        from uma_protocol import ProtocolError
        from uma_trio.cli.spoken import sentence
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
        """Leave at SIGTERM, sleep and wake as a job of a shell, and draw anew in another size."""
        import trio

        told = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGWINCH, signal.SIGTSTP)
        with trio.open_signal_receiver(*told, signal.SIGCONT) as signals:
            await self._heed(signals, scope)

    async def _heed(self, signals: AsyncIterator[int], scope: Any) -> None:
        async for number in signals:
            if number == signal.SIGTSTP:
                self._window.leave()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._window.enter()
            elif number not in (signal.SIGWINCH, signal.SIGCONT):
                scope.cancel()
                return
            self._window.forget()
            self.draw()
