"""How much one operation of a template may do, found out before it is done.

An operation that runs in C holds the GIL until it ends, and no limit of time is looked at
meanwhile. Its work is the number of values that it visits, where a value that is reachable by
two ways is visited twice: two lists that were nested into each other forty times have 2^40.
So the operands are weighed first, and whatever would visit more than `MAX_WEIGHT` is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Final

from jinja2 import TemplateError

MAX_TEXT: Final = 4 << 20  # characters of any value; chat templates make a few thousand
MAX_ITEMS: Final = 100_000  # of any list; a request has at most 8192 messages
MAX_SORTED: Final = 10_000
MAX_WEIGHT: Final = 100_000  # comparing two such values takes 3 ms
MAX_INT_BITS: Final = 256
MAX_NUMERAL: Final = 400  # characters of a text that is read as a number
_MAX_DEPTH: Final = 200  # of containers; Python's own comparison ends near 1000
_CHARACTERS: Final = 64  # that are compared while one value is visited
_MAX_SEARCH: Final = 16 << 20  # characters compared by the worst search in a text
_SHORT: Final = 8  # a text to look for; as long as "</think>"
_CONTAINERS: Final[tuple[type, ...]] = (
    list,
    tuple,
    dict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class Runaway(TemplateError):
    """The template did more than it may: too long, too many steps, too large a value."""


def bounded(length: int) -> None:
    """Refuse a text longer than `MAX_TEXT`."""
    if length > MAX_TEXT:
        raise Runaway(f"a value gets longer than {MAX_TEXT:,} characters")


def few(length: int, most: int = MAX_ITEMS) -> None:
    """Refuse a list of more than `most` items."""
    if length > most:
        raise Runaway(f"a list gets longer than {most:,} items")


def weight_of(value: Any, most: int = MAX_WEIGHT) -> int | None:
    """Return how many values a walk through `value` visits; None if more than `most`.

    It is Python that other threads may interrupt, and it visits at most `most` values itself.
    """
    if not isinstance(value, _CONTAINERS):
        weight = 1 + (len(value) // _CHARACTERS if isinstance(value, str) else 0)
        return weight if weight <= most else None
    weight = 0
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            weight += 1
            held: Any = one
            if isinstance(one, str):
                weight += len(one) // _CHARACTERS
            elif isinstance(one, _CONTAINERS):
                ways = 2 if isinstance(one, dict) else 1
                if weight + len(below) + ways * len(held) > most:
                    return None
                below.extend(held)
                if ways == 2:
                    below.extend(held.values())
            if weight > most:
                return None
        if not below:
            return weight
        level = below
    return None


def weigh(value: Any) -> Any:
    """Return `value` if an operation may walk through all of it."""
    if weight_of(value) is None:
        raise Runaway(
            f"a value holds more than {MAX_WEIGHT:,} others, counted by every way to them"
        )
    return value


def weigh_all(values: Iterable[Any]) -> None:
    """Refuse values of which one is too heavy."""
    for value in values:
        weigh(value)


def searchable(text: str, part: Any) -> None:
    """Refuse to look for a long text in a long one: the worst search compares each with each."""
    if isinstance(part, str) and len(part) > _SHORT and len(text) * len(part) > _MAX_SEARCH:
        raise Runaway("it looks for a long text in a long one")


def small_numbers(*values: Any) -> None:
    """Refuse integers that take long to divide."""
    for value in values:
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise Runaway("a number gets too large")


def _lighter(left: Any, right: Any) -> None:
    # A comparison walks through both at once and ends where one ends.
    if weight_of(left) is None:
        weigh(right)


def searchable_for(whole: Any, part: Any) -> None:
    """Refuse to look for `part` in `whole` if comparing it with all that is there takes long."""
    if isinstance(whole, str):
        searchable(whole, part)
        return
    weight = weight_of(part)
    if isinstance(whole, Mapping) or not isinstance(whole, Sized):
        weigh(part)  # hashed; or compared with items that are made, and counted, one by one
    elif weight is None or weight * len(whole) > MAX_WEIGHT:
        weigh(whole)


def _is_in(part: Any, whole: Any) -> bool:
    searchable_for(whole, part)
    return part in whole


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def bounded_compare(left: Any, right: Any) -> Any:
        _lighter(left, right)
        return compare(left, right)

    return bounded_compare


COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": _compared(operator.eq),
    "ne": _compared(operator.ne),
    "gt": _compared(operator.gt),
    "gteq": _compared(operator.ge),
    "lt": _compared(operator.lt),
    "lteq": _compared(operator.le),
    "in": _is_in,
    "notin": lambda part, whole: not _is_in(part, whole),
}
"""What the comparisons of Jinja do, by the names that its syntax tree has for them."""

_SYNONYMS: Final = {
    "eq": ("==", "eq", "equalto"),
    "ne": ("!=", "ne"),
    "gt": (">", "gt", "greaterthan"),
    "gteq": (">=", "ge"),
    "lt": ("<", "lt", "lessthan"),
    "lteq": ("<=", "le"),
    "in": ("in",),
}
COMPARING_TESTS: Final = {
    name: COMPARISONS[kind] for kind, names in _SYNONYMS.items() for name in names
}
"""The tests that compare (``is eq``, ``select("in", ...)``)."""
