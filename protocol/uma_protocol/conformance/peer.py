"""The server under test, as a case sees it: connections, bytes out, frames in."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from uma_protocol.errors import CODES, Code
from uma_protocol.frames import DEFAULT_MAX_FRAME_BYTES

Document = dict[str, Any]


class Violation(Exception):
    """The server broke the rule; the text says what was expected and what it did."""


class Skip(Exception):
    """The case does not apply to this server; the text says why."""


class Case(NamedTuple):
    """One conformance case. `slow` is the number of seconds it waits at least."""

    id: str
    title: str
    run: Callable[[Server], None]
    slow: float = 0.0

    @property
    def rule(self) -> str:
        """The number of its rule in docs/reference/protocol.md."""
        return self.id.rpartition(".")[0]


CASES: dict[str, Case] = {}


def case(id_: str, title: str, slow: float = 0.0) -> Callable[[Callable[[Server], None]], None]:
    """Register the decorated function as a case."""

    def register(run: Callable[[Server], None]) -> None:
        if id_ in CASES:
            raise ValueError(f"two cases are numbered {id_}")
        CASES[id_] = Case(id_, title, run, slow)

    return register


def expect(holds: object, problem: str) -> None:
    """Raise a `Violation` unless something holds."""
    if not holds:
        raise Violation(problem)


def frame(document: Document | bytes) -> bytes:
    """Return a payload, or an object as JSON, behind its length."""
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(payload).to_bytes(4, "little") + payload


def generate(id_: str = "a", **fields: Any) -> Document:
    """Return a short greedy request; `fields` replace its own, and None removes one."""
    request = {"id": id_, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **fields}
    return {name: value for name, value in request.items() if value is not None}


def long(id_: str = "a", **fields: Any) -> Document:
    """Return a request that runs until it is cancelled, as far as other frames of the same write are concerned."""
    return generate(id_, max_tokens=64, ignore_eos=True, **fields)


@dataclass
class Answer:
    """Everything that came of one request, and the events of others in between."""

    tokens: list[Document] = field(default_factory=list)
    ends: list[Document] = field(default_factory=list)
    results: list[Document] = field(default_factory=list)
    """`loading`, `vectors` and `scores`."""
    others: list[Document] = field(default_factory=list)
    eos: Document = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of all tokens and of the end."""
        return "".join(event["text"] for event in [*self.tokens, {"text": "", **self.eos}])


class Peer:
    """A connection to the server under test.

    Args:
        sock: a connected socket, with a timeout.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = b""

    def write(self, data: bytes) -> None:
        """Send bytes. A server that has closed may have sent its reason before, so that is no fault yet."""
        try:
            self._sock.sendall(data)
        except TimeoutError:
            raise Violation("the server does not read") from None
        except OSError:
            return

    def send(self, *documents: Document | bytes) -> None:
        """Send documents as frames, in one write."""
        self.write(b"".join(map(frame, documents)))

    def end(self) -> None:
        """Close the sending half."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def read(self) -> Document | None:
        """Return the next event, or None at the end of the connection."""
        header = self._take(4)
        if header is None:
            return None
        length = int.from_bytes(header, "little")
        expect(
            0 < length <= DEFAULT_MAX_FRAME_BYTES,
            f"the server sent a frame of {length} bytes, header {header!r}",
        )
        payload = self._take(length)
        if payload is None:
            raise Violation(f"the connection ended inside a frame of {length} bytes")
        try:
            event: Document = json.loads(payload.decode("utf-8"))
        except ValueError as exc:
            raise Violation(f"the server sent a payload that is not JSON in UTF-8: {exc}") from None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise Violation(f"the server sent a payload that is no event: {short(event)}")
        return event

    def _take(self, size: int) -> bytes | None:
        """Return so many bytes; None if the connection ends before the first."""
        while len(self._received) < size:
            try:
                data = self._sock.recv(1 << 20)
            except TimeoutError:
                raise Violation(
                    f"the server sent nothing for {self._sock.gettimeout():g} s, and did not close"
                ) from None
            except ConnectionError:
                data = b""
            if not data:
                expect(not self._received, "the connection ended inside a frame")
                return None
            self._received += data
        taken, self._received = self._received[:size], self._received[size:]
        return taken

    def event(self, kind: str) -> Document:
        """Return the next event, which must be of a kind."""
        event = self.read()
        if event is None or event["event"] != kind:
            raise Violation(f"expected {kind}, not {short(event)}")
        return event

    def refusal(self, code: str, *, fatal: bool, id_: str | None = None) -> str:
        """Read the refusal of a document, and the end of the connection if it is fatal; return its message."""
        event = self.event("error")
        check_refusal(event, code, fatal=fatal, id_=id_)
        if fatal:
            self.closed()
        return str(event["message"])

    def closed(self) -> None:
        """Expect the end of the connection, with nothing before it."""
        event = self.read()
        expect(event is None, f"expected the end of the connection, not {short(event)}")

    def answer(self, id_: str = "a") -> Answer:
        """Read the events of a request to its `eos`, and those of others in between."""
        answer = Answer()
        while True:
            event = self.read()
            if event is None:
                raise Violation(f"the connection ended before the eos of {id_!r}")
            kind = event["event"]
            if kind == "eos":
                expect(event.get("id") == id_, f"expected the eos of {id_!r}, not {short(event)}")
                answer.eos = event
                return answer
            if kind in ("error", "ok", "sessions", "explain", "prefix", "metrics"):
                expect(not event.get("fatal"), f"expected the eos of {id_!r}, not {short(event)}")
                answer.others.append(event)
                continue
            expect(event.get("id") == id_, f"expected events of {id_!r}, not {short(event)}")
            (
                answer.tokens
                if kind == "token"
                else answer.ends
                if kind == "end"
                else answer.results
            ).append(event)

    def serves(self) -> None:
        """Expect that the connection is still served."""
        self.send({"type": "sessions"})
        self.event("sessions")


def check_refusal(event: Document, code: str, *, fatal: bool, id_: str | None = None) -> None:
    """Check the fields of an `error` event against its code and the table of codes."""
    found = event.get("code")
    expect(found == code, f"expected {code}, not {short(event)}")
    expect(
        event.get("fatal") is fatal,
        f"expected {code} with fatal {fatal}, not {event.get('fatal')!r}",
    )
    retryable = CODES[Code(code)].retryable
    expect(
        event.get("retryable") is retryable,
        f"expected {code} with retryable {retryable}, not {event.get('retryable')!r}",
    )
    expect(
        isinstance(event.get("message"), str) and event["message"], f"{code} came without a message"
    )
    expect(event.get("id") == id_, f"expected {code} with id {id_!r}, not {event.get('id')!r}")


def short(event: object) -> str:
    """Return an event for a message."""
    if event is None:
        return "the end of the connection"
    text = json.dumps(event, ensure_ascii=False)
    return text if len(text) <= 300 else text[:300] + "..."


class Server:
    """The server under test.

    Args:
        address: the path of a Unix socket, or `tcp:HOST:PORT`.
        token: what `hello` shows on a TCP port.
        timeout_s: how long a case waits for an event, or for the end of a connection.
    """

    def __init__(self, address: str, token: str | None = None, timeout_s: float = 10.0) -> None:
        self.address = address
        self.token = token
        self.timeout_s = timeout_s
        self._open: list[Peer] = []
        self._numbers = count()

    @property
    def is_tcp(self) -> bool:
        """Whether it listens on a TCP port."""
        return self.address.startswith("tcp:")

    def dial(self) -> Peer:
        """Open a connection and send nothing."""
        if self.is_tcp:
            host, _, port = self.address.removeprefix("tcp:").rpartition(":")
            sock = socket.create_connection((host.strip("[]"), int(port)))
        else:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self.address)
            except OSError:
                sock.close()
                raise
        sock.settimeout(self.timeout_s)
        peer = Peer(sock)
        self._open.append(peer)
        return peer

    def connect(self, *documents: Document | bytes) -> Peer:
        """Open a connection, show the token where one is needed, and send documents."""
        peer = self.dial()
        hello = [{"type": "hello", "token": self.token}] if self.is_tcp and self.token else []
        if hello or documents:
            peer.send(*hello, *documents)
        return peer

    def ask(self, **fields: Any) -> Answer:
        """Return the answer to a short greedy request on a connection of its own."""
        id_ = f"ask-{next(self._numbers)}"
        return self.connect(generate(id_, **fields)).answer(id_)

    def refuses(
        self, document: Document | bytes, code: str, *, fatal: bool = True, id_: str | None = None
    ) -> str:
        """Expect a refusal of a document on a connection of its own, and return the message."""
        return self.connect(document).refusal(code, fatal=fatal, id_=id_)

    def run(self, case_: Case) -> tuple[str, str, float]:
        """Run a case. Returns its outcome (`passed`, `failed` or `skipped`), why, and the seconds it took."""
        began = time.perf_counter()
        try:
            case_.run(self)
            outcome, why = "passed", ""
        except Skip as exc:
            outcome, why = "skipped", str(exc)
        except Violation as exc:
            outcome, why = "failed", str(exc)
        except (LookupError, TypeError, ValueError, AttributeError) as exc:
            outcome, why = "failed", f"an event lacks what the rule promises: {exc!r}"
        except OSError as exc:
            outcome, why = "failed", f"no connection: {exc}"
        finally:
            for peer in self._open:
                peer.close()
            self._open.clear()
        return outcome, why, time.perf_counter() - began
