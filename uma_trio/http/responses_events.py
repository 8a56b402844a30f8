"""A response as events: each item from its beginning over its growth to its end, all numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from uma_trio.engine.messages import Finished, PromptProgress, TokenOut
from uma_trio.http import sse
from uma_trio.http.accounts import progress, timings, timings_until
from uma_trio.http.blocks import Block, Blocks, Change, Closed, Grown, Opened
from uma_trio.http.errors import Fault
from uma_trio.http.responses_items import Form
from uma_trio.http.streams import Encoder
from uma_trio.service.reading import Reading

# What clients know of codes; everything else is a fault of the server.
_CODES: Final = {
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
}


_NO_MORE: Final[Mapping[str, Any]] = {}


class Events(Encoder):
    """Writes one response. A long silence is broken by the state that it is in.

    Clients such as Codex count events, and take a stream of comments for dead. The last event has the
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

    def opening(self) -> bytes:
        """Return that the response has begun."""
        begun = self._form.begun([])
        return self._response("created", begun) + self._response("in_progress", begun)

    def progress(self, index: int, item: PromptProgress) -> bytes:
        """Return the state of the response, with how much of the prompt is computed."""
        more = {"prompt_progress": progress(item)}
        if self._so_far is not None:
            more["timings"] = timings_until(item)
        return self._response("in_progress", self._form.begun([]), more)

    def token(self, index: int, item: TokenOut) -> bytes:
        """Return what changes with a token."""
        self._n += 1
        return b"".join([self._changed(change) for change in self._blocks.token(item)])

    def end(self, index: int, finished: Finished) -> bytes:
        """Return the end of the last item, and the whole response."""
        last = [self._changed(change) for change in self._blocks.end(finished)]
        response = self._form.ended(self._blocks.done, finished, self._reading)
        more = {"timings": timings(finished)}
        return b"".join([*last, self._response(response["status"], response, more)])

    def failure(self, index: int, fault: Fault, finished: Finished) -> bytes:
        """Return that the response has failed, with the items that were whole."""
        error = {
            "code": _CODES.get(fault.code, "server_error"),
            "message": fault.message,
            **fault.more,
        }
        response = {**self._form.begun(self._blocks.done, "failed"), "error": error}
        return self._response("failed", response)

    def keep_alive(self) -> bytes:
        """Return the state of the response."""
        return self._response("in_progress", self._form.begun(self._blocks.done))

    # --- one change ---

    def _changed(self, change: Change) -> bytes:
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
        self._number += 1
        return self._deltas.fill(grown.text, self._number - 1)

    def _closed(self, closed: Closed) -> bytes:
        block, items = closed.block, self._items
        item = items.whole(closed)
        whole = {"output_index": block.number, "item": item}
        name = self._name_of(block)
        if block.kind == "call":
            arguments = {**self._at, "name": item["name"], "arguments": closed.text}
            return self._event(f"{name}.done", arguments) + self._event("output_item.done", whole)
        at = {**self._at, **self._part_of(block)}
        said: dict[str, Any] = {"text": closed.text}
        if block.kind == "text":
            said["logprobs"] = items.logprobs(closed.tokens)
        part = {"part": items.part(block, closed.text, closed.tokens)}
        return (
            self._event(f"{name}.done", {**at, **said})
            + self._event(f"{self._part_name(block)}.done", {**at, **part})
            + self._event("output_item.done", whole)
        )

    def _name_of(self, block: Block) -> str:
        """Return what the text of a block is called."""
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
        """Return where in its item the text of a block stands."""
        if block.kind == "call":
            return {}
        return {"summary_index" if self._is_summary(block) else "content_index": 0}

    # --- one event ---

    def _frame(self, block: Block) -> sse.Frame:
        """Return the event that all growth of a block is written in."""
        document = {"type": f"response.{self._name_of(block)}.delta", **self._at}
        document |= self._part_of(block)
        if block.kind == "text":
            document["logprobs"] = []
        document |= {"delta": sse.HOLE, "sequence_number": sse.NUMBER}
        return sse.Frame(document, sse.named)

    def _event(self, name: str, document: dict[str, Any]) -> bytes:
        numbered = {"type": f"response.{name}", **document, "sequence_number": self._number}
        self._number += 1
        return sse.named(numbered)

    def _response(
        self, status: str, response: dict[str, Any], more: Mapping[str, Any] = _NO_MORE
    ) -> bytes:
        return self._event(status, {"response": response, **more})
