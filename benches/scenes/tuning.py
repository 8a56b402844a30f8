"""What each constant of the policy moves when it is halved and when it is doubled, in simulations.

    python -m benches tuning            prints the table of docs/POLICY.md, and writes it there; half an hour
    python -m benches tuning --only margin_errors aim

Each constant is changed alone (:mod:`uma_trio.policy.tuning`). The same work runs with it in four scenes: one reader
beside prompts without end, a desk, agents with drafts of which 0.7 are right, and programs that come in bursts on the
machine `h200`, where graphs are captured. A figure is that of the scene in which it changes most; a change that is
no larger than one by a constant times 1.001 is left out, since any change makes other answers meet.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve, fields_dict, frozen

from benches.driver import tool
from benches.report import note
from uma_trio.policy.deadline import deadline
from uma_trio.policy.tuning import TUNING, Tuning, why
from uma_trio_sim.compare import Case, itl_alone_s, simulate
from uma_trio_sim.guesses import Guesses
from uma_trio_sim.machine import Profile, built_in, gaussian
from uma_trio_sim.outcome import together
from uma_trio_sim.workload import WORKLOADS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "POLICY.md"
MARK, END = "<!-- tuning: python -m benches tuning -->", "<!-- end of tuning -->"
FIGURES = ("itl_p95_x", "ttft_p50_ms", "load_tokens_s")
SHOWN = 0.01  # the least change that is shown
NOTHING = ("margin_errors", "aim", "scale_rate", "mixed_step_rate")  # times 1.001 for the scatter
CHANCE = 0.7  # that a guess is right

Row = Mapping[str, float | int | None]


@frozen
class Scene:
    """A workload on a machine, with or without guesses."""

    workload: str
    machine: str
    drafts: bool = False

    def figures(self, constants: Tuning, seconds: float, seeds: range) -> Row:
        """Return what it was like with these `constants`."""
        known = built_in(self.machine, gaussian(0.02))
        profile: Profile = evolve(known, believed=evolve(known.believed, tuning=constants))
        guesses = (lambda _draw: Guesses.always(CHANCE)) if self.drafts else None
        case = Case("deadline", deadline, 1.2)
        workload = WORKLOADS[self.workload]
        runs = [simulate(case, workload, profile, seconds, seed, guesses) for seed in seeds]
        return together(runs).row(itl_alone_s(known))


SCENES = (
    Scene("storm", "q4_0"),
    Scene("desk", "q4_0"),
    Scene("agents", "q4_0", drafts=True),
    Scene("bursts", "h200"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this tool takes."""
    parser.add_argument("--only", nargs="*", default=(), help="these constants; prints only")
    parser.add_argument("--seconds", type=float, default=20.0, help="virtual, of each run")
    parser.add_argument("--seeds", type=int, default=2)


@tool(arguments)
def tuning(given: argparse.Namespace) -> int:
    """Print the table; write it into docs/POLICY.md unless only some constants are wanted."""
    names = tuple(given.only) or tuple(fields_dict(Tuning))
    lines = [
        "| constant | value | what it is | halved: p95, TTFT, tokens/s | doubled |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for row in rows(names, given.seconds, range(given.seeds)):
        print(row, flush=True)
        lines.append(row)
    if not given.only:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARK)
        PAGE.write_text(
            f"{before}{MARK}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}",
            encoding="utf-8",
        )
    return 0


def rows(names: Sequence[str], seconds: float, seeds: range) -> Iterator[str]:
    """Yield a line for each constant."""
    measured = partial(figures_of, seconds=seconds, seeds=seeds)
    usual = measured(TUNING)
    near = [measured(changed_by(name, 1.001)) for name in NOTHING]
    scatter = {
        figure: [
            max(abs(change(usual[i], other[i], figure)) for other in near)
            for i in range(len(SCENES))
        ]
        for figure in FIGURES
    }
    for n, name in enumerate(names, start=1):
        cells = []
        for factor in (0.5, 2.0):
            found = measured(changed_by(name, factor))
            cells.append(
                ", ".join(largest(figure, usual, found, scatter[figure]) for figure in FIGURES)
            )
        note(f"{n} of {len(names)}: {name}")
        yield f"| `{name}` | {getattr(TUNING, name):g} | {why(name)} | {cells[0]} | {cells[1]} |"


def figures_of(constants: Tuning, *, seconds: float, seeds: range) -> list[Row]:
    """Return the figures of each scene with these constants."""
    return [scene.figures(constants, seconds, seeds) for scene in SCENES]


def changed_by(name: str, factor: float) -> Tuning:
    """Return the tuning with one constant times `factor`; a count stays a count."""
    value = getattr(TUNING, name)
    other = max(1, round(value * factor)) if isinstance(value, int) else value * factor
    return evolve(TUNING, **{name: other})


def change(before: Row, after: Row, figure: str) -> float:
    """Return by which part of it a figure has changed."""
    was, now = before[figure], after[figure]
    return now / was - 1.0 if was and now else 0.0


def largest(
    figure: str, usual: Sequence[Row], found: Sequence[Row], scatter: Sequence[float]
) -> str:
    """Return the largest change of a figure in any scene beyond its scatter there, in percent."""
    changes = [change(*rows, figure) for rows in zip(usual, found, strict=True)]
    real = [each for each, most in zip(changes, scatter, strict=True) if abs(each) > most]
    most = max(real, key=abs, default=0.0)
    return f"{100 * most:+.0f} %" if abs(most) >= SHOWN else "-"
