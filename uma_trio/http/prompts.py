"""The `prompt` of the APIs that continue texts: a text, tokens, both mixed, or a list of these.

A list with a token id in it is one prompt. Its texts become tokens where they stand, as
llama-server does it: ``[1, "text", 2]``. Any other list has one prompt in each item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import evolve

from uma_protocol.rules import MAX_INT32, Integer, ListOf
from uma_trio.http.asking import Anything
from uma_trio.http.errors import invalid
from uma_trio.http.fields import Body, honoured
from uma_trio.http.settings import Shared
from uma_trio.service.ask import Prompt

PROMPT = honoured(
    "prompt",
    Anything("a text, tokens, tokens mixed with texts, or a list of these"),
    "each item of a list without tokens is answered",
    required=True,
)

_TOKENS = ListOf(1, 1 << 24, Integer(0, MAX_INT32), "token ids")
_LONG: Final = (
    "prompt_string"  # llama-server's long form of a text, which may have images beside it
)


async def with_prompts(body: Body, shared: Shared) -> Body:
    """Return the body with a list of prompts as its `prompt`: texts as they are, tokens as arrays.

    Raises:
        Fault: one is neither, or these are more prompts than are computed at once.
    """
    value = body.get("prompt")
    if not isinstance(value, list) or _holds_tokens(value):
        value = [value]
    most = shared.service.slots
    if not 0 < len(value) <= most:
        raise invalid(
            "prompt",
            f"must be a text, a list of tokens and texts, or a list of 1 to {most} of these",
        )
    several = len(value) > 1
    prompts = [
        await _prompt(item, f"prompt[{i}]" if several else "prompt", shared)
        for i, item in enumerate(value)
    ]
    return evolve(body, given={**body.given, "prompt": prompts})


def _holds_tokens(value: Sequence[Any]) -> bool:
    return int in map(type, value)


async def _prompt(value: Any, path: str, shared: Shared) -> Prompt:
    if isinstance(value, dict) and value.keys() == {_LONG}:
        value, path = value[_LONG], f"{path}.{_LONG}"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _holds_tokens(value) and str in map(type, value):
        return await _mixed(value, path, shared)
    fault = _TOKENS.check(path, value)
    if fault is not None:
        raise invalid(fault.field, fault.problem)
    return np.array(value, np.int32)


async def _mixed(value: Sequence[Any], path: str, shared: Shared) -> Prompt:
    """Return the tokens of tokens and texts; as many items and bytes as a prompt may have at all."""
    most, door = shared.service.bounds.n_ctx_seq, shared.door
    if len(value) > most:
        raise invalid(path, f"has {len(value)} items, but the context has room for {most} tokens")
    if not {*map(type, value)} <= {int, str}:
        raise invalid(path, "must have token ids and texts only")
    n_bytes = sum(len(item.encode()) for item in value if type(item) is str)
    if n_bytes > door.max_prompt_bytes:
        limit = f"{door.max_prompt_bytes}; shorten them, or raise the daemon's {door.option}"
        raise invalid(path, f"has texts of {n_bytes} bytes, the limit is {limit}")
    return await shared.service.tokens_of_mixed(value, path)
