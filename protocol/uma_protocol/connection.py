"""One connection of the protocol, without a socket.

The caller owns the bytes: it passes received bytes to `receive_data`, asks `next_event` for their
meaning, and writes the bytes that `send` returns. This module never waits, reads no clock and
starts no thread, so the same object works with a blocking socket, an event loop and a test.

Errors, and the state after them:

1. `next_event` raises `RemoteProtocolError` with `fatal` false: the peer sent one bad document. The
   document is dropped; answer with `send(error_event(exc))` and continue.
2. `next_event` raises `RemoteProtocolError` with `fatal` true: the connection is in ERROR. A server
   sends `error_event(exc)` as its last event and closes. Calling `next_event` again raises the same
   error.
3. `send` raises `LocalProtocolError` with `fatal` false: the content cannot be sent. The state is
   unchanged.
4. `send` or another input of the caller raises `LocalProtocolError` with `fatal` true: the input is
   illegal in this state. The connection is in ERROR.
"""

from __future__ import annotations

import hmac
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from .codec import (
    decode_event,
    decode_request,
    encode_event,
    encode_request,
    is_of_unknown_kind,
)
from .errors import CODES, Code, LocalProtocolError, ProtocolError, RemoteProtocolError
from .events import (
    ConnectionClosed,
    Error,
    Event,
)
from .frames import DEFAULT_MAX_FRAME_BYTES, HEADER_BYTES, FrameReader, frame
from .inputs import EVENTS, REQUESTS, input_of
from .requests import (
    Cancel,
    GetMetrics,
    Hello,
    Request,
    SetPriority,
    Work,
)
from .running import OpenRequest
from .states import INVISIBLE, ClientState, Input, Role, ServerState, State, StateMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_REFUSED_IN_A_ROW = 16
"""After so many bad documents without a good one between them, the next refusal is fatal."""

READ_AHEAD_BYTES = 1 << 16
"""What a peer may send ahead, beyond one whole frame, while the connection is paused."""


MAX_HELLO_BYTES = 1024
"""The longest frame that a server takes from a client that has not shown its token."""


class Pause(Enum):
    """Results of `next_event` that are not events."""

    NEED_DATA = "NEED_DATA"
    """All that was received has been handed out: receive more."""

    PAUSED = "PAUSED"
    """The cycle is over: finish writing, call `start_next_cycle`, then ask again."""


NEED_DATA: Literal[Pause.NEED_DATA] = Pause.NEED_DATA
PAUSED: Literal[Pause.PAUSED] = Pause.PAUSED

_CLOSED = ConnectionClosed()
_DONE = frozenset({ServerState.DONE, ClientState.DONE})
_ERROR = frozenset({ServerState.ERROR, ClientState.ERROR})
_OF_A_REQUEST = frozenset({Input.TOKEN, Input.END, Input.RESULT, Input.LOADING, Input.EOS})


class Connection:
    """One end of a connection: parses, serialises and checks what may be sent when.

    Two threads or tasks must not use it at the same time.

    Args:
        role: which end this is.
        max_frame_bytes: the longest payload that is accepted or sent.
        token: as server, what a client has to show before it is heard; as client, what `opening` shows.
            Without it no token is asked for, and one that is shown has no effect.

    Raises:
        ValueError: `max_frame_bytes` is not between 1 and 2**32 - 1.
    """

    def __init__(
        self,
        role: Role,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        token: str | None = None,
    ) -> None:
        self.role = role
        self._token = token
        guarded = token is not None
        self._is_server = role is Role.SERVER
        self._ours = StateMachine(role, guarded=guarded)
        self._theirs = StateMachine(
            Role.CLIENT if self._is_server else Role.SERVER, guarded=guarded
        )
        self._sendable = EVENTS if self._is_server else REQUESTS
        self._encode: Callable[[Any], bytes] = encode_event if self._is_server else encode_request
        self._reader = FrameReader(max_frame_bytes)
        self._max_frame_bytes = max_frame_bytes
        if self._waits_for_hello:
            self._reader.max_frame_bytes = min(MAX_HELLO_BYTES, max_frame_bytes)
        self._running = OpenRequest()
        self._refused_in_a_row = 0
        self._eof = False
        self._fault: RemoteProtocolError | None = None

    # --- what can be asked ---

    @property
    def state(self) -> State:
        """The state of this end."""
        return self._ours.state

    @property
    def states(self) -> Mapping[Role, State]:
        """The states of both ends; the peer's after it has read everything that was sent."""
        return MappingProxyType(
            {self._ours.role: self._ours.state, self._theirs.role: self._theirs.state}
        )

    @property
    def request_id(self) -> str | None:
        """The id of the running request, or None. In ERROR: of the request that was interrupted."""
        return self._running.id

    @property
    def mid_frame(self) -> bool:
        """Whether a frame is incomplete: the caller should limit the time until its end."""
        return self._reader.mid_frame

    def error_event(self, exc: ProtocolError) -> Error:
        """Return the event that reports an error to the peer, ready for `send`."""
        return Error(
            code=exc.code.value,
            message=exc.message,
            fatal=exc.fatal,
            retryable=CODES[exc.code].retryable,
            id=exc.request_id,
        )

    @property
    def _waits_for_hello(self) -> bool:
        return self._ours.state is ServerState.RECV_HELLO

    # --- bytes in ---

    def receive_data(self, data: bytes) -> None:
        """Take received bytes; `b""` means end of file. In ERROR the bytes are dropped.

        Memory is bounded: less than one frame is kept if the caller asks `next_event` until it
        returns NEED_DATA. While that returns PAUSED the caller should stop receiving. Otherwise at
        most one frame, `READ_AHEAD_BYTES` and the data of one call are kept, and `next_event`
        raises if a peer sends more.

        Raises:
            LocalProtocolError: data after the end of file.
        """
        if not data:
            self._eof = True
        elif self._eof:
            raise self._illegal("data was received after the end of file")
        elif self._in_error:
            return
        elif self._reader.buffered > self._reader.max_frame_bytes + HEADER_BYTES + READ_AHEAD_BYTES:
            self._break(
                RemoteProtocolError(
                    Code.E_PROTO_002,
                    "too much was sent ahead of the answer: read events before sending more",
                )
            )
        else:
            self._reader.feed(data)

    def next_event(self) -> Request | Event | ConnectionClosed | Pause:
        """Return the next request or event of the peer.

        Returns:
            A request (as server) or an event (as client); `ConnectionClosed` at the end of file, at
            every call; `NEED_DATA`; or `PAUSED` from the end of a request until `start_next_cycle`.
            In ERROR: NEED_DATA until the end of file.

        `ConnectionClosed` does not end a running request: a client may close its sending half and
        still read.

        Raises:
            RemoteProtocolError: the docstring of this module describes the state afterwards.
        """
        if self._fault is not None:
            raise self._fault.anew()
        if self._ours.state in _DONE:
            return PAUSED
        if self._in_error:
            return _CLOSED if self._eof else NEED_DATA
        try:
            while (payload := self._reader.next_payload()) is not None:
                if self._is_server:
                    return self._read_request(payload)
                try:
                    event = decode_event(payload)
                except RemoteProtocolError:
                    if is_of_unknown_kind(payload):  # a newer daemon sent it
                        continue
                    raise
                return self._follow(event)
            return self._nothing_left()
        except RemoteProtocolError as exc:
            raise self._refuse(exc) from None

    def _nothing_left(self) -> ConnectionClosed | Pause:
        if not self._eof:
            return NEED_DATA
        if self._reader.mid_frame:
            raise RemoteProtocolError(
                Code.E_PROTO_002, "the stream ended in the middle of a frame", fatal=True
            )
        return _CLOSED

    def _read_request(self, payload: bytes) -> Request:
        request = decode_request(payload)
        running = self._running.id
        if isinstance(request, Hello):
            self._check_hello(request)
        elif self._waits_for_hello:
            raise RemoteProtocolError(
                Code.E_AUTH_003,
                "no token was shown",
                request_id=getattr(request, "id", None),
            )
        elif isinstance(request, Work):
            if running is not None:
                raise RemoteProtocolError(
                    Code.E_PROTO_004,
                    "a request already runs on this connection: wait for its eos, or open another",
                    request_id=request.id,
                )
            self._running.begin(request)
        elif isinstance(request, Cancel | SetPriority):
            if request.id is not None and request.id != running:
                raise RemoteProtocolError(
                    Code.E_PROTO_005,
                    "no request with that id runs on this connection",
                    field="id",
                    request_id=request.id,
                )
        elif isinstance(request, GetMetrics) and request.interval_ms and running is not None:
            raise RemoteProtocolError(
                Code.E_PROTO_007,
                "metrics are not repeated beside a running request: leave interval_ms out, or open "
                "another connection",
                field="interval_ms",
            )
        self._feed(REQUESTS[type(request)])
        self._refused_in_a_row = 0
        return request

    def _check_hello(self, hello: Hello) -> None:
        """Refuse a wrong token, for good, in a time that does not tell how wrong; then hear the client."""
        token = self._token
        if token is not None and not hmac.compare_digest(hello.token.encode(), token.encode()):
            raise RemoteProtocolError(Code.E_AUTH_003, "the token is wrong", fatal=True)
        if not self._ours.allows(Input.HELLO):
            raise RemoteProtocolError(Code.E_PROTO_004, "hello is for the beginning: leave it out")
        self._reader.max_frame_bytes = self._max_frame_bytes

    def _follow(self, event: Event) -> Event:
        happened = input_of(event, EVENTS)
        if not self._ours.allows(happened):
            raise RemoteProtocolError(
                Code.E_PROTO_003,
                f"the daemon sent {happened.value} while this client is in {self.state.name}",
            )
        if happened in _OF_A_REQUEST and (problem := self._running.astray(event)) is not None:
            raise RemoteProtocolError(Code.E_PROTO_005, f"the daemon sent {problem}")
        self._feed(happened)
        self._running.follow(event)
        return event

    # --- bytes out ---

    def send(self, event: Request | Event) -> bytes:
        """Return the frame of one event or request. Write the frames in the order of the calls.

        Raises:
            LocalProtocolError: `fatal` true: illegal in this state; this end is in ERROR. `fatal` false:
                the content cannot be sent, or the id does not run; the state is unchanged.
        """
        if type(event) not in self._sendable:
            raise self._illegal(f"a {self.role.value} does not send {type(event).__name__}")
        payload = self._encode(event)
        if len(payload) > self._max_frame_bytes:
            raise LocalProtocolError(
                Code.E_PROTO_002,
                f"the frame would be {len(payload)} bytes long, more than the limit of "
                f"{self._max_frame_bytes}",
            )
        happened = input_of(event, self._sendable)
        if happened in _OF_A_REQUEST or happened is Input.ADMIN:
            self._check_id(event, happened)
        self._feed(happened)
        if isinstance(event, Work):
            self._running.begin(event)
        else:
            self._running.follow(event)
        return frame(payload)

    def opening(self) -> bytes:
        """Client: return what goes before all else, the frame of the hello; empty without a token.

        Raises:
            LocalProtocolError: as `send` does.
        """
        return b"" if self._token is None else self.send(Hello(self._token))

    def _check_id(self, event: Any, happened: Input) -> None:
        """Refuse to speak of a request that does not run; states are the table's business."""
        if not self._ours.allows(happened):
            return
        if happened is not Input.ADMIN:
            problem = self._running.astray(event)
            if problem is not None:
                raise self._illegal(f"a server does not send {problem}")
            return
        named = getattr(event, "id", None)
        if named is not None and named != self._running.id:
            # The request may have ended a moment ago. That is no reason to lose the connection.
            raise LocalProtocolError(
                Code.E_PROTO_005,
                "no request with that id runs on this connection",
                field="id",
                request_id=named,
            )

    # --- other inputs ---

    def prompt_done(self) -> None:
        """Server: report that the whole prompt is computed, so tokens may follow.

        Raises:
            LocalProtocolError: no request is in PREFILL. This end is in ERROR.
        """
        self._feed(Input.PROMPT_DONE)

    def flushed(self) -> None:
        """Server: report that all bytes returned by `send` are written. Legal in every state.

        Raises:
            LocalProtocolError: this is a client. This end is in ERROR.
        """
        self._feed(Input.FLUSHED)

    def start_next_cycle(self) -> None:
        """Make the connection ready for the next request. Bytes received meanwhile are read next.

        Raises:
            LocalProtocolError: the state is not DONE. This end is in ERROR.
        """
        self._feed(Input.NEXT_CYCLE)

    def send_failed(self) -> None:
        """Report that bytes returned by `send` could not be written. This end is in ERROR.

        Bytes received later are dropped. A daemon that refuses a client writes the reason before it
        closes, so a client whose write failed should read to the end first and then call this.
        """
        self._feed(Input.BREAK)

    # --- the only ways to change state ---

    @property
    def _in_error(self) -> bool:
        return self._ours.state in _ERROR

    def _feed(self, happened: Input) -> None:
        """Tell both machines; what the tables do not allow ends in ERROR."""
        try:
            self._ours.feed(happened)
            if happened not in INVISIBLE:
                self._theirs.infer(happened)
        except LocalProtocolError as exc:
            self._ours.feed(Input.BREAK)
            exc.fatal = True
            raise

    def _illegal(self, message: str) -> LocalProtocolError:
        """Go to ERROR for something that no table has a cell for."""
        self._ours.feed(Input.BREAK)
        return LocalProtocolError(Code.E_RUNTIME_004, message, fatal=True)

    def _refuse(self, exc: RemoteProtocolError) -> RemoteProtocolError:
        """Decide whether a fault of the peer is fatal, here and now."""
        if self._waits_for_hello:
            exc = exc.anew(f"{exc.message}; the first frame must be hello with the daemon's token")
            exc.fatal = True
        self._refused_in_a_row += 1
        exc.fatal = (
            exc.fatal
            or not self._is_server
            or CODES[exc.code].fatality.ends(idle=self._running.id is None)
            or self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW
        )
        if exc.fatal:
            self._break(exc)
        return exc

    def _break(self, exc: RemoteProtocolError) -> None:
        """Stop trusting the peer's bytes for good."""
        exc.fatal = True
        # The one that is raised leads through its traceback back here, and to all that was received.
        self._fault = exc.anew()
        self._reader.clear()
        self._ours.feed(Input.BREAK)
