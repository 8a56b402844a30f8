"""One request from its front to its terminal item: tokenised, submitted, read, ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import trio
from attrs import field, frozen

from uma_protocol.errors import Code
from uma_trio.backend.base import IntArray
from uma_trio.engine.inbox import EngineStopped, Inbox, QueueFull
from uma_trio.engine.messages import (
    Cancel,
    Constraint,
    Credit,
    Finished,
    Keep,
    PromptDone,
    SetLane,
    StreamItem,
    Submit,
    TokenOut,
)
from uma_trio.lanes import Lane
from uma_trio.service.ask import Ask, Origin, Refusal, namespace
from uma_trio.service.checks import Bounds, check_untokenised, max_tokens_for, refusing_depth
from uma_trio.service.directory import Directory
from uma_trio.service.playout import Playout
from uma_trio.service.reading import Reading
from uma_trio.service.stream import Pipe
from uma_trio.service.telemetry import Telemetry

_DRAINING = "the daemon is stopping; connect again once it has restarted"
_STOPPED = "the engine has stopped; the daemon is going down"


class Host(Protocol):
    """The service, as far as one request needs it."""

    bounds: Bounds
    inbox: Inbox
    telemetry: Telemetry
    clock: Callable[[], float]
    directory: Directory
    playout: Playout
    draining: bool

    async def prepare(self, ask: Ask) -> Prepared:
        """Return what the engine and the reader of the answer need. Raises :class:`Refusal`."""


@frozen(eq=False)
class Prepared:
    """What is made of a request before it is submitted.

    `pieces` are the bytes of each token where the reader of the answer needs to see special ones.
    """

    tokens: IntArray
    constraint: Constraint | None = None
    reading: Reading = field(factory=Reading)
    pieces: Sequence[bytes] | None = None


class Generation:
    """A request and its stream of items; made by :meth:`Service.generate`.

    It is in the directory from then on, so it has to be entered, or closed::

        async with service.generate(ask, origin) as stream:
            async for item in stream:
                ...

    Entering it checks, tokenises and submits the request. The items are a
    :class:`PromptDone`, any number of :class:`TokenOut` and exactly one :class:`Finished`, behind
    which the iteration ends. Asking for the next item says that those before it are dealt with:
    their credit goes back to the engine, one message for all that came at once. Leaving the
    block ends the request, whatever it is doing, and so does cancelling the task in it.
    """

    def __init__(self, service: Host, handle: int, ask: Ask, origin: Origin) -> None:
        self.handle = handle
        self.ask = ask
        self.origin = origin
        self.lane: Lane = ask.lane
        #: What reads the answer; there once it is entered.
        self.reading = Reading()
        #: How long the prompt is, in tokens; there once it is entered.
        self.prompt_tokens: int = 0
        self._service = service
        self._arrived = service.clock()
        self._pipe = Pipe(service.playout)
        self._preparing = trio.CancelScope()
        self._submitted = False
        self._ended_early = False
        self._ahead: deque[StreamItem] = deque()
        self._taken = 0
        self._prompt_done: PromptDone | None = None
        self._logits_at: float | None = None
        self._shown_at: float | None = None
        self._finished = False
        self._end: Finished | None = None

    async def __aenter__(self) -> Self:
        """Check, tokenise and submit.

        Raises:
            Refusal: it was not accepted, and is closed.
        """
        try:
            await self._start()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._dealt_with()
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        if not self._ahead:
            if self._finished:
                raise StopAsyncIteration
            self._ahead.extend(await self.burst())
        return self._ahead.popleft()

    @property
    def finished(self) -> bool:
        """Whether the terminal item was taken."""
        return self._finished

    async def burst(self) -> list[StreamItem]:
        """Return all items that are there, at least one; those before them are dealt with.

        Cancelled, it has taken nothing. Not to be called behind the terminal item.
        """
        self._dealt_with()
        items = await self._pipe.take()
        for item in items:
            if isinstance(item, TokenOut):
                self._taken += 1
            elif isinstance(item, PromptDone):
                self._prompt_done, self._logits_at = item, item.at
            else:
                self._finished, self._end = True, item
        return items

    def so_far(self, n_tokens: int) -> Finished:
        """Return what it took up to here, `n_tokens` into its answer, as its end will say it."""
        done = self._prompt_done or PromptDone(self._service.clock())
        return Finished(
            reason="length",
            text="",
            prompt_tokens=self.prompt_tokens,
            completion_tokens=n_tokens,
            cached_tokens=done.cached_tokens,
            queue_s=done.queue_s,
            ttft_s=done.at - self._arrived,
            total_s=self._service.clock() - self._arrived,
        )

    def reader_was_behind(self) -> None:
        """Note that what it was given last had to wait for its reader: that is no gap of ours."""
        self._shown_at = None

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """Bring it to its terminal item: cancelled, or an error with a code."""
        if self._submitted:
            self._service.inbox.put(Cancel(self.handle, code, message))
        elif not self._ended_early:
            self._ended_early = True
            self._preparing.cancel()
            self._pipe.send_nowait(self._never_submitted(code, message))

    def move_to(self, lane: Lane) -> None:
        """Promote or demote it."""
        self.lane = lane
        if self._submitted:
            self._service.inbox.put(SetLane(self.handle, lane))

    def close(self) -> None:
        """Give it up if it is not at its end, and leave the directory. Idempotent."""
        if not self._finished:
            self.end()
            self._finished = True
        self.tell_of_calls()
        self._pipe.close()
        self._service.directory.remove(self)

    def tell_of_calls(self) -> None:
        """Have what it computed kept for longer if its answer, as far as it was read, called a tool.

        Idempotent. Leaving the block does it; who reads the answer later than that does it, too.
        """
        end = self._end
        if end is not None and self.reading.reason(end) == "tool_calls":
            self._end = None
            self._service.inbox.put(Keep(self.handle))

    async def _start(self) -> None:
        service, ask = self._service, self.ask
        if service.draining:
            raise Refusal(Code.E_LIFECYCLE_001, _DRAINING)
        prepared = None
        with refusing_depth():
            check_untokenised(ask, self.origin.door, service.bounds)
            with self._preparing:
                prepared = await service.prepare(ask)
        if prepared is None or self._ended_early:
            return
        self.prompt_tokens = len(prepared.tokens)
        self.reading = prepared.reading
        self._submit(prepared, max_tokens_for(ask, self.prompt_tokens, service.bounds))

    def _submit(self, prepared: Prepared, max_tokens: int) -> None:
        ask, service = self.ask, self._service
        try:
            service.inbox.submit(
                Submit(
                    handle=self.handle,
                    prompt=prepared.tokens,
                    max_tokens=max_tokens,
                    params=ask.sampling,
                    stop=ask.stop,
                    lane=self.lane,
                    client=self.origin.client,
                    credit=service.bounds.credit,
                    sink=self._pipe,
                    submitted=self._arrived,
                    targets=ask.targets,
                    namespace=namespace(ask, self.origin),
                    session=ask.session,
                    speculation=ask.speculation,
                    smooth=ask.streamed and ask.pace == "smooth",
                    constraint=prepared.constraint,
                    pieces=prepared.pieces,
                )
            )
        except QueueFull as full:
            raise Refusal(Code.E_LIMIT_003, str(full), retry_after_s=full.retry_after_s) from None
        except EngineStopped:
            raise Refusal(Code.E_RUNTIME_004, _STOPPED) from None
        self._submitted = True

    def _dealt_with(self) -> None:
        """Note that the reader has passed on what it took."""
        if not self._taken:
            return
        service = self._service
        if self.ask.streamed:
            self._shown(service.clock())
        if not self._finished:
            service.inbox.put(Credit(self.handle, self._taken))
        self._taken = 0

    def _shown(self, now: float) -> None:
        """Record that the kernel has the bytes of what was taken."""
        telemetry = self._service.telemetry
        if self._logits_at is not None:
            telemetry.first_chunk(now - self._logits_at)
            self._logits_at = None
        if self._shown_at is not None:
            telemetry.shown(now - self._shown_at, self.lane)
        self._shown_at = now

    def _never_submitted(self, code: str | None, message: str | None) -> Finished:
        waited = self._service.clock() - self._arrived
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
