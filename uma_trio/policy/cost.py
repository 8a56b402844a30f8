"""What a tick costs on this machine: a measured staircase, and how far it is off today.

The time of one decode of n tokens is no line. On one CPU build four rows cost less than three,
since matrix kernels take rows in fours; elsewhere two cost twice one. So the model is a table,
measured at start-up (:mod:`uma_trio.policy.costing.calibrate`) and corrected by every tick:

    seconds = scale * (computing(n) + output(rows) + context_cell * context_cells
                       + (used_cell * n + spanned_cell) * used_cells + recapture + capture) + host

- `computing(n)`: n tokens with one logits row, in an empty context.
- `output(rows)`: what further logits rows add.
- `context_cell`: attention of one token to one KV cell of its own sequence. Less in a wide tick (64 rows
  and more: llama.cpp's CPU attention then works in tiles).
- `used_cell`: the same for one used cell of any sequence, since attention runs over the whole cache
  and masks foreign cells (``get_n_kv`` in llama.cpp).
- `spanned_cell`: what a tick pays for one, however many tokens it has. On a GPU flash attention reads a
  cell once for all of them.
- `recapture`: what a tick costs more whose shape differs from the one before, since each of its kernels is
  launched; 0 unless graphs are captured (CUDA).
- `capture`: what the tick after it costs more, if it has the same shape: its graph is captured.
- `host`: the time between two decodes. It is learnt separately for `contended` ticks, where
  best-effort work was ready: more is planned and sampled there.

The model is a value; learning returns a new one.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import Factory, field, frozen

from uma_trio.policy.evolving import evolve, value
from uma_trio.policy.tuning import TUNING, Tuning

WIDE_ROWS = 64  # from here on attention works in tiles (ggml-cpu/ops.cpp, GGML_FA_TILE_Q)
# A machine that is slower or quicker than this is not followed: its ticks are off, and the model says so. What
# the scale factor cannot take must not end in the one size that is in use: when the machine is back,
# correcting that would move all others.
SCALE_BOUNDS = (1 / 8, 8.0)
# However noisy ticks are, a size stays within so many times of what was measured, either way, and no
# tick makes a machine quicker by more than that.
FURTHEST = 8.0
# Kernels take rows in fours, so that more logits rows may cost less: by this part at the most.
MOST_SAVED = 0.75
# Attention's terms follow at this rate times their part of the tick: half of a tick, half of this.
DEPTH_RATE = 0.2
# A tick so many times off teaches nothing while predictions are good: a page fault, a frozen machine.
OUTLIER = 3.0
# A change of shape costs at least this part of a tick, or graphs would count as not captured.
LEAST_CHANGE = 0.02
# With a larger mean error predictions promise nothing, and the table as measured is used.
UNTRUSTED_ERROR = 0.15


@frozen
class Staircase:
    """Seconds by count: measured at some counts, interpolated linearly between them.

    Beyond the last count: at least its value, and at most in proportion to it.
    """

    at: tuple[int, ...]
    seconds: tuple[float, ...]

    @cached_property
    def lowest(self) -> float:
        """The least seconds of any count, and no more than 0."""
        return min(0.0, *self.seconds)

    def __call__(self, n: float) -> float:
        """Return the seconds of `n`; 0 for nothing."""
        at, seconds = self.at, self.seconds
        if n <= 0 or not at:
            return 0.0
        i = bisect_left(at, n)
        if i < len(at) and at[i] == n:
            return seconds[i]
        if i == 0 or len(at) == 1:
            return seconds[0]
        beyond, i = i == len(at), min(i, len(at) - 1)
        low, high = at[i - 1], at[i]
        share = (n - low) / (high - low)
        found = seconds[i - 1] + share * (seconds[i] - seconds[i - 1])
        if beyond:  # where a line through two that lie close together could lead anywhere
            least, most = sorted((seconds[-1], seconds[-1] * n / high))
            found = min(max(least, found), most)
        return max(0.0, found)

    def table(self) -> Mapping[int, float]:
        return dict(zip(self.at, self.seconds, strict=True))

    def times(self, factor: float) -> Staircase:
        """Return a staircase that is `factor` times as high everywhere."""
        return Staircase(self.at, tuple(s * factor for s in self.seconds))

    def with_size(self, n: int, seconds: float) -> Staircase:
        """Return a staircase that knows `n` too."""
        table = dict(zip(self.at, self.seconds, strict=True)) | {n: seconds}
        at = tuple(sorted(table))
        return Staircase(at, tuple(table[i] for i in at))

    def lowered(self, factor: float, least: Staircase) -> Staircase:
        """Return a staircase that is multiplied by `factor`, at most 1, where it stays above `least`."""
        above = zip(self.seconds, map(least, self.at), strict=True)
        return Staircase(self.at, tuple([max(s * factor, min(s, low)) for s, low in above]))

    def corrected(self, n: int, factor: float, measured: Staircase) -> Staircase:
        """Return a staircase whose sizes at or around `n` are multiplied by `factor`.

        Each stays within :data:`FURTHEST` times of `measured`.
        """
        i = bisect_left(self.at, n)
        touched = (i,) if i < len(self.at) and self.at[i] == n else (i - 1, i)
        seconds = list(self.seconds)
        for j in touched:
            if 0 <= j < len(seconds):
                known_s = measured.seconds[j] if measured.at is self.at else measured(self.at[j])
                seconds[j] = min(max(seconds[j] * factor, known_s / FURTHEST), known_s * FURTHEST)
        return Staircase(self.at, tuple(seconds))


@value
class Work:
    """What of a tick costs time: its tokens, and how many of them want logits.

    `context_cells` is how many KV cells of their own sequences its tokens attend to, summed over the
    tokens. `used_cells` is how many cells the cache spans, whosever they are. It is `contended` if
    best-effort work was ready. `after` is the shape of the tick before it, and `settled` says that the one
    before that had the same: where graphs are captured, the first two ticks of a shape cost extra.
    """

    tokens: int
    rows: int = 1
    context_cells: int = 0
    used_cells: int = 0
    contended: bool = False
    after: tuple[int, int] | None = None
    settled: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """What decides whether the backend can use the graph of the tick before again."""
        return self.tokens, self.rows

    @property
    def repeats(self) -> bool:
        """Whether the tick before it had the same shape."""
        return self.after == self.shape

    def plus(self, tokens: int, rows: int = 0, context_cells: int = 0) -> Work:
        """Return this work with more of it in the same context."""
        return Work(
            self.tokens + tokens,
            self.rows + rows,
            self.context_cells + context_cells,
            self.used_cells,
            self.contended,
            self.after,
            self.settled,
        )


@frozen
class CostModel:
    """The cost model; the docstring of this module has the formula.

    `error` is the smoothed absolute log error of its latest predictions. `measured` is the table as
    it was measured, and `table_error` the error of predictions from that table. If the corrected
    values cannot be trusted and the table has a smaller error, the model uses the table. `others` marks a
    table that is to be measured again: the part of the machine that other programs used meanwhile.
    """

    computing: Staircase
    output: Staircase = field(factory=lambda: Staircase((1,), (0.0,)))
    context_cell_s: float = 0.0
    wide_context_cell_s: float = 0.0
    used_cell_s: float = 0.0
    spanned_cell_s: float = 0.0
    recapture_s: float = 0.0
    capture_s: float = 0.0
    scale: float = 1.0
    host_s: float = 0.0
    contended_host_s: float = 0.0
    error: float = 0.0
    table_error: float = 0.0
    others: float = 0.0
    measured: Staircase = field(default=Factory(lambda self: self.computing, takes_self=True))
    tuning: Tuning = TUNING

    @property
    def trusted(self) -> bool:
        """Whether its predictions are good enough for a promise."""
        return min(self.error, self.table_error) <= UNTRUSTED_ERROR

    @property
    def fell_back(self) -> bool:
        """Whether it predicts by the table as it was measured."""
        return self.error > UNTRUSTED_ERROR and self.error > self.table_error

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of tokens with a measured time; values between them are interpolated."""
        return self.computing.at

    def seconds(self, work: Work, tokens: int = 0, rows: int = 0, context_cells: int = 0) -> float:
        """Return how long a tick should take from decode to decode: `work`, and so much more."""
        table = self.measured if self.fell_back else self.computing
        return self.scale * self._by(table, work, tokens, rows, context_cells) + self.between_s(
            work
        )

    @property
    def change_s(self) -> float:
        """The additional time of the first two ticks of a shape, with the scale factor."""
        return self.scale * (self.recapture_s + self.capture_s)

    def cell_s(self, tokens: int) -> float:
        """Return what a cell adds to a tick of so many tokens that spans it, whosever it is."""
        return self.used_cell_s * tokens + self.spanned_cell_s

    def between_s(self, work: Work) -> float:
        """Return what passes between the decode before `work` and its own.

        As long as that is unknown for contended work, what it is for the other, and vice versa.
        """
        known = self.contended_host_s if work.contended else self.host_s
        return known or self.host_s or self.contended_host_s  # 0 is what is not known yet

    def at_least(self, tokens: int) -> float:
        """Return what a tick of so many tokens takes at the least, whatever else is in it.

        No context, and the number of logits rows that costs least, which may be less than nothing.
        """
        table = self.measured if self.fell_back else self.computing
        between_s = min(self.host_s or self.contended_host_s, self.contended_host_s or self.host_s)
        computing_s = table(tokens)
        saved_s = max(self.output.lowest, -MOST_SAVED * computing_s)
        return self.scale * (computing_s + saved_s) + between_s

    def _by(
        self, table: Staircase, work: Work, tokens: int = 0, rows: int = 0, context_cells: int = 0
    ) -> float:
        tokens, rows = work.tokens + tokens, work.rows + rows
        context_cells += work.context_cells
        context_cell_s = self.wide_context_cell_s if tokens >= WIDE_ROWS else self.context_cell_s
        computing_s = table(tokens)
        seconds = computing_s + (
            context_cell_s * context_cells + self.cell_s(tokens) * work.used_cells
        )
        if self.recapture_s and work.after is not None:
            if work.after != (tokens, rows):
                seconds += self.recapture_s
            elif not work.settled:
                seconds += self.capture_s
        if rows > 1:
            output_s = self.output(rows)
            seconds += output_s if output_s >= 0.0 else max(output_s, -MOST_SAVED * computing_s)
        return seconds

    def learn(
        self,
        work: Work,
        decode_s: float,
        host_s: float | None,
        scale_rate: float | None = None,
        step_rate: float | None = None,
    ) -> CostModel:
        """Return the model corrected by one measured tick.

        `host_s` is None where it says nothing: before the first decode after an idle time.
        The rates say how much of a miss is the scale factor's, and how much this size's own; those of `tuning`
        unless given.
        """
        tuning, expected = self.tuning, self._by(self.computing, work)
        scale_rate = tuning.scale_rate if scale_rate is None else scale_rate
        step_rate = tuning.step_rate if step_rate is None else step_rate
        if expected <= 0 or not 0 < decode_s < math.inf:
            return self
        miss = math.log(decode_s / (self.scale * expected))
        by_table = max(self._by(self.measured, work), sys.float_info.min)
        error = self._smoothed(self.error, miss)
        table_error = self._smoothed(self.table_error, math.log(decode_s / (self.scale * by_table)))
        # Nothing makes a machine quicker by chance.
        if abs(miss) >= math.log(OUTLIER) and self.trusted:
            model = self if miss > 0 else self.quicker(math.exp(miss), work.tokens)
            return evolve(model, error=error, table_error=table_error)
        low, high = SCALE_BOUNDS
        scale = min(max(self.scale * math.exp(scale_rate * miss), low), high)
        if scale in SCALE_BOUNDS and (miss > 0) == (scale > 1.0):
            step_rate = 0.0
        wide = work.tokens >= WIDE_ROWS
        context_cell_s = self.wide_context_cell_s if wide else self.context_cell_s
        blame = (
            context_cell_s * work.context_cells + self.cell_s(work.tokens) * work.used_cells
        ) / expected
        deeper = math.exp(DEPTH_RATE * blame * miss)
        between_s = self.between_s(work)
        if host_s is not None:
            between_s += tuning.scale_rate * (min(host_s, decode_s) - between_s)
        return evolve(
            self,
            error=error,
            table_error=table_error,
            computing=self.computing.corrected(
                work.tokens, math.exp(step_rate * (1.0 - blame) * miss), self.measured
            ),
            context_cell_s=self.context_cell_s * (1.0 if wide else deeper),
            wide_context_cell_s=self.wide_context_cell_s * (deeper if wide else 1.0),
            used_cell_s=self.used_cell_s * deeper,
            spanned_cell_s=self.spanned_cell_s * deeper,
            scale=scale,
            host_s=self.host_s if work.contended else between_s,
            contended_host_s=between_s if work.contended else self.contended_host_s,
        )

    def learn_change(self, work: Work, decode_s: float) -> CostModel:
        """Return the model corrected by one of the first two ticks of a shape: by what it took longer."""
        took_s = decode_s / self.scale
        plain_s = self._by(self.computing, evolve(work, after=None))
        if not (self.recapture_s and 0 < decode_s < math.inf):
            return self
        # As in `learn`, only a tick that took too long may have done so by chance.
        if math.log(took_s / (plain_s + self.recapture_s + self.capture_s)) >= math.log(OUTLIER):
            return self
        extra_s = max(took_s - plain_s, LEAST_CHANGE * plain_s)
        rate = self.tuning.step_rate
        if work.after == work.shape:
            return evolve(self, capture_s=self.capture_s + rate * (extra_s - self.capture_s))
        return evolve(self, recapture_s=self.recapture_s + rate * (extra_s - self.recapture_s))

    def quicker(self, factor: float, n: int) -> CostModel:
        """Return the model of a machine that takes this part of the time, or 1 / `FURTHEST` of it.

        What ticks of `n` tokens had come to take longer than measured goes first, and as much of what other
        sizes had; then what the scale factor is above 1. Both stand for a machine that was slow. Only the rest
        moves all sizes, used or not.
        """
        factor = max(factor, 1.0 / FURTHEST)
        risen = self.computing(n) / max(self.measured(n), sys.float_info.min)
        own = max(factor, 1.0 / max(1.0, risen))
        model = evolve(self, computing=self.computing.lowered(own, self.measured))
        if self.scale <= 1.0:
            return model.times(factor / own)
        scale = self.scale * factor / own
        return evolve(model.times(min(1.0, scale)), scale=max(1.0, scale))

    def times(self, factor: float) -> CostModel:
        """Return a model by which every decode takes `factor` times as long."""
        return evolve(
            self,
            computing=self.computing.times(factor),
            measured=self.measured.times(factor),
            output=self.output.times(factor),
            context_cell_s=self.context_cell_s * factor,
            wide_context_cell_s=self.wide_context_cell_s * factor,
            used_cell_s=self.used_cell_s * factor,
            spanned_cell_s=self.spanned_cell_s * factor,
            recapture_s=self.recapture_s * factor,
            capture_s=self.capture_s * factor,
        )

    def plateau(self, largest: int) -> int:
        """Return the smallest chunk that prefills about as fast as any that is known.

        A long prompt goes in such chunks where no stream is protected and no size is in use yet.
        """
        rates = self._rates(largest)
        return tuple(rates)[self.level(tuple(rates.values()))]

    def level(self, rates: Sequence[float]) -> int:
        """Return which of `rates`, of sizes in ascending order, is the first that is about the best."""
        enough = self.tuning.plateau * max(rates)
        return next(i for i, rate in enumerate(rates) if rate >= enough)

    def _smoothed(self, error: float, miss: float) -> float:
        return error + self.tuning.error_rate * (min(abs(miss), math.log(OUTLIER)) - error)

    def quickest(self, largest: int) -> int:
        """Return the chunk size with the fastest prefill, for a newcomer without streams."""
        rates = self._rates(largest)
        return max(rates, key=rates.__getitem__)

    def _rates(self, largest: int) -> dict[int, float]:
        counts = [n for n in self.sizes if n <= largest] or [largest]
        between_s = self.contended_host_s or self.host_s
        return {n: n / (self.computing(n) + between_s) for n in counts}

    def for_storage(self) -> CostModel:
        """Return the model with the scale factor applied to its values, for the cost file."""
        now = self.times(self.scale)
        return evolve(
            now,
            scale=1.0,
            host_s=0.0,
            contended_host_s=0.0,
            error=0.0,
            table_error=0.0,
            measured=now.computing,
        )

    def table(self) -> Mapping[int, float]:
        """Return the current estimate of the seconds by tokens, for people."""
        return self.computing.table()


@frozen
class Traffic:
    """The sizes of a model, in bytes, from its file.

    `expert_bytes` is the size of one expert over all layers; 0 experts is a dense model.
    """

    weight_bytes: float = 0.0
    cell_bytes: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 0
    experts_used: int = 0

    def distinct_experts(self, n_tokens: int) -> float:
        """Return the expected number of experts that `n_tokens` reach, with independent routing.

        Neighbouring tokens share experts, so this is an upper bound.
        """
        if self.experts <= 0:
            return 0.0
        missed = (1.0 - self.experts_used / self.experts) ** n_tokens
        return self.experts * (1.0 - missed)

    def moved(self, n_tokens: int, cells: int) -> float:
        """Return the bytes of a tick of `n_tokens` that reads and writes `cells` KV cells."""
        if n_tokens <= 0:
            return 0.0
        experts = self.distinct_experts(n_tokens) * self.expert_bytes
        return self.weight_bytes + experts + cells * self.cell_bytes

    def bandwidth(self, seconds: Mapping[int, float]) -> float:
        """Return the bytes a second that this machine moves, by what ticks of n tokens take there.

        The most that any tick moves: decoding is bound by memory, but one token may be too few to
        show it. Of a mixture of experts four move twice the weights in less than twice the time.
        """
        return max((self.moved(n, 0) / s for n, s in seconds.items() if s > 0), default=0.0)
