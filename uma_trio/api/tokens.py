"""Token ids of a client's number: read from JSON, and written as JSON, a few thousand at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from uma_protocol.rules import MAX_INT32, Integer
from uma_trio.http.errors import Fault, invalid
from uma_trio.service.served import ServedModel

MANY: Final = 4096
"""Ids that are read or written while the GIL is held, and the most that are on trio's thread."""
FEW: Final = 512
"""Ids whose texts are put together while the GIL is held, and the most that are on trio's thread."""
_ID: Final = Integer(0, MAX_INT32)
_encode: Final = msgspec.json.encode


def ids_of(value: Any, path: str) -> NDArray[np.int32]:
    """Return a list of token ids as an array. How many there may be is the caller's business.

    Raises:
        Fault: it is no list of token ids; the first item at fault is named.
    """
    if not isinstance(value, list):
        raise invalid(path, "must be a list of token ids")
    ids = np.empty(len(value), np.int32)
    for at in range(0, len(value), MANY):
        part = value[at : at + MANY]
        try:
            numbers = np.array(part, np.int64) if set(map(type, part)) == {int} else None
        except OverflowError:
            numbers = None
        if numbers is None or numbers.min() < 0 or numbers.max() > MAX_INT32:
            raise _first_fault(part, path, at)
        ids[at : at + len(part)] = numbers
    return ids


def kinds_of(value: Sequence[Any]) -> set[type]:
    """Return the types of the items of a list."""
    items, kinds = iter(value), set[type]()
    while part := set(map(type, islice(items, MANY))):
        kinds |= part
    return kinds


def _first_fault(part: Sequence[Any], path: str, at: int) -> Fault:
    for index, item in enumerate(part, at):
        fault = _ID.check(f"{path}[{index}]", item)
        if fault is not None:
            return invalid(fault.field, fault.problem)
    return invalid(path, "must be a list of token ids")


def written_ids(ids: NDArray[np.int32]) -> bytes:
    """Return ``{"tokens": [...]}``."""
    parts = (ids[at : at + MANY].tolist() for at in range(0, len(ids), MANY))
    return b'{"tokens":[' + b",".join(_encode(part)[1:-1] for part in parts) + b"]}"


def written_pieces(ids: NDArray[np.int32], served: ServedModel) -> bytes:
    """Return ``{"tokens": [{"id": ..., "piece": ...}, ...]}``: texts, or bytes where they are none."""
    parts = (
        _encode([{"id": id_, "piece": _piece(id_, served)} for id_ in ids[at : at + FEW].tolist()])
        for at in range(0, len(ids), FEW)
    )
    return b'{"tokens":[' + b",".join(part[1:-1] for part in parts) + b"]}"


def text_of_ids(ids: NDArray[np.int32], served: ServedModel) -> str:
    """Return the text of tokens of the vocabulary."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [
        decoder.decode(served.detokenize(ids[at : at + FEW].tolist()))
        for at in range(0, len(ids), FEW)
    ]
    return "".join([*parts, decoder.decode(b"", final=True)])


def written_text(ids: NDArray[np.int32], served: ServedModel, most: int) -> bytes:
    """Return ``{"content": ...}``: the text of tokens of the vocabulary.

    Raises:
        Fault: the text has more than `most` bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[bytes] = []
    n_bytes = 0
    for at in range(0, len(ids), FEW):
        raw = served.detokenize(ids[at : at + FEW].tolist())
        n_bytes += len(raw)
        if n_bytes > most:
            why = f"have a text of more than {most} bytes; send fewer at once"
            raise Fault(413, f"tokens {why}", code="answer_too_large", param="tokens")
        parts.append(_encode(decoder.decode(raw))[1:-1])
    parts.append(_encode(decoder.decode(b"", final=True))[1:-1])
    return b'{"content":"' + b"".join(parts) + b'"}'


def _piece(id_: int, served: ServedModel) -> object:
    raw = served.detokenize((id_,))
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
