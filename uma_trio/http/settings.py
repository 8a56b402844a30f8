"""The bounds of the HTTP server, and what its connections share."""

from __future__ import annotations

import hmac
import ipaddress
import itertools
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from attrs import field, frozen

from uma_trio.http.memory import ClientMemory
from uma_trio.observe.log import Log
from uma_trio.observe.metrics import Metrics
from uma_trio.service.fair import RunBlocking
from uma_trio.service.loop import Questions, ThreadShare
from uma_trio.words import MIB

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_KEYS = 256


@frozen(kw_only=True)
class Settings:
    """Times in seconds, sizes in bytes.

    `hosts` are the names that a Host header may give besides the loopback's, in lower case and
    without a port; `origins` the web pages that may ask, "localhost" for all of this machine. `keys` are the secrets that open the
    door; without any it is open to whoever can connect. `admin_keys` open it, too, and make an
    operator. With `strict` an unknown model is refused,
    and so is a field that would be ignored. `reasoning_fields` are what a chat's answer calls the
    model's reasoning. Without `keys` only programs of the user `own_user` may come by a port, unless it is None. `proxies` are the networks of proxies whose X-Forwarded-For is believed.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    admin_keys: tuple[bytes, ...] = field(default=(), repr=False)
    own_user: int | None = None
    strict: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    max_prompt_bytes: int = 2 * MIB
    max_connections: int = 256
    max_per_host: int = 64
    head_bytes: int = 16_384
    head_timeout_s: float = 10.0
    # A prompt of nothing but quotes and line ends is twice as long in JSON; one of Cyrillic three
    # times, where a client escapes all that is not ASCII, as Python does.
    body_factor: int = 4
    body_values: int = 32_768
    body_grace_s: float = 10.0
    body_bytes_per_s: int = 16_384
    idle_timeout_s: float = 75.0
    stall_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    # Before the head of a whole answer is sent ahead. Clients give up after 30 s (proxies) to 600 s.
    silence_s: float = 20.0
    # Who is refused while it sends reads the answer only behind what it sends: most of all bodies.
    linger_s: float = 10.0
    linger_quiet_s: float = 1.0
    linger_bytes: int = 64 * MIB
    send_buffer_bytes: int = 8192
    # Whole answers that are not read yet, together. The longest, vectors as JSON, has about 45 MB.
    all_answers_bytes: int = 128 * MIB

    @property
    def max_body_bytes(self) -> int:
        """The longest body of one request."""
        return self.max_prompt_bytes * self.body_factor

    @property
    def all_bodies_bytes(self) -> int:
        """How much of the bodies of all requests together is held in memory."""
        return 4 * self.max_body_bytes

    def bodies(self) -> ClientMemory:
        """Return the memory for bodies on their way in: of one user all but the longest body."""
        return ClientMemory(self.all_bodies_bytes, self.max_body_bytes)

    def answers(self) -> ClientMemory:
        """Return the memory for answers that are not read yet: of one user half of it."""
        return ClientMemory(self.all_answers_bytes, self.all_answers_bytes // 2)


class KeyFileUnusable(Exception):
    """The file of keys cannot be used; the message is one sentence for the operator."""


@frozen(kw_only=True, eq=False)
class ServerContext:
    """What all connections share. `name` is the daemon's in this life, part of ids.

    `run_blocking` runs work on bodies in helper threads, `thread_share` divides trio's thread among clients, and `queries`
    queues requests for figures and lists.
    """

    settings: Settings
    log: Log
    name: str
    bodies: ClientMemory
    answers: ClientMemory
    run_blocking: RunBlocking
    thread_share: ThreadShare
    queries: Questions
    metrics: Metrics
    _numbers: itertools.count[int] = field(factory=lambda: itertools.count(1))

    def next_number(self) -> int:
        """Return a number that no other request of this daemon's life has."""
        return next(self._numbers)


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys in a file, one a line; empty lines and those with a # are left out.

    Raises:
        KeyFileUnusable: others can read it, it cannot be read, or it holds no key.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read(MIB).splitlines()
    except OSError as error:
        raise KeyFileUnusable(f"cannot read the key file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise KeyFileUnusable(f"others can read the key file {path}; run: chmod 600 {path}")
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith(b"#"))
    if not keys or len(keys) > _MAX_KEYS:
        raise KeyFileUnusable(f"{path} holds {len(keys)} keys; write 1 to {_MAX_KEYS}, one a line")
    return keys


def matching(keys: Sequence[bytes], given: bytes) -> int | None:
    """Return which key was given; every one is compared, in a time that tells nothing of it."""
    found: int | None = None
    for index, key in enumerate(keys):
        if hmac.compare_digest(key, given):
            found = index
    return found
