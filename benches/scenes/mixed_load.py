"""Three people chat, and a program has a long document summed up: when each token arrived.

    python -m benches mixed_load            every server once (3 to 8 minutes)
    python -m benches mixed_load --quick    shorter answers (1 to 4 minutes)
    python -m benches mixed_load --unlabelled    the document comes without `priority`

Beside the summary there is, for each server, a CSV with exactly the columns
``session_id,token_idx,ts_ms,is_interactive``, time counted from the first request sent. Sessions 0
to 2 are the chats, the next is the document, sent half a second after them. The chats are measured
alone first, on the same server. A server that has not done everything after ten times as long as
that took, and at least a minute, is given up, which is said; its figures are of what was read until
then. The scene `storm` says how far a load may go; this shows one.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches import chart, clients, contest, report, servers
from benches.clients import Answer, Job, Wire
from benches.contest import Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import Live, drive
from benches.pace import pace, ratios
from uma_trio_sim.latency import itl

COLUMNS = ("session_id", "token_idx", "ts_ms", "is_interactive")
_CHAT_TOKENS, _DOCUMENT_AFTER_S = 30, 0.5
_LEAST_S, _PATIENCE = 60.0, 10.0  # a slow machine has longer: so many times the chats alone
_AXES = ("seconds since the first request", "ms since the token before (less is better)")
_TABLE = Table("Inter-token latency of the chats, and its ratio to the same chats alone", (
    ("p50 ms", "p50", 1), ("p95 ms", "p95", 1), ("p99 ms", "p99", 1), ("worst ms", "worst", 1),
    ("p50 x", "p50_x", 2), ("p95 x", "p95_x", 2), ("p99 x", "p99_x", 2),
    ("worst 3 s x", "worst_startup_x", 2), ("document's TTFT s", "document_ttft_s", 2),
    ("all t/s", "tokens_per_s", 1),
), "n")  # fmt: skip


def token_rows(
    answers: Sequence[Answer], interactive: int
) -> Iterator[tuple[int, int, float, int]]:
    """Yield one row for each token; the first `interactive` answers are the chats."""
    began = min(answer.sent for answer in answers)
    for session, answer in enumerate(answers):
        for i, at in enumerate(answer.times):
            yield session, i, 1e3 * (at - began), int(session < interactive)


def write_tokens(name: str, answers: Sequence[Answer], interactive: int) -> Path:
    """Write the tokens of one server to ``benches/out``, with its own columns; return the file."""
    report.OUT.mkdir(exist_ok=True)
    stem = "-".join("".join(c if c.isalnum() or c == "." else " " for c in name).split())
    path = report.OUT / f"mixed_load-{stem}-{time.strftime('%Y%m%dT%H%M%S')}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for session, i, ms, chat in token_rows(answers, interactive):
            writer.writerow((session, i, f"{ms:.3f}", chat))
    return path


@dataclass(frozen=True)
class Played:
    """What was read: the chats alone, then chats and document; `left` is what was given up."""

    alone: list[Answer]
    answers: list[Answer]
    left: str = ""


def play(wire: Wire, given: argparse.Namespace, seed: str, least_s: float = _LEAST_S) -> Played:
    """Have the chats answered alone, then beside the document."""
    chats = clients.jobs(2 * given.interactive + 1, _CHAT_TOKENS, given.gen_tokens, seed)
    drive(wire, [chats.pop()])  # warms up
    chats = [Job(c.id, c.prompt, c.max_tokens, "interactive") for c in chats]
    alone = drive(wire, chats[: given.interactive])
    (text,) = clients.jobs(1, given.document_tokens, given.gen_tokens, f"{seed}/document")
    lane = None if given.unlabelled else "background"
    most_s = max(least_s, patience(alone))
    with Live(wire) as live:
        streams = [live.start(job) for job in chats[given.interactive :]]
        live.run(_DOCUMENT_AFTER_S)
        streams.append(live.start(Job("document", text.prompt, text.max_tokens, lane)))
        live.run(most_s, lambda: all(stream.over for stream in streams))
    answers = live.answers(streams)
    left = [
        f"{len(answer.times)} of {stream.job.max_tokens} tokens of session {session}"
        for session, (stream, answer) in enumerate(zip(streams, answers, strict=True))
        if not stream.whole
    ]
    said = f"given up after {most_s:.0f} s with {', '.join(left)}" if left else ""
    return Played(alone, answers, said)


def patience(alone: Sequence[Answer]) -> float:
    """Return for how many seconds chats and document are waited for, by what `alone` took."""
    return _PATIENCE * max((a.times[-1] - a.sent for a in alone if a.times), default=0.0)


def summarise(played: Played) -> Row:
    """Return what the chats felt and what the document took."""
    alone, answers = played.alone, played.answers
    *chats, document = answers
    solo = pace([a.sent for a in alone], [a.times for a in alone])
    beside = pace([a.sent for a in chats], [a.times for a in chats])
    ends = [a.times[-1] for a in answers if a.times]
    seconds = max(ends) - min(a.sent for a in answers) if ends else 0.0
    return {
        "n": beside.n if beside else 0,
        "solo_p95": solo.p95 if solo else None,
        **{name: getattr(beside, name, None) for name in ("p50", "p95", "p99", "worst")},
        **ratios(beside, solo),
        "document_ttft_s": document.ttft_s,
        "tokens_per_s": sum(len(a.times) for a in answers) / seconds if seconds else None,
        "left": played.left,
        "error": clients.first_error([*alone, *answers]),
        "answers": answers,
    }


def _latencies(answer: Answer) -> list[tuple[float, float]]:
    """Return the ITL of each token that came after the first delivery, which may have several, by its time."""
    found = itl(answer.times)
    return list(zip(answer.times[len(answer.times) - len(found) :], found, strict=True))


def latencies(answers: Sequence[Answer], interactive: int) -> list[tuple[float, float]]:
    """Return each ITL of the chats, in ms, by the second since the first request at which it ended."""
    began = min(answer.sent for answer in answers)
    return sorted(
        (at - began, 1e3 * latency)
        for answer in answers[:interactive]
        for at, latency in _latencies(answer)
        if latency > 0  # tokens that were read at once
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--interactive", type=int, default=3, metavar="N", help="how many chat")
    add("--document-tokens", type=int, default=3000, metavar="N", help="length of the document")
    add("--gen-tokens", type=int, metavar="N", help="tokens of each answer")
    add("--unlabelled", action="store_true", help="the document names no priority")


@scene(arguments, policies=["deadline", "baseline"])
def mixed_load(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server at three batch sizes."""
    short = 30 if given.dry_run else 150
    given.gen_tokens = given.gen_tokens or (short if given.quick or given.dry_run else 400)
    cells = given.interactive * (given.gen_tokens + 64) + given.document_tokens + given.gen_tokens
    slots = given.interactive + 1
    setup = servers.Setup(here.model, here.threads, -(-(cells + 256) // 1024) * 1024, slots)

    def once(running: servers.Running, seed: str) -> Row:
        return summarise(play(running.wire, given, seed))

    felt: dict[str, list[tuple[float, float]]] = {}

    def complete(rows: list[Row]) -> list[Row]:
        for row in rows:
            if isinstance(answers := row.pop("answers", None), list):
                name = f"{row['family']} {row['knob']}"
                felt[name] = latencies(answers, given.interactive)
                report.note(str(write_tokens(name, answers, given.interactive)))
        return rows

    shared = servers.server_flags("np-kvu", slots)
    flags = [(*shared, *size) for size in ((), ("-b", "64"), ("-b", "16"))]
    compared = contest.daemons(setup, given.policies, once)
    compared += contest.llama_servers(here.peers, setup, flags, once)
    return Comparison(
        compared,
        seconds=60,
        repetitions=1,
        tables=[_TABLE],
        progress=lambda row: str(row["left"] or "done"),
        complete=complete,
        charts=lambda _medians, caption: chart.lines(
            "mixed_load", {"latency of the chats": felt}, _AXES, caption, wide=True
        ),
    )
