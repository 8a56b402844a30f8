"""What a simulated run was like: for those who read, for the rest, and between clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from uma_trio_sim.latency import median, percentile
from uma_trio_sim.simulation import Simulation


@frozen
class RunOutcome:
    """Figures of one run, or of several together. Times in seconds.

    `itl` are the times for each token that all watched streams were shown, `gaps` the times between
    deliveries of one or several, `computed` the times for each token that was computed; `startup`
    is the longest of the first of each stream in its start-up window, `ttft` the time to the first
    token of each. `load_tokens` were computed for everybody else, `load_answers` of them in
    answers; `shares` are the seconds of machine time that each client of the load had. Of `drafted`
    guesses that were computed so many were `accepted`.
    """

    seconds: float
    ticks: int
    itl: tuple[float, ...]
    gaps: tuple[float, ...]
    computed: tuple[float, ...]
    startup: tuple[float, ...]
    ttft: tuple[float, ...]
    load_tokens: int
    load_answers: int
    shares: tuple[float, ...]
    drafted: int
    accepted: int
    floor_grants: int
    infeasible: int

    @classmethod
    def of(cls, world: Simulation, watched: Collection[int], load: Collection[int]) -> RunOutcome:
        """Return what `world` was like for the clients that are `watched` and for the `load`."""
        read = [r for r in world.requests if r.client in watched and r.token_times]
        promised = world.metrics.totals()
        return cls(
            seconds=world.clock.now,
            ticks=world.ticks,
            itl=tuple(latency for request in read for latency in request.itl),
            gaps=tuple(gap for request in read for gap in request.gaps),
            computed=tuple(latency for request in read for latency in request.computed_itl),
            startup=tuple(max(found) for request in read if (found := request.startup_itl)),
            ttft=tuple(request.ttft_s for request in read),
            load_tokens=sum(world.machine.tokens.get(client, 0) for client in load),
            load_answers=sum(len(r.token_times) for r in world.requests if r.client in load),
            shares=tuple(world.machine.used_s.get(client, 0.0) for client in load),
            drafted=world.machine.drafted,
            accepted=world.machine.accepted,
            floor_grants=promised.granted,
            infeasible=promised.infeasible,
        )

    def row(self, alone_s: float) -> dict[str, float | int | None]:
        """Return the figures of a table; latencies over `alone_s`, the ITL of a stream alone."""

        def ratio(q: float, itl: tuple[float, ...] = self.itl) -> float | None:
            return percentile(itl, q) / alone_s if itl else None

        return {
            "itl_p50_x": ratio(50),
            "itl_p95_x": ratio(95),
            "itl_p99_x": ratio(99),
            "itl_max_x": ratio(100),
            "gap_p95_x": ratio(95, self.gaps),
            "computed_p95_x": ratio(95, self.computed),
            "startup_max_x": max(self.startup) / alone_s if self.startup else None,
            "ttft_p50_ms": 1e3 * median(self.ttft) if self.ttft else None,
            "ttft_p95_ms": 1e3 * percentile(self.ttft, 95) if self.ttft else None,
            "load_tokens_s": self.load_tokens / self.seconds,
            "load_answers_s": self.load_answers / self.seconds,
            "jain": jain(self.shares),
            "draft_accepted_ratio": self.accepted / self.drafted if self.drafted else None,
            "floor_grants": self.floor_grants,
            "infeasible": self.infeasible,
            "latencies": len(self.itl),
            "ticks": self.ticks,
        }


def together(outcomes: Sequence[RunOutcome]) -> RunOutcome:
    """Return several runs of the same clients as one."""
    return RunOutcome(
        seconds=sum(o.seconds for o in outcomes),
        ticks=sum(o.ticks for o in outcomes),
        itl=tuple(latency for o in outcomes for latency in o.itl),
        gaps=tuple(gap for o in outcomes for gap in o.gaps),
        computed=tuple(latency for o in outcomes for latency in o.computed),
        startup=tuple(latency for o in outcomes for latency in o.startup),
        ttft=tuple(ttft for o in outcomes for ttft in o.ttft),
        load_tokens=sum(o.load_tokens for o in outcomes),
        load_answers=sum(o.load_answers for o in outcomes),
        shares=tuple(sum(column) for column in zip(*(o.shares for o in outcomes), strict=True)),
        drafted=sum(o.drafted for o in outcomes),
        accepted=sum(o.accepted for o in outcomes),
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
