"""Preparation of a request for its loaded model: check, render, tokenise and compile, in helper threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from uma_protocol.errors import Code
from uma_trio.backend.base import IntArray
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.refusal import Refusal
from uma_trio.service.ask import Ask, Chat, Door, Origin, text_owner
from uma_trio.service.checks import check_fits, check_untokenised, is_large, refusing_depth
from uma_trio.service.fair import RunFor, program_of
from uma_trio.text.frontend import Preparation, Prepared
from uma_trio.text.prompt import NoTemplate, Prompt, Unrenderable
from uma_trio.text.shape import NotChecked, Unconstrainable, Unknown
from uma_trio.text.template import NotRendered

Result = TypeVar("Result")

_RETRY_S: Final = 1.0
_USE_PROMPT: Final = "send the text as `prompt` instead of `messages`"


async def check(model: LoadedModel, ask: Ask, door: Door, *, fits: bool = True) -> None:
    """Run the checks that need no tokens; for a large request in a helper thread.

    Unless `fits` is false, a prompt with several times the tokens of the context is refused, too.

    Raises:
        Refusal: see :func:`check_untokenised`.
    """

    def work() -> None:
        check_untokenised(ask, door, model.bounds)
        if fits:
            check_fits(ask, model.bounds, model.front_end.longest_piece)

    with refusing_depth():
        if is_large(ask):
            await model.run_blocking(work)
        else:
            work()


async def prepare(
    model: LoadedModel, ask: Ask, origin: Origin, run_compiling: RunFor
) -> list[Prepared]:
    """Prepare the answers of a request, in one call of a helper thread.

    Only constraints that are not compiled yet wait for a compiler; compilers are shared fairly between clients. Text
    in the cache of tokens is not tokenised again, if the request may use it.

    Raises:
        Refusal: the model does not support the request, a constraint cannot be enforced, or its
            compilation takes too long.
    """
    preparation = Preparation(
        model.front_end,
        ask.prompt,
        shape=ask.shape,
        budget=ask.reasoning_budget,
        n=ask.n,
        owner=text_owner(ask, origin),
    )
    if not isinstance(ask.prompt, Chat | str) and ask.shape is None:
        return preparation.finish()  # tokens need no preparation
    client = program_of(origin.principal, origin.app)
    compiling = model.uses.during(lambda call: run_compiling(call, client))
    try:
        while True:
            try:
                return await model.run_blocking(preparation.finish)
            except Unknown:
                await compiling(preparation.compile)
    except NotChecked as error:
        why = f"{preparation.field} {error}"
        raise Refusal(
            Code.E_LIMIT_003, why, field=preparation.field, retry_after_s=_RETRY_S
        ) from None
    except Unconstrainable as error:
        why = f"{preparation.field} {error}"
        raise Refusal(Code.E_PROTO_003, why, field=preparation.field) from None
    except Unrenderable as error:
        raise _unrendered(error) from None


async def count_tokens(model: LoadedModel, ask: Ask, origin: Origin) -> int:
    """Return the number of tokens of a request's prompt.

    Raises:
        Refusal: the request is invalid, apart from its number of tokens.
    """
    await check(model, ask, origin.door, fits=False)
    prompt, owner = ask.prompt, text_owner(ask, origin)
    with refusing_depth():
        tokens, *_ = await _rendering(model, lambda: model.front_end.tokens_of(prompt, owner))
        return len(tokens)


async def render(model: LoadedModel, chat: Chat) -> Prompt:
    """Return a chat as the model's chat template renders it.

    Raises:
        Refusal: the template refuses the chat, or the model has none.
    """
    return await _rendering(
        model, lambda: model.front_end.prompt(chat.messages, chat.manner, chat.tools)
    )


async def tokens_of_mixed(model: LoadedModel, parts: Sequence[str | int], field: str) -> IntArray:
    """Return the tokens (int32) of a prompt of texts and token ids, made in a helper thread.

    Raises:
        Refusal: a token of the request's `field` is not in the vocabulary.
    """

    def work() -> IntArray:
        ids = [part for part in parts if not isinstance(part, str)]
        ends = [
            max(min(ids), -1),
            min(max(ids), model.bounds.n_vocab),
        ]  # maybe too large for an array
        model.bounds.check_vocabulary(np.array(ends), field)
        return model.front_end.prepare_mixed(parts)

    return await model.run_blocking(work)


async def _rendering(model: LoadedModel, work: Callable[[], Result]) -> Result:
    try:
        return await model.run_blocking(work)
    except Unrenderable as error:
        raise _unrendered(error) from None


def _unrendered(error: Unrenderable) -> Refusal:
    if isinstance(error, NotRendered):
        why = f"the chat template: {error}"
        return Refusal(Code.E_LIMIT_003, why, field="messages", retry_after_s=_RETRY_S)
    if isinstance(error, NoTemplate):
        return Refusal(Code.E_MODEL_002, f"{error}; {_USE_PROMPT}", field="messages")
    why = f"the model's chat template refuses this: {error}"
    return Refusal(Code.E_MODEL_002, why, field="messages")
