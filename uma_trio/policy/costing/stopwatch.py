"""Time single decodes of the engine's backend, and keep what was timed.

What is timed is a :class:`BatchShape`. Whoever measures under a :class:`Deadline` hands it to the
:class:`Stopwatch`, which asks it before each decode: none is begun too late, wherever it is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from attrs import define, field, frozen

from uma_trio.backend.base import Backend, DecodeStatus, IntArray

# Two figures that differ by no more than this part agree. If none of so many agree, the least is used.
AGREEMENT, PATIENCE = 0.08, 5
# A sample is the quickest of the decodes that fit into this: one, unless the model is tiny.
SAMPLE_S, MOST_IN_SAMPLE = 0.004, 8
# A decode of more tokens takes so long that it makes no difference whether its graph was captured before.
LAUNCHED = 128
LEAST_S = 1e-6  # no decode takes less, whatever a coarse clock says


@frozen
class BatchShape:
    """What decides how long a decode in an empty context takes."""

    tokens: int
    rows: int = 1  # of them that want logits: one, or all, in as many sequences as there are slots


class Stopped(Exception):
    """No decode was begun, since the deadline has passed; or it was interrupted."""


class Deadline:
    """The end of a session of so many `seconds` that begins now."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._began = clock()

    @property
    def passed(self) -> float:
        """The part of the session that has passed, 0 to 1."""
        return min(1.0, (self._clock() - self._began) / self._seconds) if self._seconds else 1.0

    def fits(self, expected_s: float, share: float = 1.0) -> bool:
        """Return whether what takes `expected_s` would end within that share of the session."""
        return self._clock() - self._began + expected_s <= share * self._seconds


class Stopwatch:
    """Times decodes, in slots that it empties again. `clock` is in seconds.

    With a `deadline`, what would begin a decode after it raises :class:`Stopped` instead; so does
    a decode that is interrupted. One that failed has taken infinitely long.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._clock = clock
        limits = backend.limits
        self.most = min(limits.n_batch, limits.n_ctx_seq)
        self.n_slots = limits.n_slots
        self._n_fill = min(limits.n_ctx_seq, limits.n_ctx - self.most)
        self._n_rows = limits.n_rows
        self.deadline: Deadline | None = None
        self.uncounted = 0  # decodes of each shape that come before those that count
        self._tokens = self._plain_tokens()

    def able(self, shapes: Iterable[BatchShape]) -> list[BatchShape]:
        """Return those of `shapes` that this backend can compute."""
        return [s for s in shapes if s.tokens <= self.most and s.rows <= self._n_rows]

    def warming(self, shape: BatchShape) -> int:
        """Return how many decodes of `shape` come before those that count."""
        return self.uncounted if shape.tokens <= LAUNCHED else 0

    def time(self, shape: BatchShape) -> float:
        slots = min(shape.rows, self.n_slots)
        each, more = divmod(shape.tokens, slots)
        shares = [(slot, 0, each + (slot < more)) for slot in range(slots)]
        try:
            return self._decode(shares, every=shape.rows == shape.tokens)
        finally:
            for slot in range(slots):
                self._backend.kv_remove(slot)

    def sample(self, shape: BatchShape) -> float:
        """Return the seconds of the quickest of some decodes of `shape`."""
        for _ in range(self.warming(shape)):
            self.time(shape)
        took = [self.time(shape)]
        while sum(took) + min(took) <= SAMPLE_S and len(took) < MOST_IN_SAMPLE:
            took.append(self.time(shape))
        return min(took)

    def beside(self, used_cells: int, n_tokens: int, times: int) -> tuple[float, float, float]:
        """Return the seconds of `resident` tokens, of `n_tokens` that look back at them, of others.

        The others are of a sequence of their own, which shares the cache with those cells. The
        latter two are the quickest of so many `times`.
        """
        looking, beside_others = [], []
        try:
            filling = self._decode([(0, 0, used_cells)])
            for _ in range(times + self.uncounted):
                looking.append(self._decode_and_drop(0, used_cells, n_tokens))
            for _ in range(times + self.uncounted):
                beside_others.append(self._decode_and_drop(1, 0, n_tokens))
        finally:
            self._backend.kv_remove(0)
        return filling, min(looking[self.uncounted :]), min(beside_others[self.uncounted :])

    def spanning(self, most: int, times: int, most_s: float) -> tuple[int, float]:
        """Return the seconds of one token beside so many cells of another sequence: cells, seconds.

        The quickest of so many `times`. Cells are filled up to `most`, for about `most_s` seconds.
        """
        if self.n_slots < 2:
            return 0, 0.0
        n, began = 0, self._clock()
        try:
            while n + self.most <= min(most, self._n_fill) and self._clock() - began < most_s:
                self._decode([(0, n, self.most)])
                n += self.most
            took = [self._decode_and_drop(1, 0, 1) for _ in range(times + self.uncounted)]
        finally:
            self._backend.kv_remove(0)
            self._backend.kv_remove(1)
        return n, min(took[self.uncounted :])

    def _decode_and_drop(self, slot: int, position: int, n_tokens: int) -> float:
        took = self._decode([(slot, position, n_tokens)])
        if not self._backend.kv_remove(slot, position):
            return float("inf")  # a memory that keeps or drops a sequence whole
        return took

    def _decode(self, shares: list[tuple[int, int, int]], *, every: bool = False) -> float:
        """Compute (slot, position, tokens) shares; infinite if it failed.

        A logits row each, or one for `every` token.
        """
        if self.deadline is not None and not self.deadline.fits(0.0):
            raise Stopped
        batch = self._backend.batch
        at = 0
        for slot, position, n in shares:
            batch.token[at : at + n] = self._tokens[at : at + n]
            batch.pos[at : at + n] = range(position, position + n)
            batch.slot[at : at + n] = slot
            batch.want[at : at + n] = every
            at += n
            batch.want[at - 1] = 1
        began = self._clock()
        status = self._backend.decode(at)
        if status == DecodeStatus.OK:
            # A GPU computes until the logits are read.
            self._backend.logits(at if every else len(shares))
        took = max(LEAST_S, self._clock() - began)
        if status == DecodeStatus.ABORTED:
            raise Stopped
        return took if status == DecodeStatus.OK else float("inf")

    def _plain_tokens(self) -> IntArray:
        """Return different tokens: experts are routed by them, so one would flatter a mixture."""
        count = self._backend.model.n_vocab
        tokens = np.random.default_rng(0).integers(0, count, 2 * self.most, dtype=np.int32)
        ends = np.array(sorted(self._backend.vocabulary.end_tokens), np.int32)
        return tokens[~np.isin(tokens, ends)]


@define
class Samples:
    """What was timed, by shape.

    Other programs only ever add time to a decode. So the truth is the least, and two that agree
    on it are enough.
    """

    _seconds: dict[BatchShape, list[float]] = field(factory=dict)

    def __contains__(self, shape: BatchShape) -> bool:
        return shape in self._seconds

    def add(self, shape: BatchShape, seconds: float) -> None:
        self._seconds.setdefault(shape, []).append(seconds)

    def count(self, shape: BatchShape) -> int:
        return len(self._seconds.get(shape, ()))

    def settled(self, shape: BatchShape) -> bool:
        """Return whether another sample of `shape` is not worth its time."""
        least = sorted(self._seconds.get(shape, ()))
        if len(least) < 2:
            return False
        return least[1] <= (1.0 + AGREEMENT) * least[0] or len(least) >= PATIENCE

    def seconds(self, shape: BatchShape) -> float:
        """Return how long `shape` takes: what the two quickest agree on, or the quickest."""
        first, *more = sorted(self._seconds[shape])
        if more and more[0] <= (1.0 + AGREEMENT) * first:
            return (first + more[0]) / 2
        return first

    def sizes(self) -> dict[int, float]:
        """Return the seconds by tokens of all shapes with one row that could be computed."""
        return self._finite({shape.tokens: shape for shape in self._seconds if shape.rows == 1})

    def by_rows(self) -> dict[int, float]:
        """Return the same of all shapes in which every token has a row, by rows."""
        return self._finite({shape.rows: shape for shape in self._seconds if shape.rows > 1})

    def _finite(self, shapes: dict[int, BatchShape]) -> dict[int, float]:
        found = {n: self.seconds(shapes[n]) for n in sorted(shapes)}
        return {n: seconds for n, seconds in found.items() if np.isfinite(seconds)}
