"""Requests and answers, and the wires of the servers: how each frames its bytes.

A stream is timed where it enters this process: each read of a socket is kept with its time
(:mod:`benches.live`), and nothing is parsed until the last stream has ended, so that the client
takes little of a machine that is being measured. Tokens
are counted by what the server says of them (ids, its running count), never by chunks: a server
may put several tokens into one.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

import uma_protocol

Read = tuple[float, bytes]
Event = tuple[float, dict[str, Any]]
# Short, frequent words: one token each, with the space before them, in any BPE vocabulary of
# English text, so that a prompt of n words is one of n tokens.
_TEXT = """
the of and to in is was for that on as with by he it from at his are be this had not but have
which or they one were all she when there can more if out so said what up its about into than them
only other new some could time these two may then do first any my now such like our over man me
even most made after also did many before must through back years where much your way well down
should because each just those people how too little state good very make world still see own work
long get here between both life being under never day same another know while last might us great
old year off come since against go came right used take three house states use again place american
around however home small found thought went say part once high general upon school every does
"""
WORDS = tuple(_TEXT.split())


LINE = 16  # words


def text(words: Sequence[str]) -> str:
    """Return words as a text with lines, as people and programs write it: a token each.

    Each 16th word makes room for a line end, which is a token, too.
    """
    lines = [" ".join(words[at : at + LINE - 1]) for at in range(0, len(words), LINE)]
    return "\n".join(lines) + ("\n" if len(words) % LINE == 0 else "")


class NotServed(Exception):
    """A server refused, broke off, or brought something else than was asked for."""


GREEDY: dict[str, float] = {"temperature": 0}
# min_p is 0.05 at llama-server unless a request sets it.
SAMPLED: dict[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0}


@dataclass(frozen=True)
class Job:
    """One request of fixed length, greedy unless it is to be `sampled`.

    `priority` is the daemon's lane; a server without lanes gets none. With `progress`, a server
    that can is asked to say how much of the prompt it has computed. `speculation`, `cache`, `awaits`
    and `model` are the daemon's fields.
    """

    id: str
    prompt: str
    max_tokens: int
    priority: str | None = None
    progress: bool = False
    sampled: bool = False
    speculation: str | None = None
    cache: str | None = None
    awaits: str | None = None
    model: str | None = None

    @property
    def choosing(self) -> dict[str, float]:
        """How its tokens are chosen, in the words that both kinds of server have for it."""
        return SAMPLED if self.sampled else GREEDY


@dataclass
class Answer:
    """What became of a job. `times` has the moment at which each token was read.

    `progress` has, by moment, how many prompt tokens had been computed, where the server says so.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending the request to reading the first token."""
        return self.times[0] - self.sent if self.times else None

    def check(self, job: Job) -> None:
        """Note an error unless exactly the tokens that were asked for came."""
        if self.error is None and not len(self.times) == self.completion_tokens == job.max_tokens:
            self.error = (
                f"asked for {job.max_tokens} tokens, read {len(self.times)}, "
                f"the server counted {self.completion_tokens}"
            )


class Wire(Protocol):
    """How one kind of server is spoken to."""

    def connect(self) -> socket.socket:
        """Return a connected socket."""

    def request(self, job: Job) -> bytes:
        """Return what asks for `job`."""

    def end_detector(self) -> Callable[[bytes], bool]:
        """Return a function that is fed each read of a stream and says when it was the last.

        End of file is always the last.
        """

    def events(self, reads: Sequence[Read]) -> Iterator[Event]:
        """Yield every event of a stream with the time of the read that completed it."""

    def note(self, answer: Answer, at: float, event: dict[str, Any]) -> None:
        """Add what `event` says to `answer`."""

    def watch(self, interval_ms: int) -> bytes | None:
        """Return what asks for the server's counters at intervals, or None where it cannot."""


class FramedWire:
    """The daemon's own: length-prefixed JSON through a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def connect(self) -> socket.socket:
        """Connect to the daemon."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self.path)
        except OSError:
            sock.close()
            raise
        return sock

    def request(self, job: Job) -> bytes:
        """Return one `generate` frame."""
        names = ("priority", "speculation", "cache", "awaits", "model")
        fields = {name: getattr(job, name) for name in names}
        return frame(
            {
                "type": "generate",
                "id": job.id,
                "max_tokens": job.max_tokens,
                "ignore_eos": True,
                **job.choosing,
                **{name: value for name, value in fields.items() if value is not None},
                "prompt": job.prompt,
            }
        )

    def watch(self, interval_ms: int) -> bytes | None:
        """Ask for the metrics, again and again."""
        return frame({"type": "metrics", "interval_ms": interval_ms})

    def end_detector(self) -> Callable[[bytes], bool]:
        """Look at each frame for the terminal event."""
        reader = uma_protocol.FrameReader()

        def ended(data: bytes) -> bool:
            # Quotes inside of a JSON string are escaped, so no text can look like this.
            kinds = [b'"event":"token"' in payload for payload in payloads(reader, data)]
            return not all(kinds)

        return ended

    def events(self, reads: Sequence[Read]) -> Iterator[Event]:
        """Cut the reads into frames."""
        reader = uma_protocol.FrameReader()
        for at, data in reads:
            for payload in payloads(reader, data):
                yield at, msgspec.json.decode(payload)

    def note(self, answer: Answer, at: float, event: dict[str, Any]) -> None:
        """Count token ids; take the rest from the terminal event."""
        kind = event.get("event")
        if kind == "token":
            answer.times.append(at)
        elif kind == "eos":
            answer.prompt_tokens = event["usage"]["prompt_tokens"]
            answer.completion_tokens = event["usage"]["completion_tokens"]
            if event["reason"] not in ("length", "stop"):
                answer.error = f"{event['reason']} {event.get('code', '')}".strip()
        elif kind == "error":
            answer.error = f"{event['code']}: {event['message']}"


class SseWire:
    """llama-server's own: ``POST /completion`` answered with server-sent events.

    With `lanes` a job's priority is said, as only the daemon understands it.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, lanes: bool = False) -> None:
        self.port = port
        self._address = (host, port)
        self._lanes = lanes

    def connect(self) -> socket.socket:
        """Connect to the server."""
        sock = socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def request(self, job: Job) -> bytes:
        """Return one POST; the connection closes after its answer."""
        body = json.dumps(
            {
                "prompt": job.prompt,
                "n_predict": job.max_tokens,
                "ignore_eos": True,
                **job.choosing,
                "stream": True,
                **({"return_progress": True} if job.progress else {}),
                **({"priority": job.priority} if self._lanes and job.priority else {}),
            }
        ).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {self._address[0]}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def watch(self, interval_ms: int) -> bytes | None:
        """Ask for nothing: each answer has its own progress."""
        return None

    def end_detector(self) -> Callable[[bytes], bool]:
        """Wait for the end of file."""
        return lambda _data: False

    def events(self, reads: Sequence[Read]) -> Iterator[Event]:
        """Take off HTTP, then cut at blank lines. A refusal comes as one event ``{"error": …}``."""
        body = Dechunker()
        rest = b""
        for at, data in reads:
            rest += body.feed(data)
            if body.status not in (None, 200):
                continue
            *whole, rest = rest.split(b"\n\n")
            for block in whole:
                for line in block.split(b"\n"):
                    if line.startswith(b"data: {"):
                        yield at, msgspec.json.decode(line[6:])
        if body.status not in (None, 200):
            yield (
                reads[-1][0],
                {"error": f"HTTP {body.status}: {rest[:200].decode('utf-8', 'replace')}"},
            )

    def note(self, answer: Answer, at: float, event: dict[str, Any]) -> None:
        """Follow the server's running count of tokens."""
        if "error" in event:
            answer.error = str(event["error"])
            return
        if found := event.get("prompt_progress"):
            answer.progress.append((at, found["processed"] - found["cache"]))
        count = event.get("tokens_predicted", 0)
        answer.times.extend([at] * (count - len(answer.times)))
        if event.get("stop"):
            answer.prompt_tokens = event.get("tokens_evaluated")
            answer.completion_tokens = count


class Dechunker:
    """Takes an HTTP/1.1 answer apart as it comes: `status`, and the body without its chunks."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._buffer = b""
        self._chunked = False
        self._left = 0  # of the present chunk, with the line end behind it

    def feed(self, data: bytes) -> bytes:
        """Return what `data` adds to the body."""
        self._buffer += data
        if self.status is None and not self._read_head():
            return b""
        if not self._chunked:
            body, self._buffer = self._buffer, b""
            return body
        return b"".join(self._chunks())

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        self.status = int(head.split(b" ", 2)[1])
        self._chunked = b"transfer-encoding: chunked" in head.lower()
        self._buffer = rest
        return True

    def _chunks(self) -> Iterator[bytes]:
        while self._buffer:
            if self._left > 0:
                part = self._buffer[: self._left]
                self._buffer = self._buffer[self._left :]
                # The last two bytes of what is left are the line end, not the body.
                yield part[: max(0, self._left - 2)]
                self._left -= len(part)
                continue
            size, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                return
            self._buffer = rest
            self._left = int(size, 16) + 2


def frame(message: dict[str, Any]) -> bytes:
    """Return `message` as one frame of the daemon's protocol."""
    return uma_protocol.frame(json.dumps(message).encode())


def payloads(reader: uma_protocol.FrameReader, data: bytes) -> Iterator[bytes]:
    """Feed `data` to `reader` and yield every payload that is complete now."""
    reader.feed(data)
    while (payload := reader.next_payload()) is not None:
        yield payload


def jobs(n: int, prompt_tokens: int, max_tokens: int, seed: str) -> list[Job]:
    """Return `n` jobs whose prompts are all different, the same ones for the same seed."""
    draw = random.Random(seed)
    return [
        Job(f"bench-{i}", " ".join(draw.choices(WORDS, k=prompt_tokens)), max_tokens)
        for i in range(n)
    ]


def read_out(
    wire: Wire, job: Job, sent: float, reads: Sequence[Read], *, whole: bool = True
) -> Answer:
    """Return what `reads` say of a job; if it is not `whole`, fewer tokens are no error."""
    answer = Answer(sent)
    for at, event in wire.events(reads):
        wire.note(answer, at, event)
    if whole:
        answer.check(job)
    return answer


def first_error(answers: Sequence[Answer]) -> str | None:
    """Return the first thing that went wrong, if anything did."""
    return next(itertools.chain((a.error for a in answers if a.error), [None]))


def checked(answers: list[Answer]) -> list[Answer]:
    """Return `answers` as they are. Raises :class:`NotServed` if any went wrong."""
    if error := first_error(answers):
        raise NotServed(error)
    return answers
