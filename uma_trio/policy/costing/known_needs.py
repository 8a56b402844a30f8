"""Remember what memory a model takes, and that it computes, so that its files are tried in a process of their own only once.

A file beside the staircases (:mod:`uma_trio.policy.costing.store`). Its name has everything that changes the sum: the model's files as they are,
how it is loaded, and the build of llama.cpp.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from attrs import asdict, astuple

from uma_trio import __version__
from uma_trio.backend.needs import Estimate, Needs, Question
from uma_trio.config.hardware import identity
from uma_trio.policy.costing.store import cache_folder, put

_FORMAT = 4


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds."""

    needs: dict[str, int]
    curve: list[dict[str, int]]
    trained: int


_COMPUTES = ".computes"  # behind the name of the same file


def needs_file(files: Sequence[Path], question: Question | None, build: str) -> Path:
    """Return where the needs of a model are kept, whose `files` are there; an encoder has no question. Raises OSError."""
    marks = [(f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns) for f in (p.stat() for p in files)]
    asked = () if question is None else astuple(question)
    parts = (_FORMAT, __version__, identity(), build, *asked, *marks)
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"needs-{name}.json"


def recall(path: Path) -> Estimate | None:
    """Return what is stored; None if nothing is, or it cannot be used."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Stored)
        curve = tuple(Needs(**each) for each in found.curve)
        return Estimate(Needs(**found.needs), curve, found.trained)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, TypeError):
        return None


def remember(path: Path, found: Estimate) -> None:
    """Store what a model takes; a cache that cannot be written is no error."""
    put(path, msgspec.json.encode(asdict(found)))


def recall_computing(path: Path) -> bool:
    """Return whether two tokens of the model whose needs are kept in `path` were computed."""
    return path.with_suffix(_COMPUTES).exists()


def remember_computing(path: Path) -> None:
    """Store that two tokens were computed; a cache that cannot be written is no error."""
    put(path.with_suffix(_COMPUTES), b"")
