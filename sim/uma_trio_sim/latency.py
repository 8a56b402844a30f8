"""What a reader sees of a stream: inter-token latency (ITL), from the times of its tokens.

Pure functions of lists of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from uma_trio.policy.state import Contract

Times = Sequence[float]
"""When each token of one stream came, in seconds of any clock, in order."""

STARTUP_S = Contract().startup_s


def percentile(values: Sequence[float], q: float) -> float:
    """Return the `q`-th percentile (0 to 100), linear between the two nearest values.

    Raises:
        ValueError: there are no values, or `q` is out of range.
    """
    if not values:
        raise ValueError("there is no percentile of no values")
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile is between 0 and 100, not {q}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    """Return the middle value. Raises :class:`ValueError` if there are none."""
    return percentile(values, 50)


def gaps(times: Times) -> list[float]:
    """Return the seconds between one delivery of a stream and the next, of one or several tokens."""
    return [later - earlier for earlier, later in pairwise(times) if later > earlier]


def itl(times: Times) -> list[float]:
    """Return the seconds for each token of a stream but the first.

    Tokens that came together took equal parts of the time since those before them.
    """
    deliveries = [(at, len(list(together))) for at, together in groupby(times)]
    return [(at - before) / n for (before, _), (at, n) in pairwise(deliveries) for _ in range(n)]


def startup_itl(times: Times) -> list[float]:
    """Return the latencies that began in a stream's start-up window, 3 s from its first token.

    The daemon's ``worst_pause_ms`` is the longest of the same ones.
    """
    return [later - at for at, later in pairwise(times) if at - times[0] <= STARTUP_S]
