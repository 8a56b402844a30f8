"""Answers as Ollama writes them: a JSON document a line, the last one with what the answer took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from attrs import frozen

from uma_trio.api.blocks import Blocks, Change, Closed, Grown, Opened, arguments_of
from uma_trio.api.loading import LoadTelling
from uma_trio.api.logprobs import chat_logprobs
from uma_trio.api.streams import Encoder
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault
from uma_trio.http.message import Reply
from uma_trio.http.writing import Part, joined, written
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.model import Model
from uma_trio.service.generation import Generation

_CONTENT_TYPE: Final = "application/x-ndjson"
# White space before the next document. Clients decode each line, also an empty one.
_KEEP_ALIVE: Final = b" "
_LONG: Final = 4096  # characters of a call's arguments
_REASONS: Final = {"stop": "stop", "length": "length"}


@frozen
class Form:
    """Writes the documents of one answer: to a chat, or else to a prompt, which is answered without calls."""

    model: str
    created_at: str
    to_chat: bool

    def part(self, text: str = "", thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
        """Return a document of the middle."""
        return {**self._about, **self._said(text, thought, calls), "done": False}

    def loaded(self, reason: str = "load") -> dict[str, Any]:
        """Return the answer to who asks nothing, so that the model is loaded, or unloaded."""
        return {**self._about, **self._said(), "done": True, "done_reason": reason}

    def last(self, end: Finished) -> dict[str, Any]:
        """Return the last document of a stream."""
        return {**self._about, **self._said(), **_account(end)}

    def whole(
        self, done: Sequence[Closed], end: Finished, logprobs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the answer as one document."""
        text, thought = (
            "".join([c.text for c in done if c.block.kind == kind]) for kind in ("text", "thought")
        )
        calls = [c for c in done if c.block.kind == "call" and not c.cut]
        said = self._said(text, thought, [_call(call, n) for n, call in enumerate(calls)])
        return {**self._about, **said, **logprobs, **_account(end)}

    def _said(self, text: str = "", thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
        thinking: dict[str, Any] = {"thinking": thought} if thought else {}
        if not self.to_chat:
            return {"response": text, **thinking}
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}

    @property
    def _about(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": self.created_at}


def telling(form: Form) -> LoadTelling:
    """Return how a stream tells that its model is loaded: by documents without text, with `load_progress`."""

    def loading(model: Model) -> bytes:
        told = {"state": model.wait_reason, "progress": round(model.progress, 3)}
        return _line({**form.part(), "load_progress": told})

    return LoadTelling(_CONTENT_TYPE, loading, lambda fault, _name: _line(error_of(fault)))


def scores(tokens: Sequence[TokenOut], served: LoadedModel) -> dict[str, Any]:
    """Return the member with the probabilities of tokens; nothing if nobody asked."""
    found = chat_logprobs(tokens, served)
    return {} if found is None else {"logprobs": found["content"]}


def _call(call: Closed, index: int) -> dict[str, Any]:
    function = {"index": index, "name": call.block.name, "arguments": arguments_of(call)}
    return {"id": call.block.call_id, "function": function}


def _account(end: Finished) -> dict[str, Any]:
    """Return why an answer ended, and what it took, in nanoseconds; what it waited counts as loading."""
    first = end.total_s if end.ttft_s is None else end.ttft_s
    return {
        "done": True,
        "done_reason": _REASONS.get(end.reason, "stop"),
        "total_duration": _ns(end.total_s),
        "load_duration": _ns(end.queue_s),
        "prompt_eval_count": end.prompt_tokens,
        "prompt_eval_duration": _ns(first - end.queue_s),
        "eval_count": end.completion_tokens,
        "eval_duration": _ns(end.total_s - first),
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class Lines(Encoder):
    """Writes one answer line by line. A call is told once its arguments are whole, one that is cut never."""

    content_type = _CONTENT_TYPE

    def __init__(self, form: Form, generation: Generation, served: LoadedModel) -> None:
        self._form = form
        self._served = served
        self._reading = generation.reading
        self._blocks = Blocks(generation.reading)
        self._frames = {
            "text": sse.Frame(form.part(sse.HOLE), _line),
            "thought": sse.Frame(form.part("", sse.HOLE), _line),
        }
        self._texts = self._frames["text"]
        self._n_calls = 0

    def token(self, index: int, item: TokenOut) -> Part:
        if self._reading.plain and item.logprobs is None:
            return self._texts.fill(item.text) if item.text else b""
        changes = self._blocks.token(item)
        if item.logprobs is not None:
            return self._scored(changes, item)
        return joined([self._changed(change) for change in changes])

    def end(self, index: int, finished: Finished) -> Part:
        if self._reading.plain and finished.text:
            rest: list[Part] = [self._texts.fill(finished.text)]
        else:
            rest = [self._changed(change) for change in self._blocks.end(finished)]
        return joined([*rest, _line(self._form.last(finished))])

    def failure(self, index: int, fault: Fault, finished: Finished) -> bytes:
        return _line(error_of(fault))

    def keep_alive(self) -> bytes:
        return _KEEP_ALIVE

    def _scored(self, changes: Sequence[Change], item: TokenOut) -> Part:
        """Return the changes with the probabilities of a token: in its own line, or in one before them."""
        found = scores([item], self._served)
        told = [change for change in changes if not isinstance(change, Opened)]
        if len(told) == 1 and isinstance(told[0], Grown) and told[0].block.kind == "text":
            return _line(self._form.part(told[0].text) | found)
        rest = [self._changed(change) for change in told]
        return joined([_line(self._form.part() | found), *rest])

    def _changed(self, change: Change) -> Part:
        if isinstance(change, Grown) and change.block.kind != "call":
            return self._frames[change.block.kind].fill(change.text)
        if isinstance(change, Closed) and change.block.kind == "call" and not change.cut:
            return self._called(change)
        return b""

    def _called(self, call: Closed) -> Part:
        number, self._n_calls = self._n_calls, self._n_calls + 1

        def write() -> bytes:
            document = self._form.part(calls=[_call(call, number)])
            return sse.unsplit(written(document)) + b"\n"

        return write if len(call.text) > _LONG else write()


def _line(document: dict[str, Any]) -> bytes:
    return sse.unsplit(msgspec.json.encode(document)) + b"\n"


_BUSY: Final = 503


def error_of(fault: Fault) -> dict[str, Any]:
    """Return the document of a fault; the field at fault and our codes, which Ollama lacks, stand beside it."""
    more = {"code": fault.code, "param": fault.param, **fault.more}
    return {"error": fault.message, **{k: v for k, v in more.items() if v is not None}}


def reply_to(fault: Fault, request_id: str) -> Reply:
    """Return the whole answer to a request with a fault."""
    status = _BUSY if fault.status == 429 else fault.status
    return Reply(status, msgspec.json.encode(error_of(fault)), headers=fault.headers)
