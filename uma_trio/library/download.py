"""Fetching files whole: resumed where they were cut, and hashed while they are written.

A file gets its name only when all its bytes are there and their SHA-256 is right. A process that is killed leaves
``.incomplete`` files, from which the next one goes on.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, Final

from uma_trio.library.hub import Hub, HubFile, WantedFiles
from uma_trio.library.hub_cache import CachedRepository
from uma_trio.library.reference import MAIN, PullFailed

_CHUNK: Final = 1 << 20
# Attempts in a row that bring no byte which was not there before; each waits twice as long as the one before.
_FRUITLESS: Final = 6
_FIRST_PAUSE_S: Final = 0.5
_RANGE: Final = re.compile(r"bytes (\d+)-")
# What a disk says that has no room or fails; everything else may be the network's.
_DISK: Final = frozenset({errno.EIO, errno.EFBIG, errno.ENOSPC, errno.EROFS, errno.EDQUOT})
# Left free on the disk.
_SPARE_BYTES: Final = 256 << 20

Progress = Callable[[int, int], None]  # bytes that are there, of how many


class Download:
    """Fetches the files of one model into the cache.

    `progress` is called about once a MiB. `pause` waits between attempts.
    """

    def __init__(
        self,
        hub: Hub,
        repository: str,
        cache: CachedRepository,
        progress: Progress,
        pause: Callable[[float], None] = time.sleep,
        revision: str = MAIN,
    ) -> None:
        self._hub = hub
        self._repository = repository
        self._cache = cache
        self._progress = progress
        self._pause = pause
        self._revision = revision
        self._before = self._total = 0

    def fetch(self, wanted: WantedFiles) -> Path:
        """Fetch what is missing and return the model's first file. All parts come to light together.

        Raises:
            PullFailed: there is no room, the hub refuses, does not answer, or sends other bytes twice. What
                was written stays, and the next call goes on from there, unless its bytes were wrong.
        """
        self._total = wanted.n_bytes
        commit = self._hub.commit(self._repository, wanted.files[0].path, self._revision)
        names = {file.path: self._blob_name(file) for file in wanted.files}
        try:
            self._check_room(wanted, names)
            for file in wanted.files:
                self._fetch(file, self._cache.blob(names[file.path]))
                self._before += file.size
            places = [self._cache.put(commit, path, name) for path, name in names.items()]
            if self._revision == MAIN or commit != self._revision:
                self._cache.set_ref(self._revision, commit)
        except OSError as error:
            raise PullFailed(f"{error.filename or self._cache.folder}: {error.strerror}") from error
        return places[0]

    def _blob_name(self, file: HubFile) -> str:
        if not file.sha256:
            raise PullFailed(
                f"the hub gives no SHA-256 for {file.path}, so that it cannot be checked; fetch it by hand"
            )
        return file.sha256

    def _check_room(self, wanted: WantedFiles, names: dict[str, str]) -> None:
        """Refuse before the first byte what the disk cannot hold."""
        blobs = self._cache.folder / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        there = sum(
            _size_of(blobs / name) + _size_of(_incomplete(blobs / name)) for name in names.values()
        )
        needed, free = wanted.n_bytes - there, shutil.disk_usage(blobs).free
        if needed + _SPARE_BYTES > free > 0 and needed > 0:
            raise PullFailed(
                f"{needed / 1e9:.1f} GB are to be fetched and the disk of {blobs} has {free / 1e9:.1f} GB free;"
                " free some, set HF_HUB_CACHE to a folder on another disk, or choose a smaller quantisation"
            )

    def _fetch(self, file: HubFile, blob: Path) -> None:
        if _size_of(blob) == file.size and blob.exists():
            self._progress(self._before + file.size, self._total)
            return
        partial = _incomplete(blob)
        for last in (False, True):
            with partial.open("a+b") as written:
                try:
                    fcntl.flock(written, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise PullFailed(f"another process fetches {file.path}; wait for it") from None
                digest = self._write(file, written)
                if digest == file.sha256:
                    written.flush()
                    os.fsync(written.fileno())
                    partial.replace(blob)
                    return
            partial.unlink()
            if last:
                raise PullFailed(
                    f"{file.path} came with other bytes than the hub says, twice (SHA-256 {digest[:12]}… and not"
                    f" {file.sha256[:12]}…); nothing of it was kept: try again later, or another HF_ENDPOINT"
                )

    def _write(self, file: HubFile, written: BinaryIO) -> str:
        """Bring `written` to the file's size; return the SHA-256 of what is in it then."""
        digest = hashlib.sha256()
        written.seek(0)
        while chunk := written.read(_CHUNK):
            digest.update(chunk)
        fruitless, furthest = 0, written.tell()
        while (begin := written.tell()) < file.size:
            self._progress(self._before + begin, self._total)
            why = self._append(file, written, digest, begin)
            if written.tell() == file.size:
                break
            if written.tell() == 0 and begin:
                digest = hashlib.sha256()  # the server does not resume: from the beginning
            # A server that does not resume begins again and again, and may always end at the same byte.
            fruitless = 0 if written.tell() > furthest else fruitless + 1
            furthest = max(furthest, written.tell())
            if fruitless >= _FRUITLESS:
                raise PullFailed(
                    f"{file.path} does not come ({why}); what is there is kept: try again later"
                )
            self._pause(_FIRST_PAUSE_S * 2**fruitless)
        self._progress(self._before + written.tell(), self._total)
        return digest.hexdigest() if written.tell() == file.size else ""

    def _append(self, file: HubFile, written: BinaryIO, digest: hashlib._Hash, begin: int) -> str:
        """Write what one answer brings; return why it ended early."""
        try:
            with self._hub.open(self._repository, file.path, begin, self._revision) as answer:
                if begin and not _resumes(answer, begin):
                    written.seek(0)
                    written.truncate()
                    return "the server does not resume"
                while (missing := file.size - written.tell()) > 0:
                    chunk = answer.read(min(_CHUNK, missing))
                    if not chunk:
                        return "the connection was cut"
                    written.write(chunk)
                    digest.update(chunk)
                    self._progress(self._before + written.tell(), self._total)
                return ""
        except HTTPException as error:
            return f"the connection was cut: {type(error).__name__}"
        except OSError as error:
            if error.errno in _DISK:
                raise
            return str(error)


def _resumes(answer: HTTPResponse, begin: int) -> bool:
    said = _RANGE.match(answer.headers.get("Content-Range", ""))
    return answer.status == 206 and said is not None and int(said[1]) == begin


def _incomplete(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
