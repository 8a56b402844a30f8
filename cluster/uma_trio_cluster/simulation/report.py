"""`uma-trio cluster simulate`: how requests are placed on many machines, beside full knowledge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from uma_trio_cluster.simulation.edge import Edge, Place, Rules, full_knowledge
from uma_trio_cluster.simulation.node import Rates
from uma_trio_cluster.simulation.requests import BadTrace, TraceRequest, copies, made_up, read
from uma_trio_cluster.simulation.run import Machines, Result, simulate

_CHART: Final = 40  # characters of the longest bar
_FULL: Final = "full knowledge"
#: A node of the traces' own size: prompts at this rate, and streams that cost nothing.
FLAT: Final = Rates((0,), (6500.0,), (1e-5,), (1e-5,))
_SAMPLE_S: Final = 1800.0


@frozen(kw_only=True)
class FleetRow:
    """One way to place requests on so many machines. `regret` is its TTFT p95 by full knowledge's."""

    nodes: int
    way: str
    result: Result
    regret: float


def rows(
    requests: Sequence[TraceRequest],
    nodes: Sequence[int],
    *,
    rates: Rates = FLAT,
    moves: Sequence[float] = (),
    stale: Sequence[float] = (),
    load: float = 1.0,
    death_every_s: float = 0.0,
) -> Iterator[FleetRow]:
    """Return the rows for each number of machines, full knowledge first.

    All machines together get `load` times the prompt tokens that they can compute, cached ones included.
    """
    for n in nodes:
        machines = Machines(n=n, rates=rates, death_every_s=death_every_s)
        sent = scaled(requests, load * n * rates.prompt_per_s[-1])
        best = simulate(sent, machines, full_knowledge)
        yield FleetRow(nodes=n, way=_FULL, result=best, regret=1.0)
        for way, place in _ways(moves, stale):
            result = simulate(sent, machines, place)
            regret = result.quantile(0.95) / max(1e-9, best.quantile(0.95))
            yield FleetRow(nodes=n, way=way, result=result, regret=regret)


def scaled(requests: Sequence[TraceRequest], tokens_per_s: float) -> list[TraceRequest]:
    """Return the requests so that they bring so many prompt tokens a second: copies first, then faster or slower."""
    span = 1e-9 + max(asked.at for asked in requests)
    brought = sum(asked.prompt for asked in requests) / span
    n = max(1, round(tokens_per_s / brought))
    factor = tokens_per_s / (brought * n)
    return [evolve(asked, at=asked.at / factor) for asked in copies(requests, n)]


def report(found: Sequence[FleetRow]) -> str:
    """Return the table, and a bar for each regret."""
    titles = ("TTFT P50 S", "P95 S", "P99 S", "CACHED", "MOVED", "LOST", "REGRET")
    widths = (10, 8, 8, 7, 6, 5, 7)
    shown = " ".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    lines = [f"{'NODES':>5}  {'PLACED BY':<38} {shown}"]
    most = max(row.regret for row in found)
    for row in found:
        r = row.result
        bar = "█" * max(1, round(_CHART * row.regret / most))
        lines.append(
            f"{row.nodes:>5}  {row.way:<38} {r.quantile(0.5):>10.2f} {r.quantile(0.95):>8.2f} "
            f"{r.quantile(0.99):>8.2f} {r.cached:>7.0%} {r.moved:>6.1%} {r.lost:>5} {row.regret:>7.2f} {bar}"
        )
    return "\n".join(lines)


def fleet(
    nodes: Sequence[int],
    *,
    trace: Path | None = None,
    moves: Sequence[float] = (),
    stale: Sequence[float] = (),
    load: float = 1.0,
    machine: str | None = None,
    death_every_s: float = 0.0,
) -> str:
    """Simulate, and return the report.

    Raises:
        BadTrace: the file is no trace.
        OSError: it cannot be read.
        ValueError: there is no machine of that name.
    """
    requests = made_up(_SAMPLE_S, 6.0) if trace is None else read(trace)
    if not requests:
        raise BadTrace(f"{trace} has no requests")
    found = rows(
        requests,
        nodes or (3, 6),
        rates=FLAT if machine is None else _fitted(machine),
        moves=moves,
        stale=stale,
        load=load,
        death_every_s=death_every_s,
    )
    return report(list(found))


def _fitted(machine: str) -> Rates:
    from uma_trio_cluster.simulation.fitting import fitted
    from uma_trio_sim.machine import TABLES, built_in, gaussian

    if machine not in TABLES:
        raise ValueError(f"{machine} is no machine; there are {', '.join(TABLES)}")
    return fitted(built_in(machine, gaussian(0.02)))


def _ways(moves: Sequence[float], stale: Sequence[float]) -> Iterator[tuple[str, Place]]:
    yield "fewest connections", Edge(Rules(pins=False, weights=False))
    yield "pins that never move, no weights", Edge(Rules(weights=False, moves_at=0))
    yield "the file of uma-trio cluster", Edge()
    for at in moves:
        yield f"... moves at {at:g} times the headroom", Edge(Rules(moves_at=at))
    for seconds in stale:
        yield f"... headroom that is {seconds:g} s old", Edge(Rules(stale_s=seconds))
