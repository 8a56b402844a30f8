"""What holds for every input, tried on many."""

from hypothesis import given, settings
from hypothesis import strategies as st

from uma_protocol import (
    Connection,
    ConnectionClosed,
    End,
    Eos,
    Error,
    Generate,
    Input,
    ListSessions,
    LocalProtocolError,
    Ok,
    Pause,
    Prefix,
    RemoteProtocolError,
    Role,
    Timings,
    Token,
    Usage,
    frame,
)
from uma_protocol.states import TABLES, Machine
from uma_protocol.testing import EVENTS, REQUESTS, cuts, feed, whole

DOCUMENTS = [payload for _, payload in [*REQUESTS, *EVENTS]]

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
    return [
        (item.code, item.message, item.fatal) if isinstance(item, RemoteProtocolError) else item
        for item in feed(Connection(role), [*pieces, b""])
    ]


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


TIMES = Timings(queue_ms=0.0, total_ms=0.0, tokens_per_s=0.0)
CALLS = ["prompt_done", "flushed", "start_next_cycle", "send_failed"]
EVENTS_SENT = [
    Generate("a", prompt="p"),
    Generate("a", n=2, prompt="p"),
    ListSessions(),
    Prefix(action="clear"),
    Token("a", "x", 1),
    Token("b", "x", 1),
    Token("a", "x", 1, choice=1),
    End("a", "stop", 1, 1),
    End("a", "stop", 1, 2, choice=1),
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
@given(st.sampled_from(Role), st.lists(actions, max_size=12))
def test_any_sequence_of_calls_moves_along_the_table_or_ends_in_error(role, sequence):
    """Every state x everything that can be done: a legal state, or the one error and ERROR."""
    connection = Connection(role)
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
    machine = Machine(role)
    for happened in inputs:
        before = machine.state
        try:
            machine.feed(happened)
        except LocalProtocolError:
            assert machine.state is before
        else:
            assert TABLES[role][before, happened] is machine.state
