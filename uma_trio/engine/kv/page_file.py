"""Files of saved pages: a file for each page, in one folder of the user's own.

A file is written under another name and renamed, so that it is whole or not there. Its head is authenticated with a
secret of the folder and its cells have a checksum: what was damaged, cut off or copied here from elsewhere is found
out, and nothing of it is used. Names are keyed hashes, so that they say nothing of users, keys or prompts. The layout::

    magic, bytes of JSON u32, tokens u32, bytes of cells u64, CRC-32 of the cells u32
    JSON: namespace, digest of the page before, its end, the seconds to compute the page
    tokens i32
    keyed BLAKE2 hash of all before it, 16 bytes
    cells
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterable
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from attrs import frozen

from uma_trio.backend.base import IntArray, Saved
from uma_trio.engine.kv.pages import StoredFile, digest
from uma_trio.policy.prefix import PAGE

SUFFIX: Final = ".kv"
_TEMPORARY: Final = ".tmp"
_KEY: Final = "secret"
#: A temporary file this old was left by a process that was killed; so was a page without the page before it.
STALE_S: Final = 600.0
_MAGIC: Final = b"umaKV\0\0\1"
_HEAD: Final = struct.Struct("<8sIIQI")
_MAC_BYTES: Final = 16
_SECRET_BYTES: Final = 32
_MOST_JSON: Final = 4096


class Damaged(Exception):
    """A file is not what was written here."""


@frozen(eq=False)
class PageHead:
    """What a file says of its page. `before` is the digest of the page before it, empty for the first."""

    namespace: str
    before: bytes
    start: int
    cost_s: float
    tokens: IntArray

    @property
    def digest(self) -> bytes:
        """The digest of the page, as the trie makes it."""
        return digest(self.before or self.namespace.encode(), self.tokens)

    def packed(self) -> bytes:
        """Return the variable part of the head, before the tokens."""
        return json.dumps([self.namespace, self.before.hex(), self.start, self.cost_s]).encode()


class PageFolder:
    """The folder of all page files. May be used on any thread, and by several processes.

    Raises:
        OSError: it cannot be made, or is not the user's own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(0, "it is not a folder of the user that runs the daemon")
        path.chmod(0o700)
        self._secret = self._own_secret()

    def hash(self, text: bytes) -> str:
        """Return a keyed hash, which tells those without the secret nothing."""
        return self._mac(text).hex()

    def name(self, page: bytes) -> str:
        return self.hash(b"page " + page) + SUFFIX

    def changed(self) -> int:
        """Return when a file was added or removed last. Raises OSError."""
        return self.path.stat().st_mtime_ns

    def names(self) -> set[str]:
        """Return the names of all pages; remove what killed processes left. Raises OSError."""
        names = os.listdir(self.path)
        self.remove(n for n in names if n.endswith(_TEMPORARY) and self.is_stale(n))
        return {name for name in names if name.endswith(SUFFIX)}

    def is_stale(self, name: str) -> bool:
        """Whether a file was written long ago."""
        try:
            return time.time() - (self.path / name).lstat().st_mtime > STALE_S
        except OSError:
            return False

    def write(self, head: PageHead, cells: Saved) -> StoredFile:
        """Write a page. Raises OSError; then nothing is left of it."""
        name, cells = self.name(head.digest), cells.cast("B")
        packed, tokens = head.packed(), head.tokens.astype("<i4").tobytes()
        fixed = _HEAD.pack(_MAGIC, len(packed), len(head.tokens), len(cells), zlib.crc32(cells))
        known = fixed + packed + tokens
        temporary = self.path / f"{os.getpid()}-{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            with _made(temporary) as file:
                file.write(known + self._mac(known))
                file.write(cells)
            temporary.replace(self.path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return StoredFile(name, len(known) + _MAC_BYTES + len(cells))

    def head(self, name: str) -> tuple[PageHead, StoredFile]:
        """Return what a file says of its page. Raises :class:`Damaged`, OSError."""
        with self._opened(name) as file:
            head, _, _ = self._head(file, name)
            return head, StoredFile(name, os.fstat(file.fileno()).st_size)

    def cells(self, name: str) -> Saved:
        """Return the cells in a file. Raises :class:`Damaged`, OSError."""
        with self._opened(name) as file:
            _, n_bytes, checksum = self._head(file, name)
            cells = np.empty(n_bytes, np.uint8)
            if file.readinto(cells.data) != n_bytes or zlib.crc32(cells.data) != checksum:
                raise Damaged
            return cells.data

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                (self.path / name).unlink()
            except OSError:
                continue  # another daemon was first, or the folder is read only

    def _head(self, file: FileIO, name: str) -> tuple[PageHead, int, int]:
        fixed = file.read(_HEAD.size)
        if len(fixed) < _HEAD.size:
            raise Damaged
        magic, n_json, n_tokens, n_bytes, checksum = _HEAD.unpack(fixed)
        if magic != _MAGIC or n_json > _MOST_JSON or not 0 < n_tokens <= PAGE:
            raise Damaged
        rest = file.read(n_json + 4 * n_tokens + _MAC_BYTES)
        known, mac = fixed + rest[:-_MAC_BYTES], rest[-_MAC_BYTES:]
        size = os.fstat(file.fileno()).st_size
        if mac != self._mac(known) or size != len(known) + _MAC_BYTES + n_bytes:
            raise Damaged
        # It is what was written here, so that it has this form.
        namespace, before, start, cost_s = json.loads(rest[:n_json])
        tokens = np.frombuffer(rest[n_json:-_MAC_BYTES], "<i4").astype(np.int32)
        head = PageHead(namespace, bytes.fromhex(before), start, cost_s, tokens)
        if self.name(head.digest) != name:
            raise Damaged
        return head, n_bytes, checksum

    def _mac(self, known: bytes) -> bytes:
        return blake2b(known, key=self._secret, digest_size=_MAC_BYTES).digest()

    def _opened(self, name: str) -> FileIO:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            file = FileIO(os.open(self.path / name, flags), "rb")
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link
                raise Damaged from None
            raise
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
        raise Damaged

    def _own_secret(self) -> bytes:
        path = self.path / _KEY
        temporary = self.path / f"{os.getpid()}-{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            if not path.exists() or path.stat().st_size != _SECRET_BYTES:
                with _made(temporary) as file:
                    file.write(secrets.token_bytes(_SECRET_BYTES))
                if path.exists():  # cut off: what was written with it cannot be read any more
                    temporary.replace(path)
                else:
                    os.link(temporary, path)
        except FileExistsError:
            pass  # another daemon was first
        finally:
            temporary.unlink(missing_ok=True)
        return path.read_bytes()


def _made(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")
