"""Find a policy by name: a built-in one, or another package's entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

from uma_trio.policy.baseline import baseline
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import Policy, PolicyError
from uma_trio.words import nearest

ENTRY_POINT_GROUP = "uma_trio.policies"
BUILT_IN: dict[str, Policy] = {"baseline": baseline, "deadline": deadline}


def find_policy(name: str) -> Policy:
    """Return the policy of that name. Raises :class:`PolicyError`, which lists the known names."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found:
        if entry.name != name:
            continue
        try:
            policy: Policy = entry.load()
        except Exception as error:  # another package's code runs here
            why = f"{type(error).__name__}: {error}"
            raise PolicyError(f"{entry.value}, the policy {name!r}, fails: {why}") from error
        return policy
    known = sorted({*BUILT_IN, *(entry.name for entry in found)})
    hint = nearest(name, known)
    raise PolicyError(f"no policy is called {name!r}{hint}; there are: {', '.join(known)}")
