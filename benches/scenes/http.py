"""What HTTP costs beside the socket: one daemon, the same requests by both. Some minutes.

k streams at once ask for short answers to short prompts, by the Unix socket and by ``POST /completion`` in
turn, again and again on the same server. Tokens/s are of all streams together. The time to the first token
is the median of the streams. CPU is that of the thread that runs all connections, per token: what is
computed is on other threads and is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benches import clients, contest, host, servers
from benches.clients import SseWire, Wire
from benches.contest import Column, Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from uma_trio.sim.latency import median

_COLUMNS: tuple[Column, ...] = (
    ("socket tok/s", "socket_rate", 0), ("HTTP tok/s", "http_rate", 0), ("HTTP / socket", "share", 3),
    ("socket TTFT ms", "socket_ttft", 1), ("HTTP TTFT ms", "http_ttft", 1),
    ("more TTFT ms", "more_ttft", 2),
    ("socket us/token", "socket_us", 1), ("HTTP us/token", "http_us", 1),
    ("more us/token", "more_us", 1), ("others %", "others_pct", 0),
)  # fmt: skip
_STREAMS = (1, 4, 8, 16)
_PROMPT_TOKENS = 16
_ROUNDS = 3


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


def play(running: servers.Running, port: int, seed: str, tokens: int, rounds: int) -> list[Row]:
    """Go through every number of streams, by both ways in turn."""
    wires: dict[str, Wire] = {"socket": running.wire, "http": SseWire(port)}
    for name, wire in wires.items():
        once(running, wire, 2, 16, f"{seed}/warm/{name}")
    rows: list[Row] = []
    for k in _STREAMS:
        found: dict[str, list[float]] = {}
        for turn in range(rounds):
            for name, wire in wires.items():
                for figure, value in once(running, wire, k, tokens, f"{seed}/{k}/{turn}").items():
                    found.setdefault(f"{name}_{figure}", []).append(float(str(value)))
        row = {figure: median(values) for figure, values in found.items()}
        row["share"] = row["http_rate"] / row["socket_rate"]
        row["more_ttft"] = row["http_ttft"] - row["socket_ttft"]
        row["more_us"] = row["http_us"] - row["socket_us"]
        rows.append({"case": f"k={k}", **row})
    return rows


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how far each figure is from its target, at every number of streams."""
    for system in medians.systems:
        share = medians(system, "share")
        if share is not None:
            yield contest.verdict(f"{system.case}: socket / HTTP tok/s", 1 / share, 1 / 0.97)
        for figure, target in (("more_ttft", 3.0), ("more_us", 15.0)):
            value = medians(system, figure)
            if value is not None:
                yield contest.verdict(f"{system.case}: {figure}", value, target)


@scene()
def http(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the two ways into one daemon."""
    tokens, rounds = (60, 1) if given.quick or given.dry_run else (256, _ROUNDS)
    setup = servers.Setup(here.model, here.threads, n_ctx=8192, slots=max(_STREAMS))
    port = servers.free_port()
    system = contest.serving(
        contest.OURS,
        "both",
        lambda: servers.ours(setup, "--http", str(port), "--prefix-ram", "0"),
        lambda running, seed: play(running, port, seed, tokens, rounds),
    )
    return Comparison(
        [system],
        seconds=60,
        repetitions=3,
        tables=[Table("", _COLUMNS)],
        facts={"script": f"{tokens} tokens, {rounds} rounds by each way in turn"},
        progress=lambda row: f"{row['case']}: HTTP / socket {row['share']:.3f}",
        verdicts=verdicts,
    )
