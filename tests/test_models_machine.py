"""Requests, lists, loads, unloads, deaths and the end of the daemon in any order, with the real manager, service and compute thread.

Restoring, saving, closing and loading take virtual time. Whatever happens: all that was opened is closed, every request and
every operator is answered, readers of one model never wait for more than a tick and a part of another's work, and nothing of all
this holds up trio's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any

import numpy as np
import trio
from attrs import define, evolve, field
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lockstep_kit import Lockstep
from models_kit import GIB, FakeHost
from trio.testing import MockClock

from uma_protocol.errors import Code
from uma_trio.backend.base import Overlap, Saved, nothing
from uma_trio.config.options import Config
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.sampling import AT_ONCE
from uma_trio.machine.machine import Machine
from uma_trio.models.loaded import Bounds, TextModel
from uma_trio.models.manager import ModelManager
from uma_trio.models.model import Model
from uma_trio.models.refusal import Refusal
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.deadline import deadline
from uma_trio.policy.state import Contract
from uma_trio.service.answers import Answers
from uma_trio.service.ask import Ask, Door, Origin
from uma_trio.service.service import Service
from uma_trio.sockets.principal import Principal
from uma_trio.text.frontend import FrontEnd
from uma_trio_sim.fake import FakeBackend

COST = CostModel(Staircase((1, 16, 512), (0.010, 0.014, 0.400)))
STEP_S = 0.040
#: The largest tick that a policy plans while a request of the same model is read: 64 tokens.
PART_S = COST.seconds(Work(64))
#: A page of 64 tokens that is saved or restored, the end of a context, and a tenth of a load.
PAGE_S, CLOSE_S, LOAD_PART_S = 0.004, 0.080, 0.030
END_S = 60.0


class CostedBackend(FakeBackend):
    """A model whose work takes the time of a lockstep, on whichever thread it is done."""

    def __init__(self, lockstep: Lockstep, key: int) -> None:
        super().__init__(n_ctx=2048, n_slots=4, n_batch=256, key=key)
        self.lockstep, self.breaks = lockstep, False

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute, or break if the test says so."""
        if self.breaks:
            raise RuntimeError("the device is gone")
        status = super().decode(n_tokens, while_computing)
        rows = int(self.batch.want[:n_tokens].sum())
        self.lockstep.pay(COST.seconds(Work(tokens=n_tokens, rows=rows)))
        return status

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Save pages."""
        found = super().kv_save(slot, first, last, page)
        self.lockstep.pay(PAGE_S * -(-(last - first) // page))
        return found

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        """Put pages back."""
        self.lockstep.pay(PAGE_S * len(saved))
        return super().kv_restore(slot, saved)

    def close(self) -> None:
        """Free the context."""
        if not self.closed:
            self.lockstep.pay(CLOSE_S)
        super().close()


class LockstepHost(FakeHost):
    """A computer whose helper threads are those of a lockstep."""

    lockstep: Lockstep

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function in a helper thread."""
        return await self.lockstep.helped(function, *arguments)


@define(eq=False, slots=False)
class Daemon:
    """Two models, memory for one or both of them, and what happened."""

    nursery: trio.Nursery
    lockstep: Lockstep
    gib: int
    opened: list[CostedBackend] = field(factory=list)
    answered: int = 0
    asked: int = 0
    gaps: list[float] = field(factory=list)
    stopped: bool = False
    n: int = 0

    def __attrs_post_init__(self) -> None:
        host = LockstepHost(self.gib * GIB)
        host.lockstep = self.lockstep
        self.host = host
        self.compute = Machine(self.lockstep.bell, self.lockstep.clock, self.lockstep.post)
        config = Config(load="on-demand", model_ttl_s=20.0)
        self.manager = ModelManager(
            [Model(evolve(config, alias=(name,))) for name in "ab"],
            self.build,
            self.compute,
            host,
        )
        self.service = Service(
            self.manager,
            telemetry=Metrics(),
            clock=trio.current_time,
            run_blocking=self.lockstep.helped,
        )

    async def build(self, model: Model, held: ExitStack, _neighbour: object) -> TextModel:
        """Load a model in parts, the first of which opens it."""
        backend = CostedBackend(self.lockstep, ord(model.names[0]))
        self.opened.append(backend)
        held.callback(backend.close)
        self.host.free -= 2 * GIB

        def free() -> None:
            self.host.free += 2 * GIB

        held.callback(free)
        for part in range(10):
            await trio.sleep(LOAD_PART_S)
            model.report_progress("is loading", part / 10)
        inbox = Inbox(99, bell=self.lockstep.bell)
        kept = model.prefixes
        engine = Engine(
            backend,
            deadline,
            inbox,
            Outlet(self.lockstep.post),
            model.metrics,
            self.lockstep.clock,
            settings=EngineSettings(
                cost=COST, contract=Contract(reading_pace_s=STEP_S), prefix_bytes=1 << 24
            ),
            masks=AT_ONCE,
            scheduler=self.compute.background,
            store=None if kept is None else kept.store,
        )
        return TextModel(
            facts=backend.model,
            bounds=Bounds(model=model.names[0], n_ctx_seq=2048, n_vocab=backend.model.n_vocab),
            inbox=inbox,
            telemetry=model.metrics,
            run_blocking=self.lockstep.helped,
            slots=4,
            engine=engine,
            front_end=FrontEnd(backend.vocabulary, backend.model.chat_template),
            backend=backend,
        )

    # --- what happens ---

    async def ask(self, name: str, n_prompt: int, n: int) -> None:
        """Ask a model, and note the gaps between its tokens; it is answered or refused."""
        self.asked += 1
        self.n += 1
        prompt = np.full(n_prompt, 65 + self.n % 2, np.int32)  # every second one has the same
        ask = Ask(prompt=prompt, model=name, max_tokens=n)
        principal = Principal(connection=self.n, uid=self.n % 3)
        origin = Origin(principal=principal, door=Door(max_prompt_bytes=1 << 20), name="r")
        try:
            async with Answers(self.service, [ask], origin) as answers:
                times: list[float] = []
                while not answers.finished:
                    for _, items in await answers.burst():
                        times += [trio.current_time() for one in items if isinstance(one, TokenOut)]
                        self.answered += sum(isinstance(one, Finished) for one in items)
                self.gaps += [after - before for before, after in pairwise(times)]
        except Refusal:
            self.answered += 1

    async def operate(self, verb: Callable[[str], Any], name: str) -> None:
        """Load or unload a model by its name."""
        self.asked += 1
        with suppress(Refusal):
            await verb(name)
        self.answered += 1

    async def look(self) -> None:
        """List and explain all requests."""
        self.asked += 1
        await self.service.observer.state()
        await self.service.observer.explain(None, 4)
        self.answered += 1

    def die(self, name: str) -> None:
        """Break a model's device."""
        text = self.manager.resolve(name).text
        if text is not None and isinstance(text.backend, CostedBackend):
            text.backend.breaks = True
            text.inbox.wake()

    async def stop(self) -> None:
        """End as the daemon does."""
        self.stopped = True
        self.service.stop_taking()
        with trio.move_on_after(1.0):
            await self.service.wait_until_idle()
        self.service.end_all(Code.E_LIFECYCLE_001, "the daemon is stopping")
        with trio.move_on_after(2.0):
            await self.service.directory.wait_until_empty()
        self.manager.stop()
        self.compute.close()


Action = tuple[float, str, str, int]


async def lives(gib: int, actions: list[Action]) -> None:
    """Run a daemon through all of this, and check it at its end."""
    lockstep = Lockstep()
    async with trio.open_nursery() as clients:
        async with trio.open_nursery() as nursery:
            daemon = Daemon(clients, lockstep, gib)
            await nursery.start(daemon.manager.run)
            nursery.start_soon(daemon.service.playout.run)

            async def compute() -> None:
                await lockstep.run(daemon.compute.run)
                nursery.cancel_scope.cancel()

            nursery.start_soon(compute)
            for after, what, name, n in actions:
                await trio.sleep(after)
                match what:
                    case "ask":
                        clients.start_soon(daemon.ask, name, 20 + 16 * n, 1 + n)
                    case "list":
                        clients.start_soon(daemon.look)
                    case "load":
                        clients.start_soon(daemon.operate, daemon.manager.load, name)
                    case "unload":
                        clients.start_soon(daemon.operate, daemon.manager.unload_by_name, name)
                    case "die":
                        daemon.die(name)
            await daemon.stop()
        await lockstep.helped(daemon.manager.close)
        with trio.move_on_after(END_S) as waiting:
            while daemon.answered < daemon.asked:  # noqa: ASYNC110 - in virtual time
                await trio.sleep(1)
        assert not waiting.cancelled_caught, "a request is not answered"
    assert all(each.closed for each in daemon.opened), "a model is not closed"
    assert daemon.host.free == gib * GIB
    # Several prompts that arrive at once on one model may delay its first reader by their first parts, within the pause cap.
    most_s = Contract().pause_cap * STEP_S
    assert max(daemon.gaps, default=0.0) <= most_s + PART_S


actions = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.013, 0.1, 0.4, 1.0, 25.0]),
        st.sampled_from(["ask", "ask", "ask", "list", "load", "unload", "die"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 60),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=15)
@given(gib=st.sampled_from([2, 3, 4]), happens=actions)
@example(gib=4, happens=[(0.0, "load", "a", 0), (0.32, "list", "a", 0)])
@example(gib=4, happens=[(0.0, "ask", "b", 13), (1.0, "die", "b", 0), (1.0, "ask", "b", 13)])
def test_whatever_happens_to_models_is_answered_and_closed(gib: int, happens: list[Action]) -> None:
    """See the module."""
    trio.run(lives, gib, happens, clock=MockClock(autojump_threshold=0))
