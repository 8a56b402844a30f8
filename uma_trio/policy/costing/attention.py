"""Remember how a model computes attention best on this machine, so that only its first start times it.

A file beside the staircases (:mod:`uma_trio.policy.costing.store`). Its name has everything that changes the times:
the machine, llama.cpp, the model, the type of the KV cache, the threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
from attrs import astuple, evolve, frozen

from uma_trio.backend.attention import (
    NEEDED,
    SHAPES,
    AttentionShape,
    Seconds,
    Subject,
    prefers_flash,
)
from uma_trio.config.hardware import identity
from uma_trio.policy.costing.neighbours import BUSY, Reader, cpu_times, others_share
from uma_trio.policy.costing.store import cache_folder, put

_FORMAT = 2
TRIES = 3
"""Starts that measure a subject beside other programs. Some machines are never quiet."""


def attention_file(subject: Subject) -> Path:
    """Return where the times of a subject are kept."""
    parts = (_FORMAT, identity(), *astuple(subject))
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"attention-{name}.json"


@frozen
class Timed:
    """The seconds of all shapes, and the part of the machine that other programs used meanwhile.

    `tries` is how many starts have measured: these seconds are those that others disturbed least.
    """

    seconds: Seconds
    others: float = 0.0
    tries: int = 1

    @property
    def is_final(self) -> bool:
        """Whether no further start measures."""
        return self.others < BUSY or self.tries >= TRIES


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shape and the seconds that it took."""

    sequences: int
    tokens: int
    off_s: float
    on_s: float


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds."""

    others: float
    tries: int
    rows: list[_Row]


def recall(subject: Subject) -> Timed | None:
    """Return what was timed of a subject; None if nothing was, or what is stored cannot be used."""
    try:
        stored = msgspec.json.decode(attention_file(subject).read_bytes(), type=_Stored)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    seconds = {
        AttentionShape(row.sequences, row.tokens): (row.off_s, row.on_s) for row in stored.rows
    }
    possible = all(0 < one < math.inf for pair in seconds.values() for one in pair)
    whole = set(NEEDED) <= set(seconds) <= set(SHAPES)
    return Timed(seconds, stored.others, stored.tries) if possible and whole else None


def remember(subject: Subject, timed: Timed) -> None:
    """Store what was timed; a cache that cannot be written is no error."""
    rows = [
        _Row(shape.sequences, shape.tokens, off_s, on_s)
        for shape, (off_s, on_s) in timed.seconds.items()
    ]
    put(attention_file(subject), msgspec.json.encode(_Stored(timed.others, timed.tries, rows)))


def flash_is_faster(
    subject: Subject, measure: Callable[[], Seconds], read: Reader = cpu_times
) -> bool | None:
    """Whether flash attention is worth it for a subject, as recalled or measured now.

    What was measured while other programs used a tenth of the machine or more is measured again at the next starts,
    :data:`TRIES` times at most, and replaced by what is disturbed less. `measure` returns the times of all shapes,
    or nothing where it had no time for them; None if nothing is known then.
    """
    known = recall(subject)
    if known is None or not known.is_final:
        before = read()
        seconds = measure()
        if seconds:
            now = Timed(seconds, others_share(before, read()))
            tries = 1 if known is None else known.tries + 1
            known = now if known is None or now.others <= known.others else known
            known = evolve(known, tries=tries)
            remember(subject, known)
    return None if known is None else prefers_flash(known.seconds)


def flash_as_recalled(subject: Subject, _measure: Callable[[], Seconds]) -> bool | None:
    """Whether flash attention is worth it, if that was measured; nothing is measured now."""
    known = recall(subject)
    return None if known is None else prefers_flash(known.seconds)
