"""`GET /events`: what happens in the engines, as server-sent events.

Each watcher has a loop of its own: it waits for its turn at questions and for a snapshot that all watchers share, and
sends what changed since its last message, at most ten times a second. Nothing is computed without watchers or without
requests. A slow reader gets fewer messages; none waits for it in memory. No message contains text of a prompt or an
answer, and other principals' requests are shown as :mod:`uma_trio.observe.view` says.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import Any, Final

import trio
from attrs import define, field

from uma_trio import __version__
from uma_trio.api.context import Context
from uma_trio.http import sse
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.models.loaded import LoadedModel
from uma_trio.observe.records import TickRecord
from uma_trio.observe.view import RequestView, State, Viewer
from uma_trio.service.ask import Refusal
from uma_trio.service.service import Service
from uma_trio.sockets.principal import Principal

#: Latest ticks in one message.
MOST_TICKS: Final = 128
#: Parts of ticks in one message: with hundreds of slots it has fewer ticks.
MOST_PARTS: Final = 2048
#: Between two messages with figures, which are those of /metrics.
FIGURES_S: Final = 1.0
#: The same while nothing runs: no engine is asked then.
QUIET_S: Final = 5.0

_FIGURES: Final = (
    *("interactive_shown_ms", "ttft_ms", "late_tokens_total"),
    *("shown_ratio_p95", "latency_cap", "step_ms"),
    *("kv_cells_used", "kv_cells_total", "prefix_tokens_total", "prompt_tokens_total"),
    *("prefix_bytes", "active_sessions", "queued_sessions", "slots_total"),
)


async def events(exchange: Exchange, context: Context) -> Reply | None:
    """Stream what runs, what waits and why, and with `?ticks=1` every tick, as server-sent events.

    `?model=` chooses the model of ticks and figures.
    """
    head = exchange.head
    if head.method == "HEAD":
        return Reply(200, content_type=sse.CONTENT_TYPE)
    wants_ticks = head.query.get("ticks", "0") not in ("", "0")
    viewer = exchange.principal
    model = head.query.get("model")
    watcher = Watcher(context.of(model), viewer, wants_ticks=wants_ticks, model=model)
    watcher.resume(head.headers.get("last-event-id", ""))
    kind = (("Content-Type", sse.CONTENT_TYPE),)
    exchange.open(kind, lambda: sse.KEEP_ALIVE, sse.named(watcher.hello()))
    questions = context.service.questions
    while not context.service.draining:
        message = await questions.answer(viewer.counts_as, watcher.message)
        if message and not exchange.send(message):
            await exchange.sent()  # what happens until then is not sent later
        if watcher.is_quiet and not len(context.service.directory):
            with trio.move_on_after(QUIET_S):
                await context.service.directory.wait_until_any()
    await exchange.close(b"")
    return None


@define(eq=False)
class Watcher:
    """What one watcher was sent, and what it is sent next.

    Ticks and figures are those of one model: `model`, while it is loaded, or else the default one.
    """

    context: Context
    principal: Principal
    wants_ticks: bool = field(kw_only=True)
    model: str | None = field(kw_only=True)
    _tick: int = -1
    _sent: Mapping[str, Any] = field(factory=dict)
    _loads: int | None = None  # of the model whose ticks were sent
    _figures_at: float = -math.inf

    @property
    def is_quiet(self) -> bool:
        """Whether the latest picture has no request."""
        return not self._sent.get("requests") and not self._sent.get("waiting")

    def hello(self) -> dict[str, Any]:
        """Return the first message: what is watched, and with which rights."""
        served = self.context.served
        return {
            "type": "hello",
            "daemon": self.context.name,
            "version": __version__,
            "model": served.bounds.model,
            "slots": served.slots,
            "n_ctx": served.bounds.n_ctx_seq,
            "operator": self.principal.is_operator,
        }

    def resume(self, last_event_id: str) -> None:
        """Continue after the message with this id, if this process sent it; otherwise from now on."""
        name, _, tick = last_event_id.rpartition("-")
        if name == self.context.name and tick.isascii() and tick.isdigit() and len(tick) < 16:
            self._tick = int(tick)

    async def message(self) -> bytes:
        """Return the next message; b"" if nothing has changed."""
        service = self.context.service
        viewer, state = service.observer.viewer(self.principal), await service.observer.state()
        served = self._watched()
        picture = _picture(service, state, viewer)
        changed = {name: value for name, value in picture.items() if self._sent.get(name) != value}
        self._sent = picture
        now = trio.current_time()
        if now - self._figures_at >= FIGURES_S:
            self._figures_at = now
            found = viewer.figures((served or service).telemetry.snapshot())
            changed["figures"] = {
                name: found[name] for name in _FIGURES if name in found
            } | _speeds(found)
        latest = None if served is None else served.latest
        at, tick = (state.at, state.tick) if latest is None else (latest.at, latest.tick)
        if served is not None and latest is not None:
            model = served.bounds.model
            loads, self._loads = self._loads, service.observer.view.loads(model)
            if tick < self._tick or loads not in (None, self._loads):
                self._tick = -1  # it was loaded again, and numbers its ticks from the start
            if self.wants_ticks:
                changed |= self._ticks(model, viewer)
        if not changed:
            return b""
        if latest is not None:
            self._tick = tick
        changed |= {"type": "picture", "at": round(at, 3), "tick": tick}
        return b"id: %b-%d\n%b" % (self.context.name.encode(), self._tick, sse.named(changed))

    def _watched(self) -> LoadedModel | None:
        """Return the model of ticks and figures; None while it is not loaded."""
        service = self.context.service
        if self.model is None:
            return service.models.default
        with suppress(Refusal):
            return service.models.loaded_model(self.model)
        return None

    def _ticks(self, model: str, viewer: Viewer) -> dict[str, Any]:
        view = self.context.service.observer.view
        ticks = view.ticks_after(model, self._tick, MOST_TICKS)
        columns: list[list[Any]] = []
        named: dict[str, str | None] = {}
        n_parts = 0
        for tick in reversed(ticks):
            n_parts += len(tick.items)
            if columns and n_parts > MOST_PARTS:
                break
            seen = {
                item.key: name for item in tick.items if viewer.sees(name := viewer.names(item.key))
            }
            named |= {str(key): name.app for key, name in seen.items()}
            columns.append(_column(tick, seen))
        return {"ticks": columns[::-1], "apps": named} if columns else {}


def _column(tick: TickRecord, seen: Container[int]) -> list[Any]:
    """Return a tick as numbers: see docs/reference/http.md.

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


def _picture(service: Service, state: State, viewer: Viewer) -> dict[str, Any]:
    cells, kept = state.cells, state.prefixes
    counts = {
        "cells": [cells.used, cells.reserved, cells.total],
        "prefixes": kept and [kept.leaves, kept.leaf_tokens, kept.pages, kept.bytes],
    }
    return {
        "requests": [_request(seen) for seen in viewer.requests(state)],
        "models": [
            [model.names[0], model.state] for model in service.models.models if not model.is_hidden
        ],
        "waiting": state.waiting,
        **(counts if viewer.principal.is_operator else {}),
    }


def _request(seen: RequestView) -> dict[str, Any]:
    """Describe a request; of a hidden one only what anybody may see."""
    record, named = seen.record, seen.named
    found = {"app": named.app, "state": record.state, "lane": record.lane}
    if seen.is_hidden:
        return found
    return found | {
        "request": record.handle,
        "id": named.name or None,
        "model": named.model,
        "awaits": record.awaits,
        "prompt": record.prompt_tokens,
        "computed": min(record.computed_tokens, record.prompt_tokens),
        "cached": record.cached_tokens,
        "out": record.completion_tokens,
        "per_s": round(record.tokens_per_s, 1),
        "age_s": round(seen.age_s, 1),
        "ahead_ms": round(record.ahead_s * 1e3),
        "waits": seen.waits,
    }


def _speeds(found: Mapping[str, Any]) -> dict[str, Any]:
    card = found.get("scorecard") or {}
    names = ("interval_s", "tokens_generated_per_s", "tokens_per_s", "interactive_p95_ms")
    return {name: card.get(name) for name in names}


def _ms(seconds: float) -> float | None:
    """Return milliseconds to a hundredth; None where there is no limit."""
    return round(seconds * 1e3, 2) if math.isfinite(seconds) else None
