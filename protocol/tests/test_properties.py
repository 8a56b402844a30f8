"""What holds for every input, tried on many."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from uma_protocol import (
    Code,
    Connection,
    ConnectionClosed,
    Embed,
    End,
    Eos,
    Error,
    Generate,
    Hello,
    Input,
    ListSessions,
    LocalProtocolError,
    Ok,
    Pause,
    Prefix,
    RemoteProtocolError,
    Rerank,
    Role,
    Score,
    Scores,
    Timings,
    Token,
    Usage,
    Vectors,
    frame,
)
from uma_protocol.conformance.documents import EVENTS, REQUESTS
from uma_protocol.states import TABLES, StateMachine
from uma_protocol.testing import cuts, feed, whole

DOCUMENTS = [*REQUESTS, *EVENTS]

# Mostly sound frames, some of them of the wrong kind, with some garbage in between: pure noise
# would never get past the first header.
streams = st.lists(
    st.one_of(
        st.sampled_from(DOCUMENTS).map(frame),
        st.binary(min_size=1, max_size=40).map(frame),
        st.binary(max_size=8),
    ),
    max_size=8,
).map(b"".join)


def _outcome(role, pieces):
    """What a connection makes of bytes, in a form that can be compared."""
    return [_comparable(item) for item in feed(Connection(role), [*pieces, b""])]


def _comparable(item):
    return (item.code, item.message, item.fatal) if isinstance(item, RemoteProtocolError) else item


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(Role), streams)
def test_any_bytes_are_understood_or_refused(role, data):
    """No other error exists, and every stream ends: closed, paused or fatally refused."""
    *_, last = _outcome(role, whole(data))
    assert last in (ConnectionClosed(), Pause.PAUSED) or last[2]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(Role), streams, st.data())
def test_whole_and_split_anywhere_are_the_same(role, data, draw):
    """Events, refusals and their order do not depend on how the bytes arrive."""
    positions = draw.draw(st.lists(st.integers(0, len(data)), max_size=10))
    assert _outcome(role, cuts(data, *positions)) == _outcome(role, whole(data))


RIGHT = "the token"
TIMES = Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0)
CALLS = ["prompt_done", "flushed", "start_next_cycle", "send_failed"]
EVENTS_SENT = [
    Hello("the token"),
    Hello("another"),
    Generate("a", prompt="p"),
    Generate("a", n=2, prompt="p"),
    Embed(id="a", input=("p",)),
    Rerank(id="a", query="q", documents=("d",)),
    ListSessions(),
    Prefix(action="clear"),
    Token("a", "x", 1),
    Token("b", "x", 1),
    Token("a", "x", 1, choice=1),
    End("a", "stop", 1, 1),
    End("a", "stop", 1, 2, choice=1),
    Vectors("a", 0, (bytes(4),)),
    Vectors("b", 0, (bytes(4),)),
    Scores("a", (Score(0, 0.5),)),
    Eos("a", "stop", Usage(1, 1), TIMES, 1),
    Error("E_PROTO_005", "m", False, False),
    Error("E_PROTO_002", "m", True, False),
    Ok(),
]
actions = st.one_of(
    st.sampled_from(CALLS),
    st.sampled_from(EVENTS_SENT),
    st.sampled_from(DOCUMENTS),
    st.just(b""),
)


def _act(connection, action):
    if isinstance(action, str):
        getattr(connection, action)()
    elif isinstance(action, bytes):
        connection.receive_data(frame(action) if action else b"")
        connection.next_event()
    else:
        connection.send(action)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(Role), st.sampled_from([None, RIGHT]), st.lists(actions, max_size=12))
def test_any_sequence_of_calls_moves_along_the_table_or_ends_in_error(role, token, sequence):
    """Every state x everything that can be done: a legal state, or the one error and ERROR."""
    connection = Connection(role, token=token)
    legal = {state for state, _ in TABLES[role]}
    for action in sequence:
        before = connection.states
        try:
            _act(connection, action)
        except (LocalProtocolError, RemoteProtocolError) as exc:
            if exc.fatal:
                assert connection.state.name == "ERROR"
            else:
                assert connection.states == before
        if before[role].name == "ERROR":
            assert connection.state.name == "ERROR"
        assert connection.state in legal


@settings(max_examples=200)
@given(st.sampled_from(Role), st.lists(st.sampled_from(Input), max_size=30))
def test_a_machine_is_always_in_a_state_of_its_table(role, inputs):
    """Whatever is fed, in whatever order, a refusal changes nothing."""
    machine = StateMachine(role)
    for happened in inputs:
        before = machine.state
        try:
            machine.feed(happened)
        except LocalProtocolError:
            assert machine.state is before
        else:
            assert TABLES[role][before, happened] is machine.state


@settings(max_examples=300, deadline=None)
@given(streams, st.data())
def test_nothing_is_heard_before_the_right_token(data, draw):
    """Whatever bytes come first, cut anywhere: no request comes out, and no refusal but the last."""
    positions = draw.draw(st.lists(st.integers(0, len(data)), max_size=10))
    server = Connection(Role.SERVER, token=RIGHT)
    seen = feed(server, [*cuts(data, *positions), b""])
    assert len(seen) == 1
    assert seen == [ConnectionClosed()] or (seen[0].fatal and server.state.name == "ERROR")


@settings(max_examples=200, deadline=None)
@given(streams, st.data())
def test_behind_the_right_token_a_connection_is_as_any_other(data, draw):
    """The hello comes out, and then what would come out without it; cut anywhere."""
    client = Connection(Role.CLIENT, token=RIGHT)
    opened = client.opening() + data
    positions = draw.draw(st.lists(st.integers(0, len(opened)), max_size=10))
    server = Connection(Role.SERVER, token=RIGHT)
    hello, *rest = feed(server, [*cuts(opened, *positions), b""])
    assert hello == Hello(RIGHT)
    expected = feed(Connection(Role.SERVER), [data, b""])
    if b"hello" in data:
        return  # a second one, with another token, is refused for good here, and not there
    assert list(map(_comparable, rest)) == list(map(_comparable, expected))


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=64))
def test_a_token_opens_only_if_it_is_the_one(text):
    """Each other text is refused for good, and is not repeated."""
    server = Connection(Role.SERVER, token=RIGHT)
    server.receive_data(frame(json.dumps({"type": "hello", "token": text}).encode()))
    (seen,) = feed(server, [b""])[:1]
    if text == RIGHT:
        assert seen == Hello(RIGHT)
        return
    assert seen.fatal
    assert seen.code in (Code.E_AUTH_003, Code.E_PROTO_003, Code.E_PROTO_001)
    assert len(text) < 12 or text not in seen.message
