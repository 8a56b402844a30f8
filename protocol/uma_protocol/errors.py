"""The error codes of the protocol and the two exceptions that carry them.

`CODES` declares for each code its meaning, whether it ends the connection and what the receiver
should do next. The daemon, the clients and the documentation read this table; code uses the members
of `Code` and never their strings.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Code(StrEnum):
    """The code of a fault as it is sent; `CODES` has the meaning of each."""

    E_PROTO_001 = "E_PROTO_001"
    E_PROTO_002 = "E_PROTO_002"
    E_PROTO_003 = "E_PROTO_003"
    E_PROTO_004 = "E_PROTO_004"
    E_PROTO_005 = "E_PROTO_005"
    E_PROTO_006 = "E_PROTO_006"
    E_PROTO_007 = "E_PROTO_007"
    E_AUTH_001 = "E_AUTH_001"
    E_AUTH_002 = "E_AUTH_002"
    E_AUTH_003 = "E_AUTH_003"
    E_LIMIT_001 = "E_LIMIT_001"
    E_LIMIT_002 = "E_LIMIT_002"
    E_LIMIT_003 = "E_LIMIT_003"
    E_LIMIT_004 = "E_LIMIT_004"
    E_LIMIT_005 = "E_LIMIT_005"
    E_LIMIT_006 = "E_LIMIT_006"
    E_LIMIT_007 = "E_LIMIT_007"
    E_IO_001 = "E_IO_001"
    E_MODEL_001 = "E_MODEL_001"
    E_MODEL_002 = "E_MODEL_002"
    E_MODEL_003 = "E_MODEL_003"
    E_RUNTIME_001 = "E_RUNTIME_001"
    E_RUNTIME_002 = "E_RUNTIME_002"
    E_RUNTIME_003 = "E_RUNTIME_003"
    E_RUNTIME_004 = "E_RUNTIME_004"
    E_RUNTIME_005 = "E_RUNTIME_005"
    E_RUNTIME_006 = "E_RUNTIME_006"
    E_LIFECYCLE_001 = "E_LIFECYCLE_001"


class Fatality(Enum):
    """Whether a code ends the connection it is sent on."""

    ALWAYS = "yes"
    # A simple client waits for `eos` or end of file only. A refused request gets no `eos`, so the
    # connection has to end, or that client waits for ever.
    WHEN_IDLE = "when nothing runs"
    NEVER = "no"
    # Not an `error` event at all: the code of an `eos` whose reason is `error`.
    TERMINAL = "no, it comes in `eos`"

    def ends(self, *, idle: bool) -> bool:
        """Whether a fault of this kind is fatal; `idle`: no request runs on the connection."""
        return self is Fatality.ALWAYS or (self is Fatality.WHEN_IDLE and idle)


class CodeInfo(NamedTuple):
    """What is declared about one code."""

    title: str
    fatality: Fatality
    retryable: bool
    action: str
    """What whoever receives the code should do next."""


_ALWAYS, _WHEN_IDLE = Fatality.ALWAYS, Fatality.WHEN_IDLE
_NEVER, _TERMINAL = Fatality.NEVER, Fatality.TERMINAL

CODES: Mapping[Code, CodeInfo] = MappingProxyType(
    {
        Code.E_PROTO_001: CodeInfo(
            "invalid document", _WHEN_IDLE, False, "send one UTF-8 JSON object per frame"
        ),
        Code.E_PROTO_002: CodeInfo(
            "broken frame",
            _ALWAYS,
            False,
            "send the payload's length as four bytes, little-endian, then exactly that many bytes",
        ),
        Code.E_PROTO_003: CodeInfo(
            "bad request", _WHEN_IDLE, False, "correct the field that the message names"
        ),
        Code.E_PROTO_004: CodeInfo(
            "busy: a request already runs on this connection",
            _NEVER,
            True,
            "wait for its eos, or open another connection",
        ),
        Code.E_PROTO_005: CodeInfo(
            "no running request has that id",
            _NEVER,
            False,
            "nothing: the request has already ended",
        ),
        Code.E_PROTO_006: CodeInfo(
            "frame too slow", _ALWAYS, True, "reconnect and send each frame in one go"
        ),
        Code.E_PROTO_007: CodeInfo(
            "unsupported request", _NEVER, False, "ask for a type that this daemon offers"
        ),
        Code.E_AUTH_001: CodeInfo(
            "peer not allowed", _ALWAYS, False, "run client and daemon as the same user"
        ),
        Code.E_AUTH_002: CodeInfo(
            "only the user that runs the daemon may ask for this",
            _NEVER,
            False,
            "ask as the user that runs the daemon",
        ),
        Code.E_AUTH_003: CodeInfo(
            "no valid token",
            _ALWAYS,
            False,
            "send hello first, with the token in the daemon's --token-file",
        ),
        Code.E_LIMIT_001: CodeInfo(
            "prompt too large", _WHEN_IDLE, False, "shorten the prompt or raise the daemon's limit"
        ),
        Code.E_LIMIT_002: CodeInfo(
            "too many connections", _ALWAYS, True, "close an idle connection, then try again"
        ),
        Code.E_LIMIT_003: CodeInfo(
            "queue full", _WHEN_IDLE, True, "try again after retry_after_ms"
        ),
        Code.E_LIMIT_004: CodeInfo(
            "prompt and max_tokens exceed the context",
            _WHEN_IDLE,
            False,
            "shorten the prompt, lower max_tokens or raise the daemon's context",
        ),
        Code.E_LIMIT_005: CodeInfo(
            "answer too long for a frame",
            _TERMINAL,
            False,
            "ask with stream true, or for fewer max_tokens",
        ),
        Code.E_LIMIT_006: CodeInfo("connection idle", _ALWAYS, True, "reconnect when needed"),
        Code.E_LIMIT_007: CodeInfo(
            "the schema or grammar takes too much time or memory",
            _TERMINAL,
            False,
            "simplify the schema or grammar, or raise the daemon's --shape-cpu or --shape-memory",
        ),
        Code.E_IO_001: CodeInfo(
            "write stalled", _ALWAYS, True, "read events as they come, then try again"
        ),
        Code.E_MODEL_001: CodeInfo(
            "model not loaded", _WHEN_IDLE, True, "wait until the model is loaded, then try again"
        ),
        Code.E_MODEL_002: CodeInfo(
            "not supported by the loaded model",
            _WHEN_IDLE,
            False,
            "omit model, or name the loaded model and use the features that it supports",
        ),
        Code.E_MODEL_003: CodeInfo(
            "the model is in use", _NEVER, True, "end the requests that use it, then try again"
        ),
        Code.E_RUNTIME_001: CodeInfo("decode failed", _TERMINAL, True, "send the request again"),
        Code.E_RUNTIME_002: CodeInfo(
            "no room in the KV cache", _TERMINAL, True, "try again, or with a smaller max_tokens"
        ),
        Code.E_RUNTIME_003: CodeInfo(
            "the model produced numbers that are not finite",
            _TERMINAL,
            False,
            "check the model file; another prompt may work",
        ),
        Code.E_RUNTIME_004: CodeInfo(
            "the engine stopped", _ALWAYS, True, "reconnect once the daemon has restarted"
        ),
        Code.E_RUNTIME_005: CodeInfo(
            "no token fits the schema or grammar",
            _TERMINAL,
            False,
            "simplify the schema or grammar, or remove logit_bias",
        ),
        Code.E_RUNTIME_006: CodeInfo(
            "internal error in this request; other requests are not affected",
            _TERMINAL,
            False,
            "report the error with the daemon's log; another request may work",
        ),
        Code.E_LIFECYCLE_001: CodeInfo(
            "the daemon is stopping", _ALWAYS, True, "reconnect once the daemon has restarted"
        ),
    }
)
"""What every code means, in the order in which the documentation lists them."""


class ProtocolError(Exception):
    """Something happened that the protocol does not allow. Catch it to catch both kinds.

    It cannot be raised itself: somebody is at fault, and the two subclasses say who.

    Attributes:
        code: the wire code that describes the fault best.
        message: one sentence for a person; it never contains text of a prompt.
        field: the field at fault as a path such as `slo.target_ttft_ms`, if there is one.
        request_id: the id of the request at fault, if one could be read.
        fatal: whether the connection is over. If not, it is as usable as before.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        request_id: str | None = None,
        fatal: bool = False,
    ) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError: it matters who erred")
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.request_id = request_id
        self.fatal = fatal

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class LocalProtocolError(ProtocolError):
    """You asked this side to do something that the protocol does not allow.

    With `fatal` false nothing has happened: the event was refused for its content, before any state
    changed. With `fatal` true it was illegal in the present state and this side is in ERROR.
    """


class RemoteProtocolError(ProtocolError):
    """The peer did something that the protocol does not allow.

    A server answers it with `Connection.send(connection.error_event(exc))`. With `fatal` false the
    offending document is dropped and everything else goes on, a running request included.
    """

    def anew(self, message: str | None = None) -> RemoteProtocolError:
        """Return the same fault, which was never raised and so refers to nobody's frames."""
        return RemoteProtocolError(
            self.code,
            message or self.message,
            field=self.field,
            request_id=self.request_id,
            fatal=self.fatal,
        )
