"""What the model thought of a token: its logarithmic probability, and the likeliest others.

They are of the row as the model gave it, before bias, penalties, masks, filters and temperature; or,
where that is wanted, of the tokens that could be drawn, after all of these.

To choose a token has to be quick, because the next decode waits for it; to describe one has not.
So :class:`Describer` only copies the rows, and :class:`Described` reads the copies on
request, which the engine makes during the next decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from attrs import Factory, frozen

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import TokenLogprobs
from uma_trio.engine.sampling.shortlist import IdArray, Shortlist, is_short, largest

# What is worked on at a time stays in a core's own cache.
_BLOCK: Final = 16_384
# exp() of logits between minus and plus this neither vanishes nor overflows, nor does its sum.
_TAME: Final = 60.0
# With fewer rows, `largest` is quicker than one pass over all of them.
_TOGETHER: Final = 3


class Drawer(Protocol):
    """What has drawn the token of a row."""

    def drawable(self, row: FloatArray, among: IdArray | None = None) -> tuple[IdArray, FloatArray]:
        """Return the tokens that the row was drawn from, `among` these, and their probabilities."""


@frozen(eq=False)
class Seen:
    """What rows of a tick were chosen from, where that is not the row as it is put back.

    `edited` has rows with bias and penalties, `among` the tokens that a constraint allowed.
    """

    edited: dict[int, FloatArray] = Factory(dict)
    among: dict[int, IdArray] = Factory(dict)


AS_GIVEN: Final = Seen()


class Described(Mapping[int, TokenLogprobs]):
    """The descriptions of one tick's tokens by row, made when the first one is asked for.

    It belongs to the engine's thread.
    """

    __slots__ = ("_among", "_drawers", "_found", "_logits", "_rows", "_tokens", "_tops")

    def __init__(
        self,
        logits: FloatArray,
        rows: Sequence[int],
        tokens: Sequence[int],
        tops: Sequence[int],
        drawers: Sequence[Drawer] = (),
        among: Mapping[int, IdArray] | None = None,
    ) -> None:
        """`drawers` are those of the last rows, whose tokens are described as they were drawn."""
        self._logits, self._rows, self._tokens, self._tops = logits, rows, tokens, tops
        self._drawers, self._among = drawers, among or {}
        self._found: dict[int, TokenLogprobs] | None = None

    def compute(self) -> dict[int, TokenLogprobs]:
        """Return all descriptions; from then on the logits may change."""
        if self._found is None:
            given = len(self._rows) - len(self._drawers)
            logits, tops = self._logits[:given], self._tops[:given]
            each = zip(logits, self._tokens, _likeliest(logits, tops), tops, strict=False)
            found = [_described(*parts) for parts in each] if given else []
            for place, drawer in enumerate(self._drawers, given):
                drawable = drawer.drawable(self._logits[place], self._among.get(self._rows[place]))
                found.append(_drawn(drawable, self._tokens[place], self._tops[place]))
            self._found = dict(zip(self._rows, found, strict=True))
        return self._found

    def __getitem__(self, row: int) -> TokenLogprobs:
        return self.compute()[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Describer:
    """Keeps what is needed to describe the tokens of some rows of a tick.

    `tops` says for each such row how many alternatives are asked for. Those in `drawn_by` are described
    as they were drawn. The copies of one tick are
    overwritten by those of the next; what was not asked for until then is computed first.
    """

    __slots__ = ("_drawn_by", "_kept", "_latest", "_tops")

    def __init__(
        self, tops: Mapping[int, int], n_vocab: int, drawn_by: Mapping[int, Drawer] | None = None
    ) -> None:
        self._drawn_by = drawn_by or {}
        # Those that are drawn come last, so that what is described together lies together.
        self._tops = {row: tops[row] for row in sorted(tops, key=self._drawn_by.__contains__)}
        self._kept = np.empty((len(tops), n_vocab), np.float32)
        self._latest: Described | None = None

    def __call__(
        self, logits: FloatArray, tokens: Sequence[int], seen: Seen = AS_GIVEN
    ) -> Described:
        """Return the descriptions of `tokens`, one for each row; a negative one has none.

        The row of any other holds no NaN and no +inf, and the token's logit is finite.
        """
        if self._latest is not None:
            self._latest.compute()
        rows = [row for row in self._tops if tokens[row] >= 0]
        kept = self._kept[: len(rows)]
        for place, row in enumerate(rows):
            kept[place] = seen.edited.get(row, logits[row])
        self._latest = Described(
            kept,
            rows,
            [tokens[row] for row in rows],
            [self._tops[row] for row in rows],
            [self._drawn_by[row] for row in rows if row in self._drawn_by],
            seen.among,
        )
        return self._latest


def _likeliest(logits: FloatArray, tops: Sequence[int]) -> list[tuple[IdArray, FloatArray]]:
    most = max(1, *tops, 0)
    if len(tops) < _TOGETHER or not is_short(most, logits.shape[1]):
        return [largest(row, max(1, n_top)) for row, n_top in zip(logits, tops, strict=True)]
    return list(zip(*Shortlist(logits.shape[1], [most] * len(tops))(logits), strict=True))


def _described(
    row: FloatArray, token: int, likeliest: tuple[IdArray, FloatArray], n_top: int
) -> TokenLogprobs:
    """Return the logarithmic probabilities of `token` and of the `n_top` likeliest.

    Alternatives that are impossible (-inf) are left out. The lower id goes first on a tie.
    """
    ids, values = likeliest
    total = _log_sum(row, float(values[0]))
    pairs = zip(ids[:n_top].tolist(), values[:n_top].tolist(), strict=True)
    return TokenLogprobs(
        logprob=float(row[token]) - total,
        top=tuple([(other, value - total) for other, value in pairs if value > -math.inf]),
    )


def _drawn(drawable: tuple[IdArray, FloatArray], token: int, n_top: int) -> TokenLogprobs:
    ids, probs = drawable
    own = float(probs[ids == token].sum())
    places, values = largest(probs, max(1, n_top))
    pairs = zip(ids[places[:n_top]].tolist(), values[:n_top].tolist(), strict=True)
    return TokenLogprobs(
        logprob=math.log(own) if own > 0 else -math.inf,
        top=tuple([(other, math.log(value)) for other, value in pairs if value > 0]),
    )


def _log_sum(row: FloatArray, top: float) -> float:
    shift = 0.0 if abs(top) < _TAME else top
    scratch = np.empty(_BLOCK, np.float32)
    weight = 0.0
    for start in range(0, len(row), _BLOCK):
        part = row[start : start + _BLOCK]
        weights = scratch[: len(part)]
        if shift:
            # What is further down than floats reach is nothing; a row that is not finite has no sum.
            with np.errstate(over="ignore", invalid="ignore"):
                part = np.subtract(part, np.float32(shift), out=weights)
        weight += float(np.exp(part, out=weights).sum())
    return shift + math.log(weight)


NOT_FINITE: Final = -1  # what is answered for a row that has no sane maximum


def greedy(logits: FloatArray) -> IdArray:
    """Return the likeliest token of each row of ``logits[n, vocab]``, the lowest id on a tie.

    A row with NaN or +inf, or without any finite logit, is answered with `NOT_FINITE`: argmax
    stops at the first NaN, so looking at the maximum is enough.
    """
    ids: IdArray = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    if not finite.all():
        ids[~finite] = NOT_FINITE
    return ids


def likeliest_but(row: FloatArray, masked: IdArray) -> int:
    """Return the likeliest token that is not masked, or `NOT_FINITE`; the row is left as it was."""
    hidden = row[masked]
    row[masked] = -np.inf
    (likeliest,) = greedy(row[np.newaxis])
    row[masked] = hidden
    return int(likeliest)


def without(row: FloatArray, masked: IdArray) -> FloatArray:
    """Return a copy of the row in which masked tokens are -inf."""
    masked_row = row.copy()
    masked_row[masked] = -np.inf
    return masked_row
