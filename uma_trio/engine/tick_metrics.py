"""What is recorded as metrics: each completed tick, and the load after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from uma_trio.engine.chunk import Tick, TickResult
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import Sequence
from uma_trio.observe import log
from uma_trio.observe.figures import NO_PROMISE, Promise
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.state import SequenceView
from uma_trio.words import LANES

TOLERANCE_S: Final = 0.001  # the resolution of timers


def record(metrics: Metrics, completed: TickResult, itl_s: Mapping[int, float]) -> None:
    """Record a tick that was computed, and the inter-token latency of its streams, by key."""
    tick, plan, views = completed.tick, completed.tick.plan, completed.tick.state.views
    drafts, wrong = _drafts(completed)
    n_tokens = decoders = n_drafts = longest = 0
    lane_tokens: dict[str, int] = dict.fromkeys(LANES, 0)
    for item in plan.items:
        n_tokens += item.n_tokens
        decoders += item.phase == "decode"
        n_drafts += item.n_drafts
        view = views[item.key]
        lane_tokens[view.lane] += item.n_tokens
        longest = max(longest, view.computed + item.n_tokens)
    for key, n in wrong.items():
        lane_tokens[views[key].lane] -= n
    metrics.tick(
        decode_tokens=decoders + sum([right for _, right in drafts.values()]),
        prefill_tokens=n_tokens - decoders - n_drafts,
        drafts=drafts,
        decode_s=completed.decode_s,
        host_s=completed.host_s,
        sampling_s=completed.sampling_s,
        late_masks=sum([outcome.late for outcome in completed.outcomes]),
        sequences=len(plan.items),
        drafted=len(wrong),
        longest=longest,
        rows=tick.n_rows,
        rows_in_place=tick.in_place,
        lane_tokens=lane_tokens,
    )
    longest_s = max(itl_s.values(), default=0.0)
    metrics.promised(promise(tick, longest_s), completed.decode_s + completed.host_s)


class Due(NamedTuple):
    """When a stream's next token is due, and when the previous one was sampled."""

    at: float
    last_token_at: float


def dues(running: Mapping[int, Sequence], completed: TickResult) -> list[Due]:
    """Return when the tokens of a tick were due, before its commit."""
    paces, found = completed.tick.plan.paces, []
    for outcome in completed.outcomes:
        pace = paces.get(outcome.chunk.key)
        if pace and outcome.tokens:
            view = running[outcome.chunk.key].view
            if view.shown_at is not None and view.last_token_at is not None:
                found.append(Due(view.shown_at + pace, view.last_token_at))
    return found


def count_late(metrics: Metrics, completed: TickResult, found: Iterable[Due]) -> None:
    """Count the tokens of a tick that were not computed when they were due, by cause."""
    at, plan = completed.at, completed.tick.plan
    began = at - completed.decode_s - completed.host_s
    for due in found:
        if due.at - at >= -TOLERANCE_S:
            continue
        if due.last_token_at < began - TOLERANCE_S:
            cause = "left_out"
        else:
            cause = "planned" if began + plan.predicted_s > due.at else "mispredicted"
        metrics.count("late_tokens_total", cause)


def _drafts(completed: TickResult) -> tuple[dict[str, tuple[int, int]], dict[int, int]]:
    by_source: dict[str, tuple[int, int]] = {}
    wrong: dict[int, int] = {}
    for outcome in completed.outcomes:
        chunk = outcome.chunk
        if chunk.drafts:
            n, right = by_source.get(chunk.origin.source, (0, 0))
            by_source[chunk.origin.source] = n + len(chunk.drafts), right + outcome.right
            wrong[chunk.key] = len(chunk.drafts) - outcome.right
    return by_source, wrong


def promise(tick: Tick, itl_s: float = 0.0) -> Promise:
    """Return the promise of a plan; `itl_s` is the longest inter-token latency of the tick."""
    state, plan, guard = tick.state, tick.plan, tick.plan.memory.guard
    cost, limit = plan.memory.cost, plan.limit
    if cost is None:
        return NO_PROMISE
    return Promise(
        limit_s=limit.seconds,
        step_s=limit.step_s,
        solo_s=limit.solo_s,
        predicted_s=plan.predicted_s,
        between_s=cost.between_s(tick.work),
        moved_bytes=plan.moved_bytes,
        tokens=plan.n_tokens,
        skipped=sum([_is_skipped_prompt(state.views.get(skip.key)) for skip in plan.skipped]),
        granted=limit.grant,
        infeasible=not guard.mixed and itl_s > state.contract.promised_cap * limit.solo_s > 0,
        background=guard.background,
        bmt_budget=state.contract.bmt_budget or 0.0,
        cost=cost,
    )


def publish_load(metrics: Metrics, registry: Registry) -> None:
    """Publish how many requests run and wait, and how full the KV cache is."""
    if (prefixes := registry.cells.figures()) is not None:
        metrics.prefix = prefixes
    views = [sequence.view for sequence in registry.running.values()]
    metrics.load(
        running=len(registry.running),
        waiting=len(registry.waiting),
        parked=sum([view.credit <= 0 for view in views]),
        cells_used=sum([view.computed for view in views]) - registry.cells.shared,
    )


def _is_skipped_prompt(view: SequenceView | None) -> bool:
    return view is not None and not view.decoding and view.credit > 0


class PolicyFailures:
    """Takes the exceptions of a policy on the engine's thread. Logs every 1st, 2nd, 4th, 8th, ..."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = log.get("engine")
        self._count = 0

    def __call__(self, error: Exception) -> None:
        """Note one failure."""
        self._metrics.count("irregular_ticks_total", "policy")
        self._count += 1
        if self._count & (self._count - 1) == 0:
            self._log.error(
                "the policy failed: the tick was planned by baseline",
                failures=self._count,
                why=f"{type(error).__name__}: {error}",
                fix="report it with this traceback, or choose another --policy",
                exc_info=error,
            )
