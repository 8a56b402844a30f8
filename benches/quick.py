"""The policy alone in virtual time: thousands of ticks a second, for sweeps over many settings.

What the engine does around a policy is here in counters: admission, cells, recovery from a full
cache and giving ticks up, by the same functions. There are no tokens, no logits, no streams and no
messages, which is two to four times as quick. The same seed gives the same ticks as the whole engine (:mod:`benches.simulation`),
which a test holds.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import Factory, define

from benches.machine import Machine
from benches.virtual import ENDLESS_CREDIT, Request, World
from uma_trio.backend.base import DecodeStatus, Limits
from uma_trio.engine.ledger import KvLedger
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.preemption import Arrival, Preemption
from uma_trio.engine.sequences import cells_needed
from uma_trio.policy.abort import Newcomer, abortable
from uma_trio.policy.accounting import as_measured, planned_work
from uma_trio.policy.admission import admit, gives_place
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.pressure import Preempt, Shrink, relieve
from uma_trio.policy.state import (
    NO_WORK,
    AdmissionState,
    Holder,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
    Waiting,
)


@define(eq=False, kw_only=True)
class Counters(Request):
    """A request as two counters: tokens that are `known` and tokens that are `computed`."""

    known: int = Factory(lambda self: self.prompt_tokens, takes_self=True)
    computed: int = 0
    reserved: int = 0
    passed_over: int = 0
    preempted: bool = False
    ended: bool = False
    seen: SequenceView | None = None  # as long as it is true

    @property
    def newcomer(self) -> Newcomer:
        """What of it decides whether a tick is given up for it."""
        return Newcomer(self.lane, self.prompt_tokens + self.answer_tokens)

    @property
    def cells(self) -> int:
        """How many KV cells it should reserve."""
        remaining = self.prompt_tokens + self.answer_tokens - self.known
        return cells_needed(self.known, remaining, self.lane, preempted=self.preempted)

    def view(self) -> SequenceView:
        """Return what the policy may see."""
        if self.seen is None:
            self.seen = SequenceView(
                key=self.handle,
                lane=self.lane,
                pending=self.known - self.computed,
                computed=self.computed,
                started=bool(self.token_times),
                credit=ENDLESS_CREDIT - len(self.token_times),
                arrived=self.arrived,
                client=self.client,
                first_token_at=self.token_times[0] if self.token_times else None,
                last_token_at=self.token_times[-1] if self.token_times else None,
                target_ttft_s=self.targets.ttft_s,
                target_gap_s=self.targets.gap_s,
            )
        return self.seen

    def waiting(self) -> Waiting:
        """Return what admission may see."""
        return Waiting(
            self.handle, self.lane, self.client, self.cells, self.passed_over, self.arrived
        )

    def holder(self) -> Holder:
        """Return what admission may see of it while it has a slot."""
        return Holder(
            self.handle, self.lane, self.client, self.reserved, self.computed, self.passed_over
        )


class Quick(World[Counters]):
    """One policy on one machine. `on_tick` is given every tick, as a trace would have it."""

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        settings: EngineSettings,
        limits: Limits,
        on_tick: Callable[[TracedTick], None] | None = None,
    ) -> None:
        super().__init__(Counters)
        self.machine = machine
        self.memory = Memory(cost=settings.cost)
        self._policy = policy
        self._settings = settings
        self._limits = limits
        self._on_tick = on_tick
        self._ledger = KvLedger(limits.n_slots - settings.scratch_slots, limits.n_ctx)
        self._waiting: dict[int, Counters] = {}
        self._running: dict[int, Counters] = {}
        self._measured: tuple[MeasuredTick, ...] = ()
        self._before = NO_WORK
        self._batch_limit = limits.n_batch
        self._made_room = False
        self._preemption = Preemption(lambda: self._give_up, self._watch, self.clock)
        self._came: Callable[[Arrival], None] | None = None
        self._unseen: list[Counters] = []  # since the last admission
        self._given_up = False

    def _send(self, request: Counters) -> None:
        self._waiting[request.handle] = request
        self._unseen.append(request)
        if self._came is not None:
            self._came(request)

    def _watch(self, came: Callable[[Arrival], None] | None) -> None:
        """Do as the engine's inbox does."""
        self._came = came
        if came is not None:
            for request in self._unseen:
                came(request)

    def _give_up(self) -> None:
        self._given_up = True

    def _tick(self) -> bool:
        clock = self.clock
        self._admit()
        state = self._state()
        plan = self._policy(state) if state.sequences else Plan()
        if not plan.items:
            self.machine.rest()
            return False
        work = planned_work(state, plan)
        host_s, decode_s = self.machine.times(work, state, plan)
        ended = clock.now
        self._pass(host_s)
        began, status = clock.now, self._decode(state, plan, decode_s)
        # As the engine measures them, to the last bit: of equals that decides who is next.
        host_s, decode_s = began - ended, clock.now - began
        if status == DecodeStatus.OK:
            self._batch_limit = self._limits.n_batch
            gaps = self._advance(plan)
            self._measured = (as_measured(plan, work, decode_s, host_s, gaps),)
            self.memory, self._before = plan.memory, work
            self.machine.book(state, plan, host_s + decode_s)
        elif status == DecodeStatus.NO_KV_ROOM:
            self._make_room(plan)
        if self._on_tick is not None:
            self._on_tick(TracedTick(state, plan, decode_s, host_s, status))
        return True

    def _decode(self, state: SchedulerState, plan: Plan, decode_s: float) -> DecodeStatus:
        """Let a decode's time pass, unless it does not fit or is given up for a newcomer."""
        if not self._fits(plan):
            return DecodeStatus.NO_KV_ROOM
        self._given_up = False
        self._preemption.begin(abortable(state, plan, self._ledger.free_slots), self.clock.now)
        self._pass(decode_s, lambda: self._given_up)
        status = DecodeStatus.ABORTED if self._given_up else DecodeStatus.OK
        self._preemption.end(status)
        return status

    def _admit(self) -> None:
        self._unseen.clear()
        made_room, self._made_room = self._made_room, False
        if not self._waiting or (made_room and self._running):
            return
        state = self._admission()
        chosen = admit(state)
        places = () if chosen else gives_place(state)
        if places:
            for place in places:
                self._preempt(place)
            chosen = admit(self._admission())
        for key in chosen:
            request = self._running[key] = self._waiting.pop(key)
            request.reserved = request.cells
            self._ledger.take(key, request.reserved)
            for other in self._waiting.values():
                other.passed_over += other.arrived < request.arrived

    def _admission(self) -> AdmissionState:
        return AdmissionState(
            waiting=tuple(request.waiting() for request in self._waiting.values()),
            running=tuple(request.holder() for request in self._running.values()),
            free_slots=self._ledger.free_slots,
            free_cells=self._ledger.free_cells,
        )

    def _state(self) -> SchedulerState:
        settings, running = self._settings, self._running
        return SchedulerState(
            now=self.clock.now,
            tick=self.ticks,
            sequences=tuple(request.view() for request in running.values()),
            n_batch=self._batch_limit,
            free_cells=self._ledger.free_cells,
            tick_budget_s=settings.tick_budget_s,
            contract=settings.contract,
            traffic=settings.traffic,
            spare_rows=self._limits.n_slots - len(running) if settings.scratch_slots else 0,
            empty_cells=self._limits.n_ctx - sum([r.computed for r in running.values()]),
            before=self._before,
            measured=self._measured,
            memory=self.memory,
        )

    def _advance(self, plan: Plan) -> dict[int, float]:
        """Move every request on; whoever has caught up with itself gets a token. Return their gaps."""
        now, running = self.clock.now, self._running
        gaps: dict[int, float] = {}
        for item in plan.items:
            request = running[item.key]
            request.computed += item.n_tokens
            request.seen = None
            if request.computed == request.known:
                if request.token_times:
                    gaps[request.handle] = now - request.token_times[-1]
                self._give_token(request)
        return gaps

    def _give_token(self, request: Counters) -> None:
        request.has_token()
        request.passed_over = 0
        request.known += 1
        if request.known > request.reserved:
            request.reserved = request.known
            self._ledger.reserve(request.handle, request.known)
        if len(request.token_times) >= request.answer_tokens:
            self._end(request)

    def _end(self, request: Counters) -> None:
        del self._running[request.handle]
        self._ledger.release(request.handle)
        request.ended = True
        request.has_all()

    def _fits(self, plan: Plan) -> bool:
        used = sum(request.computed for request in self._running.values())
        return used + plan.n_tokens + plan.ballast <= self._limits.n_ctx

    def _preempt(self, key: int) -> None:
        request = self._waiting[key] = self._running.pop(key)
        self._ledger.release(key)
        request.preempted, request.computed, request.seen = True, 0, None

    def _make_room(self, plan: Plan) -> None:
        """Do as the engine does when the cache is full."""
        relief = relieve(plan, tuple(request.view() for request in self._running.values()))
        if isinstance(relief, Shrink):
            self._batch_limit = relief.n_tokens
        elif isinstance(relief, Preempt):
            self._preempt(relief.key)
            self._made_room = True
        else:
            self._end(self._running[relief.key])
