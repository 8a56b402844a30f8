"""What guesses may lose: a purse for each stream, in tokens.

Rows that make a tick longer are a stake: the tokens that the streams of the tick would have had in
that time. Each stream pays for its own guesses, and each guess that is right puts a token into its
purse. An empty purse pays for no rows. So a stream whose guesses are all wrong loses :data:`BEGIN` tokens,
:data:`EARNED` of the others, and the last stake, whatever was believed of its guesses.
"""

from __future__ import annotations

from collections.abc import Mapping

from uma_trio.policy.state import Purse, SchedulerState, SequenceView

# With 3 wrong guesses a stream that is alone loses 0.4 (Q4_0) to 1.6 tokens (Q8_0, two cores).
BEGIN = 1.5
EARNED = 0.01  # for each token of a stream
MOST = 16.0  # of what was won no more than this is lost again
# Purses of streams that are not in the state are kept: they may wait for a mask. Of so many some have ended.
MOST_KEPT = 64


def settled(state: SchedulerState, purses: Mapping[int, Purse]) -> Mapping[int, Purse]:
    """Return the purses with what the latest tick brought in them."""
    if not purses:
        return purses
    views, kept = state.views, dict(purses)
    for key, purse in purses.items():
        view = views.get(key)
        if view is not None and (came := _known(view) - purse.known) > 0:
            left = purse.left + EARNED * came + (came - 1)
            kept[key] = Purse(min(left, MOST), purse.known + came)
    if len(kept) > len(views) + MOST_KEPT:
        kept = {key: purse for key, purse in kept.items() if key in views}
    return kept


def left_of(purses: Mapping[int, Purse], key: int) -> float:
    """Return how many tokens a stream may lose."""
    purse = purses.get(key)
    return BEGIN if purse is None else purse.left


def staked(
    state: SchedulerState, purses: Mapping[int, Purse], counts: Mapping[int, int], tokens: float
) -> Mapping[int, Purse]:
    """Return the purses after a stake of `tokens`, by how many guesses each stream has in the tick."""
    views, left, each = state.views, dict(purses), tokens / sum(counts.values())
    for key, n in counts.items():
        left[key] = Purse(left_of(purses, key) - n * each, _known(views[key]))
    return left


def _known(view: SequenceView) -> int:
    return view.computed + view.pending - view.drafted
