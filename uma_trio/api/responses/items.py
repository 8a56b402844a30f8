"""A response as a document: what it says of itself, and its items, begun or whole."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from uma_trio.api.blocks import Block, Closed
from uma_trio.api.logprobs import chat_logprobs
from uma_trio.api.responses.messages import Tools, seal, seal_summary
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http.errors import Fault
from uma_trio.http.writing import kept
from uma_trio.models.loaded import LoadedModel
from uma_trio.service.reading import Reading

_PREFIX = {"text": "msg", "thought": "rs", "call": "fc", "compaction": "cmp"}


class Items:
    """Writes the items of one response, whose ids end in `name`.

    With `summarises` a thought stands as its own summary, where clients look that asked for one.
    With `seals` it comes a second time, in a form that clients carry to the next request.
    """

    def __init__(
        self, name: str, served: LoadedModel, tools: Tools, *, summarises: bool, seals: bool
    ) -> None:
        self.summarises = summarises
        self._name = name
        self._served = served
        self._tools = tools
        self._seals = seals

    def id_of(self, block: Block) -> str:
        """Return what the item of a block is called."""
        return f"{_PREFIX[block.kind]}_{self._name}-{block.number}"

    def begun(self, block: Block) -> dict[str, Any]:
        """Return the item of a block that has just opened."""
        return self._item(Closed(block, ""), "in_progress", [])

    def whole(self, closed: Closed) -> dict[str, Any]:
        """Return the item of a block."""
        status = "incomplete" if closed.cut else "completed"
        return self._item(closed, status, [self.part(closed.block, closed.text, closed.tokens)])

    def part(self, block: Block, text: str, tokens: Sequence[TokenOut] = ()) -> dict[str, Any]:
        """Return the one part of a text or of a thought."""
        if block.kind == "text":
            return {
                "type": "output_text",
                "text": text,
                "annotations": [],
                "logprobs": self.logprobs(tokens),
            }
        return {"type": "summary_text" if self.summarises else "reasoning_text", "text": text}

    def logprobs(self, tokens: Sequence[TokenOut]) -> list[Any]:
        """Return the probabilities of tokens."""
        found = chat_logprobs(tokens, self._served) if tokens else None
        return found["content"] if found is not None else []

    def _item(self, closed: Closed, status: str, parts: list[Any]) -> dict[str, Any]:
        block = closed.block
        if block.kind == "compaction":
            content = seal_summary(closed.text) if closed.text else ""
            return {"type": "compaction", "id": self.id_of(block), "encrypted_content": content}
        item = {"id": self.id_of(block), "status": status}
        if block.kind == "text":
            return {"type": "message", "role": "assistant", **item, "content": parts}
        if block.kind == "call":
            place = self._tools.place(block.name)
            call = {"call_id": block.call_id, **place, "arguments": closed.text}
            return {"type": "function_call", **item, **call}
        where = {"summary": parts} if self.summarises else {"summary": [], "content": parts}
        sealed = seal(closed.text) if self._seals and closed.text else None
        return {"type": "reasoning", **item, **where, "encrypted_content": sealed}


def compacted(done: Sequence[Closed]) -> Closed:
    """Return the one block that stands for an answer which is a summary.

    Raises:
        Fault: the model wrote none.
    """
    summary = "".join([each.text for each in done if each.block.kind == "text"]).strip()
    if not summary:
        why = "the model wrote no summary of the conversation; send it again, or go on without compacting it"
        raise Fault(500, why, code="no_summary", kind="server_error")
    return Closed(Block(0, "compaction"), summary)


_NO_TOOLS: Final[Mapping[str, Any]] = {"tools": [], "text": {"format": {"type": "text"}}}


class Form:
    """Writes one response with the items that it has so far; `repeated` is in it from the beginning.

    `is_long` is whether that takes long to write, as a list of many tools does.
    """

    def __init__(self, repeated: Mapping[str, Any], items: Items) -> None:
        self.items = items
        self._repeated = {name: kept(value) for name, value in repeated.items()}
        long = {name for name, value in self._repeated.items() if isinstance(value, msgspec.Raw)}
        self.is_long = bool(long)
        self._brief = self._repeated | {name: _NO_TOOLS.get(name) for name in long}

    def begun(self, done: Sequence[Closed], status: str = "in_progress") -> dict[str, Any]:
        """Return the response with the items that are whole."""
        output = [self.items.whole(block) for block in done]
        return {**self._repeated, "status": status, "output": output}

    def in_brief(self) -> dict[str, Any]:
        """Return the response without items, and without what is long of what it repeats."""
        return {**self._brief, "status": "in_progress", "output": []}

    def ended(self, done: Sequence[Closed], end: Finished, reading: Reading) -> dict[str, Any]:
        """Return the response when its answer is at its end, whole or cut off."""
        cut = end.reason == "length"
        return {
            **self.begun(done, "incomplete" if cut else "completed"),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(end, reading),
        }


def _usage(end: Finished, reading: Reading) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reading.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
