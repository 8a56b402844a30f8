"""The instruments themselves."""

import pytest

from uma_protocol import (
    PAUSED,
    Code,
    Connection,
    ConnectionClosed,
    Eos,
    Generate,
    LocalProtocolError,
    RemoteProtocolError,
    Role,
    Timings,
    Token,
    Usage,
    encode_request,
    frame,
)
from uma_protocol.testing import (
    ConnectionPair,
    all_cuts,
    bytewise,
    cuts,
    drain,
    feed,
    whole,
)

ASK = Generate("a", prompt="p")


def test_every_way_to_feed_gives_the_same_bytes():
    """Nothing is lost, doubled or empty."""
    data = b"abcdef"
    for pieces in [whole(data), bytewise(data), cuts(data, 4, 1), cuts(data, 0, 6, 3, 3)]:
        assert b"".join(pieces) == data
        assert all(pieces)


def test_all_cuts_are_all_of_them():
    """Two cuts of five bytes: four gaps, so six ways."""
    assert len({tuple(pieces) for pieces in all_cuts(b"abcde", 2)}) == 6


def test_a_pair_returns_what_the_peer_saw():
    """The bytes go through both ends, and the pause after a terminal event is visible."""
    pair = ConnectionPair()
    assert pair.send(Role.CLIENT, ASK) == [ASK]
    eos = Eos("a", "stop", Usage(1, 0), Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0), 1)
    assert pair.send(Role.SERVER, eos) == [eos, PAUSED]


def test_a_pair_raises_what_the_sender_may_not_say():
    """A pair does not soften the rules."""
    with pytest.raises(LocalProtocolError):
        ConnectionPair().send(Role.SERVER, Token("a", "x", 1))


def test_a_pair_tells_when_the_peer_saw_something_else():
    """Bytes that were under way before are not silently mixed into the answer."""
    pair = ConnectionPair()
    pair.server.receive_data(frame(b'{"type":"sessions"}'))
    with pytest.raises(AssertionError, match="its peer saw"):
        pair.send(Role.CLIENT, ASK)


def test_a_pair_can_be_closed():
    """Each end sees the other's end of file."""
    pair = ConnectionPair()
    assert pair.close(Role.CLIENT) == [ConnectionClosed()]
    assert pair.close(Role.SERVER) == [ConnectionClosed()]


def test_feeding_collects_refusals_among_events():
    """A refusal that is not fatal is one more thing that came out."""
    seen = feed(
        Connection(Role.SERVER), [frame(encode_request(ASK)), frame(b"{"), frame(b"{"), b""]
    )
    assert [getattr(item, "code", item) for item in seen] == [
        ASK,
        Code.E_PROTO_001,
        Code.E_PROTO_001,
        ConnectionClosed(),
    ]


def test_feeding_ends_at_a_fatal_refusal():
    """Nothing comes after it."""
    (only,) = feed(Connection(Role.SERVER), [frame(b"{"), frame(encode_request(ASK))])
    assert isinstance(only, RemoteProtocolError)


def test_draining_stops_at_the_pause():
    """What is behind it belongs to the next cycle."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, ASK)
    pair.server.send(
        Eos("a", "stop", Usage(1, 0), Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0), 1)
    )
    assert drain(pair.server) == [PAUSED]
