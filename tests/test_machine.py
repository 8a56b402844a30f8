"""What the machine says about itself, read from made-up /proc and /sys."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from uma_trio.config.hardware import (
    COLLECTIONS_UNTIL_ALL,
    cpu_features,
    cpu_quota,
    identity,
    limit_spinning,
    physical_cores,
    share_interpreter,
    spare_imports,
    total_memory,
)


def write(root: Path, name: str, text: str) -> None:
    """Put a file into the made-up system."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text", "quota"),
    [
        ("sys/fs/cgroup/cpu.max", "150000 100000\n", 1.5),
        ("sys/fs/cgroup/cpu.max", "max 100000\n", None),
        ("nothing", "", None),
    ],
)
def test_the_cgroup_says_how_much_processor_time_there_is(
    tmp_path: Path, name: str, text: str, quota: float | None
) -> None:
    """In a container with one and a half processors, that is what there is."""
    write(tmp_path, name, text)
    assert cpu_quota(tmp_path) == quota


def test_the_older_cgroup_is_understood_too(tmp_path: Path) -> None:
    """Version 1 says it in two files, and -1 for no limit."""
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n")
    assert cpu_quota(tmp_path) == 4
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(tmp_path) is None


def test_siblings_of_one_core_count_once(tmp_path: Path) -> None:
    """Two hardware threads share one core's arithmetic."""
    for cpu in os.sched_getaffinity(0):
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, name, "0-999\n")
    assert physical_cores(tmp_path) == 1


def test_a_quota_below_the_cores_is_what_counts(tmp_path: Path) -> None:
    """More threads than processor time only wait for each other."""
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert physical_cores(tmp_path) == 1


def test_the_memory_is_what_the_cgroup_leaves_of_the_machines(tmp_path: Path) -> None:
    """A limit below the machine's memory counts; no limit, or none there, does not."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    whole = total_memory(tmp_path)
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (group / "memory.max").write_text("max\n")
    assert total_memory(tmp_path) == whole
    (group / "memory.max").write_text("1048576\n")
    assert total_memory(tmp_path) == 1 << 20


def test_features_are_read_from_the_kernel(tmp_path: Path) -> None:
    """The first processor speaks for all of them; a missing file says nothing."""
    write(tmp_path, "proc/cpuinfo", "processor : 0\nflags : fpu avx2 fma\n\nflags : none\n")
    assert cpu_features(tmp_path) == {"fpu", "avx2", "fma"}
    assert cpu_features(tmp_path / "nowhere") == frozenset()


def test_machines_with_other_processors_are_told_apart(tmp_path: Path) -> None:
    """By the name of the processor, or its parts by number where a kernel knows no names."""
    told = []
    for text in (
        "model name : Fast CPU\nmodel name : Fast CPU\n",
        "model name : Slow CPU\n",
        "CPU part : 0xd0c\nCPU part : 0xd05\n",
    ):
        write(tmp_path, "proc/cpuinfo", text)
        told.append(identity(tmp_path))
    assert [one.partition(",")[0] for one in told] == ["Fast CPU", "Slow CPU", "0xd05 0xd0c"]
    assert "GiB" in identity(tmp_path / "nowhere")


def test_threads_spin_briefly_unless_somebody_said_otherwise() -> None:
    """A user's own way of waiting is left alone."""
    plain: dict[str, str] = {}
    limit_spinning(plain)
    assert plain == {"GOMP_SPINCOUNT": "1000"}
    for own in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        kept = dict(own)
        limit_spinning(kept)
        assert kept == own


_HOLDS_FREED_BLOCKS = """
from uma_trio.config.hardware import give_memory_back
from uma_trio.observe.memory import resident_bytes
blocks = [bytearray(100_000) for _ in range(1000)]
last = bytearray(100_000)  # what is free below it stays the heap's
del blocks
held = resident_bytes()
give_memory_back()
print(held - resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_freed_memory_is_given_back() -> None:
    """What Python frees stays the process's where something is kept behind it."""
    command = [sys.executable, "-c", _HOLDS_FREED_BLOCKS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) > 90_000_000


def test_a_token_that_is_due_waits_less_for_the_engine_where_its_work_overlaps() -> None:
    """There ticks are short, and the engine's thread has the interpreter for much of them."""
    before = sys.getswitchinterval()
    found = {}
    try:
        for overlaps in (False, True):
            share_interpreter(overlaps=overlaps)
            found[overlaps] = sys.getswitchinterval()
    finally:
        sys.setswitchinterval(before)
    assert found[True] < found[False] < 0.005


def test_what_is_imported_is_spared_by_the_garbage_collector() -> None:
    """And what comes later is looked at seldom: all of it would hold up streams."""
    thresholds = gc.get_threshold()
    try:
        spare_imports()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[2] == COLLECTIONS_UNTIL_ALL
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
