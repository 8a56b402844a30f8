"""Build a `generate` request from the parameters of an application."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from uma_protocol import (
    Awaits,
    Effort,
    End,
    Eos,
    Generate,
    LoraScale,
    Message,
    Pace,
    Priority,
    Slo,
    Speculation,
    Token,
    Tool,
    ToolMode,
    generate_request,
)

HELD_BACK = -1
"""The `token_id` of the last piece of a text, which belongs to no single token."""

Chat = Iterable[Message | Mapping[str, Any] | tuple[str, str]]
"""Turns of a chat: messages, ``{"role": ..., "content": ...}`` or ``(role, content)``."""


class Params(TypedDict, total=False):
    """The parameters of a request besides its prompt. Omitted ones get the daemon's defaults."""

    id: str
    session: str | None
    cache: str | None
    model: str | None
    app: str | None
    priority: Priority
    max_tokens: int | None
    temperature: float | None
    default_temperature: float | None
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repeat_penalty: float
    repeat_last_n: int
    logit_bias: dict[int, float]
    seed: int | None
    n: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    logprobs: int | None
    schema: dict[str, Any] | None
    regex: str | None
    choice: tuple[str, ...]
    grammar: str | None
    stream: bool
    ignore_eos: bool
    speculation: Speculation | None
    pace: Pace
    awaits: Awaits
    lora: Sequence[LoraScale | Mapping[str, Any]] | None
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]
    reasoning_effort: Effort | None
    reasoning_budget: int | None
    tools: Sequence[Tool | Mapping[str, Any]]
    tool_choice: ToolMode
    allowed_tools: tuple[str, ...]
    parallel_tool_calls: bool
    slo: Slo | None
    metadata: dict[str, Any] | None


def build_request(
    prompt: str | None, messages: Chat | None, params: Params, *, progress: bool = False
) -> Generate:
    """Return the request, with a new id if it has none.

    With `progress` the daemon reports the loading of the model.

    Raises:
        TypeError: a parameter does not exist.
        uma_protocol.LocalProtocolError: the protocol does not allow a value.
    """
    fields: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "prompt": prompt,
        "progress": progress,
        **params,
    }
    if messages is not None:
        fields["messages"] = [_message(turn) for turn in messages]
    unknown = next((name for name in fields if name not in Generate.__struct_fields__), None)
    if unknown is not None:
        raise TypeError(f"there is no parameter {unknown}")
    return generate_request(fields)


def held_back(event: Eos | End) -> Token | None:
    """Return the text of a terminal event as a token; None if it has none."""
    if not event.text and not event.reasoning:
        return None
    choice = event.choice if isinstance(event, End) else 0
    return Token(event.id, event.text or "", HELD_BACK, None, event.reasoning, (), choice)


def _message(turn: Any) -> Any:
    return Message(*turn) if isinstance(turn, tuple) else turn
