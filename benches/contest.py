"""Several systems through the same script: each alone on the machine, again and again, interleaved.

A benchmark says what a measurement is; this says who is measured, in which order, and what the
repetitions come to. Nothing is left out: what failed is a row with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches import host, report, servers
from benches.clients import NotServed
from benches.report import note
from uma_trio.sim.latency import median

OURS, PEER = "uma-trio", "llama-server"

Row = dict[str, object]
Start = Callable[[], contextlib.AbstractContextManager[servers.Running]]
Play = Callable[[servers.Running, str], Row]
"""What a server goes through, for a seed; returns the figures."""


@dataclass(frozen=True)
class System:
    """One server at one setting of its knob; `measure` is given a seed."""

    family: str
    knob: str
    measure: Callable[[str], Row]

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.family} {self.knob}".strip()


def serving(family: str, knob: str, start: Start, play: Play) -> System:
    """Return a system that starts a fresh server for each measurement and plays `play` on it."""

    def measure(seed: str) -> Row:
        with start() as running:
            foreign = host.Foreign(running.pid)
            return {**play(running, seed), "others_pct": foreign.percent()}

    return System(family, knob, measure)


def daemons(setup: servers.Setup, policies: Iterable[str], play: Play) -> list[System]:
    """Return our daemon under each of `policies`."""
    return [
        serving(
            OURS, policy, lambda policy=policy: servers.ours(setup, "--policy", policy), play  # type: ignore[misc]
        )
        for policy in policies
    ]  # fmt: skip


def llama_servers(
    folder: Path | None, setup: servers.Setup, flags: Iterable[Sequence[str]], play: Play
) -> list[System]:
    """Return llama-server with each of `flags`; none without a `folder` to take it from."""
    if folder is None:
        return []
    return [
        serving(
            PEER, short(each), lambda each=each: servers.llama_server(folder, setup, each), play  # type: ignore[misc]
        )
        for each in flags
    ]  # fmt: skip


def short(flags: Sequence[str]) -> str:
    """Return `flags` as they are typed by people who know them."""
    names = {"--parallel": "-np", "--kv-unified": "-kvu"}
    return " ".join(names.get(flag, flag) for flag in flags)


def order(names: Sequence[str], repetition: int, seed: int) -> list[str]:
    """Return in which order a repetition takes the systems: drawn, then every second time back.

    A machine that slows down or speeds up over a run then favours nobody.
    """
    drawn = list(names)
    random.Random(f"{seed}/{repetition // 2}").shuffle(drawn)
    return drawn[::-1] if repetition % 2 else drawn


@dataclass(frozen=True)
class Effort:
    """How often everything is measured, about how long one takes, and when to stop at the latest."""

    repetitions: int
    seconds: float
    minutes: float


def parser(
    name: str, text: str | None, policies: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """Return the parser of ``benches/<name>.py``, with which of our `policies` it compares if any.

    How long a run may take is for :func:`effort` to read.
    """
    parser = report.parser(name, text)
    report.common_arguments(parser)
    parser.add_argument("--repetitions", type=int, metavar="N", help="of everything (3)")
    parser.add_argument("--minutes", type=float, metavar="M", help="when to give up what is left")
    if policies is not None:
        parser.add_argument("--policies", nargs="+", default=[*policies], metavar="NAME")
    return parser


def effort(given: argparse.Namespace, seconds: float, minutes: float) -> Effort:
    """Return what the command line allows, where one measurement takes about `seconds`."""
    once = given.quick or given.dry_run
    return Effort(given.repetitions or (1 if once else 3), seconds, given.minutes or minutes)


def run(
    compared: Sequence[System],
    effort: Effort,
    seed: int,
    progress: Callable[[Row], str] = lambda _row: "done",
) -> list[Row]:
    """Measure every system in every repetition, in an order that favours nobody.

    On a machine that is so busy that it takes longer than the effort allows, the rest is left out.
    """
    by_name = {system.name: system for system in compared}
    total = effort.repetitions * len(compared)
    note(f"{len(compared)} systems, {effort.repetitions} times: "
         f"about {total * effort.seconds / 60:.1f} minutes")  # fmt: skip
    rows: list[Row] = []
    deadline = time.monotonic() + 60 * effort.minutes
    for repetition in range(effort.repetitions):
        for name in order(list(by_name), repetition, seed):
            if time.monotonic() + effort.seconds > deadline:
                left = f"{total - len(rows)} of {total} measurements were left out"
                note(f"{effort.minutes:g} minutes are over: {left} (--minutes gives more)")
                return rows
            # The same prompts for every system of a repetition, and no two repetitions alike.
            row = measure(by_name[name], f"{seed}/{repetition}")
            rows.append({"repetition": repetition, **row})
            said = f"ERROR {row['error']}" if row.get("error") else progress(row)
            note(f"  {len(rows)}/{total} {name:<24} {said}")
    return rows


def measure(system: System, seed: str) -> Row:
    """Measure one system once; what goes wrong is in ``error``."""
    spin_ms = host.spin_ms()
    found: Row
    try:
        found = system.measure(seed)
    except (NotServed, servers.DidNotStart, OSError, subprocess.SubprocessError) as failure:
        found = {"error": str(failure)}
    return {"family": system.family, "knob": system.knob, "spin_ms": spin_ms, **found}


class Medians:
    """The repetitions of each system, seen as one."""

    def __init__(self, compared: Sequence[System], rows: Sequence[Row]) -> None:
        self.systems = compared
        self._rows = rows

    def __call__(self, system: System, figure: str) -> float | None:
        """Return the median of a figure over the repetitions that have it."""
        found = self.values(system, figure)
        return median(found) if found else None

    def values(self, system: System, figure: str) -> list[float]:
        """Return a figure of every repetition that has it."""
        return [v for r in self._of(system) if isinstance(v := r.get(figure), int | float)]

    def _of(self, system: System) -> list[Row]:
        return [r for r in self._rows if (r["family"], r["knob"]) == (system.family, system.knob)]

    def table(self, columns: Sequence[Column], count: str | None = None) -> str | None:
        """Return a line for each system; None where nobody has anything to show.

        n is the sum of `count`; who was not asked for it has no line, who has none of it a zero.
        Without a `count`, n is how many repetitions came to an end. Who failed has a line too.
        """
        lines: list[list[object]] = []
        measured = False
        for system in self.systems:
            rows = self._of(system)
            failed = [row for row in rows if row.get("error")]
            found = self.values(system, count) if count else [1] * (len(rows) - len(failed))
            measured = measured or bool(found)
            if found or failed:
                cells = [report.cell(self(system, name), digits) for _, name, digits in columns]
                lines.append([system.name, f"{sum(found):.0f}", *cells])
        if not measured:
            return None
        return report.table(["system", "n", *(column[0] for column in columns)], lines)


Column = tuple[str, str, int]
"""Its title, the figure in it, and how many digits after the point."""


def verdict(text: str, value: float | None, target: float, *, at_most: bool = True) -> str:
    """Return one line: a figure, its target, and whether it is met."""
    if value is None:
        return f"{text}: not measured"
    met = value <= target if at_most else value >= target
    bound = "at most" if at_most else "at least"
    return f"{text}: {value:.2f} (target {bound} {target:g}: {'met' if met else 'MISSED'})"


def conclude(
    name: str,
    said: Iterable[str | None],
    rows: Sequence[Row],
    facts: Mapping[str, str],
    draw: Callable[[], Iterable[Path]] = tuple,
) -> int:
    """Print tables and verdicts, write the CSV, then draw; return the exit status."""
    for text in said:
        if text is not None:
            print(f"{text}\n")
    print(report.write_csv(name, rows, facts))
    for file in draw():
        print(file)
    return 1 if any(row.get("error") for row in rows) else 0
