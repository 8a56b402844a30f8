"""What engine tests are built from: an engine on the fake backend, ticked by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
from attrs import Factory, define, evolve
from constraint_kit import Constraining, IdArray

import uma_protocol
from uma_trio.backend.base import Overlap, Traits, nothing
from uma_trio.engine.cells import PrefixDisk
from uma_trio.engine.drafts import Drafting
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import (
    Cancel,
    Credit,
    Explain,
    Finished,
    Inspect,
    PromptDone,
    SamplingParams,
    Snapshot,
    StreamItem,
    Submit,
    TokenOut,
)
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sampling import AT_ONCE, Masks
from uma_trio.machine.bell import Bell
from uma_trio.machine.machine import Machine as Compute
from uma_trio.observe.explain import explanation_in_steps
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import Recorded, RequestRecord
from uma_trio.observe.view import Named, Viewer
from uma_trio.policy.baseline import baseline
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.sockets.principal import Principal
from uma_trio.text.constraint import Constraint
from uma_trio.text.stream import TokenText
from uma_trio.words import Lane, Speculation
from uma_trio_sim.fake import N_VOCAB, FakeBackend


@define
class Sink:
    """Keeps what one stream was sent."""

    items: list[StreamItem] = Factory(list)

    def send_nowait(self, item: StreamItem) -> None:
        """Keep it."""
        self.items.append(item)

    def flush(self) -> None:
        """All was taken as it came."""

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens, in order."""
        return [item.token_id for item in self.items if isinstance(item, TokenOut)]

    @property
    def text(self) -> str:
        """All text, also what came with the terminal item."""
        return "".join(i.text for i in self.items if isinstance(i, TokenOut | Finished))

    @property
    def ends(self) -> list[Finished]:
        """The terminal items; there must be one at most."""
        return [item for item in self.items if isinstance(item, Finished)]

    @property
    def end(self) -> Finished:
        """The one terminal item, which must be the last."""
        (end,) = self.ends
        if self.items[-1] is not end:
            raise AssertionError("something follows the terminal item")
        return end


class OnDevice(FakeBackend):
    """A backend that computes before `while_computing`, as a GPU does; `computing` meanwhile."""

    computing = False

    @property
    def traits(self) -> Traits:
        """The host is free while it computes."""
        return evolve(super().traits, overlaps=True)

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute around `while_computing`."""

        def meanwhile() -> None:
            self.computing = True
            while_computing()
            self.computing = False

        return super().decode(n_tokens, meanwhile)

    def _drop(self, slot: int, first: int) -> None:
        """Refuse while it computes: where the batch lies was settled before, and is noted after."""
        if self.computing:
            raise AssertionError(f"cells of {slot} are dropped during a decode")
        super()._drop(slot, first)


KINDS = (FakeBackend, OnDevice)
"""A decode that nothing overlaps with, and one that the host works during."""


class BrokenText(TokenText):
    """A text that cannot be decoded."""

    def __init__(self) -> None:
        super().__init__(())

    def push(self, token_id: int) -> str:
        """Fail, as a vocabulary without this token would."""
        raise IndexError(token_id)

    stops_with = push  # type: ignore[assignment]

    def finish(self) -> str:
        """Fail here, too."""
        raise IndexError("the end")


class Balking(Constraining):
    """A constraint that allows anything, and fails at the `n`-th token."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n

    def allowed(self) -> IdArray:
        """Return anything."""
        return np.arange(N_VOCAB, dtype=np.intp)

    def accept(self, token: int) -> None:
        """Fail in the end."""
        super().accept(token)
        if len(self.told) == self._n:
            raise ArithmeticError


class Doze(Bell):
    """A bell at which the compute thread sleeps as `sleeps` says, which is told for how long and returns if it rang."""

    def __init__(self, sleeps: Callable[[float | None], bool]) -> None:
        super().__init__()
        self.sleeps = sleeps

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep."""
        return self.sleeps(timeout_s)


def compute(engine: Engine, clock: Callable[[], float]) -> None:
    """Compute an engine as the daemon does, until its inbox is closed."""

    def died(error: Exception) -> None:
        raise error

    task = Compute(engine.inbox.bell, clock)
    task.add(engine, died)
    with engine.inbox.when_closed(task.close):
        task.run()


class Bench:
    """An engine without threads; its clock moves one millisecond each time it is read.

    Streams are of the kind `sink`.
    """

    sink: type[Sink] = Sink

    def __init__(
        self,
        backend: FakeBackend | None = None,
        policy: Policy = baseline,
        max_waiting: int = 256,
        clock: Callable[[], float] | None = None,
        wake: Callable[[], object] | None = None,
        recorder: Recorder | None = None,
        engine: type[Engine] = Engine,
        settings: EngineSettings | None = None,
        masks: Masks = AT_ONCE,
        drafter: Drafting | None = None,
        readers_s: Callable[[], float] | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        self.backend = backend or FakeBackend()
        ticks = count()
        self.clock = clock or (lambda: next(ticks) / 1000)
        self.inbox = Inbox(max_waiting, wake)
        self.metrics = Metrics()
        self.outlet = Outlet(lambda deliver: deliver())
        self.engine = engine(
            self.backend,
            policy,
            self.inbox,
            self.outlet,
            self.metrics,
            self.clock,
            settings=settings,
            recorder=recorder,
            masks=masks,
            drafter=drafter,
            readers_s=readers_s,
            disk=disk.of(self.backend.kv_identity(), self.inbox.wake) if disk else None,
        )
        self.handles = count(1)

    def submit(
        self,
        prompt: str | list[int] = "hello",
        max_tokens: int = 8,
        *,
        lane: Lane = "interactive",
        client: int = 0,
        credit: int = 10_000,
        stop: tuple[str, ...] = (),
        constraint: Constraint | None = None,
        namespace: str | None = None,
        session: str | None = None,
        speculation: Speculation = "auto",
        smooth: bool = False,
        progress: bool = False,
        owes_s: float = 0.0,
        **params: object,
    ) -> tuple[int, Sink]:
        """Submit a request; return its handle and its sink."""
        if isinstance(prompt, str):
            prompt = list(
                self.backend.vocabulary.tokenize(prompt, add_special=True, parse_special=False)
            )
        sink, handle = self.sink(), next(self.handles)
        self.inbox.submit(
            Submit(
                handle=handle,
                prompt=np.array(prompt, np.int32),
                max_tokens=max_tokens,
                params=SamplingParams(**params),  # type: ignore[arg-type]
                stop=stop,
                lane=lane,
                client=client,
                credit=credit,
                sink=sink,
                submitted=self.clock(),
                constraint=constraint,
                namespace=namespace,
                session=session,
                speculation=speculation,
                smooth=smooth,
                progress=progress,
                owes_s=owes_s,
            )
        )
        return handle, sink

    def run(self, most: int = 10_000) -> int:
        """Tick until idle; return how many ticks it took."""
        for n in range(most):
            if not self.engine.tick():
                self.check_idle()
                return n
        raise AssertionError(f"still busy after {most} ticks")

    def ticks(self, n: int) -> None:
        """Tick `n` times, and hear at once what the last of them has to tell."""
        for _ in range(n):
            self.engine.tick()
        self.engine.publish()

    def cancel(self, handle: int) -> None:
        """Ask for an end."""
        self.inbox.put(Cancel(handle))

    def credit(self, handle: int, n: int) -> None:
        """Give credit back."""
        self.inbox.put(Credit(handle, n))

    def inspect(self) -> tuple[RequestRecord, ...]:
        """Return what ``ps`` would show, by the way it really goes."""
        return self.snapshot().requests

    def snapshot(self, after: int = -1) -> Snapshot:
        """Return how things stand, by the way it really goes."""
        answers: list[Snapshot] = []
        self.inbox.put(Inspect(answers.append, after))
        self.engine.tick()
        return answers[0]

    def explain(self, handle: int | None = None, ticks: int = 0) -> Recorded:
        """Return what the engine recorded, by the way it really goes."""
        answers: list[Recorded] = []
        self.inbox.put(Explain(answers.append, handle, ticks))
        self.engine.tick()
        return answers[0]

    def check_idle(self) -> None:
        """Check the books: nothing is held by nobody."""
        self.engine.cells.check()
        running = self.engine.registry.running.values()
        slots = range(self.backend.limits.n_slots)
        if sum(s.computed for s in running) != sum(map(self.backend.kv_length, slots)):
            raise AssertionError("cells are held that no sequence knows of")

    def expected(self, prompt: str, n: int) -> list[int]:
        """Return the tokens that `prompt` must give."""
        tokens = self.backend.vocabulary.tokenize(prompt, add_special=True, parse_special=False)
        return self.backend.continuation(tokens, n)


def slow(state: SchedulerState) -> Plan:
    """Plan as the baseline does, and predict that every tick takes a second."""
    return evolve(baseline(state), predicted_s=1.0)


def first_token_at(sink: Sink) -> int:
    """Return where in the stream the prompt was done."""
    return next(i for i, item in enumerate(sink.items) if isinstance(item, PromptDone))


def told_to_people(
    request: uma_protocol.Explain, recorded: Recorded
) -> uma_protocol.Explanation | None:
    """Return what `explain` shows to an operator."""
    operator = Viewer(Principal(connection=0, is_operator=True), lambda _: Named())
    steps = explanation_in_steps(recorded, operator, one=request.request is not None)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            answer: uma_protocol.Explanation | None = end.value
            return answer
