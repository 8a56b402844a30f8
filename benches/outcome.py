"""What a simulated run was like: for those who read, for the rest, and between clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from attrs import frozen

from benches.machine import Machine
from benches.rates import median, percentile
from benches.virtual import Request


@frozen
class Outcome:
    """Figures of one run, or of several together. Times in seconds, rates per second.

    `gaps` are of all watched streams, `young` the worst of each in its first three seconds, `ttft`
    of each. `load` is what the others had computed. `shares` are seconds of machine time by client
    of the load.
    """

    seconds: float
    ticks: int
    gaps: tuple[float, ...]
    young: tuple[float, ...]
    ttft: tuple[float, ...]
    load: int
    shares: tuple[float, ...]
    floor_grants: int
    infeasible: int

    def row(self, lone_s: float) -> dict[str, float | int | None]:
        """Return the figures of a table; gaps over `lone_s`, what a stream alone would wait."""

        def gap(q: float) -> float | None:
            return percentile(self.gaps, q) / lone_s if self.gaps else None

        return {
            "p50_x": gap(50),
            "p95_x": gap(95),
            "p99_x": gap(99),
            "worst_young_x": max(self.young) / lone_s if self.young else None,
            "ttft_p50_ms": 1e3 * median(self.ttft) if self.ttft else None,
            "ttft_p95_ms": 1e3 * percentile(self.ttft, 95) if self.ttft else None,
            "load_tokens_s": self.load / self.seconds,
            "jain": jain(self.shares),
            "floor_grants": self.floor_grants,
            "infeasible": self.infeasible,
            "gaps": len(self.gaps),
            "ticks": self.ticks,
        }


def outcome(
    streams: Iterable[Request],
    watched: Collection[int],
    load: Collection[int],
    books: Machine,
    *,
    seconds: float,
    ticks: int,
    floor_grants: int,
    infeasible: int,
) -> Outcome:
    """Return what one run was like for the clients that are `watched` and those that are `load`."""
    read = [s for s in streams if s.client in watched and s.token_times]
    return Outcome(
        seconds=seconds,
        ticks=ticks,
        gaps=tuple(gap for stream in read for gap in stream.gaps),
        young=tuple(max(young) for stream in read if (young := stream.young_gaps)),
        ttft=tuple(stream.ttft_s for stream in read),
        load=sum(books.tokens.get(client, 0) for client in load),
        shares=tuple(books.used_s.get(client, 0.0) for client in load),
        floor_grants=floor_grants,
        infeasible=infeasible,
    )


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Return several runs of the same clients as one."""
    return Outcome(
        seconds=sum(o.seconds for o in outcomes),
        ticks=sum(o.ticks for o in outcomes),
        gaps=tuple(gap for o in outcomes for gap in o.gaps),
        young=tuple(gap for o in outcomes for gap in o.young),
        ttft=tuple(ttft for o in outcomes for ttft in o.ttft),
        load=sum(o.load for o in outcomes),
        shares=tuple(sum(column) for column in zip(*(o.shares for o in outcomes), strict=True)),
        floor_grants=sum(o.floor_grants for o in outcomes),
        infeasible=sum(o.infeasible for o in outcomes),
    )


def jain(shares: Sequence[float]) -> float | None:
    """Return Jain's index of fairness: 1 where all have the same, 1/n where one has all.

    None unless there are two to compare.
    """
    squares = sum(share * share for share in shares)
    if len(shares) < 2 or squares == 0:
        return None
    return sum(shares) ** 2 / (len(shares) * squares)
