"""The rules of the prefix cache, as pure functions: what a page is worth, and what keeping costs.

A page is up to `PAGE` tokens of one beginning, saved outside of the KV cache. A leaf is a beginning
whose cells are still in it, although nobody computes there.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

#: Tokens of a page: the unit of saving, so that one takes well under a millisecond as a rule.
PAGE: Final = 64
#: Fewer tokens than these are computed rather than looked up.
LEAST_HIT: Final = 16
#: A prompt that shares so many tokens with one that is being computed waits for them; one that shares
#: all of its own waits for :data:`LEAST_HIT`.
LEAST_FORK: Final = 64
#: What of the budget pages that were used again may take before they are evicted first.
AGAIN_SHARE: Final = 0.8
#: What of the budget pinned pages may take.
PINNED_SHARE: Final = 0.25
#: What of the machine's time saving may take while somebody computes.
SAVING_SHARE: Final = 0.05


def worth(uses: int, cost_s: float, n_bytes: int) -> float:
    """Return what a page is worth by the byte: the seconds that it saves, as often as it was used."""
    return uses * cost_s / max(1, n_bytes)


@frozen
class Prices:
    """What moving a token between the KV cache and memory takes, in seconds, and what staying does.

    `used_cell_s` is what one cell of anybody costs each token of a tick, `spanned_cell_s` what it
    costs the tick.
    """

    save_s: float
    restore_s: float
    used_cell_s: float
    spanned_cell_s: float = 0.0


def rent(prices: Prices, tokens: int) -> float:
    """Return what a tick of `tokens` pays for each cell that only idle leaves keep in its span."""
    return prices.used_cell_s * tokens + prices.spanned_cell_s


def moves_out(prices: Prices, paid_s: float) -> bool:
    """Whether a leaf that has paid so much rent a cell has paid for leaving and coming back.

    Leaving no earlier and no later costs at most twice what knowing the future would (ski rental).
    """
    return paid_s > 0 and paid_s >= prices.save_s + prices.restore_s
