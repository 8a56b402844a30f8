"""What the compute thread computes, and what of it comes next: earliest deadline first. Pure.

The next token of a stream that is read is due at a time (:mod:`uma_trio.policy.deadline.slack`). Until its tick has to begin, other
models may compute; of those with work that is not read as it comes, the one that had the least of the machine's time
is next.

A small tick may have a third of the rate of a larger one that does not fit before the reader's tick. So readers are computed
ahead first, until it fits: their tokens are shown a step apart, and those that were computed earlier are held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from attrs import frozen

from uma_trio.machine.background import EARLY_S, Background

CAREFUL: Final = 1.25
"""A reader's tick is begun as early as if it took so many times what is predicted."""
PART_S: Final = 0.010
"""The longest part of a tick that is computed in parts while other models have readers is at most so long, by prediction."""
FULL: Final = 0.95
"""From this part of what readers can be ahead on nothing is waited for."""
TIGHT: Final = 0.75
"""Readers that need this part of the machine together get tokens a step apart: what varies becomes a lead."""

Kind = Literal["interactive", "answer", "background"]
"""A client waits for a first token; none does; or all of it leaves the machine to the first kind, but for the floor."""


@frozen
class Claim:
    """What one work has to compute. Times on the machine's clock, in seconds.

    The next token of a stream that is read is `due_at` (infinite without readers) and takes `takes_s` with those of the other
    readers. `has_work` says whether there is anything else to compute; its smallest part takes `least_s`, and a tick at
    about the best rate `wants_s`. The work has waited for `waited_s`, and `used_s` of the machine's time was for what
    is not read. Of a tick that was begun `takes_s` is what is left.

    Ticks of other models may take `reach_s` where its readers are as far ahead as they can be. Its readers need the part
    `load` of the machine to keep their steps.
    """

    due_at: float = math.inf
    takes_s: float = 0.0
    has_work: bool = False
    least_s: float = 0.0
    kind: Kind = "answer"
    waited_s: float = 0.0
    used_s: float = 0.0
    wants_s: float = 0.0
    reach_s: float = math.inf
    load: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.has_work and self.due_at == math.inf

    @property
    def begins_at(self) -> float:
        """When the readers' tick has to begin at the latest."""
        return self.due_at - CAREFUL * self.takes_s - EARLY_S

    def is_owed(self, floor: float) -> bool:
        """Whether its smallest part is due, so that it gets the part `floor` of the machine in spite of readers.

        Of an encoder the first part is, since what it takes is not known before.
        """
        is_known = self.least_s > 0
        return (
            self.has_work
            and self.waited_s * floor >= self.least_s
            and (is_known or self.kind == "background")
        )


@frozen
class Grant:
    """How a work may use the machine now.

    It may take `most_s`, but for a smallest part that takes longer, and is asked again after `turn_s` if it can stop. If it `leads`, its tokens are shown a step apart, for
    what others compute between them. If it is `disturbed`, another thread of this process makes its ticks longer, so that
    what they take is not learnt. `is_shared`: others may want the machine before it is done, so that it should stop
    between two parts. `is_resumed`: others were computed since its latest part.
    """

    most_s: float = math.inf
    turn_s: float = math.inf
    leads: bool = False
    disturbed: bool = False
    is_shared: bool = False
    is_resumed: bool = False


class Work(Protocol):
    """What one model has to compute. All but :meth:`close` is for the compute thread."""

    #: The work that has the machine while this one waits for it; the machine sets it, for the explanations of requests.
    delayed_by: Work | None

    @property
    def running(self) -> Mapping[int, object]:
        """Its requests that are computed, by their handles."""

    @property
    def background(self) -> Background:
        """What can be done while nothing is computed."""

    @property
    def is_called(self) -> bool:
        """Whether a message came since the latest claim."""

    @property
    def rest_s(self) -> float:
        """For how long it need not be asked where it had nothing to compute and no message came."""

    @property
    def can_stop(self) -> bool:
        """Whether its ticks can be computed in parts."""

    def claim(self, now: float) -> Claim:
        """Take in what has arrived, and return what is to be computed."""

    def advance(self, grant: Grant) -> bool:
        """Compute a tick, or parts of one; False if there was nothing to compute."""

    def interrupt(self) -> None:
        """Note that the time until the next tick is not this work's."""

    def publish(self) -> None:
        """Publish all results."""

    def close(self) -> None:
        """Accept nothing more. For trio's thread."""


def choose(claims: Sequence[Claim], now: float, floor: float) -> int | None:
    """Return which is next, by index; None if there is nothing to compute.

    `floor` is the part of the machine for work that is not read.
    """
    read = [i for i, claim in enumerate(claims) if claim.due_at < math.inf]
    awaited = any(claim.kind == "interactive" for claim in claims)
    works = [i for i, claim in enumerate(claims) if claim.has_work]
    working = [i for i in works if not (awaited and claims[i].kind == "background")]
    owed = [i for i in works if claims[i].due_at == math.inf and claims[i].is_owed(floor)]
    if owed and (read or awaited):
        return max(owed, key=lambda i: claims[i].waited_s)
    fitting = [i for i in working if claims[i].least_s <= _before_others(claims, i) - now]
    if fitting:
        next_one = min(fitting, key=lambda i: claims[i].used_s)
        if not (read and _saves(claims, next_one, now)):
            return next_one
    return min(read or working, key=lambda i: claims[i].begins_at, default=None)


def free_s(claims: Sequence[Claim], of: int, now: float, floor: float) -> float:
    """Return how long work `of` may take for the readers of the others; infinite if there are none.

    Where it is owed its smallest part, that takes what it takes.
    """
    own = claims[of]
    if own.kind == "background" and any(claim.kind == "interactive" for claim in claims):
        return own.least_s
    return max(_before_others(claims, of) - now, own.least_s if own.is_owed(floor) else 0.0)


def leads(claims: Sequence[Claim], of: int) -> bool:
    """Whether tokens of work `of` are shown a step apart: what is computed earlier is a lead for ticks of others."""
    others = [claim for i, claim in enumerate(claims) if i != of]
    readers = sum([claim.load for claim in others])
    return any(claim.has_work for claim in others) or (
        readers > 0 and readers + claims[of].load >= TIGHT
    )


def _saves(claims: Sequence[Claim], of: int, now: float) -> bool:
    reach_s = min([claim.reach_s for i, claim in enumerate(claims) if i != of], default=math.inf)
    return _before_others(claims, of) - now < min(claims[of].wants_s, FULL * reach_s)


def _before_others(claims: Sequence[Claim], of: int) -> float:
    return min([claim.begins_at for i, claim in enumerate(claims) if i != of], default=math.inf)
