"""How a model writes its replies: records that drive the parser and the grammar.

White space in a marker is what a grammar forces; the parser accepts any, or none, in and around it.
"""

from __future__ import annotations

from typing import Final, Literal

from attrs import frozen

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
      such as ``functions.NAME:0``; an id may follow `id_open` behind the name, or precede `id_close`.
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
    """How a model marks reasoning and calls in its replies.

    `source` is "derived" (from the template), "built in", "file", "generic" (not trained to call) or "none".
    """

    name: str
    source: str = "none"
    thought: Thought | None = None
    calls: CallSyntax | None = None


PLAIN: Final = ReplyFormat("plain")

GENERIC_CALLS: Final = CallSyntax(open="<tool_call>\n", close="\n</tool_call>", between="\n")
