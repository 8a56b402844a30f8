"""How a model writes its replies: records that drive the parser and the grammar.

White space in a marker is what a grammar forces; the parser accepts any, or none, in and around it.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, get_args

import attrs
from attrs import frozen

from uma_trio.text.replies.literals import CLOSING
from uma_trio.text.replies.source import compact

Style = Literal["object", "named", "tagged", "literal", "harmony", "channels"]


@frozen
class Thought:
    """The markers around a model's reasoning, which precedes everything else in a reply."""

    open: str
    close: str


@frozen
class CallSyntax:
    """How calls are written: `section_open`, calls with `between` them, `section_close`.

    Each call is between `open` and `close`, in one of these styles:

    * "object": JSON with the name, the arguments and maybe an id under `name_key` and so on.
    * "named": the name, `after_name`, the arguments as JSON. With `name_in_id` the name is part of an id
      such as ``functions.NAME:0``; an id may follow `id_open` after the name, or precede `id_close`.
    * "tagged": the name, `after_name`, each argument as `key_open`, key, `key_close`, value, `value_close`
      (``{}`` for the key). Texts are written as they are, others as JSON, behind `key_close_json` if set.
    * "literal": the name, and literals in the brackets that `after_name` opens: key, `key_close`, value,
      with texts in `quote`. A quote of one character is Python's, and so are True, False and None.

    With `message_open`, which the prompt has for the first, a reply is a row of messages: `text_header`,
    `call_header` (``{}`` for the tool) or the opening of reasoning, up to one of `message_ends`. With a
    `thought_header` reasoning begins like the others: it is part of the grammar, and not bounded.

    A `bare` reply of calls has only punctuation before the first: it begins like one and names a known tool.
    "harmony" and "channels" need no other field.
    """

    style: Style = "object"
    section_open: str = ""
    section_close: str = ""
    between: str = ""
    open: str = ""
    close: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_open: str = ""
    id_close: str = ""
    after_name: str = ""
    key_open: str = ""
    key_close: str = ""
    key_close_json: str = ""
    value_close: str = ""
    quote: str = ""
    name_in_id: bool = False
    bare: bool = False
    message_open: str = ""
    text_header: str = ""
    call_header: str = ""
    thought_header: str = ""
    message_ends: str = ""

    @property
    def framed(self) -> bool:
        """Whether a reply is a row of messages or channels, with markers around text, too."""
        return self.style in ("harmony", "channels") or bool(self.message_open)

    @property
    def start(self) -> str:
        return self.section_open + self.open

    @property
    def markers(self) -> str:
        """Every marker of the format."""
        every = (self.section_open, self.section_close, self.between, self.open, self.close)
        inner = (self.id_open, self.after_name, self.key_open, self.key_close, self.value_close)
        around = (self.message_open, self.text_header, self.call_header, self.message_ends)
        return " ".join([*every, *inner, self.key_close_json, self.quote, self.id_close, *around])


@frozen
class ReplyFormat:
    """How a model marks reasoning and calls. `source`: derived, built in, file, generic (untrained), none."""

    name: str
    source: str = "none"
    thought: Thought | None = None
    calls: CallSyntax | None = None


PLAIN: Final = ReplyFormat("plain")

GENERIC_CALLS: Final = CallSyntax(open="<tool_call>\n", close="\n</tool_call>", between="\n")


MAX_BYTES: Final = 65_536


class NoFormat(ValueError):
    """A text is no reply format; the message is the reason."""


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
