"""What was guessed of each answer in a trace, place by place, and whether it was right.

A tick's state has the chances of all guesses, its plan says how many of them were computed, and its
line how many of those were right. The first wrong one is known to be wrong, what stands behind it
is not known. Neither is that one where its mask was late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define, field

from uma_trio.policy.portable import TracedTick
from uma_trio_sim.guesses import Guesses


@define
class _Seen:
    """Guesses at the answer behind `prompt` tokens. A later guess at a place is one from nearer by."""

    prompt: int
    paid: bool
    chances: dict[int, float] = field(factory=dict)
    right: dict[int, bool] = field(factory=dict)
    places: int = 0

    def proposed(self, known: int, survival: Sequence[float]) -> None:
        """Note guesses at what follows the first `known` tokens, or that there is none."""
        place, before = known - self.prompt, 1.0
        self.places = max(self.places, place + 1)
        self.chances.pop(place, None)
        for further, chance in enumerate(survival):
            self.chances[place + further] = chance / before if before else 0.0
            before = chance

    def judged(self, known: int, tried: int, right: int) -> None:
        """Note that of `tried` guesses the first `right` were right."""
        place = known - self.prompt
        self.places = max(self.places, place + right + 1)
        self.right.update((place + n, n < right) for n in range(min(tried, right + 1)))

    def guesses(self) -> Guesses:
        """Return them, for all places that the answer came to."""
        places = range(self.places)
        return Guesses(
            tuple(self.chances.get(place, 0.0) for place in places),
            tuple(self.right.get(place) for place in places),
            self.paid,
        )


def guesses_of(ticks: Iterable[TracedTick]) -> dict[int, Guesses]:
    """Return by key what was guessed of each request that had a guess."""
    seen: dict[int, _Seen] = {}
    for tick in ticks:
        views = tick.state.views
        for view in tick.state.sequences:
            known = view.computed + view.due
            one = seen.setdefault(view.key, _Seen(known, view.pays_for_drafts))
            # A prepared state has no guesses; those that follow are of the state behind it.
            if view.decoding and not tick.state.prepared:
                one.proposed(known, view.survival)
        for item in tick.plan.items if tick.status == 0 else ():
            if item.n_drafts:
                view = views[item.key]
                right = tick.accepted.get(item.key, 0)
                tried = right if item.key in tick.late else item.n_drafts
                seen[item.key].judged(view.computed + view.due, tried, right)
    return {key: one.guesses() for key, one in seen.items() if one.chances}
