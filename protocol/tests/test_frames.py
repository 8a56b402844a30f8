"""Frames: any split, every bound."""

import sys

import pytest

from uma_protocol import Code, FrameReader, RemoteProtocolError, frame
from uma_protocol.testing import all_cuts, bytewise, whole

PAYLOADS = [b"{}", b"x", b"seven b", b"[1,2]"]
STREAM = b"".join(map(frame, PAYLOADS))
MAX = 1 << 20


def _read(pieces, limit=MAX):
    reader = FrameReader(limit)
    payloads = []
    for piece in pieces:
        reader.feed(piece)
        while (payload := reader.next_payload()) is not None:
            payloads.append(payload)
    return payloads


def _header(length):
    return length.to_bytes(4, "little")


def test_a_frame_is_its_length_and_its_payload():
    """The length is four bytes, lowest first, and does not count itself."""
    assert frame(b"abc") == b"\x03\x00\x00\x00abc"


def test_an_empty_payload_is_not_a_frame():
    """We do not write what we would refuse to read."""
    with pytest.raises(ValueError, match="not 0"):
        frame(b"")


@pytest.mark.parametrize("feed", [whole, bytewise])
def test_frames_come_out_however_they_arrive(feed):
    """Many frames in one read and one byte per read give the same payloads."""
    assert _read(feed(STREAM)) == PAYLOADS


@pytest.mark.parametrize("number", [1, 2])
def test_frames_survive_every_cut(number):
    """Every way to cut a stream of four frames in two or three gives the same payloads."""
    for pieces in all_cuts(STREAM, number):
        assert _read(pieces) == PAYLOADS


def test_nothing_comes_out_before_the_last_byte():
    """A frame is handed out whole, by its last byte and not before."""
    *before, last = bytewise(frame(b"abc"))
    reader = FrameReader()
    for piece in before:
        reader.feed(piece)
        assert reader.next_payload() is None
    reader.feed(last)
    assert reader.next_payload() == b"abc"


@pytest.mark.parametrize("length", [0, MAX + 1, 2**31, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_by_its_header_alone(length):
    """Four bytes suffice to refuse a frame, and nothing is kept of it."""
    reader = FrameReader(MAX)
    reader.feed(_header(length))
    with pytest.raises(RemoteProtocolError, match=str(length)) as caught:
        reader.next_payload()
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_002, True)
    assert reader.buffered == 0


@pytest.mark.parametrize("length", [MAX - 1, MAX])
def test_a_length_up_to_the_limit_is_accepted(length):
    """The limit itself is allowed."""
    assert _read([frame(bytes(length))]) == [bytes(length)]


def test_no_memory_is_taken_for_a_length_that_was_only_announced():
    """A header for a large frame costs what was received, not what was promised."""
    reader = FrameReader(2**32 - 1)
    reader.feed(_header(2**31) + b"x" * 10)
    assert reader.next_payload() is None
    assert sys.getsizeof(reader._buffer) < 1000


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n", b"POST /", b'{"id":"a"}'])
def test_text_in_place_of_a_header_is_recognised(text):
    """Whoever speaks HTTP or bare JSON here is told what the socket expects."""
    with pytest.raises(RemoteProtocolError, match="length-prefixed JSON"):
        _read([text])


def test_a_big_endian_length_is_recognised():
    """The most common mistake of a first client gets a hint of its own."""
    with pytest.raises(RemoteProtocolError, match="lowest byte first"):
        _read([(300).to_bytes(4, "big")])


@pytest.mark.parametrize("split", range(len(frame(b"abc")) + 1))
def test_mid_frame_tells_a_begun_frame_from_none(split):
    """Before the first byte and after the last nothing is under way; between them a frame is."""
    reader = FrameReader()
    reader.feed(frame(b"abc")[:split])
    begun = 0 < split < 7
    assert reader.mid_frame is begun
    reader.next_payload()
    assert reader.mid_frame is begun


def test_a_frame_that_is_all_here_is_not_under_way():
    """The deadline of a frame ends with its last byte, before anybody asks for it."""
    reader = FrameReader()
    reader.feed(frame(b"abc")[:5])
    reader.next_payload()
    reader.feed(frame(b"abc")[5:])
    assert not reader.mid_frame


def test_feeding_byte_by_byte_is_not_quadratic():
    """The cost of a byte does not depend on how many came before: the buffer is never rescanned."""
    reader = FrameReader()
    reader.feed(_header(200_000))
    for _ in range(200_000 - 1):
        reader.feed(b"x")
        reader.next_payload()
    assert reader.buffered == 200_000 - 1
    reader.feed(b"x")
    assert reader.next_payload() == b"x" * 200_000


@pytest.mark.parametrize("limit", [0, -1, 2**32])
def test_a_limit_that_makes_no_sense_is_refused(limit):
    """A reader that could read nothing, or more than a header can say, is a mistake."""
    with pytest.raises(ValueError, match="max_frame_bytes"):
        FrameReader(limit)
