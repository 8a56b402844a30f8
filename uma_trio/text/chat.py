"""A conversation, as neither a wire format nor a template knows it: messages, tools, calls. Values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

Mode = Literal["auto", "required", "none"]


@frozen
class Call:
    """A call that the model made: `arguments` is JSON as the model wrote it, usually an object."""

    id: str
    name: str
    arguments: str


@frozen
class Message:
    """One message. `role` is what chat templates call it: system, user, assistant or tool.

    `reasoning` is what the assistant thought before it said `content` and made its `calls`. A tool's
    result says by `call_id`, and by the tool's `name` where it is known, which call it answers.
    """

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that somebody wrote."""
        said = [text for call in self.calls for text in (call.name, call.arguments)]
        return (self.content, self.reasoning, *said)


@frozen
class Tool:
    """A function that the model may ask for. `parameters` is a JSON Schema of its arguments.

    A chat template sees the function as the client has `written` it, where that is in OpenAI's form. With `strict`
    the schema is enforced as it stands, or the request refused. Otherwise what cannot be enforced of it is left to
    the model.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)
    strict: bool = False
    written: Mapping[str, Any] | None = None


@frozen
class ToolChoice:
    """Whether tools are called, and which.

    "auto" leaves it to the model, "required" asks for at least one call, "none" for no call at all.
    `names` are the tools that may be called, empty for all: with "required" and one name that
    tool is called. Without `parallel` there is at most one call.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


AUTO: Final = ToolChoice()
