"""How often guesses are right: by where they were found, how long the match was, and how far they reach."""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.engine.chunk import DraftOrigin

# How often the first guess behind a match of at least so many tokens was right in replayed agent
# steps, edits and prose, as the belief to begin with.
MATCHES = (2, 4, 8, 16)
FIRST_BELIEF = (0.35, 0.55, 0.75, 0.9)
# Distances are counted together from 0, 1, 2, 4 and 8 on: what held for longer holds on.
DISTANCES = (1, 2, 4, 8)
PARTS = len(DISTANCES) + 1
MOST_SURE = 0.995  # a chance is taken to be no more than that where others are compared with it
_BUCKETS = tuple(sum(match >= least for least in MATCHES[1:]) for match in range(MATCHES[-1] + 1))


class Survival:
    """Counts of guesses that were judged, and that were right; they fade with each that is.

    A guess is judged only if all before it were right.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[list[float], list[float]]] = {}

    def learn(self, origin: DraftOrigin, right: int, tried: int, fade: float) -> None:
        """Note that of `tried` guesses the first `right` were right."""
        self.forget(origin, fade)
        rights, judged = self._of(origin)
        for distance in range(min(right + 1, tried)):
            part = part_of(distance)
            judged[part] += 1.0
            rights[part] += distance < right

    def forget(self, origin: DraftOrigin, fade: float) -> None:
        """Let what was seen of guesses like these count less."""
        for counts in self._of(origin):
            counts[:] = [fade * n for n in counts]

    def chances(self, origin: DraftOrigin, beliefs: Sequence[float], weight: float) -> list[float]:
        """Return for each part of the distances the chance that a guess is right.

        A belief counts as much as `weight` guesses. Guesses that are found to be wrong so many times as
        often as was believed are believed to be, as many times, further away, where few were judged.
        """
        rights, judged = self._of(origin)
        chances, times = [], 1.0
        for right, n, belief in zip(rights, judged, beliefs, strict=True):
            wrong = 1.0 - min(belief, MOST_SURE)
            chance = (right + weight * max(0.0, 1.0 - times * wrong)) / (n + weight)
            times = (1.0 - chance) / wrong
            chances.append(chance)
        return chances

    def _of(self, origin: DraftOrigin) -> tuple[list[float], list[float]]:
        key = origin.source, bucket_of(origin.match)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0.0] * PARTS, [0.0] * PARTS
        return counts


def bucket_of(match: int) -> int:
    """Return which of `FIRST_BELIEF` is that of a match of so many tokens."""
    return _BUCKETS[min(match, MATCHES[-1])]


def part_of(distance: int) -> int:
    """Return with which distances this one is counted."""
    return sum(distance >= least for least in DISTANCES)
