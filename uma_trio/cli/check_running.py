"""What `doctor` asks a running daemon about itself: its settings, and its metrics, judged by the parts below."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from uma_trio.cli.checks import Finding
from uma_trio.cli.output import leaves
from uma_trio.policy.costing.neighbours import in_words
from uma_trio.policy.prefix import PAGE
from uma_trio.words import size

#: Of all prompt tokens, from which on more memory is worth being spoken of.
WORTH_SAYING: Final = 0.05
#: Milliseconds. A reader does not see a token that is late by this; a body of any client costs less.
LATE_MS: Final = 5.0
_PATIENCE_S: Final = 2.0


@frozen
class SelfReport:
    """What a daemon says of itself. `settings` are those that it was given; None if it does not tell us."""

    metrics: Mapping[str, Any] = field(factory=dict)
    settings: Mapping[str, str] | None = None

    @property
    def flags(self) -> str:
        """Its settings as they are typed."""
        given = (self.settings or {}).items()
        return shlex.join(f"--{name.replace('_', '-')}={text}" for name, text in given)


def judge_running(running: SelfReport) -> list[Finding]:
    """Say how a daemon does; nothing if none answered."""
    metrics = running.metrics
    return [*judge_prefix(metrics), *judge_lag(metrics), *judge_measured(metrics)]


def judge_prefix(metrics: Mapping[str, Any]) -> list[Finding]:
    """Say which part of all prompts needed no computing, and which part more twice the memory would save."""
    computed, there, pages = (
        metrics.get(f"{name}_total", 0)
        for name in ("prompt_tokens", "prefix_tokens", "prefix_ghost_hits")
    )
    asked = computed + there
    if not asked or not there + PAGE * pages:
        return []
    # A page that was evicted was computed again, so that it is among the computed tokens.
    more = min(PAGE * pages, computed) / asked
    what = (
        f"the running daemon computed {1 - there / asked:.0%} of {asked:,} prompt tokens; the others "
        f"were cached; saved prefixes take {size(metrics.get('prefix_bytes', 0))}"
    )
    if more < WORTH_SAYING:
        return [Finding("prefix cache", "ok", what)]
    what += f"; twice the --prefix-ram would have cached {more:.0%} more"
    return [Finding("prefix cache", "slow", what, "set a larger --prefix-ram, if memory is free")]


def judge_lag(metrics: Mapping[str, Any]) -> list[Finding]:
    """Say how long tokens waited for the daemon's own thread."""
    lag = metrics.get("loop_lag_ms") or {}
    if not lag.get("count"):
        return []
    what = (
        f"in the running daemon tokens waited {lag['p99']:.1f} ms for its event loop (p99); the "
        f"longest wait was {lag['max']:.1f} ms"
    )
    if lag["p99"] <= LATE_MS:
        return [Finding("event loop", "ok", what)]
    fix = "leave a core to it: stop other programs, or set fewer --threads"
    return [Finding("event loop", "slow", what, fix)]


def judge_measured(metrics: Mapping[str, Any]) -> list[Finding]:
    """Say that the cost table is one of a busy machine, if it is."""
    others = metrics.get("cost_others_share")
    fix = "stop other programs for a minute while nobody asks the daemon anything"
    return [Finding("cost table", "slow", in_words(others), fix)] if others else []


def asked(path: Path) -> SelfReport:
    """Return what the daemon on the socket `path` says of itself; nothing unless one answers soon."""
    import trio

    from uma_protocol import ProtocolError
    from uma_trio.client import Client, ConnectionFailed, ServerError

    async def ask() -> SelfReport:
        with trio.move_on_after(_PATIENCE_S):
            client = Client(path)
            metrics = await client.metrics()
            return SelfReport(metrics, (await client.overview()).settings)
        return SelfReport()

    try:
        return trio.run(ask)
    except BaseException as error:
        known = (ConnectionFailed, ServerError, ProtocolError, OSError)
        if all(isinstance(cause, known) for cause in leaves(error)):
            return SelfReport()
        raise
