"""The few figures that say how much more work a machine can take. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen(kw_only=True)
class Outlook:
    """What was measured lately; None where nothing was, or the policy promises nothing.

    `shown_ratio_p95` is the 95th percentile of the gaps that interactive readers saw, each divided by
    the time of a tick with the interactive streams only. `latency_cap` is the promised limit of that ratio.
    `moved_ratio` is the number of bytes that the last tick moved, divided by its budget.
    `prompt_tokens_per_s` is the rate at which prompts are computed.
    """

    shown_ratio_p95: float | None = None
    latency_cap: float | None = None
    moved_ratio: float | None = None
    prompt_tokens_per_s: float | None = None


def prompt_rate(table: Mapping[int, float], scale: float) -> float | None:
    """Return the most tokens a second of a cost table: seconds by tokens of a batch, times `scale`.

    Prompts are computed in large batches, so the best batch of the table is what they come to.
    """
    rates = [n / (seconds * scale) for n, seconds in table.items() if seconds * scale > 0]
    return max(rates, default=None)
