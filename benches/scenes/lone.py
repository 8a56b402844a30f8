"""One stream that is read, by itself fresh: beside one light stream, and after a crowd has gone.

    python -m benches lone                            a crowd of 12 with prompts of 300 tokens (4 minutes)
    python -m benches lone --prompt-tokens 1950       longer ones, for a GPU

*alone* is the first stream of a fresh server, in tokens/s as they are shown. *beside* is another one while a
background stream generates. Then a crowd asks at the same moment, and a stream begins when the last of its
answers ends. *after* is that stream from the first token that comes 200 ms later, in ms for each token, by
the tokens at the same places of the stream alone: what the crowd left in the cache costs it time. llama-server
has a slot for each client, one KV cache, and runs once with each set of `--peer-flags`. The daemon drafts
nothing unless `--speculation` says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benches import clients, contest, servers
from benches.clients import Answer, Job, NotServed
from benches.contest import Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import Live, Stream, drive
from benches.report import cell
from benches.scenes.agents import daemon_arguments, peer_arguments, systems

PATIENCE_S = 300.0
BACK_S = 0.2  # after the crowd; a lone stream is to have its speed by then
_TABLE = Table("", (
    ("alone t/s", "alone", 1), ("beside t/s", "beside", 1), ("beside by alone", "beside_x", 3),
    ("background t/s", "background", 1), ("fresh ms", "fresh_ms", 2), ("after ms", "after_ms", 2),
    ("after by fresh", "after_x", 3), ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


def interval(times: Sequence[float]) -> float:
    """Return the mean seconds between tokens. Raises :class:`NotServed` if there are less than two."""
    if len(times) < 2 or times[-1] <= times[0]:
        raise NotServed("the stream was too short: --gen-tokens 640")
    return (times[-1] - times[0]) / (len(times) - 1)


def beside(wire: clients.Wire, reader: Job, light: Job) -> Row:
    """Read a stream while another generates in the background."""
    with Live(wire) as live:
        other = live.start(light)
        live.run(PATIENCE_S, lambda: len(other.reads) > 1)
        stream = live.start(reader)
        live.run(PATIENCE_S, lambda: stream.over or other.over)
        if not stream.over:
            raise NotServed("the background stream ended first")
    (answer,) = clients.checked(live.answers([stream]))
    begin, end = answer.times[0], answer.times[-1]
    (made,) = live.answers([other])
    meanwhile = sum(begin <= at <= end for at in made.times)
    return {"beside": 1 / interval(answer.times), "background": meanwhile / (end - begin)}


def after(wire: clients.Wire, reader: Job, crowd: Sequence[Job], alone: Answer) -> Row:
    """Read a stream that begins when the last of a crowd is answered."""
    with Live(wire) as live:
        gone: list[Stream] = [live.start(job) for job in crowd]
        live.run(PATIENCE_S, lambda: all(stream.over for stream in gone))
        ended = live.now
        stream = live.start(reader)
        live.run(PATIENCE_S, lambda: stream.over)
    clients.checked(live.answers(gone))
    (answer,) = clients.checked(live.answers([stream]))
    first = sum(at < ended + BACK_S for at in answer.times)
    fresh, later = interval(alone.times[first:]), interval(answer.times[first:])
    return {"fresh_ms": 1e3 * fresh, "after_ms": 1e3 * later, "after_x": later / fresh}


def play(given: argparse.Namespace, running: servers.Running, seed: str) -> Row:
    """Read a stream alone, one beside a light stream, and one after a crowd."""
    wire = running.wire
    clients.checked(drive(wire, clients.jobs(1, 16, 2, f"{seed}/warm")))
    fresh, second, third = (
        replace(job, priority="interactive")
        for job in clients.jobs(3, 32, given.gen_tokens, f"{seed}/readers")
    )
    (alone,) = clients.checked(drive(wire, [fresh]))
    row: Row = {"alone": 1 / interval(alone.times)}
    (light,) = clients.jobs(1, 16, 4 * given.gen_tokens, f"{seed}/light")
    row |= beside(wire, second, replace(light, priority="background"))
    row["beside_x"] = interval(alone.times) * float(str(row["beside"]))
    crowd = clients.jobs(given.crowd, given.prompt_tokens, given.answer, f"{seed}/crowd")
    asked = [replace(job, priority="interactive") for job in crowd]
    return row | after(wire, third, asked, alone)


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield both figures of each of our settings with their targets."""
    for system in medians.systems:
        if system.family == contest.OURS:
            shown, back = medians(system, "beside_x"), medians(system, "after_x")
            yield contest.verdict(f"{system.name}: beside by alone", shown, 0.8, at_most=False)
            yield contest.verdict(f"{system.name}: after a crowd by fresh", back, 1.05)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--gen-tokens",
        type=int,
        metavar="N",
        help="tokens of each stream that is read (320; --quick: 160)",
    )
    add("--crowd", type=int, default=12, metavar="N", help="how many ask at once (12)")
    add("--prompt-tokens", type=int, default=300, metavar="N", help="of each of them (300)")
    add("--answer", type=int, default=40, metavar="N", help="tokens that each of them gets (40)")
    daemon_arguments(parser)
    peer_arguments(parser, ("", "-cram 0"))


@scene(arguments)
def lone(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server."""
    short = given.quick or given.dry_run
    given.gen_tokens = given.gen_tokens or (160 if short else 320)
    if given.dry_run:
        given.crowd, given.prompt_tokens = 4, 40
    cells = given.crowd * (given.prompt_tokens + given.answer + 16) + 8 * given.gen_tokens + 512
    setup = servers.Setup(here.model, here.threads, -(-cells // 1024) * 1024, given.crowd + 1)
    return Comparison(
        systems(given, here, setup, partial(play, given)),
        seconds=40,
        tables=[_TABLE],
        facts={
            "crowd": f"{given.crowd} prompts of {given.prompt_tokens} tokens, answers of {given.answer}"
        },
        progress=lambda row: (
            f"{cell(row.get('beside_x'), 2)} beside, {cell(row.get('after_x'), 2)} after"
        ),
        verdicts=verdicts,
    )
