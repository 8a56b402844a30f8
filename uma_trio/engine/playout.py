"""When each token of a stream is shown to its reader.

A policy may pace a stream while other requests can use the machine: its tokens are then shown at
even intervals, later than they are computed. The difference is the stream's slack, which one long
tick may use. The engine computes the time at which a token is shown; trio's thread holds it until
then (:mod:`uma_trio.service.stream`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

# Once there is no other request, what is held is shown at twice the rate at which it is computed. At once
# it would be a jump of up to the longest hold; and where others come and go, the slack would be lost
# in every moment between them.
CATCHING_UP: Final = 2.0
# Where places run out, what is held moves forward at once if it is this part too late. Less than that is
# the unrest of single ticks.
UNREST: Final = 0.25


def show_times(
    shown_at: float | None,
    now: float,
    n: int,
    *,
    pace: float,
    since_s: float,
    held: int,
    most: int,
    most_s: float,
) -> tuple[float, ...]:
    """Return when `n` tokens are shown that were computed until `now`. Ascending, none before `now`.

    The token before them is shown at `shown_at`, None if there is none; `since_s` is the time since
    that was computed. With a `pace` they come so many seconds after one another. Without, they come
    at once or, while tokens are `held`, soon after those. None comes more than `most_s` after `now`;
    and where `most` tokens are held, one goes for each that comes, a little sooner where it is more.

    A time before `shown_at` moves the tokens that are held forward, see
    :class:`uma_trio.service.stream.Pipe`.
    """
    if shown_at is None or (shown_at <= now and not pace):
        return (now,) * n
    latest, at, each_s = now + most_s, shown_at, since_s / n
    times: list[float] = []
    for nth in range(n):
        ahead = held + nth
        if not pace:
            step = each_s / CATCHING_UP
            at = min(now + (ahead + 1) * step, at + step)
        elif ahead < most:
            at += pace
        else:
            # By `full` as many more will be computed, if ticks take so long as the latest did.
            full = now + (most - (n - 1 - nth)) * each_s
            slower = max(0.0, 1.0 - (ahead - most) / most)
            at = full if full < at - UNREST * (at - now) else at + min(pace, slower * each_s)
        at = min(max(at, times[-1] if times else now), latest)
        times.append(at)
    return tuple(times)


def moved_forward(
    dues: Sequence[float], due: float, now: float, shown_at: float
) -> Iterator[float]:
    """Yield when the held tokens that were to be shown at `dues` are shown, with one at `due` behind them.

    Evenly until then, none later than it was to be; the one before them was shown at `shown_at`.
    """
    n = len(dues)
    first = min(max(now, shown_at + (due - now) / n), due)
    step = (due - first) / n
    return (min(at, first + place * step) for place, at in enumerate(dues))
