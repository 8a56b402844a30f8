"""What the headers of a request say beside its body: lane, urgency, session and origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from uma_protocol.requests import MAX_LABEL_BYTES
from uma_trio.api.bodies import TextBody
from uma_trio.api.context import Context
from uma_trio.engine.messages import Targets
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head
from uma_trio.service.ask import Origin
from uma_trio.words import AWAITS, LANES, Awaits, Lane

_HOUR_MS: Final = 3_600_000.0
# Behind ours are those of llm-d-router, the newer ones first.
_TTFT_HEADERS: Final = ("x-uma-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_TBT_HEADERS: Final = ("x-uma-slo-tbt-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")


def lane_of(body: TextBody, head: Head) -> Lane:
    """Return the lane of a request: by header, by `priority`, or by the service tier. Raises :class:`Fault`."""
    named = head.headers.get("x-uma-priority")
    objective = head.headers.get("x-llm-d-inference-objective")
    if named is None and objective in LANES:
        named = objective
    if named is not None:
        if named not in LANES:
            raise invalid("X-UMA-Priority", f"must be one of {', '.join(LANES)}")
        return "background" if named == "background" else "interactive"
    if body.priority is not None:
        return body.priority
    return "background" if getattr(body, "service_tier", None) == "flex" else "interactive"


def awaits_of(body: TextBody, head: Head) -> Awaits | None:
    """Return what the client waits for, by the header ``X-UMA-Awaits`` or by `awaits`. Raises :class:`Fault`."""
    value = head.headers.get("x-uma-awaits")
    if value is not None and value not in AWAITS:
        raise invalid("X-UMA-Awaits", f"must be one of {', '.join(AWAITS)}")
    awaits: Awaits | None = body.awaits if value is None else value
    return awaits


def targets_of(head: Head) -> Targets:
    """Return the latencies that the client requests, from ``X-UMA-SLO-TTFT-MS`` and ``-TBT-MS`` or llm-d's names of them."""
    return Targets(_first_of(head, _TTFT_HEADERS), _first_of(head, _TBT_HEADERS))


def session_of(head: Head) -> str | None:
    """Return the conversation of the request, from ``X-Session-Id``. Raises :class:`Fault`."""
    named = head.headers.get("x-session-id")
    if named is not None and not (0 < len(named) <= MAX_LABEL_BYTES and named.isprintable()):
        raise invalid("X-Session-Id", f"must have 1 to {MAX_LABEL_BYTES} printable characters")
    return named


def origin_of(exchange: Exchange, context: Context, name: str) -> Origin:
    """Return the origin of a request; `name` is its id in the answer."""
    return Origin(principal=exchange.principal, door=context.door, name=name, app=exchange.head.app)


def _first_of(head: Head, names: Sequence[str]) -> float | None:
    """Return the first of these headers that was sent, in seconds."""
    name = next((name for name in names if name in head.headers), None)
    if name is None:
        return None
    try:
        value = float(head.headers[name])
    except ValueError:
        value = math.nan
    if not 1 <= value <= _HOUR_MS:
        raise invalid(name, f"must be a number from 1 to {_HOUR_MS:g}")
    return value / 1e3
