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
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Final

from attrs import frozen
from jinja2 import Template

from uma_trio.text.sandbox import Sandbox

MAX_SOURCE: Final = 256 << 10  # characters; the longest published template has 20,000

# Around a word: a line end, a white space that no template writes (vertical tab), a line end.
# `strip()` takes all of it, `strip("\n")` the outer half.
_PAD: Final = "\n\x0b\n"
_VT: Final = "\x0b"

_SANDBOX: Final = Sandbox()


class Unrenderable(Exception):
    """The template cannot be used, or not for these messages; the message says why."""


@frozen
class Part:
    """A piece of a rendered chat: the template's own text, or what somebody wrote."""

    text: str
    is_content: bool


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
        self.render([("user", "Hello")])

    def render(self, messages: Sequence[tuple[str, str]]) -> list[Part]:
        """Render (role, content) pairs, ready for the assistant's answer.

        Raises :class:`Unrenderable` if the template refuses these messages, takes too long, or
        does not bring every content back exactly once.
        """
        word = f"q{secrets.token_hex(12)}n"
        contents = [content for _, content in messages]
        wanted = [i for i, content in enumerate(contents) if content.strip() or _VT in content]
        shown = list(contents)
        for index in wanted:
            shown[index] = f"{_PAD}{word}{index}q{_PAD}"
        rendered = self._run(
            [
                {"role": role, "content": content}
                for (role, _), content in zip(messages, shown, strict=True)
            ]
        )
        parts = re.split(f"{word}([0-9]+)q", rendered)
        found = [int(index) for index in parts[1::2]]
        if sorted(found) != wanted:
            missing = sorted(set(wanted) - set(found))
            if missing:
                role = messages[missing[0]][0]
                raise Unrenderable(f"it leaves out or alters the message of {role!r}")
            raise Unrenderable("it repeats a message")
        return _joined(parts[0::2], [contents[index] for index in found])

    def _run(self, messages: list[dict[str, str]]) -> str:
        _SANDBOX.start()
        try:
            return self._template.render(
                messages=messages,
                bos_token=self._bos_text,
                eos_token=self._eos_text,
                add_generation_prompt=True,
                tools=None,
                documents=None,
            )
        except Exception as error:  # foreign code; it may raise anything
            raise Unrenderable(_one_line(error)) from error


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
