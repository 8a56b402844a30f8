"""Several answers to one request: whose token it is, which are over, and when the request is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_protocol import (
    Cancel,
    Code,
    Connection,
    End,
    Eos,
    Generate,
    LocalProtocolError,
    RemoteProtocolError,
    Role,
    ServerState,
    Timings,
    Token,
    Usage,
    decode_event,
    encode_event,
    encode_request,
    frame,
)
from uma_protocol.testing import ConnectionPair, cuts, drain, feed, whole

TIMES = Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0)
EOS = Eos("a", "stop", Usage(1, 4), TIMES, 1)


def _token(choice):
    return Token("a", "x", 1, choice=choice)


def _end(choice):
    return End("a", "stop", 2, 1 + choice, choice=choice)


def _pair(n):
    pair = ConnectionPair()
    pair.send(Role.CLIENT, Generate("a", n=n, prompt="p"))
    pair.server.prompt_done()
    return pair


def test_the_request_is_over_when_each_choice_is():
    """Both ends know which are open; the tokens of choices may come in any order."""
    pair = _pair(3)
    pair.send(Role.SERVER, _token(2), _token(0), _end(0), _token(1), _token(2), _end(2))
    assert pair.client._running.open == pair.server._running.open == {1}
    pair.send(Role.SERVER, _end(1), EOS)
    assert pair.client.request_id is pair.server.request_id is None
    pair.next_cycle()
    pair.send(Role.CLIENT, Generate("a", prompt="p"))
    assert pair.client._running.open == pair.server._running.open == {0}


def test_a_choice_may_end_before_the_prompt_is_done():
    """It failed or was cancelled; no token of another may come for that."""
    pair = ConnectionPair()
    pair.send(Role.CLIENT, Generate("a", n=2, prompt="p"))
    pair.send(Role.SERVER, _end(0))
    assert pair.server.state is ServerState.PREFILL
    with pytest.raises(LocalProtocolError):
        pair.server.send(_token(1))


def test_a_cancel_names_the_request_and_not_a_choice():
    """It is heard as long as the request runs, also when most choices are over."""
    pair = _pair(2)
    pair.send(Role.SERVER, _end(0))
    pair.send(Role.CLIENT, Cancel("a"))
    assert pair.server._running.open == {1}
    pair.send(Role.SERVER, _end(1), EOS)
    assert pair.server.request_id is pair.client.request_id is None


def test_with_one_answer_nothing_of_choices_is_on_the_wire():
    """A client that knows no choices sees no difference."""
    assert b"choice" not in encode_event(_token(0))
    assert b'"n"' not in encode_request(Generate("a", n=1, prompt="p"))
    assert decode_event(b'{"id":"a","event":"token","text":"x","token_id":1}') == _token(0)
    pair = _pair(1)
    pair.send(Role.SERVER, _token(0), EOS)


@pytest.mark.parametrize(
    ("n", "before", "wrong", "words"),
    [
        (1, [], _token(1), "nobody asked for"),
        (2, [], _token(2), "nobody asked for"),
        (2, [], _token(-1), "nobody asked for"),
        (2, [_end(1)], _token(1), "is over"),
        (2, [_end(1)], _end(1), "is over"),
        (1, [], _end(0), "the only one"),
        (2, [_end(1)], EOS, "eos before the end of each choice"),
    ],
)
def test_what_is_of_no_open_choice_is_refused(n, before, wrong, words):
    """A daemon cannot send it, and a client does not believe it."""
    pair = _pair(n)
    pair.send(Role.SERVER, *before)
    with pytest.raises(LocalProtocolError, match=words) as ours:
        pair.server.send(wrong)
    assert ours.value.fatal
    pair.client.receive_data(frame(encode_event(wrong)))
    with pytest.raises(RemoteProtocolError, match=words) as theirs:
        pair.client.next_event()
    assert theirs.value.code is Code.E_PROTO_005
    assert theirs.value.fatal


events = st.one_of(
    st.integers(-1, 4).map(_token),
    st.integers(-1, 4).map(_end),
    st.just(EOS),
)


def _allowed(n, sequence):
    """How many events of a sequence may be sent: the rule in a second form."""
    over = []
    for place, event in enumerate(sequence):
        if isinstance(event, Eos):
            done = n == 1 or sorted(over) == list(range(n))
            return place + 1 if done else place
        sound = 0 <= event.choice < n and event.choice not in over
        if not sound or (isinstance(event, End) and n == 1):
            return place
        if isinstance(event, End):
            over.append(event.choice)
    return len(sequence)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 4), st.lists(events, max_size=14))
def test_both_ends_take_exactly_what_the_choices_allow(n, sequence):
    """Any events in any order: what may be sent is what is believed, up to the first fault."""
    pair = _pair(n)
    sent = 0
    for event in sequence:
        try:
            pair.server.send(event)
        except LocalProtocolError:
            break
        sent += 1
        if isinstance(event, Eos):
            break
    assert sent == _allowed(n, sequence)
    believed = []
    for event in sequence:
        pair.client.receive_data(frame(encode_event(event)))
        try:
            believed += [seen for seen in drain(pair.client) if seen == event]
        except RemoteProtocolError:
            break
        if isinstance(event, Eos):
            break
    assert believed == sequence[:sent]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.data())
def test_any_order_of_choices_survives_any_cut(n, data):
    """Tokens in between each other, ends where they like: the same however the bytes arrive."""
    said = [event for choice in range(n) for event in [_token(choice)] * 2]
    said = data.draw(st.permutations(said))
    if n > 1:
        for choice in data.draw(st.permutations(range(n))):
            last = max(i for i, event in enumerate(said) if event.choice == choice)
            said.insert(data.draw(st.integers(last + 1, len(said))), _end(choice))
    said.append(EOS)
    pair = _pair(n)
    stream = b"".join(map(pair.server.send, said))
    positions = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    for pieces in (whole(stream), cuts(stream, *positions)):
        client = Connection(Role.CLIENT)
        client.send(Generate("a", n=n, prompt="p"))
        assert feed(client, pieces)[: len(said)] == said
