"""How a model writes its replies: records that parser and grammar are both driven by.

White space in a marker is how the model's template writes it, and what a grammar forces. The parser
takes any white space, or none, where a marker has some, and around it.
"""

from __future__ import annotations

from typing import Final, Literal

from attrs import frozen

Style = Literal["object", "named", "tagged", "literal", "harmony", "channels"]


@frozen
class Thought:
    """The markers around a model's reasoning, which goes before everything else in a reply."""

    open: str
    close: str


@frozen
class CallSyntax:
    """How calls stand in a reply: `section_open`, calls with `between` them, `section_close`.

    Each call stands between `open` and `close`, in one of four styles:

    * "object": a JSON object with the name under `name_key`, the arguments under `arguments_key` and,
      if there is one, the id under `id_key`.
    * "named": the name, `after_name`, the arguments as JSON. With `name_in_id` the name is part of
      an id such as ``functions.NAME:0``; with `id_open` that and an id may stand behind the name.
    * "tagged": the name, `after_name`, and each argument as `key_open`, key, `key_close`, value,
      `value_close` (with ``{}`` for the key); texts stand there as they are, other values as JSON, behind `key_close_json` if
      the format tells the two apart.

    * "literal": the name, and the arguments in the brackets that `after_name` opens, as literals of a
      language: a key, `key_close`, the value, with texts in `quote`. A quote of one character is
      Python's, and so are the words for true, false and null then.

    An id may also stand in front of the name, up to `id_close`.

    With `message_open` a reply is a row of messages: each begins with it, but for the first, whose beginning the prompt
    has, and goes on with `text_header`, `call_header` (with ``{}`` for the name of the tool) or what opens the
    reasoning. It ends with one of the words in `message_ends`. A `thought_header` is what opens the reasoning where
    that begins as the other headers do: then the grammar has the reasoning in it, and it has no bound of its own.

    A `bare` syntax has nothing before the first call but punctuation: a reply is one if it begins like
    one and names a tool that there is. "harmony" and "channels" need no other field: see
    :mod:`uma_trio.text.replies.harmony` and :mod:`uma_trio.text.replies.channels`.
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
        """What goes before the first call."""
        return self.section_open + self.open

    @property
    def markers(self) -> str:
        """Everything that stands in a reply for the format's sake."""
        every = (self.section_open, self.section_close, self.between, self.open, self.close)
        inner = (self.id_open, self.after_name, self.key_open, self.key_close, self.value_close)
        around = (self.message_open, self.text_header, self.call_header, self.message_ends)
        return " ".join([*every, *inner, self.key_close_json, self.quote, self.id_close, *around])


@frozen
class ReplyFormat:
    """How a model marks reasoning and calls of tools in its replies.

    `source` says where the record comes from: "derived" from the template, "built in", "file",
    "generic" where the model was not trained to call tools, or "none".
    """

    name: str
    source: str = "none"
    thought: Thought | None = None
    calls: CallSyntax | None = None


PLAIN: Final = ReplyFormat("plain")

GENERIC_CALLS: Final = CallSyntax(open="<tool_call>\n", close="\n</tool_call>", between="\n")
