"""What becomes of a policy's failures: each is counted, and few enough are logged to be read."""

from __future__ import annotations

from uma_trio.observe import log
from uma_trio.observe.metrics import Metrics


class PolicyFailures:
    """Takes the exceptions of a policy on the engine's thread. Logs every 1st, 2nd, 4th, 8th, ..."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = log.get("engine")
        self._count = 0

    def __call__(self, error: Exception) -> None:
        """Note one failure."""
        self._metrics.count("irregular_ticks_total", "policy")
        self._count += 1
        if self._count & (self._count - 1) == 0:
            self._log.error(
                "the policy failed: the tick was planned by baseline",
                failures=self._count,
                why=f"{type(error).__name__}: {error}",
                fix="report it with this traceback, or choose another --policy",
                exc_info=error,
            )
