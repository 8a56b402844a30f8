"""Requests for vectors and scores: what answers them, in which states, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_protocol import (
    Cancel,
    ClientState,
    Code,
    Connection,
    Embed,
    End,
    Eos,
    Generate,
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
    decode_request,
    encode_event,
    encode_request,
    frame,
)
from uma_protocol.requests import MAX_TEXTS
from uma_protocol.testing import ConnectionPair, cuts, drain, feed

TIMES = Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0)
EOS = Eos("a", "stop", Usage(1, 0), TIMES, 1)
EMBED = Embed(id="a", input=("p", "q"))
RERANK = Rerank(id="a", query="q", documents=("d",))
VECTORS = Vectors("a", 0, (bytes(8), bytes(8)))
SCORES = Scores("a", (Score(0, 0.5),))
ANSWERS = {
    "generate": (Generate("a", prompt="p"), {Token}),
    "embed": (EMBED, {Vectors}),
    "rerank": (RERANK, {Scores}),
}


@pytest.mark.parametrize(("request_", "result"), [(EMBED, VECTORS), (RERANK, SCORES)])
def test_a_request_ends_with_eos_behind_its_results(request_, result):
    """Results may come in several events; then the connection takes the next request."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, request_)
    pair.send(Role.SERVER, result, result)
    assert (pair.server.state, pair.client.state) == (ServerState.PREFILL, ClientState.AWAIT)
    assert pair.server.states == pair.client.states
    pair.send(Role.SERVER, EOS)
    pair.next_cycle()
    pair.send(Role.CLIENT, request_)
    assert pair.server.request_id == "a"


def test_a_request_for_vectors_runs_alone_and_can_be_cancelled():
    """As a request for text: a second one is busy, and a cancel names it."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, EMBED)
    pair.server.receive_data(frame(encode_request(RERANK)))
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.next_event()
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_004, False)
    pair.send(Role.CLIENT, Cancel("a"))
    pair.send(Role.SERVER, EOS)


@pytest.mark.parametrize("kind", sorted(ANSWERS))
@pytest.mark.parametrize(
    "event",
    [VECTORS, SCORES, Token("a", "x", 1), End("a", "stop", 1, 1), Vectors("b", 0, ())],
    ids=["vectors", "scores", "token", "end", "another request's"],
)
def test_what_the_request_did_not_ask_for_is_refused_by_both_ends(kind, event):
    """A daemon cannot send it, and a client does not believe it."""
    request, answers = ANSWERS[kind]
    if type(event) in answers and event.id == "a":
        return
    pair = ConnectionPair()
    pair.send(Role.CLIENT, request)
    with pytest.raises(LocalProtocolError) as ours:
        pair.server.send(event)
    assert ours.value.fatal
    pair.client.receive_data(frame(encode_event(event)))
    with pytest.raises(RemoteProtocolError) as theirs:
        pair.client.next_event()
    assert theirs.value.fatal


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"type": "embed", "id": "a"}, "input"),
        ({"type": "embed", "id": "a", "input": []}, "input"),
        ({"type": "embed", "id": "a", "input": ["p", ""]}, "input[1]"),
        ({"type": "embed", "id": "a", "input": "p"}, "input"),
        ({"type": "embed", "id": "a", "input": ["p"] * (MAX_TEXTS + 1)}, "input"),
        ({"type": "embed", "id": "a", "input": ["p"], "dimensions": 0}, "dimensions"),
        ({"type": "embed", "id": "a", "input": ["p"], "prompt": "p"}, "prompt"),
        ({"type": "rerank", "id": "a", "query": "q"}, "documents"),
        ({"type": "rerank", "id": "a", "query": "", "documents": ["d"]}, "query"),
        ({"type": "rerank", "id": "a", "query": "q", "documents": [1]}, "documents[0]"),
        ({"type": "rerank", "id": "a", "query": "q", "documents": ["d"], "top_n": 0}, "top_n"),
    ],
)
def test_a_bad_field_is_named(document, field):
    """With the position in the list, from 0."""
    import json

    with pytest.raises(RemoteProtocolError) as caught:
        decode_request(json.dumps(document).encode())
    assert (caught.value.code, caught.value.field) == (Code.E_PROTO_003, field)
    assert caught.value.request_id == "a"


def test_as_many_texts_as_a_list_may_have_are_read():
    """The bound of values in a document is above that of the list."""
    request = Embed(id="a", model="m", dimensions=1, truncate=True, input=("p",) * MAX_TEXTS)
    assert decode_request(encode_request(request)) == request


events = st.sampled_from([VECTORS, SCORES, Token("a", "x", 1), Vectors("b", 0, ()), EOS])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ANSWERS)), st.lists(events, max_size=8), st.data())
def test_both_ends_take_exactly_what_the_request_asks_for(kind, sequence, data):
    """Any events in any order, cut anywhere: what may be sent is what is believed, up to the first fault."""
    request, answers = ANSWERS[kind]
    sound = 0
    for event in sequence:
        if event.id != "a" or not (event is EOS or type(event) in answers):
            break
        sound += 1
        if event is EOS:
            break
    pair = ConnectionPair()
    pair.send(Role.CLIENT, request)
    if kind == "generate":
        pair.server.prompt_done()
    for place, event in enumerate(sequence[: sound + 1]):
        if place < sound:
            pair.server.send(event)
        else:
            with pytest.raises(LocalProtocolError):
                pair.server.send(event)
    stream = b"".join(frame(encode_event(event)) for event in sequence)
    positions = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    client = Connection(Role.CLIENT)
    client.send(request)
    seen = feed(client, cuts(stream, *positions))
    assert seen[:sound] == sequence[:sound]
    assert not [item for item in seen[sound:] if item in sequence]
    assert drain(pair.server) == [] or EOS in sequence[:sound]
