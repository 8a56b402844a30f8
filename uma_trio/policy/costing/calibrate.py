"""Measure the staircase: T(n), the most useful n first, under a deadline.

It runs on the engine's backend before anybody has a request, in slots that it empties again. What
there is no time for is interpolated, refined when the daemon is idle (:mod:`uma_trio.policy.costing.refine`),
and every tick corrects the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from uma_trio.backend.base import Backend
from uma_trio.backend.polite import politely
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.neighbours import BUSY, Reader, cpu_times, others_share
from uma_trio.policy.costing.stopwatch import (
    LEAST_S,
    BatchShape,
    Deadline,
    Samples,
    Stopped,
    Stopwatch,
)
from uma_trio.policy.costing.store import Unusable, cost_file, recall, remember


def _sizes(*tokens: int) -> tuple[BatchShape, ...]:
    return tuple(BatchShape(n) for n in tokens)


def _rows(*tokens: int) -> tuple[BatchShape, ...]:
    return tuple(BatchShape(n, n) for n in tokens)


# What is worth knowing, the most useful first. Ticks are filled up to a size that is known, and
# kernels take rows in fours and eights: those come first, dense where a tick with streams in it
# likely ends. The odd ones are for as many decoders, to know whether one more would cost less.
ORDER = (
    *_sizes(1, 4, 8, 2, 16, 3, 32),
    *_rows(2, 4, 3),
    *_sizes(12, 24, 64),
    *_rows(8),
    *_sizes(7),
    *_rows(7),
    *_sizes(128, 256, 512, 1024, 384, 768, 6, 20, 5),
    *_rows(6, 5),
    *_sizes(48),
    *_rows(16),
    *_sizes(28, 40, 10, 14, 9, 11, 13, 15, 17),
    *_rows(12, 32, 24),  # ticks with drafts have a row for each token
    *_sizes(96, 192),
)
NEEDED = ORDER[:7]  # without these, prompts would be computed in tiny chunks
# No chunk of a prompt is larger than the largest measured size. If tokens are so slow that these sizes did not fit into
# the session, they may take so many times as long. A small model on a busy machine took 0.8 s for one token, and its
# prompts were computed one token at a time.
CHUNKS, LONGER = _sizes(4, 8, 16, 32), 5
ONE, TWO = BatchShape(1), BatchShape(2)
# Sizes for which there was no time are extrapolated if their ticks take no longer than so many seconds.
DOUBLED, LONGEST_S = (64, 128, 256, 512, 1024), 5.0
DEADLINE_S = 2.0
# Each shape is timed once within the first part of the session, those that are needed whenever they
# fit; looking back must end within the second; the rest is for second samples, and for third ones
# where two do not agree.
FIRST_LOOK, LOOKING_BACK = 0.75, 0.85
# No stair is that high, and none goes down that far: what was so much slower than expected, or than
# something wider, was disturbed.
DISTURBED = 2.0
DEAREST = 0.12  # part of the session that one of the first looks may take
# So long, or so often, one token is computed before anything counts: caches fill, clocks rise.
WARM_S, MOST_WARM = 0.02, 40
# Two shapes, so often in turn and then each by itself: what that costs more than this part of a
# token is no noise (an H200 shows a quarter). Where it costs, graphs are captured, and so many
# decodes of a shape come first that do not count: on CUDA one launches each kernel, one captures.
# llama.cpp builds its graph again for a new shape on any machine; of a tiny model that is a fifth of
# a token, and yet only a tenth of a millisecond.
IN_TURN, BY_ITSELF, NOTICED, UNCOUNTED = 3, 4, 0.12, 2
LEAST_RECAPTURE_S = 0.0002
SLOWEST_CAPTURED_S = 0.05  # a machine that needs longer for a token captures nothing
# Looking back is measured by so many tokens behind so many cells at least: llama.cpp computes attention
# over cells by the 256 (``get_n_kv``), so that fewer would show nothing. Where there is no time for that,
# what reading a cell takes is assumed.
LOOKERS, SHALLOWEST, LOOKS = BatchShape(16), BatchShape(256), 2
# Where graphs are captured a tick pays for each cell that it spans, once for all of its tokens: 40 to
# 60 ns on an H200 (8B), which shows behind so many cells only. Filling them may take so many seconds.
SPANNED, SPANNED_LOOKS, SPANNED_S = 4096, 8, 0.4
# A masked cell costs its check, which is easily lost in noise and yet adds up in a full cache: on two
# AVX-512 cores a 20th of what it costs to look at one (1 token, 2,048 cells of others).
LEAST_USED_SHARE = 0.05
# In a wide tick looking back costs about this part: with flash attention behind 4,096 cells 3.1 us a token and cell with 16
# and 32 tokens, 1.2 with 64 and 1.0 with 512 (0.5B, two AVX-512 cores); without, 0.11 was measured. There is no time to
# measure it at each start, and ticks soon tell: too little is corrected by the first wide tick, too much would keep ticks
# from being wide.
WIDE_SHARE = 0.33


def assume_looking_back(cost: CostModel, cell_s: float, *, whole_cache: bool) -> CostModel:
    """Return `cost` with a price for cells, where there was no time to measure it.

    It is what reading a cell takes, `cell_s`: on two AVX-512 cores 1.2 us of the 1.3 that were measured
    without flash attention, where a token pays for the `whole_cache`. Where graphs are captured it is
    read once a tick. Ticks correct it, from anything but nothing.
    """
    if cost.context_cell_s or cost.used_cell_s or cost.spanned_cell_s:
        return cost
    if cost.recapture_s:
        own_s = LEAST_USED_SHARE * cell_s
        return evolve(
            cost,
            spanned_cell_s=cell_s,
            context_cell_s=own_s,
            wide_context_cell_s=WIDE_SHARE * own_s,
        )
    used_cell_s = cell_s if whole_cache else LEAST_USED_SHARE * cell_s
    own_s = cell_s - used_cell_s
    return evolve(
        cost,
        context_cell_s=own_s,
        wide_context_cell_s=WIDE_SHARE * own_s,
        used_cell_s=used_cell_s,
    )


class Calibration:
    """One measuring session. `clock` is in seconds; `on_progress` is told the part of it that has passed."""

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float],
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_progress = on_progress
        self._watch = Stopwatch(backend, clock)
        self._samples = Samples()
        # Where graphs are never captured, whatever looks like it is another program's work.
        self._captures = backend.traits.shape_costs
        self._recapture_s = self._capture_s = 0.0
        self._context_cell_s = self._used_cell_s = self._spanned_cell_s = 0.0

    def measure(self, deadline_s: float = DEADLINE_S) -> CostModel:
        """Return the model of this machine, after `deadline_s` at the most.

        No decode is begun after that, and none that is expected to end after it: so it is late by
        one decode at the most, where that took longer than those before it. The very first is
        computed in any case: a model knows at least the time of one token. Where tokens are slow,
        the same is true of a deadline :data:`LONGER` times as late, until then for `CHUNKS` alone.
        """
        deadline = Deadline(self._clock, deadline_s)
        later = Deadline(self._clock, LONGER * deadline_s)
        began = self._clock()
        self._watch.time(ONE)  # builds graphs and touches memory
        first_s = max(LEAST_S, self._clock() - began)
        self._watch.deadline = deadline
        try:
            self._recapture_s, self._capture_s = self._switching()
            self._watch.uncounted = UNCOUNTED if self._recapture_s else 0
            self._look(deadline, NEEDED)
            if self._recapture_s:
                self._span()
            self._look(deadline, ORDER, FIRST_LOOK, DEAREST * deadline_s)
            if not self._recapture_s:
                self._look_back(deadline)
            self._look_again(deadline)
            self._look(deadline, ORDER)
        except Stopped:
            pass  # the sizes measured so far are enough, except for missing CHUNKS
        self._watch.deadline = later
        with suppress(Stopped):
            self._look(later, CHUNKS)
        return self._model(first_s)

    def _model(self, first_s: float) -> CostModel:
        sizes = {ONE.tokens: first_s} | _undisturbed(self._samples.sizes())
        sizes |= _larger(sizes, self._watch.most)
        computing = Staircase(tuple(sizes), tuple(sizes.values()))
        rows = {1: 0.0} | {
            n: max(seconds - computing(n), -0.5 * computing(n))
            for n, seconds in _undisturbed(self._samples.by_rows()).items()
        }
        return CostModel(
            computing,
            Staircase(tuple(rows), tuple(rows.values())),
            context_cell_s=self._context_cell_s,
            wide_context_cell_s=WIDE_SHARE * self._context_cell_s,
            used_cell_s=self._used_cell_s,
            spanned_cell_s=self._spanned_cell_s,
            recapture_s=self._recapture_s,
            capture_s=self._capture_s,
        )

    def _switching(self) -> tuple[float, float]:
        """Return what a decode costs more when the one before had another shape, and what the next one does.

        On the way the machine gets warm. Where shapes cost nothing, what was timed counts.
        """
        time, most = self._watch.time, self._watch.most
        alone = [time(ONE)]
        if alone[0] > SLOWEST_CAPTURED_S or most < TWO.tokens:
            self._samples.add(ONE, alone[0])
            return 0.0, 0.0
        while len(alone) < BY_ITSELF or (sum(alone) < WARM_S and len(alone) < MOST_WARM):
            alone.append(time(ONE))
        token_s = min(alone[-(len(alone) // 2) :])
        two_s, one_s = self._in_turn()
        if one_s > (1.0 + NOTICED) * token_s:
            # Or another program ran just now.
            two_s, one_s = map(min, (two_s, one_s), self._in_turn())
        if not self._captures or one_s <= (1.0 + NOTICED) * token_s:
            # One sample each: a second one, from another time, may find the machine quicker or slower.
            self._samples.add(ONE, min(token_s, one_s))
            self._samples.add(TWO, two_s)
            return 0.0, 0.0
        # The shape before was ONE, so these begin with a capture, and those of TWO with a launch.
        ones, twos = ([time(shape) for _ in range(BY_ITSELF)] for shape in (ONE, TWO))
        one_alone_s, two_alone_s = min(ones[-2:]), min(twos[-2:])
        extra_s = (two_s - two_alone_s + one_s - one_alone_s) / 2
        if extra_s <= max(NOTICED * token_s, LEAST_RECAPTURE_S):
            return 0.0, 0.0
        return extra_s, max(0.0, min(ones[0] - one_alone_s, twos[1] - two_alone_s))

    def _in_turn(self) -> tuple[float, float]:
        """Return what two tokens and one take at best, each after the other; the first to warm."""
        time = self._watch.time
        turns = [(time(TWO), time(ONE)) for _ in range(IN_TURN)][1:]
        return min(two for two, _ in turns), min(one for _, one in turns)

    def _look(
        self,
        deadline: Deadline,
        shapes: Iterable[BatchShape],
        share: float = 1.0,
        dearest_s: float = float("inf"),
    ) -> None:
        for shape in self._watch.able(shapes):
            known = shape in self._samples
            # What rows add is told by the same tokens without them.
            told = shape.rows == 1 or BatchShape(shape.tokens) in self._samples
            expected_s = self._expected(shape)
            if known or not told or expected_s > dearest_s:
                continue
            self._show(deadline)
            if deadline.fits(expected_s, share):
                self._samples.add(shape, self._watch.sample(shape))
                if expected_s and self._samples.seconds(shape) > DISTURBED * expected_s:
                    self._samples.add(shape, self._watch.sample(shape))

    def _look_again(self, deadline: Deadline) -> None:
        """Time again what was timed once, or not twice the same, the most useful first."""
        shapes = [shape for shape in self._watch.able(ORDER) if shape in self._samples]
        for shape in shapes:
            self._show(deadline)
            while not self._samples.settled(shape) and deadline.fits(self._expected(shape)):
                self._samples.add(shape, self._watch.sample(shape))

    def _show(self, deadline: Deadline) -> None:
        if self._on_progress is not None:
            self._on_progress(deadline.passed)

    def _look_back(self, deadline: Deadline) -> None:
        """Find what a token pays for a cell that it looks back at, and for one of others.

        Zeros where there is no time for it, or it is lost in noise.
        """
        watch = self._watch
        looks_s = (2 * LOOKS + 1) * self._expected(LOOKERS)
        chunks = [
            shape
            for shape in (SHALLOWEST, *map(BatchShape, self._samples.sizes()))
            if SHALLOWEST.tokens <= shape.tokens <= watch.most - LOOKERS.tokens
            and deadline.fits(self._expected(shape) + looks_s, LOOKING_BACK)
        ]
        if watch.n_slots < 2 or not chunks:
            return
        chunk = max(chunks, key=lambda shape: shape.tokens)
        used_cells = chunk.tokens
        filling, looking, beside_others = watch.beside(used_cells, LOOKERS.tokens, LOOKS)
        if not watch.uncounted:
            self._samples.add(chunk, filling)
        self._samples.add(LOOKERS, watch.sample(LOOKERS))
        empty = self._samples.seconds(LOOKERS)
        cells = used_cells * LOOKERS.tokens
        used_cell_s = min(max(0.0, beside_others - empty), max(0.0, looking - empty)) / cells
        context_cell_s = max(0.0, looking - empty) / cells - used_cell_s
        if np.isfinite(context_cell_s):
            self._context_cell_s, self._used_cell_s = (
                context_cell_s,
                max(used_cell_s, LEAST_USED_SHARE * context_cell_s),
            )

    def _span(self) -> None:
        """Find what a tick pays for a cell that it spans; zero where there is no time for it."""
        if ONE not in self._samples:
            self._samples.add(ONE, self._watch.sample(ONE))
        cells, took_s = self._watch.spanning(SPANNED, SPANNED_LOOKS, SPANNED_S)
        more_s = took_s - self._samples.seconds(ONE)
        if cells and np.isfinite(more_s):
            self._spanned_cell_s = max(0.0, more_s) / cells
            self._context_cell_s = LEAST_USED_SHARE * self._spanned_cell_s  # ticks correct it

    def _expected(self, shape: BatchShape) -> float:
        sizes = self._samples.sizes()
        above = [seconds for n, seconds in sizes.items() if n >= shape.tokens]
        if above:
            each = above[0]
        else:
            largest = max(sizes, default=shape.tokens)
            each = sizes.get(largest, 0.0) * shape.tokens / largest
        return (1 + self._watch.warming(shape)) * each


def _larger(table: dict[int, float], most: int) -> dict[int, float]:
    """Return sizes beyond the largest that was measured, at its rate: ticks of such a size correct it.

    A chunk behind many cells is computed at a much better rate if it is wide, and no chunk is larger than the largest size.
    """
    largest = max(table)
    if largest < CHUNKS[0].tokens:  # one token tells nothing of a chunk
        return {}
    each_s = table[largest] / largest
    return {n: n * each_s for n in DOUBLED if largest < n <= most and n * each_s <= LONGEST_S}


def _undisturbed(table: dict[int, float]) -> dict[int, float]:
    """Return `table` without what took much longer than something wider; it is measured later.

    One token, which all else is held against, takes no longer than what is wider then.
    """
    least, kept = float("inf"), {}
    for n in sorted(table, reverse=True):
        if table[n] <= DISTURBED * least:
            kept[n] = table[n]
        elif n == ONE.tokens:
            kept[n] = least
        least = min(least, table[n])
    return dict(sorted(kept.items()))


@frozen
class Measured:
    """A cost model, and whether it was measured before; `file` is where it is kept.

    `unusable` is why what was kept there could not be used, "" if it could.
    """

    cost: CostModel
    recalled: bool
    file: Path
    unusable: str = ""


@frozen
class Neighbour:
    """A model that is computed on the same machine: what its ticks cost, and how large it is."""

    cost: CostModel
    backend: Backend


def measured_cost(
    backend: Backend,
    *,
    beside: Neighbour | None = None,
    fresh: bool = False,
    on_progress: Callable[[float], None] | None = None,
    read: Reader = cpu_times,
) -> Measured:
    """Measure what ticks cost here, or recall it unless it has to be `fresh`.

    Uses the backend's slots, which must be empty, for two seconds, ten where a token takes long. `on_progress` is
    told the part of this time that has passed. A table that was measured while other programs used a tenth of the
    machine or more is marked with their share. Where a GPU computes beside the host, it is not: they hardly matter.

    `beside` a model that others use nothing is measured, which would take the machine from them for seconds: what is not known is
    concluded from that one, and measured when the daemon is idle. One token is computed in any case, so that the first
    tick of a request finds weights and graphs in memory.
    """
    path, weight_bytes = cost_file(backend), backend.model.weight_bytes
    try:
        cost = None if fresh else recall(path, weight_bytes)
        unusable = ""
    except Unusable as error:
        cost, unusable = None, str(error)
    if beside is not None:
        politely(partial(Stopwatch(backend, time.perf_counter).time, ONE))
        alike = beside.backend.traits.shape_costs == backend.traits.shape_costs
        if cost is None and alike and not fresh:
            return Measured(_concluded(beside, backend), False, path, unusable)
    if cost is not None:
        return Measured(cost, recalled=True, file=path)
    before = read()
    cost = Calibration(backend, time.perf_counter, on_progress).measure()
    others = 0.0 if backend.traits.overlaps else others_share(before, read())
    if others >= BUSY:
        cost = evolve(cost, others=others)
    remember(path, cost, weight_bytes)
    return Measured(cost, False, path, unusable)


def _concluded(known: Neighbour, backend: Backend) -> CostModel:
    """Return what ticks probably cost, by the sizes of both models; it is marked as to be measured again.

    A token reads all weights, a long prompt computes with all parameters: the larger ratio counts, since a tick that
    takes longer than predicted is late for readers, and one that is shorter is corrected by the next ones.
    """
    here, there = backend.model, known.backend.model
    ratios = [
        mine / other
        for mine, other in (
            (here.weight_bytes, there.weight_bytes),
            (float(here.n_params), float(there.n_params)),
        )
        if mine > 0 and other > 0
    ]
    cost = known.cost.times(known.cost.scale * max(ratios, default=1.0))
    return evolve(cost, scale=1.0, error=0.0, table_error=0.0, others=1.0)
