"""The items of one or several requests, passed to whoever writes them: all of a tick at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio
from attrs import evolve, frozen

from uma_trio.engine.messages import Finished, PromptDone, StreamItem, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault, fault_of
from uma_trio.http.message import Exchange, Headers
from uma_trio.http.settings import Shared
from uma_trio.service.ask import Ask, Origin
from uma_trio.service.generation import Generation
from uma_trio.service.reading import Reading
from uma_trio.text.replies import Said, collect

Burst = tuple[int, Sequence[StreamItem]]
"""Which answer, and the items of it that came together."""

Deal = Callable[[Sequence[Burst]], Awaitable[None]]


@frozen
class Answer:
    """An answer that is whole. `prompt` is what was said of its prompt, if that was computed."""

    tokens: Sequence[TokenOut]
    end: Finished
    prompt: PromptDone | None = None

    @property
    def text(self) -> str:
        """Everything the model said."""
        return "".join([*(token.text for token in self.tokens), self.end.text])


class Encoder(ABC):
    """How an API writes a stream. Each method returns the bytes of whole events."""

    def opening(self) -> bytes:
        """Return what goes out once the requests are accepted."""
        return b""

    def prompt(self, index: int, item: PromptDone) -> bytes:
        """Return what goes out once the prompt of answer `index` is computed."""
        return b""

    @abstractmethod
    def token(self, index: int, item: TokenOut) -> bytes:
        """Return what says a token of answer `index`."""

    @abstractmethod
    def end(self, index: int, finished: Finished) -> bytes:
        """Return what says that answer `index` is whole."""

    def closing(self, every: Sequence[Finished]) -> bytes:
        """Return what goes out behind the last answer."""
        return b""

    @abstractmethod
    def failure(self, fault: Fault, finished: Finished) -> bytes:
        """Return what says that there will be no answer, and how it ended instead."""

    def keep_alive(self) -> bytes:
        """Return what breaks a long silence, so that nobody takes the stream for dead."""
        return sse.KEEP_ALIVE


@asynccontextmanager
async def started(
    shared: Shared, asks: Sequence[Ask], origin: Origin
) -> AsyncIterator[list[Generation]]:
    """Submit requests; leaving the block ends those that still run.

    Raises:
        Refusal: one was not accepted; the others are ended.
    """
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(shared.service.generate(ask, origin)) for ask in asks
        ]


async def stream(
    exchange: Exchange,
    shared: Shared,
    generations: Sequence[Generation],
    encoder: Encoder,
    headers: Headers,
) -> None:
    """Send the answers as events, to the end. The requests are accepted, so the head goes first."""
    exchange.open(headers, encoder.keep_alive, encoder.opening())
    ends: dict[int, Finished] = {}
    write_token = encoder.token

    async def deal(bursts: Sequence[Burst]) -> None:
        parts: list[bytes] = []
        for index, items in bursts:
            for item in items:
                if isinstance(item, TokenOut):
                    parts.append(write_token(index, item))
                elif isinstance(item, Finished):
                    ends[index] = item
                    parts.append(_last_words(encoder, index, item, shared))
                else:
                    parts.append(encoder.prompt(index, item))
        if len(ends) == len(generations):
            every = [ends[index] for index in range(len(generations))]
            await exchange.close(b"".join([*parts, encoder.closing(every)]))
            return
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if data and not await exchange.send(data):
            for generation in generations:
                generation.reader_was_behind()

    await each_burst(generations, deal)


async def whole(shared: Shared, generations: Sequence[Generation]) -> list[Answer]:
    """Return each answer, once all of them are at their end.

    Raises:
        Fault: one of them failed.
    """
    tokens: list[list[TokenOut]] = [[] for _ in generations]
    prompts: dict[int, PromptDone] = {}
    ends: dict[int, Finished] = {}

    async def deal(bursts: Sequence[Burst]) -> None:
        for index, items in bursts:
            for item in items:
                if isinstance(item, TokenOut):
                    tokens[index].append(item)
                elif isinstance(item, Finished):
                    ends[index] = item
                else:
                    prompts[index] = item

    await each_burst(generations, deal)
    for end in ends.values():
        if (fault := failure_of(end, shared)) is not None:
            raise fault
    return [Answer(tokens[i], ends[i], prompts.get(i)) for i in range(len(generations))]


def read(tokens: Sequence[TokenOut], end: Finished, reading: Reading) -> Said:
    """Return what one answer says, of which `whole` returned the items."""
    events = [event for token in tokens for event in reading.token(token)]
    return collect([*events, *reading.end(end)])


async def each_burst(generations: Sequence[Generation], deal: Deal) -> None:
    """Hand every item to `deal`, all that are there at a time, until all requests are at their end.

    A request's credit goes back when `deal` returns.
    """
    if len(generations) == 1:
        (generation,) = generations
        while not generation.finished:
            await deal(((0, await generation.burst()),))
        return
    rounds = _Rounds()
    left = len(generations)
    async with trio.open_nursery() as nursery:
        for index, generation in enumerate(generations):
            nursery.start_soon(rounds.feed, index, generation)
        while left:
            bursts, dealt = await rounds.take()
            await deal(bursts)
            left -= sum(isinstance(items[-1], Finished) for _, items in bursts)
            dealt.set()


def _last_words(encoder: Encoder, index: int, finished: Finished, shared: Shared) -> bytes:
    """Return the event that ends an answer."""
    fault = failure_of(finished, shared)
    return encoder.end(index, finished) if fault is None else encoder.failure(fault, finished)


def without_answer(end: Finished) -> Finished:
    """Return the end of a request of which only the prompt was wanted: its one token is nobody's."""
    if end.reason in ("cancelled", "error"):
        return end
    return evolve(end, reason="length", text="", completion_tokens=0, stop=None)


def failure_of(finished: Finished, shared: Shared) -> Fault | None:
    """Return what to say of an answer that will not come; counts it."""
    if finished.reason == "cancelled":
        return Fault(499, "the request was cancelled", code="cancelled", kind="server_error")
    if finished.code is None:
        return None
    shared.service.telemetry.error_sent(finished.code)
    return fault_of(finished.code, finished.message or "the request failed")


class _Rounds:
    """Several streams as one: those that were woken together are taken together."""

    def __init__(self) -> None:
        self._bursts: list[Burst] = []
        self._came = trio.Event()
        self._dealt = trio.Event()

    async def feed(self, index: int, generation: Generation) -> None:
        """Pass a request's items on to its end, each burst when the one before is dealt with."""
        while not generation.finished:
            items = await generation.burst()
            self._bursts.append((index, items))
            self._came.set()
            await self._dealt.wait()

    async def take(self) -> tuple[list[Burst], trio.Event]:
        """Return what has come, and the event that says that it is dealt with."""
        await self._came.wait()
        bursts, self._bursts = self._bursts, []
        dealt, self._dealt = self._dealt, trio.Event()
        self._came = trio.Event()
        return bursts, dealt
