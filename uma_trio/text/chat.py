"""A conversation in no wire format and no template's: messages, tools, calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

Mode = Literal["auto", "required", "none"]


@frozen
class Call:
    """A call that the model made. `arguments` is JSON as the model wrote it, usually an object."""

    id: str
    name: str
    arguments: str


@frozen
class Message:
    """One message; `role` is system, user, assistant or tool. `reasoning` precedes `content` and `calls`."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text that a client wrote."""
        texts = [text for call in self.calls for text in (call.name, call.arguments)]
        return (self.content, self.reasoning, *texts)


@frozen
class Tool:
    """A function that the model may call; its schema is enforced, if `strict` as it is or refused.

    Templates see the function as the client has `written` it, where that is OpenAI's form.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)
    strict: bool = False
    written: Mapping[str, Any] | None = None

    @property
    def function(self) -> dict[str, Any]:
        """OpenAI's form of the function, without what it does not have."""
        members = {"description": self.description, "parameters": dict(self.parameters)}
        return {"name": self.name, **{key: value for key, value in members.items() if value}}


@frozen
class ToolChoice:
    """Whether tools are called ("required": at least one call), and which: `names`, or all if that is empty."""

    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


AUTO: Final = ToolChoice()
