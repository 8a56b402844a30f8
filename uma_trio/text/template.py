"""A model's chat template, rendered so that nobody's text can pass for the template's own.

The template never sees what people wrote. Each content is replaced by a random word, the
rendered text is cut at these words, and the contents are put into the gaps as *content*, which
is tokenised without special tokens. A template that loses, repeats or alters a word cannot be
rendered this way and is refused.

Templates may strip their contents (``message.content | trim``). The word is therefore padded
with white space on both sides; where the padding comes back stripped, the content is stripped
in the same way: all white space, or line ends only. Two things differ from handing contents to
the template, and both are deliberate: a template cannot look inside a content (to cut the
reasoning out of earlier answers, say), and a content of nothing but white space, which cannot
do harm, is handed over as it is, so that "no system message" looks like none.

What a request may say to the template by name (:class:`Manner`) is seen by the template as it is,
because templates compare it. So its texts may hold only what no vocabulary writes a special token
with: letters, digits, and marks of plain prose.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import field, frozen
from jinja2 import Template

from uma_trio.text.chat import Message
from uma_trio.text.sandbox import Sandbox

MAX_SOURCE: Final = 256 << 10  # characters; the longest published template has 20,000

# Around a word: a line end, a white space that no template writes (vertical tab), a line end.
# `strip()` takes all of it, `strip("\n")` the outer half.
_PAD: Final = "\n\x0b\n"
_VT: Final = "\x0b"

# What the template is told by others than the request.
_OURS: Final = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PROSE: Final = re.compile(r"[\w .,:;!?'()+/\n-]*")

_SANDBOX: Final = Sandbox()


class Unrenderable(Exception):
    """The template cannot be used, or not for these messages; the message says why."""


@frozen
class Part:
    """A piece of a rendered chat: the template's own text, or what somebody wrote."""

    text: str
    is_content: bool


@frozen
class Manner:
    """How a chat is rendered, beyond its messages.

    With `continue_final` the rendered text ends inside the last message, which has to be the
    assistant's, so that the model goes on with it. `arguments` are variables of the template;
    `problem_of` says which are allowed. `effort` is how much the model should think: the template's
    variable ``reasoning_effort``, and for "none" also ``enable_thinking``, false. Templates
    that know neither ignore them; `arguments` of the same names go first.
    """

    continue_final: bool = False
    arguments: Mapping[str, Any] = field(factory=dict)
    effort: str | None = None

    def variables(self) -> dict[str, Any]:
        """Return what the template is told."""
        told: dict[str, Any] = {}
        if self.effort is not None:
            told["reasoning_effort"] = self.effort
        if self.effort == "none":
            told["enable_thinking"] = False
        return {**told, **self.arguments}


PLAINLY: Final = Manner()


def problem_of(arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a request's arguments of the template; None if nothing is."""
    for name in arguments:
        if name in _OURS:
            return f"names {name}, which is the daemon's own: use the request's fields"
        if not _NAME.fullmatch(name):
            return "has a name that is not an identifier of at most 64 letters"
    if not _is_prose(list(arguments.values())):
        return "has a text with other characters than letters, digits, spaces and . , : ; ! ? ' ( ) + / -"
    return None


def _is_prose(value: Any) -> bool:
    """Whether every text in a JSON value is too plain to be part of a special token."""
    if isinstance(value, str):
        return _PROSE.fullmatch(value) is not None
    if isinstance(value, Mapping):
        return all(map(_is_prose, [*value.keys(), *value.values()]))
    return all(map(_is_prose, value)) if isinstance(value, list | tuple) else True


class ChatTemplate:
    """One template, compiled and tried. Safe to render from several threads at a time."""

    def __init__(self, source: str, *, bos_text: str = "", eos_text: str = "") -> None:
        """Compile `source` and render a first conversation. Raises :class:`Unrenderable`."""
        if len(source) > MAX_SOURCE:
            raise Unrenderable(f"it is longer than {MAX_SOURCE:,} characters")
        if _VT in source:
            raise Unrenderable("it contains a vertical tab")
        self._bos_text = bos_text
        self._eos_text = eos_text
        try:
            self._template: Template = _SANDBOX.from_string(source)
        except Exception as error:  # a compiler of foreign code; it may raise anything
            raise Unrenderable(f"it does not compile: {_one_line(error)}") from error
        self.render([Message("user", "Hello")])

    def render(self, messages: Sequence[Message], manner: Manner = PLAINLY) -> list[Part]:
        """Render messages, ready for the assistant's answer.

        Raises :class:`Unrenderable` if the template refuses these messages, takes too long, or
        does not bring every content back exactly once; or if there is no final message to go on
        with.
        """
        if manner.continue_final and not _can_go_on(messages):
            raise Unrenderable(
                "the last message to continue must be the assistant's, and not empty"
            )
        word = f"q{secrets.token_hex(12)}n"
        contents = [message.content for message in messages]
        wanted = [i for i, content in enumerate(contents) if content.strip() or _VT in content]
        shown = list(contents)
        for index in wanted:
            shown[index] = f"{_PAD}{word}{index}q{_PAD}"
        rendered = self._run(
            [
                {"role": message.role, "content": content}
                for message, content in zip(messages, shown, strict=True)
            ],
            manner,
        )
        parts = re.split(f"{word}([0-9]+)q", rendered)
        found = [int(index) for index in parts[1::2]]
        if sorted(found) != wanted:
            missing = sorted(set(wanted) - set(found))
            if missing:
                role = messages[missing[0]].role
                raise Unrenderable(f"it leaves out or alters the message of {role!r}")
            raise Unrenderable("it repeats a message")
        joined = _joined(parts[0::2], [contents[index] for index in found])
        if not manner.continue_final:
            return joined
        if found[-1] != len(messages) - 1:
            raise Unrenderable("it does not write the last message last")
        return joined if joined[-1].is_content else joined[:-1]

    def _run(self, messages: list[dict[str, str]], manner: Manner) -> str:
        _SANDBOX.start()
        try:
            return self._template.render(
                {
                    **manner.variables(),
                    "messages": messages,
                    "bos_token": self._bos_text,
                    "eos_token": self._eos_text,
                    "add_generation_prompt": not manner.continue_final,
                    "tools": None,
                    "documents": None,
                }
            )
        except Exception as error:  # foreign code; it may raise anything
            raise Unrenderable(_one_line(error)) from error


def _can_go_on(messages: Sequence[Message]) -> bool:
    last = messages[-1] if messages else Message("")
    return last.role == "assistant" and bool(last.content.strip())


def _joined(outside: Sequence[str], contents: Sequence[str]) -> list[Part]:
    """Put the contents between the template's texts, stripped where the padding was."""
    texts, inner = list(outside), list(contents)
    for index, content in enumerate(inner):
        texts[index], left = _unpadded(texts[index], at_end=True)
        texts[index + 1], right = _unpadded(texts[index + 1], at_end=False)
        inner[index] = content.lstrip(left).rstrip(right)
    if any(_VT in text for text in texts):
        raise Unrenderable("it alters the white space of messages")
    parts = [Part(texts[0], is_content=False)]
    for content, text in zip(inner, texts[1:], strict=True):
        parts += [Part(content, is_content=True), Part(text, is_content=False)]
    return [part for part in parts if part.text]


def _unpadded(text: str, *, at_end: bool) -> tuple[str, str | None]:
    """Take the padding off one end of `text`; return what the template strips there.

    That is "" for nothing, a line end, or None for all white space, as `str.strip` takes it.
    """
    outer, inner = (_VT + "\n", "\n") if at_end else ("\n" + _VT, "\n")
    whole = _PAD
    cut = str.removesuffix if at_end else str.removeprefix
    for padding, stripped in ((whole, ""), (outer, inner)):
        rest = cut(text, padding)
        if rest != text:
            return rest, stripped
    return text, None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
