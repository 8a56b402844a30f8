"""Tools told in words, for templates that know none: a block in the system message, calls as text.

The block is the same for the same tools, so that a prompt goes on with what was computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import evolve

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.replies.format import ReplyFormat
from uma_trio.text.slices import json_text, stripped

_BEFORE: Final = (
    "You can call functions. Each line between <tools> and </tools> describes one, with a JSON Schema "
    "of its arguments."
)
_BEHIND: Final = (
    "To call a function, write a JSON object with its name and arguments, and nothing behind it. For "
    "several calls, write one block each:"
)
_EXAMPLE: Final = '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'


def written(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    format: ReplyFormat,  # noqa: A002
    *,
    tells_tools: bool,
) -> list[Message]:
    """Return messages in which everything is said in words that the template does not say."""
    said = [_split_reasoning(message, format) for message in messages]
    generic = format.source == "generic"
    if generic and any(message.calls or message.role == "tool" for message in said):
        said = _merged([_in_words(message) for message in said])
    if tools and (generic or not tells_tools):
        block = _block(tools)
        if said and said[0].role == "system":
            said[0] = evolve(said[0], content=f"{said[0].content}\n\n{block}")
        else:
            said.insert(0, Message("system", block))
    return said


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose first user message begins with what the system says."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return list(messages)
    system, user, *rest = messages
    return [evolve(user, content=f"{system.content}\n\n{user.content}"), *rest]


def _block(tools: Sequence[Tool]) -> str:
    lines = [
        json_text(
            {
                "name": tool.name,
                **({"description": tool.description} if tool.description else {}),
                "parameters": dict(tool.parameters),
            }
        )
        for tool in tools
    ]
    return "\n".join([_BEFORE, "<tools>", *lines, "</tools>", _BEHIND, _EXAMPLE])


def _in_words(message: Message) -> Message:
    """Return a message whose calls or result are text."""
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
    """Join messages of users that follow each other, as several results do."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "user":
            merged[-1] = evolve(merged[-1], content=f"{merged[-1].content}\n{message.content}")
        else:
            merged.append(message)
    return merged


def _split_reasoning(message: Message, format: ReplyFormat) -> Message:  # noqa: A002
    """Move reasoning that a client left in an answer to where templates look for it."""
    thought = format.thought
    if thought is None or message.role != "assistant" or message.reasoning:
        return message
    before, found, after = message.content.partition(thought.close)
    before = stripped(before)
    opened = before.startswith(thought.open)
    if not found or not opened:
        return message
    reasoning = stripped(before.removeprefix(thought.open))
    return evolve(message, content=after.lstrip(), reasoning=reasoning)
