"""Compressed bodies: what is decoded, what is refused, and what it may cost."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
import trio
from http_kit import Answer, http_house
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from uma_trio.http.encodings import MOST_MEMBERS, BodyDecoder
from uma_trio.http.errors import Fault
from uma_trio.http.memory import FREE

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIB = 1 << 20
MOST = 8 * MIB
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "temperature": 0,
}
BODY = json.dumps(ASKED).encode()


def raw_deflate(data: bytes) -> bytes:
    """Compress without zlib's header, as some clients take deflate for."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def with_name(data: bytes, name: bytes = b"a.json") -> bytes:
    """Compress as gzip(1) does, with the name of a file before the data."""
    found = gzip.compress(data)
    return found[:3] + b"\x08" + found[4:10] + name + b"\0" + found[10:]


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "gzip of a file": ("gzip", with_name),
    "gzip in two members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "zstd in two frames": ("zstd", lambda data: zstd.compress(data[:9]) + zstd.compress(data[9:])),
    "zstd behind a frame to skip": (
        "zstd",
        lambda data: b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstd.compress(data),
    ),
    "two": ("deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
    "three": (
        "gzip,zstd ,  deflate",
        lambda data: zlib.compress(zstd.compress(gzip.compress(data))),
    ),
    "identity": ("identity", lambda data: data),
    "identity and gzip": ("identity, ,GZIP", gzip.compress),
    "none": ("", lambda data: data),
}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


def decoded(data: bytes, *codings: str, most: int = MOST) -> bytes:
    """Return what a body decodes to. Raises Fault."""
    decoder = BodyDecoder(data, codings, most)
    while decoder.body is None:
        decoder.advance()
    return decoder.body


@pytest.mark.parametrize("name", CODINGS)
async def test_an_encoded_body_is_read(autojump_clock: MockClock, name: str) -> None:
    coding, encode = CODINGS[name]
    async with http_house() as daemon:
        plain = await daemon.ask("POST", CHAT, BODY)
        answer = await daemon.ask("POST", CHAT, encode(BODY), Content_Encoding=coding)
        assert answer.status == 200, answer.body
        assert answer.json["choices"] == plain.json["choices"]


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/responses", "/api/chat", "/completion", "/generate", "/tokenize"]
)
async def test_every_api_reads_encoded_bodies(autojump_clock: MockClock, path: str) -> None:
    named = {"/v1/responses": "input", "/completion": "prompt", "/generate": "prompt"}
    asked = ASKED if path in ("/v1/messages", "/api/chat") else {named.get(path, "content"): "a"}
    body = zstd.compress(json.dumps(asked).encode())
    async with http_house() as daemon:
        assert (await daemon.ask("POST", path, body, Content_Encoding="zstd")).status == 200


async def test_an_encoded_body_may_come_in_chunks(autojump_clock: MockClock) -> None:
    """One byte in each, behind a 100 that was asked for."""
    encoded = gzip.compress(BODY)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in encoded) + b"0\r\n\r\n"
    async with http_house() as daemon:
        client = daemon.connect(by_socket=True)
        await client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        assert (await client.transport.receive_some()).startswith(b"HTTP/1.1 100 ")
        await client.send_bytes(chunks)
        assert b"HTTP/1.1 200 " in await client.transport.receive_some()


@pytest.mark.parametrize(
    ("coding", "named"),
    [
        ("br", "br"),
        ("foo", "foo"),
        ("gzip, br", "br"),
        ("compress", "compress"),
        ("GZIPPED", "gzipped"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
async def test_another_coding_is_refused_by_name(
    autojump_clock: MockClock, coding: str, named: str, path: str
) -> None:
    """Also if the body is plain: it may mean something else than it seems to."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", path, BODY, Content_Encoding=coding)
        assert answer.status == 415
        assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
        assert f"Content-Encoding {named} is unknown" in answer.body.decode()
        assert "gzip, deflate, zstd" in answer.body.decode()


async def test_another_coding_is_refused_before_its_body_is_sent(autojump_clock: MockClock) -> None:
    async with http_house() as daemon:
        client = daemon.connect()
        await client.send_bytes(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\n"
        )
        assert (await client.transport.receive_some()).startswith(b"HTTP/1.1 415 ")


async def test_more_than_three_codings_are_refused(autojump_clock: MockClock) -> None:
    async with http_house() as daemon:
        answer = await daemon.ask("POST", CHAT, BODY, Content_Encoding="gzip, gzip, gzip, gzip")
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: data + b"xyz",
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    ],
    ids=["cut", "one byte", "half", "a byte more", "more", "another sum"],
)
async def test_a_damaged_body_is_told(
    autojump_clock: MockClock, name: str, damage: Callable[[bytes], bytes]
) -> None:
    """And the next request on the connection is read."""
    options = {"options": {zstd.CompressionParameter.checksum_flag: 1}} if name == "zstd" else {}
    data = damage(COMPRESSORS[name](BODY, **options))
    async with http_house() as daemon:
        client = daemon.connect()
        answer = await client.ask("POST", CHAT, data, {"Content-Encoding": name})
        assert (answer.status, answer.error["code"]) == (400, "invalid_encoding")
        assert f"the body is not {name}" in answer.error["message"]
        assert (await client.ask("POST", CHAT, BODY)).status == 200


async def test_a_plain_body_is_none_that_is_encoded(autojump_clock: MockClock) -> None:
    """What has not the number of zstd may be an older format of it, which is not read."""
    async with http_house() as daemon:
        for name, status in (("gzip", 400), ("deflate", 400), ("zstd", 415)):
            answer = await daemon.ask("POST", CHAT, BODY, Content_Encoding=name)
            assert answer.status == status
            assert name in answer.error["message"]


def bombs() -> dict[str, tuple[str, bytes]]:
    """Return bodies of a few kilobytes, and what encodes them."""
    spaces = b" " * (64 * MIB)
    found = {name: (name, encode(spaces)) for name, encode in COMPRESSORS.items()}
    found["gzip twice"] = ("gzip, gzip", gzip.compress(gzip.compress(spaces)))
    found["zstd in gzip"] = ("zstd, gzip", gzip.compress(zstd.compress(spaces)))
    # What comes out is nothing: 3 million members of gzip.
    empty = gzip.compress(gzip.compress(b"") * (64 * MIB // 20))
    found["nothing, many times"] = ("gzip, gzip", empty)
    # What comes out is nothing: behind the name of a file of 9 MiB.
    found["a long name"] = ("gzip, gzip", gzip.compress(with_name(b"", b"a" * 9 * MIB)))
    return found


BOMBS = bombs()


@pytest.mark.parametrize("name", BOMBS)
async def test_a_body_that_decodes_to_too_much_is_refused(
    autojump_clock: MockClock, name: str
) -> None:
    """As soon as that is seen: no more than the longest body is decoded by any coding."""
    coding, body = BOMBS[name]
    assert len(body) < 300_000
    calls: list[Any] = []

    async def run_blocking(function: Callable[[], Any], /) -> Any:
        calls.append(function)
        await trio.lowlevel.checkpoint()
        return function()

    async with http_house(run_blocking=run_blocking) as daemon:
        answer = await daemon.ask("POST", CHAT, body, Content_Encoding=coding)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert len(calls) <= MOST // (256 * 1024) + 1


async def test_the_memory_of_a_decoded_body_counts(autojump_clock: MockClock) -> None:
    """With the encoded one, while it is decoded; nothing is held when it is answered."""
    held: list[int] = []
    most = 64 * 1024
    body = gzip.compress(json.dumps({**ASKED, "user": "x" * 4 * MIB}).encode())

    async def run_blocking(function: Callable[[], Any], /) -> Any:
        await trio.lowlevel.checkpoint()
        found = function()
        held.append(daemon.bodies.counted)
        return found

    async with http_house(run_blocking=run_blocking) as daemon:
        await daemon.ask("POST", CHAT, body, Content_Encoding="gzip")
        assert max(held) > 4 * MIB - most
        assert daemon.bodies.counted == 0


async def test_only_the_decoded_body_counts_once_it_is_decoded(autojump_clock: MockClock) -> None:
    plain = json.dumps({**ASKED, "user": Random(1).randbytes(MIB).hex()}).encode()
    held: list[int] = []

    async def run_blocking(function: Callable[[], Any], /) -> Any:
        await trio.lowlevel.checkpoint()
        if not isinstance(getattr(function, "__self__", None), BodyDecoder):
            held.append(daemon.bodies.counted)
        return function()

    async with http_house(run_blocking=run_blocking) as daemon:
        await daemon.ask("POST", CHAT, gzip.compress(plain), Content_Encoding="gzip")
        assert held[0] == len(plain) - FREE


async def test_decoded_bodies_of_many_clients_are_bounded_together(
    autojump_clock: MockClock,
) -> None:
    """Five of 7 MiB from 7 kB each: what does not fit is told to come again."""
    body = gzip.compress(json.dumps({**ASKED, "user": "x" * 1024}).encode() + b" " * (7 * MIB))
    answers: list[Answer] = []
    counted: list[int] = []

    async def run_blocking(function: Callable[[], Any], /) -> Any:
        await trio.sleep(0.01)  # so that all are decoded at once
        counted.append(daemon.bodies.counted)
        return function()

    async def ask() -> None:
        answers.append(await daemon.ask("POST", CHAT, body, Content_Encoding="gzip"))

    async with http_house(run_blocking=run_blocking) as daemon:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert {answer.status for answer in answers} == {200, 503}
        assert max(counted) <= 24 * MIB


async def test_a_large_body_is_decoded_beside_trios_thread(autojump_clock: MockClock) -> None:
    """In steps; the first one of a short body is made at once."""
    steps: list[Any] = []

    def run_blocking(function: Callable[[], Any], /) -> Awaitable[Any]:
        async def run() -> Any:
            await trio.lowlevel.checkpoint()
            if isinstance(getattr(function, "__self__", None), BodyDecoder):
                steps.append(function)
            return function()

        return run()

    noise = Random(1).randbytes(MIB).hex()
    async with http_house(run_blocking=run_blocking) as daemon:
        await daemon.ask("POST", CHAT, gzip.compress(BODY), Content_Encoding="gzip")
        assert not steps
        body = gzip.compress(json.dumps({**ASKED, "user": noise}).encode())
        await daemon.ask("POST", CHAT, body, Content_Encoding="gzip")
        assert len(steps) >= 8


def test_a_window_beyond_that_of_the_web_is_refused() -> None:
    """RFC 9659: a decoder needs 8 MiB at most."""
    options = {zstd.CompressionParameter.window_log: 24}
    with pytest.raises(Fault, match="too much memory"):
        decoded(zstd.compress(b"a" * (20 * MIB), options=options), "zstd", most=32 * MIB)


def test_a_coding_has_so_many_members_at_most() -> None:
    for name in ("gzip", "zstd"):
        member = COMPRESSORS[name](b"a")
        assert decoded(member * MOST_MEMBERS, name) == b"a" * MOST_MEMBERS
        with pytest.raises(Fault, match=f"more than {MOST_MEMBERS} members of {name}"):
            decoded(member * (MOST_MEMBERS + 1), name)


@given(
    st.binary(max_size=2000).map(lambda data: data * 50),
    st.lists(st.sampled_from(["gzip", "deflate", "zstd"]), min_size=1, max_size=3),
)
def test_what_was_encoded_is_decoded(data: bytes, codings: list[str]) -> None:
    encoded = data
    for name in codings:
        encoded = COMPRESSORS[name](encoded)
    assert decoded(encoded, *codings) == data


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "zstd"]))
def test_any_bytes_are_decoded_or_refused(data: bytes, coding: str) -> None:
    starts = {"gzip": b"\x1f\x8b\x08\0", "deflate": b"\x78\x9c", "zstd": b"\x28\xb5\x2f\xfd"}
    statuses = set()
    for body in (data, starts[coding] + data):
        try:
            decoded(body, coding, most=MIB)
        except Fault as fault:
            statuses.add(fault.status)
    assert statuses <= {400, 413, 415}
