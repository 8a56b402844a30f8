"""Giving back pages of a mapped file, on real mappings of this process."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from memory_kit import resident_kib

from uma_trio.backend._llama_load import release

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is mapped")

SIZE = 1 << 20


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[dict[str, mmap.mmap]]:
    """Map two files as llama.cpp does, one with a space in its name, and read every page."""
    with ExitStack() as stack:
        found = {}
        for name in ("a model.gguf", "other.gguf"):
            path = tmp_path / name
            path.write_bytes(b"x" * SIZE)
            file = stack.enter_context(path.open("rb"))
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found[str(path)] = stack.enter_context(pages)
            assert found[str(path)][:].count(b"x") == SIZE
        yield found


def test_pages_of_the_file_go_back_and_come_again(mapped: dict[str, mmap.mmap]) -> None:
    """Nothing of the file is resident after it; what is read then is what the file says."""
    name, pages = next(iter(mapped.items()))
    assert resident_kib(Path(name)) == SIZE >> 10
    release([Path(name)])
    assert resident_kib(Path(name)) == 0
    assert pages[:].count(b"x") == SIZE


def test_a_link_to_the_file_is_the_file(mapped: dict[str, mmap.mmap], tmp_path: Path) -> None:
    """Model stores keep a link under the name that people know."""
    name = next(iter(mapped))
    (tmp_path / "link.gguf").symlink_to(name)
    release([tmp_path / "link.gguf"])
    assert resident_kib(Path(name)) == 0


def test_other_files_keep_their_pages(mapped: dict[str, mmap.mmap]) -> None:
    """Only what is named goes back."""
    name, other = mapped
    release([Path(name)])
    assert resident_kib(Path(other)) == SIZE >> 10


def test_pages_that_are_written_to_are_left_alone(tmp_path: Path) -> None:
    """A private mapping may hold what the file does not; dropping it would lose that."""
    path = tmp_path / "written.gguf"
    path.write_bytes(b"x" * SIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        pages[0] = ord("y")
        release([path])
        assert pages[0] == ord("y")
