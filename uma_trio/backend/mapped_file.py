"""The model's file as this process has it mapped: pages that nobody needs any more go back.

llama.cpp maps the whole file and computes from there, but for weights that its CPU kernels want
in another layout: those are copied, and of a Q4_0 model that is nearly all. The pages that were
read for the copy stay mapped, are counted as this process's memory, and are never read again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_READ_ONLY_SHARED = "r--s"  # what llama.cpp maps, and what may be dropped without loss


def release(files: Iterable[Path]) -> None:
    """Let the kernel take back every page of `files` that this process has mapped.

    What is still needed comes back page by page when it is read, from the page cache if nobody
    wanted the memory: once, in the first decode (5 ms for 500 MB). Pages that are locked stay, and
    so does everything where the system has no ``/proc``.
    """
    names = {os.path.realpath(file) for file in files}
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        where, mode, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if mode == _READ_ONLY_SHARED and name and name[0] in names:
            begin, end = (int(address, 16) for address in where.split("-"))
            _dont_need(begin, end - begin)


def _dont_need(address: int, length: int) -> None:
    """Call madvise; what it refuses (locked pages) stays as it was."""
    pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(length)
    ctypes.CDLL(None).madvise(pointer, size, mmap.MADV_DONTNEED)
