"""How evenly tokens are shown where ticks are short, without a GPU: a daemon that sleeps its ticks.

    python -m benches lateness             medians of 3 (2 minutes), no model
    chrt -f 10 python -m benches lateness  on a machine where others work, too

A tick takes as long as on an H200 (the table `h200` of the simulator) and computes nothing. A reader
is read alone, and then beside 3 clients that send prompts one after another. Its tokens are then
shown one step after another, so what its gaps vary by is how late they are written: the timer's wake,
the wait for the interpreter, which the engine's thread has, and the way to the socket. *jitter* is the
p95 less the p50, in milliseconds.
"""

from __future__ import annotations

import argparse
from functools import partial

from benches import servers
from benches.clients import Job
from benches.contest import OURS, Row, serving
from benches.driver import Comparison, Here, Table, scene
from benches.live import Endless, Live, Stream
from uma_trio_sim.latency import gaps, median, percentile

MACHINE = "h200"
_CAP = 1.2
_WARM_S = 0.5  # of a stream, and of the load: nothing of it counts
_SLOTS = 16


def play(seconds: float, running: servers.Running, seed: str) -> Row:
    """Read a stream alone for so long, then one beside others' prompts."""
    with Live(running.wire) as live:
        alone = _gaps_ms(live, f"{seed}/alone", seconds)
        n = iter(range(10**6))
        load = Endless(
            live,
            lambda: Job(f"load-{next(n)}", seed + " the of and to" * 120, 1, priority="background"),
        )
        for _ in range(3):
            load.send()
        live.run(_WARM_S)
        beside = _gaps_ms(live, f"{seed}/beside", seconds)
    row: Row = {"alone_p50": median(alone), "alone_p95": percentile(alone, 95)}
    for share in (0.5, 0.95, 0.99):
        name, gap = f"p{share * 100:.0f}", percentile(beside, 100 * share)
        row[f"{name}_ms"], row[f"{name}_x"] = gap, gap / percentile(alone, 100 * share)
    row["jitter_ms"] = percentile(beside, 95) - median(beside)
    return row


def _gaps_ms(live: Live, name: str, seconds: float) -> list[float]:
    """Return the times between the tokens of a stream that is read for so long."""
    stream: Stream = live.start(Job(name, "of the", 1 << 14))
    live.run(_WARM_S + seconds)
    live.stop(stream)
    (answer,) = live.answers([stream])
    times = [at for at in answer.times if at > answer.times[0] + _WARM_S]
    return [gap * 1e3 for gap in gaps(times)]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--seconds", type=float, default=6.0)


@scene(arguments)
def lateness(given: argparse.Namespace, here: Here) -> Comparison:
    """Read a stream alone and beside prompts, on a machine with short ticks."""
    seconds = 0.5 if given.dry_run else given.seconds
    setup = servers.Setup(servers.FAKE, here.threads, slots=_SLOTS)
    launcher = ("-m", "benches.sleeping", MACHINE)
    flags = ("--policy", "deadline", "--latency-cap", f"{_CAP:g}")
    start = partial(servers.daemon, setup, launcher, flags)
    return Comparison(
        [serving(OURS, f"cap {_CAP:g}", start, partial(play, seconds))],
        seconds=2 * seconds + 6,
        tables=[
            Table(
                "Gaps of a reader, alone and beside 3 clients with prompts",
                (
                    ("alone p50 ms", "alone_p50", 2),
                    ("p95 ms", "alone_p95", 2),
                    ("p50 x", "p50_x", 2),
                    ("p95 x", "p95_x", 2),
                    ("p99 x", "p99_x", 2),
                    ("p50 ms", "p50_ms", 2),
                    ("jitter ms", "jitter_ms", 2),
                    ("others %", "others_pct", 0),
                ),
            )
        ],
        facts={"machine": MACHINE, "seconds": seconds},
        progress=lambda row: f"p95 {row['p95_x']:.2f} x alone, jitter {row['jitter_ms']:.2f} ms",
        bars={"p95 of a reader, times alone": "p95_x"},
    )
