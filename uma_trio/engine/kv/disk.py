"""The pages on disk: written behind the ones in memory, and read back after a restart.

One :class:`PrefixDisk` serves all models of a daemon. A thread writes; others read for requests that wait. The engine
asks the index, which is in memory, and puts what it has into queues: it never waits for a disk. Several daemons may
use one folder, so the index follows what others add and remove.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final
from weakref import WeakValueDictionary

from attrs import define

from uma_trio.backend.base import IntArray, Saved
from uma_trio.engine.kv.page_file import Damaged, PageFolder, PageHead
from uma_trio.engine.kv.pages import Page, StoredFile
from uma_trio.engine.kv.store import PageStore
from uma_trio.observe import log
from uma_trio.policy.fairness import Path as Owner

#: Files there may be, whatever their size: the index takes 1.5 KB of memory for each, and a start reads their heads.
MOST_FILES: Final = 65_536
#: Pages that wait to be written. They are those in memory, so that waiting takes no more of it.
MOST_WAITING: Final = 8192
#: What of its time the writing thread writes, so that it leaves the disk and the cores to others.
_WRITE_SHARE: Final = 0.25
#: How often the folder is looked at for what other daemons added or removed.
_SCAN_S: Final = 2.0
_COARSE_NS: Final = 1_000_000_000
_READERS: Final = 4
_TRIMMED: Final = 64  # pages at once, so that the engine is not kept waiting
#: Seconds to read a byte, until pages were read: 1 GB/s.
_FIRST_BYTE_S: Final = 1e-9
_LEARNS: Final = 0.1


class _Index(PageStore):
    """Which pages are in files. The names of those that were dropped are in `gone` until the files are removed."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget, time.monotonic, most_pages=MOST_FILES, ghosts=False)
        self.pages: dict[str, Page] = {}
        self.gone: list[str] = []

    def put(
        self, head: PageHead, above: Page | None, file: StoredFile, owner: Owner
    ) -> Page | None:
        """Add the page of a file; without room for it the file is to go."""
        page = self.add(head.namespace, above, head.tokens, file, owner=owner, cost_s=head.cost_s)
        if page is None:
            self.gone.append(file.name)
        else:
            self.pages[file.name] = page
        return page

    @property
    def is_over(self) -> bool:
        """Whether there is more than the budget."""
        return self.n_bytes > self.budget and self.n_pages > 0

    def trim(self, most: int) -> None:
        """Evict pages that are over the budget, at most so many."""
        while self.is_over and most > 0 and (page := self._victim()) is not None:
            self._evict(page)
            most -= 1

    def discard(self, page: Page) -> None:
        found, left = [], [page]
        while left:
            found.append(left.pop())
            for siblings in found[-1].children.values():
                left.extend(siblings)
        for each in reversed(found):
            self._drop(each)

    def _drop(self, page: Page) -> None:
        if isinstance(page.saved, StoredFile):
            self.pages.pop(page.saved.name, None)
            self.gone.append(page.saved.name)
        super()._drop(page)


@define(eq=False)
class _Job:
    """A page in memory that is to be written."""

    namespace: str
    page: Page
    cancelled: bool = False


@define(eq=False)
class _Part:
    """A page that is read for `wanted` requests. `cells` are None until it is `done`, and if that failed."""

    page: Page
    name: str
    wake: Callable[[], object]
    wanted: int = 0
    done: bool = False
    cells: Saved | None = None


@define(eq=False)
class Reading:
    """The pages that are read for one request, in their order, without those that it has taken."""

    parts: deque[_Part]

    @property
    def n_bytes(self) -> int:
        """The size of what is not taken yet."""
        return sum(part.page.n_bytes for part in self.parts)

    def cancel(self) -> None:
        for part in self.parts:
            part.wanted -= 1
        self.parts.clear()


class PrefixDisk:
    """All pages in the files of a folder, at most `budget` bytes. :meth:`close` it.

    `credentials` has the secret text by which each principal is known that has one: what "key 0" is changes with the
    file of keys. Pages of principals whose name changes with a restart are not written.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(
        self, folder: Path, budget: int, credentials: Mapping[str, bytes] | None = None
    ) -> None:
        self.budget = budget
        self._folder = PageFolder(folder)
        self._credentials = {
            name: f"{name.partition(' ')[0]} {self._folder.hash(secret)}"
            for name, secret in (credentials or {}).items()
        }
        self._index = _Index(budget)
        self._lock = threading.Lock()  # of the index and the jobs; held for microseconds
        self._work = threading.Condition(self._lock)
        self._scanning = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._writing: _Job | None = None
        self._seen, self._scanned_at = -1, 0.0
        self._closing = threading.Event()
        self._write_until = 0.0
        self._reads: SimpleQueue[_Part | None] = SimpleQueue()
        self._parts: WeakValueDictionary[str, _Part] = WeakValueDictionary()
        self._broken = False
        self._log = log.get("prefix")
        self.byte_s = _FIRST_BYTE_S
        self.written = 0
        self._threads = [threading.Thread(target=self._run, name="prefix disk", daemon=True)]
        for _ in range(_READERS):
            self._threads.append(
                threading.Thread(target=self._read, name="prefix read", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def n_bytes(self) -> int:
        return self._index.n_bytes

    def of(self, model: str, wake: Callable[[], object]) -> ModelDisk:
        """Return the pages of one model, by all that its cells depend on. `wake` is called when one was read."""
        return ModelDisk(self, self._folder.hash(model.encode()), wake)

    def held_by(self, principal: str) -> int:
        """Return the size of the pages of a principal, of all models."""
        whose = self._whose(principal)
        with self._lock:
            return 0 if whose is None else self._index.held_by(_owner(whose))

    def clear(self, principal: str) -> None:
        """Remove all files of a principal, of all models. Blocks on the disk."""
        whose = self._whose(principal)
        if whose is None:
            return
        self._guarded(self._scan)
        with self._lock:
            for job in [*self._jobs, *([self._writing] if self._writing is not None else ())]:
                job.cancelled = job.cancelled or _principal(job.namespace) == whose
            names = [name for name in self._index.namespaces if _principal(name) == whose]
            pages = [page for name in names for page in self._index.trie.pages(name)]
        for page in reversed(pages):
            with self._lock:
                if page.saved is not None and not page.children:
                    self._index.discard(page)
        self._remove_gone()

    def settle(self, seconds: float = 10.0) -> None:
        """Return when all that waited has been written, or after so long (for tests)."""
        with self._work:
            self._work.wait_for(lambda: not self._jobs and self._writing is None, seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Write what waits for so long, what took longest to compute first, and end the threads. Blocks on the disk."""
        with self._work:
            self._order_by_worth()
            self._write_until = time.monotonic() + seconds
            self._closing.set()
            self._work.notify_all()
        for _ in range(_READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join()

    def scan(self) -> None:
        """Take note of what other daemons added and removed. Blocks on the disk."""
        self._guarded(self._scan)

    # --- for ModelDisk, on the engine's thread ---

    def namespace(self, model: str, namespace: str) -> str | None:
        """Return what a namespace is called in files; None if it ends with the process that asks or with the daemon."""
        principal, _, rest = namespace.partition("/")
        whose = self._whose(principal)
        if whose is None or (rest and not rest.startswith("salt ")):
            return None
        return f"{model}/{whose}/{self._folder.hash(rest.encode()) if rest else ''}"

    def match(self, namespace: str, tokens: IntArray) -> tuple[Page | None, int]:
        """Return the page on disk that the longest beginning ends in, and its length."""
        with self._lock:
            return (None, 0) if self._broken else self._index.match(namespace, tokens)

    def offer(self, namespace: str, page: Page) -> None:
        """Have a page and those before it written that are not on disk, unless too many wait."""
        found, each = [], page
        while each.parent is not None and not each.is_stored and not each.queued:
            found.append(each)
            each = each.parent
        with self._work:
            if not found or self._broken or len(self._jobs) + len(found) > MOST_WAITING:
                return
            for each in reversed(found):
                each.queued = True
                self._jobs.append(_Job(namespace, each))
            self._work.notify_all()

    def read(self, pages: Iterable[Page], wake: Callable[[], object]) -> Reading:
        """Have pages read. One that is being read for another request is read once."""
        reading = Reading(deque())
        for page in pages:
            if not isinstance(page.saved, StoredFile):
                break  # it has just been evicted
            part = self._parts.get(page.saved.name)
            if part is None or part.page is not page or not part.wanted:
                part = self._parts[page.saved.name] = _Part(page, page.saved.name, wake)
                part.wanted += 1
                self._reads.put(part)
            else:
                part.wanted += 1
            reading.parts.append(part)
        with self._lock:
            self._index.used([p.page for p in reading.parts if p.page.saved is not None])
        return reading

    def _order_by_worth(self) -> None:
        """Put the conversations first that took longest to compute; pages stay behind those before them."""
        firsts: dict[Page, Page] = {}
        worth_s: dict[Page, float] = {}
        for job in self._jobs:
            before = job.page.parent or job.page
            first = firsts[job.page] = firsts.get(before, job.page)
            worth_s[first] = worth_s.get(first, 0.0) + job.page.cost_s
        self._jobs = deque(sorted(self._jobs, key=lambda job: -worth_s[firsts[job.page]]))

    # --- the threads ---

    def _run(self) -> None:
        while True:
            if time.monotonic() - self._scanned_at >= _SCAN_S:
                self._guarded(self._scan)
                self._scanned_at = time.monotonic()
            with self._work:
                self._work.wait_for(lambda: self._jobs or self._closing.is_set(), _SCAN_S)
                ends = self._closing.is_set() and time.monotonic() >= self._write_until
                job = None if ends or not self._jobs else self._jobs.popleft()
                self._writing = job
            if job is None and self._closing.is_set():
                return
            if job is not None:
                began = time.monotonic()
                self._guarded(partial(self._write, job))
                with self._work:
                    self._writing, job.page.queued = None, False
                    self._work.notify_all()
                self._closing.wait((time.monotonic() - began) * (1 / _WRITE_SHARE - 1))

    def _write(self, job: _Job) -> None:
        page, cells = job.page, job.page.saved
        before = page.parent
        if not isinstance(cells, memoryview) or before is None or job.cancelled or self._broken:
            return
        above = None if before.parent is None else before.stored
        with self._lock:
            if before.parent is not None and (above is None or above.saved is None):
                return  # it could not be found without the page before it
            page.stored = self._index.trie.get(job.namespace, above, page.tokens)
            if page.stored is not None:
                return
        digest = above.digest if above is not None else b""
        head = PageHead(job.namespace, digest, page.start, page.cost_s, page.tokens)
        file = self._folder.write(head, cells)
        self.written += len(file)
        with self._lock:
            if job.cancelled or (above is not None and above.saved is None):
                self._index.gone.append(file.name)
            else:
                page.stored = self._index.put(head, above, file, _owner(_principal(job.namespace)))
        self._remove_gone()

    def _read(self) -> None:
        while (part := self._reads.get()) is not None:
            if part.wanted > 0 and not self._closing.is_set():
                began = time.monotonic()
                try:
                    part.cells = self._folder.cells(part.name)
                except (Damaged, OSError, MemoryError):
                    self._lost(part)
                else:
                    took = (time.monotonic() - began) / len(part.cells)
                    self.byte_s += _LEARNS * (took / _READERS - self.byte_s)
            part.done = True
            part.wake()

    def _lost(self, part: _Part) -> None:
        """Drop a page that cannot be read, and those behind it. Another daemon may just have evicted it."""
        with self._lock:
            page = self._index.pages.get(part.name)
            if page is not None:
                self._index.discard(page)
        self._remove_gone()

    def _scan(self) -> None:
        with self._scanning:
            changed = self._folder.changed()
            if changed == self._seen:
                return
            names = self._folder.names()
            with self._lock:
                known = set(self._index.pages)
                for page in [self._index.pages[name] for name in known - names]:
                    if page.saved is not None:
                        self._index.discard(page)
            found = [each for name in names - known if (each := self._head(name)) is not None]
            # What goes is chosen when all is known: a page comes before those behind it.
            self._index.budget = sys.maxsize
            for head, file in sorted(found, key=lambda each: each[0].start):
                self._link(head, file)
            self._index.budget = self.budget
            while self._index.is_over:
                with self._lock:
                    self._index.trim(_TRIMMED)
            self._remove_gone()
            # The clock of files is coarse: what came right behind the list may have the same time.
            self._seen = changed if time.time_ns() - changed > _COARSE_NS else -1

    def _head(self, name: str) -> tuple[PageHead, StoredFile] | None:
        try:
            return self._folder.head(name)
        except Damaged:
            self._folder.remove([name])
        except OSError:
            pass  # it has just been removed, or cannot be read now
        return None

    def _link(self, head: PageHead, file: StoredFile) -> None:
        """Put a page that was found behind the page before it."""
        with self._lock:
            above = self._index.pages.get(self._folder.name(head.before)) if head.before else None
            if above is not None or not head.before:
                if file.name not in self._index.pages:
                    self._index.put(head, above, file, _owner(_principal(head.namespace)))
                return
        if self._folder.is_stale(file.name):
            self._folder.remove([file.name])

    def _remove_gone(self) -> None:
        with self._lock:
            gone, self._index.gone = self._index.gone, []
        self._folder.remove(gone)

    def _guarded(self, call: Callable[[], object]) -> None:
        """Call something that uses the disk; end the use of the disk where that fails."""
        try:
            if not self._broken:
                call()
        except Exception as error:  # of the disk, as a rule
            with self._work:
                self._broken = True
                for job in self._jobs:
                    job.page.queued = False
                self._jobs.clear()
            self._log.warning(
                "prefixes are neither written to the disk nor read from it any more (--prefix-disk)",
                folder=str(self._folder.path),
                why=(isinstance(error, OSError) and error.strerror) or repr(error),
            )

    def _whose(self, principal: str) -> str | None:
        """Return what a principal is called in files; None if that may be another one after a restart."""
        if principal in self._credentials:
            return self._credentials[principal]
        return principal if principal.startswith("uid ") else None


@define(eq=False)
class ModelDisk:
    """The pages of one model on disk. For the engine's thread; nothing here waits for the disk."""

    disk: PrefixDisk
    _model: str
    _wake: Callable[[], object]

    def match(self, namespace: str, tokens: IntArray) -> tuple[Page | None, int]:
        """Return the page that the longest beginning on disk ends in, and its length."""
        name = self.disk.namespace(self._model, namespace)
        return (None, 0) if name is None else self.disk.match(name, tokens)

    def offer(self, namespace: str, page: Page) -> None:
        """Have a saved page and those before it written, if reading them is quicker than computing them."""
        name = self.disk.namespace(self._model, namespace)
        if name is not None and self.is_worth([page]):
            self.disk.offer(name, page)

    def is_worth(self, pages: Iterable[Page]) -> bool:
        """Whether reading pages takes no longer than computing them."""
        pages = tuple(pages)
        read_s = self.disk.byte_s * sum(page.n_bytes for page in pages)
        return read_s <= sum(page.cost_s for page in pages)

    def read(self, pages: Iterable[Page]) -> Reading:
        return self.disk.read(pages, self._wake)


def _principal(namespace: str) -> str:
    return namespace.split("/")[1]


def _owner(whose: str) -> Owner:
    return (hash(whose),)
