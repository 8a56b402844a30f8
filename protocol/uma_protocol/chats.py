"""What a chat is made of: messages, tools, and calls of these. Frozen values; `fields` has the bounds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Speaker = Literal["system", "user", "assistant", "tool"]
"""Who speaks in a chat message."""

ToolMode = Literal["auto", "required", "none"]
"""Whether tools are called: as the model likes, at least one, or none."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool that the model made. `arguments` is JSON, usually an object."""

    id: str
    name: str
    arguments: str


class CallPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of the call `index`, which begins with its id and name; its arguments are joined."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON Schema of its arguments.

    A `strict` one is refused if its schema cannot be enforced as a whole.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat.

    The assistant's may have `calls` and the `reasoning` before them; a tool's result says by
    `call_id` which call it answers, and may say by which tool's `name`.
    """

    role: Speaker
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
