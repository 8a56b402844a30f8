"""What the parts of a tick cost by themselves, in microseconds: planning, ticks, sampling, frames.

    python -m benches micro                         everything (about 2 minutes)
    python -m benches micro planning --quick        only this, a short look (seconds)
    python -m benches micro sampling frames

No model, no server, no clients. *planning*: one plan, of the simulated engine (:mod:`uma_trio_sim`);
of the *mixed* crowd half of the sequences are read, a quarter decode in the background, and a quarter
are prompts of 506 tokens, one after another; of *readers* all are read; the *drafted* are read, too, and
each has 15 guesses of which six in ten are right. *admission*: who gets a place, and who makes room, where 256
wait in vain: *kept*, as all room is kept for one that needs more; *away*, as the place of a parked request
would be its own client's turn. *ticks*: all that the engine does
for a tick of streams, on a backend that computes nothing (benches/ticks.py). *sampling*: choosing from
logits (benches/sampling.py). *frames*: encoding and decoding a token and a request. *rendering*: what a chat waits for
its template. Each figure is the least, or of planning the median of the best round, since everything that disturbs
only adds; of rendering the median.
"""

from __future__ import annotations

import argparse
import gc
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import evolve

from benches import contest, host, report, sampling, ticks
from benches.contest import Row
from benches.driver import tool
from uma_protocol import (
    Generate,
    Message,
    Role,
    Token,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
    frame,
)
from uma_protocol.testing import ConnectionPair
from uma_trio.policy.admission import admit, preempt_for_interactive, preempt_parked
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import Traffic
from uma_trio.policy.line import MOST_PASSED_OVER
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import AdmissionState, Holder, SchedulerState, Waiting
from uma_trio.text import chat as text
from uma_trio.text.frontend import FrontEnd
from uma_trio.words import Lane
from uma_trio_sim.fake import CHATML, FakeVocabulary
from uma_trio_sim.guesses import Guesses
from uma_trio_sim.latency import percentile
from uma_trio_sim.machine import TABLES, built_in
from uma_trio_sim.simulation import Simulation, settings_for

TARGETS_US, TARGET_N = {"mixed": 150.0, "readers": 100.0, "drafted": 200.0}, 16
WAITING = 256
TRAFFIC = Traffic(weight_bytes=3e8, cell_bytes=12_288)  # the 0.5B shape
TOKEN = Token("quickstart-1", " hello", 1234)
ASK = Generate(
    "quickstart-1",
    app="editor",
    max_tokens=20,
    temperature=0.7,
    seed=1,
    messages=(Message("system", "Be brief."), Message("user", "Hello, UMA Serve! " * 20)),
)


class Watched:
    """A policy, and how many microseconds each of its plans took."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.took_us: list[float] = []

    def __call__(self, state: SchedulerState) -> Plan:
        """Plan."""
        began = time.perf_counter_ns()
        plan = self._policy(state)
        self.took_us.append((time.perf_counter_ns() - began) / 1e3)
        return plan


def crowd_of(policy: Policy, machine: str, n: int, crowd: str) -> Simulation:
    """Return a world of `n` sequences that do not end; unless `mixed` all of them are read."""
    profile, mixed = built_in(machine), crowd == "mixed"
    settings = evolve(settings_for(profile), traffic=TRAFFIC)
    guesses = (lambda _draw: Guesses.always(0.6)) if crowd == "drafted" else None
    world = Simulation(policy, profile=profile, settings=settings, guesses=guesses)
    for client in range(n):
        if mixed and client % 4 == 3:
            world.storm(client, 506)
        else:
            lane: Lane = "background" if mixed and client % 4 == 1 else "interactive"
            world.submit(20, 4000, client=client, lane=lane)
    world.run(2.0)  # the prompts are done
    return world


def plan_ticks(policy: str, crowd: str, n: int, ticks: int, machine: str) -> Row:
    """Plan `ticks` ticks of a crowd of `n` sequences and return what that took."""
    watched = Watched(find_policy(policy))
    world = crowd_of(watched, machine, n, crowd)
    watched.took_us.clear()
    gc.collect()
    before, began = world.ticks, time.perf_counter()
    while world.ticks - before < ticks:
        world.run(0.05)
    seconds = time.perf_counter() - began
    return {
        "what": f"{policy}, {crowd}, {n} sequences",
        "us": percentile(watched.took_us, 50),
        "p95 us": percentile(watched.took_us, 95),
        "simulated ticks/s": (world.ticks - before) / seconds,
    }


def best(rounds: int, once: Callable[[], Row]) -> Row:
    """Return the round with the least median."""
    return min((once() for _ in range(rounds)), key=lambda row: float(str(row["us"])))


def planning(given: argparse.Namespace) -> Iterator[Row]:
    """Yield what planning costs, for each policy, crowd and number of sequences."""
    rounds, ticks = (2, 200) if given.quick else (5, 2000)
    for policy in given.policies:
        for crowd in TARGETS_US:
            for n in given.n:
                args = policy, crowd, n, given.ticks or ticks, given.machine
                yield best(given.rounds or rounds, lambda args=args: plan_ticks(*args))  # type: ignore[misc]


def crowded(kind: str, n_slots: int) -> AdmissionState:
    """Return a state in which all slots are taken and `WAITING` requests wait in vain."""
    if kind == "kept":
        held = Holder(0, "background", 10, 100, 50, 0, within=(1,))
        large = Waiting(1, "interactive", 9, 10**6, MOST_PASSED_OVER, 0.0, within=(3,))
        small = Waiting(2, "interactive", 20, 60, 0, 1.0, within=(2,))
        others = [evolve(small, key=2 + n, client=20 + n % 32) for n in range(WAITING - 1)]
        running = [evolve(held, key=-n, computed=n) for n in range(n_slots)]
        return AdmissionState((large, *others), tuple(running))
    away = Holder(0, "interactive", 10, 100, 50, 0, 5.0, within=(1,))
    running = [evolve(away, key=-n, computed=n) for n in range(n_slots // 4)]
    reads = Holder(0, "interactive", 11, 100, 50, 0, within=(1,))
    running += [evolve(reads, key=-n) for n in range(n_slots // 4, n_slots)]
    own = Waiting(0, "interactive", 10, 60, 0, 1.0, within=(1,))
    other = evolve(own, key=WAITING, client=11)
    return AdmissionState((*[evolve(own, key=n) for n in range(1, WAITING)], other), tuple(running))


def placing(_given: argparse.Namespace) -> Iterator[Row]:
    """Yield what deciding on places costs while a crowd waits."""
    for kind in ("kept", "away"):
        for n_slots in (8, 16, 64):
            state = crowded(kind, n_slots)

            def decide(state: AdmissionState = state) -> None:
                if not (admit(state) or preempt_parked(state)):
                    preempt_for_interactive(state)

            least = min(timeit.repeat(decide, number=5, repeat=20)) / 5 * 1e6
            yield {"what": f"{kind}, {WAITING} wait for {n_slots} slots", "us": least}


def verdict(rows: Sequence[Row], crowd: str) -> str:
    """Say whether the target of a crowd is met."""
    what = f"deadline, {crowd}, {TARGET_N} sequences"
    found = [float(str(row["us"])) for row in rows if row["what"] == what]
    return contest.verdict(f"{what}: us for one plan", *(found or [None]), TARGETS_US[crowd])


def ticking(given: argparse.Namespace) -> Iterator[Row]:
    """Yield what a tick costs the engine, for each policy and number of streams."""
    n_ticks = given.ticks or (100 if given.quick else 1000)
    for policy in given.policies:
        for overlaps in (False, True):
            for drawn in (False, True):
                for n in given.n:
                    kind = f"{'GPU' if overlaps else 'CPU'}, {'drawn' if drawn else 'greedy'}"
                    us = ticks.one_tick_us(policy, n, n_ticks, drawn=drawn, overlaps=overlaps)
                    yield {"what": f"{policy}, {kind}, {n} streams", "us": us, "us a token": us / n}


def choosing(_given: argparse.Namespace) -> Iterator[Row]:
    """Yield what sampling costs."""
    yield from sampling.one_token()
    yield from sampling.one_tick()
    yield from sampling.extras()


def frames(_given: argparse.Namespace) -> Iterator[Row]:
    """Yield what frames cost: a token for each stream and tick, a request once."""
    token, request = encode_event(TOKEN), encode_request(ASK)
    pair = ConnectionPair()
    pair.send(Role.CLIENT, ASK)
    pair.server.prompt_done()
    framed = pair.server.send(TOKEN)

    def receive() -> None:
        pair.client.receive_data(framed)
        pair.client.next_event()

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "token: encode, with header": (lambda: frame(encode_event(TOKEN)), 100_000),
        "token: decode": (lambda: decode_event(token), 100_000),
        "token: Connection.send": (lambda: pair.server.send(TOKEN), 50_000),
        "token: receive_data + next_event": (receive, 50_000),
        "generate: encode, with header": (lambda: frame(encode_request(ASK)), 10_000),
        "generate: decode": (lambda: decode_request(request), 10_000),
    }
    for what, (call, number) in calls.items():
        least = min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6
        yield {"what": what, "us": least}


def rendering(given: argparse.Namespace) -> Iterator[Row]:
    """Yield what a chat of 20 messages waits for its template, which another process renders: the median."""
    for path in [None, *given.templates]:
        front = FrontEnd(FakeVocabulary(), CHATML if path is None else path.read_text())
        chat = [
            text.Message("assistant" if n % 2 else "user", "Some prose. " * 25) for n in range(20)
        ]
        took: list[float] = []
        for _ in range(200 if given.quick else 1000):
            began = time.perf_counter()
            front.prompt(chat)
            took.append((time.perf_counter() - began) * 1e6)
        name = "ChatML" if path is None else path.stem
        yield {
            "what": f"render 20 messages: {name}",
            "us": percentile(took, 50),
            "p99 us": percentile(took, 99),
        }


PARTS = {
    "planning": planning,
    "admission": placing,
    "ticks": ticking,
    "sampling": choosing,
    "frames": frames,
    "rendering": rendering,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is named")
    add("--policies", nargs="+", default=["deadline", "baseline"], metavar="NAME")
    add("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="sequences")
    add("--machine", choices=list(TABLES), default="q4_0", help="whose ticks are planned")
    add("--ticks", type=int, metavar="N", help="of each round (2000)")
    add("--rounds", type=int, metavar="N", help="of which the best counts (5)")
    add(
        "--templates",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="to render, besides ChatML",
    )
    add("--quick", action="store_true", help="a short look, not a measurement")


@tool(arguments)
def micro(given: argparse.Namespace) -> int:
    """Measure the parts, print a table for each and a verdict, write one CSV."""
    if unknown := set(given.parts) - set(PARTS):
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if min(given.n) < 1 or max(given.n) > TARGET_N:
        raise SystemExit(f"--n must be 1 to {TARGET_N}: the simulated daemon has so many slots")
    facts = host.facts() | {"noise": host.noise()}
    report.print_facts(facts)
    rows: list[Row] = []
    for part in given.parts or PARTS:
        found = list(PARTS[part](given))
        columns = list(dict.fromkeys(key for row in found for key in row))
        print(f"{report.table(columns, [[row.get(key) for key in columns] for row in found])}\n")
        rows += [{"part": part, **row} for row in found]
    for crowd in TARGETS_US if not given.parts or "planning" in given.parts else ():
        print(verdict(rows, crowd))
    print(f"\n{report.write_csv('micro', rows, facts)}")
    return 0
