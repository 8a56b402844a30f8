"""A conversation on its way to a rendered prompt: what a process that renders is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from attrs import frozen

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.documents import Habits
from uma_trio.text.slices import SLICE, json_text, slices
from uma_trio.text.surrogates import in_utf8

# Time of the CPU for one prompt. Templates that look at all messages for each one take time by the square of their
# number: Gemma 4's 0.8 s for 600 on a core of 2024. A megabyte of text takes 0.1 s.
_BASE_S, _MESSAGE_S, _MEGABYTE_S = 2.0, 0.02, 4.0
_WALL: Final = 10.0  # times as long, for other programs want the processors, too


class Unrenderable(Exception):
    """The template cannot be used, or not for these messages; the message says why."""


class NoTemplate(Unrenderable):
    """There is no template, or none that can be used for any messages."""


@frozen
class Prompt:
    """A rendered chat.

    `specials` are the places, start and end in turn, of the control tokens in `text`, all of which the
    template wrote. Where somebody's text spells a token that the vocabulary recognises in any text, the prompt
    is tokenised in parts, divided at `cuts`. `reshaped` says what was changed in the conversation, because
    the template refused it. `is_thinking` says that the prompt ends inside the model's reasoning.
    """

    text: str
    specials: Sequence[int] = ()
    cuts: Sequence[int] = ()
    reshaped: tuple[str, ...] = ()
    is_thinking: bool = False


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A template, and what of a vocabulary concerns it.

    `controls` are the texts that become control tokens wherever a prompt spells them, `markers` those that become
    tokens even in the middle of ordinary text, and that the template gives a meaning.
    """

    template: str
    bos_text: str = ""
    eos_text: str = ""
    controls: Sequence[str] = ()
    markers: Sequence[str] = ()


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """How a prompt ends.

    With `prompts` it ends with the beginning of an answer. With `continues` it ends inside the last message. `thought` are the
    markers around reasoning; with `closes` reasoning that the template has opened is ended, and a `reasoning` that is not
    empty is gone on with.
    """

    prompts: bool = True
    continues: bool = False
    thought: tuple[str, str] | None = None
    closes: bool = False
    reasoning: Any = ""


class Render(msgspec.Struct, frozen=True, array_like=True):
    """Render this. `key` names a :class:`Source`, which comes along where the worker does not know it."""

    key: bytes
    source: Source | None
    messages: Sequence[Any]
    tools: Sequence[Any]
    arguments: Any  # JSON
    habits: Sequence[Any]
    now: float
    ending: Ending
    reshapes: bool = True


def times_s(asked: Render, n_bytes: int) -> tuple[float, float]:
    """Return how much CPU and wall time a request of so many bytes may take."""
    cpu_s = _BASE_S + _MESSAGE_S * len(asked.messages) + _MEGABYTE_S * n_bytes / 1e6
    return cpu_s, cpu_s * _WALL


class Rendered(msgspec.Struct, frozen=True, tag="rendered", array_like=True):
    """A rendered prompt, its text in UTF-8 and in slices."""

    text: Sequence[bytes]
    specials: Sequence[int]
    cuts: Sequence[int]
    reshaped: Sequence[str]
    is_thinking: bool

    def prompt(self) -> Prompt:
        """Return it as the value that the daemon uses."""
        text = "".join([part.decode() for part in self.text])
        return Prompt(text, self.specials, self.cuts, tuple(self.reshaped), self.is_thinking)


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The template does not render this."""

    why: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown", array_like=True):
    """The source has to come along."""


def packed_messages(messages: Sequence[Message]) -> list[Any]:
    """Return messages as :func:`messages_from` reads them."""
    return [
        [
            message.role,
            packed(message.content),
            [
                [packed(call.id), packed(call.name), packed(call.arguments)]
                for call in message.calls
            ],
            None if message.call_id is None else packed(message.call_id),
            None if message.name is None else packed(message.name),
            packed(message.reasoning),
        ]
        for message in messages
    ]


def messages_from(found: Sequence[Any]) -> list[Message]:
    """Return the messages that were packed."""
    return [
        Message(role, content, tuple([Call(*call) for call in calls]), *others)
        for role, content, calls, *others in found
    ]


def packed_tools(tools: Sequence[Tool]) -> list[Any]:
    """Return tools for a :class:`Render`: the JSON of each one's function."""
    return [packed_json(tool.written or _function(tool)) for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        **({"description": tool.description} if tool.description else {}),
        **({"parameters": tool.parameters} if tool.parameters else {}),
    }


def packed_json(value: Mapping[str, Any]) -> str | msgspec.Raw:
    """Return the JSON of a value, packed."""
    return packed(json_text(value))


def packed_habits(habits: Habits) -> list[Any]:
    """Return habits as ``Habits(*found)`` takes them."""
    return [
        habits.arguments_as_text,
        habits.null_content,
        habits.ids,
        habits.reasoning_key,
        habits.results_inside,
        habits.content_as_parts,
    ]


def packed(text: str) -> str | msgspec.Raw:
    """Return `text` for MessagePack: encoded in slices where one call would hold the GIL for long.

    Halves of characters become U+FFFD.
    """
    if text.isascii() and len(text) <= SLICE:
        return text
    data = b"".join([in_utf8(part).encode() for part in slices(text)])
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)  # str 32
