"""How long background work keeps a place that interactive requests wait for.

The background lane has a token bucket of machine time: it fills at the floor, and what background
requests compute empties it. A full bucket gives one background request *tenure* of a place: it keeps the
place until the bucket is empty and its answer has had as much time as its prompt took, which would be
computed again otherwise. So the lane has its floor in tokens of answers; what is computed again is
not counted, and is at most as much.
"""

from __future__ import annotations

from collections.abc import Iterable

from uma_trio.policy.state import Holder

# The size of the bucket in seconds of machine time. At a floor of 5 % it is full after ten seconds, and so
# long a person waits for the place, where the holder computes alone.
BUCKET_S = 0.5


def bucket_after(
    bucket_s: float, floor: float, tick_s: float, had_s: float, *, contended: bool
) -> float:
    """Return the bucket after a tick in which background requests had `had_s` of `tick_s`.

    It is overdrawn only while the place is `contended`: time without waiting requests is free.
    """
    filled_s = bucket_s + floor * tick_s
    after_s = filled_s - had_s
    if not contended:
        after_s = max(after_s, min(filled_s, 0.0))
    return min(after_s, BUCKET_S)


def next_tenant(running: Iterable[Holder], bucket_s: float) -> int | None:
    """Return which request gets tenure: the oldest background one, if the bucket is full and no request has it."""
    holders = [holder for holder in running if holder.lane == "background"]
    if bucket_s < BUCKET_S or not holders or any(holder.tenured for holder in holders):
        return None
    return min(holders, key=lambda holder: (holder.arrived, holder.key)).key


def is_spared(holder: Holder, bucket_s: float) -> bool:
    """Whether a background request is not to be preempted for an interactive one."""
    return holder.tenured and (bucket_s > 0.0 or holder.unearned_s > 0.0)
