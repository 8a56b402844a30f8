"""`attrs.evolve`, in two thirds of its time: each tick a policy makes a dozen values anew."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from attrs import fields

if TYPE_CHECKING:
    from attrs import evolve as evolve
else:

    def evolve(value: Any, **changes: Any) -> Any:
        """Return `value` with `changes`.

        For classes of two fields or more, all of which are arguments of the class, in their order:
        none with `init=False`, `kw_only` or an alias. Others fail, or worse.
        """
        places, fields_of = _layout(value.__class__)
        values = list(fields_of(value))
        for name, changed in changes.items():
            values[places[name]] = changed
        return value.__class__(*values)


@cache
def _layout(kind: type) -> tuple[dict[str, int], attrgetter[tuple[Any, ...]]]:
    names = [field.name for field in fields(kind)]
    return {name: place for place, name in enumerate(names)}, attrgetter(*names)
