"""Record a real run to validate the simulation against: a daemon, a model, a mix of applications.

    python -m benches record storm run.trace --seconds 30
    uma-trio simulate --validate --trace run.trace

Each application is a process of its own, as the daemon tells clients apart by that. When the time
is over they are ended in the middle of what they do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benches import report
from benches.clients import Job, Wire, jobs
from benches.driver import tool
from benches.live import drive
from benches.model import NoVocabulary, bench_model
from benches.servers import DidNotStart, Setup, daemon
from uma_trio_sim.workload import WORKLOADS, Session, sessions

_CELLS = 32_768


def play(
    mix: str, trace: Path, setup: Setup, flags: Sequence[str], seconds: float, seed: int
) -> None:
    """Run the mix on a fresh daemon for `seconds`. Raises :class:`DidNotStart`."""
    spawn = multiprocessing.get_context("spawn")
    with daemon(setup, extra=[*flags, "--trace", str(trace.resolve())]) as running:
        clients = [
            spawn.Process(target=_client, args=(running.wire, mix, client, seconds, seed))
            for client, _ in enumerate(WORKLOADS[mix], start=1)
        ]
        for process in clients:
            process.start()
        time.sleep(seconds)
        for process in clients:
            process.terminate()
        for process in clients:
            process.join()


def _client(wire: Wire, mix: str, client: int, seconds: float, seed: int) -> None:
    """Be one application, in a process of its own."""
    began = time.monotonic()
    mine = [s for s in sessions(WORKLOADS[mix], seed, seconds) if s.client == client]
    threads = [
        threading.Thread(target=_session, args=(wire, session, began, f"{seed}/{client}/{n}"))
        for n, session in enumerate(mine)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _session(wire: Wire, session: Session, began: float, salt: str) -> None:
    time.sleep(max(0.0, began + session.start - time.monotonic()))
    for n, turn in enumerate(session.turns):
        time.sleep(turn.think_s)
        (job,) = jobs(1, turn.prompt, turn.answer, f"{salt}/{n}")
        drive(wire, [Job(f"{salt}/{n}", job.prompt, turn.answer, session.lane)])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("workload", choices=WORKLOADS)
    add("trace", type=Path, help="the file to write")
    add("--seconds", type=float, default=30.0)
    add("--seed", type=int, default=0)
    add("--policy", default="deadline")
    add("--cap", type=float, default=1.2, help="latency cap of the contract")
    add("--model", type=Path, help="GGUF to use (UMA_BENCH_MODEL)")
    add("--threads", type=int, default=2, help="compute threads")


@tool(arguments)
def record(given: argparse.Namespace) -> int:
    """Record one run."""
    flags = ["--policy", given.policy, "--latency-cap", f"{given.cap:g}"]
    try:
        setup = Setup(bench_model(given.model), given.threads, _CELLS)
        play(given.workload, given.trace, setup, flags, given.seconds, given.seed)
    except (NoVocabulary, DidNotStart) as error:
        raise SystemExit(str(error)) from None
    report.note(f"{given.trace}: {given.workload}, {given.seconds:g} s, seed {given.seed}")
    return 0
