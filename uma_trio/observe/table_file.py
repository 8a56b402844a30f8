"""A table in a file to which rows are appended, as CSV or as lines of JSON."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

JSON_SUFFIXES = (".jsonl", ".ndjson")
_LONGEST_LINE = 1 << 16


class AnotherTable(Exception):
    """The file has other columns, or is no regular file."""


class TableFile:
    """Rows behind those that the file has already; JSON if the suffix says so. Close it.

    Only its user may read the file. A row is written as a whole or not at all.

    Raises:
        OSError: the file cannot be opened or written.
        AnotherTable: it contains something else.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._is_json = path.suffix.lower() in JSON_SUFFIXES
        # Not for writing alone: that would wait for the reader of a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def append(self, values: Sequence[object]) -> None:
        """Write a row, one value per column; None is unknown. Raises :class:`OSError`."""
        if self._is_json:
            rounded = [float(_cell(v)) if isinstance(v, float) else v for v in values]
            self._write(json.dumps(dict(zip(self._columns, rounded, strict=True))))
        else:
            self._write(",".join(_quoted(_cell(value)) for value in values))

    def close(self) -> None:
        """Close the file; once."""
        os.close(self._file)

    def _begin(self) -> None:
        about, header = os.fstat(self._file), ",".join(self._columns)
        if not stat.S_ISREG(about.st_mode):
            raise AnotherTable("it is not a file that lines can be appended to")
        if about.st_size == 0:
            if not self._is_json:
                self._write(header)
            return
        first, newline, _ = os.pread(self._file, _LONGEST_LINE, 0).partition(b"\n")
        found = _keys(first) if self._is_json else first.decode("utf-8", "replace")
        if not newline or found != (self._columns if self._is_json else header):
            raise AnotherTable("it begins with other columns")
        if os.pread(self._file, 1, about.st_size - 1) != b"\n":
            self._write("")  # the last row was not written to its end

    def _write(self, text: str) -> None:
        line, end = f"{text}\n".encode(), os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _keys(line: bytes) -> tuple[str, ...] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return tuple(found) if isinstance(found, dict) else None


def _quoted(text: str) -> str:
    """Return a cell of CSV: a name may contain anything."""
    if not any(c in text for c in ',"\r\n'):
        return text
    return '"' + text.replace('"', '""').replace("\n", " ").replace("\r", " ") + '"'


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
