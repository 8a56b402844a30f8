"""What `doctor` asks a running daemon about its event loop: how late it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uma_trio.cli.check_prefix import running_metrics
from uma_trio.cli.checks import Finding

#: Milliseconds. A reader does not see a token that is late by this; a body of any client costs less.
LATE_MS: Final = 5.0
_FIX: Final = "leave a core to it: stop other programs, or set fewer --threads"


def check_lag(path: Path) -> list[Finding]:
    """See how late the daemon on the socket `path` runs; nothing if none answers."""
    return judge_lag(running_metrics(path))


def judge_lag(metrics: Mapping[str, Any]) -> list[Finding]:
    """Say how long tokens waited for the daemon's own thread."""
    lag, longest = metrics.get("loop_lag_ms") or {}, metrics.get("loop_lag_max_ms")
    if not lag.get("count") or longest is None:
        return []
    what = (
        f"in the running daemon tokens waited {lag['p99']:.1f} ms for its event loop (p99); the "
        f"longest wait was {longest:.1f} ms"
    )
    if lag["p99"] > LATE_MS:
        return [Finding("event loop", "slow", what, _FIX)]
    return [Finding("event loop", "ok", what)]
