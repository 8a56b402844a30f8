"""`uma-trio simulate`: policies compared in virtual time, on a modelled machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from uma_trio.cli.output import OK, complain, console, print_json
from uma_trio.cli.parser import Parameter
from uma_trio.words import several
from uma_trio_sim.commands.progress import RunsDone

if TYPE_CHECKING:
    from uma_trio_sim.compare import Row
    from uma_trio_sim.guesses import Texts
    from uma_trio_sim.machine import Profile

TROUBLE = 2  # nothing was simulated; the same status as diff's

_COLUMNS = (
    ("CASE", "case", 0), ("ITL P50 X", "itl_p50_x", 2), ("P95 X", "itl_p95_x", 2),
    ("P99 X", "itl_p99_x", 2), ("MAX X", "itl_max_x", 2), ("MAX 3 S X", "startup_max_x", 2), ("GAP P95 X", "gap_p95_x", 2),
    ("COMPUTED P95 X", "computed_p95_x", 2), ("TTFT MS", "ttft_p50_ms", 0),
    ("P95 MS", "ttft_p95_ms", 0), ("LOAD T/S", "load_tokens_s", 1),
    ("ANSWERS T/S", "load_answers_s", 1), ("JAIN", "jain", 2),
    ("RIGHT", "draft_accepted_ratio", 2),
    ("GRANTS", "floor_grants", 0), ("INFEASIBLE", "infeasible", 0), ("N", "latencies", 0),
)  # fmt: skip
_GAP = 2  # blanks between two columns

_WORKLOADS = (
    "desk, storm, paste, fairness, agents, bursts, huge, or module:name; default: the first four."
)
_MACHINES = "q4_0 (the default), q4_0-slow, q8_0, q4_k_m or h200."
_DRAFTS = "The probability that a guess at a token is right (0.7); default: no guesses."
_NOISE = "The standard deviation of a tick's time (0.02)."


class _Refused(Exception):
    """The command line makes no sense; the message is one sentence."""


def _flag(text: str, metavar: str | None = None, *, many: bool = False) -> Parameter:
    return Parameter(help=text, metavar=metavar, many=many)


Names = tuple[str, ...]
Caps = tuple[float, ...]


def simulate(
    *,
    policy: Annotated[Names, _flag("Policies, by name or module:function.", "NAME", many=True)] = (
        "baseline",
        "deadline",
    ),
    workload: Annotated[Names, _flag(_WORKLOADS, "NAME", many=True)] = (),
    cap: Annotated[Caps, _flag("Latency caps to run each policy with.", "X", many=True)] = (1.2,),
    machine: Annotated[str | None, _flag(_MACHINES, "NAME")] = None,
    cost: Annotated[
        Path | None, _flag("Simulate the machine of a daemon's cost file.", "FILE")
    ] = None,
    noise: Annotated[float, _flag(_NOISE, "SIGMA")] = 0.02,
    drafts: Annotated[float | None, _flag(_DRAFTS, "CHANCE")] = None,
    seconds: Annotated[float, _flag("Virtual seconds of each run.")] = 60.0,
    seeds: Annotated[int, _flag("Runs of each case, one seed each.")] = 3,
    seed: Annotated[int, _flag("The first seed.")] = 0,
    json: Annotated[bool, _flag("Print JSON.")] = False,
) -> int:
    """Compare policies in virtual time, without a model or a daemon. A seed always gives the same figures.

    Exit status: 0 on success, 2 if nothing was simulated.
    """
    from uma_trio.policy.pipeline import PolicyError
    from uma_trio_sim.compare import NoWorkload
    from uma_trio_sim.machine import NoCost

    try:
        _check(seconds, seeds, cap, noise, drafts)
        profile = _profile(machine, cost, noise)
        runs = range(seed, seed + seeds)
        _compare(policy, workload, cap, profile, seconds, runs, _guesses(drafts), as_json=json)
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}.")
    except (_Refused, NoCost, NoWorkload, PolicyError) as error:
        complain(f"{error}.")
    else:
        return OK
    return TROUBLE


def _check(
    seconds: float, seeds: int, caps: Sequence[float], noise: float, drafts: float | None
) -> None:
    """Raise :class:`_Refused` for values that make no sense."""
    if seconds < 1:
        raise _Refused(f"--seconds is at least 1, not {seconds:g}")
    if seeds < 1:
        raise _Refused(f"--seeds is at least 1, not {seeds}")
    if min(caps) <= 1:
        raise _Refused(f"--cap is above 1, times the ITL of a stream alone, not {min(caps):g}")
    if not 0 <= noise < 1:
        raise _Refused(f"--noise is a standard deviation from 0 to 1 such as 0.02, not {noise:g}")
    if drafts is not None and not 0 < drafts <= 1:
        raise _Refused(f"--drafts is a probability up to 1 such as 0.7, not {drafts:g}")


def _profile(machine: str | None, cost: Path | None, noise: float) -> Profile:
    from uma_trio_sim.machine import TABLES, built_in, from_cost_file, gaussian

    if machine is not None and cost is not None:
        raise _Refused("--machine and --cost each name the machine: give one of them")
    if cost is not None:
        return from_cost_file(cost, gaussian(noise))
    machine = machine or "q4_0"
    if machine not in TABLES:
        raise _Refused(f"no machine is called {machine!r}; there are {', '.join(TABLES)}")
    return built_in(machine, gaussian(noise))


def _guesses(chance: float | None) -> Texts | None:
    from uma_trio_sim.guesses import Guesses

    return None if chance is None else lambda _draw: Guesses.always(chance)


def _compare(
    policies: Sequence[str],
    workloads: Sequence[str],
    caps: Sequence[float],
    profile: Profile,
    seconds: float,
    seeds: range,
    guesses: Texts | None,
    *,
    as_json: bool,
) -> None:
    from uma_trio_sim.compare import cases, compare, itl_alone_s, workload_of
    from uma_trio_sim.workload import WORKLOADS

    compared = cases(policies, caps)
    known = {name: workload_of(name) for name in workloads or tuple(WORKLOADS)[:4]}
    alone_s = itl_alone_s(profile)
    if not as_json:
        console().print(f"{profile.name}: a stream alone has a token every {1e3 * alone_s:.2f} ms.")
        console().print(f"{several(len(seeds), 'run')} of {seconds:g} s, seeds from {seeds.start}.")
    progress = RunsDone(len(known) * len(compared) * len(seeds), "run")
    for name, workload in known.items():
        found = compare(
            workload,
            compared,
            profile,
            seconds=seconds,
            seeds=seeds,
            guesses=guesses,
            each=progress.one_more,
        )
        if as_json:
            for row in found:
                progress.hide()
                print_json({"workload": name, "machine": profile.name, **row})
        else:
            rows = list(found)
            progress.hide()
            _table(name, rows)


def _table(workload: str, rows: Sequence[Row]) -> None:
    cells = [[_cell(row[name], digits) for _, name, digits in _COLUMNS] for row in rows]
    console().print(f"\n{workload}")
    _print(tuple(heading for heading, _, _ in _COLUMNS), cells)


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    screen = console()
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for band in _bands(widths, screen.width):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for i in band:
            table.add_column(headings[i], justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[i] for i in band))
        screen.print(table)


def _bands(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns of each table, so that no figure is cut; each begins with the first column."""
    bands = [[0]]
    for i in range(1, len(widths)):
        used = sum(widths[j] + _GAP for j in bands[-1])
        if len(bands[-1]) > 1 and used + widths[i] > room:
            bands.append([0])
        bands[-1].append(i)
    return bands


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
