"""Tokens drawn from the short lists of many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling.drawing import Filters, column, draw
from uma_trio.engine.sampling.likeliest import NOT_FINITE
from uma_trio.engine.sampling.shortlist import Shortlist


class Random(Protocol):
    """The sampler of a row, as far as drawing from a list needs it."""

    params: SamplingParams
    filters: Filters

    def random(self) -> float:
        """Return the number of [0, 1) of the next row."""


class Lists:
    """Draws for the rows `listed` from their short lists, and finds the likeliest of the others."""

    def __init__(self, samplers: Sequence[Random], listed: list[int], n_vocab: int) -> None:
        ks = [1] * len(samplers)
        for row in listed:
            ks[row] = samplers[row].params.top_k
        self._shortlist = Shortlist(n_vocab, ks)
        self._samplers, self._listed = samplers, listed
        self._filters = self._filters_of(listed)

    def __call__(self, logits: FloatArray) -> list[int]:
        """Return a token for each row, or NOT_FINITE."""
        ids, values = self._shortlist(logits)
        finite = np.isfinite(values[:, 0])
        tokens: list[int] = np.where(finite, ids[:, 0], NOT_FINITE).tolist()
        drawn, filters = self._listed, self._filters
        if not finite.all():
            drawn = [row for row in drawn if finite[row]]
            filters = self._filters_of(drawn)
        if len(drawn) < len(tokens):
            values = values[drawn]
        weights = filters.weights(values, values[:, :1])
        places = draw(weights, column([self._samplers[row].random() for row in drawn], np.float64))
        for row, place in zip(drawn, places.tolist(), strict=True):
            tokens[row] = int(ids[row, place])
        return tokens

    def _filters_of(self, rows: list[int]) -> Filters:
        return Filters.together([self._samplers[row].filters for row in rows])
