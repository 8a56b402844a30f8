"""How long the worst bodies hold a running daemon's event loop up, beside a stream.

    uma-trio serve --http 8080 &
    python -m benches lag --http 8080

Each body is sent `--repeat` times, in turns with a quiet second. *loop lag* is the upper edge of the
highest bucket of `loop_lag_ms` that grew, *gap* the longest time between two parts of the stream; both
are medians. The bodies are made in advance, as making one would hold this program's own reader up.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from collections.abc import Mapping

from benches.driver import tool
from uma_trio.sim.latency import median

_BODIES: Mapping[str, tuple[str, bytes]] = {
    "quiet": ("", b""),
    "2 MB to tokenise": ("/tokenize", json.dumps({"content": "ab " * 690_000}).encode()),
    "256 KB with pieces": (
        "/tokenize",
        json.dumps({"content": "ab " * 87_000, "with_pieces": True}).encode(),
    ),
    "32,000 ids": ("/detokenize", json.dumps({"tokens": [300] * 32_000}).encode()),
    "8 MB of ids": ("/v1/completions", b'{"prompt":[%b1]}' % (b"5," * 4_000_000)),
    "16,000 lists": ("/v1/completions", b'{"prompt":"a","max_tokens":1,"x":[%b1]}' % (b"[]," * 16_000)),
    "30,000 names": (
        "/v1/completions",
        json.dumps({"prompt": "a", "max_tokens": 1, **{f"x{n}": 1 for n in range(30_000)}}).encode(),
    ),
    "2 MB of emoji": ("/v1/completions", json.dumps({"prompt": "\U0001f600" * 500_000}).encode()),
    "8,192 messages": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "hi"}] * 8192}).encode(),
    ),
}  # fmt: skip


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--http", type=int, required=True, help="the port of a running daemon")
    parser.add_argument("--repeat", type=int, default=5)


@tool(_arguments)
def lag(given: argparse.Namespace) -> int:
    """Measure the lag of a daemon's event loop beside the worst bodies."""
    gaps: list[float] = [0.0]
    threading.Thread(target=_stream, args=(given.http, gaps), daemon=True).start()
    time.sleep(2)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _BODIES}
    for _ in range(given.repeat):
        for name, (path, body) in _BODIES.items():
            before = _buckets(given.http)
            gaps[:] = [0.0]
            if path:
                _ask(given.http, "POST", path, body)
            time.sleep(0.5 if path else 1)
            found[name].append((_highest(before, _buckets(given.http)), 1e3 * max(gaps)))
    for name, pairs in found.items():
        lags, longest = zip(*pairs, strict=True)
        print(f"{name:20s} loop lag {median(lags):6g} ms   gap {median(longest):6.0f} ms")
    return 0


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def _buckets(port: int) -> dict[str, int]:
    return dict(json.loads(_ask(port, "GET", "/metrics"))["loop_lag_ms"]["buckets"])


def _highest(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Return the upper edge of the highest bucket that grew; buckets count all below them, too."""
    grown = sorted((float(edge), after[edge] - before[edge]) for edge in after)
    return next((edge for edge, count in grown if count == grown[-1][1]), 0.0)


def _stream(port: int, gaps: list[float]) -> None:
    """Read one stream after the other, and note the times between their parts."""
    asked = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "pace": "asap"}).encode()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        answer, last = connection.getresponse(), None
        while line := answer.readline():
            if line.startswith(b"data:"):
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
        connection.close()
