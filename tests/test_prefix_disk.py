"""Saved prefixes in files: continued after a restart, shared with nobody else, and never read wrongly."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine_kit import Bench, Sink

from uma_trio.backend.base import IntArray, Saved
from uma_trio.engine.kv.disk import PrefixDisk
from uma_trio.engine.kv.page_file import STALE_S, Damaged, PageFolder, PageHead
from uma_trio.engine.kv.pages import StoredFile
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.prefix import PAGE
from uma_trio_sim.fake import FakeBackend

MIB = 1 << 20
MINE, OTHER = "uid 1000", "uid 1001"
WAIT_S = 20.0  # of another thread, at most


def letters(seed: int, n: int) -> list[int]:
    """Return `n` tokens that another seed does not give."""
    return [97 + (seed * 7 + i * (3 + seed % 5)) % 26 for i in range(n)]


class Daemon:
    """An engine with files: what is left of it after :meth:`stop` is in the folder only."""

    def __init__(
        self, folder: Path, *, key: int = 0, budget: int = 64 * MIB, ram: int = MIB, **secret: bytes
    ) -> None:
        self.disk = PrefixDisk(folder, budget, {k.replace("_", " "): v for k, v in secret.items()})
        self.disk.scan()
        self.woken = threading.Semaphore(0)
        backend = FakeBackend(n_ctx=2048, n_slots=4, n_batch=64, key=key)
        settings = EngineSettings(prefix_bytes=ram)
        self.made = Bench(backend, settings=settings, disk=self.disk, wake=self.woken.release)

    @property
    def computed(self) -> int:
        """How many tokens were computed."""
        return sum(self.made.backend.computed.values())

    @property
    def hits(self) -> dict[str, int]:
        """Where prefixes were."""
        return dict(self.made.engine.cells.prefix.hits)

    def ask(self, prompt: list[int], n: int = 4, namespace: str = MINE) -> Sink:
        """Run one request to its end, check its answer, and have its leaf saved and written."""
        _, sink = self.made.submit(prompt, n, namespace=namespace)
        self.finish(sink)
        assert sink.tokens == self.made.backend.continuation(prompt, n)
        while self.made.engine.cells.prefix.saving.one():
            pass
        self.disk.settle(WAIT_S)
        return sink

    def finish(self, *sinks: Sink) -> None:
        """Tick until requests have ended; sleep as the compute thread does."""
        while not all(sink.ends for sink in sinks):
            if not self.made.engine.tick() and not all(sink.ends for sink in sinks):
                assert self.woken.acquire(timeout=WAIT_S), "nobody wakes the engine"

    def stop(self) -> None:
        """End in order."""
        self.disk.close(WAIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons one behind the other, or beside each other, with one folder."""
    running: list[Daemon] = []

    def begin(folder: Path = tmp_path / "prefix", **options: object) -> Daemon:
        running.append(Daemon(folder, **options))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for daemon in running:
        daemon.stop()


def files(daemon: Daemon) -> list[Path]:
    """Return the files of pages."""
    return sorted((daemon.disk._folder.path).glob("*.kv"))


def test_a_conversation_goes_on_after_a_restart_without_computing_its_past(
    start: Callable[..., Daemon],
) -> None:
    """Restored, and not computed all the same: only the last token of what was computed, and what is new."""
    first = start()
    prompt = letters(1, 500)
    answer = first.ask(prompt, 10).tokens
    first.stop()
    second = start()
    turn = [*prompt, *answer, *letters(2, 20)]
    sink = second.ask(turn, 5)
    assert sink.end.cached_tokens == 509
    assert second.computed == len(turn) - 509 + 4
    assert second.hits == {"disk": 1}


def test_a_prompt_that_is_asked_again_computes_its_last_token(start: Callable[..., Daemon]) -> None:
    """It ends within a page that goes on with the answer."""
    first = start()
    first.ask(letters(1, 200), 10)
    first.stop()
    second = start()
    assert second.ask(letters(1, 200), 1).end.cached_tokens == 199
    assert second.computed == 1


def test_what_was_read_is_in_memory_and_not_read_again(start: Callable[..., Daemon]) -> None:
    start().ask(letters(1, 300))
    second = start()
    second.ask(letters(1, 300))
    second.made.engine.cells.prefix.room.drop_all()
    second.ask([*letters(1, 290), *letters(3, 30)])
    assert second.hits == {"disk": 1, "saved": 1}
    assert second.disk.written < 3 * 2000, "only what is new was written"


def test_equal_prompts_at_once_read_a_page_once(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    start().ask(letters(1, 300))
    read: list[str] = []
    cells = PageFolder.cells

    def counted(self: PageFolder, name: str) -> Saved:
        read.append(name)
        return cells(self, name)

    monkeypatch.setattr(PageFolder, "cells", counted)
    second = start()
    sinks = [second.made.submit(letters(1, 300), 2, namespace=MINE)[1] for _ in range(3)]
    second.finish(*sinks)
    assert len(read) == len(set(read)) > 0
    assert all(sink.end.cached_tokens == 299 for sink in sinks)


@pytest.mark.parametrize(
    "other", [OTHER, f"{MINE}/salt x", f"{MINE}/process 7", "key 0", "connection 1"]
)
def test_others_have_nothing_of_it(start: Callable[..., Daemon], other: str) -> None:
    start(key_0=b"secret").ask(letters(1, 300))
    second = start(key_0=b"secret")
    assert second.ask(letters(1, 300), namespace=other).end.cached_tokens == 0


@pytest.mark.parametrize(
    "passing",
    [f"{MINE}/process 7", f"{MINE}/request 3", "connection 1", "address 10.0.0.1", "key 3"],
)
def test_what_may_be_somebody_else_after_a_restart_is_not_written(
    start: Callable[..., Daemon], passing: str
) -> None:
    daemon = start(key_0=b"secret")
    daemon.ask(letters(1, 300), namespace=passing)
    assert not files(daemon)


def test_a_key_is_known_by_its_text_and_not_by_its_place(start: Callable[..., Daemon]) -> None:
    start(key_0=b"first", key_1=b"second").ask(letters(1, 300), namespace="key 1")
    again = start(key_0=b"second", key_1=b"third")
    assert again.ask(letters(1, 300), namespace="key 1").end.cached_tokens == 0
    assert again.ask(letters(1, 300), namespace="key 0").end.cached_tokens == 299


def test_files_are_the_users_own_and_their_names_say_nothing(start: Callable[..., Daemon]) -> None:
    daemon = start(key_0=b"sesame")
    daemon.ask(letters(1, 300), namespace="key 0/salt pepper")
    folder = daemon.disk._folder.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    everything = b"".join(f.name.encode() + f.read_bytes() for f in folder.iterdir())
    assert b"sesame" not in everything
    assert b"pepper" not in everything


def test_another_model_reads_nothing(start: Callable[..., Daemon]) -> None:
    start(key=1).ask(letters(1, 300))
    assert start(key=2).ask(letters(1, 300)).end.cached_tokens == 0


def truncate(file: Path) -> None:
    """Cut off the end, as a file system does after a power failure."""
    os.truncate(file, file.stat().st_size - 8)


def empty(file: Path) -> None:
    """Leave the name."""
    os.truncate(file, 0)


def flip(file: Path) -> None:
    """Change a bit of the cells."""
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def flip_head(file: Path) -> None:
    """Change a token."""
    content = bytearray(file.read_bytes())
    content[struct.calcsize("<8sIIQI") + 90] ^= 1
    file.write_bytes(content)


def swap(file: Path) -> None:
    """Put another page in its place: the one that was in the file before this."""
    kept = file.with_name("kept")
    content = file.read_bytes()
    last = max(each for each in file.parent.glob("*.kv"))
    file.write_bytes((kept if kept.exists() else last).read_bytes())
    kept.write_bytes(content)


def link(file: Path) -> None:
    """Put a link in its place."""
    copy = file.with_suffix(".copy")
    file.rename(copy)
    file.symlink_to(copy)


@pytest.mark.parametrize("harm", [truncate, empty, flip, flip_head, swap, link])
def test_a_damaged_file_is_not_used_and_removed(
    start: Callable[..., Daemon], harm: Callable[[Path], None]
) -> None:
    """Whether that shows at the start or when it is read; the answer is right."""
    first = start()
    first.ask(letters(1, 300))
    for file in files(first):
        harm(file)
    first.stop()
    second = start()
    assert second.ask(letters(1, 300)).end.cached_tokens == 0
    for file in files(second):
        second.disk._folder.cells(file.name)  # what is there was written anew


def test_a_page_in_the_middle_that_is_lost_costs_what_follows_it(
    start: Callable[..., Daemon],
) -> None:
    first = start()
    first.ask(letters(1, 300))
    pages = first.disk._index.pages
    flip(first.disk._folder.path / next(name for name, page in pages.items() if page.start == 128))
    first.stop()
    second = start()
    assert second.ask(letters(1, 300)).end.cached_tokens == 128


def test_files_of_another_folder_are_foreign(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """Their heads are authenticated with the secret of the folder that they were written to."""
    first = start()
    first.ask(letters(1, 300))
    other = start(tmp_path / "other")
    for file in files(first):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    again = start(tmp_path / "other")
    assert again.ask(letters(1, 300)).end.cached_tokens == 0
    assert other.disk.n_bytes >= 0


def test_what_a_killed_process_left_is_removed_in_time(start: Callable[..., Daemon]) -> None:
    """A file that is being written by another daemon stays."""
    folder = start().disk._folder.path
    for name, age in (("1-dead.tmp", STALE_S + 60), ("2-alive.tmp", 0)):
        (folder / name).write_bytes(b"half")
        now = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (now, now))
    start()
    assert [file.name for file in folder.glob("*.tmp")] == ["2-alive.tmp"]


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is full: neither under its name nor under another."""
    folder = PageFolder(tmp_path / "prefix")

    def full(_self: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="full"):
        folder.write(PageHead("m/uid 1/", b"", 0, 1.0, np_tokens(10)), memoryview(b"cells"))
    assert [file.name for file in folder.path.iterdir()] == ["secret"]


def np_tokens(n: int) -> IntArray:
    """Return tokens as an array."""
    return np.arange(n, dtype=np.int32)


@contextmanager
def failing(error: int) -> Iterator[list[str]]:
    """Let every write fail; yield the names of what was tried."""
    tried: list[str] = []

    def write(_self: PageFolder, head: PageHead, _cells: Saved) -> StoredFile:
        tried.append(head.namespace)
        raise OSError(error, os.strerror(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageFolder, "write", write)
        yield tried


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_left_alone_and_all_goes_on(
    start: Callable[..., Daemon], error: int, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon = start()
    with failing(error) as tried:
        for seed in (1, 2, 3):
            daemon.ask(letters(seed, 200))
    assert len(tried) == 1
    assert daemon.ask(letters(1, 200)).end.cached_tokens == 199
    assert "".join(capfd.readouterr()).count("--prefix-disk") == 1


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "prefix").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="not a folder"):
        PageFolder(tmp_path / "prefix")


def test_files_take_no_more_than_the_budget(start: Callable[..., Daemon]) -> None:
    """What was evicted has no file, and the latest conversation is whole."""
    budget = 30_000
    daemon = start(budget=budget)
    for seed in range(20):
        daemon.ask(letters(seed, 40), n=seed + 2)
    assert sum(file.stat().st_size for file in files(daemon)) <= budget
    assert daemon.disk.n_bytes <= budget
    assert {file.name for file in files(daemon)} == set(daemon.disk._index.pages)


def test_clear_removes_the_files_of_one_user(start: Callable[..., Daemon]) -> None:
    """Of all models, also of those that this daemon has not loaded."""
    first = start(key=1)
    first.ask(letters(1, 300))
    first.ask(letters(1, 300), namespace=f"{MINE}/salt x")
    first.ask(letters(1, 300), namespace=OTHER)
    n = len(files(first))
    first.stop()
    second = start(key=2)
    assert second.disk.held_by(MINE) > second.disk.held_by(OTHER) > 0
    second.disk.clear(MINE)
    assert second.disk.held_by(MINE) == 0
    assert len(files(second)) == n // 3
    second.stop()
    third = start(key=1)
    assert third.ask(letters(1, 300)).end.cached_tokens == 0
    assert third.ask(letters(1, 300), namespace=OTHER).end.cached_tokens == 299


def test_what_waits_to_be_written_is_cleared_too(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the page that is being written."""
    began, may = threading.Event(), threading.Event()
    write = PageFolder.write

    def slow(self: PageFolder, head: PageHead, cells: Saved) -> StoredFile:
        began.set()
        assert may.wait(WAIT_S)
        return write(self, head, cells)

    monkeypatch.setattr(PageFolder, "write", slow)
    daemon = start()
    _, sink = daemon.made.submit(letters(1, 300), 4, namespace=MINE)
    daemon.finish(sink)
    while daemon.made.engine.cells.prefix.saving.one():
        pass
    assert began.wait(WAIT_S)
    daemon.disk.clear(MINE)
    may.set()
    daemon.disk.settle(WAIT_S)
    assert not files(daemon)


def test_at_the_end_the_longest_conversation_is_written_first(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each from its beginning; what there is no time for is left."""
    daemon = start()
    began, order = threading.Event(), []

    def write(_self: PageFolder, head: PageHead, _cells: Saved) -> StoredFile:
        order.append((int(head.tokens[0]), head.start))
        began.set()
        assert daemon.disk._closing.wait(WAIT_S)
        return StoredFile(f"{len(order)}.kv", 1)

    monkeypatch.setattr(PageFolder, "write", write)
    for first, n in ((1, 60), (2, 60), (3, 250), (4, 120)):
        _, sink = daemon.made.submit([first] * n, 2, namespace=MINE)
        daemon.finish(sink)
        while daemon.made.engine.cells.prefix.saving.one():
            pass
    assert began.wait(WAIT_S)
    daemon.disk.close(WAIT_S)
    assert [first for first, _ in order] == [1, 3, 3, 3, 3, 4, 4, 2]
    assert [at for first, at in order if first == 3] == [0, 64, 128, 192]


def test_two_daemons_share_a_folder(start: Callable[..., Daemon]) -> None:
    """Each finds what the other wrote, and misses what it removed."""
    one, two = start(), start()
    one.ask(letters(1, 300))
    two.disk.scan()
    assert two.ask(letters(1, 300)).end.cached_tokens == 299
    two.ask(letters(2, 300))
    one.disk.scan()
    two.disk.clear(MINE)
    assert one.ask(letters(2, 300)).end.cached_tokens == 0, "its index still has it"
    assert one.made.engine.cells.prefix.failures["read"] == 1


def test_a_request_that_is_cancelled_while_it_reads_harms_nobody(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    start().ask(letters(1, 300))
    may = threading.Event()
    cells = PageFolder.cells

    def slow(self: PageFolder, name: str) -> Saved:
        assert may.wait(WAIT_S)
        return cells(self, name)

    monkeypatch.setattr(PageFolder, "cells", slow)
    second = start()
    handle, sink = second.made.submit(letters(1, 300), 4, namespace=MINE)
    second.made.engine.tick()
    (key,) = second.made.engine.cells.blocked
    running = second.made.engine.registry.running
    wait = second.made.engine.cells.wait_of(running[key], running)
    assert wait is not None
    assert wait.reason == "its beginning is read from the disk, 5 pages are left"
    _, other = second.made.submit(letters(5, 100), 4, namespace=OTHER)
    second.finish(other)
    second.made.cancel(handle)
    second.finish(sink)
    may.set()
    assert sink.end.reason == "cancelled"
    assert second.ask(letters(1, 300)).end.cached_tokens == 299
    second.made.engine.cells.check()


def test_a_conversation_that_memory_cannot_hold_is_computed(start: Callable[..., Daemon]) -> None:
    start().ask(letters(1, 600))
    second = start(ram=3000)
    assert second.ask(letters(1, 600)).end.cached_tokens == 0


def test_a_conversation_that_memory_holds_in_part_is_read_once(
    start: Callable[..., Daemon],
) -> None:
    """With their bookkeeping the pages take more than their own size."""
    start().ask(letters(1, 600))
    second = start(ram=12_000)
    assert 0 < second.ask(letters(1, 600)).end.cached_tokens < 599
    assert second.made.engine.cells.prefix.failures["read"] == 1


def test_a_file_that_says_less_than_its_head_is_damaged(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path / "prefix")
    file = folder.write(PageHead("m/uid 1/", b"", 0, 1.0, np_tokens(PAGE)), memoryview(b"cells"))
    assert bytes(folder.cells(file.name)) == b"cells"
    for size in range(len(file)):
        content = (folder.path / file.name).read_bytes()[:size]
        (folder.path / "cut.kv").write_bytes(content)
        with pytest.raises(Damaged):
            folder.cells("cut.kv")
