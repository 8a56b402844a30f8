"""What a hostile program does to a daemon: attacks by name, done by a process of their own.

    python -m benches.attackers PORT SOCKET [UID]

reads lines ``NAME SECONDS`` and answers each, when the time is over, with a line of JSON: how many
requests were answered with which status. With UID it gives up its rights first, so that the daemon takes it for
another user; the framed socket admits only the daemon's own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benches.clients import WORDS

NOBODY = 65534


@dataclass
class Target:
    """A daemon, until when it is attacked, and what it answered."""

    port: int
    path: str
    until: float
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def left_s(self) -> float:
        """The time that is left, at least a little."""
        return max(0.01, self.until - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.until

    def connect(self, *, by_socket: bool = False) -> socket.socket:
        """Return a connection, which waits no longer than the time that is left."""
        address: str | tuple[str, int]
        if by_socket:
            sock, address = socket.socket(socket.AF_UNIX), self.path
        else:
            sock, address = socket.socket(), ("127.0.0.1", self.port)
        sock.settimeout(self.left_s)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock


Act = Callable[[Target, int], None]
"""Does something once; is given a number that no other has. OSErrors end it, not the attack."""


@dataclass(frozen=True)
class Attack:
    """`width` threads that do the same again and again. `by_socket` is the framed socket."""

    act: Act
    width: int = 1
    by_socket: bool = False

    def run(self, target: Target) -> None:
        """Attack until the time is over."""
        numbers = itertools.count(random.randrange(1 << 30))

        def again() -> None:
            while not target.over:
                try:
                    self.act(target, next(numbers))
                except TimeoutError:
                    target.answers["waits"] += 1
                except OSError as error:
                    target.answers[type(error).__name__] += 1
                    time.sleep(0.02)

        threads = [threading.Thread(target=again, daemon=True) for _ in range(self.width)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# --- what is sent ---


def _head(path: str, length: int, method: str = "POST") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def posts(path: str, body: Callable[[int], Any], *, method: str = "POST") -> Act:
    """Send a body and read the answer to its end."""

    def act(target: Target, n: int) -> None:
        made = body(n)
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        with target.connect() as sock:
            sock.sendall(_head(path, len(data), method) + data)
            first = sock.recv(65536)
            target.answers[first[9:12].decode() or "closed"] += 1
            while not target.over and sock.recv(65536):
                sock.settimeout(target.left_s)

    return act


def gets(*paths: str) -> Act:
    """Ask questions on one connection, one after another."""

    def act(target: Target, n: int) -> None:
        with target.connect() as sock:
            for path in itertools.cycle(paths):
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                answer = sock.recv(65536)
                target.answers[answer[9:12].decode() or "closed"] += 1
                if not answer or target.over:
                    return

    return act


def frames(*messages: Callable[[int], Mapping[str, Any]], read: bool = True) -> Act:
    """Send frames in one write; read until the connection has told a terminal event."""

    def act(target: Target, n: int) -> None:
        with target.connect(by_socket=True) as sock:
            written = [json.dumps(message(n)).encode() for message in messages]
            sock.sendall(b"".join(struct.pack("<I", len(each)) + each for each in written))
            if not read:
                return
            incoming = sock.makefile("rb")
            while not target.over and (head := incoming.read(4)):
                event = json.loads(incoming.read(struct.unpack("<I", head)[0]))
                if event["event"] not in ("token", "end"):
                    target.answers[str(event.get("code") or event["event"])] += 1
                    return

    return act


def holds(opening: bytes, count: int) -> Act:
    """Open many connections, send each the same, read nothing, and keep them until the time is over."""

    def act(target: Target, n: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    sock = stack.enter_context(target.connect())
                    sock.sendall(opening)
                    target.answers["opened"] += 1
            time.sleep(target.left_s)

    return act


def pours(opening: bytes, block: bytes) -> Act:
    """Send an opening, and then the same block for as long as the daemon reads; read answers beside that."""

    def act(target: Target, n: int) -> None:
        with target.connect() as sock:
            reader = threading.Thread(target=_drain, args=(sock,), daemon=True)
            reader.start()
            sock.sendall(opening)
            while not target.over:
                sock.sendall(block)
                target.answers["blocks"] += 1

    return act


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass


def leaves(path: str, body: Callable[[int], Any], after_s: float = 0.0) -> Act:
    """Send a request and close the connection, at once or after a while."""

    def act(target: Target, n: int) -> None:
        data = json.dumps(body(n)).encode()
        with target.connect() as sock:
            sock.sendall(_head(path, len(data)) + data)
            if after_s:
                time.sleep(min(after_s, target.left_s))
        target.answers["left"] += 1

    return act


def words(n: int, length: int) -> str:
    """Return a text of so many tokens that no other number has."""
    chosen = random.Random(n)
    return " ".join(chosen.choice(WORDS) for _ in range(length))


# --- the bodies ---

_CHAT, _COMPLETIONS, _COMPLETION = "/v1/chat/completions", "/v1/completions", "/completion"
_USER = [{"role": "user", "content": "hi"}]
_PRIMES = [p for p in range(9001, 9973, 2) if all(p % d for d in range(3, 100, 2))]


def _completion(**more: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 5, **more}


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": _USER, "max_tokens": 5, **more}


def multiples(n: int) -> dict[str, Any]:
    """Return a schema that takes minutes to compile; each number has another."""
    one, other = random.Random(n).sample(_PRIMES, 2)
    return {"allOf": [{"multipleOf": one}, {"multipleOf": other}]}


def repeats(n: int) -> str:
    """Return an expression of a few bytes whose matcher takes 100 MB."""
    return f"a{{{4_000_000_000 - n % 1_000_000}}}"


def line_ends(n: int) -> str:
    """Return a grammar that is nothing but line ends."""
    return "root ::= a\n" + "\n" * (16_000 + n % 200)


_RULES = (
    's ::= s s s s | s s s | s s | "a"',
    's ::= s s | "a" | "aa" | "aaa" | "aaaa" | ""',
    's ::= t s t | s t | t\nt ::= s s | "a" | "b"',
    "s ::= (s s)* | [a-c] s [a-c] | [a-c]+",
    's ::= x y x | y x y | "a"\nx ::= s | s s | "a"+\ny ::= s | x | "a"*',
    's ::= s "a" s | s "a" | "a" s | "a"',
)


def ambiguous(n: int) -> str:
    """Return a grammar that can be read in ever more ways the longer its text is."""
    rules = _RULES[n % len(_RULES)]
    letter = "defghijk"[n // len(_RULES) % 8]
    return f'root ::= s "{letter}"*\n{rules}'


def _growing(n: int) -> dict[str, Any]:
    ends = {str(token): -100 for token in range(4)}
    return _completion(prompt="aaaa", max_tokens=300, temperature=1, seed=n, logit_bias=ends,
                       grammar=ambiguous(n))  # fmt: skip


def _dear(n: int) -> dict[str, Any]:
    return _completion(json_schema={"enum": ["a" * (59_000 + n % 1000)]})


def _tools(n: int, count: int, patterns: int) -> list[dict[str, Any]]:
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-{chr(98 + i % 24)}]{{1,{n % 50 + i % 9 + 2}}}$"}
                  for i in range(patterns)}  # fmt: skip
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": f"t{i}", "parameters": parameters}}
            for i in range(count)]  # fmt: skip


def _responses(n: int, schema: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "name": "x", "schema": schema}
    return {"input": "hi", "max_output_tokens": 16, "text": {"format": shape}}


def _messages_tool(n: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": multiples(n)}, "required": ["x"]}
    tool = {"name": "t", "description": "t", "input_schema": schema}
    return {"messages": _USER, "max_tokens": 16, "model": "m", "tools": [tool],
            "tool_choice": {"type": "tool", "name": "t"}}  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value, value] if depth < 12 else [value]
    return value


_LONG = b'{"prompt":[%b1]}' % (b"5," * 4_000_000)
_STREAM = {"prompt": "Once", "n_predict": 600, "stream": True, "ignore_eos": True, "n_probs": 5}


def _generate(n: int, **more: Any) -> dict[str, Any]:
    return {"type": "generate", "id": f"a{n}", "prompt": "a", "max_tokens": 5, **more}


_CHUNKED = (
    f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
).encode()
_NOWHERE = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"


def _with_head(body: Any, path: str) -> bytes:
    data = json.dumps(body).encode()
    return _head(path, len(data)) + data


SHAPES: Mapping[str, Attack] = {
    "multipleOf": Attack(posts(_COMPLETIONS, lambda n: _completion(json_schema=multiples(n))), 4),
    "multipleOf, response_format": Attack(
        posts(_CHAT, lambda n: _chat(response_format={"type": "json_schema", "json_schema": {
            "name": "x", "schema": multiples(n)}})), 4),
    "multipleOf, a tool": Attack(
        posts(_CHAT, lambda n: _chat(tool_choice="required", tools=[{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {"type": "object", "required": ["x"], "properties": {
                "x": multiples(n)}}}}])), 4),
    "multipleOf, Responses": Attack(posts("/v1/responses", lambda n: _responses(n, multiples(n))), 4),
    "multipleOf, Messages": Attack(posts("/v1/messages", _messages_tool), 4),
    "multipleOf, socket": Attack(frames(lambda n: _generate(n, schema=multiples(n))), 4, by_socket=True),
    "a{4000000000}": Attack(posts(_COMPLETIONS, lambda n: _completion(guided_regex=repeats(n))), 2),
    "a{4000000000}, socket": Attack(frames(lambda n: _generate(n, regex=repeats(n))), 2, by_socket=True),
    "16 KB of line ends": Attack(posts(_COMPLETIONS, lambda n: _completion(grammar=line_ends(n))), 2),
    "16 KB of line ends, socket": Attack(frames(lambda n: _generate(n, grammar=line_ends(n))), 2, by_socket=True),
    "ambiguous grammars": Attack(posts(_COMPLETIONS, _growing), 3),
    "ambiguous grammars, socket": Attack(
        frames(lambda n: _generate(n, grammar=ambiguous(n), max_tokens=300, temperature=1.0)),
        3, by_socket=True),
    "an enum of 60 KB": Attack(posts(_COMPLETIONS, _dear), 2),
    "128 tools, 200 patterns": Attack(
        posts(_CHAT, lambda n: _chat(tools=_tools(n, 128, 200), tool_choice="required")), 2),
}  # fmt: skip

BODIES: Mapping[str, Attack] = {
    "256 KB with pieces": Attack(
        posts("/tokenize", lambda n: {"content": "ab " * 87_000, "with_pieces": True}), 4),
    "2 MB to tokenise": Attack(posts("/tokenize", lambda n: {"content": "ab " * 690_000}), 4),
    "32,000 ids": Attack(posts("/detokenize", lambda n: {"tokens": [300] * 32_000}), 4),
    "8 MB of ids": Attack(posts(_COMPLETIONS, lambda n: _LONG), 2),
    "16,000 lists": Attack(posts(_COMPLETIONS, lambda n: _completion(x=[[]] * 16_000)), 4),
    "30,000 names": Attack(
        posts(_COMPLETIONS, lambda n: _completion(**{f"x{i}": 1 for i in range(30_000)})), 2),
    "8,192 messages": Attack(posts(_CHAT, lambda n: {"messages": _USER * 8192, "max_tokens": 1}), 2),
    "8,192 messages, /apply-template": Attack(posts("/apply-template", lambda n: {"messages": _USER * 8192}), 2),
    "8,192 items, Responses": Attack(posts("/v1/responses", lambda n: {"input": _USER * 8192}), 2),
    "5,000 turns, Messages": Attack(
        posts("/v1/messages", lambda n: {"model": "m", "max_tokens": 1, "messages": _USER * 5000}), 2),
    "nested template arguments": Attack(
        posts("/apply-template", lambda n: {"messages": _USER, "chat_template_kwargs": {
            "a": _nested(8), "b": _nested(8), "c": _nested(60)}}), 4),
    "1,024 biases of texts": Attack(
        posts(_COMPLETION, lambda n: {"prompt": "a", "n_predict": 1, "logit_bias": [
            [f"word{i}" * 20, 1] for i in range(1024)]}), 2),
    "48 KB frames": Attack(
        frames(lambda n: _generate(n, prompt="\\n\u00e9" * 6_000)), 4, by_socket=True),
}  # fmt: skip

FLOODS: Mapping[str, Attack] = {
    "closed-loop clients": Attack(
        posts(_COMPLETIONS, lambda n: _completion(prompt=words(n, 60), max_tokens=60, ignore_eos=True)), 8),
    "64 clients of one token": Attack(
        posts(_COMPLETIONS, lambda n: _completion(prompt=words(n, 8), max_tokens=1)), 64),
    "long prompts": Attack(
        posts(_COMPLETIONS, lambda n: _completion(prompt=words(n, 900), max_tokens=1)), 4),
    "n = 8 with probabilities": Attack(
        posts(_COMPLETIONS, lambda n: _completion(prompt=words(n, 20), n=4, logprobs=5, max_tokens=50)), 2),
    "questions": Attack(gets("/metrics", "/slots", "/props", "/v1/models"), 16),
    "64 KB of query": Attack(gets("/health?" + "a&" * 4000), 8),
    "questions, socket": Attack(frames(lambda _n: {"type": "explain", "ticks": 1000}), 8, by_socket=True),
    "cancel storm": Attack(leaves(_COMPLETIONS, lambda n: _completion(prompt=words(n, 200), max_tokens=50)), 16),
    "cancel storm after 50 ms": Attack(
        leaves(_COMPLETIONS, lambda n: _completion(prompt=words(n, 200), max_tokens=50, stream=True), 0.05), 16),
    "cancelled in one write, socket": Attack(
        frames(_generate, lambda n: {"type": "cancel", "id": f"a{n}"}), 16, by_socket=True),
    "500 idle connections": Attack(holds(b"", 500)),
    "100 slow heads": Attack(holds(b"GET / HTTP/1.1\r\nHost: loc", 100)),
    "40 half bodies": Attack(holds(_head(_COMPLETIONS, 1_000_000) + b'{"prompt":"' + b"a" * 100_000, 40)),
    "chunks of a byte": Attack(pours(_CHUNKED, b"1\r\n \r\n" * 10_000), 4),
    "requests in one write": Attack(pours(b"", _NOWHERE * 2000), 4),
    "4,000 lines in a head": Attack(gets("/health HTTP/1.1\r\n" + "a:\r\n" * 3900 + "b: "), 4),
    "128 answers": Attack(posts(_COMPLETIONS, lambda n: _completion(n=128)), 4),
    "4 half bodies of 8 MB": Attack(
        holds(_head(_COMPLETIONS, 8 << 20) + b'{"prompt":"' + b" " * 8_388_000, 4)),
    "30 unread answers of 2 MB": Attack(
        holds(_with_head({"content": '"\n' * 450_000}, "/tokenize"), 30)),
    "6 readers that stop": Attack(holds(_with_head(_STREAM, _COMPLETION), 6)),
    "300 socket connections": Attack(frames(lambda _n: {"type": "sessions"}), 300, by_socket=True),
}  # fmt: skip

ATTACKS: Mapping[str, Attack] = {**SHAPES, **BODIES, **FLOODS}


def main(arguments: Sequence[str]) -> None:
    """Do what the lines of the input name."""
    port, path, *uid = arguments
    if uid:
        os.setgroups([])
        os.setgid(int(uid[0]))
        os.setuid(int(uid[0]))
    print("ready", flush=True)
    for line in sys.stdin:
        name, _, seconds = line.strip().rpartition(" ")
        target = Target(int(port), path, time.monotonic() + float(seconds))
        ATTACKS[name].run(target)
        print(json.dumps(target.answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
