"""Measure the staircase at start-up: T(n), the most useful n first, under a deadline.

It runs on the engine's backend before the first request, in slots that it empties again. What
it could not measure in time is interpolated, and every later tick corrects the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from uma_trio.backend.base import Backend, DecodeStatus, IntArray
from uma_trio.policy.cost import CostModel, Staircase

# Where the steps are: each of 1..17 (kernels work in fours, eights and sixteens), then wider.
DENSE = tuple(range(1, 18))
WIDE = (20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ROWS = (2, 3, 4, 6, 8, 12, 16)
REPEATS = 3
DEADLINE_S = 2.0


class Calibration:
    """One measuring session. `clock` is in seconds."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._clock = clock
        self._began = clock()
        limits = backend.limits
        self._most = min(limits.n_batch, limits.n_ctx_seq)
        self._tokens = self._plain_tokens()

    def measure(self, deadline_s: float = DEADLINE_S) -> CostModel:
        """Return the model of this machine; it takes about `deadline_s` and no longer."""
        first = [n for n in (1, 2, 4, 8, 16, 32, 3, 64, 128) if n <= self._most]
        later = [n for n in (*DENSE, *WIDE) if n <= self._most and n not in first]
        times: dict[int, list[float]] = {}
        self._time(1, 1)  # the first decode builds graphs and touches memory: not counted
        for n in (*first, *later):
            spent = self._clock() - self._began
            expected = _expected(times, n)
            if times and spent + expected > deadline_s:
                continue
            repeats = REPEATS if spent + REPEATS * expected < deadline_s * 0.7 else 1
            times[n] = [self._time(n, 1) for _ in range(repeats)]
        at = tuple(sorted(times))
        computing = Staircase(at, tuple(statistics.median(times[n]) for n in at))
        return CostModel(computing=computing, output=self._outputs(computing, deadline_s))

    def _outputs(self, computing: Staircase, deadline_s: float) -> Staircase:
        """Measure what further logits rows add to a decode of the same length."""
        at, seconds = [1], [0.0]
        for n in ROWS:
            if n > min(self._most, self._backend.limits.n_slots):
                break
            if self._clock() - self._began + computing(n) > deadline_s * 1.2:
                break
            with_rows = min(self._time(n, n) for _ in range(2))
            at.append(n)
            seconds.append(max(with_rows - computing(n), -0.5 * computing(n)))
        return Staircase(tuple(at), tuple(seconds))

    def _time(self, n_tokens: int, n_rows: int) -> float:
        """Return the seconds of one decode: `n_rows` sequences that share `n_tokens`."""
        batch = self._backend.batch
        at = 0
        for slot in range(n_rows):
            n = n_tokens // n_rows + (slot < n_tokens % n_rows)
            batch.token[at : at + n] = self._tokens[at : at + n]
            batch.pos[at : at + n] = range(n)
            batch.slot[at : at + n] = slot
            batch.want[at : at + n] = 0
            at += n
            batch.want[at - 1] = 1
        began = self._clock()
        status = self._backend.decode(n_tokens)
        self._backend.logits(n_rows)  # a GPU computes until somebody looks
        took = self._clock() - began
        for slot in range(n_rows):
            self._backend.kv_remove(slot)
        return took if status == DecodeStatus.OK else float("inf")

    def _plain_tokens(self) -> IntArray:
        """Return different tokens: experts are routed by them, so one would flatter a mixture."""
        count = self._backend.model.n_vocab
        tokens = np.random.default_rng(0).integers(0, count, 2 * self._most, dtype=np.int32)
        ends = np.array(sorted(self._backend.vocabulary.end_tokens), np.int32)
        return tokens[~np.isin(tokens, ends)]


def _expected(times: dict[int, list[float]], n: int) -> float:
    """Return about how long `n` tokens will take, by the largest that was measured."""
    if not times:
        return 0.0
    largest = max(times)
    return statistics.median(times[largest]) * max(1.0, n / largest)
