"""The metrics and the log, as the front ends use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from uma_trio.observe.outlook import Outlook


class Telemetry(Protocol):
    """Counts events. Never raises and never waits."""

    def session_opened(self) -> None:
        """A client was let in."""

    def session_closed(self) -> None:
        """Its connection is over."""

    def error_sent(self, code: str) -> None:
        """An error went out."""

    def ended_early(self, outcome: str) -> None:
        """A request ended before the engine had it: `cancelled`, or with a code."""

    def first_chunk(self, seconds: float) -> None:
        """A first token went out, this long after its logits were there."""

    def shown(self, seconds: float, lane: str) -> None:
        """Tokens of a stream went out, this long after the ones before."""

    def held(self, change: int) -> None:
        """So many tokens more, or fewer, are held back until they are due."""

    def accept_failed(self) -> None:
        """A client could not be accepted for want of descriptors or memory."""

    def outlook(self) -> Outlook:
        """Return the figures that headroom is made of."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return every metric by its name, ready for JSON."""


class Log(Protocol):
    """Messages for the operator."""

    def warning(self, event: str, *args: Any, **values: Any) -> Any:
        """Something is wrong outside of us."""

    def exception(self, event: str, *args: Any, **values: Any) -> Any:
        """Something is wrong in us; called while the exception is handled."""
