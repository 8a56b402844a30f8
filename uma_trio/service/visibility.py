"""The rule of privacy: what of a request somebody who looks may see.

A principal sees its own requests, an operator all. Any other request is shown as "another user": that
it is there, its state and its lane, without app, name, process, id or counts. The rule holds for
`ps` and `sessions`, for `/slots`, `/events` and the page; metrics have no labels that name anybody.
Figures that count tokens, cells or batches are an operator's: where one request ran in between, their
difference is its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from uma_trio.engine.messages import SequenceReport
from uma_trio.engine.records import Wait
from uma_trio.observe.catalogue import METRICS
from uma_trio.service.ask import Origin
from uma_trio.service.directory import Directory, Named
from uma_trio.sockets.principal import Principal

#: The app and the handle of another principal's request.
ANOTHER_USER: Final = "another user"
HIDDEN: Final = 0
_NAMED: Final = 3  # of those that somebody waits for


_UNITS: Final = ("tokens", "cells", "rows", "calls", "sequences", "leaves", "pages", "bytes")
_KEPT: Final = ("kv_cells_total",)
_PER_REQUEST: Final = ("ttft_ms", "ttf5_ms", "queue_ms", "worst_pause_ms", "loop_lag_ms")
COUNTS: Final = frozenset(
    metric.name
    for metric in METRICS
    if (metric.unit in _UNITS and metric.name not in _KEPT)
    or (metric.kind == "histogram" and metric.name not in _PER_REQUEST)
) | {"scorecard", "structured_output_total"}  # rates and late masks are numbers of tokens
"""Metrics by which the length of a single request can be told."""


def figures_for(viewer: Principal, figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metrics as `viewer` may see them, those of single models among them, too."""
    if viewer.is_operator:
        return figures
    seen = {name: value for name, value in figures.items() if name not in COUNTS}
    if models := seen.get("models"):
        seen["models"] = {name: figures_for(viewer, each) for name, each in models.items()}
    return seen


@frozen
class Running:
    """One live request: the names from its front end, the report of the engine, and the model that has it."""

    handle: int
    origin: Origin
    choice: int
    report: SequenceReport
    model: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether it is another principal's, of which the viewer sees only that it is there."""
        return self.handle == HIDDEN


@frozen
class Viewer:
    """Somebody who looks, as `principal`."""

    principal: Principal

    def shown(self, running: Running) -> Running:
        """Return a live request as it may be seen."""
        return shown_to(self.principal, running)

    def wait(self, wait: Wait | None, directory: Directory) -> str:
        """Return what a request waits for as a sentence without an end, "" for nothing; strangers have no names."""
        if wait is None:
            return ""
        named = [self._named(handle, directory) for handle in wait.by[:_NAMED]]
        if wait.shared:
            return (
                f"waits for {named[0]}, which computes the same {wait.shared:,} tokens: "
                f"{wait.done:,} done"
            )
        if not named:
            return wait.reason
        more = len(wait.by) - len(named)
        listed = ", ".join([*named, f"{more} more"] if more else named)
        return f"{wait.reason}: by {' and '.join(listed.rsplit(', ', 1))}"

    def _named(self, handle: int, directory: Directory) -> str:
        named = directory.name_of(handle)
        if not self.sees(named):
            return "another user's request"
        return f"request {handle}" + (f" ({named.app})" if named.app else "")

    def sees(self, named: Named) -> bool:
        """Whether a request that lives or has ended may be seen. Whose it was is not known for ever."""
        return self.principal.is_operator or (
            named.principal is not None and self.principal.may_change(named.principal)
        )


def shown_to(viewer: Principal, running: Running) -> Running:
    """Return a live request as `viewer` may see it."""
    origin, report = running.origin, running.report
    if viewer.may_change(origin.principal):
        return running
    somebody = Principal(connection=0)
    hidden = Origin(principal=somebody, door=origin.door, name="", app=ANOTHER_USER)
    bare = SequenceReport(HIDDEN, report.state, report.lane, 0, 0, 0, 0.0, 0.0)
    return Running(HIDDEN, hidden, 0, bare)
