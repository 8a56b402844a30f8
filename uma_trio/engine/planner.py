"""From the registry to the next :class:`Tick`: the policy's state, its plan, the chunks, the batch.

The planner keeps the policy's memory and the measured ticks that the policy has not seen yet. A
tick is planned when it is due or, where decodes overlap, prepared while the tick before it is
computed (:mod:`uma_trio.engine.batch`). A prepared plan is used if every sequence is where it
was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from functools import partial
from itertools import takewhile

from attrs import field, frozen

from uma_trio.backend.base import Backend, Batch
from uma_trio.engine.batch import BatchBuilder, PreparedTick
from uma_trio.engine.chunk import Chunk, Describe, Tick, TickResult
from uma_trio.engine.messages import InboxMessage
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import AT_ONCE, Masks, TickSampler
from uma_trio.engine.sampling.logprobs import Describer
from uma_trio.engine.sequences import Sequence, foreseen, same_place
from uma_trio.machine.background import EARLY_S
from uma_trio.machine.work import CAREFUL, PART_S, Claim
from uma_trio.policy.accounting import as_measured
from uma_trio.policy.cost import CostModel, Traffic, Work
from uma_trio.policy.deadline.shape import MOST_BALLAST
from uma_trio.policy.deadline.slack import alone_s, is_read, margin, reach_of, step_s
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import Path
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.prefix import Copying
from uma_trio.policy.state import (
    NO_WORK,
    Contract,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
)


@frozen
class EngineSettings:
    """The settings of an engine, constant for its whole life.

    `tick_budget_s` and `contract` are passed to the policy. `drafts` enables speculative decoding
    where the backend has rows to verify drafts. `scratch_slots` (0 or 1) of the backend's slots are
    reserved for ballast rows. `cost` is the measured staircase and `traffic` describes the bytes
    that the model moves; None if unknown. `prefix_bytes` is the budget of saved pages; 0 disables
    the prefix cache. Pages of a session are pinned for `session_ttl_s`.
    """

    tick_budget_s: float = 0.030
    contract: Contract = field(factory=Contract)
    scratch_slots: int = 0
    cost: CostModel | None = None
    traffic: Traffic | None = None
    prefix_bytes: int = 0
    session_ttl_s: float = 300.0
    drafts: bool = True
    copying: Copying | None = None  # None: not measured

    @property
    def keeps_high_water(self) -> bool:
        """Whether a change of the KV high-water mark makes ticks slow, by what was measured."""
        return self.cost is not None and self.cost.recapture_s > 0


class Planner:
    """Makes ticks. Every method is called on the engine's thread.

    `policy` must not raise, and its plans must have been checked. While the engine is `in_debt`, ticks may not be aborted.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        registry: Registry,
        recovery: Recovery,
        settings: EngineSettings,
        masks: Masks,
        in_debt: Callable[[], bool] = bool,
    ) -> None:
        self._limits, self._n_vocab = backend.limits, backend.model.n_vocab
        self._interruptible, self._in_debt = backend.traits.interruptible, in_debt
        self._longest_part = backend.traits.longest_part
        self._batch, self._spare_batch = backend.batch, Batch(backend.batch.capacity)
        self._policy = policy
        self._stream_of = backend.kv_stream
        self._registry = registry
        self._recovery = recovery
        self._settings = settings
        self._builder = BatchBuilder(backend.limits.n_ctx, registry.cells.scratch_slot)
        # A sequence that sits out computes its last token again, which takes a cache that can go back.
        self._masks = masks if backend.limits.can_go_back else AT_ONCE
        self._sampling = self._compiled(())
        self._measured: tuple[MeasuredTick, ...] = ()  # what the memory knows nothing of yet
        self._charges: tuple[tuple[int, float], ...] = ()  # nor of these
        self._before = NO_WORK
        self._prepared: PreparedTick | None = None
        # Describes the tokens of prompts, with so many alternatives each.
        self._describer: Describer | None = None
        self._described_tops: tuple[int, ...] = ()
        self._ticks = 0
        self.most_s = self._due_at = math.inf
        self.memory = Memory(cost=settings.cost)

    def claim(self, now: float) -> Claim:
        """Return what there is to compute, for a choice among models. All outcomes must be committed."""
        registry = self._registry
        views = [s.view for key, s in registry.running.items() if key not in registry.absent]
        readers = [view for view in views if is_read(view, now)]
        waiting = registry.waiting.values()
        unread = [view.lane for view in views if view.credit > 0 and not view.protected]
        lanes = {*unread, *[sequence.lane for sequence in waiting]}
        least_s = self.least_s
        due_at, takes_s = self._due(readers, now)
        self._due_at = due_at
        reach_s, load = self._lead(readers, takes_s, now)
        return Claim(
            due_at,
            takes_s,
            has_work=bool(lanes),
            least_s=least_s,
            wants_s=max(least_s, self._wants_s(views)),
            reach_s=reach_s - CAREFUL * takes_s - EARLY_S,
            load=load,
            kind="interactive"
            if any(map(_awaits_first, views))
            else ("background" if lanes == {"background"} else "answer"),
        )

    @property
    def least_s(self) -> float:
        """The predicted seconds of the smallest part of a tick; 0 without a cost model."""
        cost = self.memory.cost
        return 0.0 if cost is None else cost.seconds(Work(1)) * self._longest_part

    def _wants_s(self, views: Ordered[SequenceView]) -> float:
        cost = self.memory.cost
        if cost is None or self._longest_part < 1:
            return 0.0
        unread = [view for view in views if view.credit > 0 and not view.protected]
        demand = sum([view.pending - view.drafted for view in unread])
        n = min(demand, cost.plateau(self._recovery.batch_limit))
        return margin(cost) * cost.seconds(self._deep(n)) if n else 0.0

    def _lead(
        self, readers: Ordered[SequenceView], takes_s: float, now: float
    ) -> tuple[float, float]:
        contract, reach_s, least_s = self._settings.contract, math.inf, math.inf
        for view in readers:
            ahead_s = 0.0 if view.shown_at is None else view.shown_at - now
            step = step_s(view, contract, takes_s)
            reach_s, least_s = (
                min(reach_s, reach_of(view, contract, ahead_s, step)),
                min(least_s, step),
            )
        return reach_s, takes_s / least_s if least_s else 0.0  # 0 where nothing was measured

    def spare_s(self, now: float) -> float:
        """Return how long the next tick may wait before a token that is read is late; infinite without readers."""
        cost = self.memory.cost
        due_at, takes_s = self._due(self._readers(now), now)
        # What is too careful here is no loss: it becomes a lead of the reader, where tokens are shown by `steps`.
        careful = CAREFUL if cost is None else max(CAREFUL, margin(cost))
        return due_at - now - EARLY_S - careful * takes_s

    def steps(self, now: float) -> dict[int, float]:
        """Return how many seconds after one another tokens of the streams that are read are due, by key."""
        readers, cost, contract = self._readers(now), self.memory.cost, self._settings.contract
        takes_s = alone_s(cost, readers, 0) if cost is not None and readers else 0.0
        return {view.key: step_s(view, contract, takes_s) for view in readers}

    def _readers(self, now: float) -> list[SequenceView]:
        running, absent = self._registry.running, self._registry.absent
        views = [s.view for key, s in running.items() if key not in absent]
        return [view for view in views if is_read(view, now)]

    def _due(self, readers: Ordered[SequenceView], now: float) -> tuple[float, float]:
        cost, contract = self.memory.cost, self._settings.contract
        takes_s = alone_s(cost, readers, 0) if cost is not None and readers else 0.0
        dues = [
            (now if v.shown_at is None else v.shown_at) + step_s(v, contract, takes_s)
            for v in readers
        ]
        return min(dues, default=math.inf), takes_s

    def limit(self, seconds: float) -> None:
        """Let ticks have so few tokens that they take at most so long, where that is possible.

        Of ticks that pause no part takes longer than :data:`PART_S` then.
        """
        if self._longest_part < 1 and seconds < math.inf:
            seconds = max(seconds, PART_S / self._longest_part)
        self.most_s = seconds

    @property
    def _n_batch(self) -> int:
        most, cost = self._recovery.batch_limit, self.memory.cost
        if cost is None or self.most_s == math.inf:
            return most
        least, seconds = max(1, min(most, len(self._registry.running))), self.most_s / margin(cost)
        sizes = [most, *[n for n in reversed(cost.sizes) if least < n < most]]
        return next((n for n in sizes if cost.seconds(self._deep(n)) <= seconds), least)

    def _deep(self, n: int) -> Work:
        running, absent = self._registry.running, self._registry.absent
        depths = [s.view.computed for key, s in running.items() if key not in absent]
        return Work(n, 1, n * max(depths, default=0), sum(depths))

    def plan(self, now: float) -> Tick | None:
        """Return the next tick, in the backend's arrays; None if there is nothing to compute.

        All outcomes must be committed.
        """
        state, plan = self._still_valid() or self._asked(self._state(now))
        if not plan.items:
            self._sampling = self._compiled(())  # holds no ended sampler
            return None
        return self._filled(state, plan, self._batch)

    def prepare(self, computing: Tick, began: float) -> None:
        """Plan and batch the tick after `computing`, which has run since `began`.

        Nothing is prepared if an answer certainly ends in `computing`, or if a sequence's position
        cannot be predicted.
        """
        now = began + computing.plan.predicted_s
        chunks = {chunk.key: chunk for chunk in computing.chunks}
        views = []
        absent, playout_s = self._registry.absent, self._settings.contract.playout_s
        for key, sequence in self._registry.running.items():
            if key in absent:
                continue
            pace = computing.plan.paces.get(key, 0.0)
            view = foreseen(sequence, chunks.get(key), now, pace, playout_s)
            if view is None:
                return
            views.append(view)
        state, plan = self._asked(self._state_of(views, now, computing))
        tick = self._filled(state, plan, self._spare_batch)
        self._prepared = PreparedTick.behind(computing, tick, self._spare_batch)

    def foresee_masks(self, computing: Tick, *, elsewhere: bool) -> None:
        """Start computing the masks that the tokens of `computing` may need.

        Only those that other processes find, if `elsewhere`: the backend needs this one's cores.
        """
        running = self._registry.running
        for chunk in computing.chunks:
            if chunk.n_rows and chunk.key in running:
                running[chunk.key].sampler.foresee_mask(self._masks, elsewhere=elsewhere)

    @property
    def has_prepared(self) -> bool:
        """Whether a prepared tick exists."""
        return self._prepared is not None

    def take_prepared(self, completed: TickResult, messages: Ordered[InboxMessage]) -> Tick | None:
        """Take the prepared tick into the backend's arrays, if it comes next for sure.

        `completed` is the tick before it, which is not committed yet. Nor are `messages` handled:
        to do both later is the same.
        """
        prepared = self._prepared
        if prepared is None or not self._as_trusted(prepared.tick.state):
            return None
        if self._registry.may_admit(completed.at) or self._registry.cells.blocked:
            return None
        if not self._for_all(prepared.tick.state):
            return None
        if not prepared.follows(completed.outcomes, self._registry.running, messages):
            return None
        self._prepared = None
        return prepared.load(self._batch, completed)

    def learn(self, completed: TickResult, itl_s: Mapping[int, float], *, disturbed: bool) -> None:
        """Note a computed tick, and the inter-token latency of its streams, by key.

        What one that was `disturbed` took says nothing of others: it would make steps longer.
        """
        tick, decode_s, host_s = completed.tick, completed.decode_s, completed.host_s
        if disturbed and tick.plan.predicted_s > 0:
            decode_s = tick.plan.predicted_s
        said_s = None if completed.after_idle or disturbed else host_s
        measured = as_measured(tick.plan, tick.work, decode_s, said_s, itl_s)
        self._measured = (*self._measured[len(tick.state.measured) :], measured)
        self._charges = self._charges[len(tick.state.charges) :]
        self.memory, self._before = tick.plan.memory, tick.work

    def tried(self) -> None:
        """Note that one more tick was computed, or was meant to be."""
        self._ticks += 1

    def charge(self, spent_s: Mapping[Path, float]) -> None:
        """Charge the users on these paths for machine time between ticks, with the next plan.

        It is not stored in the policy's memory, because the memory of a prepared plan was made
        before.
        """
        self._charges += tuple([(node, s) for path, s in spent_s.items() for node in path])

    def refined(self, cost: CostModel) -> None:
        """Use another cost model from now on."""
        self.memory = evolve(self.memory, cost=cost)

    def _still_valid(self) -> tuple[SchedulerState, Plan] | None:
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        state, running = prepared.tick.state, self._registry.running
        if not (self._for_all(state) and self._as_trusted(state)):
            return None
        for planned in state.sequences:
            sequence = running.get(planned.key)
            if sequence is None or not same_place(sequence.view, planned):
                return None
        return state, prepared.tick.plan

    def _for_all(self, state: SchedulerState) -> bool:
        registry = self._registry
        return len(state.sequences) == len(registry.running) - len(registry.absent)

    def _as_trusted(self, state: SchedulerState) -> bool:
        return state.n_batch == self._n_batch and self._recovery.suspect is None

    def _state(self, now: float) -> SchedulerState:
        running, suspect = self._registry.running, self._recovery.suspect
        absent = self._registry.absent
        views = [
            s.view
            for key, s in running.items()
            if key not in absent and (suspect is None or key == suspect)
        ]
        return self._state_of(views, now)

    def _state_of(
        self, views: list[SequenceView], now: float, computing: Tick | None = None
    ) -> SchedulerState:
        running, cells = self._registry.running, self._registry.cells
        tick, before, memory = self._ticks, self._before, self.memory
        measured, charges = self._measured, self._charges
        used = sum([sequence.view.computed for sequence in running.values()]) - cells.shared
        spanned = cells.high_water
        held = sum([view.computed for view in views])
        asked = len(running)  # every sequence may ask for a row
        if max([view.scored for view in views], default=0):
            views, asked = _scored_in_turn(views, asked, self._limits.n_rows)
        if computing is not None:
            plan = computing.plan
            tick, before, memory = tick + 1, computing.work, plan.memory
            measured = measured[len(computing.state.measured) :]
            charges = charges[len(computing.state.charges) :]
            used += plan.n_tokens
            spanned += plan.n_tokens if spanned else 0
        return SchedulerState(
            now=now,
            tick=tick,
            sequences=tuple(views),
            n_batch=self._n_batch,
            free_cells=cells.free_cells,
            tick_budget_s=self._settings.tick_budget_s,
            contract=self._settings.contract,
            traffic=self._settings.traffic,
            n_rows=self._limits.n_rows,
            # Those that are left can be asked for by ballast.
            spare_rows=self._limits.n_rows - asked if self._settings.scratch_slots else 0,
            empty_cells=self._limits.n_ctx - used,
            high_water=spanned if spanned not in (0, held) else None,
            before=before,
            measured=measured,
            charges=charges,
            prepared=computing is not None,
            interruptible=self._interruptible and not self._in_debt(),
            first_tokens=self._registry.first_tokens.known,
            memory=memory,
            most_s=min(self.most_s, self._due_at - now) if self.most_s < math.inf else math.inf,
        )

    def _asked(self, state: SchedulerState) -> tuple[SchedulerState, Plan]:
        if not state.sequences:
            return state, Plan(memory=state.memory)
        plan = self._policy(state)
        return state, evolve(plan, ballast=1) if self._is_lone_row(state, plan) else plan

    def _is_lone_row(self, state: SchedulerState, plan: Plan) -> bool:
        """Whether the batch is the last token of a prompt alone, which another row makes equal to longer ones.

        One row alone is summed in another order than two and more (docs/explained/memory.md).
        """
        if (
            plan.n_tokens != 1
            or plan.ballast
            or not (self._limits.whole_cache and state.spare_rows)
        ):
            return False
        return not state.views[plan.items[0].key].started

    def _filled(self, state: SchedulerState, plan: Plan, batch: Batch) -> Tick:
        running = self._registry.running
        # llama.cpp computes neighbouring streams together only where their rows are in this order.
        items: Ordered[PlanItem] = plan.items
        if self._limits.n_streams > 1:
            items = sorted(items, key=lambda item: self._stream_of(running[item.key].slot))
        chunks = _chunks(state, items, running)
        self._builder.fill(
            batch,
            chunks,
            self._registry.running,
            extra_rows=plan.extra_rows,
            ballast=plan.ballast,
        )
        n_scored, describe = self._scores(chunks)
        sampled = _sampled(chunks)
        if sampled != self._sampling.keys:
            self._sampling = self._compiled(sampled)
        sampling = self._sampling
        n_tokens = plan.n_tokens + plan.ballast
        return Tick(
            state,
            plan,
            chunks,
            sampling.sampler,
            sampling.in_place,
            n_tokens,
            len(sampled),
            n_scored=n_scored,
            describe=describe,
        )

    def _scores(self, chunks: Ordered[Chunk]) -> tuple[int, Describe | None]:
        tokens: list[int] = []
        tops: list[int] = []
        for chunk in takewhile(_is_scored, chunks):
            sequence, first = self._registry.running[chunk.key], chunk.start + 1
            tokens += sequence.tokens[first : first + chunk.n_scored].tolist()
            tops += [sequence.submit.params.prompt_logprobs or 0] * chunk.n_scored
        if not tops:
            self._described_tops, self._describer = (), None
            return 0, None
        if self._describer is None or tuple(tops) != self._described_tops:
            self._described_tops = tuple(tops)
            self._describer = Describer(dict(enumerate(tops)), self._n_vocab)
        return len(tops), partial(self._describer, tokens=tokens)

    def _compiled(self, keys: tuple[int, ...]) -> _Compiled:
        samplers = [self._registry.running[key].sampler for key in keys]
        in_place = sum([sampler.in_place(self._n_vocab) for sampler in samplers])
        return _Compiled(keys, TickSampler(samplers, self._n_vocab, self._masks), in_place)


def _chunks(
    state: SchedulerState, items: Ordered[PlanItem], running: Mapping[int, Sequence]
) -> tuple[Chunk, ...]:
    views, chunks, row = state.views, [], 0
    scored, scored_row = [], 0
    for item in items:
        key, n, n_drafts = item.key, item.n_tokens, item.n_drafts
        view = views[key]
        if view.scored and view.scoring:
            scored.append(Chunk(key, view.computed, n, scored_row, n_scored=n))
            scored_row += n
            continue
        if n_drafts:
            draft, n_rows = running[key].draft, view.rows(n, n_drafts)
            drafts = draft.tokens[:n_drafts]
            chunks.append(Chunk(key, view.computed, n, row, n_rows, drafts, draft.origin))
        else:
            n_rows = 1 if n == view.pending - view.drafted else 0
            chunks.append(Chunk(key, view.computed, n, row, n_rows))
        row += n_rows
    return (*scored, *chunks) if scored else tuple(chunks)


def _is_scored(chunk: Chunk) -> bool:
    return chunk.n_scored > 0


def _scored_in_turn(
    views: list[SequenceView], n_running: int, n_rows: int
) -> tuple[list[SequenceView], int]:
    """Return the views with no more pending of each prompt that is scored than there are rows for.

    With them comes how many rows all `n_running` sequences may ask for then, of `n_rows`. Rows that
    nobody needs for a token of its own, nor as ballast, are shared evenly.
    """
    n = sum([view.scoring for view in views])
    each = 1 + max(0, n_rows - n_running - MOST_BALLAST) // n if n else 0
    most = {v.key: min(v.scored - v.computed, each) for v in views if v.scoring}
    found = [evolve(v, pending=most[v.key]) if v.key in most else v for v in views]
    return found, n_running + sum(most.values()) - len(most)


def _sampled(chunks: tuple[Chunk, ...]) -> tuple[int, ...]:
    keys: list[int] = []
    for chunk in chunks:
        if chunk.n_rows == 1:
            keys.append(chunk.key)
        else:
            keys += [chunk.key] * chunk.n_rows
    return tuple(keys)


@frozen(eq=False)
class _Compiled:
    """How the rows of the sequences `keys` are sampled; `in_place` of them are never copied."""

    keys: tuple[int, ...]
    sampler: TickSampler
    in_place: int


def _awaits_first(view: SequenceView) -> bool:
    return view.read and view.credit > 0 and view.last_token_at is None
