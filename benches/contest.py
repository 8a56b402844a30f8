"""Several systems through the same script: each alone on the machine, again and again, interleaved.

A scene says what a measurement is; this says who is measured, in which order, and what the
repetitions come to. Nothing is left out: what failed is a row with its error.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benches import host, report, servers
from benches.clients import NotServed
from benches.report import note
from uma_trio_sim.latency import median

OURS, PEER = "uma-trio", "llama-server"

Row = dict[str, object]
Start = Callable[[], contextlib.AbstractContextManager[servers.Running]]
Play = Callable[[servers.Running, str], "Row | list[Row]"]
"""What a server goes through, for a seed; returns figures, of several cases as a list."""

Column = tuple[str, str, int]
"""Its title, the figure in it, and how many digits after the point."""


@dataclass(frozen=True)
class System:
    """One server at one setting of its knob, in one case; `measure` is given a seed."""

    family: str
    knob: str
    measure: Callable[[str], Row | list[Row]]
    case: str = ""

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.family} {self.knob}".strip()


def serving(family: str, knob: str, start: Start, play: Play, case: str = "") -> System:
    """Return a system that starts a fresh server for each measurement and plays `play` on it."""

    def measure(seed: str) -> list[Row]:
        with start() as running:
            foreign = host.Foreign(running.pid)
            found = play(running, seed)
            others = {"others_pct": foreign.percent()}
        return [{**row, **others} for row in (found if isinstance(found, list) else [found])]

    return System(family, knob, measure, case)


def daemons(
    setup: servers.Setup, policies: Iterable[str], play: Play, case: str = ""
) -> list[System]:
    """Return our daemon under each of `policies`."""

    def start(policy: str) -> Start:
        return lambda: servers.ours(setup, "--policy", policy)

    return [serving(OURS, policy, start(policy), play, case) for policy in policies]


def llama_servers(
    folder: Path | None,
    setup: servers.Setup,
    flags: Iterable[Sequence[str]],
    play: Play,
    case: str = "",
) -> list[System]:
    """Return llama-server with each of `flags`; none without a `folder` to take it from."""
    if folder is None:
        return []

    def start(each: Sequence[str]) -> Start:
        return lambda: servers.llama_server(folder, setup, each)

    return [serving(PEER, short(each), start(each), play, case) for each in flags]


def program(command: Sequence[str], parse: Callable[[dict[str, Any]], Row]) -> Row:
    """Run one of llama.cpp's own benchmarks; return what `parse` makes of its line of JSON.

    Raises:
        NotServed: it printed none.
    """
    foreign = host.Foreign()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        env=servers.environment(),
    )  # fmt: skip
    found = json_line(done.stdout, done.stderr, Path(command[0]).name)
    return parse(found) | {"others_pct": foreign.percent()}


def json_line(output: str, error: str, name: str) -> dict[str, Any]:
    """Return the one line of JSON in `output`. Raises :class:`NotServed` if there is none."""
    for line in output.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    raise NotServed(f"no result from {name}: {output.strip()[-300:]}{error[-300:]}")


def short(flags: Sequence[str]) -> str:
    """Return `flags` as they are typed by people who know them."""
    names = {"--parallel": "-np", "--kv-unified": "-kvu"}
    return " ".join(names.get(flag, flag) for flag in flags)


def order(compared: Sequence[System], repetition: int, seed: int) -> list[System]:
    """Return in which order a repetition takes the systems: drawn, then every second time back.

    A machine that slows down or speeds up over a run then favours nobody. Systems of one case
    follow one another.
    """
    drawn = list(compared)
    random.Random(f"{seed}/{repetition // 2}").shuffle(drawn)
    cases = list(dict.fromkeys(system.case for system in compared))
    drawn.sort(key=lambda system: cases.index(system.case))
    return drawn[::-1] if repetition % 2 else drawn


@dataclass(frozen=True)
class Effort:
    """How often everything is measured, about how long one takes, and when to stop at the latest."""

    repetitions: int
    seconds: float
    minutes: float


def run(
    compared: Sequence[System],
    effort: Effort,
    seed: int,
    progress: Callable[[Row], str] = lambda _row: "done",
) -> list[Row]:
    """Measure every system in every repetition, in an order that favours nobody.

    On a machine that is so busy that it takes longer than the effort allows, the rest is left out.
    """
    total, done = effort.repetitions * len(compared), 0
    note(f"{len(compared)} systems, {effort.repetitions} times: "
         f"about {total * effort.seconds / 60:.1f} minutes")  # fmt: skip
    rows: list[Row] = []
    deadline = time.monotonic() + 60 * effort.minutes
    for repetition in range(effort.repetitions):
        for system in order(compared, repetition, seed):
            if time.monotonic() + effort.seconds > deadline:
                left = f"{total - done} of {total} measurements were left out"
                note(f"{effort.minutes:g} minutes are over: {left} (--minutes gives more)")
                return rows
            # The same prompts for every system of a repetition, and no two repetitions alike.
            found = measure(system, f"{seed}/{repetition}")
            rows += [{"repetition": repetition, **row} for row in found]
            done += 1
            label = f"{system.case} {system.name}".strip()
            said = [f"ERROR {row['error']}" if row.get("error") else progress(row) for row in found]
            note(f"  {done}/{total} {label:<24} {'; '.join(said)}")
    return rows


def measure(system: System, seed: str) -> list[Row]:
    """Measure one system once; what goes wrong is in ``error``."""
    spin_ms = host.spin_ms()
    found: Row | list[Row]
    try:
        found = system.measure(seed)
    except (NotServed, servers.DidNotStart, OSError, subprocess.SubprocessError) as failure:
        found = {"error": str(failure)}
    whose = {"case": system.case, "family": system.family, "knob": system.knob, "spin_ms": spin_ms}
    return [{**whose, **row} for row in (found if isinstance(found, list) else [found])]


class Medians:
    """The repetitions of each system and case, seen as one; `systems` are those with a row."""

    def __init__(self, compared: Sequence[System], rows: Sequence[Row]) -> None:
        self._rows = rows
        measured = {(r["family"], r["knob"], r["case"]) for r in rows}
        cases = dict.fromkeys([*(s.case for s in compared), *(str(r["case"]) for r in rows)])
        named = {(s.family, s.knob): s for s in compared}
        self.systems = [
            replace(system, case=case)
            for case in cases
            for (family, knob), system in named.items()
            if (family, knob, case) in measured
        ]

    def __call__(self, system: System, figure: str) -> float | None:
        """Return the median of a figure over the repetitions that have it."""
        found = self.values(system, figure)
        return median(found) if found else None

    def values(self, system: System, figure: str) -> list[float]:
        """Return a figure of every repetition that has it."""
        return [v for r in self._of(system) if isinstance(v := r.get(figure), int | float)]

    def by_name(self, figure: str) -> dict[str, float]:
        """Return the median of a figure for each system that has it, for a chart."""
        return {s.name: v for s in self.systems if (v := self(s, figure)) is not None}

    def by_case(self, figure: str) -> dict[str, list[tuple[float, float]]]:
        """Return for each system name the medians of a figure over the number in the case."""
        found: dict[str, list[tuple[float, float]]] = {}
        for system in self.systems:
            if (value := self(system, figure)) is not None:
                x = float(system.case.rpartition("=")[2])
                found.setdefault(system.name, []).append((x, value))
        return found

    def _of(self, system: System) -> list[Row]:
        whose = (system.family, system.knob, system.case)
        return [r for r in self._rows if (r["family"], r["knob"], r["case"]) == whose]

    def table(self, columns: Sequence[Column], count: str | None = None) -> str | None:
        """Return a line for each system and case; None where nobody has anything to show.

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
                label = " ".join(filter(None, (system.case, system.name)))
                lines.append([label, f"{sum(found):.0f}", *cells])
        if not measured:
            return None
        return report.table(["system", "n", *(column[0] for column in columns)], lines)


def with_share(rows: Sequence[Row], figure: str, ceiling: str) -> list[Row]:
    """Return `rows`, each with its `figure` by that of the family `ceiling`, as ``share``.

    Of the same repetition and case: a machine that changes between repetitions changes no share.
    """
    top = {
        (r["repetition"], r["case"]): value
        for r in rows
        if r["family"] == ceiling and isinstance(value := r.get(figure), float)
    }

    def share(row: Row) -> float | None:
        value, above = row.get(figure), top.get((row["repetition"], row["case"]))
        return value / above if isinstance(value, float) and above else None

    return [{**row, "share": share(row)} for row in rows]


def verdict(text: str, value: float | None, target: float, *, at_most: bool = True) -> str:
    """Return one line: a figure, its target, and whether it is met."""
    if value is None:
        return f"{text}: not measured"
    met = value <= target if at_most else value >= target
    bound = "at most" if at_most else "at least"
    return f"{text}: {value:.2f} (target {bound} {target:g}: {'met' if met else 'MISSED'})"
