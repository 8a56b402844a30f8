"""Messages and tools as chat templates read them: the dictionaries of OpenAI's API."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen

from uma_trio.text.chat import Message
from uma_trio.text.reshaping import Kind
from uma_trio.text.slices import json_value

_KNOWS_RESULTS: Final = re.compile(r"""[!=]=\s*['"]tool['"]""")
_TYPES: Final = ("string", "number", "integer", "boolean", "array", "object")
_CHOICES: Final = ("anyOf", "oneOf", "allOf")
_NULL: Final = {"type": "null"}
_NINE: Final = re.compile(r"[A-Za-z0-9]{9}")


@frozen
class Habits:
    """How a template differs from most.

    `ids`: of nine letters and digits (Mistral), or ``functions.NAME:0`` (Kimi). `reasoning_key`: "" if it is
    left out. `results_inside`: in the message with the calls (Gemma). `content_as_parts`: with vision.
    """

    arguments_as_text: bool = False
    null_content: bool = False
    ids: Literal["any", "nine", "numbered"] = "any"
    reasoning_key: str = "reasoning_content"
    results_inside: bool = False
    content_as_parts: bool = False


NO_HABITS: Final = Habits()


def nests_results(source: str) -> bool:
    """Whether the template expects results inside, and has no tool messages."""
    return "tool_responses" in source and _KNOWS_RESULTS.search(source) is None


def messages_of(messages: Sequence[Message], habits: Habits) -> list[dict[str, Any]]:
    ids = _Ids(messages, habits)
    found = [_message(message, habits, ids) for message in messages]
    return _with_results(found) if habits.results_inside else found


def tool_of(written: Mapping[str, Any], *, kinds: Collection[Kind] = ()) -> dict[str, Any]:
    """Return a function as a template reads it: as written, or changed by `kinds`."""
    function = {**written}
    parameters = written.get("parameters") or {}
    if kinds:
        function["description"] = written.get("description") or ""
    if Kind.SIMPLIFY_TOOLS in kinds:
        function["parameters"] = _simple({**parameters, "type": "object"})
    elif Kind.COMPLETE_TOOLS in kinds:
        properties = parameters.get("properties")
        if isinstance(properties, dict):
            properties = {key: _property(value) for key, value in properties.items()}
        function["parameters"] = {"type": "object", **parameters, "properties": properties or {}}
    return {"type": "function", "function": function}


def _property(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    added = {"type": "any", "description": ""}
    return {**schema, **{key: value for key, value in added.items() if key not in schema}}


def _simple(schema: Any) -> dict[str, Any]:
    """Return a schema of one type, all the way down, without what says more than types and names."""
    given: dict[str, Any] = schema if isinstance(schema, dict) else {}
    kind = given.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each in _TYPES), None)
    if kind not in _TYPES:
        options = [each for word in _CHOICES for each in _list(given.get(word)) if each != _NULL]
        if options and isinstance(options[0], dict):
            return _simple({"description": given.get("description"), **options[0]})
        kind = "object" if "properties" in given else "array" if "items" in given else "string"
    found: dict[str, Any] = {"type": kind, "description": str(given.get("description") or "")}
    words = given.get("enum")
    if kind == "string" and isinstance(words, list) and all(isinstance(w, str) for w in words):
        found["enum"] = words
    if kind == "array":
        found["items"] = _simple(given.get("items"))
    if kind == "object":
        properties = given.get("properties")
        members = properties.items() if isinstance(properties, dict) else ()
        found["properties"] = {key: _simple(value) for key, value in members}
        required = _list(given.get("required"))
        found["required"] = [key for key in found["properties"] if key in required]
        found["additionalProperties"] = _simple(given.get("additionalProperties"))
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which results stand in the message with the calls that they follow."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and found and found[-1].get("tool_calls"):
            result = {"name": message.get("name", "unknown"), "response": message["content"]}
            found[-1].setdefault("tool_responses", []).append(result)
        else:
            found.append(message)
    return found


def _message(message: Message, habits: Habits, ids: _Ids) -> dict[str, Any]:
    is_null = habits.null_content and message.calls and not message.content
    found: dict[str, Any] = {"role": message.role, "content": None if is_null else message.content}
    if message.reasoning and habits.reasoning_key:
        found[habits.reasoning_key] = message.reasoning
    if message.calls:
        found["tool_calls"] = [
            {
                "id": ids.shown[call.id],
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments(call.arguments, as_text=habits.arguments_as_text),
                },
            }
            for call in message.calls
        ]
    if message.call_id is not None:
        found["tool_call_id"] = ids.shown.get(message.call_id, message.call_id)
    name = message.name or ids.names.get(message.call_id or "")
    if message.role == "tool" and name:
        found["name"] = name
    return found


class _Ids:
    """The ids of a conversation's calls: what the template is `shown`, and the `names` of their tools."""

    def __init__(self, messages: Sequence[Message], habits: Habits) -> None:
        calls = [call for message in messages for call in message.calls]
        self.names = {call.id: call.name for call in calls}
        self.shown = {call.id: call.id for call in calls}
        if habits.ids == "nine":
            self.shown = {id_: nine(id_) for id_ in self.shown}
        elif habits.ids == "numbered":
            self.shown = {
                call.id: f"functions.{call.name}:{number}" for number, call in enumerate(calls)
            }


def nine(id_: str) -> str:
    """Return `id_` if it has nine letters and digits, else a digest that has."""
    return id_ if _NINE.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]


def _arguments(text: str, *, as_text: bool) -> Any:
    if as_text:
        return text
    value = json_value(text or "{}")
    return value if isinstance(value, dict) else text
