"""What a Messages request says, as a chat: system text, turns of blocks, tools, and which are called. Pure.

Tools that only Anthropic's own machines have, and blocks that came of them, are ignored and named
in a header. A block whose type is unknown is refused, because the conversation may mean something
else without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from uma_protocol.rules import shown
from uma_trio.api.chats import MAX_MESSAGES, UNSEEN, SetAside, Turns, string_in
from uma_trio.api.tools import tool_of, unlike
from uma_trio.http.errors import Fault, invalid
from uma_trio.service.ask import Call, Message, Tool, ToolChoice
from uma_trio.service.checks import json_text
from uma_trio.text.slices import is_blank

_MAX_TOOLS: Final = 1024
#: What Anthropic's machines did: what came of it is in the texts around it.
_RECORDS: Final = frozenset(
    {
        *("redacted_thinking", "server_tool_use", "web_search_tool_result"),
        *("web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_listing", "advisor_tool_result", "fallback", "browser_state"),
    }
)
# Claude Code writes a checksum of the request here. It differs in each request, so that nothing that
# was computed behind it could be used again: https://github.com/ggml-org/llama.cpp/pull/21793
_BILLING: Final = "x-anthropic-billing-header:"
_LONGEST_LINE: Final = 4096
_CHECKSUM: Final = re.compile(r"\bcch=[^;\s]*")


def messages_of(system: Any, value: Any, set_aside: SetAside) -> tuple[Message, ...]:
    """Return the messages of a conversation.

    Raises:
        Fault: it is no list of messages, or one of them holds more than text, calls and results.
    """
    turns = Turns()
    turns.system(_system(system))
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    for index, message in enumerate(value):
        path = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{path}.role", "must be user, assistant or system")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise invalid(f"{path}.content", "must be a string or a list of blocks")
        for nth, block in enumerate(content):
            _block(role, block, f"{path}.content[{nth}]", turns, set_aside)
    return turns.messages()


def goes_on(value: Any) -> bool:
    """Whether the model is to go on with the assistant's last message."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    content = last.get("content")
    if isinstance(content, str):
        return not is_blank(content)
    end = content[-1] if isinstance(content, list) and content else None
    return isinstance(end, dict) and end.get("type") == "text"


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return _steady(value or "")
    if not isinstance(value, list):
        raise invalid("system", "must be a string or a list of text blocks")
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(value)]
    return "\n".join(map(_steady, texts))


def _steady(text: str) -> str:
    parts: list[str] = []
    done, at = 0, text.find(_BILLING)
    while at >= 0:
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        end = len(text) if end < 0 else end
        if end - start <= _LONGEST_LINE and is_blank(text[start:at]):
            parts += [text[done:start], _CHECKSUM.sub("cch=0", text[start:end])]
            done = end
        at = text.find(_BILLING, end)
    return "".join([*parts, text[done:]])


def _block(role: str, block: Any, path: str, turns: Turns, set_aside: SetAside) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        text = _text(block, path)
        {"user": turns.user, "assistant": turns.assistant, "system": turns.system}[role](text)
    elif kind == "thinking":
        turns.thought(string_in(block, "thinking", path))
    elif kind in ("tool_use", "mcp_tool_use"):
        arguments = json_text(block.get("input") or {})
        turns.call(Call(string_in(block, "id", path), string_in(block, "name", path), arguments))
    elif kind in ("tool_result", "mcp_tool_result"):
        content = _result(block.get("content"), f"{path}.content", set_aside)
        turns.result(string_in(block, "tool_use_id", path), content)
    elif kind == "document":
        turns.user(_document(block, path))
    elif kind == "search_result":
        turns.user(_result(block.get("content"), f"{path}.content", set_aside))
    elif kind == "compaction":
        if block.get("content") is not None:  # else it failed, and stands for nothing
            turns.summary(string_in(block, "content", path))
    elif kind in ("image", "container_upload") or not isinstance(kind, str):
        raise _no_text(path)
    elif kind in _RECORDS:
        set_aside(f"{path} {shown(kind)}")
    else:
        why = f"is {shown(kind)}, which this daemon does not know: the conversation may mean something else without it"
        raise invalid(f"{path}.type", f"{why}; omit the block", code="unsupported_content")


def _result(content: Any, path: str, set_aside: SetAside) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(path, "must be a string or a list of blocks")
    texts: list[str] = []
    for index, block in enumerate(content):
        inner = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "document" and _is_text(block):
            texts.append(_document(block, inner))
        elif kind == "tool_reference":
            set_aside(f"{inner} tool_reference")
        elif kind == "search_result":
            texts.append(_result(block.get("content"), f"{inner}.content", set_aside))
        elif kind == "text" or not isinstance(kind, str):
            texts.append(_text(block, inner))
        else:
            set_aside(f"{inner} {shown(kind)}")
            texts.append(UNSEEN)
    return "\n".join(texts)


def _is_text(document: Mapping[str, Any]) -> bool:
    source = document.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _document(block: Mapping[str, Any], path: str) -> str:
    if not _is_text(block):
        raise _no_text(path)
    source = block["source"]
    if source["type"] == "text":
        text = string_in(source, "data", f"{path}.source")
    else:
        content = source.get("content")
        parts = [content] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise invalid(f"{path}.source.content", "must be a string or a list of text blocks")
        texts = [
            part if isinstance(part, str) else _text(part, f"{path}.source.content[{index}]")
            for index, part in enumerate(parts)
        ]
        text = "\n".join(texts)
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _text(block: Any, path: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise _no_text(path)
    return string_in(block, "text", path)


def _no_text(path: str) -> Fault:
    return invalid(path, "must be text: the model reads only text", code="unsupported_content")


# --- tools ---


def tools_of(value: Any, set_aside: SetAside) -> tuple[Tool, ...]:
    """Return the tools that the client has itself and describes.

    Raises:
        Fault: it is no list of tools, or one is not described.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise invalid("tools", f"must be a list of at most {_MAX_TOOLS} tools")
    tools: list[Tool] = []
    for index, tool in enumerate(value):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise invalid(path, "must be an object with name and input_schema")
        kind = tool.get("type", "custom")
        if kind != "custom":
            set_aside(f"{path} {shown(str(kind))}")
            continue
        tools.append(tool_of(tool, path, "input_schema"))
    return unlike(tools)


def choice_of(value: Any) -> ToolChoice:
    """Return whether tools are called, and which.

    Raises:
        Fault: it is none of the forms that the API has.
    """
    if value is None:
        return ToolChoice()
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice", "must be an object of type auto, any, tool or none")
    parallel = value.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        return ToolChoice("required", (string_in(value, "name", "tool_choice"),), parallel)
    if kind == "any":
        return ToolChoice("required", (), parallel)
    return ToolChoice("none" if kind == "none" else "auto", (), parallel)
