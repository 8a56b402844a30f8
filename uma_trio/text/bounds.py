"""The operations of templates, and how much one of them may do, found out before it is done.

An operation that runs in C holds the GIL until it ends, and no limit of time is looked at
meanwhile. Its work is the number of values that it visits, where a value that is reachable by
two ways is visited twice: two lists that were nested into each other forty times have 2^40.
So the operands are weighed first, and whatever would visit more than `MAX_WEIGHT` is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Final

from jinja2 import TemplateError, Undefined
from jinja2.exceptions import SecurityError

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


MAX_INDENT: Final = 64
_MAX_CASED: Final = 256 << 10  # characters whose case is changed at once
# fmt: off
_SEARCHES: Final = frozenset({
    "count", "find", "index", "lstrip", "partition", "rfind", "rindex", "rpartition", "rsplit",
    "rstrip", "split", "strip",
})
_CASED: Final = frozenset({"capitalize", "lower", "swapcase", "title", "upper"})
# fmt: on


def check_length(value: Any, length: int) -> None:
    """Refuse a text or list that would get longer than allowed."""
    if isinstance(value, str):
        bounded(length)
    else:
        few(length)


def cased(value: Any) -> str:
    """Return a text whose case is about to be changed, unless that takes long."""
    text = text_of(value)
    if len(text) > _MAX_CASED:
        raise Runaway(f"it changes the case of more than {_MAX_CASED:,} characters")
    return text


def check_method(owner: str, name: str, args: list[Any]) -> None:
    """Refuse a method of a text that takes long or makes a long list."""
    weigh_all(args)
    if name in _CASED:
        cased(owner)
    if name in _SEARCHES:
        for part in args:
            searchable(owner, part)
    if name in ("split", "rsplit", "splitlines") and len(owner) > MAX_ITEMS:
        separators = [part for part in args if isinstance(part, str) and part]
        few(owner.count(separators[0]) if separators else len(owner) // 2)


def numeral(value: Any) -> Any:
    """Return what is about to be read as a number, unless it is a long text."""
    if isinstance(value, str) and len(value) > MAX_NUMERAL:
        raise Runaway("a number gets too long")
    return value


def sortable_dict(value: Any) -> Any:
    """Return a dict whose items are about to be sorted, unless that takes long."""
    if isinstance(value, Sized):
        few(len(value), MAX_SORTED)
    return weigh(value)


def of_numbers(known: Callable[..., Any]) -> Callable[..., Any]:
    """Make a test of numbers refuse texts, which ``%`` would format."""

    def tested(*values: Any) -> Any:
        if not all(isinstance(value, int | float | Undefined) for value in values):
            raise SecurityError("only numbers are even, odd or divisible")
        small_numbers(*values)
        return known(*values)

    return tested


def trim(value: Any, chars: str | None = None) -> str:
    """Do what the filter ``trim`` does."""
    text = text_of(value)
    searchable(text, chars)
    return text.strip(chars)


def text_of(value: Any) -> str:
    """Write a value into the output. Lists would be written out for ever if nested deeply."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float | Undefined):
        return str(value)
    raise SecurityError(f"a {type(value).__name__} cannot be written; tojson can")


def of_text(known: Callable[..., str]) -> Callable[..., str]:
    """Make a filter of strings write its value the bounded way first."""
    return lambda value, *args, **kwargs: known(text_of(value), *args, **kwargs)


def replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    """Do what ``replace`` does, within the bounds."""
    text = text_of(s)
    searchable(text, old)
    bounded(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Do what the filter ``indent`` does, within the bounds."""
    text = text_of(s)
    pad = width if isinstance(width, str) else " " * min(max(width, 0), MAX_INDENT)
    few(text.count("\n"))
    lines = text.split("\n")
    bounded(len(text) + len(lines) * len(pad))
    indented = [pad + line if line or blank else line for line in lines[1:]]
    return "\n".join([pad + lines[0] if first else lines[0], *indented])
