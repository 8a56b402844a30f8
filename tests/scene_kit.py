"""Scenes: an engine on the fake backend in virtual time, and people and programs who ask it.

All that happens is drawn from a seed, so the same code makes the same ticks. Time passes in
decodes and while logits are read: how often the engine asks for the time does not matter.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
from attrs import Factory, define, evolve, field, frozen
from engine_kit import Bench

from uma_trio.backend.base import Interrupt, Overlap, Traits, nothing
from uma_trio.engine.messages import (
    Cancel,
    Credit,
    Finished,
    SamplingParams,
    SetLane,
    StreamItem,
    Submit,
    Targets,
    TokenOut,
)
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.observe.records import TickRecord
from uma_trio.policy.cost import CostModel, Staircase, Traffic, Work
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.state import NO_WORK, Contract, SchedulerState
from uma_trio.words import Lane
from uma_trio_sim.ablation import ablated
from uma_trio_sim.fake import FakeBackend, InjectedFault

HOST_S = 0.0006  # passes while logits are read
RETURNING_S = 0.012  # until a decode that was interrupted returns

CPU = CostModel(
    Staircase(
        (1, 2, 3, 4, 8, 16, 64, 128),
        (0.0080, 0.0117, 0.0162, 0.0111, 0.0190, 0.0260, 0.0940, 0.1900),
    ),
    output=Staircase((1, 16), (0.0, 0.003)),
    context_cell_s=2e-7,
    used_cell_s=5e-8,
)
GPU = CostModel(
    Staircase((1, 2, 4, 8, 16, 64, 128), (0.0038, 0.0041, 0.0046, 0.0063, 0.0078, 0.0118, 0.0170)),
    context_cell_s=1e-8,
    wide_context_cell_s=4e-9,
    recapture_s=0.001,
    capture_s=0.002,
)


@frozen(kw_only=True)
class Scene:
    """One run: a policy on a machine, and who asks it.

    Decodes take what `truth` says; the policy begins with what it `believes`. A `device` computes
    while the next tick is planned. `people` and `jobs` are how many clients there are of each, and
    `longest` is the longest answer that a person asks for.
    """

    policy: str
    seed: int
    ticks: int = 350
    truth: CostModel = CPU
    believes: CostModel | None = None
    device: bool = False
    n_slots: int = 8
    n_ctx: int = 3000
    contract: Contract = field(factory=Contract)
    traffic: Traffic | None = None
    faults: dict[int, InjectedFault] = field(factory=dict)
    can_remove_part: bool = True
    noise: float = 0.05
    people: int = 4
    jobs: int = 3
    longest: int = 60  # answer of a person


# --- virtual time ---


class World:
    """A clock, and what happens at which of its moments."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do `action` in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def let_pass(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass with all that happens in it, unless it is `enough` before; say whether."""
        end = self.now + seconds
        while not enough():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return False
            self._next()
        return True

    def rest(self) -> bool:
        """Go on to the next thing that happens. False if nothing is left to happen."""
        if self._events:
            self._next()
            return True
        return False

    def _next(self) -> None:
        when, _, action = heapq.heappop(self._events)
        self.now = max(self.now, when)
        action()


class Machine(FakeBackend):
    """A fake backend whose decodes take the time of a scene's machine."""

    def __init__(self, scene: Scene, world: World) -> None:
        super().__init__(
            n_ctx=scene.n_ctx,
            n_slots=scene.n_slots,
            end_after=60,
            faults=scene.faults,
            can_remove_part=scene.can_remove_part,
        )
        self.meanwhile = self._let_pass
        self._scene = scene
        self._world = world
        self._noise = random.Random(scene.seed + 1000)
        self._before = NO_WORK
        self._seconds = 0.0
        self._interrupted = False

    @property
    def traits(self) -> Traits:
        """The host is free meanwhile where the scene has a device."""
        return evolve(super().traits, overlaps=self._scene.device)

    def arm(self) -> Interrupt | None:
        """Let the next decode be interrupted."""
        interrupt = super().arm()

        def noted() -> None:
            self._interrupted = True
            if interrupt is not None:
                interrupt()

        return noted

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute; what happens meanwhile happens in the middle of it."""
        slots = self.batch.slot[:n_tokens].tolist()
        held = [self.kv_length(slot) for slot in range(self.limits.n_slots)]
        work = Work(
            n_tokens,
            int(self.batch.want[:n_tokens].sum()),
            sum(held[slot] for slot in slots),
            sum(held),
            after=self._before.shape,
            settled=self._before.after == self._before.shape,
        )
        self._before = work
        noise = self._noise.lognormvariate(0.0, self._scene.noise)
        self._seconds = self._scene.truth.seconds(work) * noise
        status = super().decode(n_tokens, while_computing)
        self._interrupted = False
        return status

    def logits(self, n_rows: int) -> np.ndarray:
        """Return the rows of the latest decode, after a while."""
        self._world.let_pass(HOST_S)
        return super().logits(n_rows)

    def _let_pass(self) -> None:
        if self._world.let_pass(self._seconds, lambda: self._interrupted):
            self._world.let_pass(RETURNING_S)


# --- who asks ---


@define(eq=False)
class Client:
    """Asks again and again; what and how is drawn from its own `draw`."""

    number: int
    lane: Lane
    stage: Stage
    draw: random.Random
    slow: bool = False  # reads in bursts, with pauses between them
    hasty: bool = False  # asks again at once
    longest: int = 60
    owed: int = 0
    handle: int = 0

    def ask(self) -> None:
        """Send a request, and perhaps decide to change it later."""
        draw, person = self.draw, self.lane == "interactive"
        paste = person and draw.random() < 0.15
        prompt = draw.randint(550, 800) if paste else draw.randint(5, 160 if person else 600)
        most = draw.randint(2, self.longest) if person else draw.choice((1, 1, 8, 40))
        self.owed = 0
        self.handle = handle = next(self.stage.handles)
        self.stage.bench.inbox.submit(
            Submit(
                handle=handle,
                prompt=np.array([draw.randrange(1, 250) for _ in range(prompt)], np.int32),
                max_tokens=most,
                params=SamplingParams(temperature=draw.choice((0.0, 0.8)), seed=draw.randrange(99)),
                stop=draw.choice(((), (), ("the", "e s"))),
                lane=self.lane,
                client=self.number,
                credit=draw.choice((3, 8)) if self.slow else 10_000,
                sink=self,
                submitted=self.stage.world.now,
                targets=draw.choice((Targets(),) * 4 + (Targets(ttft_s=0.2, itl_s=0.009),)),
                smooth=person,
            )
        )
        change = draw.random()
        if change < 0.1:
            self._later(draw.uniform(0.05, 1.0), Cancel(handle))
        elif change < 0.2:
            other: Lane = "background" if person else "interactive"
            self._later(draw.uniform(0.05, 0.5), SetLane(handle, other))

    def send_nowait(self, item: StreamItem) -> None:
        """Read a token, and give credit back; at the end think, and ask again."""
        if isinstance(item, TokenOut) and self.slow:
            self.owed += 1
            if self.owed >= 3:
                self._later(self.draw.uniform(0.01, 1.5), Credit(self.handle, self.owed))
                self.owed = 0
        elif isinstance(item, Finished):
            pause = 0.0 if self.hasty else self.draw.uniform(0.05, 1.0)
            self.stage.world.after(pause, self.ask)

    def flush(self) -> None:
        """All was taken as it came."""

    def _later(self, seconds: float, message: Cancel | SetLane | Credit) -> None:
        self.stage.world.after(seconds, lambda: self.stage.bench.inbox.put(message))


@define(eq=False)
class Stage:
    """What the clients of a scene have in common."""

    bench: Bench
    world: World
    handles: Iterator[int] = Factory(lambda: count(1))


class Noted(Recorder):
    """A recorder that keeps the lines of a trace."""

    def __init__(self) -> None:
        super().__init__(self._keep)
        self.ticks: list[TracedTick] = []

    def _keep(self, state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        self.ticks.append(TracedTick(state, plan, record.decode_s, record.host_s, record.status))


def play(scene: Scene) -> list[TracedTick]:
    """Run a scene; return every tick of it."""
    world, recorder = World(), Noted()
    settings = EngineSettings(
        contract=scene.contract,
        scratch_slots=0 if scene.believes is None else 1,
        cost=scene.believes,
        traffic=scene.traffic,
    )
    bench = Bench(
        Machine(scene, world),
        ablated(scene.policy),
        clock=world.clock,
        recorder=recorder,
        settings=settings,
    )
    stage = Stage(bench, world)
    for number in range(scene.people + scene.jobs):
        person = number < scene.people
        client = Client(
            number,
            "interactive" if person else "background",
            stage,
            random.Random(100 * scene.seed + number),
            slow=number % 4 == 3,
            hasty=not person and number % 2 == 0,
            longest=scene.longest,
        )
        world.after(client.draw.uniform(0.0, 0.5), client.ask)
    ticks = 0
    while ticks < scene.ticks and (bench.engine.tick() or world.rest()):
        ticks += 1
    bench.engine.publish()
    return recorder.ticks
