"""The load of this machine for routers: snapshots of the engine, and the headroom computed from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio
from attrs import frozen

from uma_trio.observe.figures import Outlook
from uma_trio.observe.records import RequestRecord, Snapshot

#: A backlog of so many seconds halves the headroom. Simulated with 6 and 96 nodes: cluster/README.md.
HALVING_S: Final = 8.0
_MIN_PROMISE: Final = 0.1


@frozen(kw_only=True)
class NodeLoad:
    """The inputs of a machine's headroom.

    `running` requests have one of the `slots`, `waiting` ones have none. Of `cells_total` KV cells
    `cells_reserved` belong to admitted requests. `backlog_s` is the time to compute the rest of their prompts. `shown_ratio` and `latency_cap` are those of :class:`Outlook`, None while no
    interactive stream runs. `moved_ratio` is the part of the byte budget that the last tick used.
    """

    slots: int
    running: int = 0
    waiting: int = 0
    cells_total: int = 1
    cells_reserved: int = 0
    backlog_s: float = 0.0
    shown_ratio: float | None = None
    latency_cap: float | None = None
    moved_ratio: float | None = None


def load_of(snapshot: Snapshot, outlook: Outlook, slots: int) -> NodeLoad:
    """Return the load that a snapshot shows, with the rates and ratios of `outlook`."""
    promised = any(one.lane == "interactive" for one in snapshot.running)
    computing = bool(snapshot.running)
    left = _left(snapshot.running) + _left(snapshot.queue) * _more(snapshot)
    rate = outlook.prompt_tokens_per_s
    return NodeLoad(
        slots=slots,
        running=len(snapshot.running),
        waiting=snapshot.waiting,
        cells_total=snapshot.cells.total,
        cells_reserved=snapshot.cells.reserved,
        backlog_s=left / rate if rate else 0.0,
        shown_ratio=outlook.shown_ratio_p95 if promised else None,
        latency_cap=outlook.latency_cap,
        moved_ratio=outlook.moved_ratio if computing else None,
    )


def headroom(load: NodeLoad) -> float:
    """Return 0 for a machine that can take nothing, 1 for one that is idle.

    It is the product of four factors: slots and cells, whichever is scarcer; the backlog of prompts; what
    interactive readers see against the promised cap; and the bytes moved against their budget.
    """
    return _room(load) * _promptness(load) * _promise(load) * _traffic(load)


def weight(load: NodeLoad) -> float:
    """Return the headroom for a proxy that counts connections itself: slots and cells halve it at most.

    With them in full a pin would give way to slots that are taken for a moment, and its prefix be computed again.
    """
    return (1.0 + _room(load)) / 2.0 * _promptness(load) * _promise(load) * _traffic(load)


def _left(reports: Sequence[RequestRecord]) -> int:
    return sum(max(0, one.prompt_tokens - one.computed_tokens) for one in reports)


def _more(snapshot: Snapshot) -> float:
    """Return the ratio of all waiting requests to those that the snapshot describes."""
    return snapshot.waiting / len(snapshot.queue) if snapshot.queue else 1.0


def _room(load: NodeLoad) -> float:
    places = 1.0 - (load.running + load.waiting) / (load.slots + 1)
    cells = 1.0 - load.cells_reserved / max(1, load.cells_total)
    return max(0.0, min(places, cells, 1.0))


def _promptness(load: NodeLoad) -> float:
    return 1.0 / (1.0 + max(0.0, load.backlog_s) / HALVING_S)


def _promise(load: NodeLoad) -> float:
    """Return 1 where readers see their own step, 0.5 at the cap, at least 0.1."""
    shown, cap = load.shown_ratio, load.latency_cap
    if shown is None or cap is None or cap <= 1.0:
        return 1.0
    return min(1.0, max(_MIN_PROMISE, 1.0 - (shown - 1.0) / (2.0 * (cap - 1.0))))


def _traffic(load: NodeLoad) -> float:
    moved = load.moved_ratio
    return 1.0 if moved is None or moved <= 1.0 else 1.0 / moved


#: Maximum age in seconds of a cached reading.
FRESH_S: Final = 0.25
#: Seconds to wait for a snapshot, which arrives at the end of a tick; after that the previous one is returned.
PATIENCE_S: Final = 0.2
#: An engine that does not answer for so many seconds hangs: no tick takes as long.
SILENT_S: Final = 30.0


@frozen
class LoadReading:
    """The load, and for how many seconds the engine has not answered: 0 if it answered the last query."""

    load: NodeLoad
    silent_s: float = 0.0

    @property
    def headroom(self) -> float:
        return headroom(self.load)

    @property
    def weight(self) -> float:
        return weight(self.load)

    @property
    def hangs(self) -> bool:
        return self.silent_s >= SILENT_S


class LoadMonitor:
    """Reads the load, with few queries to the engine. For trio's thread only.

    `fresh` requests a snapshot; `latest` returns the newest one that has arrived, if any.
    """

    def __init__(
        self,
        fresh: Callable[[], Awaitable[object]],
        latest: Callable[[], Snapshot | None],
        outlook: Callable[[], Outlook],
        slots: int,
    ) -> None:
        self._fresh = fresh
        self._latest = latest
        self._outlook = outlook
        self._slots = slots
        self._load = NodeLoad(slots=slots)
        self._seen: Snapshot | None = None
        self._read_at = float("-inf")  # on trio's clock
        self._silent_since: float | None = None

    async def read(self) -> LoadReading:
        """Return the load of at most 0.25 s and a tick ago, within 0.2 s.

        Raises:
            uma_trio.service.ask.Refusal: the engine has stopped.
        """
        now = trio.current_time()
        if now - self._read_at >= FRESH_S:
            with trio.move_on_after(PATIENCE_S) as waiting:
                await self._fresh()
            self._take(now, answered=not waiting.cancelled_caught)
        since = self._silent_since
        return LoadReading(self._load, 0.0 if since is None else trio.current_time() - since)

    def _take(self, now: float, *, answered: bool) -> None:
        snapshot = self._latest()
        is_new = snapshot is not None and snapshot is not self._seen
        if snapshot is not None and is_new:
            self._seen, self._load = snapshot, load_of(snapshot, self._outlook(), self._slots)
            self._read_at = now
        if answered or is_new:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
