"""What the engine tells its metrics: each tick in figures, and who is there after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from attrs import frozen

from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import Choice
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.accounting import planned_work
from uma_trio.policy.contract.limit import alone_s, room_alone
from uma_trio.policy.cost import Work
from uma_trio.policy.plan import UNGUARDED, Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.telemetry.metrics import Metrics
from uma_trio.telemetry.promise import NO_PROMISE, Promise


@frozen
class Job:
    """One tick between its steps: its plan and what it was made from, and whose rows come back.

    `choice` gives these their tokens.
    """

    state: SchedulerState
    plan: Plan
    rows: tuple[Sequence, ...]
    choice: Choice

    @property
    def n_tokens(self) -> int:
        """How many tokens it computes, ballast included."""
        return self.plan.n_tokens + self.plan.ballast

    @cached_property
    def work(self) -> Work:
        """What of it costs time."""
        return planned_work(self.state, self.plan)


@frozen
class Done:
    """A tick that was computed until `at`: the tokens of its rows, and how long each part took."""

    job: Job
    tokens: list[int]
    at: float
    decode_s: float
    host_s: float
    choosing_s: float


def record(metrics: Metrics, done: Done, n_vocab: int) -> None:
    """Record a tick that was computed."""
    job, plan = done.job, done.job.plan
    decoders = sum(item.phase == "decode" for item in plan.items)
    lanes = {view.key: view.lane for view in job.state.sequences}
    lane_tokens: Counter[str] = Counter()
    for item in plan.items:
        lane_tokens[lanes[item.key]] += item.n_tokens
    metrics.tick(
        decode_tokens=decoders,
        prefill_tokens=plan.n_tokens - decoders,
        decode_s=done.decode_s,
        host_s=done.host_s,
        sampling_s=done.choosing_s,
        rows=len(job.rows),
        rows_in_place=sum(sequence.sampler.in_place(n_vocab) for sequence in job.rows),
        lane_tokens=lane_tokens,
        budget_target=plan.memory.target_tokens if plan.limit == UNGUARDED else None,
    )
    metrics.promise.tick(promise(job), done.decode_s + done.host_s)


def promise(job: Job) -> Promise:
    """Put what the plan promised into the words of the metrics."""
    state, plan, guard = job.state, job.plan, job.plan.memory.guard
    cost = plan.memory.cost
    if cost is None:
        return NO_PROMISE
    prompts = {view.key for view in state.sequences if not view.decoding and view.credit > 0}
    deepest = max(state.protected, key=lambda view: view.computed, default=None)
    return Promise(
        limit_s=plan.limit.seconds,
        solo_s=plan.limit.solo_s,
        alone_s=alone_s(cost, [deepest], room_alone(state, 1)) if deepest else 0.0,
        predicted_s=plan.predicted_s,
        between_s=cost.between_s(job.work),
        moved_bytes=plan.moved_bytes,
        tokens=plan.n_tokens,
        ballast=plan.ballast,
        held_back=sum(skip.key in prompts for skip in plan.skipped),
        floor_grants=guard.floor_grants,
        infeasible=guard.infeasible,
        background_share=guard.share,
        bmt_budget=state.contract.bmt_budget or 0.0,
        jitter=guard.jitter,
        cost=cost,
    )


def publish_load(metrics: Metrics, registry: Registry) -> None:
    """Publish who runs, who waits, and how full the KV cache is."""
    running = registry.running.values()
    metrics.load(
        running=len(registry.running),
        waiting=len(registry.waiting),
        parked=sum(sequence.credit <= 0 for sequence in running),
        cells_used=sum(sequence.computed for sequence in running),
        cells_reserved=registry.ledger.reserved_cells,
        active=_by_lane(running),
        queued=_by_lane(registry.waiting.values()),
    )


def _by_lane(sequences: Iterable[Sequence]) -> dict[str, int]:
    return Counter(sequence.lane for sequence in sequences)
