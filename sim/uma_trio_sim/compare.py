"""Compare policies: the same work on the same machine under each, seed by seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from attrs import frozen

from uma_trio.policy.baseline import baseline
from uma_trio.policy.pipeline import Policy, PolicyError, needs_cost
from uma_trio.policy.state import Contract
from uma_trio_sim.ablation import ablated
from uma_trio_sim.guesses import Texts
from uma_trio_sim.latency import median
from uma_trio_sim.machine import Profile
from uma_trio_sim.outcome import RunOutcome, together
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.workload import WORKLOADS, Application, play, sessions

ALONE = "no load"
"""The name of the case that has the watched applications without the others."""

Row = dict[str, str | float | int | None]


class NoWorkload(Exception):
    """There is no workload of that name; the message lists what there is."""


@frozen
class Case:
    """A policy at a latency cap, and whether the load is there at all."""

    name: str
    policy: Policy
    cap: float
    loaded: bool = True


def compare(
    workload: Sequence[Application],
    cases: Sequence[Case],
    profile: Profile,
    *,
    seconds: float,
    seeds: Sequence[int],
    guesses: Texts | None = None,
    each: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Yield a row of figures for each case; the runs of all seeds are taken together.

    With `guesses` that is what can be guessed of each answer; without, nobody guesses. `each` is called
    behind each run, of which there are as many as cases times seeds.

    Raises:
        PolicyError: a policy made a plan that breaks a rule.
    """
    alone_s = itl_alone_s(profile)
    for case in cases:
        runs = []
        for seed in seeds:
            runs.append(simulate(case, workload, profile, seconds, seed, guesses))
            each()
        yield {"case": case.name, "cap": case.cap, **together(runs).row(alone_s)}


def simulate(
    case: Case,
    workload: Sequence[Application],
    profile: Profile,
    seconds: float,
    seed: int,
    guesses: Texts | None = None,
) -> RunOutcome:
    """Run the applications for `seconds` of virtual time."""
    world = Simulation(
        case.policy,
        Contract(latency_cap=case.cap),
        profile=profile,
        seed=seed,
        guesses=guesses,
    )
    numbered = list(enumerate(workload, start=1))
    watched = [client for client, app in numbered if app.watched]
    load = [client for client, app in numbered if not app.watched]
    work = sessions(workload, seed, seconds)
    play(world, [session for session in work if case.loaded or session.client in watched])
    world.run(seconds)
    return RunOutcome.of(world, watched, load)


def cases(policies: Sequence[str], caps: Sequence[float]) -> list[Case]:
    """Return each policy at each cap, behind the first of them without load.

    A policy that plans without a cost model, as the baseline does, has no cap and is there once.

    Raises:
        PolicyError: there is no policy of a name.
    """
    found = [(spec, policy_of(spec)) for spec in policies]
    alone = [Case(ALONE, policy, caps[0], loaded=False) for _, policy in found[:1]]
    return alone + [
        Case(f"{spec} {cap:g}" if needs_cost(policy) else spec, policy, cap)
        for spec, policy in found
        for cap in (caps if needs_cost(policy) else caps[:1])
    ]


def itl_alone_s(profile: Profile) -> float:
    """Return the median inter-token latency, in seconds, of one stream alone on the machine."""
    world = Simulation(baseline, profile=profile)
    stream = world.submit(8, 100, client=1)
    world.run(1000.0)
    return median(stream.itl)


def policy_of(spec: str) -> Policy:
    """Return a policy by its name, without some stages as in ``deadline,-stairs``, or ``module:function``.

    A function may be a :class:`~uma_trio.policy.pipeline.Pipeline` or anything that makes a plan
    from a state. Modules are also looked for in the working directory.

    Raises:
        PolicyError: there is none.
    """
    if ":" not in spec:
        return ablated(spec)
    found = _object(spec, PolicyError)
    if not callable(found):
        raise PolicyError(f"{spec} is not a function that makes a plan from a state")
    policy: Policy = found
    return policy


def workload_of(spec: str) -> tuple[Application, ...]:
    """Return a workload by its name in ``WORKLOADS``, or ``module:name`` of a tuple of applications.

    Raises:
        NoWorkload: there is none.
    """
    if ":" not in spec:
        if spec not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise NoWorkload(f"no workload is called {spec!r}; there are {known}, or module:name")
        return WORKLOADS[spec]
    found = _object(spec, NoWorkload)
    try:
        applications = tuple(found)
    except TypeError:
        applications = ()
    if not applications or not all(isinstance(app, Application) for app in applications):
        raise NoWorkload(f"{spec} is not a sequence of uma_trio_sim.workload.Application")
    return applications


def _object(spec: str, failure: type[Exception]) -> Any:
    """Return what ``module:name`` names. Raises `failure` if there is none."""
    module, _, name = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # somebody else's code runs here
        raise failure(f"{spec}: {type(error).__name__}: {error}") from error
