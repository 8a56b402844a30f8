"""What the policy sees and makes of it: the state of the next tick, its plan, its batch.

The planner keeps what passes from one plan to the next: the policy's memory, and the ticks that it
knows nothing of yet. A plan is made when a tick is due or, where a GPU computes, beside the tick
before it (:mod:`uma_trio.engine.ahead`); that one is used if everybody is where it said.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered

from attrs import evolve, field, frozen

from uma_trio.backend.base import Backend, Batch
from uma_trio.engine.ahead import Ahead
from uma_trio.engine.batch import BatchBuilder
from uma_trio.engine.figures import Done, Job
from uma_trio.engine.messages import InboxMessage
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import NOT_FINITE, Choice
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.accounting import as_measured
from uma_trio.policy.cost import CostModel
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import (
    NO_WORK,
    Contract,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
)
from uma_trio.policy.traffic import Traffic


@frozen
class EngineSettings:
    """What the engine hands to its policy unchanged.

    `scratch_slots` (0 or 1) of the backend's slots are kept for ballast rows. `cost` is the
    measured staircase and `traffic` what the model moves, if they are known.
    """

    tick_budget_s: float = 0.030
    start_tokens: int = 32
    contract: Contract = field(factory=Contract)
    scratch_slots: int = 0
    cost: CostModel | None = None
    traffic: Traffic | None = None


_Chosen = tuple[tuple[Sequence, ...], Choice]  # whose tokens, and how


class Planner:
    """Makes jobs. Every method is called on the engine's thread.

    `policy` must not raise, and its plans must have been checked.
    `scratch_slot` is where ballast rows go.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        registry: Registry,
        recovery: Recovery,
        settings: EngineSettings,
        scratch_slot: int,
    ) -> None:
        self._limits, self._n_vocab = backend.limits, backend.model.n_vocab
        self._batch, self._spare_batch = backend.batch, Batch(backend.batch.capacity)
        self._policy = policy
        self._registry = registry
        self._recovery = recovery
        self._settings = settings
        self._builder = BatchBuilder(backend.limits.n_ctx, scratch_slot)
        self._ends = frozenset(backend.vocabulary.end_tokens) | {NOT_FINITE}
        self._no_choice: _Chosen = ((), Choice((), self._n_vocab))
        self._choice: _Chosen = self._no_choice
        self._measured: tuple[MeasuredTick, ...] = ()  # what the memory knows nothing of yet
        self._before = NO_WORK
        self._ahead: Ahead | None = None
        self._ticks = 0
        self.memory = Memory(target_tokens=settings.start_tokens, cost=settings.cost)

    def plan(self, now: float) -> Job | None:
        """Return the next tick, in the backend's arrays; None if nobody has anything to compute.

        All that has happened must be booked.
        """
        state, plan = self._foreseen() or self._asked(self._state(now))
        if not plan.items:
            self._choice = self._no_choice  # which knows nobody who has ended
            return None
        return self._filled(state, plan, self._batch)

    def draw_up(self, job: Job, began: float) -> None:
        """Draw up what follows `job`, computed since `began`, unless somebody's answer ends there."""
        now = began + job.plan.predicted_s
        computed = {item.key: item.n_tokens for item in job.plan.items}
        views = []
        for key, sequence in self._registry.running.items():
            view = sequence.view_after(computed.get(key, 0), now)
            if view is None:
                return
            views.append(view)
        state, plan = self._asked(self._state_of(views, now, job))
        self._ahead = Ahead.behind(
            job, self._filled(state, plan, self._spare_batch), self._spare_batch
        )

    def take_ahead(self, tokens: Ordered[int], messages: Ordered[InboxMessage]) -> Job | None:
        """Take the tick that was drawn up, into the backend's arrays, if it comes next for sure.

        `tokens` were chosen for the rows of the tick before it, and are not booked yet. Nor are
        `messages` handled: to do both later is the same.
        """
        ahead = self._ahead
        if ahead is None or not self._as_trusted(ahead.job.state) or self._registry.to_be_asked:
            return None
        if not ahead.holds(tokens, self._ends, messages):
            return None
        self._ahead = None
        return ahead.load(self._batch, tokens)

    def learn(self, done: Done, gaps: Mapping[int, float]) -> None:
        """Note a tick that was computed, and the `gaps` that its streams saw, by sequence."""
        job = done.job
        tick = as_measured(job.plan, job.work, done.decode_s, done.host_s, gaps)
        self._measured = (*self._measured[len(job.state.measured) :], tick)
        self.memory, self._before = job.plan.memory, job.work

    def tried(self) -> None:
        """Note that one more tick was computed, or was meant to be."""
        self._ticks += 1

    def refined(self, cost: CostModel) -> None:
        """Go on with another model of the cost."""
        self.memory = evolve(self.memory, cost=cost)

    def _foreseen(self) -> tuple[SchedulerState, Plan] | None:
        """Return what was planned ahead, if everybody is where that said."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        state, running = ahead.job.state, self._registry.running
        if len(state.sequences) != len(running) or not self._as_trusted(state):
            return None
        for view in state.sequences:
            sequence = running.get(view.key)
            if sequence is None or not sequence.is_at(view):
                return None
        return state, ahead.job.plan

    def _as_trusted(self, state: SchedulerState) -> bool:
        """Whether decodes are trusted now as in `state`, and with everybody in company."""
        return state.n_batch == self._recovery.batch_limit and self._recovery.suspect is None

    def _state(self, now: float) -> SchedulerState:
        """Return what the next tick is planned from, when none is computed."""
        running, suspect = self._registry.running, self._recovery.suspect
        views = [s.view() for key, s in running.items() if suspect is None or key == suspect]
        return self._state_of(views, now)

    def _state_of(
        self, views: list[SequenceView], now: float, computing: Job | None = None
    ) -> SchedulerState:
        """Return the state with these sequences, after the tick that is `computing`."""
        running, ledger = self._registry.running, self._registry.ledger
        tick, before, measured, memory = self._ticks, self._before, self._measured, self.memory
        used = sum([sequence.computed for sequence in running.values()])
        if computing is not None:
            plan = computing.plan
            tick, before, memory = tick + 1, computing.work, plan.memory
            measured = measured[len(computing.state.measured) :]
            used += plan.n_tokens
        return SchedulerState(
            now=now,
            tick=tick,
            sequences=tuple(views),
            n_batch=self._recovery.batch_limit,
            free_cells=ledger.free_cells,
            tick_budget_s=self._settings.tick_budget_s,
            contract=self._settings.contract,
            traffic=self._settings.traffic,
            n_rows=self._limits.n_slots,
            # Every slot may ask for a row; those that do not can be asked for by ballast.
            spare_rows=self._limits.n_slots - len(running) if self._settings.scratch_slots else 0,
            empty_cells=self._limits.n_ctx - used,
            before=before,
            measured=measured,
            ahead=computing is not None,
            memory=memory,
        )

    def _asked(self, state: SchedulerState) -> tuple[SchedulerState, Plan]:
        """Return the state with what the policy makes of it."""
        if not state.sequences:
            return state, Plan(memory=state.memory)
        return state, self._policy(state)

    def _filled(self, state: SchedulerState, plan: Plan, batch: Batch) -> Job:
        """Return the tick of `plan`, and write it into `batch`."""
        running, views = self._registry.running, state.views
        shares = [(running[item.key], views[item.key], item.n_tokens) for item in plan.items]
        rows = self._builder.fill(batch, shares, plan.ballast, extra_rows=plan.extra_rows)
        if rows != self._choice[0]:
            self._choice = rows, Choice([s.sampler for s in rows], self._n_vocab)
        return Job(state, plan, *self._choice)
