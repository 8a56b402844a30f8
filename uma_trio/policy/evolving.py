"""Faster versions of `attrs.frozen` and `attrs.evolve`, because a tick creates many values."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from attrs import define, fields

__all__ = ["evolve", "value"]

if TYPE_CHECKING:
    from attrs import evolve as evolve
    from attrs import frozen as value
else:

    def value(kind: type) -> type:
        """Decorate a class as `attrs.frozen` does, but that only the type checker holds it to that.

        Values of 15 fields are then made in a quarter of the time (0.26 us for 1.04, attrs 25 on
        Python 3.11), since their fields are stored without a call for each.
        """
        return define(kind, unsafe_hash=True)

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
