"""Replies in harmony, the format of gpt-oss: messages with a channel, and calls by their recipient.

A reply is ``<|channel|>analysis<|message|>...<|end|>`` (reasoning), ``commentary`` with a recipient
(``to=functions.NAME``, a call) or ``final`` (content), each further message behind
``<|start|>assistant``. The recipient may stand before or behind the channel. Source:
https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from typing import Final

from uma_trio.text.replies.maker import Maker, pass_on
from uma_trio.text.replies.source import Source, Steps

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
    """Read one reply. Without `calls`, a recipient means nothing."""
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
    """Whether the reply goes on like a header, as far as it goes on; nothing but space is read."""
    while True:
        text = source.text[source.pos :].lstrip()
        if text and not any(map(text.startswith, _BEGINNINGS)):
            half = any(beginning.startswith(text) for beginning in _BEGINNINGS)
            if not half:
                return False
        elif text:
            return True
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
