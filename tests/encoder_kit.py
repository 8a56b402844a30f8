"""An encoder without weights: the vector of a text is known, and its batches take as many parts as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import Factory, define

from uma_trio.backend.base import FloatArray, IntArray
from uma_trio.backend.encoder import EncodeFailed, EncoderInfo, Pair, Pooling
from uma_trio_sim.fake import BOS, EOS, FakeVocabulary

N_CTX = 48
WIDTH = 4
PART_S = 0.001


def info_of(pooling: Pooling = "mean", n_ctx: int = N_CTX) -> EncoderInfo:
    """Return what is said of a fake encoder."""
    ranks = pooling == "rank"
    return EncoderInfo(
        name="ranker" if ranks else "embedder",
        path="",
        description="fake",
        n_ctx=n_ctx,
        width=1 if ranks else WIDTH,
        pooling=pooling,
        n_params=0,
        size_bytes=0,
        max_inputs=8,
        max_tokens=256,
        pair=Pair((BOS,), (EOS,), ()),
    )


def vector_of(tokens: IntArray, width: int = WIDTH) -> FloatArray:
    """Return the vector of an input: it tells the tokens and their order."""
    weights = np.arange(1, len(tokens) + 1)
    sums = [float((np.asarray(tokens) * weights**n).sum() % 97 + 1) for n in range(width)]
    return np.array(sums, np.float32)


@define(eq=False)
class FakeEncoder:
    """See the module. `batches` are the lengths of the inputs of each batch; `fails` are numbers of batches.

    `passes` is told the seconds of the parts that are computed.
    """

    info: EncoderInfo = Factory(info_of)
    fails: tuple[int, ...] = ()
    part_s: float = PART_S
    passes: Callable[[float], object] = lambda _seconds: None
    vocabulary: FakeVocabulary = Factory(FakeVocabulary)
    batches: list[list[int]] = Factory(list)
    texts: list[list[int]] = Factory(list)
    dropped: int = 0
    _inputs: list[IntArray] = Factory(list)
    _left: int = 0

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a batch may have."""
        return max(1, int(part_s / self.part_s) * 8)

    def begin(self, inputs: Sequence[IntArray], users: Sequence[str] = ()) -> None:
        """Begin a batch; there must be none."""
        if self._inputs:
            raise AssertionError("a batch is under way")
        if max(map(len, inputs)) > self.info.n_ctx:
            raise AssertionError("llama.cpp would end the process")
        self._inputs = list(inputs)
        self.batches.append(list(map(len, inputs)))
        self.texts += [tokens.tolist() for tokens in inputs]
        self._left = sum(map(len, inputs))

    def next_s(self) -> float:
        """Return how long each part takes."""
        return self.part_s

    def advance(self, most_s: float) -> FloatArray | None:
        """Compute as many parts as fit."""
        parts = min(self._left, max(1, int(most_s / self.part_s + 1e-9)))
        self._left -= parts
        self.passes(parts * self.part_s)
        if self._left > 0:
            return None
        inputs, self._inputs = self._inputs, []
        if len(self.batches) in self.fails:
            raise EncodeFailed("the encoder failed with status 2")
        return np.stack([vector_of(tokens, self.info.width) for tokens in inputs])

    def drop(self) -> None:
        """Give up the batch."""
        self.dropped += bool(self._inputs)
        self._inputs = []

    def close(self) -> None:
        """Hold nothing."""
