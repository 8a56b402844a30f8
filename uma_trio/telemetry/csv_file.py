"""A table in a file that grows by a line now and then, and outlives who writes it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path


class AnotherTable(Exception):
    """The file is there and begins with other columns, or is no file that lines can go into."""


class CsvFile:
    """Lines behind those that are there; the columns stand once, in the first. Close it.

    Made for its user alone, since what it tells is nobody else's. Whole lines or nothing: what
    a full disk left of a line is taken back.

    Raises:
        OSError: the file cannot be made, or not be written.
        AnotherTable: it holds something else.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        # Not for writing alone: that would wait for the reader of a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            self._begin(_line(columns))
        except BaseException:
            self.close()
            raise

    def append(self, values: Iterable[object]) -> None:
        """Write one line; None is an empty cell. Raises :class:`OSError`."""
        self._write(_line(values))

    def close(self) -> None:
        """Close the file; once."""
        os.close(self._file)

    def _begin(self, header: bytes) -> None:
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode):
            raise AnotherTable("it is not a file that lines can be appended to")
        if about.st_size == 0:
            self._write(header)
        elif os.pread(self._file, len(header), 0) != header:
            raise AnotherTable("it begins with other columns")
        elif os.pread(self._file, 1, about.st_size - 1) != b"\n":
            self._write(b"\n")  # whoever wrote the last line did not come to its end

    def _write(self, line: bytes) -> None:
        end = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(values: Iterable[object]) -> bytes:
    return (",".join(_cell(value) for value in values) + "\n").encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
