"""What `doctor` asks a running daemon about its cost table: whether other programs disturbed it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uma_trio.cli.check_prefix import running_metrics
from uma_trio.cli.checks import Finding
from uma_trio.costing.neighbours import in_words

_FIX: Final = "stop other programs for a minute while nobody asks the daemon anything"


def check_measured(path: Path) -> list[Finding]:
    """See what the daemon on the socket `path` knows of this machine; nothing if none answers."""
    return judge_measured(running_metrics(path))


def judge_measured(metrics: Mapping[str, Any]) -> list[Finding]:
    """Say that the table is one of a busy machine, if it is."""
    others = metrics.get("cost_others_share")
    return [Finding("cost table", "slow", in_words(others), _FIX)] if others else []
