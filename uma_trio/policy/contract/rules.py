"""What of the contract depends on whether another shape of the batch costs time.

Where a backend captures graphs (CUDA), the first two ticks of a shape (tokens, logits rows) are slow.
There the contract changes shapes seldom: sizes are held, limits are constant, and isolated ticks come
less often, several in a row.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Rules:
    """The constants by which the two kinds of machines differ; all counts are of ticks.

    The first `settling_ticks` of a shape teach nothing. After `mixed_ticks` in a row follow
    `isolated_ticks`. With `spends_budget` the limit of a tick follows the error budgets, up and down. A
    size next to the best is tried every `probe_every`; with `holds_sizes` one that did not fit
    any more is not tried again at once.
    """

    settling_ticks: int = 0
    mixed_ticks: int = 20
    isolated_ticks: int = 1
    spends_budget: bool = True
    probe_every: int = 64
    holds_sizes: bool = False


FREE_SHAPES = Rules()
# Each change of shape makes a token late, so there are four isolated ticks in 1,000. A limit that
# moved would change the shape of ticks, which makes them late, which would move the limit.
CAPTURED_SHAPES = Rules(
    settling_ticks=2,
    mixed_ticks=1000,
    isolated_ticks=4,
    spends_budget=False,
    probe_every=1024,
    holds_sizes=True,
)
