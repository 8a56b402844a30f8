"""The daemon with a meter in its compute call: run by the benchmarks, never by hand.

    python -m benches.metered METER serve --model … --socket …      the real daemon
    python -m benches.metered METER --tick-ms 20 serve --socket …   on the fake backend, paced

The meter counts the CPU time that the engine's thread spends inside ``llama_decode``, and apart from
it the time it spends choosing tokens, which is reading a row of the vocabulary's width for each.
Nothing else of the daemon is touched. With the CPU time of each thread from the operating system that
gives what the daemon itself costs: all of its Python threads less that. The meter lists Python's
threads; the others are OpenMP's.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma_trio.config.options import Config

if TYPE_CHECKING:
    from uma_trio.backend.base import Backend

_SUMS = struct.Struct("<ddqq")
_MOST_THREADS = 64
_SIZE = _SUMS.size + 8 * _MOST_THREADS


@dataclass(frozen=True)
class Reading:
    """What a meter says at one moment. Seconds of CPU since the daemon started."""

    cpu_s: float
    choosing_s: float
    calls: int
    engine: int  # the thread that decodes
    threads: frozenset[int]  # every thread of Python's

    @classmethod
    def of(cls, path: Path) -> Reading:
        """Read the meter of a running daemon."""
        data = path.read_bytes()
        threads = struct.unpack_from(f"<{_MOST_THREADS}q", data, _SUMS.size)
        return cls(*_SUMS.unpack_from(data), frozenset(threads) - {0})


class Meter:
    """Wraps the one call that computes, and shows its sums in the file `path`."""

    def __init__(self, path: Path, decode: Callable[..., int]) -> None:
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._shown = mmap.mmap(file.fileno(), _SIZE)
        self._decode = decode
        self._cpu_ns = self._choosing_ns = self._calls = 0
        self._threads: set[int] = set()

    def __call__(self, *arguments: object) -> int:
        """Decode, and add up what it took. Its own work counts as decoding, not as the daemon's."""
        began = time.thread_time_ns()
        status = self._decode(*arguments)
        self._calls += 1
        self._threads |= {t.native_id for t in threading.enumerate() if t.native_id}
        newest = sorted(self._threads)[-_MOST_THREADS:]
        struct.pack_into(f"<{len(newest)}q", self._shown, _SUMS.size, *newest)
        now = time.thread_time_ns()
        self._cpu_ns += now - began
        engine = threading.get_native_id()
        sums = self._cpu_ns / 1e9, self._choosing_ns / 1e9, self._calls, engine
        _SUMS.pack_into(self._shown, 0, *sums)
        # What showing took is shown by the next call: else it would count as the daemon's work.
        self._cpu_ns += time.thread_time_ns() - now
        return status

    def choosing(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        """Return `choose`, timed."""

        def timed(*arguments: object) -> object:
            began = time.thread_time_ns()
            try:
                return choose(*arguments)
            finally:
                self._choosing_ns += time.thread_time_ns() - began

        return timed


def _serve_real(path: Path, arguments: list[str]) -> None:
    from uma_trio.config.hardware import limit_spinning

    limit_spinning()  # as the daemon does, which would be too late once the library is loaded
    from uma_trio.backend import _llama_lib as lib
    from uma_trio.cli.main import main as cli

    lib.decode = meter = Meter(path, lib.decode)
    _time_choosing(meter)
    sys.argv = ["uma-trio", *arguments]
    cli()


def _time_choosing(meter: Meter) -> None:
    from uma_trio.engine.sampling import TickSampler

    TickSampler.__call__ = meter.choosing(TickSampler.__call__)  # type: ignore[method-assign]


def fake_config(arguments: list[str]) -> Config:
    """Return the options of a daemon that has no model, from the command line behind ``serve``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--policy", default="baseline")
    parser.add_argument("--latency-cap", type=float, default=Config().latency_cap)
    parser.add_argument("--http", default="off")
    parser.add_argument("--http-max-connections", type=int, default=256)
    parser.add_argument("--max-queue", type=int, default=256)
    options, _ = parser.parse_known_args(arguments)
    return Config(
        socket=options.socket,
        parallel=options.parallel,
        n_ctx=1 << 16,
        policy=options.policy,
        latency_cap=options.latency_cap,
        http=options.http,
        http_max_connections=options.http_max_connections,
        max_queue=options.max_queue,
    )


def serve_on(backend: Backend, config: Config) -> None:
    """Run a daemon on `backend` until it is told to stop. It says when it is ready, as `serve` does."""
    import trio

    from uma_trio.app import daemon
    from uma_trio.cli.serve import LoadProgress

    async def serve() -> None:
        await daemon.serve(config, backend=backend, on_ready=LoadProgress().ready)

    trio.run(serve)


def _serve_fake(path: Path, arguments: list[str], tick_s: float) -> None:
    from uma_trio.backend.base import Overlap, nothing
    from uma_trio_sim.fake import FakeBackend

    config = fake_config(arguments)
    # A byte is a token here, so prompts are long: there must be room for them. As in the real one,
    # a policy that knows what ticks cost has a slot more, for rows that are thrown away.
    slots = config.slots + (config.policy != "baseline")
    backend = FakeBackend(n_ctx=1 << 16, n_slots=slots, n_batch=4096)
    compute = backend.decode

    def paced(n_tokens: int, while_computing: Overlap = nothing) -> int:
        status = compute(n_tokens, while_computing)
        # Lets go of the interpreter, as the call into llama.cpp does; a long prompt costs more.
        time.sleep(tick_s * (1 + n_tokens / 256))
        return status

    backend.decode = meter = Meter(path, paced)  # type: ignore[assignment,method-assign]
    _time_choosing(meter)
    serve_on(backend, config)


def main(argv: list[str] | None = None) -> None:
    """Run the daemon as the rest of the command line says."""
    path, *rest = sys.argv[1:] if argv is None else argv
    if rest[0] == "--tick-ms":
        _serve_fake(Path(path), rest[2:], float(rest[1]) / 1e3)
    else:
        _serve_real(Path(path), rest)


if __name__ == "__main__":
    main()
