"""Goodput: the largest rate of requests of which 95 % keep their limits.

    python -m benches goodput                         made-up lengths, for two cores (60 minutes)
    python -m benches goodput --trace FILE            a public trace's lengths: Azure's CSV, Mooncake's JSONL
    python -m benches goodput --trace FILE --scale 1 --answer-scale 1 --slots 16    for a GPU
    python -m benches goodput --quick                 fewer requests and trials (12 minutes)

Requests come at random moments (Poisson), or with `--by-trace` at the trace's times, whether or not
others are answered. Half of them, drawn, are read as they stream (`awaits: tokens`), half wait for the
end (`awaits: answer`), which llama-server is not told. A reader's limits: TTFT 450 ms or twice the
time alone, and a mean time per output token of 40 ms or twice the time alone, whichever is longer.
Others: the end within 3 times the time alone. *Alone* is measured first, at several lengths, and is the
best of the daemon and llama-server: all have the same limits. Times alone are without any cached prefix.

A rate is kept if 95 % of `--requests` keep their limits; an error keeps none. A rate that fails is tried
`--tries` times, since other programs of the machine can only make requests late. The largest rate is
found by steps of two, then by bisection. All rates of a repetition have the same lengths in the same
order, other texts, and the same arrivals at another speed. A trial ends as soon as it has failed.
llama-server runs once with each set of `--peer-flags`: compare with its best. `--scale` shortens prompts,
`--answer-scale` answers. The daemon drafts nothing unless `--speculation` says so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from benches import arrivals, clients, contest, host, servers
from benches.arrivals import Asked, BadTrace, Recorded, Scale
from benches.clients import Answer, Job
from benches.contest import Medians, Row, Start, System
from benches.driver import Comparison, Here, Table, scene
from benches.limits import Alone, Bound, Limits, bound
from benches.live import Live, Stream, drive
from benches.report import cell, note
from benches.scenes.agents import PEER_FLAGS, daemon_arguments, peer_arguments, settings
from benches.search import Search
from uma_trio_sim.latency import median, percentile

KEPT = 0.95
PATIENCE_S = 600.0
DRAIN_S = 120.0
CHECK_S = 0.1  # how often it is looked for requests that are too late already
ALONE_ANSWER, ALONE_TIMES = 16, 3
_TABLE = Table("", (
    ("goodput, requests/s", "rate", 3), ("kept %", "kept_pct", 0), ("next rate", "next_rate", 3),
    ("kept %", "next_kept_pct", 0), ("TTFT p50 ms", "ttft_ms", 0), ("p95 ms", "ttft_p95_ms", 0),
    ("TPOT p95 ms", "tpot_p95_ms", 1), ("answers' slowdown p95", "slowdown_p95", 2),
    ("trials", "trials", 0), ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is asked, of how many, and how the rate is searched."""

    trace: Sequence[Recorded]
    requests: int
    by_trace: bool
    block: int
    tries: int
    search: Search
    limits: Limits = field(default_factory=Limits)


@dataclass
class Trial:
    """One rate: what became of the requests, by their number. Those not answered yet are missing."""

    rate: float
    asked: Sequence[Asked]
    bounds: Sequence[Bound]
    answers: dict[int, Answer] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)

    @property
    def kept(self) -> float:
        """The share of all requests that were not late; at most that if the trial was given up."""
        return 1 - len(self.late) / len(self.asked)

    @property
    def failed(self) -> bool:
        """Whether too many are late already."""
        return self.kept < KEPT


class Arriving:
    """Sends the requests of a trial when they are due, and counts who is late."""

    def __init__(self, live: Live, trial: Trial, work: Sequence[Job]) -> None:
        self._live, self._trial, self._work = live, trial, work
        self._open: dict[int, Stream] = {}
        self._checked = -math.inf

    def run(self) -> None:
        """Send all, and read until every answer has come or the rate has failed."""
        live, trial = self._live, self._trial
        began = live.now
        for number, asked in enumerate(trial.asked):
            live.run(began + asked.due / trial.rate - live.now, self._failed)
            if trial.failed:
                return
            self._send(number)
        live.run(PATIENCE_S, lambda: not self._open or self._failed())
        trial.late |= self._open.keys()

    def _send(self, number: int) -> None:
        try:
            stream = self._live.start(self._work[number], lambda done: self._ended(number, done))
        except OSError:
            self._trial.late.add(number)  # refused
        else:
            self._open[number] = stream

    def _ended(self, number: int, stream: Stream) -> None:
        del self._open[number]
        (answer,) = self._live.answers([stream])
        self._trial.answers[number] = answer
        if not self._trial.bounds[number].kept(answer):
            self._trial.late.add(number)

    def _failed(self) -> bool:
        now = self._live.now
        if now >= self._checked + CHECK_S:
            self._checked = now
            self._trial.late |= {n for n, s in self._open.items() if self._overdue(n, s, now)}
        return self._trial.failed

    def _overdue(self, number: int, stream: Stream, now: float) -> bool:
        limits, waited = self._trial.bounds[number], now - stream.sent
        return waited > limits.end_s or (not stream.reads and waited > limits.ttft_s)


def attempt(wire: clients.Wire, trial: Trial, work: Sequence[Job]) -> None:
    """Play all requests of a trial; the server is idle before and after it."""
    with Live(wire) as live:
        Arriving(live, trial, work).run()
    # What was given up may still be computed: llama-server notices at its next batch.
    (rest,) = drive(wire, clients.jobs(1, 4, 1, f"{trial.rate}/rest"), timeout_s=DRAIN_S)
    clients.checked([rest])


def search(plan: Plan, alone: Callable[[], Alone], start: Start, seed: str) -> Row:
    """Return the largest rate that a fresh server keeps, with the figures of that trial."""
    known = alone()
    asked = arrivals.drawn(plan.trace, plan.requests, seed, by_trace=plan.by_trace)
    bounds = [bound(each, known, plan.limits) for each in asked]
    trials: list[Trial] = []
    with start() as running:
        foreign = host.Foreign(running.pid)

        def once(rate: float) -> bool:
            work = arrivals.jobs(asked, f"{seed}/{len(trials)}", plan.block)
            trial = Trial(rate, asked, bounds)
            trials.append(trial)
            attempt(running.wire, trial, work)
            most = "at most " if trial.failed else ""
            note(f"    {rate:.3f} requests/s: {most}{100 * trial.kept:.0f} % keep their limits")
            return not trial.failed

        def keeps(rate: float) -> bool:
            return any(once(rate) for _ in range(plan.tries))

        # A request at a time would be this rate.
        serial = len(asked) / sum(known.whole(each) for each in asked)
        rate = replace(plan.search, start=plan.search.start * serial).largest(keeps)
        others = {"others_pct": foreign.percent()}
    return figures(trials, rate, known) | others


def figures(trials: Sequence[Trial], rate: float, alone: Alone) -> Row:
    """Return what there is to say of the best trial and of the one just beyond it."""
    row: Row = {"rate": rate, "trials": len(trials)}
    beyond = [trial for trial in trials if trial.failed and trial.rate > rate]
    if beyond:
        above = min(beyond, key=lambda trial: trial.rate)
        row |= {"next_rate": above.rate, "next_kept_pct": 100 * above.kept}
    for best in trials:
        if best.rate == rate and not best.failed:
            row |= {"kept_pct": 100 * best.kept} | served(best, alone)
    return row


def served(trial: Trial, alone: Alone) -> Row:
    """Return what readers had, and those who waited for the end."""
    ttfts, tpots, slowdowns = [], [], []
    for number, answer in trial.answers.items():
        asked, times = trial.asked[number], answer.times
        if not times:
            continue
        if asked.awaits == "answer":
            slowdowns.append((times[-1] - answer.sent) / alone.whole(asked))
        else:
            ttfts.append(1e3 * (times[0] - answer.sent))
            if len(times) > 1:
                tpots.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
    row: Row = {}
    if ttfts:
        row |= {"ttft_ms": median(ttfts), "ttft_p95_ms": percentile(ttfts, 95)}
    if tpots:
        row["tpot_p95_ms"] = percentile(tpots, 95)
    if slowdowns:
        row["slowdown_p95"] = percentile(slowdowns, 95)
    return row


def measure_alone(starts: Sequence[Start], lengths: Sequence[int], seed: str) -> Alone:
    """Return the best of each server's times at each length, each prompt by itself and new."""
    found: Alone | None = None
    for start in starts:
        with start() as running:
            one = partial(once_alone, running.wire, seed)
            one(lengths[0], 0)  # the first request of a server is slower
            ttfts, tpots = [], []
            for length in lengths:
                times = [one(length, n + 1) for n in range(ALONE_TIMES)]
                ttfts.append(min(ttft for ttft, _ in times))
                tpots.append(min(tpot for _, tpot in times))
        alone = Alone(tuple(lengths), tuple(ttfts), tuple(tpots))
        found = alone if found is None else found.best(alone)
    if found is None:
        raise clients.NotServed("there is no server to measure alone")
    return found


def once_alone(wire: clients.Wire, seed: str, tokens: int, number: int) -> tuple[float, float]:
    """Return TTFT and time per further token of one prompt."""
    work = clients.jobs(1, tokens, ALONE_ANSWER, f"{seed}/alone/{tokens}/{number}")
    (answer,) = clients.checked(drive(wire, [replace(job, priority="interactive") for job in work]))
    return answer.times[0] - answer.sent, (answer.times[-1] - answer.times[0]) / (ALONE_ANSWER - 1)


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield the goodput of each of our settings by llama-server's best."""
    peers = [v for s in medians.systems if s.family == contest.PEER and (v := medians(s, "rate"))]
    for system in medians.systems:
        value = medians(system, "rate")
        if system.family == contest.OURS and value is not None and peers:
            best = max(peers)
            yield f"{system.name}: goodput by llama-server's best {best:.3f}: {value / best:.2f}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="whose lengths (and times) are used")
    add("--by-trace", action="store_true", help="requests come at the trace's times, not at random")
    add("--scale", type=float, default=0.1, metavar="X", help="of prompts (0.1)")
    add("--answer-scale", type=float, default=0.2, metavar="X", help="of answers (0.2)")
    add("--longest", type=int, default=1024, metavar="N",
        help="requests of more tokens, scaled, are left out (1,024)")  # fmt: skip
    add("--requests", type=int, metavar="N", help="of a trial (60; --quick: 24)")
    add("--precision", type=float, default=0.15, metavar="X",
        help="by how much the kept rate and the failed one may differ (0.15; --quick: 0.4)")  # fmt: skip
    add("--start", type=float, default=0.5, metavar="X",
        help="the first rate, by that of one request after another alone (0.5)")  # fmt: skip
    add("--trials", type=int, default=8, metavar="N", help="rates that are tried at most (8)")
    add("--tries", type=int, default=2, metavar="N", help="of a rate until it has failed (2)")
    add("--slots", type=int, default=8, metavar="N", help="of all servers (8)")
    add("--n-ctx", type=int, metavar="N", help="the KV cache (slots x longest)")
    daemon_arguments(parser)
    peer_arguments(parser, ("default", *PEER_FLAGS))


def plan_of(given: argparse.Namespace, seed: int) -> Plan:
    """Return what the options ask for. Raises :class:`BadTrace` for a trace without requests."""
    trace = arrivals.made_up(str(seed)) if given.trace is None else arrivals.read(given.trace)
    scale = Scale(given.scale, given.answer_scale, given.longest)
    requests, looked = 60, Search(given.start, given.precision, given.trials)
    if given.quick:
        requests, looked = 24, Search(given.start, max(0.4, given.precision), given.trials)
    if given.dry_run:
        scale, requests, looked = Scale(0.02, 0.05, 100), 6, Search(0.5, 1.0, 2)
    return Plan(
        arrivals.scaled(trace, scale),
        given.requests or requests,
        given.by_trace,
        max(1, round(arrivals.BLOCK * scale.prompts)),
        max(1, given.tries),
        looked,
    )


@scene(arguments)
def goodput(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server at each of its settings."""
    try:
        plan = plan_of(given, here.seed)
    except BadTrace as failure:
        raise SystemExit(str(failure)) from failure
    setup = servers.Setup(
        here.model, here.threads, given.n_ctx or given.slots * given.longest, given.slots
    )
    # Over HTTP the daemon takes as many connections by default.
    compared = settings(given, here, setup, "--max-sessions", "256")
    firsts = {family: start for family, _knob, start in reversed(compared)}
    lengths = sorted(each.prompt for each in plan.trace)
    marks = sorted({round(percentile(lengths, q)) for q in (0, 50, 90, 100)})
    alone = cache(lambda: measure_alone([*firsts.values()], marks, str(here.seed)))
    answers = [each.answer for each in plan.trace]
    return Comparison(
        [System(f, knob, partial(search, plan, alone, start)) for f, knob, start in compared],
        seconds=20 if given.quick else 150,
        minutes=180,
        tables=[_TABLE],
        facts={
            "trace": given.trace.name if given.trace else "made up",
            "arrivals": "the trace's times" if given.by_trace else "Poisson",
            "lengths": f"prompts {median(lengths):.0f} tokens (median) to {lengths[-1]}, "
            f"answers {median(answers):.0f} to {max(answers)}, {plan.requests} requests a trial",
            "limits": f"{plan.limits}",
        },
        progress=lambda row: f"{cell(row.get('rate'), 3)} requests/s",
        verdicts=verdicts,
    )
