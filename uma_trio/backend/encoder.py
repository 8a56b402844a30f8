"""The contract between the engine and an encoder: a model that makes a vector, or a score, of a whole text.

An encoder has a context of its own, and no batch changes the result of another. A batch is computed in parts, so that
other work can be done between two of them. Everything here except the vocabulary is for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

from attrs import frozen

from uma_trio.backend.base import FloatArray, IntArray, Vocabulary
from uma_trio.backend.gguf_header import GgufHeader

Pooling = Literal["mean", "cls", "last", "rank"]
_LAST: Final = 3  # LLAMA_POOLING_TYPE_* (include/llama.h)
_RANK: Final = 4


class EncodeFailed(Exception):
    """A batch failed; the message is one sentence. The encoder can be used again."""


@frozen
class Pair:
    """The tokens before, between and behind the two texts that a reranker compares.

    White space `around` a text is split into tokens together with it.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    around_query: tuple[str, str] = ("", "")
    around_document: tuple[str, str] = ("", "")

    @property
    def n_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)


@frozen
class EncoderInfo:
    """What is loaded.

    `n_ctx` is the longest input in tokens. `width` is how many numbers are made of an input. With `pooling`
    "rank" these are scores, one for each of `labels`. A batch takes at most `max_inputs` and `max_tokens`; the engine's
    batches of several inputs are smaller (:data:`uma_trio.engine.encoder.BATCH_TOKENS`).
    """

    name: str
    path: str
    description: str
    n_ctx: int
    width: int
    pooling: Pooling
    n_params: int
    size_bytes: int
    max_inputs: int
    max_tokens: int
    labels: tuple[str, ...] = ()
    architecture: str = ""
    pair: Pair = Pair()

    @property
    def ranks(self) -> bool:
        """Whether it compares a query with a document, in place of making vectors."""
        return self.pooling == "rank"


def gives_by(header: GgufHeader) -> Literal["text", "vectors", "scores"]:
    """Return what a model makes of texts, by what its file says of attention and pooling.

    A causal model whose file names another pooling than the last token's is taken to write.
    """
    pooling = header.number("pooling_type", -1)
    causal = header.number("attention.causal", 1) != 0 and not _is_encoder(header)
    if pooling == _RANK:
        return "scores"
    return "vectors" if not causal or pooling == _LAST else "text"


def _is_encoder(header: GgufHeader) -> bool:
    return any(word in header.architecture for word in ("bert", "embed", "t5encoder"))


class EncoderModel(Protocol):
    """One encoder and its context."""

    @property
    def info(self) -> EncoderInfo:
        """What is loaded."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The encoder's vocabulary."""

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a batch may have for its longest part to take at most `part_s`; 1 at least."""

    def begin(self, inputs: Sequence[IntArray], users: Sequence[str] = ()) -> None:
        """Begin a batch, which `advance` computes. There must be none.

        `users` says whose each input is, if they are not all the same user's: nothing that was computed for one is
        used for another.
        """

    def next_s(self) -> float:
        """Return the predicted seconds of the next part of the batch."""

    def advance(self, most_s: float) -> FloatArray | None:
        """Compute parts for at most `most_s`, by prediction, and one part at least.

        Return ``[n_inputs, width]`` numbers at the end of the batch, else None. Raises :class:`EncodeFailed`.
        """

    def drop(self) -> None:
        """Give up the batch, if there is one."""

    def close(self) -> None:
        """Free everything. Idempotent; nothing else may be called after."""
