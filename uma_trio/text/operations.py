"""Operations of templates on texts, numbers and dicts, each with the bound that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Final

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

from uma_trio.text.bounds import (
    MAX_ITEMS,
    MAX_NUMERAL,
    MAX_SORTED,
    Runaway,
    bounded,
    few,
    searchable,
    small_numbers,
    weigh,
    weigh_all,
)

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
