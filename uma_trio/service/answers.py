"""The answers to one request, which are prepared, submitted, read and ended as a unit.

Most requests have one answer. Several answers are either choices, which answer the same prompt with
different seeds, or answers to several prompts, where an API takes a list of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import trio
from attrs import evolve

from uma_protocol.errors import Code
from uma_trio.engine.inbox import EngineStopped, QueueFull
from uma_trio.engine.messages import Finished, FinishReason, StreamItem
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.model import Model
from uma_trio.service.ask import Ask, Origin, Refusal, of_choice
from uma_trio.service.checks import check_number, refusing_depth
from uma_trio.service.generation import Generation
from uma_trio.service.preparing import check, prepare
from uma_trio.service.service import Service
from uma_trio.service.stream import Reader
from uma_trio.text.frontend import Prepared
from uma_trio.words import Lane

Burst = tuple[int, list[StreamItem]]
"""The index of an answer, and its items."""

_DRAINING = "the daemon is stopping; connect again once it has restarted"
_STOPPED = "the engine has stopped; the daemon is going down"
_WORST_LAST: Sequence[FinishReason] = ("stop", "length", "cancelled", "error")


class Answers:
    """A request and its answers, to the model `served`, or else to that which the first ask names; for one task.

    The answers are listed in the directory as soon as the object exists, so it must be entered or
    closed::

        async with Answers(service, [ask], origin) as answers:
            while not answers.finished:
                await answers.read(show)

    Entering the block checks, tokenises and submits the whole request, or refuses it. Leaving the
    block, or cancelling the task in it, ends the answers that still run.
    """

    def __init__(
        self,
        service: Service,
        asks: Sequence[Ask],
        origin: Origin,
        served: LoadedModel | None = None,
    ) -> None:
        self._service = service
        self._served = served
        self._asks = asks
        self._door = origin.door
        self._origin = origin
        self._preparing = trio.CancelScope()
        self._reader = Reader()
        #: The model that the request waits for, if any; `on_wait` is called when the wait begins.
        self.awaited: Model | None = None
        self.on_wait: Callable[[], object] = lambda: None
        #: One for each choice of each ask, in their order.
        self.generations = tuple(
            Generation(
                service,
                handle,
                of_choice(ask, choice),
                origin,
                together=handles[0],
                choice=choice,
                reader=self._reader,
                preparing=self._preparing,
            )
            for ask in _listed(asks, service.models.slots)
            for handles in [[service.new_handle() for _ in range(ask.n)]]
            for choice, handle in enumerate(handles)
        )
        self._open = list(enumerate(self.generations))
        #: Ends the use of the model.
        self._used: Callable[[], None] = lambda: None
        if served is not None:
            self._uses(served)
        for generation in self.generations:
            service.directory.add(generation)

    async def __aenter__(self) -> Self:
        """Check, tokenise and submit.

        Raises:
            Refusal: the request is invalid or cannot be accepted; it is closed.
        """
        try:
            await self._start()
        except Refusal:
            for generation in self.generations:
                generation.mark_refused()
            self.close()
            raise
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
            self._return_credit()
        self.close()

    @property
    def handle(self) -> int:
        """The handle of the first answer."""
        return self.generations[0].handle

    @property
    def served(self) -> LoadedModel:
        """The model of the request; only inside the block."""
        if self._served is None:
            raise RuntimeError("the block was not entered")
        return self._served

    @property
    def finished(self) -> bool:
        """Whether the terminal item of every answer was taken."""
        return not self._open

    async def read(self, show: Callable[[list[Burst]], bool]) -> None:
        """Call `show` with all available items, each time that there are some.

        Returns when `show` returns False, or when all answers are `finished`; then it must not be called
        again. `show` is called on trio's thread by the task that delivers the items, and must
        not wait. If it returns True, the items' credit is returned at once; otherwise at the
        next call or at the end of the block. Its exceptions are raised here. After cancellation it
        is not called again.
        """
        self._return_credit()

        def take() -> bool:
            if not show(self._taken()):
                return False
            self._return_credit()
            return bool(self._open)

        await self._reader.read(take)

    async def burst(self) -> list[Burst]:
        """Return all available items, at least one, and the credit of those of the previous call.

        If it is cancelled, no item is taken. Must not be called when all answers are `finished`.
        """
        found: list[Burst] = []

        def show(bursts: list[Burst]) -> bool:
            found.extend(bursts)
            return False

        await self.read(show)
        return found

    def skip_next_gap(self) -> None:
        """Exclude the next gap from the metrics: the latest items waited for a slow reader."""
        for generation in self.generations:
            generation.skip_next_gap()

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """End every answer: as cancelled, or with an error code."""
        for generation in self.generations:
            generation.end(code, message)

    def move_to(self, lane: Lane) -> None:
        """Move all answers to a lane."""
        for generation in self.generations:
            generation.move_to(lane)

    def close(self) -> None:
        """End the answers that still run and remove them from the directory. Idempotent."""
        for generation in self.generations:
            generation.close()
        self._open = []
        self._used()

    async def _start(self) -> None:
        service = self._service
        if service.draining:
            raise Refusal(Code.E_LIFECYCLE_001, _DRAINING)
        prepared: list[Prepared] = []
        with refusing_depth(), self._preparing:
            served = await self._model()
            check_number(self._asks, served.slots)
            for ask in self._asks:
                await check(served, ask, self._door)
            for ask in self._asks:
                prepared += await prepare(served, ask, self._origin, service.run_compiling)
        if self._preparing.cancel_called:
            self.end()  # one answer was ended before submission, which ends all
            return
        self._submit(prepared)

    async def _model(self) -> LoadedModel:
        """Return the model of the request, once it is loaded. Raises :class:`Refusal`."""
        service, served, ask = self._service, self._served, self._asks[0]
        if served is None:
            name = service.models.with_adapters(ask.model, ask.lora)
            try:
                payer = self._origin.principal.counts_as
                served = await service.ready(name, self._wait_for, payer, kind="text", exact=True)
            finally:
                self._set_awaited(None)
            self._uses(served)
        return served

    def _uses(self, served: LoadedModel) -> None:
        """Use this model: it is not unloaded until the request is closed."""
        self._served, self._used = served, served.uses.begin()
        for generation in self.generations:
            generation.served = served
            generation.ask = generation.ask.with_defaults(served.defaults)

    def _wait_for(self, awaited: Model) -> None:
        self._set_awaited(awaited)
        self.on_wait()

    def _set_awaited(self, awaited: Model | None) -> None:
        self.awaited = awaited
        for generation in self.generations:
            generation.awaited = awaited

    def _submit(self, prepared: Sequence[Prepared]) -> None:
        pairs = zip(self.generations, prepared, strict=True)
        debts, payer = self._service.models.debts, self._origin.principal.counts_as
        debts_s = [debts.get(payer, 0.0), *[0.0] * (len(self.generations) - 1)]
        messages = [
            generation.submission(each, self.served, owes_s)
            for (generation, each), owes_s in zip(pairs, debts_s, strict=True)
        ]
        try:
            self.served.inbox.submit(*messages)
        except QueueFull as full:
            raise Refusal(Code.E_LIMIT_003, str(full), retry_after_s=full.retry_after_s) from None
        except EngineStopped:
            raise Refusal(Code.E_RUNTIME_004, _STOPPED) from None
        debts.pop(payer, None)  # a refused request pays no debt
        for generation in self.generations:
            generation.mark_submitted()

    def _taken(self) -> list[Burst]:
        bursts: list[Burst] = []
        ended = False
        for index, generation in self._open:
            if items := generation.take():
                bursts.append((index, items))
                ended = ended or generation.finished
        if ended:
            self._open = [
                (index, generation) for index, generation in self._open if not generation.finished
            ]
        return bursts

    def _return_credit(self) -> None:
        for generation in self.generations:
            generation.return_credit()


def _listed(asks: Sequence[Ask], slots: int) -> Sequence[Ask]:
    """Return the asks to list; for a request with too many answers, which is refused, only the first."""
    return asks if sum(ask.n for ask in asks) <= slots else [evolve(asks[0], n=1)]


def combined_end(ends: Sequence[Finished]) -> Finished:
    """Return the combined end of several answers to one prompt: the worst reason of any.

    The prompt counts once. `cached_tokens` is the value of the answer that found the least in the
    cache: the others may have shared what that one computed.
    """
    if len(ends) == 1:
        return ends[0]
    began = [end for end in ends if end.ttft_s is not None]
    worst = max(ends, key=lambda end: _WORST_LAST.index(end.reason))
    return evolve(
        worst,
        text="",
        stop=None,
        prompt_tokens=max(end.prompt_tokens for end in ends),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=min((end.cached_tokens for end in began), default=0),
        queue_s=min(end.queue_s for end in ends),
        ttft_s=min((end.ttft_s for end in began if end.ttft_s is not None), default=None),
        total_s=max(end.total_s for end in ends),
        drafted_tokens=sum(end.drafted_tokens for end in ends),
        accepted_tokens=sum(end.accepted_tokens for end in ends),
    )
