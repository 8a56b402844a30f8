"""Every bound of the HTTP side, in one place, and what all its connections share."""

from __future__ import annotations

import hmac
import ipaddress
import itertools
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from attrs import evolve, field, frozen

from uma_trio.http.memory import ClientMemory
from uma_trio.http.pieces import JsonLimits
from uma_trio.observe.log import Log
from uma_trio.service.ask import Door
from uma_trio.service.fair import RunBlocking
from uma_trio.service.served import ServedModel
from uma_trio.service.service import Service
from uma_trio.words import MIB

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_KEYS = 256
_MAX_IDS = MIB


@frozen(kw_only=True)
class Settings:
    """Times in seconds, sizes in bytes.

    `hosts` are the names that a Host header may give besides the loopback's, in lower case and
    without a port; `origins` the web pages that may ask, "localhost" for all of this machine. `keys` are the secrets that open the
    door; without any it is open to whoever can connect. `admin_keys` open it, too, and make an
    operator. With `strict` an unknown model is refused,
    and so is a field that would be ignored. `reasoning_fields` are what a chat's answer calls the
    model's reasoning. `proxies` are the networks of proxies whose X-Forwarded-For is believed.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    admin_keys: tuple[bytes, ...] = field(default=(), repr=False)
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
class Shared:
    """What all connections have in common. `name` is the daemon's in this life, part of ids."""

    settings: Settings
    service: Service
    log: Log
    name: str
    bodies: ClientMemory
    answers: ClientMemory
    started: int  # seconds since the epoch
    #: For bodies: no flood of them keeps other requests from being tokenised.
    run_blocking: RunBlocking
    #: The model that the request names; see :meth:`of`.
    named: ServedModel | None = None
    _numbers: itertools.count[int] = field(factory=lambda: itertools.count(1))

    def limits(self, *, with_ids: bool = False) -> JsonLimits:
        """Return what a body may hold; `with_ids`: besides as many token ids as have a place."""
        context = max(one.room for one in self.service.models) if with_ids else 0
        settings = self.settings
        return JsonLimits(
            values=settings.body_values + min(context, _MAX_IDS), text=settings.max_prompt_bytes
        )

    @property
    def served(self) -> ServedModel:
        """The model that a request is for: the one that it names, or the default one."""
        return self.service.default if self.named is None else self.named

    def of(self, name: str | None) -> Shared:
        """Return the same for a request that names a loaded model.

        Raises:
            Refusal: none of this name is loaded.
        """
        return evolve(self, named=self.service.find(name))

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Shared]:
        """Return the same for a request that names a model, once that is loaded; it stays so until the block ends.

        Raises:
            Refusal: there is none of this name, or it cannot be loaded.
        """
        served = await self.service.ready(name)
        with self.using_loaded(served) as found:
            yield found

    @contextmanager
    def using_loaded(self, served: ServedModel) -> Iterator[Shared]:
        """Return the same for a request of a loaded model, which stays so until the block ends."""
        end = served.uses.begin()
        try:
            yield evolve(self, named=served)
        finally:
            end()

    def each(self) -> tuple[Shared, ...]:
        """Return the same for each model, the default one first."""
        return tuple(evolve(self, named=served) for served in self.service.models)

    def next_number(self) -> int:
        """Return a number that no other request of this daemon's life has."""
        return next(self._numbers)

    @property
    def door(self) -> Door:
        """What is true of every request that comes by HTTP."""
        most = self.settings.max_prompt_bytes
        return Door(max_prompt_bytes=most, option="--http-max-prompt-bytes")


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
