"""What must hold for every input, as functions of bytes, and strategies that find hard inputs.

A target takes bytes and raises AssertionError, or any error that is not the protocol's own, when an
invariant is broken. Because the input is bytes and nothing else, whatever a run finds can be put
into the corpus as a file and is replayed by the tests from then on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import strategies as st

from uma_protocol import (
    Connection,
    Embed,
    Generate,
    RemoteProtocolError,
    Request,
    Rerank,
    Role,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
    frame,
)
from uma_protocol.conformance.documents import EVENTS, REQUESTS
from uma_protocol.testing import bytewise, cuts, feed, whole

from .body_target import bodies, body
from .http_target import http, requests
from .schema_target import schema, schemas
from .step_target import shapes, step

if TYPE_CHECKING:
    from collections.abc import Callable


class Target(NamedTuple):
    """An invariant and where to look for inputs that break it."""

    check: Callable[[bytes], None]
    inputs: st.SearchStrategy[bytes]


def framing(data: bytes) -> None:
    """Any stream is understood or refused, the same way whole, byte by byte and cut anywhere."""
    # The cuts are made of the input itself, so that a file in the corpus says everything.
    positions = [len(data) * byte // 256 for byte in data[:10]]
    for name, fresh in _ENDS.items():
        first = _outcome(fresh(), whole(data))
        if _outcome(fresh(), bytewise(data)) != first:
            raise AssertionError(f"{name}: byte by byte differs from whole")
        if _outcome(fresh(), cuts(data, *positions)) != first:
            raise AssertionError(f"{name}: cut at {positions} differs from whole")


def _asking(request: Request) -> Connection:
    """A client that waits for the answer to a request with the id of the samples."""
    connection = Connection(Role.CLIENT)
    connection.send(request)
    return connection


_ENDS: dict[str, Callable[[], Connection]] = {
    "server": lambda: Connection(Role.SERVER),
    "client": lambda: Connection(Role.CLIENT),
    "client that asks for texts": lambda: _asking(Generate("a-1", n=2, prompt="p")),
    "client that asks for vectors": lambda: _asking(Embed(id="a-1", input=("p",))),
    "client that asks for scores": lambda: _asking(Rerank(id="a-1", query="q", documents=("d",))),
}


def _outcome(connection: Connection, pieces: list[bytes]) -> list[object]:
    """Events and refusals, in a form that can be compared."""
    return [
        (item.code, item.message, item.field, item.request_id, item.fatal)
        if isinstance(item, RemoteProtocolError)
        else item
        for item in feed(connection, [*pieces, b""])
    ]


def codec(payload: bytes) -> None:
    """Any document is read or refused; what is read is JSON, and is written and read back equal."""
    try:
        request = decode_request(payload)
    except RemoteProtocolError:
        pass
    else:
        # A second opinion. It is more lenient than we are, so it accepts all that we do.
        if not isinstance(json.loads(payload.decode()), dict):
            raise AssertionError("a request was read from what is not an object")
        if decode_request(encode_request(request)) != request:
            raise AssertionError("a request changed on its way through the codec")
    try:
        event = decode_event(payload)
    except RemoteProtocolError:
        pass
    else:
        if decode_event(encode_event(event)) != event:
            raise AssertionError("an event changed on its way through the codec")


# --- inputs -------------------------------------------------------------------------------------

_DOCUMENTS = [*REQUESTS, *EVENTS]
_FIELDS = sorted({name for payload in _DOCUMENTS for name in json.loads(payload)})
_HOSTILE = [
    b"NaN",
    b"1e999",
    b"-0",
    b"0.1e-400",
    b"9" * 400,
    b"18446744073709551616",
    b"true",
    b"null",
    b'"\\ud800"',
    b'"\xff"',
    b"[" * 40,
    b"{},",
    b"\xef\xbb\xbf",
    b"\x00",
    b'"id":"b",',
    b"\\",
    b'"',
]


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A sound document with a few of its bytes replaced by something nasty."""
    document = draw(st.sampled_from(_DOCUMENTS))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(document)))
        end = min(len(document), start + draw(st.integers(0, 6)))
        nasty = draw(st.one_of(st.sampled_from(_HOSTILE), st.binary(max_size=3)))
        document = document[:start] + nasty + document[end:]
    return document


_json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
        st.sampled_from(["interactive", "user", "cancel", "generate", "embed", "eos", "token"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(_FIELDS), st.text(max_size=5)), inner, max_size=4
        ),
    ),
    max_leaves=12,
)
# Objects that have the right names and mostly the wrong values.
_plausible = st.dictionaries(
    st.sampled_from([*_FIELDS, "type", "event"]), _json_values, max_size=6
).map(lambda document: json.dumps(document).encode())

# Hypothesis makes an input smaller by moving towards the alternatives that stand first.
documents = st.one_of(
    _json_values.map(json.dumps).map(str.encode),
    _plausible,
    st.sampled_from(_DOCUMENTS),
    _mutated(),
)
streams = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from([b"GET / HTTP/1.1\r\n", bytes(4), b"\xff" * 4, b"\x00\x00\x00\x05"]),
        documents.filter(bool).map(frame),
    ),
    max_size=6,
).map(b"".join)

TARGETS = {
    "framing": Target(framing, streams),
    "codec": Target(codec, documents),
    "http": Target(http, requests),
    "schema": Target(schema, schemas),
    "body": Target(body, bodies),
    "step": Target(step, shapes),
}
"""Every target by the name of its folder in the corpus."""
