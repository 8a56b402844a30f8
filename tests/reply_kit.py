"""What tests of replies are built from: formats of the families, replies in them, small templates."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from uma_trio.backend.base import IntArray, SpecialToken
from uma_trio.text.chat import Message, Tool
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.replies import Event, ReplyFormat, ReplyParser
from uma_trio.text.replies.format import GENERIC_CALLS, CallSyntax, Thought
from uma_trio.text.replies.known import FAMILIES
from uma_trio.text.template import PLAINLY
from uma_trio_sim.fake import N_VOCAB, FakeVocabulary

THINK = Thought("<think>", "</think>")
HERMES = ReplyFormat("hermes", thought=THINK, calls=GENERIC_CALLS)
XML = CallSyntax(
    style="tagged",
    open="<tool_call>\n<function=",
    after_name=">\n",
    key_open="<parameter=",
    key_close=">\n",
    value_close="\n</parameter>\n",
    close="</function>\n</tool_call>",
)
TYPED = CallSyntax(
    style="tagged",
    open='<f n="',
    after_name='">',
    key_open='<p n="',
    key_close='" text="true">',
    key_close_json='" text="false">',
    value_close="</p>",
    close="</f>",
)
FORMATS = {
    "hermes": HERMES,
    "xml": ReplyFormat("xml", calls=XML),
    "typed tags": ReplyFormat("typed tags", calls=TYPED),
} | {
    "".join(family.marks): ReplyFormat(
        family.name, thought=family.thought or THINK, calls=family.calls
    )
    for family in FAMILIES
}
TOOLS = (
    Tool(
        "look",
        "Look `it` up",
        {
            "type": "object",
            "properties": {"what": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["what"],
        },
    ),
    Tool("stop"),
)

_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOLD = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(body: str, *, prompt: str = _PROMPT) -> str:
    """Return a template that tells tools, and writes each message by `body`."""
    return (
        _TOLD
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + body
        + "<|im_end|>\n{% endfor %}"
        + prompt
    )


HERMES_TEMPLATE = chatml("{{ m.content }}" + _CALLS)
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
THINKING_TEMPLATE = chatml(_THOUGHT + "{{ m.content }}" + _CALLS)
PREFILLED_TEMPLATE = chatml(
    _THOUGHT + "{{ m.content }}" + _CALLS,
    prompt=_PROMPT.replace("assistant\n", "assistant\n<think>\n"),
)


def parsed(
    format: ReplyFormat,  # noqa: A002
    pieces: Sequence[str],
    *,
    thinking: bool = False,
    calls: bool = True,
) -> list[Event]:
    """Return the events of a reply that comes in pieces."""
    ids = (f"id{number}" for number in itertools.count())
    parser = ReplyParser(format, thinking=thinking, tools=TOOLS, calls=calls, ids=lambda: next(ids))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


class MarkedVocabulary(FakeVocabulary):
    """Bytes are tokens, and markers of calls and reasoning are control tokens, which have no bytes."""

    markers = ("[CALL]", "[ARGS]", "[T]", "[/T]")

    def __init__(self) -> None:
        super().__init__(N_VOCAB + len(self.markers))

    def specials(self) -> list[SpecialToken]:
        """Return the markers, too."""
        return [
            *super().specials(),
            *(SpecialToken(N_VOCAB + n, marker) for n, marker in enumerate(self.markers)),
        ]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return a token per byte, and markers where special tokens are asked for."""
        if not parse_special:
            return super().tokenize(text, add_special=add_special, parse_special=False)
        parts = re.split("(" + "|".join(map(re.escape, self.markers)) + ")", text)
        found = [
            np.array([N_VOCAB + self.markers.index(part)], np.int32)
            if part in self.markers
            else super(MarkedVocabulary, self).tokenize(part, add_special=False, parse_special=True)
            for part in parts
        ]
        return np.concatenate(found)


MARKED_TEMPLATE = chatml(
    "{% if m.reasoning_content %}[T]{{ m.reasoning_content }}[/T]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)


def chat_tokens(
    front_end: FrontEnd, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
) -> IntArray:
    """Return the tokens of a chat that says nothing of how it is to be answered."""
    return front_end.prepare_chat(messages, PLAINLY, tools)[0]
