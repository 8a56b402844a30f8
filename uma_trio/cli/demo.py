"""`uma-trio demo`: a private daemon, four clients at once, and the latencies of each.

Three clients stream; when all of them do, a fourth sends a prompt that is a hundred times as long. The
daemon is a process of its own on a temporary socket, started and stopped as a user would.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attrs import define, field

from uma_trio.cli.answer_flags import DEFAULT_TEMPERATURE
from uma_trio.cli.attempt import attempt, wait_until_served
from uma_trio.cli.output import OK, Trouble, console
from uma_trio.cli.parser import Parameter
from uma_trio.words import duration, harmless

if TYPE_CHECKING:
    import trio
    from rich.console import Console
    from rich.table import Table

_PATIENCE_S = 120.0
_REQUESTS = (
    "Tell me a story about a fox and a lantern.",
    "Tell me a story about a penguin and a violin.",
    "Write a short tale about a baker and a kite.",
)
_SENTENCE = "One day the little fox walked to the river to look for her friend the old heron. "
_LONG = _SENTENCE * 37 + "\n\nWhat is the first sentence of this text?"
_TOKENS = 240
_UNDER_WAY = 8  # tokens of each of the three before the fourth starts
_DRAWN_HZ = 12
_HEIGHT = 24


@define
class Pane:
    """The stream of one client; times in seconds."""

    name: str
    prompt: str
    text: str = ""
    asked: float = 0.0
    came: list[float] = field(factory=list)
    state: str = "waiting"

    @property
    def gaps(self) -> list[float]:
        """The times between two tokens."""
        return [after - before for before, after in pairwise(self.came)]

    @property
    def rate(self) -> float:
        """Tokens a second, from the first one on."""
        return (len(self.came) - 1) / (self.came[-1] - self.came[0]) if len(self.came) > 1 else 0.0


def demo(
    *,
    model: Annotated[
        str | None, Parameter(help="A GGUF file instead of the bundled model.", metavar="PATH")
    ] = None,
) -> int:
    """Start a private daemon and watch four clients stream at once.

    Without a terminal only the table at the end is printed. Exit status: 0 if all four clients got
    their answers and the daemon stopped cleanly.
    """
    return attempt(_demo, model)


async def _demo(model: str | None) -> int:
    panes = [Pane(f"client {n}", text) for n, text in enumerate(_REQUESTS, 1)]
    panes.append(Pane("client 4, long prompt", _LONG))
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        with _daemon(Path(folder), model) as path:
            await _watched(path, panes)
            console().print(_summary(panes))
            sys.stdout.write(await _kept(path))
        sys.stdout.write("The daemon stopped cleanly and its socket is removed.\n")
    return OK


@contextmanager
def _daemon(folder: Path, model: str | None) -> Iterator[Path]:
    """Run a daemon on a socket in `folder`. Raises :class:`Trouble` if it does not stop cleanly."""
    path, log = folder / "uma.sock", folder / "log"
    command = [sys.executable, "-m", "uma_trio", "serve", "--socket", str(path)]
    command += ["--http", "off"]  # the port is for the daemon that stays
    command += ["--log-level", "warning", *(["--model", model] if model else [])]
    env = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
    started = time.monotonic()
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C reaches only this process, which stops it.
        process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until_served(path, process.poll, log)
        sys.stdout.write(f"A daemon is ready after {time.monotonic() - started:.1f} s.\n")
        sys.stdout.flush()
        yield path
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode != 0 or path.exists():
        raise Trouble(f"The daemon ended with status {process.returncode}; try `uma-trio serve`.")


async def _watched(path: Path, panes: list[Pane]) -> None:
    from rich.live import Live

    out = console()
    drawn = Live(
        console=out, get_renderable=lambda: _grid(panes, out), refresh_per_second=_DRAWN_HZ
    )
    with drawn if out.is_terminal else nullcontext():
        await _four_clients(path, panes)


async def _four_clients(path: Path, panes: list[Pane]) -> None:
    import trio

    under_way = [trio.Event() for _ in panes]
    async with trio.open_nursery() as nursery:
        for pane, event in zip(panes[:-1], under_way, strict=False):
            nursery.start_soon(_client, path, pane, event)
        for event in under_way[:-1]:
            await event.wait()
        nursery.start_soon(_client, path, panes[-1], under_way[-1])


async def _client(path: Path, pane: Pane, under_way: trio.Event) -> None:
    """Stream one answer into its pane; set `under_way` after its first tokens."""
    from uma_trio.client import HELD_BACK, connect

    pane.asked, pane.state = time.monotonic(), "reading the prompt"
    async with connect(path) as client:
        generation = client.generate(
            messages=[{"role": "user", "content": pane.prompt}],
            max_tokens=_TOKENS,
            temperature=DEFAULT_TEMPERATURE,
            seed=len(pane.prompt),
            app="uma-trio demo",
        )
        async for token in generation:
            pane.text += token.text
            if token.token_id != HELD_BACK:  # the last piece, which belongs to no single token
                pane.came.append(time.monotonic())
                pane.state = "streaming"
            if len(pane.came) >= _UNDER_WAY:
                under_way.set()
    pane.state = f"ended by {generation.eos.reason}" if generation.eos else "cut off"
    under_way.set()


async def _kept(path: Path) -> str:
    """Return how many tokens were later than promised, and the promise."""
    from uma_trio.client import Client

    figures = await Client(path).metrics()
    late = sum((figures.get("late_tokens_total") or {}).values())
    step, shown = figures.get("step_ms"), figures["interactive_shown_ms"]["count"]
    promise = f", a token every {step:.0f} ms" if step else ""
    return f"{late:,} of {shown:,} tokens were later than promised beside other work{promise}.\n"


def _grid(panes: list[Pane], out: Console) -> Table:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    height = max(5, min(_HEIGHT, out.height - 8) // 2)
    width = max(1, out.width // 2 - 4)
    drawn = []
    for pane in panes:
        lines = Text(harmless(pane.text)).wrap(out, width)[-(height - 3) :]
        asked = Text(pane.prompt.partition("\n")[0], style="dim", overflow="ellipsis", no_wrap=True)
        status = f"{pane.state}, {len(pane.came)} tokens, {pane.rate:.0f}/s"
        body = Group(asked, *lines)
        drawn.append(
            Panel(body, title=pane.name, subtitle=status, title_align="left", height=height)
        )
    grid = Table.grid(expand=True)
    for _ in range(2):
        grid.add_column(ratio=1)
    grid.add_row(*drawn[:2])
    grid.add_row(*drawn[2:])
    return grid


def _summary(panes: list[Pane]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("CLIENT", no_wrap=True)
    for heading in ("PROMPT", "FIRST TOKEN", "TOKENS", "TOKENS/S", "WORST GAP"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pane in panes:
        first = duration(pane.came[0] - pane.asked) if pane.came else "-"
        worst = duration(max(pane.gaps)) if pane.gaps else "-"
        prompt, tokens = f"{len(pane.prompt)} characters", str(len(pane.came))
        table.add_row(pane.name, prompt, first, tokens, f"{pane.rate:.1f}", worst)
    return table
