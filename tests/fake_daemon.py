"""A real daemon process on the fake model: ``python tests/fake_daemon.py SOCKET [key=value ...]``.

Prints ``ready`` when clients can connect, and ``computing`` at the first decode. Keys are fields of the
configuration, and `cost` (seconds a tick takes), `each` (seconds of each token besides), `rows` (tokens of a tick), `die` (the decode at which the engine breaks) and
`script` of the fake: a file with a JSON list of what it says, prompt by prompt, whatever the temperature.
A SOCKET of ``-`` stands for the default paths.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import trio
from reply_kit import THINKING_TEMPLATE

from uma_trio.app import daemon
from uma_trio.backend.base import FloatArray, Overlap, nothing
from uma_trio.config.options import OPTIONS, Config
from uma_trio.config.settings import load
from uma_trio.engine.inbox import EngineDied
from uma_trio.observe import log
from uma_trio.sockets.handover import HandoverFailed
from uma_trio.sockets.inherited import inherited_sockets
from uma_trio.sockets.listener import SocketTaken
from uma_trio.sockets.supervisor import Supervisor
from uma_trio_sim.fake import FakeBackend, InjectedFault
from uma_trio_sim.scripted import ScriptedBackend


class SlowBackend(FakeBackend):
    """The fake model on a machine that takes real time for a tick."""

    tick_s = token_s = 0.0

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute, and take the time."""
        if not self.decodes:
            print("computing", flush=True)
        status = super().decode(n_tokens, while_computing)
        time.sleep(self.tick_s + self.token_s * n_tokens)
        return status


class Speaker(ScriptedBackend):
    """A model that has read its script and knows tools and thoughts; it says nothing else."""

    def __init__(self, script: str) -> None:
        replies = json.loads(Path(script).read_text(encoding="utf-8"))
        said = [list(reply.encode()) for reply in replies]
        super().__init__(said, n_ctx=1 << 20, n_batch=4096, chat_template=THINKING_TEMPLATE)

    def _fill_row(self, row: FloatArray, history: int) -> None:
        super()._fill_row(row, history)
        row[self._choice(history)] = 100.0


def main(arguments: list[str]) -> int:
    """Serve until told to stop."""
    path, *rest = arguments
    given = dict(item.split("=", 1) for item in rest)
    cost, die = float(given.pop("cost", "0")), int(given.pop("die", "-1"))
    rows, each = int(given.pop("rows", "128")), float(given.pop("each", "0"))
    script, replace = given.pop("script", None), "replace" in given
    given.pop("replace", None)
    # Nothing is measured; many run at once, and the default port is for a test of its own.
    given = {"policy": "baseline", "n_ctx": "4096", "parallel": "8", "http": "off", **given}
    flags = {option.name: option.key for option in OPTIONS}
    told = {} if path == "-" else {"socket": path}
    env = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR",) if name in os.environ}
    config = load({**told, **{flags[name]: text for name, text in given.items()}}, env=env)
    backend = Speaker(script) if script else slow(config, cost, die, rows)
    if isinstance(backend, SlowBackend):
        backend.token_s = each
    log.configure("warning")
    try:
        trio.run(serve, config, backend, replace)
    except (SocketTaken, HandoverFailed) as taken:
        print(taken, flush=True)
        return 75
    except EngineDied as died:
        print(died, flush=True)
        return 70
    return 0


def slow(config: Config, cost: float, die: int, rows: int = 128) -> SlowBackend:
    """Return the fake model on a machine that takes `cost` seconds for a tick of so many `rows` at the most."""
    backend = SlowBackend(
        n_ctx=config.cells,
        n_slots=config.slots,
        n_batch=max(rows, config.slots),
        faults={die: InjectedFault(died="told to")} if die >= 0 else None,
    )
    backend.tick_s = cost
    return backend


async def serve(config: Config, backend: FakeBackend, replace: bool) -> None:
    """Serve, on what a supervisor passed if one did, and say when it is ready."""
    await daemon.serve(
        config,
        backend=backend,
        on_ready=lambda _: print("ready", flush=True),
        inherited=inherited_sockets(os.environ),
        supervisor=Supervisor.of(os.environ, os.getpid()),
        replace=replace,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
