"""The health of the daemon, its metrics, how requests spent their time, and the verbs of an operator."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from uma_protocol import Explain
from uma_protocol.errors import Code
from uma_protocol.requests import MAX_ID_BYTES, MAX_INT64, about, label, limits
from uma_trio.api.bodies import BodySpec, decode_body
from uma_trio.api.context import Context
from uma_trio.api.llama.metrics import llama_metrics
from uma_trio.http.errors import Fault, fault_of, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Reply
from uma_trio.observe.explain import explanation, ticks_for
from uma_trio.observe.sentences import sentences
from uma_trio.service.load import SILENT_S, LoadReading
from uma_trio.words import Lane


class PriorityBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request to move another one to a lane."""

    request: (
        Annotated[
            int,
            limits("the daemon's handle of the request; give either this or `id`", 1, MAX_INT64),
        ]
        | None
    ) = None
    id: Annotated[str, label("the `id` of the answer", MAX_ID_BYTES)] | None = None
    priority: Annotated[Lane, about("the lane")]


PRIORITY: Final = BodySpec(PriorityBody)
#: Cells of a block, as routers count them: they take no smaller ones.
BLOCK = 64
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


async def health(exchange: Exchange, context: Context) -> Reply:
    """Report whether the daemon accepts requests; with `?ready` also whether the engine answers."""
    service = context.service
    if service.draining:
        raise fault_of(Code.E_LIFECYCLE_001, "the daemon is stopping")
    if "ready" in exchange.head.query and (await service.load_reading()).hangs:
        raise fault_of(Code.E_RUNTIME_004, f"the engine has not answered for {SILENT_S:g} s")
    return Reply(200, b'{"status":"ok"}')


async def metrics(exchange: Exchange, context: Context) -> Reply:
    """Return the metrics in Prometheus' text format, or as JSON if the client accepts that; `?model=` chooses one.

    Only operators see those that count tokens.
    """
    service, clock = context.service, context.service.clock
    viewer = service.observer.viewer(exchange.principal)
    as_json = _wants_json(exchange.head)
    model = exchange.head.query.get("model")
    served = None if model is None else service.models.loaded_model(model)
    spent = 0.0

    def written() -> bytes:
        from uma_trio.observe.exposition import prometheus  # slow to import

        nonlocal spent
        began = clock()
        found = service.metrics() if served is None else served.telemetry.snapshot()
        figures = viewer.figures(found)
        if as_json:
            text = msgspec.json.encode(figures)
        else:
            models = service.metrics_of_each() if served is None else {}
            each = {name: viewer.figures(one) for name, one in models.items()}
            source = service.telemetry if served is None else served.telemetry
            counted = source.llama_values() if viewer.principal.is_operator else {}
            text = (prometheus(figures, each) + llama_metrics({**figures, **counted})).encode()
        spent = clock() - began
        return text

    body = await context.run_blocking(written)
    service.questions.charge(spent)  # the helper thread holds the GIL meanwhile
    if as_json:
        return Reply(200, body)
    reading = router_metrics(await service.load_reading()).encode()
    since = (("Process-Start-Time-Unix", str(context.started)),)
    return Reply(200, body + reading, content_type=_PROMETHEUS, headers=since)


async def router_figures(exchange: Exchange, context: Context) -> Reply:
    """Return only the load of this machine, for routers that ask many times a second."""
    reading = await context.service.load_reading()
    return Reply(200, router_metrics(reading).encode(), content_type=_PROMETHEUS)


def _wants_json(head: Head) -> bool:
    named = head.query.get("format")
    if named is not None:
        return named == "json"
    accepted = head.headers.get("accept", "")
    return "json" in accepted and "text/plain" not in accepted and "openmetrics" not in accepted


async def priority(exchange: Exchange, context: Context) -> Reply:
    """Move a request to another lane."""
    body = await decode_body(exchange, context, PRIORITY)
    handle, name = body.request, body.id
    if (handle is None) is (name is None):
        raise invalid("request", "or id must be given, exactly one of them")
    service = context.service
    found = [
        running
        for running in service.directory
        if running.handle == handle or running.origin.name == name
    ]
    principal = exchange.principal
    # Clients choose the ids of the protocol, so another user's request may have the same one.
    moved = [one for one in found if service.move(one.handle, body.priority, principal)]
    if not moved:
        why = "that request is not running, or not yours; GET /slots lists those that are"
        raise Fault(404, why, code="request_not_found")
    return Reply(200, msgspec.json.encode({"ok": True, "moved": len(moved)}))


def router_metrics(reading: LoadReading) -> str:
    """Return the gauges of a reading, without help texts: it is asked for twenty times a second.

    The names with ``vllm:`` are those of llm-d-router's default engine, docs/plugin-metric-protocol.md there.
    """
    load = reading.load
    cells = max(1, load.cells_total)
    labels = f'{{block_size="{BLOCK}",num_gpu_blocks="{cells // BLOCK}"}}'
    return "".join(
        f"{name} {value:.6g}\n"
        for name, value in (
            ("uma_headroom_ratio", 0.0 if reading.hangs else reading.headroom),
            ("uma_backlog_seconds", load.backlog_s),
            ("vllm:num_requests_running", load.running),
            ("vllm:num_requests_waiting", load.waiting),
            # Rounded: everybody may ask, and it is the length of a request that runs alone.
            ("vllm:kv_cache_usage_perc", math.ceil(100 * load.cells_reserved / cells) / 100),
            (f"vllm:cache_config_info{labels}", 1),
        )
    )


MOST_TICKS = 256
_DIGITS = 18


async def explain(exchange: Exchange, context: Context) -> Reply:
    """Return how the latest requests spent their time, or one of them (`?request=`), and why it waits."""
    head = exchange.head
    handle = _number(head, "request")
    ticks = _number(head, "ticks", MOST_TICKS)
    observer, principal = context.service.observer, exchange.principal
    found = await explanation(
        await observer.explain(handle, ticks_for(Explain(request=handle, ticks=ticks))),
        observer.viewer(principal),
        one=handle is not None,
        text=observer.text_of(principal),
    )
    if found is None:
        raise Fault(404, "no record of that request is kept", code="request_not_found")
    document: dict[str, Any] = msgspec.to_builtins(found)
    document.pop("event", None)
    if handle is not None:
        document["told"] = sentences(found.requests[0], found.ticks)
    return Reply(200, msgspec.json.encode(document))


def _number(head: Head, name: str, most: int | None = None) -> int | None:
    """Return a number of the query; None where there is none.

    Raises:
        Fault: it is no whole number, or larger than `most`.
    """
    text = head.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise invalid(name, "must be a whole number")
    if most is not None and int(text) > most:
        raise invalid(name, f"must be at most {most}")
    return int(text)
