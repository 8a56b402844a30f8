"""Tools described as text, for templates without them: a block in the system message, calls as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from attrs import evolve

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.replies.format import GENERIC_CALLS, CallSyntax, ReplyFormat
from uma_trio.text.replies.literals import CLOSING
from uma_trio.text.slices import json_text

_BEFORE: Final = (
    "You can call functions. Each line between <tools> and </tools> describes one, with a JSON Schema "
    "of its arguments."
)
_AFTER: Final = (
    "To call a function, write a JSON object with its name and arguments, and nothing behind it. For "
    "several calls, write one block each:"
)
_AFTER_ONE: Final = "To call a function, write this, and nothing behind it:"
_GIVEN: Final = {"ARGUMENT": "VALUE"}


class TemplateInput(NamedTuple):
    """The input of a template; `block` is the text that shows the tools in a message instead of `tools`."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    block: str = ""


def template_inputs(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    format: ReplyFormat,  # noqa: A002
    *,
    renders_tools: bool,
) -> Iterator[TemplateInput]:
    """Yield the inputs to try in order: as the template supports it, then with the rest described as text."""
    generic = format.source == "generic"
    if not tools or (renders_tools and not generic):
        yield TemplateInput(messages, tools)
    if not generic and (renders_tools or not tools):
        return
    if generic and any(message.calls or message.role == "tool" for message in messages):
        messages = _merged([_as_text(message) for message in messages])
    elif not tools:
        return
    block = _block(tools, format) if tools else ""
    if not block:
        yield TemplateInput(messages)
        return
    has_system = bool(messages) and messages[0].role == "system"
    system, *rest = messages if has_system else [Message("system"), *messages]
    content = "\n\n".join([text for text in (system.content, block) if text])
    shown = [evolve(system, content=content), *rest]
    yield TemplateInput(shown, (), block)
    yield TemplateInput(without_system(shown), (), block)


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose first user message begins with the system message."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return list(messages)
    system, user, *rest = messages
    return [evolve(user, content=f"{system.content}\n\n{user.content}"), *rest]


def _block(tools: Sequence[Tool], format: ReplyFormat) -> str:  # noqa: A002
    after = _AFTER if format.source == "generic" else _AFTER_ONE
    lines = [json_text({**tool.function, "parameters": dict(tool.parameters)}) for tool in tools]
    return "\n".join([_BEFORE, "<tools>", *lines, "</tools>", after, _example(format.calls)])


def _example(syntax: CallSyntax | None) -> str:
    if syntax is None or syntax.framed:
        syntax = GENERIC_CALLS
    body = json_text({syntax.name_key: "NAME", syntax.arguments_key: _GIVEN})
    if syntax.style == "named":
        body = f"NAME{syntax.after_name}{json_text(_GIVEN)}"
    elif syntax.style == "tagged":
        value_close = syntax.value_close.replace("{}", "ARGUMENT")
        body = (
            f"NAME{syntax.after_name}{syntax.key_open}ARGUMENT{syntax.key_close}VALUE{value_close}"
        )
    elif syntax.style == "literal":
        close = CLOSING[syntax.after_name.strip()[-1]]
        value = f"{syntax.quote}VALUE{syntax.quote}"
        body = f"NAME{syntax.after_name}ARGUMENT{syntax.key_close}{value}{close}"
    return f"{syntax.start}{body}{syntax.close}{syntax.section_close}"


def _as_text(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.calls:
        return message
    parts = [message.content, *map(_call, message.calls)]
    return evolve(message, content="\n".join([part for part in parts if part]), calls=())


def _call(call: Call) -> str:
    name = json_text(call.name)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _merged(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "user":
            merged[-1] = evolve(merged[-1], content=f"{merged[-1].content}\n{message.content}")
        else:
            merged.append(message)
    return merged
