"""What depends on whether another shape of the batch costs time.

Where a backend captures graphs (CUDA), the first two ticks of a shape (tokens, logits rows) are slow.
There shapes are changed seldom: sizes are held, and isolated ticks come less often, several in a row.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Rules:
    """The constants by which the two kinds of machines differ; all counts are of ticks.

    The first `settling_ticks` of a shape teach nothing. After `mixed_ticks` in a row follow
    `isolated_ticks`. With `holds_sizes` ticks with drafts keep one size.
    """

    settling_ticks: int = 0
    mixed_ticks: int = 20
    isolated_ticks: int = 1
    holds_sizes: bool = False


FREE_SHAPES = Rules()
# Each change of shape is paid from slack, so there are four isolated ticks in 1,000.
CAPTURED_SHAPES = Rules(settling_ticks=2, mixed_ticks=1000, isolated_ticks=4, holds_sizes=True)
