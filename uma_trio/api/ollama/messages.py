"""The messages of Ollama's API as neutral ones. Pure.

Its calls mostly have no ids, and a result names its tool or nothing. Many chat templates tell which
call a result belongs to, so calls without an id are numbered, and results find theirs in their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Final

from attrs import evolve

from uma_trio.api.chats import (
    MAX_MESSAGES,
    UNSEEN,
    SetAside,
    calls_of,
    optional_string,
    result_of,
    text_of,
)
from uma_trio.http.errors import invalid
from uma_trio.service.ask import Call, Message
from uma_trio.text.slices import is_blank

_ROLES: Final = ("system", "user", "assistant", "tool")


def messages_of(value: Any, set_aside: SetAside) -> tuple[Message, ...]:
    """Return the messages of a chat.

    Raises:
        Fault: it is no list of messages, or one of them holds more than text and calls.
    """
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise invalid("messages", f"must be a list of at most {MAX_MESSAGES} messages")
    open_calls = _OpenCalls()
    return tuple(
        _message(item, f"messages[{index}]", open_calls, set_aside)
        for index, item in enumerate(value)
    )


def goes_on(messages: tuple[Message, ...]) -> bool:
    """Whether the model is to go on with the assistant's last message."""
    last = messages[-1]
    return last.role == "assistant" and not last.calls and not is_blank(last.content)


def no_images(value: Any, path: str) -> None:
    """Refuse images.

    Raises:
        Fault: there are some.
    """
    if value:
        why = "must be left out: the model reads only text"
        raise invalid(path, why, code="unsupported_content")


class _OpenCalls:
    """The calls of a conversation that no result has been told of."""

    def __init__(self) -> None:
        self._n = 0
        self._every: deque[Call] = deque()
        self._named: defaultdict[str, deque[Call]] = defaultdict(deque)
        self._answered: set[str] = set()

    def made(self, call: Call) -> Call:
        """Take a call, and return it with an id."""
        self._n += 1
        call = call if call.id else evolve(call, id=f"call_{self._n}")
        self._every.append(call)
        self._named[call.name].append(call)
        return call

    def answered(self, id_: str | None, name: str | None) -> str | None:
        """Return the id of the call that a result belongs to: the oldest one of its tool, or of all."""
        if not id_:
            waiting = self._named.get(name or "", self._every)
            while waiting and waiting[0].id in self._answered:
                waiting.popleft()
            id_ = waiting[0].id if waiting else None
        if id_:
            self._answered.add(id_)
        return id_


def _message(value: Any, path: str, open_calls: _OpenCalls, set_aside: SetAside) -> Message:
    if not isinstance(value, dict):
        raise invalid(path, "must be an object with role and content")
    role = value.get("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    content = "" if value.get("content") is None else value["content"]
    calls = calls_of(value.get("tool_calls"), role, f"{path}.tool_calls")
    if role == "tool":
        text = result_of(content, f"{path}.content", set_aside)
        if value.get("images"):
            set_aside(f"{path}.images")
            text = f"{text}\n{UNSEEN}" if text else UNSEEN
        name = optional_string(value, "tool_name", path) or optional_string(value, "name", path)
        call_id = open_calls.answered(optional_string(value, "tool_call_id", path), name)
        return Message(role, text, call_id=call_id, name=name)
    no_images(value.get("images"), f"{path}.images")
    text = text_of(content, f"{path}.content")
    made = tuple(open_calls.made(call) for call in calls)
    return Message(role, text, made, reasoning=optional_string(value, "thinking", path) or "")
