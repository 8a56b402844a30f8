"""What became of schemas, grammars and expressions. Counted under a lock of whoever counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from uma_trio.observe.histogram import Histogram, bounds_ms

_OUTCOMES = ("plain", "apart", "refused", "ended")
# A shape was refused because it had been before; an answer was moved to a process of its own after it had
# begun; the process of an answer was ended by a limit.
_EVENTS = ("refused again", "moved", "stopped")


def _outcomes() -> dict[str, int]:
    return dict.fromkeys(_OUTCOMES, 0)


def _events() -> dict[str, int]:
    return dict.fromkeys(_EVENTS, 0)


def _none() -> int:
    return 0


@define
class ShapeFigures:
    """Since the start, but for `processes` and `kept_bytes`, which are asked for."""

    outcomes: dict[str, int] = field(factory=_outcomes)
    events: dict[str, int] = field(factory=_events)
    check_ms: Histogram = field(factory=lambda: Histogram(bounds_ms(1, 100_000)))
    processes: Callable[[], int] = _none
    kept_bytes: Callable[[], int] = _none

    def let_go(self) -> None:
        """Ask nobody any more: whoever is asked would be kept, with the weights of a model that is unloaded."""
        self.processes = self.kept_bytes = _none

    def values(self) -> Mapping[str, object]:
        """Return them by the names of the catalogue."""
        return {
            "shapes_checked_total": dict(self.outcomes),
            "shape_events_total": dict(self.events),
            "shape_check_ms": self.check_ms,
            "shape_processes": self.processes(),
            "shape_bytes": self.kept_bytes(),
        }
