"""Replies with markers around text, too: in messages or channels."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from uma_trio.text.replies.bodies import Calls, atoms
from uma_trio.text.replies.format import CallSyntax, Thought
from uma_trio.text.replies.literals import quoted
from uma_trio.text.replies.maker import Maker, pass_on
from uma_trio.text.replies.source import Source, Steps, compact

_MESSAGE: Final = "<|message|>"
_CHANNEL: Final = "<|channel|>"
_START: Final = "<|start|>"
_BEGINNINGS: Final = (_CHANNEL, _START, "to=")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", _START)
_HEADER_END: Final = re.compile(re.escape(_MESSAGE))
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_NAME: Final = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")
_MAX_HEADER: Final = 512


def harmony(source: Source, maker: Maker, *, calls: bool = True) -> Steps[None]:
    """Read a reply of gpt-oss: messages with a channel, and calls by their recipient.

    It is ``<|channel|>analysis<|message|>...<|end|>`` (reasoning), ``commentary`` with a recipient
    (``to=functions.NAME``, a call; before or behind the channel) or ``final`` (content), each further
    message after ``<|start|>assistant``. Without `calls`, a recipient means nothing. Source:
    https://cookbook.openai.com/articles/openai-harmony
    """
    yield
    while True:
        if (yield from _begins(source)):
            source.keep()
            source.short = False
            header = yield from source.until(_HEADER_END, _MAX_HEADER)
            if header is not None and _CHANNEL in header:
                source.kept = False
                source.pos += len(_MESSAGE)
                yield from _body(source, maker, header, calls=calls)
            else:
                lost = source.short and source.cut
                source.pos = len(source.text) if header is None else source.pos + len(_MESSAGE)
                text = source.kept_text()
                maker.content("" if lost else text)
        end = yield from pass_on(source, maker, (_START, _CHANNEL), trims=False)
        if not end:
            return


def _begins(source: Source) -> Steps[bool]:
    """Return whether the rest of the reply so far is a prefix of a header; reads only space."""
    while True:
        text = source.text[source.pos :].lstrip()
        if text.startswith(_BEGINNINGS):
            return True
        if not any(beginning.startswith(text) for beginning in _BEGINNINGS):
            return False
        if not (yield from source.more()):
            return bool(text)


def _body(source: Source, maker: Maker, header: str, *, calls: bool) -> Steps[None]:
    recipient = _RECIPIENT.search(header) if calls else None
    if recipient is not None and recipient[1] == "assistant":  # which is the model itself
        recipient = None
    channel = [*_NAME.findall(header), ""][-2:][0]
    if recipient is not None:
        maker.start(recipient[1])
        whole = (yield from source.peek()) != ""
        if whole and source.text[source.pos] == "{":
            whole = yield from source.value(maker.arguments)
        elif whole:
            maker.arguments("{}")
        maker.end(cut=not whole)
    maker.thinking = recipient is None and channel == "analysis"
    end = yield from pass_on(source, maker, _ENDS, trims=maker.thinking)
    if end and end != _START:
        source.pos += len(end)
    maker.thinking = maker.thinking and not end


OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
MARKERS: Final = {
    "harmony": "<|channel|> <|message|> <|start|> <|end|> <|constrain|> <|call|> <|return|>",
    "channels": f"{OPEN} {CLOSE} {SEP} <|end_of_msg|>",
}
"""The markers of each style that has no fields for them."""
CHANNEL_THOUGHT: Final = Thought(f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}")
_SEP: Final = re.compile(re.escape(SEP))
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')
_MAX_TAG: Final = 2048


def channels(source: Source, maker: Maker, *, calls: bool = True) -> Steps[None]:
    """Read a reply of Kimi K3: tags of control tokens around reasoning, text and calls.

    It is ``think`` (reasoning), ``response`` (content) and ``tools``, each between
    ``<|open|>NAME<|sep|>`` and ``<|close|>NAME<|sep|>``. In ``tools`` a ``call`` names its tool in an
    attribute, and has an ``argument`` for each key, with its type, or all of them as ``json``. Without
    `calls` these are left out, as they are no text. Source:
    https://docs.vllm.ai/en/stable/api/vllm/tool_parsers/kimi_k3_tool_parser/
    """
    yield
    while True:
        found = yield from pass_on(source, maker, (OPEN, CLOSE), trims=maker.thinking)
        if not found:
            return
        source.keep()
        tag = yield from _tag(source)
        if tag is None:
            text = source.kept_text()
            maker.text("" if source.cut else text)
            continue
        source.kept = False
        opens, name, attributes = tag
        if opens and name == "call":
            yield from _call(source, maker if calls else None, attributes.get("tool", ""))
        elif name == "think":
            maker.thinking = opens
        elif opens:
            maker.thinking = False


def _tag(source: Source) -> Steps[tuple[bool, str, dict[str, str]] | None]:
    """Read a tag: whether it opens, its name and attributes. None if it is none; that is read, too."""
    yield from source.peek()
    source.short = False
    opens = yield from source.take(OPEN)
    if not opens and not (yield from source.take(CLOSE)):
        return None
    header = yield from source.until(_SEP, _MAX_TAG)
    if header is None:
        if source.short:
            source.drop_rest()
        return None
    source.pos += len(SEP)
    found = {name: _unescaped(value) for name, value in _ATTRIBUTE.findall(header)}
    return opens, (header.split() or [""])[0], found


def _call(source: Source, into: Maker | None, tool: str) -> Steps[None]:
    """Read the arguments of a call up to its end; without `into` they are dropped."""
    maker = into if into is not None else Maker(str, (), thinking=False)
    maker.thinking = False
    maker.start(tool)
    before, whole = "{", False
    while (tag := (yield from _tag(source))) is not None:
        opens, name, attributes = tag
        if not opens:
            maker.arguments("" if before == "" else "{}" if before == "{" else "}")
            whole = True
            break
        if name == "json":
            before = ""
            whole = yield from source.value(maker.arguments)
            if not whole or not (yield from source.take(f"{CLOSE}json{SEP}")):
                break
            continue
        key, kind = attributes.get("key"), attributes.get("type", "string")
        if key is None:
            break
        maker.arguments(f"{before}{quoted(key)}: ")
        before = ", "
        through = partial(source.through_text, f"{CLOSE}argument{SEP}")
        if not (yield from maker.value(frozenset({kind}), through)):
            break
    maker.end(cut=not whole)


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def attribute(value: str) -> str:
    """Return the text of an attribute, escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


class Frames:
    """Reads the messages of one reply. `think` reads reasoning up to its end."""

    def __init__(
        self,
        syntax: CallSyntax,
        thought: Thought | None,
        source: Source,
        maker: Maker,
        think: Callable[[], Steps[None]],
    ) -> None:
        self._source, self._maker, self._think = source, maker, think
        self._open = compact(syntax.message_open)
        self._thought = "" if thought is None else compact(thought.open)
        self._text = compact(syntax.text_header)
        before, _, behind = syntax.call_header.partition("{}")
        self._call, self._behind_name = compact(before), compact(behind)
        self._first = atoms(syntax.message_open)[0]
        self._ends = tuple(syntax.message_ends.split())

    def read(self, calls: Calls | None) -> Steps[None]:
        """Read messages, except for reasoning in front of them."""
        source = self._source
        triggers = () if calls is None else calls.triggers
        yield from self._header()
        while found := (
            yield from pass_on(source, self._maker, (*triggers, self._first, *self._ends))
        ):
            if found in self._ends:
                yield from source.take(found)
                yield from self._header()
            elif calls is not None and found in triggers:
                yield from calls.read()
            elif not (yield from self._header()):
                self._maker.text(source.through(found[0]))

    def _header(self) -> Steps[bool]:
        source = self._source
        found = False
        while True:
            found = (yield from source.take(self._open)) or found
            if not self._thought or not (yield from source.take(self._thought)):
                break
            yield from self._think()
            found = True
        if self._text and (yield from source.take(self._text)):
            yield from source.peek()
            return True
        return (yield from self._call_header()) or found

    def _call_header(self) -> Steps[bool]:
        source, end = self._source, re.compile(re.escape(self._behind_name))
        if not self._call or not (yield from source.starts_with(self._call)):
            return False
        source.keep()
        whole = yield from source.take(self._call)
        if self._behind_name:
            yield from source.until(end, _MAX_HEADER)
            whole = yield from source.take(self._behind_name)
        text = source.kept_text()
        self._maker.text("" if whole or source.cut else text)
        return True
