"""How long decodes deep in a full KV cache take without flash attention and with it, on this machine.

Two contexts of the loaded model are timed in turn, so that what other programs do to one they do to the
other, too. Their caches are filled by copying: a few tokens are computed, and their cells are copied until
each of the sequences has its depth. Copies keep the positions of the first ones. So the next token follows
these, and looks back at all cells of its sequence. What cells hold changes no time.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_load import make_context
from uma_trio.backend._llama_options import FLASH_OFF, FLASH_ON
from uma_trio.backend.attention import (
    DEPTH,
    NEEDED,
    PROBE_BATCH,
    PROBE_CELLS,
    SEQUENCES,
    SHAPES,
    AttentionShape,
    Seconds,
)
from uma_trio.backend.base import DecodeStatus, ModelError

_FIRST: Final = 16  # tokens that are computed of each cache; cells are doubled from here on
# A round times all shapes. A second one follows if it begins within `LONGEST_S`, as one may have been disturbed; others
# if they begin within `LAST_S`. There is none at all if the first one would take longer than `LONGEST_S`.
LEAST_ROUNDS, MOST_ROUNDS = 2, 20
LAST_S, LONGEST_S = 1.5, 10.0


def time_both(
    model: int,
    path: Path,
    *,
    threads: int,
    kv_type: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Return the seconds of each shape without flash attention and with it: the quickest of some rounds.

    Takes two seconds or two rounds; where tokens are slow these may leave out what is not `NEEDED`. Empty where even
    that would take too long, or llama.cpp refuses: such a model is used without a measurement. The model stays as it
    is.
    """
    with ExitStack() as stack:
        try:
            off, on = (
                stack.enter_context(_Deep(model, path, threads, kv_type, flash))
                for flash in (FLASH_OFF, FLASH_ON)
            )
            both = off, on
            began = clock()
            for one in both:
                one.fill()
            again = clock()
            for one in both:
                one.decode(AttentionShape(1, _FIRST))
            token_s = (clock() - again) / _FIRST
            for shapes in (SHAPES, NEEDED):
                if token_s * sum(shape.n_tokens for shape in shapes) <= LONGEST_S:
                    return _rounds(both, shapes, clock, began)
            return {}
        except (ModelError, _Refused):
            return {}


class _Refused(Exception):
    """llama.cpp did not do what was asked."""


def _rounds(
    both: tuple[_Deep, _Deep],
    shapes: Sequence[AttentionShape],
    clock: Callable[[], float],
    began: float,
) -> Seconds:
    """Time shapes in both contexts in turn, in the opposite order in each other round: A B, B A."""
    found: Seconds = {}
    for number in range(MOST_ROUNDS):
        if number and clock() - began > (LONGEST_S if number < LEAST_ROUNDS else LAST_S):
            break
        for shape in shapes:
            took = [math.inf, math.inf]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                start = clock()
                both[which].decode(shape)
                took[which] = clock() - start
            off_s, on_s = found.get(shape, took)
            found[shape] = (min(off_s, took[0]), min(on_s, took[1]))
    return found


class _Deep:
    """A context whose sequences hold `DEPTH` cells each, for the length of a ``with`` block."""

    def __init__(self, model: int, path: Path, threads: int, kv_type: str, flash: int) -> None:
        self._context = make_context(
            model,
            path,
            n_ctx=PROBE_CELLS,
            n_batch=PROBE_BATCH,
            n_seq_max=SEQUENCES + 1,
            streams=False,
            threads=threads,
            kv_type=kv_type,
            flash=flash,
        )
        self._memory = llama.llama_get_memory(self._context)
        self._batch: Any = llama.llama_batch_init(PROBE_BATCH, 0, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)

    def fill(self) -> None:
        """Give each sequence its cells. The next position of each is the first that was computed."""
        self._compute(AttentionShape(1, _FIRST), 0)
        n = _FIRST
        while n < DEPTH:
            self._copy(self._saved(), 0)
            n *= 2
        saved = self._saved()
        for sequence in range(1, SEQUENCES):
            self._copy(saved, sequence)

    def decode(self, shape: AttentionShape) -> None:
        """Compute a shape behind the cells, and forget it."""
        self._compute(shape, _FIRST)
        for sequence in range(shape.sequences):
            lib.seq_rm(self._memory, sequence, _FIRST, -1)

    def _compute(self, shape: AttentionShape, position: int) -> None:
        batch, at = self._batch, 0
        for sequence in range(shape.sequences):
            for n in range(shape.tokens):
                batch.token[at], batch.pos[at] = 1 + n, position + n  # 0 may be no token
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = n == shape.tokens - 1
                at += 1
        batch.n_tokens = at
        if lib.decode(self._context, batch) != DecodeStatus.OK:
            raise _Refused

    def _saved(self) -> ctypes.Array[ctypes.c_char]:
        size = int(lib.state_size(self._context, 0, 0))
        saved = ctypes.create_string_buffer(size)
        if int(lib.state_get(self._context, ctypes.addressof(saved), size, 0, 0)) != size:
            raise _Refused
        return saved

    def _copy(self, saved: ctypes.Array[ctypes.c_char], sequence: int) -> None:
        """Let `sequence` have one more copy of the saved cells."""
        scratch = SEQUENCES
        done = lib.state_set(self._context, ctypes.addressof(saved), len(saved), scratch, 0)
        if int(done) != len(saved):
            raise _Refused
        lib.seq_cp(self._memory, scratch, sequence, -1, -1)
        lib.seq_rm(self._memory, scratch, -1, -1)
