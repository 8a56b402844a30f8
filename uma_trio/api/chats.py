"""The messages of a chat, from what clients send to neutral ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from uma_protocol.rules import shown
from uma_trio.http.errors import invalid
from uma_trio.service.ask import Call, Message
from uma_trio.service.checks import json_text

SetAside = Callable[[str], None]
"""Receives the path of each part of a request that is not used."""

MAX_MESSAGES = 8192
# What the API calls a role, and what chat templates call it.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def messages_of(value: Any, set_aside: SetAside) -> tuple[Message, ...]:
    """Return the messages of a chat.

    Raises:
        Fault: it is no list of messages, or one of them holds more than text.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    return tuple(
        _message(item, f"messages[{index}]", set_aside) for index, item in enumerate(value)
    )


def _message(value: Any, path: str, set_aside: SetAside) -> Message:
    if not isinstance(value, dict):
        raise invalid(path, "must be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise invalid(f"{path}.{name}", "is not supported", code="unsupported_parameter")
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    in_content = f"{path}.content"
    is_result = _ROLES[role] == "tool"
    return Message(
        _ROLES[role],
        result_of(content, in_content, set_aside) if is_result else text_of(content, in_content),
        calls_of(value.get("tool_calls"), role, f"{path}.tool_calls"),
        optional_string(value, "tool_call_id", path) if role == "tool" else None,
        optional_string(value, "name", path) if role in ("tool", "function") else None,
        optional_string(value, "reasoning_content", path)
        or optional_string(value, "reasoning", path)
        or "",
    )


def string_in(value: Mapping[str, Any], name: str, path: str) -> str:
    """Return a member of an object.

    Raises:
        Fault: it is missing, or no string.
    """
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid(f"{path}.{name}", "must be a string")
    return text


def optional_string(value: Mapping[str, Any], name: str, path: str) -> str | None:
    """Return a member of an object; None if it is missing. Raises :class:`Fault` if it is no string."""
    return None if value.get(name) is None else string_in(value, name, path)


def calls_of(value: Any, role: str, path: str) -> tuple[Call, ...]:
    """Return the calls in a message; the `id` of one may be empty.

    Raises:
        Fault: it is no list of calls, or they are not the assistant's.
    """
    if not value:
        return ()
    if role != "assistant" or not isinstance(value, list):
        raise invalid(path, "must be a list, in a message of the assistant")
    return tuple(_call(item, f"{path}[{index}]") for index, item in enumerate(value))


def _call(value: Any, path: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise invalid(path, "must have an id and a function with name and arguments")
    id_, name = value.get("id") or "", function.get("name")
    arguments = function.get("arguments")
    if not isinstance(id_, str) or not isinstance(name, str) or not name:
        raise invalid(path, "must have an id and a function with name and arguments")
    if isinstance(arguments, dict):  # what clients of other servers send
        arguments = json_text(arguments)
    if arguments is not None and not isinstance(arguments, str):
        raise invalid(f"{path}.function.arguments", "must be JSON, as a string")
    return Call(id_, name, arguments or "{}")


def text_of(content: Any, path: str) -> str:
    """Return the text of a content, the parts of one that comes in parts line by line.

    Raises:
        Fault: it is no text, or a part of it is none.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, "must be a string or a list of text parts")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def result_of(content: Any, path: str, set_aside: SetAside) -> str:
    """Return the text of a tool's result, with a sentence for each part that is no text.

    Raises:
        Fault: it is no text, and no list of parts.
    """
    if not isinstance(content, list):
        return text_of(content, path)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            set_aside(f"{path}[{index}] {shown(kind)}")
            texts.append(UNSEEN)
        else:
            texts.append(_part(part, f"{path}[{index}]"))
    return "\n".join(texts)


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise invalid(
            path, "must be a text part: the model reads only text", code="unsupported_content"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text", "must be a string")
    return text


_BETWEEN = "\n\n"
UNSEEN = "[This part of the result is no text, and cannot be shown to you.]"
"""What the model reads of a picture that a tool brought: refused, it would end an agent's session."""


@define
class _Turn:
    role: str
    texts: list[str] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    calls: list[Call] = field(factory=list)

    def message(self) -> Message:
        return Message(
            self.role,
            _BETWEEN.join(self.texts),
            calls=tuple(self.calls),
            reasoning="\n".join(self.thoughts),
        )


class Turns:
    """Takes what was said, piece by piece, and gives the messages."""

    def __init__(self) -> None:
        self._system: list[str] = []
        self._turns: list[_Turn | Message] = []
        self._names: dict[str, str] = {}  # of tools, by the call

    def system(self, text: str) -> None:
        """Take a word of the application: before the first turn the system's, later the user's."""
        if self._turns:
            self.user(text)
        elif text:
            self._system.append(text)

    def user(self, text: str) -> None:
        """Take what the user says."""
        self._turn("user").texts.append(text)

    def summary(self, text: str) -> None:
        """Take a summary that stands for the conversation before it."""
        self.user(f"This is a summary of the conversation so far:\n\n{text}")

    def assistant(self, text: str) -> None:
        """Take what the model said."""
        if text:
            self._turn("assistant").texts.append(text)

    def thought(self, text: str) -> None:
        """Take what the model thought, before what it said then."""
        if text:
            self._turn("assistant").thoughts.append(text)

    def call(self, call: Call) -> None:
        """Take a call that the model made."""
        self._turn("assistant").calls.append(call)
        self._names[call.id] = call.name

    def result(self, call_id: str, text: str) -> None:
        """Take what a call brought."""
        name = self._names.get(call_id)
        self._turns.append(Message("tool", text, call_id=call_id, name=name))

    def messages(self) -> tuple[Message, ...]:
        """Return the messages. A thought that nothing was said or done behind is left out."""
        found = [Message("system", _BETWEEN.join(self._system))] if self._system else []
        for turn in self._turns:
            if isinstance(turn, Message):
                found.append(turn)
            elif turn.role != "assistant" or turn.texts or turn.calls:
                found.append(turn.message())
        return tuple(found)

    def _turn(self, role: str) -> _Turn:
        """Return the turn that is going on if it is this side's, else a new one."""
        last = self._turns[-1] if self._turns else None
        if not isinstance(last, _Turn) or last.role != role:
            last = _Turn(role)
            self._turns.append(last)
        return last
