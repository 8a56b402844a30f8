"""What a Responses request says, as a chat: instructions and items, tools, and which are called. Pure.

What only OpenAI's own machines can do, such as their search, is ignored and named in a header:
agents send it whether it is there or not. An item whose type is unknown is refused, because the
conversation may mean something else without it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from uma_protocol.rules import shown
from uma_trio.api.chats import MAX_MESSAGES, UNSEEN, SetAside, Turns, result_of, string_in, text_of
from uma_trio.api.tools import tool_of, unlike
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.pieces import Excessive, JsonLimits, NotJson, decoded
from uma_trio.service.ask import Call, Message, Tool, ToolChoice
from uma_trio.service.checks import json_text
from uma_trio.text.slices import slices

_ROLES: Final = ("user", "assistant", "system", "developer")
# What our `encrypted_content` begins with: of reasoning, and of a compaction item.
_SEALED: Final = "uma1:"
_SUMMARY: Final = "uma-compaction1:"
_MAX_TOOLS: Final = 1024


TRIGGER: Final[Mapping[str, str]] = {"type": "compaction_trigger"}
"""The last item of a request for a compaction item."""
_SUMMARISE: Final = (
    "Summarise this conversation so that it can be continued from your summary alone: nothing else of it will be "
    "available. Include what was asked for and why, what was decided, what was done and what came of it, exact "
    "names, paths, commands, numbers and error messages that are still needed, and what remains to be done. "
    "Do not continue the task and do not answer anything. Write only the summary."
)


def seal(thought: str) -> str:
    """Return a thought as clients carry it that keep no thoughts in the open, such as Codex."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unseal(sealed: Any) -> str:
    """Return the thought in what :func:`seal` returned; "" for what somebody else sealed."""
    try:
        return _content_of(sealed, _SEALED).decode()
    except ValueError:
        return ""


def seal_summary(summary: str) -> str:
    """Return the `encrypted_content` of a compaction item, which no store is needed to read."""
    document = json_text({"summary": summary}).encode()
    return _SUMMARY + base64.b64encode(document).decode()


def _summary_of(item: Mapping[str, Any], path: str) -> str:
    """Return what :func:`seal_summary` got. Raises :class:`Fault` for the content of another server."""
    try:
        content = _content_of(item.get("encrypted_content"), _SUMMARY)
        document = decoded(content, JsonLimits(values=4, text=len(content)))
    except (ValueError, NotJson, Excessive):
        document = None
    summary = document.get("summary") if isinstance(document, dict) else None
    if not isinstance(summary, str) or not summary:
        raise invalid(
            f"{path}.encrypted_content",
            "is no summary that this daemon made, so what it stands for is lost; send the items themselves, "
            "or compact them here: POST /v1/responses/compact",
            code="unsupported_content",
        )
    return summary


def _content_of(sealed: Any, prefix: str) -> bytes:
    """Return what stands in base64 behind a prefix. Raises :class:`ValueError`."""
    if not isinstance(sealed, str) or not sealed.startswith(prefix):
        raise ValueError(prefix)
    parts = slices(sealed.removeprefix(prefix))  # whose length is a multiple of 4
    return b"".join([base64.b64decode(part, validate=True) for part in parts])


# --- items ---


def tools_in(value: Any) -> list[Any]:
    """Return the tools that items of the input add to those of the request."""
    items = value if isinstance(value, list) else ()
    return [
        tool
        for item in items
        if isinstance(item, dict) and item.get("type") == _MORE_TOOLS
        for tool in (item["tools"] if isinstance(item.get("tools"), list) else ())
    ]


def is_trigger(item: Any) -> bool:
    """Whether an item asks for a compaction item."""
    return isinstance(item, dict) and item.get("type") == TRIGGER["type"]


def messages_of(instructions: str | None, value: Any, set_aside: SetAside) -> tuple[Message, ...]:
    """Return the messages of a conversation: a text, or a list of items.

    Raises:
        Fault: it is neither, an item is wrong, of an unknown type, or stands for what was kept somewhere else.
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
        if is_trigger(item) and not 0 < index == len(value) - 1:
            raise invalid(path, f"is a {kind} and must be the last item, behind a conversation")
        read = _ITEMS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise _unknown(kind, path)
        read(item, path, turns, set_aside)
    return turns.messages()


def _unknown(kind: Any, path: str) -> Fault:
    return invalid(
        f"{path}.type",
        f"is {shown(str(kind))}, which this daemon does not know: the conversation may mean something else "
        "without it; omit the item, or send what it says as a message",
        code="unsupported_content",
    )


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


def _hosted_call(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    """Read a call of a tool that OpenAI defines and the client runs: all that it says, as arguments."""
    kind = str(item["type"])
    said = {name: value for name, value in item.items() if name not in _NOT_SAID}
    turns.call(Call(_call_id(item, path), kind.removesuffix("_call"), json_text(said)))


def _hosted_output(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    """Read what such a call brought: a text, or any JSON."""
    output = item.get("output")
    text = output if isinstance(output, str) else "" if output is None else json_text(output)
    if isinstance(output, dict) and output.get("type") == "computer_screenshot":
        aside(f"{path}.output computer_screenshot")
        text = UNSEEN
    turns.result(_call_id(item, path), text)


def _mcp_call(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    id_ = string_in(item, "id", path)
    turns.call(Call(id_, string_in(item, "name", path), string_in(item, "arguments", path)))
    brought = item.get("output") or item.get("error") or ""
    turns.result(id_, brought if isinstance(brought, str) else json_text(brought))


def _call_id(item: Mapping[str, Any], path: str) -> str:
    """Return the id of a call; the oldest shell calls had only their item's."""
    return string_in(item, "call_id" if item.get("call_id") is not None else "id", path)


def _compaction(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    turns.summary(_summary_of(item, path))


def _trigger(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    turns.user(_SUMMARISE)


def _record(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    """Ignore a record of what a server did: what came of it is in the messages around it."""
    aside(f"{path} {shown(str(item['type']))}")


def _more_tools(item: Mapping[str, Any], path: str, turns: Turns, aside: SetAside) -> None:
    """Ignore what :func:`tools_in` returns."""


_MORE_TOOLS: Final = "additional_tools"
_NOT_SAID: Final = ("type", "id", "call_id", "status", "caller", "created_by")
_Reader = Callable[[Mapping[str, Any], str, Turns, SetAside], None]
_ITEMS: Final[Mapping[str, _Reader]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "item_reference": _reference,
    "compaction": _compaction,
    "compaction_summary": _compaction,  # what Codex called it first
    TRIGGER["type"]: _trigger,
    _MORE_TOOLS: _more_tools,
    "mcp_call": _mcp_call,
    **dict.fromkeys(
        ("local_shell_call", "shell_call", "apply_patch_call", "computer_call"), _hosted_call
    ),
    **dict.fromkeys(
        (
            *("local_shell_call_output", "shell_call_output", "apply_patch_call_output"),
            "computer_call_output",
        ),
        _hosted_output,
    ),
    **dict.fromkeys(
        (
            *("web_search_call", "file_search_call", "code_interpreter_call"),
            *("image_generation_call", "mcp_list_tools", "mcp_approval_request"),
            *("mcp_approval_response", "tool_search_call", "tool_search_output", "ghost_snapshot"),
        ),
        _record,
    ),
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
