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
    ToolCall,
    ToolMode,
    encode_request,
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

    With `progress` the daemon says how far the loading of its model is.

    Raises:
        TypeError: a parameter does not exist.
        uma_protocol.LocalProtocolError: the protocol does not allow a value.
    """
    fields: dict[str, Any] = {"id": uuid.uuid4().hex, **params}
    for name in ("stop", "stop_token_ids", "choice", "allowed_tools"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "tools" in fields:
        fields["tools"] = tuple(
            tool if isinstance(tool, Tool) else Tool(**tool) for tool in fields["tools"]
        )
    if fields.get("lora") is not None:
        fields["lora"] = tuple(
            one if isinstance(one, LoraScale) else LoraScale(**one) for one in fields["lora"]
        )
    if messages is not None:
        fields["messages"] = tuple(_message(turn) for turn in messages)
    request = Generate(prompt=prompt, progress=progress, **fields)
    encode_request(request)  # so that a mistake shows where it was made
    return request


def held_back(event: Eos | End) -> Token | None:
    """Return the text that came with the end of an answer as a token; None if there is none."""
    if not event.text and not event.reasoning:
        return None
    choice = event.choice if isinstance(event, End) else 0
    return Token(event.id, event.text or "", HELD_BACK, None, event.reasoning, (), choice)


def _message(turn: Any) -> Message:
    if isinstance(turn, Message):
        return turn
    if not isinstance(turn, Mapping):
        return Message(*turn)
    calls = tuple(
        call if isinstance(call, ToolCall) else ToolCall(**call) for call in turn.get("calls", ())
    )
    return Message(**{**turn, "calls": calls})
