"""The rules of the prefix cache, pure: the value of a page, and the cost of keeping a leaf.

A page is up to `PAGE` tokens of a prefix, saved outside the KV cache. A leaf is a prefix whose
cells are in the KV cache without a running request.
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
#: Runs of cells in a page from which on it counts as scattered.
SCATTERED: Final = 8
#: What of the machine's time saving may take while a client waits for a token, for all models together.
SAVING_SHARE: Final = 0.02


def worth(uses: int, cost_s: float, n_bytes: int) -> float:
    """Return the value of a page per byte: the seconds that it saves, times its uses."""
    return uses * cost_s / max(1, n_bytes)


@frozen
class Copying:
    """The seconds to save and to restore a token of cells side by side, and to save one of scattered cells."""

    save_s: float
    restore_s: float
    scattered_s: float


@frozen
class Prices:
    """The seconds to move a token between the KV cache and memory, and the cost of keeping it.

    `used_cell_s` is the cost of one used cell for each token of a tick, `spanned_cell_s` its cost
    for the tick.
    """

    save_s: float
    restore_s: float
    used_cell_s: float
    spanned_cell_s: float = 0.0


def rent(prices: Prices, tokens: int) -> float:
    """Return the cost, for a tick of `tokens`, of each cell that only leaves keep in its span."""
    return prices.used_cell_s * tokens + prices.spanned_cell_s


def moves_out(prices: Prices, paid_s: float) -> bool:
    """Whether a leaf with this rent per cell has paid for its saving and its return.

    This rule costs at most twice as much as a choice with knowledge of the future (ski rental).
    """
    return paid_s > 0 and paid_s >= prices.save_s + prices.restore_s
