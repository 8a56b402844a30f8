"""What the daemon itself costs: microseconds of its CPU for each streamed token, ggml left out.

    python -m benches.ipc_overhead            medians of 3 (about 10 minutes)
    python -m benches.ipc_overhead --quick    a short look (about 2 minutes)
    python -m benches.ipc_overhead --no-peers --skip-real   without a model

Three ways to look, as none of them alone is the whole truth:

* *paced fake*: a backend that computes nothing and takes as long as a real tick. Everything but
  llama.cpp and the vocabulary's width: planning, batching, doors, JSON, sockets. Its caches are
  warmer than a real daemon's, whose model runs through them in every tick.
* *real*: the 0.5B model. CPU of the trio thread, plus that of the engine's thread less its time
  inside ``llama_decode``, plus helper threads; OpenMP's threads are ggml's. Includes `choosing`,
  finding the likeliest of 151,936 logits, which is shown apart because it is the memory's speed
  more than ours. The sum is the figure that has the target.
* *path*: a model so tiny that computing it hardly counts, one compute thread, flat out. All CPU of
  the process, ours (UDS, framed JSON) and llama-server's (HTTP, SSE), by the same client.

CPU is measured from the first request sent to the last token read, so requests, prompts and
connections are in it; longer streams spread them thinner.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches import chart, clients, frames, host, report, servers
from benches.metered import Reading
from benches.model import tiny_model
from benches.rates import end_to_end
from benches.setting import model_or_exit, setting
from uma_trio.sim.latency import median

TARGET_US = 60.0
TARGET_K = 8
_PROMPT_TOKENS = 16
_WARM_UP_TOKENS = 16
_TICK_MS = {1: 8.0, 8: 20.0}  # what the real model takes on the machine of docs/BENCHMARKS.md


_PARTS = ("outside", "trio", "engine", "choosing", "helpers", "ggml")


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU per token, by where they were spent."""

    trio: float
    engine: float  # without choosing tokens
    choosing: float
    helpers: float
    ggml: float

    @property
    def outside(self) -> float:
        """Everything that is not ggml."""
        return self.trio + self.engine + self.choosing + self.helpers


@dataclass(frozen=True)
class Usage:
    """The threads of a process and its meter, at one moment."""

    threads: dict[int, float]
    reading: Reading

    @classmethod
    def of(cls, pid: int, meter: Path) -> Usage:
        """Look at a metered daemon."""
        return cls(host.thread_cpu_s(pid), Reading.of(meter))


def cost(pid: int, before: Usage, after: Usage, tokens: int) -> Cost:
    """Return what `tokens` tokens cost between two looks at the daemon `pid`."""
    reading = after.reading
    spent = {
        thread: seconds - before.threads.get(thread, 0.0)
        for thread, seconds in after.threads.items()
    }
    inside = reading.cpu_s - before.reading.cpu_s
    choosing = reading.choosing_s - before.reading.choosing_s
    python = {thread for thread in spent if thread in reading.threads}
    helpers = sum(spent[thread] for thread in python - {pid, reading.engine})
    others = sum(seconds for thread, seconds in spent.items() if thread not in python | {pid})
    scale = 1e6 / tokens
    return Cost(
        trio=spent[pid] * scale,
        engine=(spent[reading.engine] - inside - choosing) * scale,
        choosing=choosing * scale,
        helpers=helpers * scale,
        ggml=(inside + others) * scale,
    )


@dataclass(frozen=True)
class Run:
    """One load on one server: what the client saw and what the process took."""

    ttft_ms: float
    tokens_per_s: float
    cpu_pct: float
    cpu_us: float
    foreign_pct: float
    cost: Cost | None = None


def measure(
    running: servers.Running, k: int, gen_tokens: int, seed: str, meter: Path | None
) -> Run:
    """Warm a server up, stream `k` times `gen_tokens` from it, and account for the CPU.

    Raises:
        clients.NotServed: a stream did not bring what was asked for.
    """
    for n, name in ((_WARM_UP_TOKENS, "warm"), (gen_tokens, "load")):
        work = clients.jobs(k, _PROMPT_TOKENS, n, f"{seed}/{name}")
        foreign = host.Foreign(running.pid)
        before = Usage.of(running.pid, meter) if meter else None
        threads, began = host.thread_cpu_s(running.pid), time.perf_counter()
        answers = clients.checked(clients.drive(running.wire, work))
        seconds = time.perf_counter() - began
        # The server may still be closing connections, which belongs to the load.
        time.sleep(0.05)
    after = host.thread_cpu_s(running.pid)
    cpu_s = sum(after[thread] - threads.get(thread, 0.0) for thread in after)
    tokens = k * gen_tokens
    return Run(
        ttft_ms=1e3 * median([answer.ttft_s or 0.0 for answer in answers]),
        tokens_per_s=end_to_end([a.sent for a in answers], [a.times for a in answers]) or 0.0,
        cpu_pct=100 * cpu_s / seconds,
        cpu_us=cpu_s * 1e6 / tokens,
        foreign_pct=foreign.percent(),
        cost=cost(running.pid, before, Usage.of(running.pid, meter), tokens)
        if before and meter
        else None,
    )


Start = Callable[[Path], contextlib.AbstractContextManager[servers.Running]]


@dataclass(frozen=True)
class Case:
    """Something to measure: how to start it, and whether it has a meter."""

    look: str
    path: str
    k: int
    start: Start
    metered: bool = True


def cases(
    given: argparse.Namespace, model: Path | None, folder: Path | None, threads: int
) -> Iterator[Case]:
    """Yield everything that is compared."""
    for k in given.k:
        fake = servers.Setup(Path("fake"), threads, slots=max(given.k))
        tick = str(_TICK_MS.get(k, 20.0))
        yield Case("paced fake", "uds-json", k, _ours(fake, "--tick-ms", tick))
        if model is not None:
            real = servers.Setup(model, threads, slots=max(given.k))
            yield Case("real", "uds-json", k, _ours(real))
            if folder is not None:
                yield Case("real", "http-sse", k, _theirs(folder, real, k), metered=False)
        if folder is not None:
            tiny = servers.Setup(tiny_model(), 1, slots=max(given.k))
            yield Case("path", "uds-json", k, _ours(tiny))
            yield Case("path", "http-sse", k, _theirs(folder, tiny, k), metered=False)


def _ours(setup: servers.Setup, *options: str) -> Start:
    return lambda meter: servers.daemon(setup, servers.metered(meter, *options))


def _theirs(folder: Path, setup: servers.Setup, k: int) -> Start:
    return lambda _meter: servers.llama_server(folder, setup, servers.server_flags("np-kvu", k))


def run(case: Case, given: argparse.Namespace, seed: str) -> Run:
    """Measure one case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="meter-") as folder:
        meter = Path(folder) / "meter"
        with case.start(meter) as running:
            return measure(running, case.k, given.gen_tokens, seed, meter if case.metered else None)


def row(case: Case, runs: Sequence[Run]) -> dict[str, object]:
    """Return the medians of a case; `path`, `ttft_ms` and `cpu_pct` are the seeds' columns."""

    def middle(pick: Callable[[Run], float | None]) -> float | None:
        values = [value for one in runs if (value := pick(one)) is not None]
        return median(values) if values else None

    def part(name: str) -> float | None:
        return middle(lambda one: getattr(one.cost, name) if one.cost else None)

    return {
        "path": case.path,
        "ttft_ms": middle(lambda one: one.ttft_ms),
        "cpu_pct": middle(lambda one: one.cpu_pct),
        "look": case.look,
        "k": case.k,
        "n": len(runs),
        "tokens_per_s": middle(lambda one: one.tokens_per_s),
        "cpu_us_per_token": middle(lambda one: one.cpu_us),
        **{f"{name}_us": part(name) for name in _PARTS},
        "foreign_pct": middle(lambda one: one.foreign_pct),
    }


def verdict(rows: Sequence[dict[str, object]]) -> str:
    """Say whether the target is met."""
    for found in rows:
        outside = found["outside_us"]
        if found["look"] == "real" and found["k"] == TARGET_K and isinstance(outside, float):
            met = "met" if outside <= TARGET_US else "MISSED"
            return (
                f"k={TARGET_K}, real: {outside:.1f} us of CPU per token outside ggml, "
                f"{report.cell(found['choosing_us'], 1)} of them choosing it "
                f"(target {TARGET_US:.0f}: {met})"
            )
    return f"the target ({TARGET_US:.0f} us at k={TARGET_K} on the real model) was not measured"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = report.parser("ipc_overhead", __doc__)
    report.common_arguments(parser)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 8], metavar="K")
    parser.add_argument("--repetitions", type=int, metavar="N")
    parser.add_argument("--gen-tokens", type=int, metavar="N")
    parser.add_argument("--skip-real", action="store_true", help="leave the 0.5B model out")
    given = parser.parse_args(argv)
    given.skip_real = given.skip_real or given.dry_run
    short = given.quick or given.dry_run
    given.repetitions = given.repetitions or (1 if short else 3)
    given.gen_tokens = given.gen_tokens or (64 if short else 256)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the CSV."""
    given = arguments(argv)
    here, model = setting(given), None if given.skip_real else model_or_exit(given)
    facts = here.facts(gen_tokens=given.gen_tokens)
    report.print_facts(facts)
    wanted = list(cases(given, model, here.peers, here.threads))
    runs: dict[int, list[Run]] = {}
    failed = False
    for repetition in range(given.repetitions):
        for i, case in enumerate(wanted):
            try:
                runs.setdefault(i, []).append(run(case, given, f"{here.seed}/{repetition}"))
            except (clients.NotServed, servers.DidNotStart, OSError) as failure:
                failed = True
                report.note(f"{case.look}, {case.path}, k={case.k}: {failure}")
            report.note(
                f"  {repetition + 1}/{given.repetitions} {case.look} {case.path} k={case.k}"
            )
    rows = [row(case, runs[i]) for i, case in enumerate(wanted) if runs.get(i)]
    _print(rows)
    print(f"\n{report.write_csv('ipc_overhead', rows, facts)}")
    for file in draw(rows, facts):
        print(file)
    return 1 if failed else 0


def draw(rows: Sequence[dict[str, object]], facts: dict[str, str]) -> list[Path]:
    """Draw what a token costs: the daemon outside ggml, and each path as a whole."""
    outside, whole = (
        {f"{r['look']}, {r['path']}, k={r['k']}": v for r in rows if isinstance(v := r[key], float)}
        for key in ("outside_us", "cpu_us_per_token")
    )
    panels = {"us of CPU a token outside ggml": outside, "us of CPU a token, all of it": whole}
    return chart.bars(
        "ipc_overhead", panels, {"us of CPU a token outside ggml": TARGET_US}, chart.caption(facts)
    )


def _print(rows: Sequence[dict[str, object]]) -> None:
    print("Microseconds of CPU per streamed token, by thread:\n")
    columns = ("look", "k", "n", *(f"{part}_us" for part in _PARTS), "foreign_pct")
    ours = [found for found in rows if found["path"] == "uds-json"]
    print(report.table(columns, [[found[name] for name in columns] for found in ours]))
    print("\nThe path as a client sees it:\n")
    columns = ("path", "look", "k", "ttft_ms", "cpu_pct", "cpu_us_per_token", "tokens_per_s",
               "foreign_pct")  # fmt: skip
    print(report.table(columns, [[found[name] for name in columns] for found in rows]))
    print(f"\n{verdict(rows)}\n\nOne frame, best of several:\n")
    frames.show()


if __name__ == "__main__":
    sys.exit(main())
