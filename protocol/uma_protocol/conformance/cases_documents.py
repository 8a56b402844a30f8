"""Cases of the sections Frames and Documents."""

from __future__ import annotations

import json
from typing import Any

from uma_protocol.frames import DEFAULT_MAX_FRAME_BYTES
from uma_protocol.scan import MAX_BARE_BYTES, MAX_DEPTH, MAX_ESCAPES, MAX_NODES

from .peer import Document, Server, case, expect, frame, generate, long

ASK = json.dumps(generate())
CANARY = "canary-7f3a"

# --- 1. Frames ---


@case("1.1.1", "a request in a frame is answered in frames")
def _(server: Server) -> None:
    expect(server.ask().tokens, "a request for 8 tokens got none")


@case("1.2.1", "a frame may arrive byte by byte")
def _(server: Server) -> None:
    peer = server.connect()
    for byte in frame(generate()):
        peer.write(bytes([byte]))
    peer.answer()


@case("1.2.2", "one write may contain several frames")
def _(server: Server) -> None:
    peer = server.connect({"type": "sessions"}, {"type": "prefix"}, {"type": "sessions"})
    for kind in ("sessions", "prefix", "sessions"):
        peer.event(kind)


@case("1.2.3", "a write may end inside the header of the next frame")
def _(server: Server) -> None:
    one = frame({"type": "sessions"})
    peer = server.connect()
    peer.write(one + one[:2])
    peer.event("sessions")
    peer.write(one[2:])
    peer.event("sessions")


def _breaks(server: Server, data: bytes, *, beside: bool = False) -> str:
    """Send bytes that break the framing, and return the message of the fatal refusal."""
    peer = server.connect(*([long()] if beside else []))
    peer.write(data)
    while beside:
        event = peer.read()
        if event is None or event["event"] in ("error", "eos"):
            expect(event, "the connection ended without a reason")
            expect((event or {}).get("code") == "E_PROTO_002", f"expected E_PROTO_002, not {event}")
            expect((event or {}).get("fatal") is True, "E_PROTO_002 was not fatal")
            peer.closed()
            return ""
    return peer.refusal("E_PROTO_002", fatal=True)


@case("1.3.1", "a length of zero is refused by its header alone")
def _(server: Server) -> None:
    _breaks(server, bytes(4))


@case("1.3.2", "a length above the limit is refused by its header alone")
def _(server: Server) -> None:
    _breaks(server, (DEFAULT_MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


@case("1.3.3", "the largest length is refused by its header alone")
def _(server: Server) -> None:
    _breaks(server, b"\xff" * 4)


@case("1.3.4", "a frame of exactly the limit is read")
def _(server: Server) -> None:
    document = b'{"type":"sessions"}'
    peer = server.connect(document.ljust(DEFAULT_MAX_FRAME_BYTES))
    peer.event("sessions")


@case("1.3.5", "a broken frame ends the connection beside a running request too")
def _(server: Server) -> None:
    _breaks(server, bytes(4), beside=True)


@case("1.4.1", "HTTP is refused, and the message names the mistake")
def _(server: Server) -> None:
    message = _breaks(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    expect("text" in message or "HTTP" in message, f"the message does not say so: {message}")


@case("1.4.2", "JSON without a header is refused, and the message names the mistake")
def _(server: Server) -> None:
    message = _breaks(server, ASK.encode())
    expect("text" in message or "JSON" in message, f"the message does not say so: {message}")


@case("1.4.3", "a big-endian length is refused, and the message names the mistake")
def _(server: Server) -> None:
    message = _breaks(server, len(ASK).to_bytes(4, "big") + ASK.encode())
    expect("endian" in message, f"the message does not say so: {message}")


@case("1.5.1", "an end of file inside a frame creates no request")
def _(server: Server) -> None:
    for size in (2, 4, len(ASK) + 3):
        peer = server.connect()
        peer.write(frame(ASK.encode())[:size])
        peer.end()
        event = peer.read()
        if event is not None:
            expect(
                event.get("code") == "E_PROTO_002" and event.get("fatal"),
                f"expected E_PROTO_002 or the end, not {event}",
            )
            peer.closed()


# --- 2. Documents ---

_NOT_JSON = {
    "a byte order mark": b"\xef\xbb\xbf" + ASK.encode(),
    "UTF-16": ASK.encode("utf-16-le"),
    "UTF-32": ASK.encode("utf-32-le"),
    "invalid UTF-8": ASK.encode().replace(b"Once", b"\xff"),
    "a lone surrogate": ASK.encode().replace(b"Once", rb"\ud800"),
    "NaN": ASK.encode().replace(b'"temperature": 0', b'"temperature": NaN'),
    "Infinity": ASK.encode().replace(b'"temperature": 0', b'"temperature": Infinity'),
    "a number beyond a double": ASK.encode().replace(b'"temperature": 0', b'"temperature": 1e999'),
    "text behind the object": ASK.encode() + b"x",
}


def _not_json(number: int, name: str, payload: bytes) -> None:
    @case(f"2.1.{number}", f"{name} is refused")
    def _(server: Server) -> None:
        server.refuses(payload, "E_PROTO_001")


for _number, (_name, _payload) in enumerate(_NOT_JSON.items(), 1):
    _not_json(_number, _name, _payload)


@case("2.1.10", "a document that is no object is refused")
def _(server: Server) -> None:
    for payload in (b"[]", b'"text"', b"1", b"null"):
        event = server.connect(payload).event("error")
        expect(
            event.get("code") in ("E_PROTO_001", "E_PROTO_003") and event.get("fatal") is True,
            f"expected a fatal E_PROTO_001 or E_PROTO_003 for {payload!r}, not {event}",
        )


@case("2.2.1", "a name that occurs twice is refused")
def _(server: Server) -> None:
    payload = ASK[:-1] + ', "max_tokens": 9}'
    peer = server.connect(payload.encode())
    peer.refusal("E_PROTO_001", fatal=True, id_="a")


@case("2.2.2", "a name that occurs twice at depth is refused")
def _(server: Server) -> None:
    payload = ASK[:-1] + ', "metadata": {"x": [{"y": 1, "y": 1}]}}'
    server.connect(payload.encode()).refusal("E_PROTO_001", fatal=True, id_="a")


def _nested(levels: int) -> Document:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"x": value}


@case("2.3.1", "a document of as many levels as allowed is accepted")
def _(server: Server) -> None:
    metadata = _nested(MAX_DEPTH - 2)
    expect(server.ask(metadata=metadata).eos["metadata"] == metadata, "metadata was changed")


@case("2.3.2", "a document of one more level is refused")
def _(server: Server) -> None:
    server.refuses(generate(metadata=_nested(MAX_DEPTH - 1)), "E_PROTO_001")


@case("2.3.3", "a document of too many values is refused")
def _(server: Server) -> None:
    server.refuses(generate(stop_token_ids=[1] * MAX_NODES), "E_PROTO_001")


@case("2.3.4", "a document of too many bytes outside of strings is refused")
def _(server: Server) -> None:
    numbers = [int("9" * 30)] * (MAX_BARE_BYTES // 30)
    server.refuses(generate(metadata={"x": numbers}), "E_PROTO_001")


@case("2.3.5", "a document of too many backslashes is refused")
def _(server: Server) -> None:
    server.refuses(generate(prompt="\n" * (MAX_ESCAPES + 1)), "E_PROTO_001")


@case("2.3.6", "white space does not count")
def _(server: Server) -> None:
    server.connect(ASK.replace(",", "," + " \n\t" * MAX_BARE_BYTES).encode()).answer()


@case("2.4.1", "a prompt may contain any Unicode text")
def _(server: Server) -> None:
    server.ask(prompt="a\x00b\x01\x7f\u2028 \U0001f600 ö \ufeff \uffff")


_NOT_VALID: dict[str, tuple[str, object]] = {
    "a boolean in place of an integer": ("max_tokens", True),
    "a float in place of an integer": ("max_tokens", 1.0),
    "null in place of an absent field": ("seed", None),
    "a number in place of a flag": ("stream", 1),
    "a string in place of a list": ("stop", "x"),
    "a value below its bound": ("max_tokens", 0),
    "a value above its bound": ("temperature", 100.5),
    "a field inside an object": ("slo", {"target_ttft_ms": 0}),
}


def _not_valid(number: int, name: str, field: str, value: object) -> None:
    @case(f"2.5.{number}", f"{name} is refused, and the message names the field")
    def _(server: Server) -> None:
        message = server.refuses({**generate(), field: value}, "E_PROTO_003", id_="a")
        expect(field in message, f"the message does not name {field}: {message}")


for _number, (_name, (_field, _value)) in enumerate(_NOT_VALID.items(), 1):
    _not_valid(_number, _name, _field, _value)


@case("2.5.9", "an unknown field is refused, and the message names the nearest known one")
def _(server: Server) -> None:
    message = server.refuses(generate(max_token=5), "E_PROTO_003", id_="a")
    expect("max_tokens" in message, f"the message does not name max_tokens: {message}")


@case("2.5.10", "metadata is returned as it was sent")
def _(server: Server) -> None:
    metadata = {"trace": ["x", 1, None, {"deep": 0.5}], "ü": "\U0001f600"}
    expect(server.ask(metadata=metadata).eos.get("metadata") == metadata, "metadata was changed")


@case("2.6.1", "a client that asks for nothing new gets only kinds of version 1")
def _(server: Server) -> None:
    answer = server.ask()
    expect(
        not answer.results and not answer.others, f"more came: {answer.results or answer.others}"
    )


@case("2.7.1", "a refusal repeats no text of the request")
def _(server: Server) -> None:
    for fields in (
        {"temperature": CANARY},
        {"priority": CANARY},
        {"stop": CANARY},
        {f"{CANARY} x": 1},
    ):
        message = server.refuses(generate(**fields), "E_PROTO_003", id_="a")
        expect(CANARY not in message, f"the message repeats text: {message}")


@case("2.7.2", "a refusal repeats a valid id")
def _(server: Server) -> None:
    server.refuses(generate("ünique", max_tokens=-1), "E_PROTO_003", id_="ünique")


@case("2.7.3", "a refusal repeats no id that is not valid")
def _(server: Server) -> None:
    for id_ in ("x" * 129, "", 7, "a\nb"):
        server.refuses({**generate(), "id": id_}, "E_PROTO_003")


@case("2.8.1", "the order of fields has no meaning")
def _(server: Server) -> None:
    request = {"type": "generate", **generate()}
    server.connect(dict(reversed(request.items()))).answer()
