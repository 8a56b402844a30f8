"""The state of a connection: two tables, and one class that looks things up in them.

Two rules hold this file together. Everything that changes a state is a cell of a table below, and
nothing anywhere else assigns a state. And this file does not know which end of the socket we are:
that is the business of `connection`.

Theory. A connection carries one request at a time, so the life of a connection is a loop: the
client asks, the server reads the prompt (PREFILL), produces tokens (DECODE), hands them to the
socket (STREAM), says that it is done, and both begin again. The two ends see different parts of
that loop. Only the server knows when the prompt has been computed and when its buffers are empty;
the client sees the same moments as "no token yet" and "tokens are coming". So there is one table
per role, and inputs are named by what happens, not by who makes it happen: REQUEST is "a request that is
computed crosses the wire", for the one a send and for the other a receipt.

Where the server asks for a token, the life begins before the loop: nothing but a HELLO with the right
one leads into it, and `connection` compares. Elsewhere a HELLO is legal at the beginning and without
effect, so that a client may send it through a forwarded socket.

Each end runs both tables. Its own says what it may do next. The other is a mirror: the state in
which the peer will be once it has read everything we sent. Inputs that no byte betrays
(`INVISIBLE`) are not fed to the mirror; what a byte lets us conclude about them is in `IMPLIED`.

Things worth knowing when reading the tables:

- A missing cell is an error of whoever made the input. That is how a token before the prompt is
  done, the classic fault of chunked prefill, becomes impossible to send.
- REPLY is any answer that leaves the request alone: ok, sessions, explain, prefix, metrics, an error
  that is not fatal. It is legal in DONE because an admin request may be answered after the `eos` of the
  request that ran beside it. For the same reason a client may send an admin request in DONE; a
  server does not read it before its next cycle.
- FLUSHED means that all bytes handed out have been written. It only matters in STREAM, where it
  says that the client has room again; elsewhere it changes nothing, so that a writer may report
  it without looking.
- END is the end of one of several choices, which leaves the request running. Which choices there are
  and which of them are over is counted in `connection`; these tables know one request. A choice may
  end in PREFILL: it failed, or was cancelled. An `eos` is for the connection to refuse as long as a
  choice is open.
- RESULT is vectors or scores, what `embed` and `rerank` ask for. Such a request has no tokens: it stays in
  PREFILL until its `eos`. Which results a request has is counted in `connection`.
- LOADING is how far the loading of the request's model is, for who asked to be told. It comes before the first
  token; whether it was asked for is known in `connection`.
- BREAK is everything after which the byte stream cannot be trusted: a broken frame, a write that
  failed, an illegal event of our own. FATAL is the `error` event that says so. A server in ERROR
  may say FATAL once, as its last word. Once, because its mirror of the client has no such cell in
  ERROR: that client has been told.

The diagrams in docs/reference/protocol.md are drawn from these tables by docs/draw_states.py.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from .errors import Code, LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Role(Enum):
    """Which end of the connection."""

    CLIENT = "client"
    SERVER = "server"

    __hash__ = object.__hash__


class ServerState(Enum):
    """Where the server is in the loop."""

    RECV_HELLO = "RECV_HELLO"
    RECV_REQ = "RECV_REQ"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    STREAM = "STREAM"
    DONE = "DONE"
    ERROR = "ERROR"

    # Enum hashes by name, in Python. These are looked up for every token, and identity is what
    # equality of enum members means anyway.
    __hash__ = object.__hash__


class ClientState(Enum):
    """Where the client is in the loop."""

    SEND_HELLO = "SEND_HELLO"
    SEND_REQ = "SEND_REQ"
    AWAIT = "AWAIT"
    STREAMING = "STREAMING"
    DONE = "DONE"
    ERROR = "ERROR"

    __hash__ = object.__hash__


class Input(Enum):
    """What can happen to a connection. The value is the label in diagrams and error messages."""

    HELLO = "hello"
    REQUEST = "request"
    ADMIN = "admin request"
    REPLY = "admin answer"
    PROMPT_DONE = "prompt done"
    TOKEN = "token"  # noqa: S105 - not that kind of token
    FLUSHED = "all flushed"
    END = "end of a choice"
    RESULT = "vectors or scores"
    LOADING = "loading"
    EOS = "eos"
    NEXT_CYCLE = "next cycle"
    FATAL = "fatal error"
    BREAK = "broken"

    __hash__ = object.__hash__


State = ServerState | ClientState

_S = ServerState
_C = ClientState
_I = Input

SERVER: Mapping[tuple[State, Input], State] = MappingProxyType(
    {
        (_S.RECV_HELLO, _I.HELLO): _S.RECV_REQ,
        (_S.RECV_HELLO, _I.FLUSHED): _S.RECV_HELLO,
        (_S.RECV_HELLO, _I.FATAL): _S.ERROR,
        (_S.RECV_HELLO, _I.BREAK): _S.ERROR,
        #
        (_S.RECV_REQ, _I.HELLO): _S.RECV_REQ,
        (_S.RECV_REQ, _I.REQUEST): _S.PREFILL,
        (_S.RECV_REQ, _I.ADMIN): _S.RECV_REQ,
        (_S.RECV_REQ, _I.REPLY): _S.RECV_REQ,
        (_S.RECV_REQ, _I.FLUSHED): _S.RECV_REQ,
        (_S.RECV_REQ, _I.FATAL): _S.ERROR,
        (_S.RECV_REQ, _I.BREAK): _S.ERROR,
        #
        (_S.PREFILL, _I.PROMPT_DONE): _S.DECODE,
        (_S.PREFILL, _I.END): _S.PREFILL,
        (_S.PREFILL, _I.RESULT): _S.PREFILL,
        (_S.PREFILL, _I.LOADING): _S.PREFILL,
        (_S.PREFILL, _I.EOS): _S.DONE,
        (_S.PREFILL, _I.ADMIN): _S.PREFILL,
        (_S.PREFILL, _I.REPLY): _S.PREFILL,
        (_S.PREFILL, _I.FLUSHED): _S.PREFILL,
        (_S.PREFILL, _I.FATAL): _S.ERROR,
        (_S.PREFILL, _I.BREAK): _S.ERROR,
        #
        (_S.DECODE, _I.TOKEN): _S.STREAM,
        (_S.DECODE, _I.END): _S.STREAM,
        (_S.DECODE, _I.EOS): _S.DONE,
        (_S.DECODE, _I.ADMIN): _S.DECODE,
        (_S.DECODE, _I.REPLY): _S.DECODE,
        (_S.DECODE, _I.FLUSHED): _S.DECODE,
        (_S.DECODE, _I.FATAL): _S.ERROR,
        (_S.DECODE, _I.BREAK): _S.ERROR,
        #
        (_S.STREAM, _I.TOKEN): _S.STREAM,
        (_S.STREAM, _I.END): _S.STREAM,
        (_S.STREAM, _I.FLUSHED): _S.DECODE,
        (_S.STREAM, _I.EOS): _S.DONE,
        (_S.STREAM, _I.ADMIN): _S.STREAM,
        (_S.STREAM, _I.REPLY): _S.STREAM,
        (_S.STREAM, _I.FATAL): _S.ERROR,
        (_S.STREAM, _I.BREAK): _S.ERROR,
        #
        (_S.DONE, _I.NEXT_CYCLE): _S.RECV_REQ,
        (_S.DONE, _I.ADMIN): _S.DONE,
        (_S.DONE, _I.REPLY): _S.DONE,
        (_S.DONE, _I.FLUSHED): _S.DONE,
        (_S.DONE, _I.FATAL): _S.ERROR,
        (_S.DONE, _I.BREAK): _S.ERROR,
        #
        (_S.ERROR, _I.FATAL): _S.ERROR,
        (_S.ERROR, _I.FLUSHED): _S.ERROR,
        (_S.ERROR, _I.BREAK): _S.ERROR,
    }
)

CLIENT: Mapping[tuple[State, Input], State] = MappingProxyType(
    {
        (_C.SEND_HELLO, _I.HELLO): _C.SEND_REQ,
        (_C.SEND_HELLO, _I.FATAL): _C.ERROR,
        (_C.SEND_HELLO, _I.BREAK): _C.ERROR,
        #
        (_C.SEND_REQ, _I.HELLO): _C.SEND_REQ,
        (_C.SEND_REQ, _I.REQUEST): _C.AWAIT,
        (_C.SEND_REQ, _I.ADMIN): _C.SEND_REQ,
        (_C.SEND_REQ, _I.REPLY): _C.SEND_REQ,
        (_C.SEND_REQ, _I.FATAL): _C.ERROR,
        (_C.SEND_REQ, _I.BREAK): _C.ERROR,
        #
        (_C.AWAIT, _I.TOKEN): _C.STREAMING,
        (_C.AWAIT, _I.END): _C.AWAIT,
        (_C.AWAIT, _I.RESULT): _C.AWAIT,
        (_C.AWAIT, _I.LOADING): _C.AWAIT,
        (_C.AWAIT, _I.EOS): _C.DONE,
        (_C.AWAIT, _I.ADMIN): _C.AWAIT,
        (_C.AWAIT, _I.REPLY): _C.AWAIT,
        (_C.AWAIT, _I.FATAL): _C.ERROR,
        (_C.AWAIT, _I.BREAK): _C.ERROR,
        #
        (_C.STREAMING, _I.TOKEN): _C.STREAMING,
        (_C.STREAMING, _I.END): _C.STREAMING,
        (_C.STREAMING, _I.EOS): _C.DONE,
        (_C.STREAMING, _I.ADMIN): _C.STREAMING,
        (_C.STREAMING, _I.REPLY): _C.STREAMING,
        (_C.STREAMING, _I.FATAL): _C.ERROR,
        (_C.STREAMING, _I.BREAK): _C.ERROR,
        #
        (_C.DONE, _I.NEXT_CYCLE): _C.SEND_REQ,
        (_C.DONE, _I.ADMIN): _C.DONE,
        (_C.DONE, _I.REPLY): _C.DONE,
        (_C.DONE, _I.FATAL): _C.ERROR,
        (_C.DONE, _I.BREAK): _C.ERROR,
        #
        (_C.ERROR, _I.BREAK): _C.ERROR,
    }
)

TABLES: Mapping[Role, Mapping[tuple[State, Input], State]] = MappingProxyType(
    {Role.SERVER: SERVER, Role.CLIENT: CLIENT}
)
"""The transitions of each role; a pair that is not listed is not allowed."""

INITIAL: Mapping[Role, State] = MappingProxyType(
    {Role.SERVER: ServerState.RECV_REQ, Role.CLIENT: ClientState.SEND_REQ}
)
"""Where a connection begins on which no token is asked for."""

GUARDED: Mapping[Role, State] = MappingProxyType(
    {Role.SERVER: ServerState.RECV_HELLO, Role.CLIENT: ClientState.SEND_HELLO}
)
"""Where a connection begins that needs a token."""

INVISIBLE = frozenset({Input.PROMPT_DONE, Input.FLUSHED, Input.BREAK})
"""Inputs that show in no byte, so that the peer's mirror never learns of them directly."""

IMPLIED: Mapping[tuple[State, Input], Input] = MappingProxyType(
    {(ServerState.PREFILL, Input.TOKEN): Input.PROMPT_DONE}
)
"""What must have happened first, unseen, when an input reaches a mirror in that state."""


class StateMachine:
    """The state of one role. Only lookups in its table change it.

    Args:
        role: the role whose table is used.
        guarded: whether a hello comes first.
    """

    __slots__ = ("_table", "role", "state")

    def __init__(self, role: Role, *, guarded: bool = False) -> None:
        self.role = role
        self.state: State = (GUARDED if guarded else INITIAL)[role]
        self._table = dict(TABLES[role])

    def allows(self, happened: Input) -> bool:
        """Whether `feed` would accept this input now."""
        return (self.state, happened) in self._table

    def feed(self, happened: Input) -> None:
        """Move to the next state.

        Raises:
            LocalProtocolError: the table has no such cell. The state is unchanged.
        """
        try:
            self.state = self._table[self.state, happened]
        except KeyError:
            raise LocalProtocolError(
                Code.E_RUNTIME_004,
                f"{happened.value} is not allowed when the {self.role.value} is in "
                f"{self.state.name}",
            ) from None

    def infer(self, happened: Input) -> None:
        """Move a mirror by what was seen on the wire, and by what that implies.

        Raises:
            LocalProtocolError: the table has no such cell. The state is unchanged.
        """
        unseen = IMPLIED.get((self.state, happened))
        if unseen is not None:
            self.feed(unseen)
        self.feed(happened)
