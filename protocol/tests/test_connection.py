"""A connection: what may be said when, what is refused, and what is left afterwards."""

import contextlib
import gc
import weakref

import msgspec
import pytest

from uma_protocol import (
    CODES,
    NEED_DATA,
    PAUSED,
    Cancel,
    ClientState,
    Code,
    Connection,
    ConnectionClosed,
    Eos,
    Error,
    Explain,
    Explanation,
    Generate,
    GetMetrics,
    ListSessions,
    LocalProtocolError,
    Metrics,
    Ok,
    Prefix,
    Prefixes,
    RemoteProtocolError,
    Role,
    ServerState,
    Sessions,
    SetPriority,
    Timings,
    Token,
    Usage,
    encode_event,
    encode_request,
    frame,
)
from uma_protocol.connection import MAX_REFUSED_IN_A_ROW, READ_AHEAD_BYTES
from uma_protocol.testing import ConnectionPair, all_cuts, bytewise, feed, whole

CLIENT, SERVER = Role.CLIENT, Role.SERVER
ASK = Generate("a", prompt="p")
TOKEN = Token("a", "x", 1)
EOS = Eos("a", "stop", Usage(1, 1), Timings(queue_ms=0.0, total_ms=1.0, tokens_per_s=1.0), 1)
BAD_FIELD = b'{"id":"b","prompt":"p","nope":1}'
BAD_JSON = b"{"


def _server(state=ServerState.RECV_REQ):
    """A pair of which the server was driven to a state by legal means."""
    pair = ConnectionPair(None if state is not ServerState.RECV_HELLO else "token")
    if state in (ServerState.RECV_REQ, ServerState.RECV_HELLO):
        return pair
    if state is ServerState.ERROR:
        pair.server.send_failed()
        return pair
    pair.send(CLIENT, ASK)
    if state is ServerState.PREFILL:
        return pair
    pair.server.prompt_done()
    if state is ServerState.DECODE:
        return pair
    pair.send(SERVER, TOKEN)
    if state is ServerState.DONE:
        pair.send(SERVER, EOS)
    return pair


RUNNING = [ServerState.PREFILL, ServerState.DECODE, ServerState.STREAM]
ANSWERS = [
    Ok(),
    Sessions(()),
    Prefixes(0, 0),
    Explanation(()),
    Metrics({}),
    Error("E_PROTO_005", "m", False, False),
]


def _refused(connection, payload):
    connection.receive_data(frame(payload))
    with pytest.raises(RemoteProtocolError) as caught:
        connection.next_event()
    return caught.value


def _illegal(connection, call, *args):
    with pytest.raises(LocalProtocolError) as caught:
        call(*args)
    assert caught.value.fatal
    assert connection.state.name == "ERROR"
    return caught.value


# --- the loop ---


def test_a_request_goes_once_around_the_loop():
    """Both ends pass through their states together and end where they began."""
    pair = ConnectionPair()
    pair.send(CLIENT, ASK)
    assert (pair.client.state, pair.server.state) == (ClientState.AWAIT, ServerState.PREFILL)
    pair.server.prompt_done()
    assert pair.server.state is ServerState.DECODE
    pair.send(SERVER, TOKEN, TOKEN)
    assert (pair.client.state, pair.server.state) == (ClientState.STREAMING, ServerState.STREAM)
    pair.server.flushed()
    assert pair.server.state is ServerState.DECODE
    assert pair.send(SERVER, EOS) == [EOS, PAUSED]
    assert (pair.client.state, pair.server.state) == (ClientState.DONE, ServerState.DONE)
    pair.next_cycle()
    assert (pair.client.state, pair.server.state) == (ClientState.SEND_REQ, ServerState.RECV_REQ)


def test_each_end_mirrors_the_other():
    """The mirror of a peer is the state that the peer has, as far as bytes can tell."""
    pair = _server(ServerState.STREAM)
    assert pair.server.states == {SERVER: ServerState.STREAM, CLIENT: ClientState.STREAMING}
    assert pair.client.states == {SERVER: ServerState.STREAM, CLIENT: ClientState.STREAMING}


def test_the_running_request_is_known_by_its_id():
    """The id is there from the request to its terminal event, at both ends."""
    pair = ConnectionPair()
    assert (pair.client.request_id, pair.server.request_id) == (None, None)
    pair.send(CLIENT, ASK)
    assert (pair.client.request_id, pair.server.request_id) == ("a", "a")
    pair.send(SERVER, EOS)
    assert (pair.client.request_id, pair.server.request_id) == (None, None)


@pytest.mark.parametrize("state", RUNNING)
def test_a_request_can_end_from_any_running_state(state):
    """Cancelling, failing and finishing all end with the one terminal event."""
    pair = _server(state)
    pair.send(SERVER, EOS)
    assert pair.server.state is ServerState.DONE


def test_many_requests_follow_each_other_on_one_connection():
    """An id may be used again once its request is over."""
    pair = ConnectionPair()
    for _ in range(3):
        pair.send(CLIENT, ASK)
        pair.server.prompt_done()
        pair.send(SERVER, TOKEN, EOS)
        pair.next_cycle()


# --- pausing ---


def test_a_request_sent_early_waits_for_the_next_cycle():
    """Pipelining is back-pressure: what comes while paused is read after the cycle."""
    pair = _server(ServerState.DONE)
    pair.server.receive_data(frame(encode_request(ASK)))
    assert pair.server.next_event() is PAUSED
    pair.server.start_next_cycle()
    assert pair.server.next_event() == ASK


def test_a_pause_hides_the_end_of_file_until_the_next_cycle():
    """The terminal event is written first, whatever the client did meanwhile."""
    pair = _server(ServerState.DONE)
    pair.server.receive_data(b"")
    assert pair.server.next_event() is PAUSED
    pair.server.start_next_cycle()
    assert pair.server.next_event() == ConnectionClosed()


def test_reading_ahead_while_paused_is_bounded():
    """A peer that keeps sending to a paused server is at fault, and its bytes are dropped."""
    pair = _server(ServerState.DONE)
    chunk = b"x" * READ_AHEAD_BYTES
    bound = (1 << 20) + 4 + READ_AHEAD_BYTES
    for _ in range(bound // len(chunk) + 1):
        pair.server.receive_data(chunk)
    assert pair.server.next_event() is PAUSED
    pair.server.receive_data(b"x")
    with pytest.raises(RemoteProtocolError, match="ahead") as caught:
        pair.server.next_event()
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_002, True)
    assert pair.server._reader.buffered == 0


def test_a_cycle_starts_only_after_one_has_ended():
    """Starting early is a mistake of the driver."""
    pair = _server(ServerState.STREAM)
    _illegal(pair.server, pair.server.start_next_cycle)


# --- a server receives ---


@pytest.mark.parametrize("state", RUNNING)
def test_a_second_request_is_busy_and_harmless(state):
    """The running request keeps its state and its id; the second one is named in the refusal."""
    pair = _server(state)
    error = _refused(pair.server, encode_request(Generate("b", prompt="p")))
    assert (error.code, error.fatal, error.request_id) == (Code.E_PROTO_004, False, "b")
    assert (pair.server.state, pair.server.request_id) == (state, "a")


@pytest.mark.parametrize("state", RUNNING)
@pytest.mark.parametrize(
    "admin",
    [
        Cancel("a"),
        SetPriority(id="a", priority="background"),
        SetPriority(request=9, priority="background"),
        ListSessions(),
        Explain(),
        Explain(request=9, ticks=1000),
        Prefix(),
        GetMetrics(),
    ],
)
def test_admin_requests_are_heard_while_a_request_runs(state, admin):
    """They come out as events and move nothing."""
    pair = _server(state)
    assert pair.send(CLIENT, admin) == [admin]
    assert pair.server.state is state


@pytest.mark.parametrize(
    "admin", [ListSessions(), Explain(), GetMetrics(), GetMetrics(interval_ms=100)]
)
def test_admin_requests_are_heard_when_nothing_runs(admin):
    """They need no request beside them."""
    assert ConnectionPair().send(CLIENT, admin) == [admin]


@pytest.mark.parametrize("state", [ServerState.RECV_REQ, *RUNNING])
@pytest.mark.parametrize("admin", [Cancel("b"), SetPriority(id="b", priority="background")])
def test_an_id_that_does_not_run_hits_nothing(state, admin):
    """A late cancel is told so and the connection goes on, whatever its state."""
    pair = _server(state)
    error = _refused(pair.server, encode_request(admin))
    assert (error.code, error.fatal, error.request_id) == (Code.E_PROTO_005, False, "b")
    assert pair.server.state is state


def test_a_cancel_that_crosses_the_terminal_event_hits_nothing():
    """The id of a request that is over is unknown again."""
    pair = _server(ServerState.STREAM)
    late = pair.client.send(Cancel("a"))
    pair.send(SERVER, EOS)
    pair.server.start_next_cycle()
    pair.server.receive_data(late)
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.next_event()
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_005, False)


@pytest.mark.parametrize("state", RUNNING)
def test_repeated_metrics_are_not_offered_beside_a_request(state):
    """One connection carries one stream: the request has it."""
    pair = _server(state)
    error = _refused(pair.server, encode_request(GetMetrics(interval_ms=100)))
    assert (error.code, error.fatal, error.field) == (Code.E_PROTO_007, False, "interval_ms")


@pytest.mark.parametrize(
    ("payload", "code"), [(BAD_JSON, Code.E_PROTO_001), (BAD_FIELD, Code.E_PROTO_003)]
)
def test_a_bad_document_is_fatal_when_nothing_runs(payload, code):
    """A client that only waits for its eos would otherwise wait for ever."""
    server = Connection(SERVER)
    error = _refused(server, payload)
    assert (error.code, error.fatal, server.state) == (code, True, ServerState.ERROR)


@pytest.mark.parametrize("state", RUNNING)
@pytest.mark.parametrize(
    ("payload", "code"), [(BAD_JSON, Code.E_PROTO_001), (BAD_FIELD, Code.E_PROTO_003)]
)
def test_a_bad_document_is_harmless_while_a_request_runs(state, payload, code):
    """It is dropped; what runs goes on."""
    pair = _server(state)
    error = _refused(pair.server, payload)
    assert (error.code, error.fatal) == (code, False)
    assert (pair.server.state, pair.server.request_id) == (state, "a")
    assert pair.server.next_event() is NEED_DATA


def test_an_unsupported_type_is_never_fatal():
    """A client may ask what a daemon can do."""
    server = Connection(SERVER)
    error = _refused(server, b'{"type":"pull"}')
    assert (error.code, error.fatal, server.state) == (
        Code.E_PROTO_007,
        False,
        ServerState.RECV_REQ,
    )


def test_refusals_in_a_row_become_fatal():
    """Somebody who sends nothing but nonsense is let go, whatever the nonsense."""
    pair = _server(ServerState.DECODE)
    for _ in range(MAX_REFUSED_IN_A_ROW - 1):
        assert not _refused(pair.server, encode_request(Cancel("b"))).fatal
    assert _refused(pair.server, encode_request(Cancel("b"))).fatal
    assert pair.server.state is ServerState.ERROR


def test_a_good_document_forgives_the_bad_ones_before_it():
    """Only an unbroken row counts."""
    pair = _server(ServerState.DECODE)
    for _ in range(3):
        for _ in range(MAX_REFUSED_IN_A_ROW - 1):
            assert not _refused(pair.server, BAD_FIELD).fatal
        pair.send(CLIENT, ListSessions())


@pytest.mark.parametrize("state", [ServerState.RECV_REQ, *RUNNING])
def test_a_framing_fault_is_always_fatal(state):
    """The position in the stream is lost, so nothing after it can be trusted."""
    pair = _server(state)
    pair.server.receive_data(b"GET / HTTP/1.1\r\n")
    with pytest.raises(RemoteProtocolError, match="length-prefixed") as caught:
        pair.server.next_event()
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_002, True)
    assert pair.server.state is ServerState.ERROR


def test_a_fatal_fault_is_raised_again():
    """Asking once more does not make the bytes better: the same words, in an exception of its own."""
    server = Connection(SERVER)
    first = _refused(server, BAD_JSON)
    server.receive_data(frame(encode_request(ASK)))
    with pytest.raises(RemoteProtocolError) as caught:
        server.next_event()
    again = caught.value
    assert again is not first
    assert (str(again), again.fatal, again.field) == (str(first), first.fatal, first.field)


@pytest.mark.parametrize(
    "payload",
    [BAD_FIELD, BAD_JSON, b"\xff", b"[1]", b'{"type":"metrics","a":1,"a":2}', b"[" * 9999],
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_refused_document_is_gone_with_its_connection(payload, times):
    """No cycle keeps it, or its connection, until the collector comes by."""
    gc.disable()
    try:
        connection = Connection(SERVER)
        connection.receive_data(frame(payload))
        for _ in range(times):
            with contextlib.suppress(RemoteProtocolError):
                connection.next_event()
        left = weakref.ref(connection)
        del connection
        assert left() is None
    finally:
        gc.enable()


# --- end of file ---


def test_the_end_of_file_is_said_each_time():
    """A driver may ask as often as it likes."""
    server = Connection(SERVER)
    server.receive_data(b"")
    assert [server.next_event() for _ in range(3)] == [ConnectionClosed()] * 3


def test_events_before_the_end_of_file_come_first():
    """A client may send its request and close its sending half at once."""
    server = Connection(SERVER)
    server.receive_data(frame(encode_request(ASK)))
    server.receive_data(b"")
    assert server.next_event() == ASK
    assert server.next_event() == ConnectionClosed()


def test_a_half_closed_client_gets_its_request_finished():
    """The end of what the client sends is not the end of what it wants to hear."""
    pair = _server(ServerState.PREFILL)
    assert pair.close(CLIENT) == [ConnectionClosed()]
    pair.server.prompt_done()
    pair.send(SERVER, TOKEN, EOS)
    pair.server.start_next_cycle()
    assert pair.server.next_event() == ConnectionClosed()


@pytest.mark.parametrize("at", range(1, len(frame(encode_request(ASK)))))
def test_an_end_of_file_inside_a_frame_creates_no_request(at):
    """Half a request is no request, wherever it was cut."""
    server = Connection(SERVER)
    server.receive_data(frame(encode_request(ASK))[:at])
    assert server.next_event() is NEED_DATA
    server.receive_data(b"")
    with pytest.raises(RemoteProtocolError, match="middle of a frame") as caught:
        server.next_event()
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_002, True)
    assert server.request_id is None


def test_data_after_the_end_of_file_is_a_mistake_of_the_driver():
    """No socket does that."""
    server = Connection(SERVER)
    server.receive_data(b"")
    _illegal(server, server.receive_data, b"x")


# --- a server sends ---


def test_a_token_before_the_prompt_is_done_is_refused():
    """The classic fault of chunked prefill stops here and not at the client."""
    pair = _server(ServerState.PREFILL)
    error = _illegal(pair.server, pair.server.send, TOKEN)
    assert "PREFILL" in error.message


@pytest.mark.parametrize("event", [TOKEN, EOS])
@pytest.mark.parametrize("state", [ServerState.RECV_REQ, ServerState.DONE, ServerState.ERROR])
def test_nothing_is_streamed_when_nothing_runs(event, state):
    """Exactly one terminal event for each request, and nothing after it."""
    pair = _server(state)
    _illegal(pair.server, pair.server.send, event)


@pytest.mark.parametrize("event", [Token("b", "x", 1), msgspec.structs.replace(EOS, id="b")])
def test_an_event_of_another_request_is_refused(event):
    """A mix-up of streams inside a daemon never reaches a client."""
    pair = _server(ServerState.DECODE)
    _illegal(pair.server, pair.server.send, event)


@pytest.mark.parametrize("state", [s for s in ServerState if s.name not in ("ERROR", "RECV_HELLO")])
@pytest.mark.parametrize("answer", ANSWERS)
def test_admin_answers_move_nothing(state, answer):
    """They may be sent in any state, also after the request that ran beside them."""
    pair = _server(state)
    pair.client.receive_data(pair.server.send(answer))
    assert pair.server.state is state


@pytest.mark.parametrize("state", [s for s in ServerState if s is not ServerState.ERROR])
def test_a_fatal_error_ends_any_state(state):
    """After it nothing may be said, not even another one."""
    pair = _server(state)
    pair.server.send(Error("E_LIFECYCLE_001", "stopping", True, True))
    assert pair.server.states == {SERVER: ServerState.ERROR, CLIENT: ClientState.ERROR}
    for event in [TOKEN, EOS, *ANSWERS, Error("E_IO_001", "m", True, True)]:
        _illegal(pair.server, pair.server.send, event)


def test_a_refused_request_ends_the_connection():
    """A daemon that will not run a request says so with the request's id and closes."""
    pair = _server(ServerState.PREFILL)
    error = Error("E_LIMIT_003", "queue full", True, True, id="a", retry_after_ms=50)
    assert pair.send(SERVER, error) == [error]
    assert (pair.client.state, pair.server.state) == (ClientState.ERROR, ServerState.ERROR)


def test_a_fault_of_the_peer_is_answered_once():
    """In ERROR a server has one last word: why."""
    server = Connection(SERVER)
    error = _refused(server, BAD_FIELD)
    last = server.error_event(error)
    assert last == Error("E_PROTO_003", error.message, True, False, id="b")
    assert server.send(last) == frame(encode_event(last))
    _illegal(server, server.send, last)


@pytest.mark.parametrize("code", Code)
def test_an_error_event_says_what_is_declared(code):
    """Whether to try again is the table's word."""
    event = Connection(SERVER).error_event(RemoteProtocolError(code, "m", fatal=True))
    assert (event.code, event.retryable, event.fatal) == (code.value, CODES[code].retryable, True)


def test_a_server_sends_no_requests():
    """Roles are not exchanged."""
    server = Connection(SERVER)
    _illegal(server, server.send, ASK)


def test_content_that_cannot_be_sent_moves_nothing():
    """The token is refused, and the stream can still be ended in good order."""
    pair = _server(ServerState.DECODE)
    with pytest.raises(LocalProtocolError) as caught:
        pair.server.send(Token("a", "\ud800", 1))
    assert not caught.value.fatal
    assert pair.server.state is ServerState.DECODE
    pair.send(SERVER, EOS)


def test_a_frame_over_the_limit_is_not_sent():
    """The limit holds for what we say too."""
    server = Connection(SERVER, max_frame_bytes=100)
    with pytest.raises(LocalProtocolError, match="more than the limit") as caught:
        server.send(Metrics({"x": "y" * 100}))
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_002, False)
    assert server.state is ServerState.RECV_REQ


@pytest.mark.parametrize("state", ServerState)
def test_flushing_may_be_reported_in_any_state(state):
    """A writer need not look; only STREAM changes."""
    pair = _server(state)
    pair.server.flushed()
    assert pair.server.state is (ServerState.DECODE if state is ServerState.STREAM else state)


def test_a_failed_write_is_the_end():
    """What the peer has of the stream is unknown, so nothing may follow."""
    pair = _server(ServerState.STREAM)
    pair.server.send_failed()
    assert pair.server.state is ServerState.ERROR
    _illegal(pair.server, pair.server.send, EOS)


def test_bytes_received_in_error_are_dropped():
    """A driver may read and discard, as closing a socket politely requires."""
    pair = _server(ServerState.ERROR)
    pair.server.receive_data(frame(encode_request(ASK)))
    assert pair.server._reader.buffered == 0
    assert pair.server.next_event() is NEED_DATA
    pair.server.receive_data(b"")
    assert pair.server.next_event() == ConnectionClosed()


# --- a client ---


@pytest.mark.parametrize("state", RUNNING)
def test_a_client_asks_one_thing_at_a_time(state):
    """A second request is an error of the caller and never reaches the wire."""
    pair = _server(state)
    _illegal(pair.client, pair.client.send, ASK)


def test_a_client_cancels_only_what_runs():
    """Being late is no crime: the caller is told and the connection goes on."""
    pair = _server(ServerState.DONE)
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(Cancel("a"))
    assert (caught.value.code, caught.value.fatal) == (Code.E_PROTO_005, False)
    pair.next_cycle()
    pair.send(CLIENT, ASK)


@pytest.mark.parametrize("state", [s for s in ServerState if s.name not in ("ERROR", "RECV_HELLO")])
def test_a_client_may_ask_admin_things_at_any_time(state):
    """Also between two requests; the answer is read in the next cycle."""
    pair = _server(state)
    before = pair.client.state
    assert pair.client.send(ListSessions())
    assert pair.client.state is before


def test_a_request_out_of_bounds_leaves_the_client_usable():
    """A slip in a parameter costs an exception and not the connection."""
    pair = ConnectionPair()
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(Generate("a", prompt="p", max_tokens=0))
    assert (caught.value.field, caught.value.fatal) == ("max_tokens", False)
    pair.send(CLIENT, ASK)


@pytest.mark.parametrize("event", [TOKEN, Token("b", "x", 1), EOS])
def test_a_client_refuses_events_of_nothing(event):
    """A daemon that streams unasked cannot be trusted."""
    client = Connection(CLIENT)
    error = _refused(client, encode_event(event))
    assert (error.code, error.fatal, client.state) == (Code.E_PROTO_003, True, ClientState.ERROR)


@pytest.mark.parametrize("event", [Token("b", "x", 1), msgspec.structs.replace(EOS, id="b")])
def test_a_client_refuses_events_of_another_request(event):
    """Text of somebody else's stream is not handed out."""
    pair = _server(ServerState.STREAM)
    error = _refused(pair.client, encode_event(event))
    assert (error.code, error.fatal) == (Code.E_PROTO_005, True)


def test_every_bad_document_is_fatal_for_a_client():
    """A client does not argue with its daemon."""
    pair = _server(ServerState.STREAM)
    assert _refused(pair.client, BAD_JSON).fatal


@pytest.mark.parametrize("call", ["prompt_done", "flushed"])
def test_inputs_of_a_server_are_not_for_a_client(call):
    """The table of the client has no such cells."""
    pair = _server(ServerState.PREFILL)
    _illegal(pair.client, getattr(pair.client, call))


def test_a_client_in_error_waits_for_the_end_of_file():
    """After the daemon's last word only the end of the stream is of interest."""
    pair = _server(ServerState.PREFILL)
    pair.send(SERVER, Error("E_LIFECYCLE_001", "stopping", True, True))
    assert pair.client.next_event() is NEED_DATA
    assert pair.close(SERVER) == [ConnectionClosed()]


# --- any split ---

CONVERSATION = b"".join(
    [
        frame(encode_request(ASK)),
        frame(encode_request(Cancel("b"))),
        frame(BAD_FIELD),
        frame(encode_request(ListSessions())),
    ]
)


def _outcome(pieces):
    return [
        (item.code, item.message) if isinstance(item, RemoteProtocolError) else item
        for item in feed(Connection(SERVER), pieces)
    ]


def test_a_conversation_is_the_same_whole_and_byte_by_byte():
    """Events and refusals do not depend on how bytes arrive."""
    seen = _outcome(whole(CONVERSATION))
    assert [item if isinstance(item, tuple) else type(item) for item in seen][0::3] == [
        Generate,
        ListSessions,
    ]
    assert _outcome(bytewise(CONVERSATION)) == seen


@pytest.mark.parametrize("number", [1, 2])
def test_a_conversation_survives_every_cut(number):
    """Every way to cut it in two or three gives the same events and refusals."""
    seen = _outcome(whole(CONVERSATION))
    for pieces in all_cuts(CONVERSATION, number):
        assert _outcome(pieces) == seen


@pytest.mark.parametrize("split", range(1, len(frame(BAD_FIELD))))
def test_mid_frame_is_what_a_deadline_watches(split):
    """It is true from the first byte of a frame to the one before the last."""
    pair = _server(ServerState.DECODE)
    pair.server.receive_data(frame(BAD_FIELD)[:split])
    assert pair.server.next_event() is NEED_DATA
    assert pair.server.mid_frame
