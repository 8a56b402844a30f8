"""`GET /events`: what happens in the engine, as server-sent events, for whoever watches.

Each watcher has a loop of its own: it takes a turn at questions, a snapshot that all watchers share, and
sends what changed since its last message, ten times a second at most. Nothing is computed while nobody
watches or nothing runs. A watcher that reads slower than that is sent fewer messages; no message waits
for it in memory. No message contains text of a prompt or an answer, and what it says of other
principals' requests follows :mod:`uma_trio.service.visibility`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import ref

import trio
from attrs import define, field

from uma_trio import __version__
from uma_trio.engine.messages import Snapshot
from uma_trio.engine.records import TickRecord
from uma_trio.http import sse
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.settings import Shared
from uma_trio.service.ask import Refusal
from uma_trio.service.served import ServedModel
from uma_trio.service.service import Service
from uma_trio.service.visibility import Running, Viewer, figures_for
from uma_trio.sockets.principal import Principal

#: Ticks in one message, the latest ones.
MOST_TICKS: Final = 128
#: Parts of ticks in one message: of a machine with hundreds of slots it has fewer ticks.
MOST_PARTS: Final = 2048
#: Between two messages with figures, which are those of /metrics.
FIGURES_S: Final = 1.0
#: While nothing runs nobody is asked; then the figures are sent so often.
QUIET_S: Final = 5.0

_FIGURES: Final = (
    *("interactive_shown_ms", "ttft_ms", "late_tokens_total"),
    *("shown_ratio_p95", "latency_cap", "step_ms"),
    *("kv_cells_used", "kv_cells_total", "prefix_tokens_total", "prompt_tokens_total"),
    *("prefix_bytes", "active_sessions", "queued_sessions", "slots_total"),
)


async def events(exchange: Exchange, shared: Shared) -> Reply | None:
    """Stream what runs, what waits and why, and with `?ticks=1` every tick, as server-sent events.

    `?model=` chooses whose ticks and figures.
    """
    head = exchange.head
    if head.method == "HEAD":
        return Reply(200, content_type=sse.CONTENT_TYPE)
    wants_ticks = head.query.get("ticks", "0") not in ("", "0")
    viewer = exchange.principal
    model = head.query.get("model")
    watcher = Watcher(shared.of(model), viewer, wants_ticks=wants_ticks, model=model)
    watcher.resume(head.headers.get("last-event-id", ""))
    kind = (("Content-Type", sse.CONTENT_TYPE),)
    exchange.open(kind, lambda: sse.KEEP_ALIVE, sse.named(watcher.hello()))
    questions = shared.service.questions
    while not shared.service.draining:
        message = await questions.answer(viewer.counts_as, watcher.message)
        if message and not exchange.send(message):
            await exchange.sent()  # what happens meanwhile is not sent later
        if watcher.is_quiet and not len(shared.service.directory):
            with trio.move_on_after(QUIET_S):
                await shared.service.directory.wait_until_any()
    await exchange.close(b"")
    return None


@define(eq=False)
class Watcher:
    """What one watcher was told, and what it is told next.

    Ticks and figures are those of one model: `model`, while it is loaded, or else the default one.
    """

    shared: Shared
    principal: Principal
    wants_ticks: bool = field(kw_only=True)
    model: str | None = field(kw_only=True)
    _tick: int = -1
    _told: Mapping[str, Any] = field(factory=dict)
    _served: ref[ServedModel] | None = None  # whose ticks were told; not kept in memory
    _figures_at: float = -math.inf

    @property
    def is_quiet(self) -> bool:
        """Whether nobody was there in the latest picture."""
        return not self._told.get("requests") and not self._told.get("waiting")

    def hello(self) -> dict[str, Any]:
        """Return the first message: what is watched, and as whom."""
        served = self.shared.served
        return {
            "type": "hello",
            "daemon": self.shared.name,
            "version": __version__,
            "model": served.bounds.model,
            "slots": served.slots,
            "n_ctx": served.bounds.n_ctx_seq,
            "operator": self.principal.is_operator,
        }

    def resume(self, last_event_id: str) -> None:
        """Go on behind the message with this id, if it was of this daemon's life; else from now on."""
        name, _, tick = last_event_id.rpartition("-")
        if name == self.shared.name and tick.isascii() and tick.isdigit() and len(tick) < 16:
            self._tick = int(tick)

    async def message(self) -> bytes:
        """Return the next message; b"" if nothing has changed."""
        service = self.shared.service
        snapshots = await service.snapshots()
        served = self._watched()
        told: dict[str, Any] = _picture(service, snapshots, Viewer(self.principal))
        changed = {name: value for name, value in told.items() if self._told.get(name) != value}
        self._told = told
        now = trio.current_time()
        if now - self._figures_at >= FIGURES_S:
            self._figures_at = now
            found = figures_for(self.principal, (served or service).telemetry.snapshot())
            changed["figures"] = {
                name: found[name] for name in _FIGURES if name in found
            } | _speeds(found)
        latest = snapshots[0] if served is None else served.latest or snapshots[0]
        if served is not None and self._is_loaded_again(served, latest):
            self._tick = -1
        if self.wants_ticks and served is not None:
            changed |= self._ticks(served)
        if not changed:
            return b""
        if served is not None:
            self._tick = latest.tick
        changed |= {"type": "picture", "at": round(latest.at, 3), "tick": latest.tick}
        return b"id: %b-%d\n%b" % (self.shared.name.encode(), self._tick, sse.named(changed))

    def _is_loaded_again(self, served: ServedModel, latest: Snapshot) -> bool:
        """Whether the ticks of the model are counted from the first one again."""
        before, self._served = self._served, ref(served)
        return latest.tick < self._tick or (before is not None and before() is not served)

    def _watched(self) -> ServedModel | None:
        """Return the model whose ticks and figures are told; None while it is not loaded."""
        service = self.shared.service
        if self.model is None:
            return service.default
        with suppress(Refusal):
            return service.find(self.model)
        return None

    def _ticks(self, served: ServedModel) -> dict[str, Any]:
        ticks = served.ticks_after(self._tick, MOST_TICKS)
        viewer, directory = Viewer(self.principal), self.shared.service.directory
        columns: list[list[Any]] = []
        named: dict[str, str | None] = {}
        n_parts = 0
        for tick in reversed(ticks):
            n_parts += len(tick.items)
            if columns and n_parts > MOST_PARTS:
                break
            seen = {
                item.key: name
                for item in tick.items
                if viewer.sees(name := directory.name_of(item.key))
            }
            named |= {str(key): name.app for key, name in seen.items()}
            columns.append(_column(tick, seen))
        return {"ticks": columns[::-1], "apps": named} if columns else {}


def _column(tick: TickRecord, seen: Container[int]) -> list[Any]:
    """Return a tick as numbers: see docs/HTTP.md.

    Number, milliseconds it took, predicted, allowed and for the readers alone, rows of ballast, whether others'
    requests had a part, of each request that is seen [handle, tokens, guesses, 1 for a prompt], and the milliseconds
    of a step.
    """
    parts = [
        [item.key, item.n_tokens, item.n_drafts, int(item.phase != "decode")]
        for item in tick.items
        if item.key in seen
    ]
    hidden = len(parts) < len(tick.items)
    limit = tick.limit
    return [
        tick.tick,
        _ms(tick.measured_s),
        _ms(tick.predicted_s),
        _ms(limit.seconds),
        _ms(limit.solo_s),
        0 if hidden else tick.ballast,
        int(hidden),
        parts,
        _ms(limit.step_s),
    ]


def _picture(service: Service, snapshots: Sequence[Snapshot], viewer: Viewer) -> dict[str, Any]:
    """Return who runs and who waits, of all models together, as the viewer may see it."""
    every = [running for snapshot in snapshots for running in service.named(snapshot)]
    listed = [
        _request(seen, viewer.wait(seen.report.waits, service.directory))
        for seen in map(viewer.shown, every)
    ]
    cells = [snapshot.cells for snapshot in snapshots]
    shelf = () if service.shelf is None else service.shelf.entries
    kept = [snapshot.prefixes for snapshot in snapshots if snapshot.prefixes is not None]
    counts = {
        "cells": _sums((each.used, each.reserved, each.total) for each in cells),
        "prefixes": _sums((each.leaves, each.leaf_tokens, each.pages, each.bytes) for each in kept)
        or None,
    }
    return {
        "requests": listed,
        "models": [[entry.names[0], entry.state] for entry in shelf if not entry.hidden]
        or [[served.bounds.model, "loaded"] for served in service.models],
        "waiting": sum(snapshot.waiting for snapshot in snapshots),
        **(counts if viewer.principal.is_operator else {}),
    }


def _sums(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _request(running: Running, waits: str) -> dict[str, Any]:
    """Describe a request; of a hidden one only what anybody may know."""
    report, origin = running.report, running.origin
    known = {"app": origin.app, "state": report.state, "lane": report.lane}
    if running.is_hidden:
        return known
    return known | {
        "request": running.handle,
        "id": origin.name or None,
        "model": running.model,
        "awaits": report.awaits,
        "prompt": report.prompt_tokens,
        "computed": min(report.computed_tokens, report.prompt_tokens),
        "cached": report.cached_tokens,
        "out": report.completion_tokens,
        "per_s": round(report.tokens_per_s, 1),
        "age_s": round(report.age_s, 1),
        "ahead_ms": round(report.ahead_s * 1e3),
        "waits": waits,
    }


def _speeds(found: Mapping[str, Any]) -> dict[str, Any]:
    card = found.get("scorecard") or {}
    names = ("interval_s", "tokens_generated_per_s", "tokens_per_s", "interactive_p95_ms")
    return {name: card.get(name) for name in names}


def _ms(seconds: float) -> float | None:
    """Return milliseconds to a hundredth; None where there is no limit."""
    return round(seconds * 1e3, 2) if math.isfinite(seconds) else None
