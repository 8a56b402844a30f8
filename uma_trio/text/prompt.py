"""The messages between the daemon and the processes that render prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from attrs import frozen

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.slices import SLICE, in_utf8, json_text, slices

# Time of the CPU for one prompt. Templates that look at all messages for each one take time by the square of their
# number: Gemma 4's 0.8 s for 600 on a core of 2024. A megabyte of text takes 0.1 s.
_BASE_S, _MESSAGE_S, _MEGABYTE_S = 2.0, 0.02, 4.0
_WALL: Final = 10.0  # times as long, for other programs want the processors, too


class Unrenderable(Exception):
    """The template cannot be used, or not for these messages; the message is the reason."""


class NoTemplate(Unrenderable):
    """There is no usable template."""


@frozen
class Prompt:
    """A rendered chat, with the start and end of each control token (`specials`), in turn.

    It is divided at `cuts`, where a client's text spells a token that is recognised in any text.
    """

    text: str
    specials: Sequence[int] = ()
    cuts: Sequence[int] = ()
    reshaped: tuple[str, ...] = ()
    is_thinking: bool = False


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A template, and spellings of the vocabulary: `controls` in a prompt, `markers` in any text."""

    template: str
    bos_text: str = ""
    eos_text: str = ""
    controls: Sequence[str] = ()
    markers: Sequence[str] = ()


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """How a prompt ends: with the beginning of an answer (`prompts`), or inside the last message (`continues`).

    `thought` are the markers around reasoning; `closes` ends reasoning that the template opened, and a
    `reasoning` that is not empty is continued.
    """

    prompts: bool = True
    continues: bool = False
    thought: tuple[str, str] | None = None
    closes: bool = False
    reasoning: Any = ""


class Render(msgspec.Struct, frozen=True, array_like=True):
    """A request to render. The worker receives the `source` where it does not know its `key`."""

    key: bytes
    source: Source | None
    messages: Sequence[Any]
    tools: Sequence[Any]
    arguments: Any  # JSON
    habits: Sequence[Any]
    now: float
    ending: Ending
    reshapes: bool = True


def times_s(request: Render, n_bytes: int) -> tuple[float, float]:
    """Return how much CPU and wall time a request of so many bytes may take."""
    cpu_s = _BASE_S + _MESSAGE_S * len(request.messages) + _MEGABYTE_S * n_bytes / 1e6
    return cpu_s, cpu_s * _WALL


class Rendered(msgspec.Struct, frozen=True, tag="rendered", array_like=True):
    """A rendered prompt, its text in UTF-8 and in slices."""

    text: Sequence[bytes]
    specials: Sequence[int]
    cuts: Sequence[int]
    reshaped: Sequence[str]
    is_thinking: bool

    def prompt(self) -> Prompt:
        text = "".join([part.decode() for part in self.text])
        return Prompt(text, self.specials, self.cuts, tuple(self.reshaped), self.is_thinking)


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    why: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown", array_like=True):
    """The worker needs the source."""


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
    return [
        Message(role, content, tuple([Call(*call) for call in calls]), *others)
        for role, content, calls, *others in found
    ]


def packed_tools(tools: Sequence[Tool]) -> list[Any]:
    return [packed_json(tool.written or tool.function) for tool in tools]


def packed_json(value: Mapping[str, Any]) -> str | msgspec.Raw:
    return packed(json_text(value))


def packed(text: str) -> str | msgspec.Raw:
    """Return `text` for MessagePack, encoded in slices; lone surrogates become U+FFFD."""
    if text.isascii() and len(text) <= SLICE:
        return text
    data = b"".join([in_utf8(part).encode() for part in slices(text)])
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)  # str 32
