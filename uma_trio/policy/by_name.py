"""Find a policy by name: a built-in one, or another package's entry point.

Stages to leave out may follow the name, for comparison: ``deadline,-stairs,-bandwidth``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from uma_trio.policy.baseline import baseline
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import Policy, PolicyError
from uma_trio.words import nearest

ENTRY_POINT_GROUP = "uma_trio.policies"

BUILT_IN: dict[str, Policy] = {"baseline": baseline, "deadline": deadline}


def find_policy(spec: str) -> Policy:
    """Return the policy that `spec` names, without the stages that it leaves out.

    Raises :class:`PolicyError`, which lists the known names.
    """
    name, *left_out = (part.strip() for part in spec.split(","))
    policy = _named(name)
    if not left_out:
        return policy
    without: Callable[..., Policy] | None = getattr(policy, "without", None)
    if without is None:
        raise PolicyError(f"the policy {name!r} has no parts that could be left out")
    for part in left_out:
        if not part.startswith("-"):
            raise PolicyError(f"{part!r} says nothing; write {name},-PART to leave a part out")
    return without(*(part.removeprefix("-").strip() for part in left_out))


def _named(name: str) -> Policy:
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found:
        if entry.name == name:
            return _loaded(entry)
    known = sorted({*BUILT_IN, *(entry.name for entry in found)})
    hint = nearest(name, known)
    raise PolicyError(f"no policy is called {name!r}{hint}; there are: {', '.join(known)}")


def _loaded(entry: EntryPoint) -> Policy:
    try:
        policy: Policy = entry.load()
    except Exception as error:  # another package's code runs here
        why = f"{type(error).__name__}: {error}"
        raise PolicyError(f"{entry.value}, the policy {entry.name!r}, fails: {why}") from error
    return policy
