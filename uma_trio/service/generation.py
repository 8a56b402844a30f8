"""One answer, from submission to its terminal item.

The answers to one request are prepared and read together: see :mod:`uma_trio.service.answers`.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import trio

from uma_trio.backend.base import IntArray
from uma_trio.engine.messages import (
    Cancel,
    Credit,
    Finished,
    InboxMessage,
    Keep,
    PromptDone,
    PromptProgress,
    SetLane,
    StreamItem,
    Submit,
    TokenOut,
)
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.model import Model
from uma_trio.service.ask import Ask, Origin, awaits_of, namespace
from uma_trio.service.checks import max_tokens_for
from uma_trio.service.reading import Reading
from uma_trio.service.service import Service
from uma_trio.service.stream import Pipe, Reader
from uma_trio.text.frontend import Prepared
from uma_trio.words import Lane


class Generation:
    """One answer and its stream of items: choice number `choice` of a request.

    `together` is the handle of the first answer to the same prompt of the request.

    It is in the directory until it is closed. Its items are any number of :class:`PromptProgress`
    (if requested), a :class:`PromptDone`, any number of :class:`TokenOut` and exactly one
    :class:`Finished`. The task that takes items reports when it has written them; their credit
    is then returned to the engine, in one message for all items taken together. Each answer has its
    own credit, so no answer can exhaust the credit of another.
    """

    streams = True

    def __init__(
        self,
        service: Service,
        handle: int,
        ask: Ask,
        origin: Origin,
        *,
        together: int,
        choice: int = 0,
        reader: Reader,
        preparing: trio.CancelScope,
    ) -> None:
        self.handle = handle
        self.ask = ask
        self.origin = origin
        self.choice = choice
        self.lane: Lane = ask.lane
        #: The parser of the answer; set by :meth:`submission`.
        self.reading = Reading()
        #: The tokens of the prompt; set by :meth:`submission`.
        self.prompt: IntArray = np.empty(0, np.int32)
        #: Whether the terminal item was taken.
        self.finished = False
        self._service = service
        #: Its model, once it is known.
        self.served: LoadedModel | None = None
        self._together = together
        self.arrived = service.clock()
        #: The model that it waits for, if any.
        self.awaited: Model | None = None
        self.pipe = Pipe(service.playout, reader)
        self._preparing = preparing
        self._submitted = False
        self._ended_early = False
        self._taken = 0
        self._prompt_done: PromptDone | None = None
        self._logits_at: float | None = None
        self._shown_at: float | None = None
        self._end: Finished | None = None
        self._last: Finished | None = None

    @property
    def model(self) -> str | None:
        """The name of the model that computes it; None while it is prepared."""
        return None if self.served is None else self.served.bounds.model

    def submission(self, prepared: Prepared, served: LoadedModel, owes_s: float) -> Submit:
        """Return the message that submits it to the engine, which charges `owes_s` to its user.

        Raises:
            Refusal: prompt and answer do not fit into the context together.
        """
        ask, service = self.ask, self._service
        *within, conversation = service.shares.path(self.origin, ask.session)
        self.prompt = prepared.tokens
        self.reading = Reading(
            prepared.parser, prepared.loosened, ask.stop, reshaped=prepared.reshaped
        )
        if self.reading.stops:
            self.pipe.on_item = self._read_ahead
        return Submit(
            handle=self.handle,
            prompt=prepared.tokens,
            max_tokens=max_tokens_for(ask, len(self.prompt), served.bounds),
            params=ask.sampling,
            stop=() if self.reading.stops else ask.stop,
            lane=self.lane,
            client=conversation,
            within=tuple(within),
            credit=served.bounds.credit,
            sink=self.pipe,
            submitted=self.arrived,
            targets=ask.targets,
            namespace=namespace(ask, self.origin, self._together),
            keeps=ask.cache != "none",
            session=ask.session,
            speculation=ask.speculation,
            smooth=ask.streamed and ask.pace == "smooth" and awaits_of(ask) == "tokens",
            awaits=awaits_of(ask),
            constraint=prepared.constraint,
            pieces=prepared.pieces,
            progress=ask.progress,
            owes_s=owes_s,
        )

    def mark_submitted(self) -> None:
        self._submitted = True

    def take(self) -> list[StreamItem]:
        """Return all items that are due."""
        items = self.pipe.take()
        for item in items:
            if isinstance(item, TokenOut):
                self._taken += 1
            elif isinstance(item, PromptDone):
                self._prompt_done, self._logits_at = item, item.at
            elif isinstance(item, Finished):
                self.finished, self._end, self._last = True, item, item
            elif not isinstance(item, PromptProgress):  # which takes no credit
                assert_never(item)
        return items

    def _read_ahead(self, item: StreamItem) -> StreamItem | None:
        """Parse an item as it arrives from the engine; end the answer at a stop string."""
        was_stopped = self.reading.stopped is not None
        found = self.reading.take(item)
        if self.reading.stopped is not None and not was_stopped and isinstance(item, TokenOut):
            self._send(Cancel(self.handle, reason="stop"))
        return found

    def so_far(self, n_tokens: int) -> Finished:
        """Return a terminal item for the tokens taken so far, `n_tokens` of the answer."""
        done = self._prompt_done or PromptDone(self._service.clock())
        return Finished(
            reason="length",
            text="",
            prompt_tokens=len(self.prompt),
            completion_tokens=n_tokens,
            cached_tokens=done.cached_tokens,
            queue_s=done.queue_s,
            ttft_s=done.at - self.arrived,
            total_s=self._service.clock() - self.arrived,
        )

    def skip_next_gap(self) -> None:
        """Exclude the next gap from the metrics: the latest items waited for a slow reader."""
        self._shown_at = None

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """End it: as cancelled, or with an error code.

        Before it is submitted, all answers to its request end with it.
        """
        if self._submitted:
            self._send(Cancel(self.handle, code, message))
        elif not self._ended_early:
            self._ended_early = True
            self._preparing.cancel()
            self._service.telemetry.ended_early(code or "cancelled")
            self.pipe.send_nowait(self._never_submitted(code, message))
            self.pipe.flush()

    def mark_refused(self) -> None:
        """Note that it was refused: it has no terminal item, and is not counted as ended."""
        self._ended_early = True

    def move_to(self, lane: Lane) -> None:
        self.lane = lane
        if self._submitted:
            self._send(SetLane(self.handle, lane))

    def close(self) -> None:
        """End it if it still runs, and remove it from the directory. Idempotent."""
        if not self.finished:
            self.end()
            self.finished = True
        self.keep_prefix_after_calls()
        self.pipe.close()
        if self._service.directory.remove(self) and self._submitted:
            self._log()

    def _log(self) -> None:
        total_s = self._service.clock() - self.arrived
        line = log_line(self.handle, self.origin, self.choice, self.lane, self._last, total_s)
        self._service.log_request(line)

    def keep_prefix_after_calls(self) -> None:
        """Keep the cached prefix for longer if the answer, as far as it was parsed, calls a tool.

        Idempotent. Leaving the block calls this; a reader that parses the answer later must call it
        again.
        """
        end = self._end
        if end is not None and self.reading.reason(end) == "tool_calls":
            self._end = None
            self._send(Keep(self.handle))

    def return_credit(self) -> None:
        """Return the credit of the items that the reader took, which are written now."""
        if not self._taken:
            return
        service = self._service
        if self.ask.streamed:
            self._shown(service.clock())
        if not self.finished:
            self._send(Credit(self.handle, self._taken))
        self._taken = 0

    def _send(self, message: InboxMessage) -> None:
        if self.served is not None:
            self.served.inbox.put(message)

    def _shown(self, now: float) -> None:
        """Record the gap to the items that the kernel has just received."""
        telemetry = (self.served or self._service).telemetry
        if self._logits_at is not None:
            telemetry.first_chunk(now - self._logits_at)
            self._logits_at = None
        if self._shown_at is not None:
            telemetry.shown(now - self._shown_at, self.lane)
        self._shown_at = now

    def _never_submitted(self, code: str | None, message: str | None) -> Finished:
        waited = self._service.clock() - self.arrived
        return Finished(
            reason="cancelled" if code is None else "error",
            text="",
            prompt_tokens=0,
            completion_tokens=0,
            cached_tokens=0,
            queue_s=waited,
            ttft_s=None,
            total_s=waited,
            code=code,
            message=message,
        )


def log_line(
    handle: int, origin: Origin, choice: int, lane: Lane, end: Finished | None, total_s: float
) -> dict[str, object]:
    """Return the fields of an answer's log line, never text; without an `end` the reader left first."""
    line: dict[str, object] = {"id": handle, "app": origin.app or "-", "lane": lane}
    if choice:
        line["choice"] = choice
    if end is None:
        return {**line, "total_s": round(total_s, 3), "reason": "left"}
    decode_s = end.total_s - (end.ttft_s or 0.0)
    after_first = end.completion_tokens - 1
    return {
        **line,
        "prompt_tokens": end.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "tokens": end.completion_tokens,
        "queue_ms": round(end.queue_s * 1e3, 1),
        **({} if end.ttft_s is None else {"ttft_ms": round(end.ttft_s * 1e3, 1)}),
        "total_s": round(end.total_s, 3),
        **(
            {"tokens_per_s": round(after_first / decode_s, 1)}
            if after_first > 0 and decode_s > 0
            else {}
        ),
        "reason": end.reason,
        **({} if end.code is None else {"code": end.code}),
    }
