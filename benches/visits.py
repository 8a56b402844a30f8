"""What one HTTP server goes through besides streaming: first tokens, long prompts, clients that leave.

Every figure is taken from outside, by the same code for every server. A client that left is gone for the
server once ``GET /slots`` says that no slot works.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Sequence

from benches import clients
from benches.clients import Job, NotServed, SseWire, Wire
from benches.live import Live, Stream, drive
from benches.pace import Pace, pace
from uma_trio_sim.latency import median, percentile

Figures = dict[str, object]
_POLL_S = 0.002
_PATIENCE_S = 120.0
_FIRST_S = 30.0


def first_tokens(ways: dict[str, Wire], seed: str, n: int) -> dict[str, list[float]]:
    """Return the time to the first token in ms of `n` short questions by each way, asked in turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(n):
        names = list(ways)
        for name in names if turn % 2 else reversed(names):
            (answer,) = clients.checked(
                drive(ways[name], clients.jobs(1, 16, 1, f"{seed}/{turn}/{name}"))
            )
            found[name].append(1e3 * (answer.ttft_s or math.nan))
    return found


def compared(found: dict[str, list[float]]) -> Figures:
    """Return median and 95th percentile of each way, and how much more HTTP takes than the socket."""
    figures: Figures = {"ttft_n": len(found["http"])}
    for name, values in found.items():
        figures |= {f"{name}_p50": median(values), f"{name}_p95": percentile(values, 95)}
    if "socket" in found:
        for which, at in (("p50", 50), ("p95", 95)):
            figures[f"more_{which}"] = percentile(found["http"], at) - percentile(
                found["socket"], at
            )
    return figures


def beside_decoders(
    ways: dict[str, Wire], background: SseWire, seed: str, n: int, others: int
) -> Figures:
    """Return the same while `others` decode in the background."""
    jobs = _background(others, 1000, seed)
    with Live(background) as live:
        streams = [live.start(job) for job in jobs]
        live.run(_FIRST_S, lambda: all(_decodes(stream) for stream in streams))
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(n):
            for name, values in first_tokens(ways, f"{seed}/{turn}", 1).items():
                found[name] += values
            live.run(0.05)
            if all(stream.over for stream in streams):
                raise NotServed("the background ended too soon")
    return compared(found)


def long_prompt(wire: SseWire, port: int, seed: str, tokens: int, patience_s: float) -> Figures:
    """Return when the head of an answer to a long prompt came; then leave while it is computed."""
    (job,) = clients.jobs(1, tokens, 8, seed)
    until_idle(port)
    tokenise_ms = 1e3 * _tokenise(port, job.prompt)
    with Live(wire) as live:
        stream = live.start(job)
        live.run(patience_s, lambda: bool(stream.reads))
        head_s = stream.reads[0][0] - stream.sent if stream.reads else None
        live.run(0.3)
        in_prefill = not _decodes(stream)
        live.stop(stream)
        freed_ms = 1e3 * until_idle(port)
    return {
        "left_n": 1,
        "tokenise_ms": tokenise_ms,
        "head_ms": None if head_s is None else 1e3 * head_s,
        "left_prefill_ms": freed_ms if in_prefill else None,
    }


def leaving(wire: SseWire, port: int, seed: str, n: int) -> Figures:
    """Return how long the row of a client that left while it was decoded stayed taken."""
    found = []
    for turn in range(n):
        (job,) = clients.jobs(1, 16, 2000, f"{seed}/{turn}")
        with Live(wire) as live:
            stream = live.start(job)
            live.run(_FIRST_S, lambda stream=stream: _decodes(stream))  # type: ignore[misc]
            live.run(0.2)
            live.stop(stream)
            found.append(1e3 * until_idle(port))
    return {"left_decode_ms": median(found), "left_decode_worst_ms": max(found)}


def crowd(wire: SseWire, seed: str, n: int, slow: int, tokens: int) -> Figures:
    """Return a reader's pace beside `n` background streams, `slow` of them read by nobody.

    The ratio is to the same reader alone.
    """
    alone = _read(wire, f"{seed}/alone", tokens, [])
    beside = _read(wire, f"{seed}/beside", tokens, _background(n, 400, seed), slow)
    return {
        "crowd_n": 1,
        "alone_p95": alone.p95,
        "crowd_p95": beside.p95,
        "crowd_x": beside.p95 / alone.p95,
    }


def _read(wire: SseWire, seed: str, tokens: int, others: Sequence[Job], slow: int = 0) -> Pace:
    (job,) = clients.jobs(1, 16, tokens, seed)
    with Live(wire) as live:
        streams = [live.start(other) for other in others]
        live.run(_FIRST_S, lambda: all(_decodes(stream) for stream in streams[slow:]))
        for stream in streams[:slow]:
            live.neglect(stream)
        reader = live.start(Job("reader", job.prompt, job.max_tokens, "interactive"))
        live.run(4 * _FIRST_S, lambda: reader.over)
        (answer,) = clients.checked(live.answers([reader]))
    found = pace([answer.sent], [answer.times])
    if found is None:
        raise NotServed("the reader got no tokens")
    return found


def _background(n: int, tokens: int, seed: str) -> list[Job]:
    jobs = clients.jobs(n, 16, tokens, f"{seed}/others")
    return [Job(job.id, job.prompt, job.max_tokens, "background") for job in jobs]


def _decodes(stream: Stream) -> bool:
    """Whether tokens of a stream have come, and not only the head of its answer."""
    return stream.over or any(b'"content"' in data for _, data in stream.reads)


def _tokenise(port: int, text: str) -> float:
    """Return in how many seconds a server answers with the tokens of a text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        body = json.dumps({"content": text})
        began = time.perf_counter()
        connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        return time.perf_counter() - began
    finally:
        connection.close()


def until_idle(port: int) -> float:
    """Return in how many seconds no slot of a server works any more. Raises :class:`NotServed`."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        while time.perf_counter() - began < _PATIENCE_S:
            connection.request("GET", "/slots")
            slots = json.loads(connection.getresponse().read())
            if not any(slot["is_processing"] for slot in slots):
                return time.perf_counter() - began
            time.sleep(_POLL_S)
    finally:
        connection.close()
    raise NotServed(f"a slot was still at work {_PATIENCE_S:g} s after its client left")
