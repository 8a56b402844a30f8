"""A deliberately wrong server of the framed protocol: a right one behind a proxy that breaks one rule.

Each :class:`Fault` is one switch. `request` may change, drop or multiply the documents that the client sends,
`event` those that the server sends. With neither the proxy is right.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Document = dict[str, Any]
MAX_FRAME = 1 << 20


@dataclass
class Seen:
    """What has passed on one connection."""

    payloads: list[bytes] = field(default_factory=list)
    events: list[Document] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    token: str = ""

    @property
    def last(self) -> Document:
        """The last request that is JSON."""
        for payload in reversed(self.payloads):
            with suppress(ValueError):
                return dict(json.loads(payload))
        return {}

    @property
    def is_running(self) -> bool:
        """Whether a request has no eos yet."""
        return bool(self.ids) and not any(event["event"] == "eos" for event in self.events)


class Hangup(Exception):
    """The proxy closes the connection, without a word."""


@dataclass(frozen=True)
class Fault:
    """One rule that the server breaks, and the cases that must notice it."""

    name: str
    fails: str
    request: Callable[[Document, Seen], list[Document]] | None = None
    event: Callable[[Document, Seen], list[Document]] | None = None
    payload: Callable[[bytes, Seen], list[bytes]] | None = None
    at_start: bytes = b""
    at_end: Callable[[Seen], bytes | None] = lambda _: b""
    """Returns what goes to the server at the end of the client's stream; None closes the connection at once."""
    stays_open: bool = False
    one_frame_a_write: bool = False
    big_endian: bool = False


def framed(payload: bytes, order: Any = "little") -> bytes:
    """Return a payload behind its length."""
    return len(payload).to_bytes(4, order) + payload


class _Pipe:
    def __init__(self, fault: Fault, near: socket.socket, far: socket.socket, token: str) -> None:
        self.fault, self.near, self.far, self.seen = fault, near, far, Seen(token=token)
        if fault.at_start:
            near.sendall(fault.at_start)
        for direction in (self._up, self._down):
            threading.Thread(target=self._guarded, args=(direction,), daemon=True).start()

    def _guarded(self, direction: Callable[[], None]) -> None:
        try:
            direction()
        except (Hangup, OSError):
            for sock in (self.near, self.far):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _up(self) -> None:
        kept = b""
        while data := self.near.recv(1 << 20):
            kept += data
            passed = 0
            while len(kept) >= 4:
                length = int.from_bytes(kept[:4], "little")
                if not 0 < length <= MAX_FRAME:  # what no rule of documents is about
                    self._hear(kept, broken=True)
                    kept = b""
                elif len(kept) < 4 + length:
                    break
                else:
                    passed += 1
                    if passed == 1 or not self.fault.one_frame_a_write:
                        self._hear(kept[4 : 4 + length])
                    kept = kept[4 + length :]
            if self.fault.one_frame_a_write:
                kept = b""
        last = self.fault.at_end(self.seen)
        if last is None:
            raise Hangup
        self.far.sendall(last or kept)
        if not self.fault.stays_open:
            self.far.shutdown(socket.SHUT_WR)

    def _hear(self, payload: bytes, *, broken: bool = False) -> None:
        if broken:
            self.far.sendall(payload)
            return
        payloads = [payload]
        if self.fault.payload is not None:
            payloads = self.fault.payload(payload, self.seen)
        for one in payloads:
            try:
                document = json.loads(one)
            except ValueError:
                document = None
            documents = [one]
            if isinstance(document, dict) and self.fault.request is not None:
                documents = [
                    json.dumps(made).encode() for made in self.fault.request(document, self.seen)
                ]
            self.seen.payloads.append(payload)
            if isinstance(document, dict) and document.get("type", "generate") == "generate":
                self.seen.ids.append(str(document.get("id")))
            self.far.sendall(b"".join(map(framed, documents)))

    def _down(self) -> None:
        kept = b""
        with suppress(ConnectionResetError):
            while data := self.far.recv(1 << 20):
                kept += data
                while len(kept) >= 4 and len(kept) >= 4 + int.from_bytes(kept[:4], "little"):
                    length = int.from_bytes(kept[:4], "little")
                    event, kept = json.loads(kept[4 : 4 + length]), kept[4 + length :]
                    events = (
                        [event] if self.fault.event is None else self.fault.event(event, self.seen)
                    )
                    self.seen.events.append(event)
                    order = "big" if self.fault.big_endian else "little"
                    for one in events:
                        self.near.sendall(framed(json.dumps(one).encode(), order))
        if not self.fault.stays_open:
            self.near.shutdown(socket.SHUT_WR)


@contextmanager
def faulty(fault: Fault, target: str, folder: Path, token: str = "") -> Iterator[str]:
    """Serve a right server with a fault; yields the address, of the same kind as the target."""
    is_tcp = target.startswith("tcp:")
    with socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX) as listener:
        listener.bind(("127.0.0.1", 0) if is_tcp else str(folder / "f"))
        listener.listen(64)
        pipes: list[_Pipe] = []

        def accept() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                if is_tcp:
                    host, _, port = target.removeprefix("tcp:").rpartition(":")
                    far = socket.create_connection((host, int(port)))
                else:
                    far = socket.socket(socket.AF_UNIX)
                    far.connect(target)
                with suppress(OSError):
                    pipes.append(_Pipe(fault, near, far, token))

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"tcp:127.0.0.1:{listener.getsockname()[1]}" if is_tcp else str(folder / "f")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for pipe in pipes:
                for sock in (pipe.near, pipe.far):
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                    sock.close()
    if not is_tcp:
        (folder / "f").unlink()


# --- faults ---


def _without(*names: str) -> Callable[[Document, Seen], list[Document]]:
    """The server ignores fields."""
    return lambda document, _: [{k: v for k, v in document.items() if k not in names}]


def _with(**fields: Any) -> Callable[[Document, Seen], list[Document]]:
    """Every event has more, or other, fields."""
    return lambda event, _: [{**event, **fields}]


def _in(kind: str, **fields: Any) -> Callable[[Document, Seen], list[Document]]:
    """Events of a kind have other fields."""
    return lambda event, _: [{**event, **fields} if event["event"] == kind else event]


def _code(code: str, /, **fields: Any) -> Callable[[Document, Seen], list[Document]]:
    """Errors with a code have other fields."""
    return lambda event, _: [{**event, **fields} if event.get("code") == code else event]


def _hangs_up(when: Callable[[Document, Seen], bool]) -> Callable[[Document, Seen], list[Document]]:
    """The connection ends at some request."""

    def request(document: Document, seen: Seen) -> list[Document]:
        if when(document, seen):
            raise Hangup
        return [document]

    return request


def _closes_at(*kinds: str, **code: str) -> Callable[[Document, Seen], list[Document]]:
    """The connection ends in place of an event."""

    def event(found: Document, _: Seen) -> list[Document]:
        if found["event"] in kinds or (code and found.get("code") == code["code"]):
            raise Hangup
        return [found]

    return event


def _eos(event: Document, **fields: Any) -> Document:
    return {
        "id": event.get("id", "a"),
        "event": "eos",
        "reason": "stop",
        "usage": {"prompt_tokens": 1, "completion_tokens": 0, "cached_tokens": 0},
        "timings": {"queue_ms": 0.0, "total_ms": 1.0, "tokens_per_s": 1.0},
        "request": 1,
        **fields,
    }


def _accepts(*codes: str) -> Callable[[Document, Seen], list[Document]]:
    """What should be refused is answered."""
    return lambda event, _: [_eos(event) if event.get("code") in codes else event]


def _leniently(payload: bytes, _: Seen) -> list[bytes]:
    """Whatever can be guessed to be JSON is."""
    encoding = json.detect_encoding(payload)
    text = payload.decode(encoding, "replace")
    try:
        value, _ = json.JSONDecoder(parse_constant=lambda _: 0.0).raw_decode(text)
    except ValueError:
        return [payload]
    if not isinstance(value, dict):
        value = {"id": "a", "prompt": "x", "max_tokens": 1}
    finite = {
        name: 0.0 if isinstance(one, float) and not math.isfinite(one) else one
        for name, one in value.items()
    }
    return [json.dumps(finite).encode().replace(b"\\ud800", b"?")]


def _without_limits(payload: bytes, _: Seen) -> list[bytes]:
    document = json.loads(payload)
    document.pop("metadata", None)
    document.pop("stop_token_ids", None)
    document["prompt"] = document["prompt"][:100]
    return [json.dumps(document).encode()]


def _small_buffer(payload: bytes, _: Seen) -> list[bytes]:
    if len(payload) > 1 << 16:
        raise Hangup
    return [payload]


def _news(event: Document, _: Seen) -> list[Document]:
    if event["event"] != "eos":
        return [event]
    loading = {"id": event["id"], "event": "loading", "model": "m", "state": "s", "progress": 1.0}
    return [loading, event]


def _echo(event: Document, seen: Seen) -> list[Document]:
    if event["event"] == "error":
        event = {**event, "message": event["message"] + str(seen.last)}
    return [event]


def _any_id(event: Document, seen: Seen) -> list[Document]:
    return [{**event, "id": seen.last.get("id", "a")}]


def _no_id_in_errors(event: Document, _: Seen) -> list[Document]:
    return [{k: v for k, v in event.items() if event["event"] != "error" or k != "id"}]


def _admin_waits(document: Document, seen: Seen) -> list[Document]:
    kind = document.get("type", "generate")
    return (
        [{"type": "later"}]
        if seen.is_running and kind not in ("generate", "cancel")
        else [document]
    )


_SEEDS = itertools.count(1)


def _redraws(document: Document, _: Seen) -> list[Document]:
    if "seed" in document:
        document = {**document, "seed": next(_SEEDS), "temperature": 100}
    return [{k: v for k, v in document.items() if k != "top_k"}]


def _bad_vectors(event: Document, seen: Seen) -> list[Document]:
    if event.get("code") != "E_MODEL_002":
        return [event]
    if seen.last.get("type") == "embed":  # 1.0 and 1.0: its length is not 1
        made = {"id": "a", "event": "vectors", "first": 0, "vectors": ["AACAPwAAgD8="] * 2}
    else:
        made = {"id": "a", "event": "scores", "scores": [[0, 1.0], [1, 2.0]]}
    return [made, _eos(event)]


def _counts_prompts(event: Document, seen: Seen) -> list[Document]:
    if event["event"] == "eos" and any(one["event"] == "end" for one in seen.events):
        event["usage"]["prompt_tokens"] *= 2
    return [event]


def _counts_more(event: Document, _: Seen) -> list[Document]:
    if event["event"] == "eos":
        event["usage"]["completion_tokens"] += 1
    return [event]


def _no_time(event: Document, _: Seen) -> list[Document]:
    if event["event"] == "eos":
        event["timings"]["total_ms"] = 0.0
    return [event]


def _worst_first(event: Document, _: Seen) -> list[Document]:
    if "logprobs" in event:
        event["logprobs"]["top"].reverse()
    return [event]


def _tells(event: Document, seen: Seen) -> list[Document]:
    if event["event"] == "explain":
        event["prompts"] = [str(payload) for payload in seen.payloads] + ["Say canary-7f3a"]
    return [event]


def _strangers(event: Document, _: Seen) -> list[Document]:
    return [{**event, "id": "own-0"} if event["event"] == "token" else event]


def _two_ends(event: Document, _: Seen) -> list[Document]:
    return [event, event] if event["event"] == "eos" else [event]


def _goes_on(event: Document, _: Seen) -> list[Document]:
    return [event, {"event": "sessions", "sessions": []}] if event["event"] == "error" else [event]


def _unforgiving(event: Document, seen: Seen) -> list[Document]:
    refused = sum(one["event"] == "error" for one in seen.events)
    return [{**event, "fatal": True} if event["event"] == "error" and refused >= 16 else event]


def _no_end(event: Document, _: Seen) -> list[Document]:
    return [] if event["event"] == "end" else [event]


def _takes_any_token(document: Document, seen: Seen) -> list[Document]:
    right = {"type": "hello", "token": seen.token}
    if document.get("type") == "hello":
        return [right]
    return [document] if seen.payloads else [right, document]


def _crossing(event: Document, _: Seen) -> list[Document]:
    if event.get("code") != "E_PROTO_005":
        return [event]
    return [{"event": "ok"}]


def _lost_prefix(document: Document, _: Seen) -> list[Document]:
    return [document] if document.get("type") != "prefix" else []


_SPELLED = _hangs_up(lambda document, _: "event" in document)
_REQUEST_OF_ITS_OWN = framed(b'{"id":"a","prompt":"x","max_tokens":2}')

RIGHT = Fault("nothing is wrong", "")
FAULTS = [
    Fault("lengths of events are big-endian", "1.1.1", big_endian=True),
    Fault("only one frame of a write is read", "1.2.1 1.2.2 1.2.3 3.1.2", one_frame_a_write=True),
    Fault(
        "a broken frame is a bad document",
        "1.3.1 1.3.2 1.3.3 1.3.5 1.4.1 1.4.2 1.4.3 5.4.1",
        event=_code("E_PROTO_002", code="E_PROTO_001"),
    ),
    Fault("a broken frame is not fatal", "1.3.1 1.3.5", event=_code("E_PROTO_002", fatal=False)),
    Fault(
        "the reason is lost when the client still writes",
        "5.4.1 1.3.1",
        event=_closes_at(code="E_PROTO_002"),
    ),
    Fault(
        "messages say nothing",
        "1.4.1 1.4.2 1.4.3 2.5.1 2.5.2 2.5.3 2.5.4 2.5.5 2.5.6 2.5.7 2.5.8 2.5.9",
        event=_in("error", message="no"),
    ),
    Fault("half a frame is a request", "1.5.1", at_end=lambda _: _REQUEST_OF_ITS_OWN),
    Fault(
        "whatever looks like JSON is read",
        "2.1.1 2.1.2 2.1.3 2.1.4 2.1.5 2.1.6 2.1.7 2.1.8 2.1.9 2.1.10 2.2.1 2.2.2",
        payload=_leniently,
    ),
    Fault("documents have no limits", "2.3.2 2.3.3 2.3.4 2.3.5 7.0.1", payload=_without_limits),
    Fault("long frames are not read", "1.3.4 2.3.6", payload=_small_buffer),
    Fault("metadata is lost", "2.3.1 2.5.10", request=_without("metadata")),
    Fault(
        "a prompt with a NUL ends the connection",
        "2.4.1",
        request=_hangs_up(lambda document, _: "\x00" in str(document.get("prompt"))),
    ),
    Fault(
        "bad fields are ignored",
        "2.5.1 2.5.2 2.5.3 2.5.4 2.5.5 2.5.6 2.5.7 2.5.8 2.5.9 2.7.1 2.7.2 2.7.3 3.0.6 3.0.7 3.0.8 "
        "3.7.1 3.7.2 3.7.3 3.8.4 3.8.5 5.2.1",
        event=_accepts("E_PROTO_003"),
    ),
    Fault("loading is sent to everybody, and late", "2.6.1 3.13.1", event=_news),
    Fault("messages repeat the request", "2.7.1", event=_echo),
    Fault("every event has an id, valid or not", "2.7.3 4.0.3", event=_any_id),
    Fault("refusals have no id", "2.7.2 3.1.1 3.1.2 3.2.2 4.7.1 7.0.1", event=_no_id_in_errors),
    Fault(
        "id must come first",
        "2.8.1",
        request=_hangs_up(lambda document, _: next(iter(document)) not in ("id", "type")),
    ),
    Fault(
        "type is required", "3.0.1", request=_hangs_up(lambda document, _: "type" not in document)
    ),
    Fault("requests are not spelled as events", "3.0.2 3.0.3", request=_SPELLED),
    Fault(
        "an unknown type is fatal",
        "3.0.4 3.4.3 5.3.1 5.3.2",
        event=_code("E_PROTO_007", fatal=True),
    ),
    Fault(
        "the temperature is at most 2",
        "3.0.5",
        request=_hangs_up(lambda document, _: document.get("temperature", 0) == 100),
    ),
    Fault(
        "adapters are not supported",
        "3.0.9",
        request=_hangs_up(lambda document, _: "lora" in document),
    ),
    Fault(
        "a busy connection is a full queue",
        "3.1.1 3.1.2",
        event=_code("E_PROTO_004", code="E_LIMIT_003"),
    ),
    Fault("a cancel is a stop", "3.2.1 3.0.2 3.11.2", event=_in("eos", reason="stop")),
    Fault("a cancel always hits", "3.2.2 3.2.3 3.2.4 3.2.6 4.8.2", event=_crossing),
    Fault(
        "an id is used once",
        "3.2.5",
        request=_hangs_up(lambda document, seen: document.get("id") in seen.ids),
    ),
    Fault("administrators wait", "3.3.1 3.3.2 3.3.3 3.3.4 3.3.5", request=_admin_waits),
    Fault("metrics keep the connection", "3.4.1", stays_open=True),
    Fault("metrics are never repeated", "3.4.2 3.4.3", request=_without("interval_ms")),
    Fault(
        "metrics end the connection, whatever runs",
        "3.4.4",
        event=_closes_at("sessions"),
    ),
    Fault(
        "biases and ends are ignored",
        "3.6.1 3.6.2",
        request=_without("logit_bias", "stop_token_ids", "min_tokens"),
    ),
    Fault("each draw has its own seed", "3.6.3", request=_redraws),
    Fault(
        "constraints are ignored",
        "3.8.1 3.8.2 3.8.3 3.8.4",
        request=_without("choice", "schema", "regex"),
    ),
    Fault("a client that has said all is gone", "3.10.1", at_end=lambda _: None),
    Fault("there is one choice", "3.11.1 4.9.1", request=_without("n")),
    Fault("choices have no end", "3.11.1 4.9.1", event=_no_end),
    Fault("vectors have any length and scores any order", "3.12.1 3.12.2", event=_bad_vectors),
    Fault("adapters are ignored", "3.14.1", request=_without("lora")),
    Fault("what is absent is null", "4.0.1 4.0.2", event=_with(logprobs=None)),
    Fault("token ids are strings", "4.0.1", event=_in("token", token_id=7.5)),
    Fault("answers are always streamed", "4.1.1 3.7.2", request=_without("stream")),
    Fault("stop strings are ignored", "4.1.2", request=_without("stop")),
    Fault("logprobs are worst first", "4.2.1", event=_worst_first),
    Fault(
        "logprobs come unasked",
        "4.2.2",
        request=lambda document, _: [{**document, "logprobs": 1}],
    ),
    Fault("every answer stops", "4.3.1 4.9.1 3.1.1", event=_in("eos", reason="stop")),
    Fault("answers end for a fifth reason", "4.3.2", event=_in("eos", reason="done")),
    Fault("usage counts the end", "4.4.1", event=_counts_more),
    Fault("nothing takes time", "4.4.2", event=_no_time),
    Fault("all requests have one handle", "4.4.3", event=_in("eos", request=1)),
    Fault("an answer ends twice", "4.5.1", event=_two_ends),
    Fault("tokens are for anybody", "4.5.2", event=_strangers),
    Fault("a request is refused and goes on", "4.7.1", event=_code("E_LIMIT_004", fatal=False)),
    Fault("explain repeats prompts", "4.8.1", event=_tells),
    Fault("the prompt of each choice counts", "4.9.2", event=_counts_prompts),
    Fault("errors are followed by more", "5.1.1 5.2.1", event=_goes_on),
    Fault("every error is fatal", "5.2.2 3.0.4", event=_in("error", fatal=True)),
    Fault("no error is fatal", "5.2.1 5.3.1", event=_in("error", fatal=False)),
    Fault("every error is worth another attempt", "4.7.1", event=_in("error", retryable=True)),
    Fault("refusals are never forgiven", "5.3.2", event=_unforgiving),
    Fault("no question is answered", "1.2.2", request=_lost_prefix),
    Fault(
        "hello is for ports only",
        "6.4.1",
        request=_hangs_up(lambda document, _: document.get("type") == "hello"),
    ),
]
"""Faults of a server on any socket."""

TCP_FAULTS = [
    Fault("a request behind hello is lost", "6.1.1", one_frame_a_write=True),
    Fault("any token opens the door, and so does none", "6.2.1 6.2.2", request=_takes_any_token),
    Fault("hello has no limit", "6.2.3", event=_closes_at(code="E_PROTO_002")),
    Fault("a stranger is greeted", "6.3.1", at_start=framed(b'{"event":"ok"}')),
    Fault("a client that is gone is not noticed", "6.8.1", stays_open=True),
]
"""Faults of a server on a TCP port."""

SLOW_FAULTS = [
    Fault("an event comes that belongs to nothing", "7.0.2", at_start=framed(b'{"event":"ok"}'))
]
"""Faults in what happens when a limit of time is reached."""
