"""`uma-trio demo`: a private daemon, four clients at once, and what each of them felt.

Three clients stream; when all of them do, a fourth sends a prompt a hundred times as long. The
daemon is a process of its own on a temporary socket, started and stopped as a user would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from uma_trio.cli.attempt import attempt
from uma_trio.cli.demo_pane import Pane
from uma_trio.cli.output import OK, Trouble

if TYPE_CHECKING:
    import trio

    from uma_trio.client import Client

_PATIENCE_S = 120.0
_REQUESTS = (
    "Tell me a story about a fox and a lantern.",
    "Tell me a story about a penguin and a violin.",
    "Write a short tale about a baker and a kite.",
)
_QUESTION = "\n\nWhat is the first sentence of this text?"
_SENTENCE = "One day the little fox walked to the river to look for her friend the old heron. "
_TOKENS = 240
_LONG_CHARACTERS = 3000
_UNDER_WAY = 8  # tokens that each of the three has before the fourth comes


def demo(
    *,
    model: Annotated[
        str | None, Parameter(help="A GGUF file instead of the bundled model.", metavar="PATH")
    ] = None,
    plain: Annotated[
        bool | None, Parameter(help="Print lines instead of panes; the default without a terminal.")
    ] = None,
) -> int:
    """Start a private daemon and watch four clients stream at once.

    Exit status: 0 if all four clients got their answers and the daemon stopped cleanly.
    """
    lines = plain if plain is not None else not sys.stdout.isatty() or bool(os.environ.get("CI"))
    return attempt(_demo, model, lines)


async def _demo(model: str | None, lines: bool) -> int:
    import trio

    from uma_trio.cli.demo_view import LineView, PaneView, summary

    panes = [Pane(f"client {n}", text) for n, text in enumerate(_REQUESTS, 1)]
    text = _SENTENCE * (_LONG_CHARACTERS // len(_SENTENCE))
    panes.append(Pane("client 4, long prompt", text + _QUESTION))
    view = LineView(panes) if lines else PaneView(panes)
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        async with _daemon(Path(folder), model) as path:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(view.run)
                await _four_clients(path, panes)
                view.stop()
            summary(panes)
        sys.stdout.write("The daemon stopped cleanly and its socket is gone.\n")
    return OK


@asynccontextmanager
async def _daemon(folder: Path, model: str | None) -> AsyncIterator[Path]:
    """Run a daemon on a socket in `folder`; on the way out stop it and see that it was clean."""
    import trio

    path, log = folder / "uma.sock", folder / "log"
    command = [sys.executable, "-m", "uma_trio.cli.main", "serve", "--socket", str(path)]
    command += ["--log-level", "warning", *(["--model", model] if model else [])]
    env = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
    with log.open("wb") as output:
        process = await trio.lowlevel.open_process(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that Ctrl-C reaches us alone, and we stop it
        )
    started = time.monotonic()
    try:
        await _ready(process, path, log)
        sys.stdout.write(f"A daemon is ready after {time.monotonic() - started:.1f} s.\n")
        sys.stdout.flush()
        yield path
    finally:
        with trio.CancelScope(shield=True):
            await _stop(process)
    if process.returncode != 0 or path.exists():
        raise Trouble(f"The daemon ended with status {process.returncode}. {_last_words(log)}")


async def _ready(process: trio.Process, path: Path, log: Path) -> None:
    """Wait until somebody serves on `path`."""
    import trio

    from uma_trio.client import ConnectionFailed, connect

    with trio.move_on_after(_PATIENCE_S):
        while process.poll() is None:
            try:
                async with connect(path):
                    return
            except ConnectionFailed:
                await trio.sleep(0.05)
        raise Trouble(f"The daemon did not start: {_last_words(log)}")
    raise Trouble(f"The daemon was not ready within {_PATIENCE_S:.0f} s: {_last_words(log)}")


async def _stop(process: trio.Process) -> None:
    import trio

    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with trio.move_on_after(_PATIENCE_S):
        await process.wait()
        return
    process.kill()
    await process.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-5:]) or "It said nothing."


async def _four_clients(path: Path, panes: list[Pane]) -> None:
    import trio

    under_way = [trio.Event() for _ in panes[:-1]]
    async with trio.open_nursery() as nursery:
        for pane, event in zip(panes, under_way, strict=False):
            nursery.start_soon(_client, path, pane, event)
        for event in under_way:
            await event.wait()
        nursery.start_soon(_client, path, panes[-1], trio.Event())


async def _client(path: Path, pane: Pane, under_way: trio.Event) -> None:
    """Stream one answer into its pane."""
    from uma_trio.client import ServerError, connect

    while True:
        pane.asked, pane.state = time.monotonic(), "reading the prompt"
        try:
            async with connect(path) as client:
                await _stream(client, pane, under_way)
        except ServerError as error:
            if pane.tokens or not _made_easier(pane, error.code):
                raise
        else:
            under_way.set()
            return


def _made_easier(pane: Pane, code: str) -> bool:
    """Ask for less, if that is what the model needs; False if there is nothing to be done."""
    if code == "E_MODEL_002" and pane.chat:
        pane.chat = False  # no chat template: the prompt goes as it is
        return True
    if code == "E_LIMIT_004" and len(pane.prompt) >= 200:
        pane.prompt = pane.prompt[len(pane.prompt) // 3 :]
        return True
    return False


async def _stream(client: Client, pane: Pane, under_way: trio.Event) -> None:
    from uma_trio.client import HELD_BACK

    generation = client.generate(
        None if pane.chat else pane.prompt,
        messages=[{"role": "user", "content": pane.prompt}] if pane.chat else None,
        max_tokens=_TOKENS,
        temperature=0.7,
        seed=len(pane.prompt),
        app="uma-trio demo",
    )
    async for token in generation:
        if token.token_id == HELD_BACK:
            pane.held_back(token.text)
            continue
        pane.saw(token.text, time.monotonic())
        if pane.tokens >= _UNDER_WAY:
            under_way.set()
    pane.state = f"ended by {generation.eos.reason}" if generation.eos else "cut off"
