"""Prompts that begin alike: what a prefix cache saves. A quarter of an hour; --quick a few minutes.

Six parts, on one server after another: *apps*, four programs at once whose prompts share 2,000 tokens
and have 100 of their own; *one by one*, the same with other words, each after the one before; *turns*,
six conversations of eight turns over four slots, taken in turn; *chain*, an agent whose eight steps
each send the whole past again; *reader*, the pace of one stream after eight conversations have been
answered and left what they computed, over its pace before any had; *pause*, the longest time of a stream
without a token while those eight conversations go on one after another, over its median alone (*short x* is
the same beside questions as long as what is new in those, with nothing to restore; *alone x* is its longest
alone). What they left is restored and saved again meanwhile. Every other answer is short. Times are to the
last answer (apps, chain) or to the first token (one by one: the later ones over the first; turns: the median
of all but the first).
The daemon is there with its prefix cache and without, llama-server as it comes and with one cache for
all slots.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benches import clients, contest, servers
from benches.clients import Answer, Job
from benches.contest import OURS, PEER, Column, Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import Live, drive
from uma_trio_sim.latency import itl, median

_COLUMNS: tuple[Column, ...] = (
    ("apps s", "apps_s", 2), ("one by one, first ms", "first_ms", 0),
    ("later / first", "later", 2), ("turns ms", "turns_ms", 0), ("chain s", "chain_s", 2),
    ("reader", "reader", 2), ("pause x", "pause_x", 2), ("short x", "short_x", 2),
    ("alone x", "alone_x", 2), ("restored", "restored", 0), ("others %", "others_pct", 0),
)  # fmt: skip
_TITLE = "four apps that share 2,000 tokens: seconds (less is better)"


@dataclass(frozen=True)
class Script:
    """How much there is of everything. Tokens, but for the counts."""

    shared: int = 2000
    own: int = 100
    apps: int = 4
    conversations: int = 6
    turns: int = 8
    turn: int = 60
    steps: int = 8
    step: int = 200
    answer: int = 8
    idle: int = 8
    idle_tokens: int = 400
    read: int = 96

    @property
    def cells(self) -> int:
        """A context that holds the apps and the longest conversation beside another."""
        apps = self.apps * (self.own + self.answer) + self.shared
        return -(-(2 * apps + 2048) // 1024) * 1024


def words(n: int, seed: str) -> list[str]:
    """Return `n` words that another seed does not give."""
    return random.Random(seed).choices(clients.WORDS, k=n)


def ask(running: servers.Running, jobs: Sequence[Job]) -> list[Answer]:
    """Send these at once; return the answers, each checked."""
    return clients.checked(drive(running.wire, jobs))


def play(running: servers.Running, seed: str, script: Script) -> Row:
    """Go through all five parts."""
    ask(running, clients.jobs(1, 32, 2, f"{seed}/warm"))
    reader = _reader(running, seed, script)
    first_ms, *later_ms = _one_by_one(running, seed, script)
    return {
        "apps_s": _apps(running, seed, script),
        "first_ms": first_ms,
        "later": median(later_ms) / first_ms,
        "reader": reader,
        "turns_ms": _turns(running, seed, script),
        "chain_s": _chain(running, seed, script),
        **_pause(running, seed, script),
        "short_x": _pause(running, f"{seed}/short", replace(script, idle_tokens=0))["pause_x"],
    }


def _prompts(seed: str, script: Script) -> list[Job]:
    shared = words(script.shared, f"{seed}/shared")
    return [
        Job(f"app-{n}", " ".join(shared + words(script.own, f"{seed}/{n}")), script.answer)
        for n in range(script.apps)
    ]


def _apps(running: servers.Running, seed: str, script: Script) -> float:
    answers = ask(running, _prompts(f"{seed}/apps", script))
    return max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)


def _one_by_one(running: servers.Running, seed: str, script: Script) -> list[float]:
    jobs = _prompts(f"{seed}/one", script)
    return [1e3 * (ask(running, [job])[0].ttft_s or 0.0) for job in jobs]


def _turns(running: servers.Running, seed: str, script: Script) -> float:
    pasts = [words(script.turn, f"{seed}/c{n}") for n in range(script.conversations)]
    found: list[float] = []
    for turn in range(script.turns):
        for n, past in enumerate(pasts):
            job = Job(f"turn-{n}-{turn}", " ".join(past), script.answer)
            ttft_s = ask(running, [job])[0].ttft_s or 0.0
            if turn:
                found.append(1e3 * ttft_s)
            past.extend(words(script.turn, f"{seed}/c{n}/{turn}"))
    return median(found)


def _chain(running: servers.Running, seed: str, script: Script) -> float:
    past, seconds = words(script.step, f"{seed}/chain"), 0.0
    for step in range(script.steps):
        (answer,) = ask(running, [Job(f"step-{step}", " ".join(past), 4 * script.answer)])
        seconds += answer.times[-1] - answer.sent
        past += words(script.step, f"{seed}/chain/{step}")
    return seconds


def _reader(running: servers.Running, seed: str, script: Script) -> float:
    """Return the pace of a stream beside what eight conversations left, over that without."""

    def gap_s(name: str) -> float:
        return median(itl(ask(running, [_read(name, seed, script)])[0].times))

    before_s = gap_s("before")
    for n in range(script.idle):
        ask(running, [Job(f"idle-{n}", _idle(n, seed, script), script.answer)])
    return before_s / gap_s("after")


def _read(name: str, seed: str, script: Script, times: int = 1) -> Job:
    """Return what a reader asks: sampled, so that an answer that repeats itself is not guessed ahead."""
    text = " ".join(words(40, f"{seed}/{name}"))
    return Job(name, text, times * script.read, sampled=True)


def _idle(n: int, seed: str, script: Script) -> str:
    return " ".join(words(script.idle_tokens, f"{seed}/idle/{n}"))


def _pause(running: servers.Running, seed: str, script: Script) -> Row:
    """Return a reader's longest pause while idle conversations come back, over its median alone.

    The next one comes as soon as the one before is answered, for as long as the reader reads.
    """
    alone = itl(ask(running, [_read("alone", seed, script)])[0].times)
    with Live(running.wire) as live:
        live.watch()
        reader = live.start(_read("beside", seed, script, 4))
        live.run(60.0, lambda: len(reader.reads) > script.read // 4)
        began, others = live.now, []
        for n in range(script.idle):
            text = f"{_idle(n, seed, script)} {' '.join(words(8, f'{seed}/back/{n}'))}"
            others.append(live.start(Job(f"back-{n}", text, script.answer)))
            live.run(60.0, lambda: others[-1].over or reader.over)
        ended = live.now
        live.run(60.0, lambda: reader.over)
        (answer, *_) = clients.checked(live.answers([reader, *others]))
        counted = [values["prefix_hits_total"].get("saved", 0) for _, values in live.counters()]
    shown = [at for at in answer.times if began <= at <= ended]
    solo_s = median(alone)
    return {
        "pause_x": max(itl(shown)) / solo_s,
        "alone_x": max(alone) / solo_s,
        "restored": counted[-1] - counted[0] if counted else None,
    }


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how the daemon with its cache does beside the best of llama-server."""
    ours = next(s for s in medians.systems if (s.family, s.knob) == (OURS, "prefix"))
    yield contest.verdict("one by one: later / first", medians(ours, "later"), 0.10)
    yield contest.verdict(
        "a reader's pace beside 8 that are idle / before",
        medians(ours, "reader"),
        0.97,
        at_most=False,
    )
    yield contest.verdict(
        "a reader's longest pause while others come back / its median alone",
        medians(ours, "pause_x"),
        2.0,
    )
    back, short = medians(ours, "pause_x"), medians(ours, "short_x")
    by_moving = back / short if back is not None and short else None
    yield contest.verdict("the same / beside short questions, nothing restored", by_moving, 1.1)
    for figure, target in (("apps_s", 0.40), ("turns_ms", 0.80), ("chain_s", 1.00)):
        peers = [v for s in medians.systems if s.family == PEER and (v := medians(s, figure))]
        value = medians(ours, figure)
        if peers and value is not None:
            yield contest.verdict(f"{figure} / {PEER}'s best", value / min(peers), target)


@scene()
def prefix(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with and without its cache, and llama-server in two ways."""
    script = Script()
    if given.quick or given.dry_run:
        script = Script(
            shared=600, own=50, conversations=5, turns=3, steps=3, idle_tokens=200, read=48
        )
    setup = servers.Setup(here.model, here.threads, script.cells, script.apps)
    compared = [
        contest.serving(
            OURS,
            knob,
            lambda flags=flags: servers.ours(setup, *flags),  # type: ignore[misc]
            lambda running, seed: play(running, seed, script),
        )
        for knob, flags in (("prefix", ()), ("without", ("--prefix-ram", "0")))
    ]
    flags = [servers.server_flags(variant, setup.slots) for variant in ("stock", "np-kvu")]
    compared += contest.llama_servers(
        here.peers, setup, flags, lambda running, seed: play(running, seed, script)
    )
    return Comparison(
        compared,
        seconds=60,
        repetitions=3,
        tables=[Table("", _COLUMNS)],
        facts={"script": f"{script}, context {script.cells}"},
        progress=lambda row: f"apps {row['apps_s']:.1f} s, later / first {row['later']:.2f}",
        verdicts=verdicts,
        bars={_TITLE: "apps_s"},
    )
