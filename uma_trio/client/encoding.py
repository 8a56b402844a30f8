"""Vectors and scores of texts: split into requests that fit into frames, and put together again."""

from __future__ import annotations

import json
import re
import sys
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from uma_protocol import (
    DEFAULT_MAX_FRAME_BYTES,
    Embed,
    Eos,
    Rerank,
    Score,
    Scores,
    Token,
    Vectors,
    encode_request,
)
from uma_trio.client.errors import ServerError

MAX_TEXTS: Final = 1000
"""Texts of one request: what the daemon checks of it while it writes no tokens takes about a millisecond."""
_FRAME_BYTES: Final = DEFAULT_MAX_FRAME_BYTES - 4096
_MAX_ESCAPES: Final = 100_000

_TEXT: Final = re.compile(r"\b(input|documents)\[(\d+)\]")

Item = Token | Vectors | Scores
"""Events before the end of a request."""


class Embeddings(NamedTuple):
    """The vector of each text, in order, each of length 1, and how many tokens the texts have together.

    A vector is an ``array('f')``: numpy and torch read it without a copy.
    """

    vectors: list[array[float]]
    n_tokens: int


class Ranking(NamedTuple):
    """Documents by their score, the best first, and how many tokens were compared."""

    scores: list[Score]
    n_tokens: int


def embed_requests(texts: Iterable[str], **fields: Any) -> Iterator[Embed]:
    """Yield the requests for the vectors of `texts`, in order.

    Raises:
        uma_protocol.LocalProtocolError: the protocol does not allow a value, or a text fits into no frame.
    """
    for some in batches(texts):
        yield _checked(Embed(id=uuid.uuid4().hex, input=some, **fields))


def rerank_requests(query: str, documents: Iterable[str], **fields: Any) -> Iterator[Rerank]:
    """Yield the requests for the scores of `documents`, in order. Raises as :func:`embed_requests`."""
    for some in batches(documents, beside=query):
        yield _checked(Rerank(id=uuid.uuid4().hex, query=query, documents=some, **fields))


def batches(texts: Iterable[str], beside: str = "") -> Iterator[tuple[str, ...]]:
    """Yield `texts` in lists that fit into a frame together with the text `beside`; an oversized one is alone."""
    some: list[str] = []
    used = first = _size(beside)
    for text in texts:
        size = _size(text)
        total = used[0] + size[0], used[1] + size[1]
        full = total[0] > _FRAME_BYTES or total[1] > _MAX_ESCAPES or len(some) >= MAX_TEXTS
        if some and full:
            yield tuple(some)
            some, used = [], first
        some.append(text)
        used = used[0] + size[0], used[1] + size[1]
    if some:
        yield tuple(some)


def counted(error: ServerError, first: int) -> ServerError:
    """Return the error of a batch that starts at text `first`, with the texts' numbers in the whole request."""
    return naming_texts(error, lambda field, index: f"{field}[{first + index}]")


def naming_texts(error: ServerError, name: Callable[[str, int], str]) -> ServerError:
    """Return an error with other names of the texts of its request: `name` gets the field and the number of each."""
    message = _TEXT.sub(lambda found: name(found[1], int(found[2])), error.message)
    return ServerError(
        error.code, message, retryable=error.retryable, retry_after_ms=error.retry_after_ms
    )


def vectors_of(items: Sequence[Item]) -> list[array[float]]:
    """Return the vectors that events have, in order."""
    found: list[array[float]] = []
    for item in items:
        if isinstance(item, Vectors):
            found += map(_vector, item.vectors)
    return found


def scores_of(items: Sequence[Item], first: int) -> list[Score]:
    """Return the scores that events have; documents are counted from `first` on."""
    return [
        Score(first + score.index, score.score)
        for item in items
        if isinstance(item, Scores)
        for score in item.scores
    ]


def prompt_tokens(eos: Eos | None) -> int:
    """Return how many tokens the texts of a request had."""
    return 0 if eos is None else eos.usage.prompt_tokens


def _vector(data: bytes) -> array[float]:
    vector = array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def _size(text: str) -> tuple[int, int]:
    """Return how many bytes a text takes in a frame, and how many of them are backslashes."""
    written = json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(written) + 1, written.count(b"\\")


def _checked(request: Any) -> Any:
    encode_request(request)  # so that a mistake shows where it was made
    return request
