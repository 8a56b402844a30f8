"""Checks of stored cost models: values that no machine can have, or that contradict each other.

Corrections by measured ticks stay within bounds by themselves
(:meth:`uma_trio.policy.cost.CostModel.learn`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from uma_trio.policy.cost import MOST_SAVED, CostModel

# No decode takes less, whatever a coarse clock says, and none that takes longer is of any use.
LEAST_S, LONGEST_S = 1e-6, 600.0
# No machine of today moves so many bytes a second: an accelerator's memory gives 8e12, and models
# that are spread over several are read one part after the other.
MOST_BYTES_S = 2e13
# A wider tick may cost less than a narrower one, where kernels take rows in fours: half as much has
# been seen. What claims to cost less than this part was disturbed.
LEAST_OF_NARROWER = 1 / 3


def implausible(cost: CostModel, weight_bytes: float = 0.0) -> str | None:
    """Return the problem of `cost` as a phrase for people; None if there is none.

    Every decode of the model reads `weight_bytes`; 0 if that is unknown.
    """
    return next(_problems(cost, weight_bytes), None)


def _problems(cost: CostModel, weight_bytes: float) -> Iterator[str]:
    """Yield what is wrong; later checks rely on those before them."""
    figures = (*cost.computing.seconds, *cost.output.seconds, *_others(cost).values())
    if not all(map(math.isfinite, figures)):
        yield "a figure is not finite"
    sizes = cost.computing.table()
    if not sizes or not cost.output.at or min(*sizes, *cost.output.at) < 1:
        yield "it has no batch size, or one of less than one token"
    least_s = max(LEAST_S, weight_bytes / MOST_BYTES_S)
    longest_s = 0.0
    for n, seconds in sizes.items():
        if not least_s <= seconds <= LONGEST_S:
            yield f"{n} tokens take {seconds:g} s, outside {least_s:g} to {LONGEST_S:g}"
        if seconds < LEAST_OF_NARROWER * longest_s:
            yield f"{n} tokens take {seconds:g} s, fewer take {longest_s:g}"
        longest_s = max(longest_s, seconds)
    for n, seconds in cost.output.table().items():
        computing_s = cost.computing(n)
        if not -MOST_SAVED * computing_s <= seconds <= 2 * n * computing_s:
            yield f"{n} logits rows add {seconds:g} s to {computing_s:g}"
    for name, seconds in _others(cost).items():
        if not 0 <= seconds <= LONGEST_S:
            yield f"{name} is {seconds:g}"


def _others(cost: CostModel) -> dict[str, float]:
    return {
        "context_cell_s": cost.context_cell_s,
        "wide_context_cell_s": cost.wide_context_cell_s,
        "used_cell_s": cost.used_cell_s,
        "spanned_cell_s": cost.spanned_cell_s,
        "recapture_s": cost.recapture_s,
        "capture_s": cost.capture_s,
    }
