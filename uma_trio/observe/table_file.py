"""A table in a file that grows by a line now and then, and outlives who writes it."""

from __future__ import annotations

import errno
import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

JSON_SUFFIXES = (".jsonl", ".ndjson")
_LONGEST_LINE = 1 << 16


class AnotherTable(Exception):
    """The file is there and holds other columns, or is no file that lines can go into."""


def open_table(path: Path, columns: Sequence[str]) -> TableFile:
    """Open the table of that name: lines of JSON by its suffix, CSV otherwise.

    Raises :class:`OSError` and :class:`AnotherTable`, as a :class:`TableFile` does.
    """
    kind = JsonLinesFile if path.suffix.lower() in JSON_SUFFIXES else CsvFile
    return kind(path, columns)


class TableFile(ABC):
    """Lines behind those that are there. Close it.

    Made for its user alone, since what it tells is nobody else's. Whole lines or nothing: what
    a full disk left of a line is taken back.

    Raises:
        OSError: the file cannot be made, or not be written.
        AnotherTable: it holds something else.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        # Not for writing alone: that would wait for the reader of a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _line(self, values: Sequence[object]) -> bytes:
        """Return a line with these values, a column each; None is what nobody knows."""

    @abstractmethod
    def _header(self) -> bytes:
        """Return what stands before the first line."""

    @abstractmethod
    def _continues(self, first_line: bytes) -> bool:
        """Whether a file that begins so has these columns."""

    def append(self, values: Sequence[object]) -> None:
        """Write one line, a value for each column. Raises :class:`OSError`."""
        self._write(self._line(values))

    def close(self) -> None:
        """Close the file; once."""
        os.close(self._file)

    def _begin(self) -> None:
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode):
            raise AnotherTable("it is not a file that lines can be appended to")
        if about.st_size == 0:
            self._write(self._header())
            return
        first, newline, _ = os.pread(self._file, _LONGEST_LINE, 0).partition(b"\n")
        if not newline or not self._continues(first):
            raise AnotherTable("it begins with other columns")
        if os.pread(self._file, 1, about.st_size - 1) != b"\n":
            self._write(b"\n")  # whoever wrote the last line did not come to its end

    def _write(self, line: bytes) -> None:
        end = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class CsvFile(TableFile):
    """The columns stand once, in the first line; what nobody knows is an empty cell."""

    def _line(self, values: Sequence[object]) -> bytes:
        return (",".join(_cell(value) for value in values) + "\n").encode()

    def _header(self) -> bytes:
        return self._line(self._columns)

    def _continues(self, first_line: bytes) -> bool:
        return first_line + b"\n" == self._header()


class JsonLinesFile(TableFile):
    """An object with all columns in each line; what nobody knows is null."""

    def _line(self, values: Sequence[object]) -> bytes:
        rounded = [float(_cell(v)) if isinstance(v, float) else v for v in values]
        return (json.dumps(dict(zip(self._columns, rounded, strict=True))) + "\n").encode()

    def _header(self) -> bytes:
        return b""

    def _continues(self, first_line: bytes) -> bool:
        try:
            found = json.loads(first_line)
        except ValueError:
            return False
        return isinstance(found, dict) and tuple(found) == self._columns


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
