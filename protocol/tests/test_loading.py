"""A request that is told how far the loading of its model is, and events of kinds that a client does not know."""

import pytest

from uma_protocol import (
    ClientState,
    Connection,
    Embed,
    Eos,
    Generate,
    Loading,
    LocalProtocolError,
    RemoteProtocolError,
    Rerank,
    Role,
    Score,
    Scores,
    ServerState,
    Timings,
    Token,
    Usage,
    Vectors,
    decode_event,
    encode_event,
    frame,
)
from uma_protocol.testing import ConnectionPair, drain, feed, whole

TOLD = Loading("a", "code", "model code is loading, 40%", 0.4)
EOS = Eos("a", "stop", Usage(1, 0), Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0), 1)


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (Embed(id="a", input=("p",), progress=True), Vectors("a", 0, (bytes(4),))),
        (Rerank(id="a", query="q", documents=("d",), progress=True), Scores("a", (Score(0, 1.0),))),
    ],
)
def test_who_asked_for_vectors_or_scores_is_told(request_, result):
    """As who asks for text."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, request_)
    pair.send(Role.SERVER, TOLD, result, EOS)


def test_who_asked_is_told_before_all_else():
    """As often as something has changed; then the answer comes as ever, or the end."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, Generate("a", prompt="p", progress=True))
    pair.send(Role.SERVER, TOLD, Loading("a", "code", "model code is loading, 80%", 0.8))
    assert (pair.server.state, pair.client.state) == (ServerState.PREFILL, ClientState.AWAIT)
    assert pair.server.states == pair.client.states
    pair.server.prompt_done()
    pair.send(Role.SERVER, Token("a", "x", 1), EOS)


@pytest.mark.parametrize("begins", [False, True])
def test_who_did_not_ask_or_has_a_token_is_not_told(*, begins):
    """A daemon cannot send it, and a client does not believe it."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, Generate("a", prompt="p", progress=begins))
    if begins:
        pair.server.prompt_done()
        pair.send(Role.SERVER, Token("a", "x", 1))
    with pytest.raises(LocalProtocolError) as ours:
        pair.server.send(TOLD)
    assert ours.value.fatal
    pair.client.receive_data(frame(encode_event(TOLD)))
    with pytest.raises(RemoteProtocolError) as theirs:
        pair.client.next_event()
    assert theirs.value.fatal


def test_events_of_kinds_that_are_not_known_are_skipped():
    """A newer daemon may send them: in any state, and what is behind them is read."""
    news = frame(b'{"id":"a","event":"weather","text":"sun","deep":{"er":[1]}}')
    client = Connection(Role.CLIENT)
    assert feed(client, whole(news * 3)) == []
    client.send(Generate("a", prompt="p"))
    assert feed(client, whole(news + frame(encode_event(EOS)) + news))[0] == EOS
    client.start_next_cycle()
    assert drain(client) == []


@pytest.mark.parametrize(
    "document",
    [b'{"event":"token","id":"a"}', b'{"event":7}', b'{"id":"a"}', b"[1]", b'{"event":"eos"}'],
)
def test_what_is_no_event_is_refused(document):
    """And so is a known one with wrong fields."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_event(document)
    assert caught.value.code == "E_PROTO_003"
