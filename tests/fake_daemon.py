"""A real daemon process on the fake model: ``python tests/fake_daemon.py SOCKET [key=value ...]``.

Prints ``ready`` when clients can connect, and ``computing`` at the first decode. Keys are fields of the configuration, and `cost`
(seconds a tick takes) and `die` (the decode at which the engine breaks) of the fake.
"""

from __future__ import annotations

import sys
import time

import trio

from uma_trio import daemon
from uma_trio.backend.base import Overlap, nothing
from uma_trio.backend.fake import FakeBackend, Fault
from uma_trio.config.options import OPTIONS, Config
from uma_trio.config.settings import flag_key, load
from uma_trio.engine.task import EngineDied
from uma_trio.sockets.listener import SocketTaken
from uma_trio.telemetry import log


class SlowBackend(FakeBackend):
    """The fake model on a machine that takes real time for a tick."""

    tick_s = 0.0

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute, and take the time."""
        if not self.decodes:
            print("computing", flush=True)
        status = super().decode(n_tokens, while_computing)
        time.sleep(self.tick_s)
        return status


def main(arguments: list[str]) -> int:
    """Serve until told to stop."""
    path, *rest = arguments
    given = dict(item.split("=", 1) for item in rest)
    cost, die = float(given.pop("cost", "0")), int(given.pop("die", "-1"))
    given.setdefault("policy", "baseline")  # which measures nothing before it is ready
    flags = {option.name: flag_key(option.flag) for option in OPTIONS}
    config = load({"socket": path, **{flags[name]: text for name, text in given.items()}}, env={})
    backend = SlowBackend(
        n_ctx=config.n_ctx,
        n_slots=config.parallel,
        faults={die: Fault(died="told to")} if die >= 0 else None,
    )
    backend.tick_s = cost
    log.configure("warning")
    try:
        trio.run(serve, config, backend)
    except SocketTaken as taken:
        print(taken, flush=True)
        return 75
    except EngineDied as died:
        print(died, flush=True)
        return 70
    return 0


async def serve(config: Config, backend: FakeBackend) -> None:
    """Serve, and say when it is ready."""
    await daemon.serve(config, backend=backend, on_ready=lambda _: print("ready", flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
