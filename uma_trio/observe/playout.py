"""The figures of what readers are shown: when bytes are handed to the kernel, not when tokens are computed.

A part of :class:`uma_trio.observe.metrics.Metrics`. Slack is written by the engine's thread, the
rest by trio's; read by anybody.
"""

from __future__ import annotations

from typing import Final, Literal

from uma_trio.observe.histogram import Histogram, Recent, bounds_ms
from uma_trio.words import LANES

Cause = Literal["planned", "mispredicted", "left_out"]
"""Why a token was not there when it was due: the policy planned it so, the tick took longer than
predicted, or the stream had no part in the ticks before."""

CAUSES: Final[tuple[Cause, ...]] = ("planned", "mispredicted", "left_out")
_RECENT = 1024


class PlayoutFigures:
    """What is kept of it."""

    def __init__(self) -> None:
        self.shown_ms: dict[str, Histogram] = {
            lane: Histogram(bounds_ms(0.1, 100_000)) for lane in LANES
        }
        self._shown_ratios = Recent(_RECENT)
        self._held = self._held_ever = 0
        self._slack_ms = Recent(_RECENT)
        self._ran_dry = dict.fromkeys(CAUSES, 0)

    def shown(self, seconds: float, lane: str, solo_s: float = 0.0) -> None:
        """Record the time between two writes of tokens to one connection (trio's thread).

        `solo_s` is the predicted time of a tick with the interactive streams only; 0 if unknown.
        """
        self.shown_ms[lane].record(seconds * 1e3)
        if lane == "interactive" and solo_s > 0:
            self._shown_ratios.record(seconds / solo_s)

    def held(self, change: int) -> None:
        """Record that so many tokens more, or fewer, are held back (trio's thread)."""
        self._held += change
        if change > 0:
            self._held_ever += change

    def slack(self, seconds: float) -> None:
        """Record how long before it was due a stream's token was there; negative: too late."""
        self._slack_ms.record(seconds * 1e3)

    def ran_dry(self, cause: Cause) -> None:
        """Count a token that was not there when it was due."""
        self._ran_dry[cause] += 1

    @property
    def shown_ratio_p95(self) -> float | None:
        """The 95th percentile of shown gaps by the tick of the interactive streams only."""
        return self._shown_ratios.quantiles((0.95,))[0]

    def values(self) -> dict[str, object]:
        """Return every figure by its name in the catalogue."""
        least, p5 = self._slack_ms.quantiles((0.0, 0.05))
        return {
            **{f"{lane}_shown_ms": self.shown_ms[lane] for lane in LANES},
            "shown_ratio_p95": self.shown_ratio_p95,
            "held_tokens": self._held,
            "held_tokens_total": self._held_ever,
            "slack_ms_least": least,
            "slack_ms_p5": p5,
            "ran_dry_total": dict(self._ran_dry),
        }
