"""What tests of a backend are built from: batches by rows, prompts, and when logits agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uma_trio.backend.base import Backend, DecodeStatus, FloatArray, Overlap, nothing

N_CTX, N_SLOTS, N_BATCH = 512, 4, 64
# Rows of one sequence at different batch widths differ by up to 0.01 here, and the logits of a
# row have a spread of about 1.
NEAR = 0.05

Row = tuple[int, int, int, int]  # slot, position, token, wanted


def decode(backend: Backend, rows: Sequence[Row], while_computing: Overlap = nothing) -> int:
    """Write `rows` into the batch and decode them."""
    batch = backend.batch
    for index, (slot, position, token, want) in enumerate(rows):
        batch.slot[index], batch.pos[index] = slot, position
        batch.token[index], batch.want[index] = token, want
    return backend.decode(len(rows), while_computing)


def prompt(slot: int, tokens: Sequence[int], start: int = 0, *, want: bool = True) -> list[Row]:
    """Return the rows of a prompt, logits wanted for its last token."""
    last = len(tokens) - 1
    return [(slot, start + i, token, int(want and i == last)) for i, token in enumerate(tokens)]


def feed(backend: Backend, slot: int, tokens: Sequence[int], chunk: int = N_BATCH) -> FloatArray:
    """Compute `tokens` from position 0 in chunks; return the last row of logits."""
    for start in range(0, len(tokens), chunk):
        rows = prompt(slot, tokens[start : start + chunk], start)
        assert decode(backend, rows) == DecodeStatus.OK
    return backend.logits(1)[0].copy()


def assert_same(one: FloatArray, two: FloatArray) -> None:
    """Two rows choose the same token, or one that is nearly as likely."""
    assert abs(float(two.max() - two[one.argmax()])) < NEAR
    assert float(np.abs(one - two).max()) < NEAR


def text(seed: int, n: int) -> list[int]:
    """Return `n` letters as tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(97, 122, n)]
