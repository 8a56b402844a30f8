"""When first tokens are due: one stretch for all prompts that somebody waits for. Pure.

A prompt's deadline is ``since + S * (own_s + MOMENT_S)``. `own_s` is the predicted time of its tokens
alone, without those that were cached when it came, and does not change. The *stretch* S is
:data:`STRETCH`, or, where that cannot be met, the smallest for which all prompts end in time if the one
with the earliest deadline is always computed first (EDF) at the rate that readers leave. Under overload the
slowdown of all prompts then grows together: EDF with the smallest common stretch minimises the largest
one (Bender, Chakrabarti and Muthukrishnan, SODA 1998). Slots, cells and machine time follow it alike
(:mod:`uma_trio.policy.admission`, :mod:`uma_trio.policy.deadline.first_tokens`).

Prompts of one sender stand one behind another: each counts as arrived no earlier than the one before it
would be done alone. A sender gains nothing by sending many at once. Senders are principals; where
prompts of one principal only are waited for, its programs, and of one program its conversations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.fairness import Path
from uma_trio.policy.state import MOMENT_S, STRETCH, FirstToken, FirstTokens, SequenceView

#: The stretch is searched again when the share of the machine for prompts has changed by so much of it.
CHANGED = 0.1
#: How exactly the stretch is found, and the largest that is looked for.
EXACT, MOST = 1.05, 1e6
#: Of more prompts than this every second, third or later one stands for those around it.
LOOKED_AT = 64
_FASTER = 1.5  # how far from the stretch before it the next one is looked for first


class Wanted(NamedTuple):
    """A prompt in the search for the stretch: `left_s` of its `own_s` are not computed yet."""

    since: float
    own_s: float
    left_s: float


def first_token(ends: Mapping[int, float], arrived: float, path: Path, own_s: float) -> FirstToken:
    """Return when a prompt counts as arrived, for each of the shares that it uses.

    `ends` says of each who has sent prompts before when the latest of them would be done alone.
    """
    since = tuple([max(arrived, ends.get(node, -math.inf)) for node in path])
    return FirstToken(since, own_s)


def due_at(known: FirstTokens, first: FirstToken, asked: float | None = None) -> float:
    """Return when a first token is due; what the request itself `asked` for can only make it later."""
    since = first.since[min(known.level, len(first.since) - 1)]
    due = since + known.stretch * (first.own_s + MOMENT_S)
    return due if asked is None else max(due, asked)


def deadline(known: FirstTokens, view: SequenceView) -> float:
    """Return when the first token of a prompt is due, or the earliest of those that wait for it."""
    if view.first is None:
        return view.arrived + STRETCH * MOMENT_S
    target_s = view.target_ttft_s
    due = due_at(known, view.first, None if target_s is None else view.arrived + target_s)
    return min([due, *[due_at(known, first) for first in view.waited_by]])


def level_of(paths: Collection[Path]) -> int:
    """Return the outermost level on which not all paths are the same, or else the last."""
    if not paths:
        return 0
    shortest = min(map(len, paths))
    for level in range(shortest):
        if len({path[level] for path in paths}) > 1:
            return level
    return max(0, shortest - 1)


def common_stretch(
    now: float, waited: Sequence[Wanted], share: float, before: float = STRETCH
) -> float:
    """Return the smallest stretch, :data:`STRETCH` at least, with which all prompts end in time.

    They have `share` of the machine. It is looked for around the one `before`.
    """
    each = -(-len(waited) // LOOKED_AT)
    left = [
        (since, own_s + MOMENT_S, each * left_s / share)
        for since, own_s, left_s in waited[:: max(1, each)]
    ]

    def met(stretch: float) -> bool:
        at = now
        for due, takes_s in sorted([(since + stretch * own, takes) for since, own, takes in left]):
            at += takes_s
            if at > due:
                return False
        return True

    low = high = max(before, STRETCH)
    if met(high):
        while low > STRETCH and met(low):
            low, high = max(STRETCH, low / _FASTER), low
        if met(low):
            return low
    else:
        while high < MOST and not met(high):
            low, high = high, high * _FASTER
    while high > EXACT * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def prefill_s(cost: CostModel, n_batch: int, tokens: int, behind: int) -> float:
    """Return the seconds of `tokens` of a prompt `behind` so many, alone, in chunks of the best rate."""
    if tokens <= 0:
        return 0.0
    chunk = min(cost.quickest(n_batch), n_batch)
    whole, rest = divmod(tokens, chunk)
    cells = behind + tokens // 2  # what a token of it looks back at, on average
    seconds = whole * cost.seconds(Work(chunk, 1, chunk * cells, cells)) if whole else 0.0
    return seconds + (cost.seconds(Work(rest, 1, rest * cells, cells)) if rest else 0.0)
