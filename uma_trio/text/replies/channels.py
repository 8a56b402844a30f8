"""Replies in the channels of Kimi K3: tags of control tokens around reasoning, text and calls.

A reply is ``think`` (reasoning), ``response`` (content) and ``tools``, each between
``<|open|>NAME<|sep|>`` and ``<|close|>NAME<|sep|>``. In ``tools`` a ``call`` names its tool in an
attribute, and has an ``argument`` for each key, with its type, or all of them as ``json``. Source:
https://docs.vllm.ai/en/stable/api/vllm/tool_parsers/kimi_k3_tool_parser/
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from uma_trio.text.replies.format import Thought
from uma_trio.text.replies.literals import quoted
from uma_trio.text.replies.maker import Maker, pass_on
from uma_trio.text.replies.source import Source, Steps

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
MARKERS: Final = f"{OPEN} {CLOSE} {SEP} <|end_of_msg|>"
THOUGHT: Final = Thought(f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}")
_SEP: Final = re.compile(re.escape(SEP))
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')
_MAX_TAG: Final = 2048


def channels(source: Source, maker: Maker, *, calls: bool = True) -> Steps[None]:
    """Read one reply. Without `calls`, what would be a call is left out, as it is no text."""
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


def _call(source: Source, told: Maker | None, tool: str) -> Steps[None]:
    """Read the arguments of a call up to its end; without a `told` they are dropped."""
    maker = told if told is not None else Maker(str, (), thinking=False)
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
    """Return a text as it stands in an attribute."""
    return value.replace("&", "&amp;").replace('"', "&quot;")
