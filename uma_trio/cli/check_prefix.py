"""What `doctor` asks a running daemon about its prefix cache: what it saved, and what more memory would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uma_trio.cli.checks import Finding
from uma_trio.cli.output import leaves
from uma_trio.policy.prefix import PAGE
from uma_trio.saying import size

#: Of all prompt tokens, from which on more memory is worth being spoken of.
WORTH_SAYING: Final = 0.05
_PATIENCE_S: Final = 2.0


def check_prefix(path: Path) -> list[Finding]:
    """See what the daemon on the socket `path` saved by its prefix cache; nothing if none answers."""
    return judge_prefix(running_metrics(path))


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


def running_metrics(path: Path) -> dict[str, Any]:
    """Return the metrics of the daemon on `path`; none unless one answers soon."""
    import trio

    from uma_protocol import ProtocolError
    from uma_trio.client import Client, ConnectionFailed, ServerError

    async def ask() -> dict[str, Any]:
        with trio.move_on_after(_PATIENCE_S):
            return await Client(path).metrics()
        return {}

    try:
        return trio.run(ask)
    except BaseException as error:
        known = (ConnectionFailed, ServerError, ProtocolError, OSError)
        if all(isinstance(cause, known) for cause in leaves(error)):
            return {}
        raise
