"""What the metrics are given: each completed tick in figures, and who is there after it."""

from __future__ import annotations

from uma_trio.engine.registry import Registry
from uma_trio.engine.step import Completed, Tick
from uma_trio.lanes import LANES
from uma_trio.policy.contract.limit import alone_s, room_alone
from uma_trio.policy.plan import UNGUARDED
from uma_trio.policy.state import SequenceView
from uma_trio.telemetry.metrics import Metrics
from uma_trio.telemetry.promise import NO_PROMISE, Promise


def record(metrics: Metrics, completed: Completed) -> None:
    """Record a tick that was computed."""
    tick, plan, views = completed.tick, completed.tick.plan, completed.tick.state.views
    n_tokens = decoders = drafts = right = 0
    lane_tokens: dict[str, int] = dict.fromkeys(LANES, 0)
    for item in plan.items:
        n_tokens += item.n_tokens
        decoders += item.phase == "decode"
        drafts += item.n_drafts
        lane_tokens[views[item.key].lane] += item.n_tokens
    if drafts:
        right = sum([o.kept - o.step.n_tokens for o in completed.outcomes]) + drafts
    metrics.tick(
        decode_tokens=decoders + right,
        prefill_tokens=n_tokens - decoders - drafts,
        drafts=drafts,
        drafts_right=right,
        decode_s=completed.decode_s,
        host_s=completed.host_s,
        sampling_s=completed.sampling_s,
        rows=tick.n_rows,
        rows_in_place=tick.in_place,
        lane_tokens=lane_tokens,
        budget_target=plan.memory.target_tokens if plan.limit == UNGUARDED else None,
    )
    metrics.promise.tick(promise(tick), completed.decode_s + completed.host_s)


def promise(tick: Tick) -> Promise:
    """Put what the plan promised into the words of the metrics."""
    state, plan, guard = tick.state, tick.plan, tick.plan.memory.guard
    cost = plan.memory.cost
    if cost is None:
        return NO_PROMISE
    deepest = max(state.protected, key=lambda view: view.computed, default=None)
    return Promise(
        limit_s=plan.limit.seconds,
        solo_s=plan.limit.solo_s,
        alone_s=alone_s(cost, [deepest], room_alone(state, 1)) if deepest else 0.0,
        predicted_s=plan.predicted_s,
        between_s=cost.between_s(tick.work),
        moved_bytes=plan.moved_bytes,
        tokens=plan.n_tokens,
        ballast=plan.ballast,
        held_back=sum([_held_back(state.views.get(skip.key)) for skip in plan.skipped]),
        floor_grants=guard.floor_grants,
        infeasible=guard.infeasible,
        background_share=guard.share,
        bmt_budget=state.contract.bmt_budget or 0.0,
        noise=guard.noise,
        cost=cost,
    )


def publish_load(metrics: Metrics, registry: Registry) -> None:
    """Publish who runs, who waits, and how full the KV cache is."""
    if registry.prefix.on:
        metrics.prefix = registry.prefix.figures()
    active: dict[str, int] = dict.fromkeys(LANES, 0)
    queued, parked, cells = dict(active), 0, 0
    for sequence in registry.running.values():
        view = sequence.view
        active[view.lane] += 1
        parked += view.credit <= 0
        cells += view.computed
    for sequence in registry.waiting.values():
        queued[sequence.lane] += 1
    metrics.load(
        running=len(registry.running),
        waiting=len(registry.waiting),
        parked=parked,
        cells_used=cells - registry.kv.shared_cells,
        cells_reserved=registry.kv.reserved_cells,
        active=active,
        queued=queued,
    )


def _held_back(view: SequenceView | None) -> bool:
    """Whether one that got nothing is a prompt that could have been computed."""
    return view is not None and not view.decoding and view.credit > 0
