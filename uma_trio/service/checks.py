"""Validation of requests, for all front ends.

Cheap checks run first, so most requests are refused before they are tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from uma_protocol.errors import Code
from uma_trio.models.loaded import Bounds as Bounds
from uma_trio.service.ask import Ask, Chat, Door, Refusal
from uma_trio.text.shape import BESIDE_TOOLS
from uma_trio.text.slices import json_text as json_text
from uma_trio.text.slices import stripped
from uma_trio.text.slices import utf8_length as utf8_length
from uma_trio.text.template import problem_of

_FEW: Final = 64  # messages
_MANY_CONTEXTS: Final = 4
_SHORT: Final = 65_536  # characters or tokens
MAX_ARGUMENTS_BYTES: Final = 16_384  # of JSON, in which any character may take six


@contextmanager
def refusing_depth() -> Iterator[None]:
    """Refuse a request that is nested so deeply that Python cannot walk it.

    Raises:
        Refusal: the request is nested too deeply.
    """
    try:
        yield
    except RecursionError:
        raise Refusal(Code.E_PROTO_003, "the request is nested too deeply; simplify it") from None


def check_untokenised(ask: Ask, door: Door, bounds: Bounds) -> None:
    """Check what can be checked without tokens.

    Raises:
        Refusal: another model, no prompt, one of too many bytes, more tokens than the daemon's limit,
            tokens that do not exist, arguments that a template must not get.
    """
    if ask.model is not None and not bounds.names(ask.model):
        raise Refusal(
            Code.E_MODEL_002,
            f"this daemon serves {bounds.model}; omit model, or give that name",
            field="model",
        )
    if ask.awaits is not None and (ask.awaits == "nothing") != (ask.lane == "background"):
        raise Refusal(
            Code.E_PROTO_003,
            "awaits must be nothing in the background lane, and only there; the interactive lane has "
            "tokens and answer",
            field="awaits",
        )
    field, n_bytes = _prompt_field(ask), _prompt_bytes(ask)
    if n_bytes > door.max_prompt_bytes:
        raise Refusal(
            Code.E_LIMIT_001,
            f"the prompt is {n_bytes} bytes long, the limit is {door.max_prompt_bytes}; "
            f"shorten it, or raise the daemon's {door.option}",
            field=field,
        )
    if n_bytes == 0 and not (isinstance(ask.prompt, Chat) and ask.prompt.messages):
        raise Refusal(Code.E_PROTO_003, f"{field} is empty; send some text", field=field)
    if isinstance(ask.prompt, np.ndarray):
        bounds.check_vocabulary(ask.prompt, field)
    _check_shape(ask)
    if isinstance(ask.prompt, Chat):
        _check_tools(ask.prompt)
        _check_arguments(ask.prompt.manner.arguments)
    sampling = ask.sampling
    bounds.check_vocabulary(_ids(sampling.stop_token_ids), "stop_token_ids")
    bounds.check_vocabulary(_ids([token for token, _ in sampling.logit_bias]), "logit_bias")
    cap, requested = bounds.max_tokens_cap, ask.max_tokens
    if cap is not None and requested is not None and requested > cap and not ask.clamp:
        raise Refusal(
            Code.E_PROTO_003,
            f"max_tokens is {requested}, the daemon's limit is {cap}",
            field="max_tokens",
        )


def check_number(asks: Sequence[Ask], slots: int) -> None:
    """Check that the number of answers is at most the number of slots. Raises :class:`Refusal`."""
    n = sum(ask.n for ask in asks)
    if n > slots:
        raise Refusal(
            Code.E_PROTO_003,
            f"n asks for {n} answers, but this daemon computes {slots} at once; ask for fewer, or raise "
            "--parallel",
            field="n",
        )


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(tokens, np.int64)


def _check_shape(ask: Ask) -> None:
    """Check that at most one constraint applies to the answer. Raises :class:`Refusal`."""
    chat = ask.prompt if isinstance(ask.prompt, Chat) else None
    tools = chat is not None and chat.tools and chat.choice.mode != "none"
    if ask.shape is not None and tools and ask.shape.kind not in BESIDE_TOOLS:
        raise Refusal(
            Code.E_PROTO_003,
            f"{ask.shape.field} cannot be combined with tools unless it is a JSON schema or a choice; omit one of them, "
            "or set tool_choice none",
            field=ask.shape.field,
        )


def _check_tools(chat: Chat) -> None:
    names = [tool.name for tool in chat.tools]
    field, problem = "tool_choice", None
    if len(set(names)) < len(names):
        field, problem = "tools", "has two functions of the same name"
    elif not set(names).issuperset(chat.choice.names):
        problem = "names a function that is not in tools"
    elif chat.choice.mode == "required" and not names:
        problem = "asks for a call, but there are no tools"
    if problem is not None:
        raise Refusal(Code.E_PROTO_003, f"{field} {problem}", field=field)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    field = "chat_template_kwargs"
    n_bytes = _json_bytes(arguments) if arguments else 0
    problem = problem_of(arguments)
    if n_bytes > MAX_ARGUMENTS_BYTES:
        problem = f"takes {n_bytes} bytes of JSON, and {MAX_ARGUMENTS_BYTES} are allowed"
    if problem is not None:
        raise Refusal(Code.E_PROTO_003, f"{field} {problem}", field=field)


def max_tokens_for(ask: Ask, n_prompt: int, bounds: Bounds) -> int:
    """Return the maximum number of tokens of an answer.

    Raises:
        Refusal: prompt and max_tokens do not fit into the context together, or min_tokens is more.
    """
    context = bounds.n_ctx_seq
    room = context - n_prompt
    requested = ask.max_tokens
    field = _prompt_field(ask)
    if n_prompt == 0:
        raise Refusal(Code.E_PROTO_003, "the prompt holds no tokens", field=field)
    if room < 1:
        raise no_room(n_prompt, bounds, field)
    if requested is None:
        return _at_least_min_tokens(ask, min(bounds.max_tokens, room))
    if ask.clamp:
        return _at_least_min_tokens(ask, min(requested, room, bounds.max_tokens_cap or room))
    if requested > room:
        raise Refusal(
            Code.E_LIMIT_004,
            f"a prompt of {n_prompt} and max_tokens {requested} exceed the context of "
            f"{context}; at most {room} tokens can follow this prompt{bounds.longer and '. ' + bounds.longer}",
            field="max_tokens",
            prompt_tokens=n_prompt,
            context=context,
        )
    return _at_least_min_tokens(ask, requested)


def check_fits(ask: Ask, bounds: Bounds, longest_piece: int) -> None:
    """Refuse a prompt that has far more tokens than the context, before it is tokenised.

    It has at least one token for each message with content, and for each `longest_piece` bytes.
    Prompts close to the context are tokenised, so that their refusal has the exact number.

    Raises:
        Refusal: it has at least four times as many.
    """
    prompt = ask.prompt
    if isinstance(prompt, Chat):
        # Templates may strip contents, and leave out all else.
        texts = [text for message in prompt.messages if (text := stripped(message.content))]
        field, least = "messages", max(len(texts), sum(map(utf8_length, texts)) // longest_piece)
    elif isinstance(prompt, str):
        field, least = "prompt", utf8_length(prompt) // longest_piece
    else:
        field, least = "prompt", len(prompt)
    if least > _MANY_CONTEXTS * bounds.n_ctx_seq:
        raise no_room(least, bounds, field, at_least=True)


def no_room(n_prompt: int, bounds: Bounds, field: str, *, at_least: bool = False) -> Refusal:
    """Return the refusal of a prompt that fills the context."""
    context = bounds.n_ctx_seq
    return Refusal(
        Code.E_LIMIT_004,
        f"the prompt has {'at least ' * at_least}{n_prompt} tokens and leaves no room for an answer in the context of "
        f"{context}; shorten it to {context - 1} or fewer{bounds.longer and '. ' + bounds.longer}",
        field=field,
        prompt_tokens=n_prompt,
        context=context,
    )


def _at_least_min_tokens(ask: Ask, max_tokens: int) -> int:
    least = ask.sampling.min_tokens
    if least > max_tokens:
        raise Refusal(
            Code.E_PROTO_003,
            f"min_tokens is {least}, but the answer gets at most {max_tokens}; ask for fewer, or "
            "raise max_tokens",
            field="min_tokens",
        )
    return max_tokens


def _prompt_field(ask: Ask) -> str:
    return "messages" if isinstance(ask.prompt, Chat) else "prompt"


def _prompt_bytes(ask: Ask) -> int:
    prompt = ask.prompt
    if isinstance(prompt, str):
        return utf8_length(prompt)
    return _chat_bytes(prompt) if isinstance(prompt, Chat) else prompt.nbytes


def _chat_bytes(chat: Chat) -> int:
    n_bytes = sum(utf8_length(text) for message in chat.messages for text in message.texts)
    return n_bytes + sum(
        _json_bytes(tool.written)
        if tool.written
        else utf8_length(tool.name) + utf8_length(tool.description) + _json_bytes(tool.parameters)
        for tool in chat.tools
    )


def _json_bytes(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value))
    except (
        OverflowError,
        ValueError,
        UnicodeEncodeError,
    ):  # values that only Python's json encodes
        return len(json_text(value))


def is_large(ask: Ask) -> bool:
    """Return whether the checks of a request may take more than a millisecond or two."""
    prompt = ask.prompt
    if isinstance(prompt, Chat):
        n_items = len(prompt.messages) + sum(
            len(message.calls) for message in prompt.messages[:_FEW]
        )
        if prompt.tools or prompt.manner.arguments or n_items > _FEW:
            return True
        return sum(len(text) for message in prompt.messages for text in message.texts) > _SHORT
    return len(prompt) > _SHORT
