"""Agents that share a machine: how long all of them take, and who waits for a first token.

    python -m benches agents                       4 agents x 4 steps, prompts of 210 tokens (8 minutes)
    python -m benches agents --large               4 agents x 6 steps, prompts of 5,200 (for a GPU)
    python -m benches agents --large --agents 8 --person    beside a person who asks short questions
    python -m benches agents --caps 1.2 3          the daemon at several latency caps

All agents begin at the same moment with a prompt whose first `--shared` tokens are the same for all.
An agent sends its next step as soon as it has the whole answer: the prompt before, and `--adds`
tokens that no server has seen. All requests are interactive and greedy. *makespan* is the time until
the last agent is done. *first TTFT* is that of an agent's first step, *step TTFT* that of its
later steps. With `--person` one more client sends questions of 64 tokens, one after another, and
reads answers of 100; *gap* is the time between two of its tokens. llama-server has a slot for each client,
one KV cache, and runs once with each set of `--peer-flags`: compare with its best setting. The
daemon drafts nothing unless `--speculation` says so: models with random weights repeat themselves,
so more drafts would be right than with real text.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise

from benches import clients, contest, servers
from benches.clients import Answer, Job
from benches.contest import Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import Endless, Live, Stream
from benches.report import cell
from uma_trio_sim.latency import median, percentile

PEER_FLAGS = ("", "-cram 0", "-b 64", "-kvu -fa off -b 4 -np 4")
PATIENCE_S = 600.0
_TABLE = Table("", (
    ("makespan s", "makespan_s", 2),
    ("first TTFT p50 ms", "first_ttft_ms", 0), ("worst ms", "first_ttft_worst_ms", 0),
    ("step TTFT p50 ms", "step_ttft_ms", 0), ("worst ms", "step_ttft_worst_ms", 0),
    ("agents' t/s", "tokens_s", 1),
    ("person's gap p50 ms", "gap_p50_ms", 1), ("p99 ms", "gap_p99_ms", 1),
    ("worst ms", "gap_worst_ms", 0), ("person's TTFT p50 ms", "person_ttft_ms", 0),
    ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


@dataclass(frozen=True)
class Script:
    """The agents and the person beside them. Tokens."""

    agents: int = 4
    steps: int = 4
    shared: int = 150
    own: int = 60
    adds: int = 20
    answer: int = 40
    person: bool = False
    question: int = 64
    awaits: str | None = None

    @property
    def slots(self) -> int:
        """One for each client."""
        return self.agents + self.person

    @property
    def cells(self) -> int:
        """A context in which the last step of everybody has room."""
        last = self.shared + self.own + (self.steps - 1) * self.adds + self.answer + 64
        return -(-(self.slots * last) // 1024) * 1024


LARGE = Script(steps=6, shared=3250, own=1950, adds=390, answer=100)


class Agent:
    """One client that takes step after step."""

    def __init__(self, live: Live, script: Script, seed: str, number: int) -> None:
        shared, draw = random.Random(f"{seed}/shared"), random.Random(f"{seed}/{number}")
        self._live, self._script, self._draw, self._number = live, script, draw, number
        self._words = shared.choices(clients.WORDS, k=script.shared)
        self._words += draw.choices(clients.WORDS, k=script.own)
        self.steps: list[Stream] = []

    @property
    def done(self) -> bool:
        """Whether its last step was answered."""
        return len(self.steps) == self._script.steps and self.steps[-1].over

    def step(self) -> None:
        """Send the next step, and the one after it when it is answered."""
        name = f"agent{self._number}-{len(self.steps)}"
        script = self._script
        prompt = clients.text(self._words)
        job = Job(name, prompt, script.answer, "interactive", awaits=script.awaits)
        self.steps.append(self._live.start(job, self._next))

    def _next(self, _before: Stream) -> None:
        if len(self.steps) < self._script.steps:
            self._words += self._draw.choices(clients.WORDS, k=self._script.adds)
            self.step()


def play(script: Script, running: servers.Running, seed: str) -> Row:
    """Run all agents once; return the figures."""
    warm = clients.jobs(script.slots, 16, 2, f"{seed}/warm")
    with Live(running.wire) as live:
        for job in warm:
            live.start(job)
        live.run(PATIENCE_S, lambda: all(stream.over for stream in live.streams))
        clients.checked(live.answers(live.streams))
    numbers = count()

    def ask() -> Job:
        (job,) = clients.jobs(1, script.question, 100, f"{seed}/question/{next(numbers)}")
        return replace(job, priority="interactive")

    with Live(running.wire) as live:
        person = Endless(live, ask)
        if script.person:
            person.send()
            live.run(20.0, lambda: len(person.streams) > 1)
        began = live.now
        agents = [Agent(live, script, seed, number) for number in range(script.agents)]
        for agent in agents:
            agent.step()
        live.run(PATIENCE_S, lambda: all(agent.done for agent in agents))
        ended = live.now
    answers = [clients.checked(live.answers(agent.steps)) for agent in agents]
    asked = live.answers([stream for stream in person.streams if stream.sent >= began])
    return figures(answers, ended - began) | heard(asked)


def figures(answers: Sequence[Sequence[Answer]], seconds: float) -> Row:
    """Return what the agents had, by agent and step."""
    first = [1e3 * a[0].ttft_s for a in answers if a[0].ttft_s is not None]
    later = [1e3 * t for a in answers for step in a[1:] if (t := step.ttft_s) is not None]
    row: Row = {
        "makespan_s": seconds,
        "first_ttft_ms": median(first),
        "first_ttft_worst_ms": max(first),
        "tokens_s": sum(len(step.times) for a in answers for step in a) / seconds,
    }
    if later:
        row |= {"step_ttft_ms": median(later), "step_ttft_worst_ms": max(later)}
    return row


def heard(answers: Sequence[Answer]) -> Row:
    """Return the gaps between the tokens that the person read, and the waits for first ones."""
    gaps = [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.times)]
    waits = [1e3 * t for answer in answers if (t := answer.ttft_s) is not None]
    if not gaps or not waits:
        return {}
    return {
        "gap_p50_ms": median(gaps),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_worst_ms": max(gaps),
        "person_ttft_ms": median(waits),
    }


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how each of our settings stands beside llama-server's best for that figure."""
    for figure, text in (
        ("makespan_s", "makespan"),
        ("first_ttft_worst_ms", "worst first TTFT"),
        ("gap_p99_ms", "the person's p99 gap"),
    ):
        peers = [
            v for s in medians.systems if s.family == contest.PEER and (v := medians(s, figure))
        ]
        for system in medians.systems:
            value = medians(system, figure)
            if system.family == contest.OURS and value is not None and peers:
                best = min(peers)
                yield f"{system.name}: {text} by llama-server's best {cell(best, 2)}: {value / best:.2f}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--large", action="store_true", help="the workload for a GPU: prompts of 5,200 tokens")
    add("--agents", type=int, metavar="N", help="how many (4)")
    add("--steps", type=int, metavar="N", help="of each agent (4; --large: 6)")
    add("--shared", type=int, metavar="N", help="tokens that begin all prompts (150; 3,250)")
    add("--own", type=int, metavar="N", help="tokens of each agent's own behind them (60; 1,950)")
    add("--adds", type=int, metavar="N", help="new tokens of each later step (20; 390)")
    add("--answer", type=int, metavar="N", help="tokens that each step generates (40; 100)")
    add("--person", action="store_true", help="one more client asks short questions")
    add("--awaits", choices=["tokens", "answer"], help="what the agents wait for (tokens)")
    add("--n-ctx", type=int, metavar="N", help="the KV cache (as many as all of them need)")
    daemon_arguments(parser)
    peer_arguments(parser)


def daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the daemon's settings."""
    parser.add_argument("--caps", type=float, nargs="*", default=[], metavar="X",
                        help="the daemon also with these values of --latency-cap")  # fmt: skip
    parser.add_argument("--serve", nargs="*", default=[], metavar="FLAGS",
                        help="the daemon also with each of these sets of flags")  # fmt: skip
    parser.add_argument("--speculation", default="off", metavar="CHOICE",
                        help="the daemon's --speculation (off)")  # fmt: skip


def peer_arguments(parser: argparse.ArgumentParser, flags: Sequence[str] = PEER_FLAGS) -> None:
    """Add the option that names llama-server's settings."""
    parser.add_argument("--peer-flags", nargs="*", default=[*flags], metavar="FLAGS",
                        help="llama-server once with each, beside -np N -kvu unless it says -np; "
                             "'' is none, 'default' not even those")  # fmt: skip


Setting = tuple[str, str, contest.Start]
"""Its family, how tables call its flags, and how it is started."""


def settings(
    given: argparse.Namespace, here: Here, setup: servers.Setup, *also: str
) -> list[Setting]:
    """Return the daemon at its default and each other setting, and llama-server at each of its.

    The daemon has the flags `also` at each.
    """
    knobs = ["", *(f"--latency-cap {cap:g}" for cap in given.caps), *given.serve]
    found: list[Setting] = [
        (
            contest.OURS,
            knob.replace("--latency-cap", "cap").replace("--", ""),
            partial(servers.ours, setup, "--speculation", given.speculation, *also, *knob.split()),
        )
        for knob in knobs
    ]
    if here.peers is not None:
        for text in given.peer_flags:
            flags = servers.peer_flags(text, setup.slots)
            start = partial(servers.llama_server, here.peers, setup, flags)
            found.append((contest.PEER, contest.short(flags), start))
    return found


def systems(
    given: argparse.Namespace, here: Here, setup: servers.Setup, once: contest.Play, case: str = ""
) -> list[contest.System]:
    """Return every setting as a system that plays `once`."""
    return [
        contest.serving(family, knob, start, once, case)
        for family, knob, start in settings(given, here, setup)
    ]


def script_of(given: argparse.Namespace) -> Script:
    """Return the script that the options ask for."""
    script = LARGE if given.large else Script()
    if given.quick or given.dry_run:
        script = replace(script, steps=2)
    names = ("agents", "steps", "shared", "own", "adds", "answer", "awaits")
    asked = {name: value for name in names if (value := getattr(given, name)) is not None}
    return replace(script, person=given.person, **asked)


@scene(arguments)
def agents(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server."""
    script = script_of(given)
    setup = servers.Setup(here.model, here.threads, given.n_ctx or script.cells, script.slots)
    return Comparison(
        systems(given, here, setup, partial(play, script)),
        seconds=45,
        minutes=60,
        tables=[_TABLE],
        facts={"script": f"{script}, context {setup.n_ctx}"},
        progress=lambda row: (
            f"makespan {cell(row.get('makespan_s'), 2)} s, "
            f"worst first TTFT {cell(row.get('first_ttft_worst_ms'), 0)} ms"
        ),
        verdicts=verdicts,
    )
