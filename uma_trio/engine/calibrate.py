"""Measure the staircase: T(n), the most useful n first, under a deadline; the rest when idle.

It runs on the engine's backend while nobody has a request, in slots that it empties again. What
is not measured yet is interpolated, and every tick corrects the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
from attrs import evolve

from uma_trio.backend.base import Backend, DecodeStatus, IntArray
from uma_trio.policy.cost import CostModel, Staircase, Work

# Where the steps are: each of 1..17 (kernels work in fours, eights and sixteens), then wider.
DENSE = tuple(range(1, 18))
WIDE = (20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FIRST = (1, 2, 4, 8, 16, 32, 3, 64, 128)
ROWS = (2, 3, 4, 6, 8, 12, 16)
DEADLINE_S = 2.0
# A step is timed until two decodes in a row agree within this part, so often at the most.
AGREEMENT, PATIENCE = 0.08, 5
# Two shapes, so often in turn and then each by itself: what that costs more than this part of a
# token is no noise (an H200 shows a quarter). Where it costs, graphs are captured, and so many
# decodes of a shape come first that do not count: on CUDA one launches each kernel, one captures.
IN_TURN, BY_ITSELF, NOTICED, UNCOUNTED = 3, 4, 0.12, 2
# Looking back is measured by so many tokens behind so many cells at least: fewer cost too little
# to tell from noise.
LOOKERS, SHALLOWEST = 16, 64
# A masked cell costs its check, which is easily lost in noise and yet adds up in a full cache: on two
# AVX-512 cores a 20th of what it costs to look at one (1 token, 2,048 cells of others).
LEAST_CROWD = 0.05
# In a wide tick looking back costs about this part: 1.5 us a token and cell with 64 tokens behind
# 1,024 cells, 13.8 with 16 (same machine). There is no time to measure it at each start, and ticks soon
# tell: too little is corrected by the first wide tick, too much would keep ticks from being wide.
WIDE_SHARE = 0.11
# A step is refined when idle if it takes no longer than this: who comes meanwhile waits for it.
UNNOTICED_S = 0.1


class Stopwatch:
    """Times single decodes. `clock` is in seconds."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self.clock = clock
        limits = backend.limits
        self.most = min(limits.n_batch, limits.n_ctx_seq)
        self.n_slots = limits.n_slots
        self.uncounted = 0  # decodes of each shape that come before those that count
        self._tokens = self._plain_tokens()

    def steps(self) -> tuple[int, ...]:
        """Return every n that is worth measuring here."""
        return tuple(n for n in (*DENSE, *WIDE) if n <= self.most)

    def time(self, n_tokens: int, n_rows: int = 1) -> float:
        """Return the seconds of one decode: `n_rows` sequences that share `n_tokens`."""
        shares = [
            (slot, 0, n_tokens // n_rows + (slot < n_tokens % n_rows)) for slot in range(n_rows)
        ]
        took = self._decode(shares)
        for slot in range(n_rows):
            self._backend.kv_remove(slot)
        return took

    def steady(self, decode: Callable[[], float], patience: int = PATIENCE) -> float:
        """Return the seconds of a decode that is repeated until two in a row agree."""
        for _ in range(self.uncounted):
            decode()
        times = [decode()]
        while len(times) < patience:
            times.append(decode())
            if max(times[-2:]) <= (1.0 + AGREEMENT) * min(times[-2:]):
                return statistics.mean(times[-2:])
        return statistics.median(times[-3:])

    def time_beside(self, resident: int, n_tokens: int) -> tuple[float, float]:
        """Return the seconds of `n_tokens` that look back at `resident` cells, and of others.

        The others are of a sequence of their own, which shares the cache with those cells.
        """
        self._decode([(0, 0, resident)])
        looking = self.steady(lambda: self._decode_and_drop(0, resident, n_tokens))
        crowded = self.steady(lambda: self._decode_and_drop(1, 0, n_tokens))
        self._backend.kv_remove(0)
        return looking, crowded

    def _decode_and_drop(self, slot: int, position: int, n_tokens: int) -> float:
        took = self._decode([(slot, position, n_tokens)])
        if not self._backend.kv_remove(slot, position):
            return float("inf")  # a memory that keeps or drops a sequence whole
        return took

    def _decode(self, shares: list[tuple[int, int, int]]) -> float:
        """Compute (slot, position, tokens) shares, a logits row each; infinite if it failed."""
        batch = self._backend.batch
        at = 0
        for slot, position, n in shares:
            batch.token[at : at + n] = self._tokens[at : at + n]
            batch.pos[at : at + n] = range(position, position + n)
            batch.slot[at : at + n] = slot
            batch.want[at : at + n] = 0
            at += n
            batch.want[at - 1] = 1
        began = self.clock()
        status = self._backend.decode(at)
        self._backend.logits(len(shares))  # a GPU computes until somebody looks
        took = self.clock() - began
        return took if status == DecodeStatus.OK else float("inf")

    def _plain_tokens(self) -> IntArray:
        """Return different tokens: experts are routed by them, so one would flatter a mixture."""
        count = self._backend.model.n_vocab
        tokens = np.random.default_rng(0).integers(0, count, 2 * self.most, dtype=np.int32)
        ends = np.array(sorted(self._backend.vocabulary.end_tokens), np.int32)
        return tokens[~np.isin(tokens, ends)]


class Calibration:
    """One measuring session. `clock` is in seconds."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._watch = Stopwatch(backend, clock)
        self._began = clock()

    def measure(self, deadline_s: float = DEADLINE_S) -> CostModel:
        """Return the model of this machine; it takes about `deadline_s` and no longer."""
        watch = self._watch
        first = [n for n in FIRST if n <= watch.most]
        times: dict[int, float] = {}
        watch.time(1)  # the first decode builds graphs and touches memory: not counted
        switch_s = self._switching(deadline_s)
        watch.uncounted = UNCOUNTED if switch_s else 0
        for n in (*first, *(n for n in watch.steps() if n not in first)):
            spent = self._spent()
            expected = _expected(times, n)
            if times and spent + expected > 0.8 * deadline_s:
                continue
            patience = PATIENCE if spent + PATIENCE * expected < deadline_s * 0.6 else 1
            times[n] = watch.steady(lambda n=n: watch.time(n), patience)  # type: ignore[misc]
        at = tuple(sorted(times))
        computing = Staircase(at, tuple(times[n] for n in at))
        depth_s, crowd_s = self._looking_back(computing, deadline_s)
        return CostModel(
            computing,
            self._outputs(computing, deadline_s),
            depth_s=depth_s,
            wide_depth_s=WIDE_SHARE * depth_s,
            crowd_s=crowd_s,
            switch_s=switch_s,
        )

    def _spent(self) -> float:
        return self._watch.clock() - self._began

    def _looking_back(self, computing: Staircase, deadline_s: float) -> tuple[float, float]:
        """Return what a token pays for a cell that it looks back at, and for one of others.

        Zeros where there is no time for it, or it is lost in noise.
        """
        watch = self._watch
        left = deadline_s - self._spent() - 5 * computing(LOOKERS)
        chunks = [n for n in computing.at if computing(n) < left and n + LOOKERS <= watch.most]
        if watch.n_slots < 2 or not chunks or chunks[-1] < SHALLOWEST:
            return 0.0, 0.0
        resident = chunks[-1]
        looking, crowded = watch.time_beside(resident, LOOKERS)
        empty = watch.steady(lambda: watch.time(LOOKERS))
        cells = resident * LOOKERS
        crowd_s = min(max(0.0, crowded - empty), max(0.0, looking - empty)) / cells
        depth_s = max(0.0, looking - empty) / cells - crowd_s
        crowd_s = max(crowd_s, LEAST_CROWD * depth_s)
        return (depth_s, crowd_s) if np.isfinite(depth_s) else (0.0, 0.0)

    def _switching(self, deadline_s: float) -> float:
        """Return what a decode costs more when the one before had another shape."""
        time, shapes = self._watch.time, (1, min(2, self._watch.most))
        token_s = time(1)
        if (IN_TURN + BY_ITSELF) * 2 * token_s > 0.4 * deadline_s:
            return 0.0  # such a machine captures nothing
        in_turn = min([sum(time(n) for n in shapes) for _ in range(IN_TURN)][1:])
        apart = sum(min([time(n) for _ in range(BY_ITSELF)][-2:]) for n in shapes)
        extra = (in_turn - apart) / len(shapes)
        return extra if extra > NOTICED * token_s else 0.0

    def _outputs(self, computing: Staircase, deadline_s: float) -> Staircase:
        """Measure what further logits rows add to a decode of the same length."""
        watch = self._watch
        at, seconds = [1], [0.0]
        for n in ROWS:
            if n > min(watch.most, watch.n_slots):
                break
            if self._spent() + computing(n) > deadline_s * 1.2:
                break
            with_rows = watch.steady(lambda n=n: watch.time(n, n))  # type: ignore[misc]
            at.append(n)
            seconds.append(max(with_rows - computing(n), -0.5 * computing(n)))
        return Staircase(tuple(at), tuple(seconds))


class Refinement:
    """Measures, one a time, the steps that a model has not got: for an engine that has no work."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._watch = Stopwatch(backend, clock)
        self._tried: set[int] = set()

    def refine(self, cost: CostModel) -> CostModel | None:
        """Return `cost` with one step more; None when there is none left. Takes a few decodes.

        Only for a backend whose slots are empty; they are empty after it.
        """
        self._watch.uncounted = UNCOUNTED if cost.switch_s else 0
        for n in self._watch.steps():
            if n in cost.steps or n in self._tried or cost.seconds(Work(n)) > UNNOTICED_S:
                continue
            self._tried.add(n)
            took = self._watch.steady(lambda n=n: self._watch.time(n))  # type: ignore[misc]
            if not np.isfinite(took):
                return cost
            table = cost.computing.with_step(n, took / cost.scale)
            return evolve(
                cost, computing=table, measured=cost.measured.with_step(n, took / cost.scale)
            )
        return None


def _expected(times: dict[int, float], n: int) -> float:
    """Return about how long `n` tokens will take, by the largest that was measured."""
    if not times:
        return 0.0
    largest = max(times)
    return times[largest] * max(1.0, n / largest)
