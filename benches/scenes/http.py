"""HTTP beside the socket and beside llama-server: rates, first tokens, CPU, crowds, clients that leave.

k streams at once ask for short answers to short prompts, on our daemon by the Unix socket and by ``POST
/completion`` in turn. Tokens/s are of all streams together; the time to the first token (TTFT) is the median
of the streams. CPU is that of the thread that runs all connections, per token: what is computed is on other
threads and is the same. Then, each a table: single questions by both ways in turn, alone and beside 4 streams;
a reader beside 32 background streams, 8 of which nobody reads; when the head of an answer to a prompt of 8k
tokens comes, and how long the row of a client that left stays taken; and what HTTP costs a daemon that nobody
asks anything. llama-server is measured with one KV cache for all slots. 20 minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benches import clients, contest, host, servers, visits
from benches.clients import SseWire, Wire
from benches.contest import Column, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from uma_trio_sim.latency import median

_RATES: tuple[Column, ...] = (
    ("socket tok/s", "socket_rate", 1), ("HTTP tok/s", "http_rate", 1), ("HTTP / socket", "share", 3),
    ("socket TTFT ms", "socket_ttft", 1), ("HTTP TTFT ms", "http_ttft", 1),
    ("socket us/token", "socket_us", 1), ("HTTP us/token", "http_us", 1),
    ("more us/token", "more_us", 1), ("others %", "others_pct", 0),
)  # fmt: skip
_FIRST: tuple[Column, ...] = (
    ("socket p50 ms", "socket_p50", 1), ("HTTP p50 ms", "http_p50", 1), ("more p50 ms", "more_p50", 2),
    ("socket p95 ms", "socket_p95", 1), ("HTTP p95 ms", "http_p95", 1), ("more p95 ms", "more_p95", 2),
)  # fmt: skip
_CROWD: tuple[Column, ...] = (
    ("alone p95 ms", "alone_p95", 1), ("beside 32 p95 ms", "crowd_p95", 1), ("x", "crowd_x", 2),
)  # fmt: skip
_LEFT: tuple[Column, ...] = (
    ("8k tokenised ms", "tokenise_ms", 1), ("head of 8k ms", "head_ms", 1), ("left in prefill: freed ms", "left_prefill_ms", 0),
    ("in decode: freed ms", "left_decode_ms", 0), ("worst", "left_decode_worst_ms", 0),
)  # fmt: skip
_IDLE: tuple[Column, ...] = (("PSS MiB", "pss", 1), ("wake-ups/s", "wakes", 2))
_STREAMS = (1, 4, 8, 16)
_PROMPT_TOKENS = 16
_CROWD_N, _SLOW_N = 32, 8
# A daemon measures what ticks cost for a while after it let clients in.
_SETTLED_S, _QUIET = 90.0, 50


@dataclass(frozen=True)
class Script:
    """How much of everything; `tokens` is the length of the answers whose rate is taken."""

    tokens: int = 192
    rounds: int = 1
    questions: int = 30
    reader_tokens: int = 80
    long_tokens: int = 8000
    patience_s: float = 5.0
    leavers: int = 5
    idle_s: float = 10.0


_SHORT = Script(tokens=60, questions=3, reader_tokens=20, leavers=1, patience_s=1.0, idle_s=1.0)


def once(running: servers.Running, wire: Wire, k: int, tokens: int, seed: str) -> Row:
    """Ask k times at once by `wire`."""
    before = host.thread_cpu_s(running.pid)[running.pid]
    answers = clients.checked(drive(wire, clients.jobs(k, _PROMPT_TOKENS, tokens, seed)))
    spent_s = host.thread_cpu_s(running.pid)[running.pid] - before
    began = min(answer.times[0] for answer in answers)
    ended = max(answer.times[-1] for answer in answers)
    return {
        "rate": (k * tokens - 1) / (ended - began),
        "ttft": 1e3 * median([answer.ttft_s or 0.0 for answer in answers]),
        "us": 1e6 * spent_s / (k * tokens),
    }


def rates(
    running: servers.Running, ways: dict[str, Wire], seed: str, script: Script
) -> Iterator[Row]:
    """Go through every number of streams, by all ways in turn."""
    for name, wire in ways.items():
        once(running, wire, 2, 16, f"{seed}/warm/{name}")
    for k in _STREAMS:
        found: dict[str, list[float]] = {}
        for turn in range(script.rounds):
            names = list(ways)
            for name in names if turn % 2 else reversed(names):
                got = once(running, ways[name], k, script.tokens, f"{seed}/{k}/{turn}/{name}")
                for figure, value in got.items():
                    found.setdefault(f"{name}_{figure}", []).append(float(str(value)))
        row: Row = {figure: median(values) for figure, values in found.items()}
        if "socket" in ways:
            row |= {
                "share": median(found["http_rate"]) / median(found["socket_rate"]),
                "more_us": median(found["http_us"]) - median(found["socket_us"]),
            }
        else:
            del row["http_us"]  # that of one thread says nothing of another program
        yield {"case": f"k={k}", "rates_n": 1, **row}


def play(
    running: servers.Running, port: int, ways: dict[str, Wire], seed: str, script: Script
) -> list[Row]:
    """Go through everything on one server."""
    wire = SseWire(port, lanes="socket" in ways)
    rows = list(rates(running, ways, seed, script))
    n = script.questions
    asked = visits.compared(visits.first_tokens(ways, f"{seed}/first", n))
    rows.append({"case": "one question", **asked})
    asked = visits.beside_decoders(ways, wire, f"{seed}/busy", n, 4)
    rows.append({"case": "beside 4 streams", **asked})
    crowd = visits.crowd(wire, f"{seed}/crowd", _CROWD_N, _SLOW_N, script.reader_tokens)
    rows.append({"case": "crowd", **crowd})
    left = visits.long_prompt(wire, port, f"{seed}/long", script.long_tokens, script.patience_s)
    left |= visits.leaving(wire, port, f"{seed}/leave", script.leavers)
    rows.append({"case": "leaves", **left})
    return rows


def idle(running: servers.Running, seconds: float) -> Row:
    """Return what a daemon takes that nobody asks anything, once it has measured its ticks."""
    deadline = time.monotonic() + _SETTLED_S
    quiet = False
    while not quiet and time.monotonic() < deadline:
        before = host.wake_ups(running.pid)
        time.sleep(1.0)
        quiet = host.wake_ups(running.pid) - before < _QUIET
    before = host.wake_ups(running.pid)
    time.sleep(seconds)
    wakes = (host.wake_ups(running.pid) - before) / seconds
    return {"idle_n": 1, "pss": host.memory(running.pid).pss, "wakes": wakes}


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how far each figure is from its target."""
    peers = {s.case: medians(s, "http_rate") for s in medians.systems if s.family == contest.PEER}
    pss = {s.knob: medians(s, "pss") for s in medians.systems}
    for system in medians.systems:
        if system.family != contest.OURS:
            continue
        value = medians(system, "http_rate")
        if value is not None and (peer := peers.get(system.case)):
            text = f"{system.case}: HTTP tok/s by llama-server's"
            yield contest.verdict(text, value / peer, 1.0, at_most=False)
        for figure, target in _AT_LEAST.items():
            if (value := medians(system, figure)) is not None:
                yield contest.verdict(f"{system.case}: {figure}", value, target, at_most=False)
        for figure, target in _AT_MOST.items():
            if (value := medians(system, figure)) is not None:
                yield contest.verdict(f"{system.case}: {figure}", value, target)
    on, off = pss.get("--http"), pss.get("off")
    if on is not None and off is not None:
        yield contest.verdict("MiB of an idle HTTP side", on - off, 6.0)


_AT_LEAST = {"share": 0.97}
_AT_MOST = {"more_us": 15.0, "more_p95": 3.0, "crowd_x": 1.2, "head_ms": 10.0}


@scene()
def http(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the two ways into one daemon, and HTTP with llama-server."""
    script = _SHORT if given.quick or given.dry_run else Script()
    slots = _CROWD_N + 2
    setup = servers.Setup(here.model, here.threads, n_ctx=16_384, slots=slots)
    return Comparison(
        [*_both(setup, script), *_peers(here, setup, script), *_idling(setup, script)],
        seconds=150,
        repetitions=3,
        tables=[
            Table("Tokens/s, k streams", _RATES, "rates_n"),
            Table("Time to the first token", _FIRST, "ttft_n"),
            Table(f"A reader beside {_CROWD_N} streams, {_SLOW_N} unread", _CROWD, "crowd_n"),
            Table("Heads, and clients that leave", _LEFT, "left_n"),
            Table("Idle", _IDLE, "idle_n"),
        ],
        facts={"script": f"{script.tokens} tokens, by each way in turn; {slots} slots"},
        progress=_progress,
        verdicts=verdicts,
    )


def _both(setup: servers.Setup, script: Script) -> list[System]:
    port = servers.free_port()

    def measure(running: servers.Running, seed: str) -> list[Row]:
        ways: dict[str, Wire] = {"socket": running.wire, "http": SseWire(port)}
        return play(running, port, ways, seed, script)

    flags = ("--http", str(port), "--prefix-ram", "0")
    return [contest.serving(contest.OURS, "both", lambda: servers.ours(setup, *flags), measure)]


def _peers(here: Here, setup: servers.Setup, script: Script) -> list[System]:
    def measure(running: servers.Running, seed: str) -> list[Row]:
        wire = running.wire
        if not isinstance(wire, SseWire):
            raise TypeError(f"a peer is spoken to over HTTP, not by {wire!r}")
        return play(running, wire.port, {"http": wire}, seed, script)

    return contest.llama_servers(
        here.peers, setup, [servers.server_flags("np-kvu", setup.slots)], measure
    )


def _idling(setup: servers.Setup, script: Script) -> list[System]:
    def system(knob: str, *flags: str) -> System:
        return contest.serving(
            contest.OURS,
            knob,
            lambda: servers.ours(setup, *flags),
            lambda running, _seed: idle(running, script.idle_s),
            "idle",
        )

    return [system("off"), system("--http", "--http", str(servers.free_port()))]


def _progress(row: Row) -> str:
    figures = ("http_rate", "share", "more_p95", "crowd_x", "head_ms", "pss")
    said = [f"{name} {row[name]:.2f}" for name in figures if isinstance(row.get(name), float)]
    return f"{row['case']}: {', '.join(said)}"
