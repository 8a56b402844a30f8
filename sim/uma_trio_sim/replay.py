"""Plan recorded ticks again and compare the plans.

A policy is a pure function, so a trace can be checked: the same state must give the same plan. If
it does not, the policy has changed, or it uses something besides its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from uma_trio.policy.baseline import baseline
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick, plain


@frozen
class Difference:
    """The first difference: the tick, the place in the plan, and both values."""

    tick: int
    where: str
    recorded: str
    replayed: str


@frozen
class Replayed:
    """The result of a replay. `missing` ticks are not in the trace, no fault of the plans."""

    ticks: int
    missing: int
    first: Difference | None


def replay(policy: Policy, ticks: Iterable[TracedTick], *, work_only: bool = False) -> Replayed:
    """Run `policy` on each state, up to the first plan that differs from the recorded one.

    With `work_only` plans are compared by their tokens, without reasons and limits, which differ in
    every tick of another policy. If the policy raises, the baseline's plan is compared, as in the
    engine.
    """
    n = missing = 0
    before: int | None = None
    for traced in ticks:
        n += 1
        if before is not None:
            missing += max(0, traced.state.tick - before - 1)
        before = traced.state.tick
        answer = _compared(policy, traced, _work if work_only else _all)
        if answer is not None:
            return Replayed(n, missing, Difference(traced.state.tick, *answer))
    return Replayed(n, missing, None)


def _all(plan: Plan) -> Plan:
    return plan


def _work(plan: Plan) -> Plan:
    items = tuple(evolve(item, reason="") for item in plan.items)
    return Plan(items, ballast=plan.ballast, extra_rows=plan.extra_rows)


def _compared(
    policy: Policy, traced: TracedTick, part: Callable[[Plan], Plan]
) -> tuple[str, str, str] | None:
    """Return where its plan begins to differ, what was recorded, and what comes out."""
    try:
        plan = part(_as_computed(traced, policy(traced.state)))
    except Exception as error:  # another package's code may run here
        if part(baseline(traced.state)) == part(traced.plan):
            return None
        return "plan", "a plan", f"a failure ({type(error).__name__}: {error})"
    recorded = part(traced.plan)
    if plan == recorded:
        return None
    found = _difference(plain(recorded), plain(plan), "plan")
    # Equal in print and yet not equal: a value that is not equal to itself.
    return found or ("plan", "a value", "not a number")


def _as_computed(traced: TracedTick, plan: Plan) -> Plan:
    """Return `plan` with the row that the engine adds to the last token of a prompt that is alone.

    Where attention sums one row in another order than two (docs/explained/memory.md), and only there.
    """
    if traced.plan.ballast != 1 or plan.ballast or plan.n_tokens != 1:
        return plan
    return plan if traced.state.views[plan.items[0].key].started else evolve(plan, ballast=1)


def _difference(recorded: Any, replayed: Any, path: str) -> tuple[str, str, str] | None:
    """Return where two plain values begin to differ, and what stands there."""
    if recorded == replayed:
        return None
    if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        for key in [*recorded, *(key for key in replayed if key not in recorded)]:
            if key not in recorded or key not in replayed:
                return f"{path}.{key}", _show(recorded.get(key)), _show(replayed.get(key))
            if found := _difference(recorded[key], replayed[key], f"{path}.{key}"):
                return found
    elif isinstance(recorded, list | tuple) and isinstance(replayed, list | tuple):
        for i, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            if found := _difference(one, other, f"{path}[{i}]"):
                return found
        return f"{path}, how many", str(len(recorded)), str(len(replayed))
    return path, _show(recorded), _show(replayed)


def _show(value: Any) -> str:
    return "nothing" if value is None else repr(value)
