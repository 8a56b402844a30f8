"""Whether the daemon is well, what it counts, and the verbs of an operator."""

from __future__ import annotations

import msgspec

from uma_protocol.errors import Code
from uma_protocol.rules import MAX_INT64, Choice, Integer, Text
from uma_trio.http.fields import Field, honoured
from uma_trio.http.intake import fields_of
from uma_trio.http.llama.metrics import llama_metrics
from uma_trio.http.wire.errors import Fault, fault_of, invalid
from uma_trio.http.wire.message import Exchange, Reply
from uma_trio.http.wire.settings import Shared
from uma_trio.telemetry.exposition import prometheus
from uma_trio.words import LANES

PRIORITY: tuple[Field, ...] = (
    honoured(
        "request",
        Integer(1, MAX_INT64),
        "the daemon's handle of the request; give either this or `id`",
    ),
    honoured("id", Text(1, 128, printable=True), "the `id` of the answer"),
    honoured("priority", Choice(LANES), "the lane", required=True),
)
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


async def health(exchange: Exchange, shared: Shared) -> Reply:
    """Report whether the daemon accepts requests."""
    if shared.service.draining:
        raise fault_of(Code.E_LIFECYCLE_001, "the daemon is stopping")
    return Reply(200, b'{"status":"ok"}')


async def metrics(exchange: Exchange, shared: Shared) -> Reply:
    """Return the metrics as JSON, or in Prometheus' text format if the client accepts text."""
    head = exchange.request.head
    figures = shared.service.metrics()
    accepted = head.headers.get("accept", "")
    named = head.query.get("format", "prometheus" if "text/plain" in accepted else "json")
    if named == "prometheus" or "openmetrics" in accepted:
        text = prometheus(figures) + llama_metrics(figures)
        since = (("Process-Start-Time-Unix", str(shared.started)),)
        return Reply(200, text.encode(), content_type=_PROMETHEUS, headers=since)
    return Reply(200, msgspec.json.encode(figures))


async def priority(exchange: Exchange, shared: Shared) -> Reply:
    """Move a request to another lane."""
    body = await fields_of(exchange, shared, PRIORITY)
    handle, name = body.get("request"), body.get("id")
    if (handle is None) is (name is None):
        raise invalid("request", "or id must be given, exactly one of them")
    service = shared.service
    found = [
        running
        for running in service.directory
        if running.handle == handle or running.origin.name == name
    ]
    principal = exchange.request.caller.principal
    # Clients choose the ids of the protocol, so another user's request may have the same one.
    mine = [running for running in found if principal.may_change(running.origin.principal)]
    wanted = [running.handle for running in mine or found]
    if not [one for one in wanted if service.move(one, body.get("priority"), principal)]:
        why = "that request is not running; GET /slots lists those that are"
        raise Fault(404, why, code="request_not_found")
    return Reply(200, msgspec.json.encode({"ok": True, "moved": len(wanted)}))
