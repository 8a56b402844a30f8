"""The `prompt` of the APIs that continue texts: a text, tokens, both mixed, or a list of these.

A list with a token id in it is one prompt. Its texts become tokens where they stand, as
llama-server does it: ``[1, "text", 2]``. Any other list has one prompt in each item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from uma_trio.api.bodies import free, run
from uma_trio.api.context import Context
from uma_trio.api.tokens import MANY, ids_of, kinds_of
from uma_trio.http.errors import invalid
from uma_trio.service.ask import Prompt
from uma_trio.service.checks import no_room, utf8_length

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
    return await context.served.tokens_of_mixed(value, path)
