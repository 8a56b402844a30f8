"""The token that comes before everything else, on connections that ask for one."""

import pytest

from uma_protocol import (
    ClientState,
    Code,
    Connection,
    ConnectionClosed,
    Error,
    Generate,
    Hello,
    ListSessions,
    LocalProtocolError,
    Ok,
    RemoteProtocolError,
    Role,
    ServerState,
    frame,
)
from uma_protocol.connection import MAX_HELLO_BYTES
from uma_protocol.testing import feed

RIGHT = "5f" * 32
WRONG, ANY = "x", "any"
ASK = Generate("a", prompt="p" * 2 * MAX_HELLO_BYTES)


@pytest.fixture(name="server")
def _server():
    return Connection(Role.SERVER, token=RIGHT)


def _refused(server):
    with pytest.raises(RemoteProtocolError) as caught:
        server.next_event()
    return caught.value


def test_the_right_token_opens_the_loop(server):
    """The request may follow the hello in the same write; no answer has to be waited for."""
    client = Connection(Role.CLIENT, token=RIGHT)
    assert client.state is ClientState.SEND_HELLO
    server.receive_data(client.opening() + client.send(ASK))
    assert server.next_event() == Hello(RIGHT)
    assert server.next_event() == ASK
    assert server.state is ServerState.PREFILL
    assert server.states[Role.CLIENT] is client.state is ClientState.AWAIT


@pytest.mark.parametrize("token", ["5f" * 31 + "5e", "5f" * 31, WRONG, "é" * 32])
def test_a_wrong_token_is_refused_once_and_for_good(server, token):
    """The refusal is fatal, repeats nothing, and the right token does not mend it."""
    server.receive_data(Connection(Role.CLIENT, token=token).opening())
    fault = _refused(server)
    assert (fault.code, fault.fatal) == (Code.E_AUTH_003, True)
    assert token not in fault.message or token == WRONG
    server.receive_data(Connection(Role.CLIENT, token=RIGHT).opening())
    assert _refused(server).code is Code.E_AUTH_003
    assert server.state is ServerState.ERROR


def test_a_wrong_token_is_told_to_the_client(server):
    """The last word of the server reaches a client that has already asked."""
    client = Connection(Role.CLIENT, token=WRONG)
    server.receive_data(client.opening() + client.send(ASK))
    client.receive_data(server.send(server.error_event(_refused(server))))
    told = client.next_event()
    assert isinstance(told, Error)
    assert (told.code, told.fatal, told.retryable) == ("E_AUTH_003", True, False)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(b'{"type":"sessions"}'), Code.E_AUTH_003),
        (frame(b'{"id":"a","prompt":"p"}'), Code.E_AUTH_003),
        (frame(b'{"type":"hello"}'), Code.E_PROTO_003),
        (frame(b'{"type":"hullo"}'), Code.E_PROTO_007),
        (frame(b"no JSON"), Code.E_PROTO_001),
        (frame(b"x" * (MAX_HELLO_BYTES + 1))[:4], Code.E_PROTO_002),
        (b"GET / HTTP/1.1", Code.E_PROTO_002),
    ],
)
def test_nothing_else_is_accepted_before_it(server, sent, code):
    """Every other first frame ends the connection, and the refusal names the way in."""
    server.receive_data(sent)
    fault = _refused(server)
    assert (fault.code, fault.fatal) == (code, True)
    assert "the first frame must be hello" in fault.message


def test_little_is_kept_of_a_client_that_has_shown_nothing(server):
    """A frame above the limit of a hello is refused by its header; behind the hello it may be longer."""
    server.receive_data(frame(b"x" * (MAX_HELLO_BYTES + 1))[:4])
    assert str(MAX_HELLO_BYTES) in _refused(server).message


def test_a_client_that_leaves_without_a_word_is_no_fault(server):
    """A port that is only probed ends as a connection that was closed."""
    assert feed(server, [b""]) == [ConnectionClosed()]


def test_where_no_token_is_asked_for_any_is_welcome():
    """A client may speak through a socket that is forwarded to one that asks for none."""
    server = Connection(Role.SERVER)
    client = Connection(Role.CLIENT, token=ANY)
    sent = client.opening() + client.send(ListSessions())
    assert feed(server, [sent]) == [Hello(ANY), ListSessions()]


def test_a_second_hello_is_checked_like_the_first(server):
    """A wrong one ends the connection."""
    client = Connection(Role.CLIENT, token=RIGHT)
    sent = client.opening() + client.send(Hello(RIGHT)) + client.send(Hello(WRONG))
    hello, again, fault = feed(server, [sent])
    assert (hello, again) == (Hello(RIGHT), Hello(RIGHT))
    assert (fault.code, fault.fatal) == (Code.E_AUTH_003, True)


def test_a_hello_beside_a_request_is_harmless(server):
    """It comes too late to matter, and the request continues."""
    client = Connection(Role.CLIENT, token=RIGHT)
    opened = client.opening() + client.send(ASK)
    late = frame(b'{"type":"hello","token":"%s"}' % RIGHT.encode())
    *_, fault, _ = feed(server, [opened + late, b""])
    assert (fault.code, fault.fatal) == (Code.E_PROTO_004, False)
    assert server.state is ServerState.PREFILL


def test_a_client_shows_its_token_first():
    """Whoever forgets it is told at once, and not by the server."""
    with pytest.raises(LocalProtocolError, match="SEND_HELLO"):
        Connection(Role.CLIENT, token=RIGHT).send(ASK)


def test_a_server_answers_nobody_before_the_hello(server):
    """Only the last word may be said to a client that has shown nothing."""
    with pytest.raises(LocalProtocolError):
        server.send(Ok())


def test_a_full_server_may_say_so_before_the_hello(server):
    """A refusal that needs no token is understood by a client that has not yet shown it."""
    word = Error("E_LIMIT_002", "full", fatal=True, retryable=True)
    client = Connection(Role.CLIENT, token=RIGHT)
    client.receive_data(server.send(word))
    assert client.next_event() == word


def test_without_a_token_nothing_is_opened():
    """On a Unix socket a client sends what it always sent."""
    assert Connection(Role.CLIENT).opening() == b""


def test_a_token_is_not_shown_in_logs():
    """What prints a request does not print the secret."""
    assert RIGHT not in repr(Hello(RIGHT))
