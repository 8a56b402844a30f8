"""Whose tick comes next, where several models are loaded: earliest deadline first. Pure.

A token that somebody reads is due at a time (:mod:`uma_trio.policy.deadline.slack`). Until its tick has to begin,
the other models may compute; of those with work that nobody reads as it comes, whoever had the least of the
machine's time is next.

A small tick may have a third of the rate of a larger one that does not fit before the reader's tick. So readers are computed
ahead first, until it fits: their tokens are shown a step apart, and those that were computed earlier are held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from attrs import frozen

CAREFUL: Final = 1.25
"""A reader's tick is begun so early as if it took so many times what is predicted."""
EARLY_S: Final = 0.002
"""And so much earlier, for what passes between two ticks."""
PART_S: Final = 0.010
"""The longest part of a tick that pauses for readers of other models is at most so long, by prediction."""
FULL: Final = 0.95
"""From this part of what readers can be ahead on nothing is waited for."""
TIGHT: Final = 0.75
"""Readers who need this part of the machine together get tokens a step apart: what varies becomes a lead."""


@frozen
class TickClaim:
    """What one model has to compute. Times on the engine's clock, in seconds.

    The next token that somebody reads is `due_at` (infinite: nobody reads) and takes `takes_s` with those of the other
    readers. `works` says whether there is anything else to compute; the smallest tick takes `least_s`. The
    model has `waited_s` for a tick, and `used_s` of the machine's time was for that other work. Of a tick that is paused
    `takes_s` is what is left, and `least_s` its next part.

    A tick that computes the other work at about the best rate takes `wants_s`. Ticks of other models may take `reach_s` where
    its readers are as far ahead as they can be. Its readers need the part `load` of the machine to keep their steps.

    Somebody `awaits` a first token of it. A model that `yields` has the floor meanwhile, as encoders have it.
    """

    due_at: float = math.inf
    takes_s: float = 0.0
    works: bool = False
    least_s: float = 0.0
    waited_s: float = 0.0
    used_s: float = 0.0
    wants_s: float = 0.0
    reach_s: float = math.inf
    load: float = 0.0
    awaits: bool = False
    yields: bool = False

    @property
    def begins_at(self) -> float:
        """When the readers' tick has to begin at the latest."""
        return self.due_at - CAREFUL * self.takes_s - EARLY_S

    def is_owed(self, floor: float) -> bool:
        """Whether its smallest tick is due, so that it gets the part `floor` of the machine beside readers.

        Of who `yields` the first part is, since what it takes is not known before.
        """
        is_known = self.least_s > 0
        return self.works and self.waited_s * floor >= self.least_s and (is_known or self.yields)


def chosen(claims: Sequence[TickClaim], now: float, floor: float) -> int | None:
    """Return whose tick is next, by index; None if nobody has anything to compute.

    `floor` is the part of the machine that work has which nobody reads.
    """
    read = [i for i, claim in enumerate(claims) if claim.due_at < math.inf]
    awaited = any(claim.awaits for claim in claims)
    works = [i for i, claim in enumerate(claims) if claim.works]
    working = [i for i in works if not (awaited and claims[i].yields)]
    owed = [i for i in works if claims[i].due_at == math.inf and claims[i].is_owed(floor)]
    if owed and (read or awaited):
        return max(owed, key=lambda i: claims[i].waited_s)
    fitting = [i for i in working if claims[i].least_s <= _before_others(claims, i) - now]
    if fitting:
        next_one = min(fitting, key=lambda i: claims[i].used_s)
        if not (read and _saves(claims, next_one, now)):
            return next_one
    return min(read or working, key=lambda i: claims[i].begins_at, default=None)


def free_s(claims: Sequence[TickClaim], of: int, now: float, floor: float) -> float:
    """Return how long the tick of model `of` may take for the readers of the others; infinite if there are none.

    Where it is owed its smallest tick, that takes what it takes.
    """
    own = claims[of]
    if own.yields and any(claim.awaits for claim in claims):
        return own.least_s
    return max(_before_others(claims, of) - now, own.least_s if own.is_owed(floor) else 0.0)


def leads(claims: Sequence[TickClaim], of: int) -> bool:
    """Whether tokens of model `of` are shown a step apart: what is computed earlier is a lead for ticks of others."""
    others = [claim for i, claim in enumerate(claims) if i != of]
    readers = sum([claim.load for claim in others])
    return any(claim.works for claim in others) or (
        readers > 0 and readers + claims[of].load >= TIGHT
    )


def _saves(claims: Sequence[TickClaim], of: int, now: float) -> bool:
    """Whether the tick of model `of` waits until the readers of others are far enough ahead for it."""
    reach_s = min([claim.reach_s for i, claim in enumerate(claims) if i != of], default=math.inf)
    return _before_others(claims, of) - now < min(claims[of].wants_s, FULL * reach_s)


def _before_others(claims: Sequence[TickClaim], of: int) -> float:
    """Return when the first tick of other models' readers has to begin."""
    return min([claim.begins_at for i, claim in enumerate(claims) if i != of], default=math.inf)
