"""An answer as a row of blocks: stretches of text, of thought, and calls, one open at a time.

Responses and Messages both write answers this way, as items or as content blocks. This module turns
what :mod:`uma_trio.text.replies` reads into blocks that open, grow and close.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from attrs import frozen

from uma_trio.api.streams import WholeAnswer
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http.pieces import Excessive, JsonLimits, NotJson, decoded
from uma_trio.service.reading import Reading
from uma_trio.text.replies import Arguments, CallStart, Content, Event, Reasoning
from uma_trio.text.slices import utf8

Kind = Literal["text", "thought", "call", "compaction"]


@frozen
class Block:
    """What is known of a block when it opens. `number` counts an answer's blocks from 0.

    `call_id` and `name` are those of a call.
    """

    number: int
    kind: Kind
    call_id: str = ""
    name: str = ""


@frozen
class Opened:
    """A block begins."""

    block: Block


@frozen
class Grown:
    """More text of the open block; `tokens` are those with probabilities that it is of."""

    block: Block
    text: str
    tokens: tuple[TokenOut, ...] = ()


@frozen
class Closed:
    """A block is whole. `cut` says that the answer was cut off inside it."""

    block: Block
    text: str
    tokens: tuple[TokenOut, ...] = ()
    cut: bool = False


Change = Opened | Grown | Closed


class Blocks:
    """The blocks of one answer. `done` are those that are whole, in their order."""

    def __init__(self, reading: Reading) -> None:
        self.done: list[Closed] = []
        self._reading = reading
        self._open: Block | None = None
        self._texts: list[str] = []
        self._tokens: list[TokenOut] = []  # of the open block
        self._held_back: list[TokenOut] = []  # whose text is not out yet

    def token(self, item: TokenOut) -> list[Change]:
        """Return what changes with a token."""
        if item.logprobs is not None:
            self._held_back.append(item)
        return self._changes(self._reading.token(item))

    def end(self, finished: Finished) -> list[Change]:
        """Return what changes with the end of the answer."""
        changes = self._changes(self._reading.end(finished))
        if self._open is not None:
            changes.append(self._close(cut=finished.reason != "stop"))
        return changes

    def _changes(self, events: Iterable[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            if isinstance(event, Content):
                self._grow("text", event.text, changes)
            elif isinstance(event, Reasoning):
                self._grow("thought", event.text, changes)
            elif isinstance(event, CallStart):
                self._begin("call", changes, event.id, event.name)
            elif isinstance(event, Arguments):
                self._grow("call", event.text, changes)
            else:
                changes.append(self._close(cut=event.cut))
        return changes

    def _begin(self, kind: Kind, changes: list[Change], call_id: str = "", name: str = "") -> Block:
        if self._open is not None:
            changes.append(self._close())
        self._open = Block(len(self.done), kind, call_id, name)
        changes.append(Opened(self._open))
        return self._open

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(kind, changes)
        tokens: tuple[TokenOut, ...] = ()
        if self._held_back:
            if kind == "text":
                tokens = tuple(self._held_back)
                self._tokens += tokens
            self._held_back.clear()
        self._texts.append(text)
        changes.append(Grown(block, text, tokens))

    def _close(self, *, cut: bool = False) -> Closed:
        if self._open is None:
            raise ValueError("no block is open")
        closed = Closed(self._open, "".join(self._texts), tuple(self._tokens), cut)
        self.done.append(closed)
        self._open = None
        self._texts.clear()
        self._tokens.clear()
        self._held_back.clear()
        return closed


def arguments_of(call: Closed) -> dict[str, Any]:
    """Return the arguments of a call; what is no object, as when it was cut off, stands in one."""
    arguments = call.text or ("" if call.cut else "{}")
    try:
        found = decoded(utf8(arguments), JsonLimits(text=len(arguments)))
    except (NotJson, Excessive):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def blocks_of(answer: WholeAnswer, reading: Reading) -> list[Closed]:
    """Return the blocks of an answer that is whole."""
    blocks = Blocks(reading)
    for item in answer.tokens:
        blocks.token(item)
    blocks.end(answer.end)
    return blocks.done
