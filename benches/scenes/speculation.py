"""Tokens per second with and without drafts on a real model, how often guesses are right being given.

    python -m benches speculation           medians of 3 (about 15 minutes)
    python -m benches speculation --quick   one repetition, shorter answers (about 4 minutes)

One daemon computes each load both ways in turn (request field `speculation`: auto, off, off, auto),
so that the machine's mood favours neither. Three daemons:

- *acceptance 0.7*: an oracle guesses the greedy answer of a first pass, each token spoilt with a
  chance of 0.3 (:mod:`benches.oracle`);
- *acceptance 0*: the same with every guess wrong: the most that prompts made for it can cost;
- *nothing to match*: the shipped lookup, random prompts, sampled answers.

Beside them llama-server, plain and with its own lookup (``--spec-type ngram-simple``), whose guesses
are accepted with the same chance (``--spec-synth-rates``). *times* is with by without, *accepted* the
share of the computed guesses that were kept: one behind a wrong one never is. The rate is of the
window in which all streams decode.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benches import clients, contest, servers
from benches.clients import Answer, Job
from benches.contest import OURS, PEER, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from uma_trio_sim.latency import median

ACCEPTANCE = 0.7
LIKELY, WRONG, NOTHING = f"acceptance {ACCEPTANCE}", "acceptance 0", "nothing to match"
TARGETS = {
    (LIKELY, 1): 1.6, (LIKELY, 2): 1.5, (LIKELY, 3): 1.15, (LIKELY, 7): 1.2,
    (WRONG, 1): 0.98, (WRONG, 4): 0.98, (NOTHING, 1): 0.98, (NOTHING, 4): 0.98,
}  # fmt: skip
OF_PEER = {1: 1.0, 2: 1.2, 3: 1.2}
_AUTO = ("--speculation", "auto")  # also where that is not the default
_DRAFTED = ("draft_tokens_total", "draft_accepted_tokens_total")
_TABLE = Table("", (
    ("without t/s", "without", 1), ("with t/s", "with", 1), ("times", "times", 2),
    ("accepted", "accepted", 2), ("rows a token", "rows", 2), ("others %", "others_pct", 0),
))  # fmt: skip


def rate(answers: Sequence[Answer]) -> float:
    """Return tokens/s while all streams decode; tokens that came with the first are not counted.

    Raises:
        NotServed: there is no such time.
    """
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    if end <= begin:
        raise clients.NotServed("a stream ended before all decoded: --gen-tokens")
    return sum(begin < at <= end for answer in answers for at in answer.times) / (end - begin)


def counted(running: servers.Running) -> list[int]:
    """Return how many drafts the daemon has computed, and how many were right."""
    data = b""
    with running.wire.connect() as sock:
        sock.sendall(clients.frame({"type": "metrics"}))
        while part := sock.recv(1 << 20):
            data += part
    ((_, event),) = running.wire.events([(0.0, data)])
    return [sum(event["metrics"][name].values()) for name in _DRAFTED]


def stream(
    given: argparse.Namespace, running: servers.Running, n: int, seed: str, job: Job
) -> float:
    """Stream from `n` requests that are like `job` but for their prompts; return the rate."""
    plain = clients.jobs(n, given.prompt_tokens, given.gen_tokens, f"{seed}/{n}")
    work = [
        replace(job, id=each.id, prompt=each.prompt, max_tokens=each.max_tokens) for each in plain
    ]
    return rate(clients.checked(drive(running.wire, work)))


def play(
    given: argparse.Namespace,
    cases: Sequence[int],
    oracle: bool,
    running: servers.Running,
    seed: str,
) -> list[Row]:
    """Stream each case with and without drafts; with an `oracle` it hears the answers first."""
    found: list[Row] = []
    for n in cases:
        job = Job("", "", 0, sampled=not oracle, speculation="off")
        # It also warms up: the daemon has measured its ticks, and the lookup knows earlier answers.
        stream(given, running, n, seed, job)
        before = counted(running)
        rates: dict[str, list[float]] = {"auto": [], "off": []}
        for place, how in enumerate(("auto", "off", "off", "auto")):
            prompts = seed if oracle else f"{seed}/{place}"
            rates[how].append(stream(given, running, n, prompts, replace(job, speculation=how)))
        rows, right = (now - then for now, then in zip(counted(running), before, strict=True))
        plain, drafted = median(rates["off"]), median(rates["auto"])
        tokens = 2 * n * given.gen_tokens
        found.append({
            "case": f"N={n}", "without": plain, "with": drafted, "times": drafted / plain,
            "accepted": right / rows if rows else None, "rows": rows / tokens,
        })  # fmt: skip
    return found


def play_peer(
    given: argparse.Namespace,
    cases: Sequence[int],
    figure: str,
    running: servers.Running,
    seed: str,
) -> list[Row]:
    """Stream each case from llama-server, the second time counted."""
    job = Job("", "", 0)
    rates = [[stream(given, running, n, seed, job) for _ in range(2)][1] for n in cases]
    return [{"case": f"N={n}", figure: found} for n, found in zip(cases, rates, strict=True)]


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield for each case whether its targets are met, with the spread of the repetitions."""
    best: dict[str, float] = {}
    for system in medians.systems:
        if system.family == PEER:
            found = medians(system, "with") or medians(system, "without") or 0.0
            best[system.case] = max(found, best.get(system.case, 0.0))
    for system in medians.systems:
        n = int(system.case.removeprefix("N=") or 0)
        if system.family != OURS or (system.knob, n) not in TARGETS:
            continue
        values = medians.values(system, "times") or [0.0]
        spread = f"from {min(values):.2f} to {max(values):.2f}"
        target = TARGETS[system.knob, n]
        times = medians(system, "times")
        label = f"{system.knob}, N={n}"
        yield contest.verdict(f"{label}: times ({spread})", times, target, at_most=False)
        rate = medians(system, "with")
        if system.knob == LIKELY and n in OF_PEER and rate and best.get(system.case):
            by_peer = rate / best[system.case]
            line = f"{label}: of the best {PEER}"
            yield contest.verdict(line, by_peer, OF_PEER[n], at_most=False)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--n", type=int, nargs="+", default=[1, 2, 3, 7], metavar="N", help="streams at once")
    add("--prompt-tokens", type=int, default=32, metavar="N")
    add("--gen-tokens", type=int, metavar="N")


@scene(arguments)
def speculation(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with and without drafts, and with llama-server's lookup."""
    given.gen_tokens = given.gen_tokens or (96 if given.quick or given.dry_run else 256)
    room = max(*given.n, 4)
    n_ctx = 2048 + room * (given.prompt_tokens + given.gen_tokens)
    setup = servers.Setup(here.model, here.threads, n_ctx, room)
    compared: list[System] = []
    for knob, acceptance, cases in ((LIKELY, ACCEPTANCE, given.n), (WRONG, 0.0, [1, 4])):
        once = partial(play, given, cases, True)
        compared.append(contest.serving(OURS, knob, partial(_daemon, setup, acceptance), once))
    once = partial(play, given, [1, 4], False)
    compared.append(contest.serving(OURS, NOTHING, partial(servers.ours, setup, *_AUTO), once))
    for most, figure in ((0, "without"), (3, "with"), (7, "with")):
        once = partial(play_peer, given, given.n, figure)
        flags = [_peer_flags(room, most)]
        knob = f"lookup {most}" if most else "plain"
        found = contest.llama_servers(here.peers, setup, flags, once)
        compared += [replace(system, knob=knob) for system in found]
    return Comparison(
        compared,
        seconds=15 + 0.25 * given.gen_tokens,
        minutes=30,
        tables=[_TABLE],
        facts={"load": f"{given.prompt_tokens} prompt tokens, {given.gen_tokens} generated"},
        verdicts=verdicts,
    )


def _daemon(
    setup: servers.Setup, acceptance: float
) -> contextlib.AbstractContextManager[servers.Running]:
    if setup.model == servers.FAKE:  # which has no rows for drafts
        return servers.ours(setup, *_AUTO)
    return servers.daemon(setup, ("-m", "benches.oracle", str(acceptance)), _AUTO)


def _peer_flags(slots: int, most: int) -> tuple[str, ...]:
    """Return llama-server's flags for up to `most` drafts a stream, 0 for none."""
    flags = servers.server_flags("np-kvu", slots)
    if not most:
        return flags
    rates = ",".join(f"{ACCEPTANCE**n:.3f}" for n in range(1, most + 1))
    return (
        *flags, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2",
        "--spec-ngram-simple-size-m", str(most), "--spec-synth-rates", rates,
    )  # fmt: skip
