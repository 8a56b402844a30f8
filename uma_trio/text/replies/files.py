"""Reply formats as JSON: how `doctor` shows them, and `--reply-format` reads one."""

from __future__ import annotations

import json
from typing import Any, Final, get_args

import attrs

from uma_trio.text.replies.format import CallSyntax, ReplyFormat, Style, Thought
from uma_trio.text.replies.literals import CLOSING
from uma_trio.text.replies.source import compact

MAX_BYTES: Final = 65_536


class NoFormat(ValueError):
    """A text is no reply format; the message says why."""


def format_from(text: str) -> ReplyFormat:
    """Return the format that `text` describes. Raises :class:`NoFormat`."""
    if len(text) > MAX_BYTES:
        raise NoFormat(f"it is longer than {MAX_BYTES} characters")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoFormat(f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise NoFormat("it is not a JSON object")
    unknown = document.keys() - {"name", "source", "thought", "calls"}
    if unknown:
        raise NoFormat(f"{min(unknown)} is no part of a format: name, thought, calls are")
    thought, calls = document.get("thought"), document.get("calls")
    made = ReplyFormat(
        str(document.get("name", "file")),
        "file",
        None if thought is None else _made(Thought, "thought", thought),
        None if calls is None else _made(CallSyntax, "calls", calls),
    )
    _check(made)
    return made


def document_of(made: ReplyFormat) -> dict[str, Any]:
    """Return a format as a document that `format_from` reads, without what is the default."""
    document: dict[str, Any] = {"name": made.name}
    if made.thought is not None:
        document["thought"] = attrs.asdict(made.thought)
    if made.calls is not None:
        usual = CallSyntax()
        document["calls"] = {
            field.name: value
            for field in attrs.fields(CallSyntax)
            if (value := getattr(made.calls, field.name)) != getattr(usual, field.name)
            or field.name == "style"
        }
    return document


def _made(kind: type[Any], path: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise NoFormat(f"{path} must be an object")
    known = {field.name: field for field in attrs.fields(kind)}
    for name, member in value.items():
        if name not in known:
            raise NoFormat(f"{path}.{name} is no part of a format: {', '.join(known)} are")
        wanted = bool if known[name].default in (True, False) else str
        if type(member) is not wanted:
            raise NoFormat(f"{path}.{name} must be {'true or false' if wanted is bool else 'text'}")
    missing = [
        name for name, f in known.items() if f.default is attrs.NOTHING and name not in value
    ]
    if missing:
        raise NoFormat(f"{path}.{missing[0]} is missing")
    return kind(**value)


def _check(made: ReplyFormat) -> None:
    calls, thought = made.calls, made.thought
    if thought is not None and not (thought.open.strip() and thought.close.strip()):
        raise NoFormat("thought.open and thought.close must not be empty")
    if calls is None or calls.style in ("harmony", "channels"):
        return
    if calls.style not in get_args(Style):
        raise NoFormat(f"calls.style must be one of {', '.join(get_args(Style))}")
    bare = calls.bare and calls.style in ("object", "literal")
    if not calls.start.strip() and not bare:
        raise NoFormat("calls.open must not be empty, unless calls are bare objects")
    if calls.style == "literal":
        if compact(calls.after_name)[-1:] not in CLOSING or not calls.quote or not calls.key_close:
            raise NoFormat("calls.after_name must open a bracket, with calls.key_close and quote")
        return
    tags = (calls.key_open, calls.key_close, calls.value_close)
    if calls.style == "tagged" and not all(tag.strip() for tag in tags):
        raise NoFormat("calls.key_open, key_close and value_close must not be empty where tagged")
