"""A response as events: each item from its beginning over its growth to its end, all numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import evolve

from uma_trio.api.accounts import progress, timings, timings_until
from uma_trio.api.blocks import Block, Blocks, Change, Closed, Grown, Opened
from uma_trio.api.loading import EVENTS
from uma_trio.api.responses.items import Form, compacted
from uma_trio.api.streams import MUCH, Encoder
from uma_trio.engine.messages import Finished, PromptProgress, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault
from uma_trio.http.writing import Part, joined
from uma_trio.service.reading import Reading
from uma_trio.text.slices import SLICE

# What clients know of codes; everything else is a fault of the server.
_CODES: Final = {
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
}


def _error(fault: Fault, _name: str) -> bytes:
    error = {"code": _CODES.get(fault.code, "server_error"), "message": fault.message}
    return sse.named({"type": "error", **error, "param": fault.param, "sequence_number": 0})


TELLING: Final = evolve(EVENTS, failure=_error)
"""How a stream tells that its model is loaded, or cannot be."""


class Events(Encoder):
    """Writes one response. A long silence is broken by the state that it is in.

    Clients such as Codex count events, and take a stream of comments for dead. That state has no items, and
    nothing long of what the client sent. The last event has the
    timings beside the response. Every event of growth has them, too, if `so_far` is given, which returns
    an answer as if it ended with so many tokens.
    """

    def __init__(
        self, form: Form, reading: Reading, so_far: Callable[[int], Finished] | None = None
    ) -> None:
        self._form = form
        self._items = form.items
        self._reading = reading
        self._blocks = Blocks(reading)
        self._so_far = so_far
        self._n = 0  # tokens of the answer
        self._number = 0
        self._at: dict[str, Any] = {}  # where the open block is
        self._deltas: sse.Frame | None = None
        self._is_ending = False
        self._n_closed = 0
        self._is_long = form.is_long  # what it would take to write the response so far

    def opening(self) -> Part:
        number = self._next_number()
        after = self._next_number()

        def write() -> bytes:
            begun = {"response": self._form.begun([])}
            created = {"type": "response.created", **begun, "sequence_number": number}
            begins = {"type": "response.in_progress", **begun, "sequence_number": after}
            return sse.long_named(created) + sse.long_named(begins)

        return write if self._is_long else write()

    def progress(self, index: int, item: PromptProgress) -> bytes:
        more = {"prompt_progress": progress(item)}
        if self._so_far is not None:
            more["timings"] = timings_until(item)
        return self._event("in_progress", {"response": self._form.in_brief(), **more})

    def token(self, index: int, item: TokenOut) -> Part:
        self._n += 1
        return joined([self._changed(change) for change in self._blocks.token(item)])

    def end(self, index: int, finished: Finished) -> Part:
        self._is_ending = True
        last = self._last(finished)
        number = self._next_number()

        def write() -> bytes:
            response = self._form.ended(self._done, finished, self._reading)
            told = {"response": response, "timings": timings(finished), "sequence_number": number}
            return sse.long_named({"type": f"response.{response['status']}", **told})

        return joined([*last, write if self._is_long else write()])

    def failure(self, index: int, fault: Fault, finished: Finished) -> Part:
        error = {
            "code": _CODES.get(fault.code, "server_error"),
            "message": fault.message,
            **fault.more,
        }
        self._is_ending = True
        number = self._next_number()

        def write() -> bytes:
            response = {**self._form.begun(self._done, "failed"), "error": error}
            told = {"response": response, "sequence_number": number}
            return sse.long_named({"type": "response.failed", **told})

        return write if self._is_long else write()

    def keep_alive(self) -> bytes:
        """Return the state of the response; a comment while its end is being written."""
        if self._is_ending:
            return sse.KEEP_ALIVE
        return self._event("in_progress", {"response": self._form.in_brief()})

    @property
    def _done(self) -> Sequence[Closed]:
        return self._blocks.done

    def _last(self, finished: Finished) -> list[Part]:
        return [self._changed(change) for change in self._blocks.end(finished)]

    # --- one change ---

    def _changed(self, change: Change) -> Part:
        if isinstance(change, Grown):
            return self._grown(change)
        if isinstance(change, Opened):
            return self._opened(change.block)
        return self._closed(change)

    def _opened(self, block: Block) -> bytes:
        self._at = {"item_id": self._items.id_of(block), "output_index": block.number}
        added = self._event(
            "output_item.added", {"output_index": block.number, "item": self._items.begun(block)}
        )
        self._deltas = self._frame(block)
        if block.kind == "call":
            return added
        part = {**self._at, **self._part_of(block), "part": self._items.part(block, "")}
        return added + self._event(f"{self._part_name(block)}.added", part)

    def _grown(self, grown: Grown) -> bytes:
        if grown.tokens or self._so_far is not None or self._deltas is None:
            more = {**self._part_of(grown.block), "delta": grown.text}
            if grown.block.kind == "text":
                more["logprobs"] = self._items.logprobs(grown.tokens)
            if self._so_far is not None:
                more["timings"] = timings(self._so_far(self._n))
            return self._event(f"{self._name_of(grown.block)}.delta", {**self._at, **more})
        return self._deltas.fill(grown.text, self._next_number())

    def _closed(self, closed: Closed) -> Part:
        long = len(closed.text) > SLICE or len(closed.tokens) > MUCH
        self._is_long |= long
        self._n_closed += 1
        self._is_long |= self._n_closed > MUCH
        at = {**self._at, **self._part_of(closed.block)}
        numbers = [self._next_number() for _ in range(2 if closed.block.kind == "call" else 3)]

        def write() -> bytes:
            told = zip(numbers, self._told_of(closed, at), strict=True)
            return b"".join(
                sse.long_named({"type": f"response.{name}", **document, "sequence_number": number})
                for number, (name, document) in told
            )

        return write if long else write()

    def _told_of(
        self, closed: Closed, at: Mapping[str, Any]
    ) -> list[tuple[str, Mapping[str, Any]]]:
        block, items = closed.block, self._items
        item = items.whole(closed)
        ended = ("output_item.done", {"output_index": block.number, "item": item})
        name = f"{self._name_of(block)}.done"
        if block.kind == "call":
            return [(name, {**at, "name": item["name"], "arguments": closed.text}), ended]
        part = items.part(block, closed.text, closed.tokens)
        said: dict[str, Any] = {"text": closed.text}
        if block.kind == "text":
            said["logprobs"] = part["logprobs"]
        part_done = (f"{self._part_name(block)}.done", {**at, "part": part})
        return [(name, {**at, **said}), part_done, ended]

    def _name_of(self, block: Block) -> str:
        if block.kind == "call":
            return "function_call_arguments"
        if block.kind == "text":
            return "output_text"
        return "reasoning_summary_text" if self._items.summarises else "reasoning_text"

    def _is_summary(self, block: Block) -> bool:
        return block.kind == "thought" and self._items.summarises

    def _part_name(self, block: Block) -> str:
        return "reasoning_summary_part" if self._is_summary(block) else "content_part"

    def _part_of(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            return {}
        return {"summary_index" if self._is_summary(block) else "content_index": 0}

    # --- one event ---

    def _frame(self, block: Block) -> sse.Frame:
        document = {"type": f"response.{self._name_of(block)}.delta", **self._at}
        document |= self._part_of(block)
        if block.kind == "text":
            document["logprobs"] = []
        document |= {"delta": sse.HOLE, "sequence_number": sse.NUMBER}
        return sse.Frame(document, sse.named)

    def _event(self, name: str, document: dict[str, Any]) -> bytes:
        numbered = {"type": f"response.{name}", **document, "sequence_number": self._next_number()}
        return sse.named(numbered)

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


class CompactionEvents(Events):
    """Writes a response that is one compaction item; what the model writes is read at its end."""

    _summary: tuple[Closed, ...] = ()

    def token(self, index: int, item: TokenOut) -> Part:
        """Return nothing: a summary is sealed as a whole."""
        self._n += 1
        self._blocks.token(item)
        return b""

    def end(self, index: int, finished: Finished) -> Part:
        self._blocks.end(finished)
        try:
            self._summary = (compacted(self._blocks.done),)
        except Fault as fault:
            return self.failure(index, fault, finished)
        return super().end(index, finished)

    @property
    def _done(self) -> Sequence[Closed]:
        return self._summary

    def _last(self, finished: Finished) -> list[Part]:
        (closed,) = self._summary
        self._is_long |= len(closed.text) > SLICE
        added = {"output_index": 0, "item": self._items.begun(closed.block)}
        first = self._event("output_item.added", added)
        number = self._next_number()

        def write() -> bytes:
            done = {"output_index": 0, "item": self._items.whole(closed)}
            event = {"type": "response.output_item.done", **done, "sequence_number": number}
            return sse.long_named(event)

        return [first, write if self._is_long else write()]
