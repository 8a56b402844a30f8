"""The read model: what the engines of all models reported last, as a viewer may see it.

It only reads snapshots and records that it is given. Ticks and records outlive their model: what an engine reported
stays until the model is loaded again, or later records replace it.

A principal sees its own requests, an operator all. Any other request is shown as "another user": that it exists, its
state and its lane. Metrics that count tokens, cells or batches are an operator's, since their differences are lengths
of requests. The same holds for `ps`, `explain`, `/slots`, `/events` and the page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Final

from attrs import define, evolve, field, frozen

from uma_trio.observe.catalogue import METRICS
from uma_trio.observe.figures import PrefixFigures
from uma_trio.observe.records import (
    CellReport,
    Recorded,
    RequestRecord,
    Snapshot,
    TickRecord,
    Wait,
    explained,
)
from uma_trio.sockets.principal import Principal

#: Ticks that are kept of each model.
MOST_TICKS: Final = 1024
#: Records that are kept of requests whose model was unloaded: as many as an engine returns.
MOST_ENDED: Final = 64
#: The app and the handle of another principal's request.
ANOTHER_USER: Final = "another user"
HIDDEN: Final = 0
_NAMED: Final = 3  # of the requests that one waits for

_UNITS: Final = ("tokens", "cells", "calls", "pages", "bytes")
_KEPT: Final = ("kv_cells_total",)
_PER_REQUEST: Final = ("ttft_ms", "ttf5_ms", "queue_ms", "worst_pause_ms", "loop_lag_ms")
#: Metrics from which the length of a single request can be computed.
COUNTS: Final = frozenset(
    metric.name
    for metric in METRICS
    if (metric.unit in _UNITS and metric.name not in _KEPT)
    or (metric.kind == "histogram" and metric.name not in _PER_REQUEST)
) | {"scorecard", "structured_output_total"}


@frozen
class Named:
    """The client's names of a request and of itself, the number of the choice, the user, and the model."""

    name: str | None = None
    app: str | None = None
    choice: int = 0
    principal: Principal | None = None
    model: str | None = None


Names = Callable[[int], Named]
"""Returns the names of a running or recent request by handle."""


@frozen
class Running:
    """A running request with its names."""

    record: RequestRecord
    named: Named


@frozen
class RequestView:
    """A running request as one viewer sees it. `waits` is why it waits, "" if it does not."""

    record: RequestRecord
    named: Named
    age_s: float
    waits: str = ""

    @property
    def is_hidden(self) -> bool:
        """Whether it belongs to another principal, so that only its existence, state and lane are shown."""
        return self.record.handle == HIDDEN


@frozen(kw_only=True)
class State:
    """All models at one moment. `tick` is the number of the default model's latest tick.

    `requests` are the running ones that are described, with their names; `waiting` requests have no slot.
    """

    at: float
    tick: int
    requests: tuple[Running, ...]
    waiting: int
    cells: CellReport
    prefixes: PrefixFigures | None

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot], live: Callable[[int], Named | None]) -> State:
        """Merge snapshots, the default model's first; requests that are no longer `live` are left out."""
        first = snapshots[0]
        cells = [snapshot.cells for snapshot in snapshots]
        kept = [snapshot.prefixes for snapshot in snapshots if snapshot.prefixes is not None]
        return cls(
            at=first.at,
            tick=first.tick,
            requests=tuple(
                Running(record, named)
                for snapshot in snapshots
                for record in snapshot.requests
                if (named := live(record.handle)) is not None
            ),
            waiting=sum(snapshot.waiting for snapshot in snapshots),
            cells=CellReport(
                total=sum(each.total for each in cells),
                used=sum(each.used for each in cells),
                reserved=sum(each.reserved for each in cells),
            ),
            prefixes=PrefixFigures(
                leaves=sum(each.leaves for each in kept),
                leaf_tokens=sum(each.leaf_tokens for each in kept),
                pages=sum(each.pages for each in kept),
                bytes=sum(each.bytes for each in kept),
            )
            if kept
            else None,
        )


@frozen
class Viewer:
    """A principal that reads, with the names of requests."""

    principal: Principal
    names: Names

    def sees(self, named: Named) -> bool:
        """Whether a request may be shown; of a request that ended long ago the user is not known any more."""
        return self.principal.is_operator or (
            named.principal is not None and self.principal.may_change(named.principal)
        )

    def sees_request(self, handle: int) -> bool:
        """Whether the request with this handle may be shown."""
        return self.sees(self.names(handle))

    def requests(self, state: State) -> list[RequestView]:
        """Return the running requests."""
        return [
            self._view(one.record, one.named, state.at) if self.sees(one.named) else _hidden(one)
            for one in state.requests
        ]

    def _view(self, record: RequestRecord, named: Named, at: float) -> RequestView:
        return RequestView(record, named, at - record.submitted, self.wait(record.wait))

    def wait(self, wait: Wait | None) -> str:
        """Return why a request waits, as a sentence without a full stop; "" if it does not."""
        if wait is None:
            return ""
        named = [self._name(handle) for handle in wait.by[:_NAMED]]
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

    def _name(self, handle: int) -> str:
        named = self.names(handle)
        if not self.sees(named):
            return "another user's request"
        return f"request {handle}" + (f" ({named.app})" if named.app else "")

    def figures(self, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics that may be shown, also those of each of the `models`."""
        if self.principal.is_operator:
            return figures
        seen = {name: value for name, value in figures.items() if name not in COUNTS}
        if models := seen.get("models"):
            seen["models"] = {name: self.figures(each) for name, each in models.items()}
        return seen


def _hidden(one: Running) -> RequestView:
    record = one.record
    bare = RequestRecord(handle=HIDDEN, lane=record.lane, state=record.state, submitted=0.0)
    return RequestView(bare, Named(name="", app=ANOTHER_USER), 0.0)


@define(eq=False)
class _Model:
    """What one model reported. `loads` counts how often it was loaded: its ticks are numbered from 0 each time."""

    ticks: deque[TickRecord] = field(factory=lambda: deque(maxlen=MOST_TICKS))
    loads: int = 0
    is_loaded: bool = False


class ReadModel:
    """Ticks and ended requests of all models, by name. For trio's thread only."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._ended: deque[tuple[str, RequestRecord]] = deque(maxlen=MOST_ENDED)

    def take(self, model: str, snapshot: Snapshot) -> None:
        """Take in a snapshot; its ticks follow those of the previous one."""
        seen = self._models.setdefault(model, _Model())
        if not seen.is_loaded:
            seen.is_loaded, seen.loads = True, seen.loads + 1
            seen.ticks.clear()
        seen.ticks.extend(snapshot.ticks)

    def close(self, model: str, recorded: Recorded) -> None:
        """Take in the last records of a model whose engine has ended."""
        seen = self._models.setdefault(model, _Model())
        seen.is_loaded = False
        seen.ticks.clear()
        seen.ticks.extend(recorded.ticks)
        self._ended.extend((model, evolve(one, wait=None)) for one in recorded.requests)

    def loads(self, model: str) -> int:
        """Return how often a model was loaded, as far as snapshots show: its ticks start again each time."""
        seen = self._models.get(model)
        return 0 if seen is None else seen.loads

    def ticks_after(self, model: str, tick: int, most: int) -> tuple[TickRecord, ...]:
        """Return a model's latest ticks with higher numbers, at most `most`, oldest first.

        They have no gap as long as snapshots are taken.
        """
        seen = self._models.get(model)
        found = () if seen is None else takewhile(lambda one: one.tick > tick, reversed(seen.ticks))
        return tuple(islice(found, most))[::-1]

    def newest(self, most: int) -> list[tuple[str, TickRecord]]:
        """Return the newest ticks of all models, newest first."""
        every = [
            (model, tick)
            for model, seen in self._models.items()
            for tick in islice(reversed(seen.ticks), most)
        ]
        return sorted(every, key=lambda one: one[1].at, reverse=True)[:most]

    def records(self) -> Iterable[RequestRecord]:
        """Return the latest requests of models that were unloaded."""
        return (record for _, record in self._ended)

    def explain(self, now: float, handle: int, ticks: int) -> Recorded | None:
        """Return the record of a request whose model was unloaded, with `ticks` ticks; None if none is kept."""
        for model, record in self._ended:
            if record.handle == handle:
                kept = tuple(self._models[model].ticks)
                return explained(now, (record,), kept, ticks, one=True)
        return None
