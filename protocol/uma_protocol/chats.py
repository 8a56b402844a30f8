"""The parts of a request: messages, tools, tool calls, adapters. Frozen values; `fields` has the bounds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Speaker = Literal["system", "user", "assistant", "tool"]
"""Who speaks in a chat message."""

ToolMode = Literal["auto", "required", "none"]
"""Whether tools are called: as the model likes, at least one, or none."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of the model. `arguments` is JSON, usually an object."""

    id: str
    name: str
    arguments: str


class CallPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of tool call number `index`. The first piece has id and name; join the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters` is a JSON Schema of its arguments.

    If `strict` is true, a schema that cannot be enforced in full is refused.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat.

    A message of the assistant may have `calls` and the `reasoning` before them. The result of a
    tool names its call by `call_id`, and may name the tool by `name`.
    """

    role: Speaker
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


class LoraScale(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter of the model, by `name` or by its number (`id`). Without `scale` it has the one of its declaration."""

    name: str | None = None
    id: int | None = None
    scale: float | None = None
