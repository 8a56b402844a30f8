"""A policy is a row of pure transformers; each adds, trims or refuses, and says why.

``policy(state) -> plan``: the same state gives the same plan, whoever runs it and whenever, so
that a tick can be explained and replayed. What a policy remembers travels in the plan's memory
and comes back in the next state. Other packages add policies through the entry point group
``uma_trio.policies``; see ``docs/SCHEDULER.md``.

A name may be followed by what to leave out, for comparison: ``contract,-stairs,-bandwidth``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points

from attrs import frozen

from uma_trio.policy.bandwidth import guard_bandwidth
from uma_trio.policy.budget import adapt_budget
from uma_trio.policy.decode import select_decoders, select_interactive
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fill import fill_within_limit
from uma_trio.policy.guard import keep_ledger, learn_cost, set_limit
from uma_trio.policy.parking import leave_out_parked
from uma_trio.policy.plan import Plan
from uma_trio.policy.prefill import fill_with_prefill
from uma_trio.policy.stairs import add_ballast, keep_shape
from uma_trio.policy.state import SchedulerState
from uma_trio.policy.tally import tally

Policy = Callable[[SchedulerState], Plan]
Transformer = Callable[[SchedulerState, Plan], Plan]

ENTRY_POINT_GROUP = "uma_trio.policies"


class PolicyError(Exception):
    """No such policy, or a plan that breaks a rule. The message is for the operator."""


def compose(*transformers: Transformer) -> Policy:
    """Return the policy that applies `transformers` in order, starting from an empty plan."""

    def policy(state: SchedulerState) -> Plan:
        plan = Plan(memory=state.memory)
        for transformer in transformers:
            plan = transformer(state, plan)
        return plan

    return policy


@frozen
class Pipeline:
    """A policy whose transformers have names, so that it can be had without one of them.

    `needed` are those without which there is no plan at all. Without `lanes` every request is
    an interactive one.
    """

    stages: Mapping[str, Transformer]
    needed: frozenset[str]
    lanes: bool = True

    def __call__(self, state: SchedulerState) -> Plan:
        """Return the plan of one tick."""
        if not self.lanes:
            equal = tuple(evolve(view, lane="interactive") for view in state.sequences)
            state = evolve(state, sequences=equal)
        if state.spare_rows and "stairs" not in self.stages:
            state = evolve(
                state, spare_rows=0
            )  # or the streams alone would be held against ballast
        plan = Plan(memory=state.memory)
        for transformer in self.stages.values():
            plan = transformer(state, plan)
        return plan

    @property
    def optional(self) -> tuple[str, ...]:
        """What it can be had without."""
        return (LANES, *(name for name in self.stages if name not in self.needed))

    def without(self, *names: str) -> Pipeline:
        """Return it with some of the `optional` stages left out. Raises :class:`PolicyError`."""
        known = ", ".join(self.optional)
        for name in names:
            if name in self.needed:
                raise PolicyError(f"{name!r} is needed for any plan; what can be left out: {known}")
            if name not in self.optional:
                hint = _hint(name, self.optional)
                raise PolicyError(f"it has no part {name!r}{hint}; what can be left out: {known}")
            if names.count(name) > 1:
                raise PolicyError(f"{name!r} is left out twice; once is enough")
        stages = {name: stage for name, stage in self.stages.items() if name not in names}
        return evolve(self, stages=stages, lanes=self.lanes and LANES not in names)


LANES = "lanes"

baseline = Pipeline(
    stages={
        "parking": leave_out_parked,
        "budget": adapt_budget,
        "decode": select_decoders,
        "prefill": fill_with_prefill,
    },
    needed=frozenset({"parking", "decode", "prefill"}),
)
"""Decode first, a token each; what is left of an adaptive budget goes to prompts."""

contract = Pipeline(
    stages={
        "parking": leave_out_parked,
        "learning": learn_cost,
        "ledger": keep_ledger,
        "decode": select_interactive,
        "guard": set_limit,
        "fill": fill_within_limit,
        "bandwidth": guard_bandwidth,
        "shape": keep_shape,
        "stairs": add_ballast,
        "tally": tally,
    },
    needed=frozenset({"parking", "decode", "fill", "tally"}),
)
"""The latency contract: interactive streams first, the rest as their patience allows."""

BUILT_IN: dict[str, Pipeline] = {"baseline": baseline, "contract": contract}


def find_policy(spec: str) -> Policy:
    """Return the policy of that name, ours or another package's, without what `spec` leaves out.

    Raises :class:`PolicyError`, listing what there is.
    """
    name, *left_out = (part.strip() for part in spec.split(","))
    policy = _named(name)
    if not left_out:
        return policy
    if not isinstance(policy, Pipeline):
        raise PolicyError(f"the policy {name!r} has no parts that could be left out")
    for part in left_out:
        if not part.startswith("-"):
            raise PolicyError(f"{part!r} says nothing; write {name},-PART to leave a part out")
    return policy.without(*(part.removeprefix("-").strip() for part in left_out))


def _named(name: str) -> Policy:
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found:
        if entry.name == name:
            return _loaded(entry)
    known = sorted({*BUILT_IN, *(entry.name for entry in found)})
    hint = _hint(name, known)
    raise PolicyError(f"no policy is called {name!r}{hint}; there are: {', '.join(known)}")


def _loaded(entry: EntryPoint) -> Policy:
    try:
        policy: Policy = entry.load()
    except Exception as error:  # another package's code runs here
        why = f"{type(error).__name__}: {error}"
        raise PolicyError(f"{entry.value}, the policy {entry.name!r}, fails: {why}") from error
    return policy


def _hint(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_plan(state: SchedulerState, plan: Plan) -> None:
    """Raise :class:`PolicyError` if `plan` breaks a rule that the engine relies on.

    At most one item a sequence; every item's sequence exists, has credit and has that many
    tokens pending; the sum is within ``n_batch``. The engine checks every plan with it, since
    a policy may come from another package.
    """
    views = {view.key: view for view in state.sequences}
    total = unread = 0
    for item in plan.items:
        view = views.pop(item.key, None)
        if view is None:
            raise PolicyError(f"sequence {item.key} is planned twice, or does not exist")
        if view.credit <= 0:
            raise PolicyError(f"sequence {item.key} is planned, but its reader is behind")
        if not 0 < item.n_tokens <= view.pending:
            raise PolicyError(
                f"sequence {item.key} gets {item.n_tokens} tokens of {view.pending} pending"
            )
        total += item.n_tokens
        unread = item.n_tokens if item.n_tokens < view.pending else 0
    if not 0 <= plan.extra_rows <= unread:
        raise PolicyError(f"the plan asks for {plan.extra_rows} extra rows, and can for {unread}")
    if plan.ballast > state.spare_rows:
        raise PolicyError(f"the plan has {plan.ballast} ballast rows of {state.spare_rows}")
    total += plan.ballast
    if total > state.n_batch:
        raise PolicyError(f"the plan has {total} tokens, the batch holds {state.n_batch}")
