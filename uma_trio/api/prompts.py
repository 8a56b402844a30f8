"""The `prompt` of the APIs that continue texts: a text, tokens, both mixed, or a list of these.

A list with a token id in it is one prompt. Its texts become tokens where they stand, as
llama-server does it: ``[1, "text", 2]``. Any other list has one prompt in each item.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from uma_protocol.rules import MAX_INT32, Integer
from uma_trio.api.bodies import free, run
from uma_trio.api.context import Context
from uma_trio.http.errors import Fault, invalid
from uma_trio.models.loaded import LoadedModel
from uma_trio.service.ask import Prompt
from uma_trio.service.checks import no_room, utf8_length
from uma_trio.service.preparing import tokens_of_mixed

PromptField = Annotated[
    Any,
    free(
        "each item of a list without tokens is answered",
        "a text, tokens, tokens mixed with texts, or a list of these",
    ),
]

_LONG: Final = (
    "prompt_string"  # llama-server's long form of a text, which may have images beside it
)


async def with_prompts(value: Any, context: Context) -> list[Prompt]:
    """Return the prompts of a field: texts as they are, tokens as arrays.

    Raises:
        Fault: one is neither, or these are more prompts than are computed at once.
    """
    most = context.served.slots
    if isinstance(value, list) and len(value) > most:
        check_length(value, "prompt", context)  # tokens, or too many prompts
    if not isinstance(value, list) or _holds_tokens(value):
        value = [value]
    if not 0 < len(value) <= most:
        raise invalid(
            "prompt",
            f"must be a text, a list of tokens and texts, or a list of 1 to {most} of these",
        )
    several = len(value) > 1
    return [
        await _prompt(item, f"prompt[{i}]" if several else "prompt", context)
        for i, item in enumerate(value)
    ]


def check_length(value: Sequence[Any], path: str, context: Context) -> None:
    """Refuse what has more items than the context tokens, before any of them is looked at.

    Raises:
        Refusal: it has.
    """
    if len(value) > context.served.bounds.n_ctx_seq:
        raise no_room(len(value), context.served.bounds, path)


def _holds_tokens(value: Sequence[Any]) -> bool:
    return int in kinds_of(value)


async def _prompt(value: Any, path: str, context: Context) -> Prompt:
    if isinstance(value, dict) and value.keys() == {_LONG}:
        value, path = value[_LONG], f"{path}.{_LONG}"
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid(path, "must be a text or a list of tokens and texts")
    check_length(value, path, context)
    if kinds_of(value) >= {int, str}:
        return await _mixed(value, path, context)
    return await run(context, lambda: ids_of(value, path), in_thread=len(value) > MANY)


async def _mixed(value: Sequence[Any], path: str, context: Context) -> Prompt:
    """Return the tokens of tokens and texts, of as many bytes as a prompt may have at all."""
    door = context.door
    if not kinds_of(value) <= {int, str}:
        raise invalid(path, "must have token ids and texts only")

    def count() -> int:
        return sum(utf8_length(item) for item in value if type(item) is str)

    n_bytes = await run(context, count, in_thread=True)
    if n_bytes > door.max_prompt_bytes:
        limit = f"{door.max_prompt_bytes}; shorten them, or raise the daemon's {door.option}"
        raise invalid(path, f"has texts of {n_bytes} bytes, the limit is {limit}")
    return await tokens_of_mixed(context.served, value, path)


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


def written_pieces(ids: NDArray[np.int32], served: LoadedModel) -> bytes:
    """Return ``{"tokens": [{"id": ..., "piece": ...}, ...]}``: texts, or bytes where they are none."""
    parts = (
        _encode([{"id": id_, "piece": _piece(id_, served)} for id_ in ids[at : at + FEW].tolist()])
        for at in range(0, len(ids), FEW)
    )
    return b'{"tokens":[' + b",".join(part[1:-1] for part in parts) + b"]}"


def text_of_ids(ids: NDArray[np.int32], served: LoadedModel) -> str:
    """Return the text of tokens of the vocabulary."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [
        decoder.decode(served.detokenize(ids[at : at + FEW].tolist()))
        for at in range(0, len(ids), FEW)
    ]
    return "".join([*parts, decoder.decode(b"", final=True)])


def written_text(ids: NDArray[np.int32], served: LoadedModel, most: int) -> bytes:
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


def _piece(id_: int, served: LoadedModel) -> object:
    raw = served.detokenize((id_,))
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
