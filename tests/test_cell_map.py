"""Where llama.cpp puts cells, computed along: against a slow model, and against its own log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_kit import decode
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import DecodeStatus
from uma_trio.backend.cell_map import CellMap

N_CELLS, N_SEQ = 24, 4


class Slow:
    """The cells as a list of holders, searched one by one."""

    def __init__(self) -> None:
        self.cells: list[set[int]] = [set() for _ in range(N_CELLS)]
        self.at: list[list[int]] = [[] for _ in range(N_SEQ)]
        self.head = 0

    @property
    def used(self) -> int:
        """How many cells have a holder."""
        return sum(bool(holders) for holders in self.cells)

    @property
    def high_water(self) -> int:
        """One behind the highest cell that has a holder."""
        return max((i + 1 for i, holders in enumerate(self.cells) if holders), default=0)

    def place(self, ids: list[int]) -> bool:
        """Place a token for each, cell by cell from the head on and round."""
        n = len(ids)
        head = 0 if self.head > self.used + 2 * n else self.head
        order = [*range(head, N_CELLS), *range(head)]
        free = [cell for cell in order if not self.cells[cell]][:n]
        if len(free) < n:
            return False
        for seq, cell in zip(ids, free, strict=True):
            self.cells[cell].add(seq)
            self.at[seq].append(cell)
        self.head = free[-1] + 1
        return True

    def drop(self, seq: int, first: int) -> None:
        """Drop from a position on."""
        freed = []
        for cell in self.at[seq][first:]:
            self.cells[cell].discard(seq)
            if not self.cells[cell]:
                freed.append(cell)
        del self.at[seq][first:]
        self.head = min([self.head, *freed])

    def share(self, src: int, dst: int, last: int) -> None:
        """Let `dst` hold what it lacks up to `last`."""
        for cell in self.at[src][len(self.at[dst]) : last]:
            self.cells[cell].add(dst)
            self.at[dst].append(cell)


SEQ = st.integers(0, N_SEQ - 1)
OPERATION = st.one_of(
    st.tuples(st.just("place"), st.lists(SEQ, min_size=1, max_size=8)),
    st.tuples(st.just("drop"), SEQ, st.integers(0, 8)),
    st.tuples(st.just("share"), SEQ, SEQ, st.integers(0, 12)),
)


@given(st.lists(OPERATION, max_size=40))
@settings(max_examples=200, deadline=None)
def test_cells_are_placed_as_by_a_search_one_by_one(operations: list[tuple[object, ...]]) -> None:
    """After any history the head, the used cells, the mark and every owner are the same."""
    cells, slow = CellMap(N_CELLS, N_SEQ), Slow()
    for operation in operations:
        match operation:
            case ("place", list(ids)):
                ends = [len(at) for at in slow.at]
                positions = []
                for seq in ids:
                    positions.append(ends[seq])
                    ends[seq] += 1
                rows = np.array(ids, np.int32), np.array(positions, np.int32)
                assert cells.place(*rows) == slow.place(ids)
            case ("drop", int(seq), int(first)):
                cells.drop(seq, first)
                slow.drop(seq, first)
            case ("share", int(src), int(dst), int(last)):
                first, last = len(slow.at[dst]), min(last, len(slow.at[src]))
                if src != dst and first < last:
                    cells.share(src, dst, first, last)
                    slow.share(src, dst, last)
        assert (cells.used, cells.high_water, cells.head) == (slow.used, slow.high_water, slow.head)
        for seq in range(N_SEQ):
            assert cells.length(seq) == len(slow.at[seq])
            alone = [len(slow.cells[cell]) == 1 for cell in slow.at[seq]]
            assert cells.exclusive(seq).tolist() == alone


def test_shared_cells_are_counted_once() -> None:
    """Three that hold two sequences' cells hold so many fewer together."""
    cells = CellMap(N_CELLS, N_SEQ)
    for seq, n in ((0, 6), (2, 3)):
        cells.place(np.full(n, seq, np.int32), np.arange(n, dtype=np.int32))
    cells.share(2, 3, 0, 3)
    assert (cells.shared((0, 2, 3)), cells.shared((0, 2)), cells.used) == (3, 0, 9)


def test_each_of_several_holders_keeps_its_part_of_a_cell() -> None:
    """And nothing of what others hold who are not asked about, however many there are."""
    cells = CellMap(N_CELLS, N_SEQ)
    cells.place(np.full(6, 0, np.int32), np.arange(6, dtype=np.int32))
    cells.share(0, 1, 0, 4)
    assert cells.portions((0, 1), ()) == [4.0, 2.0]
    assert cells.portions((0,), ()) == [6.0]
    cells.share(0, 2, 0, 3)
    assert cells.portions((0, 1), (2, 3)) == [2.5, 0.5]


def test_runs_are_counted() -> None:
    """Two sequences that grow side by side lie in runs of one."""
    cells = CellMap(N_CELLS, N_SEQ)
    for position in range(5):
        cells.place(np.array([0, 1], np.int32), np.full(2, position, np.int32))
    cells.place(np.full(4, 2, np.int32), np.arange(4, dtype=np.int32))
    assert (cells.runs(0, 0, 5), cells.runs(2, 0, 4), cells.runs(2, 1, 1)) == (5, 1, 0)


@pytest.fixture
def debug_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Give what llama.cpp says before each search: the mark, the used cells, the head."""
    llama = pytest.importorskip("llama_cpp").llama_cpp
    from uma_trio.backend import _llama_lib

    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "1")
    found: list[tuple[int, int, int]] = []
    line = re.compile(rb"find_slot: stream\[0\], n = +(\d+), used = +(\d+), head = +(\d+)")

    def receive(_level: int, text: bytes, _user_data: object) -> None:
        for match in line.finditer(text):
            found.append(tuple(map(int, match.groups())))  # type: ignore[arg-type]

    _llama_lib.start()
    callback = llama.llama_log_callback(receive)
    llama.llama_log_set(callback, None)
    yield found
    _llama_lib._log.install()


@pytest.mark.real
def test_llama_cpp_says_the_same(tmp_path: Path, debug_log: list[tuple[int, int, int]]) -> None:
    """Over random batches, drops, copies, saves and restores, at every search."""
    pytest.importorskip("gguf")
    from models.synthetic import write_model
    from uma_trio.backend.llama import LlamaBackend

    path = write_model(tmp_path / "tiny.gguf")
    backend = LlamaBackend.load(path, n_ctx=512, n_slots=4, n_batch=64, threads=1)
    rng = np.random.default_rng(7)
    ids = [0, 1, 2, 3, *backend.limits.leaf_ids[:4]]
    mirror, saved, compared = backend._kv.map, None, 0
    assert mirror is not None
    for _ in range(600):
        choice, one, two = rng.integers(6), *rng.choice(ids, 2, replace=False).tolist()
        held, cut = backend.kv_length(one), int(rng.integers(0, 80))
        debug_log.clear()
        expected = (mirror.high_water, mirror.used, mirror.head)
        if choice < 3:
            n = int(rng.choice([1, 2, 7, 40]))
            rows = [
                (slot, backend.kv_length(slot) + i, 97, 0) for slot in range(2) for i in range(n)
            ]
            if decode(backend, rows[: 64 if n < 40 else 40]) != DecodeStatus.OK:
                backend.kv_remove(0, 20)
            compared += len(debug_log)
            assert set(debug_log) <= {expected}
        elif choice == 3:
            backend.kv_remove(one, min(held, cut) if cut > 20 else 0)
        elif choice == 4:
            backend.kv_remove(two)
            backend.kv_copy(one, two, 0, max(1, held - cut))
        elif saved is None:
            saved = backend.kv_save(one, 0, held, held) if held else None
        else:
            backend.kv_remove(two)
            backend.kv_restore(two, saved)
            saved = None
        for seq in ids:
            assert mirror.length(seq) == backend.kv_length(seq)
    assert compared > 100
    backend.close()
