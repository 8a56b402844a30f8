"""What is computed from timestamps: the rate while all streams decode, and from end to end.

Pure functions of lists of numbers, so that every figure of a table can be tested by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uma_trio_sim.latency import Times


@dataclass(frozen=True)
class Steady:
    """The window in which every stream decodes: what a batch of that size streams in it."""

    rate: float
    seconds: float
    fewest_tokens: int  # of any one stream inside the window: what the rate rests on


def steady(streams: Sequence[Times]) -> Steady | None:
    """Return the tokens/s of the window in which all `streams` decode, or None if there is none.

    The window goes from the moment the last stream has its first token to the moment the first
    stream has its last, so no prompt is computed in it: it is what ``llama-batched-bench`` calls
    S_TG. Each stream counts its whole intervals inside the window, so that where the window
    happens to cut a tick does not matter.
    """
    if not streams or not all(streams):
        return None
    begin = max(times[0] for times in streams)
    end = min(times[-1] for times in streams)
    rate, fewest = 0.0, 1 << 60
    for times in streams:
        inside = [at for at in times if begin <= at <= end]
        fewest = min(fewest, len(inside))
        if len(inside) < 2 or inside[-1] <= inside[0]:
            return None
        rate += (len(inside) - 1) / (inside[-1] - inside[0])
    return Steady(rate, end - begin, fewest)


def end_to_end(sent: Times, streams: Sequence[Times]) -> float | None:
    """Return generated tokens per second from the first request sent to the last token read."""
    if not streams or not all(streams):
        return None
    seconds = max(times[-1] for times in streams) - min(sent)
    return sum(map(len, streams)) / seconds if seconds > 0 else None
