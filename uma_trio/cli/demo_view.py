"""How the demonstration is drawn: a pane for each client, or lines where there is no terminal."""

from __future__ import annotations

import textwrap

import trio
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from uma_trio.cli.demo_pane import Pane
from uma_trio.cli.output import console
from uma_trio.saying import duration, harmless

_FRAMES_PER_S = 12
_HEIGHT = 24


class PaneView:
    """Four panes, redrawn a few times a second until stopped."""

    def __init__(self, panes: list[Pane]) -> None:
        self._panes = panes
        self._stopped = trio.Event()
        self._console = console()

    async def run(self) -> None:
        """Draw until `stop`, and once more after."""
        with Live(self._draw(), console=self._console, auto_refresh=False) as live:
            while not self._stopped.is_set():
                live.update(self._draw(), refresh=True)
                with trio.move_on_after(1 / _FRAMES_PER_S):
                    await self._stopped.wait()
            live.update(self._draw(), refresh=True)

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    def _draw(self) -> Table:
        height = max(5, min(_HEIGHT, self._console.height - 8) // 2)
        width = self._console.width // 2 - 4
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        for pair in (self._panes[:2], self._panes[2:]):
            grid.add_row(*(_panel(pane, width, height) for pane in pair))
        return grid


def _panel(pane: Pane, width: int, height: int) -> Panel:
    said = Text(_tail(harmless(pane.text), width, height - 3), overflow="fold")
    asked = Text(_shortened(pane.prompt, width), style="dim")
    status = f"{pane.state}, {pane.tokens} tokens"
    if pane.rate:
        status += f", {pane.rate:.0f}/s"
    body = Group(asked, said)
    return Panel(body, title=pane.name, subtitle=status, title_align="left", height=height)


def _tail(text: str, width: int, height: int) -> str:
    """Return the end of `text` that fits; what scrolled away is gone, as in a terminal."""
    lines = []
    for line in text.splitlines() or [""]:
        lines += textwrap.wrap(line, max(width, 1)) or [""]
    return "\n".join(lines[-max(height, 1) :])


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    note = f"... ({len(text)} characters)"
    return text[: max(0, width - len(note))] + note


class LineView:
    """One line when a client starts to stream, and one when it ends."""

    def __init__(self, panes: list[Pane]) -> None:
        self._panes = panes
        self._stopped = trio.Event()
        self._told = {pane.name: "" for pane in panes}

    async def run(self) -> None:
        """Tell what changes until `stop`."""
        while not self._stopped.is_set():
            self._tell()
            with trio.move_on_after(0.05):
                await self._stopped.wait()
        self._tell()

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    def _tell(self) -> None:
        for pane in self._panes:
            if self._told[pane.name] == pane.state:
                continue
            self._told[pane.name] = pane.state
            text = f": {_shortened(' '.join(harmless(pane.text).split()), 60)}"
            console().print(f"{pane.name}: {pane.state}{text if pane.tokens > 20 else ''}")


def summary(panes: list[Pane]) -> None:
    """Print what each client felt."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("CLIENT", no_wrap=True)
    for heading in ("PROMPT", "FIRST TOKEN", "TOKENS", "TOKENS/S", "WORST GAP"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pane in panes:
        table.add_row(
            pane.name,
            f"{len(pane.prompt)} characters",
            "-" if pane.first is None else duration(pane.first),
            str(pane.tokens),
            f"{pane.rate:.1f}",
            duration(max(pane.gaps)) if pane.gaps else "-",
        )
    console().print(table)
