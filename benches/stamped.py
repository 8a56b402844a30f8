"""The daemon with a time stamp at each step of a token's way: run by a benchmark, never by hand.

    python -m benches.stamped FILE serve --model … --socket …      the daemon
    python -m benches.stamped FILE --bare MODEL --streams 4 --tokens 160 --n-ctx 4096    no daemon

Both write FILE when they end: a line of JSON with the times of each step, in seconds of
``time.perf_counter``, which on Linux is one clock for all processes. *collected* has when each collection
of garbage ended, and *reused* how many graphs llama.cpp had reused by the end of each call. The second runs
the calls that nobody can do without, in a loop: decode, read the logits, take the largest.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

STEPS = (
    "decode",
    "decoded",
    "waited",
    "computed",
    "sampled",
    "handed",
    "sent",
    "collected",
    "reused",
)
"""llama_decode is called and comes back; the wait for its end begins and ends; tokens are chosen; they are
handed to trio's thread; bytes are written to a socket."""


class Stamps:
    """The times of each step, written to a file when the process ends."""

    def __init__(self, path: Path) -> None:
        self.times: dict[str, list[float]] = {step: [] for step in STEPS}
        atexit.register(lambda: path.write_text(json.dumps(self.times)))
        gc.callbacks.append(self._collected)

    def decoding(self, decode: Callable[..., int]) -> Callable[..., int]:
        """Return `decode` with a stamp on either side, and the count of graphs that were reused."""
        from uma_trio.backend._llama_binding import llama

        stamped, reused = self.around(decode, "decode", "decoded"), self.times["reused"]

        def counted(context: int, batch: Any) -> int:
            status: int = stamped(context, batch)
            reused.append(llama.llama_perf_context(context).n_reused)
            return status

        return counted

    def _collected(self, phase: str, _found: dict[str, int]) -> None:
        if phase == "stop":
            self.times["collected"].append(perf_counter())

    def around(
        self, call: Callable[..., Any], before: str | None = None, after: str | None = None
    ) -> Callable[..., Any]:
        """Return `call`, with a stamp on either side where a step is named for it."""
        first = self.times[before] if before else None
        last = self.times[after] if after else None

        def stamped(*arguments: Any) -> Any:
            if first is not None:
                first.append(perf_counter())
            result = call(*arguments)
            if last is not None:
                last.append(perf_counter())
            return result

        return stamped


def _serve(stamps: Stamps, arguments: list[str]) -> None:
    from uma_trio.machine import limit_spinning

    limit_spinning()  # as the daemon does, which would be too late once the library is loaded
    from uma_trio.backend import _llama_lib as lib
    from uma_trio.backend._llama_compute import Compute
    from uma_trio.cli.main import main as cli
    from uma_trio.engine.outlet import Outlet
    from uma_trio.engine.sampling import TickSampler
    from uma_trio.sockets.transport import Transport

    lib.decode = stamps.decoding(lib.decode)
    lib.synchronize = stamps.around(lib.synchronize, "waited")
    patched: list[tuple[Any, str, dict[str, str]]] = [
        (Compute, "__call__", {"after": "computed"}),
        (TickSampler, "__call__", {"after": "sampled"}),
        (Outlet, "deliver", {"before": "handed"}),
        (Transport, "send_nowait", {"after": "sent"}),
    ]
    for owner, name, steps in patched:
        # A plain function in place of a method binds as a method does.
        setattr(owner, name, stamps.around(getattr(owner, name), **steps))
    sys.argv = ["uma-trio", *arguments]
    cli()


def _bare(stamps: Stamps, arguments: list[str]) -> None:
    from uma_trio.machine import limit_spinning

    limit_spinning()
    import numpy as np

    from uma_trio.backend import _llama_lib as lib
    from uma_trio.backend.llama import LlamaBackend

    parser = argparse.ArgumentParser()
    parser.add_argument("--bare", type=Path)
    for name in ("--streams", "--tokens", "--n-ctx", "--prompt-tokens", "--threads"):
        parser.add_argument(name, type=int)
    given = parser.parse_args(arguments)
    k, prompt = given.streams, given.prompt_tokens
    backend = LlamaBackend.load(
        given.bare, n_ctx=given.n_ctx, n_slots=k, threads=given.threads, n_batch=512
    )
    batch = backend.batch
    for slot in range(k):
        batch.token[:prompt] = 100 + slot
        batch.slot[:prompt] = slot
        batch.pos[:prompt] = np.arange(prompt)
        batch.want[:prompt] = 0
        backend.decode(prompt)
    batch.token[:k], batch.slot[:k], batch.want[:k] = 100, np.arange(k), 1
    lib.decode = stamps.decoding(lib.decode)
    lib.synchronize = stamps.around(lib.synchronize, "waited")
    for nth in range(given.tokens):
        batch.pos[:k] = prompt + nth
        if status := backend.decode(k):
            raise SystemExit(f"llama_decode returned {status}")
        stamps.times["computed"].append(perf_counter())
        rows = backend.logits(k)
        batch.token[:k] = [int(row.argmax()) for row in rows]
        stamps.times["sampled"].append(perf_counter())
    backend.close()


def main(argv: list[str] | None = None) -> None:
    """Run the daemon, or the loop, as the command line says."""
    path, *rest = sys.argv[1:] if argv is None else argv
    stamps = Stamps(Path(path))
    (_bare if rest[0] == "--bare" else _serve)(stamps, rest)


if __name__ == "__main__":
    main()
