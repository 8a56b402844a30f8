"""Tools in a chat: which there are, whether they are called, and how calls look in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import evolve

from uma_protocol.requests import MAX_TOOLS
from uma_trio.http.errors import invalid
from uma_trio.http.message import Headers
from uma_trio.service.ask import Call, Mode, Tool, ToolChoice
from uma_trio.service.generation import Generation

MAX_NAME: Final = 128
_MODES: Final[Mapping[str, Mode]] = {"auto": "auto", "required": "required", "none": "none"}


def tools_of(value: Any) -> tuple[Tool, ...]:
    """Return the tools of a request.

    Raises:
        Fault: it is no list of functions, or two have the same name.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid("tools", f"must be a list of at most {MAX_TOOLS} functions")
    return unlike([_tool(item, f"tools[{index}]") for index, item in enumerate(value)])


def unlike(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return tools of which no two have the same name.

    Raises:
        Fault: two have.
    """
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "has two functions of the same name")
    return tuple(tools)


def _tool(value: Any, path: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise invalid(path, "must be of type function, with a function")
    return evolve(tool_of(function, f"{path}.function"), written=function)


def tool_of(function: Mapping[str, Any], path: str, schema: str = "parameters") -> Tool:
    """Return a function as a tool: its name, description, parameters and strict.

    `schema` is what the parameters are called.

    Raises:
        Fault: one of these is wrong.
    """
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise invalid(f"{path}.name", f"must be a string of 1 to {MAX_NAME} characters")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise invalid(f"{path}.description", "must be a string")
    parameters = function.get(schema) or {}
    if not isinstance(parameters, dict):
        raise invalid(f"{path}.{schema}", "must be a JSON Schema, which is an object")
    strict = function.get("strict") or False
    if not isinstance(strict, bool):
        raise invalid(f"{path}.strict", "must be true or false")
    return Tool(name, description, parameters, strict)


def choice_of(value: Any, *, parallel: bool) -> ToolChoice:
    """Return whether tools are called, and which.

    Raises:
        Fault: it is said in no known way.
    """
    named, names = _named(value) if isinstance(value, dict) else (value, ())
    mode = _MODES.get(named) if isinstance(named, str) else None
    if mode is None:
        raise invalid("tool_choice", "must be none, auto, required, a function or allowed_tools")
    return ToolChoice(mode, names, parallel)


def _named(value: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Read ``{"type": "function", ...}`` or ``{"type": "allowed_tools", ...}``."""
    if value.get("type") == "function":
        return "required", (_name(value),)
    inner = value.get("allowed_tools", value)
    tools = inner.get("tools") if isinstance(inner, dict) else None
    if value.get("type") != "allowed_tools" or not isinstance(tools, list) or not tools:
        raise invalid("tool_choice", "must be none, auto, required, a function or allowed_tools")
    return inner.get("mode", "auto"), tuple(map(_name, tools))


def _name(value: Any) -> str:
    """Return the name of a function, as chats or as the Responses API give it."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid("tool_choice", "must name a function")
    return name


def budget_of(reasoning_budget: int) -> int | None:
    """Return the maximum number of reasoning tokens; None for no separate limit."""
    return None if reasoning_budget < 0 else reasoning_budget


def call_of(call: Call) -> dict[str, Any]:
    """Return a call as it stands in a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def headers_of(generations: Sequence[Generation]) -> Headers:
    """Return the headers that name the tools whose arguments are held to less than their schema, and what was reshaped."""
    reading = generations[0].reading
    return (*_loosened(reading.loosened), *reshaped_header(reading.reshaped))


def reshaped_header(kinds: Sequence[str]) -> Headers:
    """Return the header that says how a conversation was changed, because the chat template refused it."""
    return (("X-UMA-Reshaped", ", ".join(kinds)),) if kinds else ()


def _loosened(names: Sequence[str]) -> Headers:
    # A header's value has no space at its ends, and nothing but printable ASCII.
    plain = [name for name in names if name.isascii() and name.isprintable() and " " not in name]
    shown = ", ".join(plain[:16])
    return (("X-UMA-Loosened", shown or str(len(names))),) if names else ()
