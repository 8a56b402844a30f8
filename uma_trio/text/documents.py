"""Messages and tools as chat templates know them: the dictionaries of OpenAI's API.

What somebody wrote in them is hidden behind words; see :mod:`uma_trio.text.veil`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from attrs import frozen

from uma_trio.text.chat import Message, Tool
from uma_trio.text.pieces import Excessive, JsonLimits, NotJson, decoded
from uma_trio.text.slices import SLICE, utf8
from uma_trio.text.surrogates import without_lone_surrogates
from uma_trio.text.veil import Veil

_KNOWS_RESULTS: Final = re.compile(r"""[!=]=\s*['"]tool['"]""")
_NINE: Final = re.compile(r"[A-Za-z0-9]{9}")
MAX_VALUES: Final = 32_768
"""Of the arguments of all calls in a conversation; what is behind that is told as text."""


@frozen
class Habits:
    """What a template wants otherwise than most do.

    `arguments_as_text`: arguments as the JSON that the model wrote, not as an object.
    `null_content`: no content, instead of an empty one, beside calls. `ids`: ids of nine letters and
    digits (Mistral's), or such as ``functions.NAME:0`` (Kimi's). `reasoning_key`: what a message calls
    its reasoning; "" if the template leaves it out. `results_inside`: results of tools not as messages,
    but in the message with the calls (Gemma's ``tool_responses``).
    """

    arguments_as_text: bool = False
    null_content: bool = False
    ids: Literal["any", "nine", "numbered"] = "any"
    reasoning_key: str = "reasoning_content"
    results_inside: bool = False


NO_HABITS: Final = Habits()


def wants_results_inside(source: str) -> bool:
    """Whether a template of this source wants results inside, and knows no messages of tools."""
    return "tool_responses" in source and _KNOWS_RESULTS.search(source) is None


def messages_of(messages: Sequence[Message], veil: Veil, habits: Habits) -> list[dict[str, Any]]:
    """Return what a template is told of a conversation."""
    ids = _Ids(messages, habits)
    arguments = CallArguments(habits)
    told = [
        _message(message, place, veil, habits, ids, arguments)
        for place, message in enumerate(messages)
    ]
    return _with_results(told) if habits.results_inside else told


def tools_of(tools: Sequence[Tool], veil: Veil) -> list[dict[str, Any]]:
    """Return what a template is told of the tools: equal tools, equal text."""
    return [{"type": "function", "function": veil.hide(_function(tool))} for tool in tools]


def _with_results(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which results stand in the message with the calls that they follow."""
    found: list[dict[str, Any]] = []
    for message in told:
        if message["role"] == "tool" and found and found[-1].get("tool_calls"):
            result = {"name": message.get("name", "unknown"), "response": message["content"]}
            found[-1].setdefault("tool_responses", []).append(result)
        else:
            found.append(message)
    return found


def _function(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": dict(tool.parameters)}


def _message(
    message: Message, place: int, veil: Veil, habits: Habits, ids: _Ids, arguments: CallArguments
) -> dict[str, Any]:
    content: str | None = veil.content(message.content, place, message.role)
    if habits.null_content and message.calls and not message.content:
        content = None
    told: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning and habits.reasoning_key:
        told[habits.reasoning_key] = veil.hide(message.reasoning)
    if message.calls:
        told["tool_calls"] = [
            {
                "id": veil.hide(ids.shown[call.id]),
                "type": "function",
                "function": {
                    "name": veil.hide(call.name),
                    "arguments": veil.hide(arguments.read(call.arguments)),
                },
            }
            for call in message.calls
        ]
    if message.call_id is not None:
        told["tool_call_id"] = veil.hide(ids.shown.get(message.call_id, message.call_id))
    name = message.name or ids.names.get(message.call_id or "")
    if message.role == "tool" and name:
        told["name"] = veil.hide(name)
    return told


class _Ids:
    """The calls of a conversation by their ids: what a template is `shown` as id, and their `names`."""

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
    """Return an id of nine letters and digits: itself, if it is one."""
    return id_ if _NINE.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]


class CallArguments:
    """Reads the arguments of the calls of one conversation, up to `MAX_VALUES` of them."""

    def __init__(self, habits: Habits) -> None:
        self._as_text = habits.arguments_as_text
        self._left = MAX_VALUES

    def read(self, text: str) -> Any:
        """Return arguments as an object; as they are where that is wanted, or they are none."""
        if self._as_text or self._left <= 0:
            return text
        try:
            value = self._decoded(text or "{}")
        except (ValueError, RecursionError, NotJson, Excessive):
            return text
        self._left -= _n_values(value)
        return value if isinstance(value, dict) else text

    def _decoded(self, text: str) -> Any:
        if len(text) <= SLICE:
            return json.loads(without_lone_surrogates(utf8(text)))
        return decoded(utf8(text), JsonLimits(values=self._left, text=len(text)))


def _n_values(value: Any) -> int:
    """Return the number of values in a JSON value, itself included."""
    n, left = 0, [value]
    while left:
        found = left.pop()
        n += 1
        if isinstance(found, dict):
            left += found.values()
        elif isinstance(found, list):
            left += found
    return n
