"""What an innocent stream and newcomers feel of attacks on the daemon. Eight minutes.

    python -m benches attacks --no-peers --model uma_trio/models/storyteller.gguf

Every attack (benches/attackers.py) has three rounds, one behind the other: nothing, one process that spins, the
attack. A process of another user attacks, if the benchmark runs as root: then the daemon takes it for another principal;
attacks on the framed socket come from the daemon's own user, since it admits no other. *gap* is the longest time
between two parts of the stream, which is read as a person reads: beside the work of others its tokens are shown a step of
40 ms apart. *by step* is that gap over the step, or over 1.3 times the gap beside the spinning process if that is longer. *TTFT* the median time to first token of newcomers who come one after another, *x* a
figure over the same beside the spinning process. *lag* is the longest lag of the daemon's event loop; it is to be
compared with that beside the spinning process, which is the machine's. *MB* is the growth of the daemon's memory, its
helpers included. Figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benches import beside, contest, servers
from benches.attackers import ATTACKS, NOBODY
from benches.beside import over
from benches.clients import FramedWire, NotServed
from benches.contest import Medians, Row, System
from benches.driver import Comparison, Here, Table, scene

LAG_MS, GAP, TTFT = 5.0, 1.3, 2.0  # the targets
_STEP_MS = 40.0  # of a reader: --reading-pace
_SETTLE_S = 0.5


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS], metavar="NAME", choices=ATTACKS)
    parser.add_argument("--round", type=float, default=2.0, metavar="SECONDS")


@scene(_arguments)
def attacks(given: argparse.Namespace, here: Here) -> Comparison:
    """Return what is measured: one daemon, with a case for each attack."""
    setup = servers.Setup(here.model, here.threads, n_ctx=8192, slots=8)
    round_s = 0.2 if given.dry_run else given.round
    compared = [System("uma-trio", "", lambda _seed: _measure(setup, given.attacks, round_s))]
    columns = (("gap ms", "gap_ms", 1), ("spinner", "spin_gap_ms", 1), ("quiet", "quiet_gap_ms", 1),
               ("by step", "gap_by_step", 2), ("TTFT ms", "ttft_ms", 1), ("spinner", "spin_ttft_ms", 1),
               ("quiet", "quiet_ttft_ms", 1), ("x", "ttft_ratio", 2), ("worst", "worst_ttft_ms", 0),
               ("lag ms", "lag_ms", 1), ("spinner", "spin_lag_ms", 1), ("MB", "grown_mb", 0),
               ("requests", "requests", 0))  # fmt: skip
    return Comparison(
        compared,
        seconds=(3 * round_s + 2 * _SETTLE_S) * len(given.attacks),
        tables=[Table("Beside each attack", columns)],
        repetitions=5,
        facts={"attacker": f"uid {NOBODY}" if _as_another() else "the daemon's own user"},
        verdicts=_verdicts,
    )


def _verdicts(medians: Medians) -> Iterable[str]:
    for figure, target in (("gap_by_step", 1.0), ("ttft_ratio", TTFT), ("lag_ms", LAG_MS)):
        found = [value for s in medians.systems if (value := medians(s, figure)) is not None]
        yield contest.verdict(f"worst {figure}", max(found, default=None), target, at_most=True)


def _measure(setup: servers.Setup, names: list[str], round_s: float) -> list[Row]:
    port = servers.free_port()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(servers.ours(setup, "--http", str(port)))
        if not isinstance(running.wire, FramedWire):
            raise NotServed("the daemon has no socket")
        where = "benches.attackers", str(port), running.wire.path
        own = stack.enter_context(beside.child(*where))
        other = stack.enter_context(beside.child(*where, *_as_another()))
        stream = stack.enter_context(beside.stream(port, "smooth"))
        return [
            _case(name, stream, own if ATTACKS[name].by_socket else other, running.pid, round_s)
            for name in names
        ]


def _case(
    name: str, stream: beside.Stream, attacker: Callable[[str], str], pid: int, round_s: float
) -> Row:
    """Return the figures of one attack, with those of the rounds before it."""
    time.sleep(_SETTLE_S)
    quiet = beside.felt(stream, round_s, arriving=True)
    with beside.spinning():
        spin = beside.felt(stream, round_s, arriving=True)
    before = _memory(pid)
    answers: dict[str, int] = {}

    def attack() -> None:
        answers.update(json.loads(attacker(f"{name} {round_s}")))

    found = beside.felt(stream, round_s, attack, arriving=True)
    return {
        "case": name,
        **{f"{key}_ms": value for key, value in _figures(found).items()},
        **{f"spin_{key}_ms": value for key, value in _figures(spin).items()},
        **{f"quiet_{key}_ms": value for key, value in _figures(quiet).items()},
        "gap_by_step": found.gap_ms / max(GAP * spin.gap_ms, _STEP_MS),
        "ttft_ratio": over(found.usual_ttft_ms, spin.usual_ttft_ms),
        "worst_ttft_ms": max(found.ttft_ms, default=None),
        "grown_mb": _memory(pid) - before,
        "requests": sum(answers.values()),
        "answers": " ".join(f"{key}:{n}" for key, n in sorted(answers.items())),
    }


def _figures(felt: beside.Felt) -> dict[str, float | None]:
    return {"gap": felt.gap_ms, "ttft": felt.usual_ttft_ms, "lag": felt.lag_ms}


def _as_another() -> tuple[str, ...]:
    return (str(NOBODY),) if os.geteuid() == 0 else ()


def _memory(pid: int) -> float:
    """Return the memory of a process and its children, in MB."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    pages = 0
    for each in [str(pid), *children.read_text().split()]:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
