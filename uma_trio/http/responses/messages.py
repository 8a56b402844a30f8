"""What a Responses request says, as a chat: instructions and items, tools, and which are called. Pure.

What only OpenAI's own machines can do, such as their search, is set aside and named in a header:
agents send it whether it is there or not.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from uma_protocol.rules import shown
from uma_trio.http.chats import MAX_MESSAGES, SetAside, result_of, string_in, text_of
from uma_trio.http.tools import tool_of, unlike
from uma_trio.http.turns import Turns
from uma_trio.http.wire.errors import Fault, invalid
from uma_trio.service.ask import Call, Message, Tool, ToolChoice
from uma_trio.service.checks import json_text

_ROLES: Final = ("user", "assistant", "system", "developer")
_SEALED: Final = "uma1:"  # what our `encrypted_content` begins with
_MAX_TOOLS: Final = 1024


def seal(thought: str) -> str:
    """Return a thought as clients carry it that keep no thoughts in the open, such as Codex."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unseal(sealed: Any) -> str:
    """Return the thought in what :func:`seal` returned; "" for what somebody else sealed."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


# --- items ---


def messages_of(instructions: str | None, value: Any, set_aside: SetAside) -> tuple[Message, ...]:
    """Return the messages of a conversation: a text, or a list of items.

    Raises:
        Fault: it is neither, an item is wrong, or stands for what was kept somewhere else.
    """
    turns = Turns()
    turns.system(instructions or "")
    if isinstance(value, str):
        turns.user(value)
        return turns.messages()
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid("input", f"must be a text or a list of 1 to {MAX_MESSAGES} items")
    for index, item in enumerate(value):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(path, "must be an object with a type")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        read = _ITEMS.get(kind) if isinstance(kind, str) else None
        if read is None:
            set_aside(f"{path} {shown(str(kind))}")
        else:
            read(item, path, turns, set_aside)
    return turns.messages()


def _message(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    role = item.get("role")
    text = text_of(item.get("content"), f"{path}.content")
    if role == "user":
        turns.user(text)
    elif role == "assistant":
        turns.assistant(text)
    elif role in _ROLES:
        turns.system(text)
    else:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")


def _reasoning(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    """Read a thought: as it was, else as it was sealed, else what stood in for it."""
    said = _plain(item.get("content")) or unseal(item.get("encrypted_content"))
    turns.thought(said or _plain(item.get("summary")))


def _plain(parts: Any) -> str:
    """Return the texts of parts of any type."""
    found = parts if isinstance(parts, list) else ()
    texts = [part.get("text") for part in found if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _function_call(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    name = joined(item.get("namespace"), string_in(item, "name", path))
    turns.call(Call(string_in(item, "call_id", path), name, string_in(item, "arguments", path)))


def _custom_call(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    """Read a call whose argument was a text, made elsewhere: the model sees it as a function."""
    arguments = json_text({"input": string_in(item, "input", path)})
    name = string_in(item, "name", path)
    turns.call(Call(string_in(item, "call_id", path), name, arguments))


def _output(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    text = result_of(item.get("output"), f"{path}.output", aside)
    turns.result(string_in(item, "call_id", path), text)


def _reference(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    raise invalid(
        path,
        "refers to a stored item, but the daemon stores none; send the item itself",
        code="unsupported_content",
    )


_Reader = Callable[[Mapping[str, Any], str, Turns, SetAside], None]
_ITEMS: Final[Mapping[str, _Reader]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "item_reference": _reference,
}


# --- tools ---


@frozen
class Tools:
    """The functions that may be called. `spaces` says which name is of which namespace."""

    functions: tuple[Tool, ...] = ()
    spaces: Mapping[str, tuple[str, str]] = field(factory=dict)

    def place(self, name: str) -> dict[str, str]:
        """Return what a call of `name` says of the function: its name, and its namespace."""
        space = self.spaces.get(name)
        return {"name": name} if space is None else {"namespace": space[0], "name": space[1]}


def joined(space: Any, name: str) -> str:
    """Return the one name that the model knows a function of a namespace by."""
    if not isinstance(space, str) or not space:
        return name
    return f"{space}{name}" if space.endswith("__") else f"{space}__{name}"


def tools_of(value: Any, set_aside: SetAside) -> Tools:
    """Return the functions among the tools, those in namespaces, too.

    Raises:
        Fault: it is no list of tools, or a function is not described as one.
    """
    if value is None:
        return Tools()
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise invalid("tools", f"must be a list of at most {_MAX_TOOLS} tools")
    functions: list[Tool] = []
    spaces: dict[str, tuple[str, str]] = {}
    for index, tool in enumerate(value):
        path = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            functions.append(tool_of(tool, path))
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            space = string_in(tool, "name", path)
            for nth, inner in enumerate(tool["tools"]):
                inner_path = f"{path}.tools[{nth}]"
                if not isinstance(inner, dict) or inner.get("type") != "function":
                    set_aside(inner_path)
                    continue
                function = tool_of(inner, inner_path)
                name = joined(space, function.name)
                spaces[name] = (space, function.name)
                functions.append(evolve(function, name=name))
        elif isinstance(kind, str):
            set_aside(f"{path} {shown(str(kind))}")
        else:
            raise invalid(path, "must be an object with a type")
    return Tools(unlike(functions), spaces)


def choice_of(value: Any, *, parallel: bool) -> ToolChoice:
    """Return whether tools are called, and which.

    Raises:
        Fault: it is none of the forms that the API has, or asks for a tool that is no function.
    """
    if value is None or value in ("auto", "required", "none"):
        return ToolChoice(value or "auto", parallel=parallel)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        name = joined(value.get("namespace"), string_in(value, "name", "tool_choice"))
        return ToolChoice("required", (name,), parallel)
    if kind == "allowed_tools" and value.get("mode", "auto") in ("auto", "required"):
        return ToolChoice(value.get("mode", "auto"), _names(value.get("tools")), parallel)
    raise _no_choice()


def _names(value: Any) -> tuple[str, ...]:
    """Return the names of the functions among the allowed tools; there has to be one."""
    found: Sequence[Any] = value if isinstance(value, list) else ()
    names = [
        joined(tool.get("namespace"), tool["name"])
        for tool in found
        if isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("name"), str)
    ]
    if not names:
        raise _no_choice()
    return tuple(names)


def _no_choice() -> Fault:
    return invalid(
        "tool_choice",
        "must be auto, required, none, a function such as "
        '{"type": "function", "name": "x"}, or allowed_tools with functions',
    )
