"""How a reader experiences an answer, from timestamps alone; and what a load left of it.

Pure functions: every figure of the mixed benchmarks can be tested by hand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benches.live import Series
from uma_trio_sim.latency import Times, itl, median, percentile, startup_itl


@dataclass(frozen=True)
class Pace:
    """The inter-token latencies of some streams together, in milliseconds; `n` is how many."""

    n: int
    p50: float
    p95: float
    p99: float
    worst: float
    worst_startup: float | None  # within the first three seconds of a stream, if that was looked at
    ttft: float
    ttf5: float | None  # None where no stream had five tokens
    p95_later: float | None = None  # behind those three seconds, if a stream lasted that long
    p99_later: float | None = None
    worst_later: float | None = None


def pace(sent: Sequence[float], streams: Sequence[Times]) -> Pace | None:
    """Return the pace of `streams` sent at `sent`; None unless one has two tokens."""
    latencies = [1e3 * latency for times in streams for latency in itl(times)]
    if not latencies:
        return None
    startup = [1e3 * latency for times in streams for latency in startup_itl(times)]
    later = [1e3 * latency for t in streams for latency in itl(t)[len(startup_itl(t)) :]]
    firsts = [1e3 * (t[0] - at) for at, t in zip(sent, streams, strict=True) if t]
    fifths = [1e3 * (t[4] - at) for at, t in zip(sent, streams, strict=True) if len(t) >= 5]
    return Pace(
        n=len(latencies),
        p50=percentile(latencies, 50),
        p95=percentile(latencies, 95),
        p99=percentile(latencies, 99),
        worst=max(latencies),
        worst_startup=max(startup, default=max(latencies)),
        ttft=median(firsts),
        ttf5=median(fifths) if fifths else None,
        p95_later=percentile(later, 95) if later else None,
        p99_later=percentile(later, 99) if later else None,
        worst_later=max(later, default=None),
    )


def ratios(loaded: Pace | None, solo: Pace | None) -> dict[str, float | None]:
    """Return each figure of `loaded` by the same figure of `solo`, as ``p95_x`` and so on.

    Those behind the first three seconds are by the same of all the time alone, which is shorter.
    """
    names = ("p50", "p95", "p99", "worst", "worst_startup", "ttft", "ttf5")
    pairs = [(name, name) for name in names]
    pairs += [(f"{name}_later", name) for name in ("p95", "p99", "worst")]
    found: dict[str, float | None] = {}
    for name, same in pairs:
        above, below = getattr(loaded, name, None), getattr(solo, same, None)
        found[f"{name}_x"] = above / below if above is not None and below else None
    return found


def rate(series: Series, begin: float, end: float) -> float | None:
    """Return how much a counter grew per second from `begin` to `end`; None if nobody knows.

    Between two readings it is taken to grow evenly. Before the first it was what it was then,
    and after the last it stood still.
    """
    if end <= begin or not series:
        return None
    return (_at(series, end) - _at(series, begin)) / (end - begin)


def _at(series: Series, moment: float) -> float:
    i = bisect_right([at for at, _ in series], moment)
    if i == 0:
        return series[0][1]
    if i == len(series):
        return series[-1][1]
    (t0, v0), (t1, v1) = series[i - 1], series[i]
    return v0 + (v1 - v0) * (moment - t0) / (t1 - t0) if t1 > t0 else v1


def tokens_within(streams: Iterable[Times], begin: float, end: float) -> int:
    """Return how many tokens were read from `begin` to `end`."""
    return sum(begin <= at <= end for times in streams for at in times)


@dataclass(frozen=True)
class Point:
    """One server at one setting: what it cost the reader, and what others got for it."""

    family: str
    knob: str
    p95_x: float
    background: float


def rivals(ours: Point, points: Iterable[Point]) -> list[Point]:
    """Return the points of other families whose reader is at least as well off as ours."""
    return [p for p in points if p.family != ours.family and p.p95_x <= ours.p95_x]


def judge(ours: Point, points: Iterable[Point], unit: str) -> str:
    """Return whether no other server gives the background more at that p95 or a better one."""
    against = rivals(ours, points)
    said = f"{ours.family} {ours.knob}: p95 {ours.p95_x:.2f}x, {ours.background:.2f} {unit}"
    if not against:
        return f"{said}; no other server reaches that p95"
    best = max(against, key=lambda p: p.background)
    word = "at least as much" if ours.background >= best.background else "LESS"
    return (
        f"{said}; {word}: {best.family} {best.knob} gives {best.background:.2f} "
        f"at {best.p95_x:.2f}x"
    )
