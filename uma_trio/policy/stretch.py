"""When first tokens are due: one stretch for all prompts that a client waits for. Pure.

Every sender has a virtual machine of its own, which computes its shortest prompt first (:class:`OwnMachine`). A prompt's
first token is due at ``arrived + S * (alone_s + MOMENT_S)``, where `alone_s` is the time from its arrival until that
machine would have computed it. The *stretch* S is :data:`STRETCH`, or, if that cannot be met, the smallest with which all
prompts end in time if the one with the earliest deadline is always computed first (EDF) at the rate that readers leave.
Under overload the slowdown of all prompts then grows together: EDF with the smallest common stretch minimises the largest
one (Bender, Chakrabarti and Muthukrishnan, SODA 1998). Slots, cells and machine time follow it alike
(:mod:`uma_trio.policy.admission`, :mod:`uma_trio.policy.deadline.first_tokens`).

A prompt is *eligible* from ``arrived + S * (alone_s - own_s)`` on: before, its sender has used its share (EEVDF: Stoica and
Abdel-Wahab, 1995). Ineligible prompts are computed behind eligible ones, so a sender that divides its work into many prompts
completes it no sooner. A *short* prompt fits into one tick (:func:`is_brief`). From when it is eligible, its own stretch is
:data:`STRETCH`, whatever that of the others, as far as short prompts use little of the machine (:class:`ShortLane`).

Senders are principals; if prompts of only one principal wait, its programs, and of one program its conversations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from attrs import define

from uma_trio.policy.cost import WIDE_ROWS, CostModel, Work
from uma_trio.policy.fairness import Path
from uma_trio.policy.state import MOMENT_S, STRETCH, FirstToken, FirstTokens, SequenceView

#: The stretch is searched again when the share of the machine for prompts has changed by so much of it.
CHANGED = 0.1
#: The part of the time since its arrival for which later prompts of its sender may pass a prompt.
PASSED_SHARE: Final = 0.5
#: The part of machine time that short prompts may use before all others, and for how long it may be used in advance.
SHORT_SHARE: Final = 0.1
SHORT_BURST_S: Final = 2.0
#: How exactly the stretch is found, and the largest that is looked for.
EXACT, MOST = 1.05, 1e6
#: Of more prompts than this every second, third or later one stands for those around it.
LOOKED_AT = 64
_FASTER = 1.5  # how far from the stretch before it the next one is looked for first


class Wanted(NamedTuple):
    """A prompt in the search for the stretch. `left_s` of its computation remain."""

    arrived: float
    alone_s: float
    left_s: float


@define
class _Turn:
    key: int
    arrived: float
    own_s: float
    end: float
    passed_s: float = 0.0  # time of later prompts that were inserted before it

    def lets_pass(self, own_s: float, now: float) -> bool:
        """Whether a later prompt of this length may be computed first."""
        most_s = max(self.own_s + MOMENT_S, PASSED_SHARE * (now - self.arrived))
        return self.passed_s + own_s <= most_s


class OwnMachine:
    """The virtual machine of one sender, which computes the prompt with the shortest remaining time first.

    Later prompts pass a longer one for at most its own time and :data:`MOMENT_S`, or :data:`PASSED_SHARE` of the time
    since its arrival, whichever is more: it ends at most about twice as late as in the order of arrival.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def add(self, key: int, arrived: float, own_s: float) -> None:
        """Insert a prompt that arrived after the ones before it."""
        turns = self._turns = [turn for turn in self._turns if turn.end > arrived]
        place, before = 0, arrived
        for i, turn in enumerate(turns):
            left_s = min(turn.own_s, turn.end - before)
            if left_s <= own_s or not turn.lets_pass(own_s, arrived):
                place = i + 1
            before = turn.end
        for turn in turns[place:]:
            turn.end += own_s
            turn.passed_s += own_s
        end = (turns[place - 1].end if place else arrived) + own_s
        turns.insert(place, _Turn(key, arrived, own_s, end))

    def ends(self) -> Mapping[int, float]:
        return {turn.key: turn.end for turn in self._turns}

    def is_idle(self, now: float) -> bool:
        """Whether all of its prompts would be computed by now."""
        return all(turn.end <= now for turn in self._turns)


class ShortLane:
    """Bounds the machine time of short prompts that are computed before all others, over all senders.

    They get :data:`SHORT_SHARE` of it, and may use the share of :data:`SHORT_BURST_S` in advance.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def admit(self, arrived: float, own_s: float, eligible_at: float) -> bool:
        """Reserve the time of a prompt; False if there is none, or its sender has used its share for a while."""
        most = arrived + SHORT_BURST_S
        if self._until > most or eligible_at > most:
            return False
        self._until = max(self._until, arrived) + own_s / SHORT_SHARE
        return True


def is_brief(cost: CostModel, own_s: float) -> bool:
    """Whether computing a prompt takes no longer than 64 tokens of a new prompt, or a moment."""
    return own_s <= max(MOMENT_S, cost.seconds(Work(WIDE_ROWS)))


def eligible_from(known: FirstTokens, first: FirstToken) -> float:
    """Return from when on a prompt is within the share of its sender."""
    return first.arrived + known.stretch * max(0.0, _alone_s(known, first) - first.own_s)


def due_at(known: FirstTokens, first: FirstToken, asked: float | None = None) -> float:
    """Return when a first token is due; what the request itself `asked` for can only make it later."""
    due = _stretched(known, first)
    if first.short:
        due = min(due, eligible_from(known, first) + STRETCH * (first.own_s + MOMENT_S))
    return due if asked is None else max(due, asked)


def deadline(known: FirstTokens, view: SequenceView) -> float:
    """Return when the first token of a prompt is due, or the earliest of those that wait for it."""
    if view.first is None:
        return view.arrived + STRETCH * MOMENT_S
    target_s = view.target_ttft_s
    due = due_at(known, view.first, None if target_s is None else view.arrived + target_s)
    return min([due, *[_stretched(known, first) for first in view.waited_by]])


def _alone_s(known: FirstTokens, first: FirstToken) -> float:
    return first.ends[min(known.level, len(first.ends) - 1)] - first.arrived


def _stretched(known: FirstTokens, first: FirstToken) -> float:
    return first.arrived + known.stretch * (_alone_s(known, first) + MOMENT_S)


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
        (arrived, alone_s + MOMENT_S, each * left_s / share)
        for arrived, alone_s, left_s in waited[:: max(1, each)]
    ]

    def met(stretch: float) -> bool:
        end = now
        for due, takes_s in sorted([(at + stretch * alone, takes) for at, alone, takes in left]):
            end += takes_s
            if end > due:
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
