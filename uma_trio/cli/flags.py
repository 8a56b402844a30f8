"""How verbs declare their arguments, and the parser for command lines that leave no question.

A client's verb is to start at once, and the library that parses command lines takes longer to import
than the verb to answer. So verbs declare what they take by :class:`Parameter`, which imports nothing.
:func:`plain` parses flags of simple types that are written out in full. For everything else (help,
abbreviations of a value, errors and what is said about them) it returns None, and
:mod:`uma_trio.cli.parser` takes the same declarations to the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


class Parameter:
    """What an argument of a verb is called on the command line; see cyclopts' class of that name."""

    def __init__(
        self,
        *,
        help: str = "",  # noqa: A002 - the name that cyclopts has for it
        name: str | tuple[str, ...] = (),
        negative: str | None = None,
        metavar: str | None = None,
    ) -> None:
        self.help = help
        self.name = (name,) if isinstance(name, str) else name
        self.negative = negative
        self.metavar = metavar


ALL_OF = "*"
"""The name of a parameter whose fields are flags themselves."""


class ParsedCommand(NamedTuple):
    """A verb's arguments, parsed."""

    words: tuple[Any, ...]
    flags: dict[str, Any]


class _Flag(NamedTuple):
    field: str
    kind: Any
    repeats: bool
    value: bool | None  # what the flag itself says; None if a value follows
    group: str  # the parameter of the verb that it is a field of; "" if it is one itself


def plain(verb: Callable[..., Any], arguments: Sequence[str]) -> ParsedCommand | None:
    """Return the arguments of `verb` if every one of them is plain; None if any is not.

    Plain are: ``--flag value`` and ``--flag=value`` of a flag that takes text, a number in decimal
    digits, a path or one of several words, with a value that does not begin with "-" and is not empty;
    a switch; a word that does not begin with "-". No flag twice unless it may repeat.
    """
    hints = get_type_hints(verb, include_extras=True)
    code = verb.__code__
    in_order = code.co_varnames[: code.co_posonlyargcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][: bool(code.co_flags & 4)]
    named = {k: v for k, v in hints.items() if k not in (*in_order, *rest, "return")}
    flags, makers = _flags(named)
    words: list[Any] = []
    found: dict[str, dict[str, Any]] = {group: {} for group in ("", *makers)}
    for flag, text in _split(arguments, flags):
        if flag is None:
            words.append(text)
            continue
        said = found[flag.group]
        value = flag.value if text is None else _value(flag.kind, text)
        if value is None or (flag.field in said and not flag.repeats):
            return None
        said[flag.field] = (*said.get(flag.field, ()), value) if flag.repeats else value
    if None in words or (placed := _placed(words, in_order, rest, hints, verb)) is None:
        return None
    made = {group: maker(**found[group]) for group, maker in makers.items()}
    return ParsedCommand(placed, {**found[""], **made})


def _flags(hints: dict[str, Any]) -> tuple[dict[str, _Flag], dict[str, Any]]:
    """Return every flag by its name, and the class of each parameter whose fields are flags."""
    flags: dict[str, _Flag] = {}
    makers: dict[str, Any] = {}
    for name, hint in hints.items():
        kind, parameter = _declared(hint)
        if ALL_OF in parameter.name:
            makers[name] = kind
            fields = get_type_hints(kind.__init__, include_extras=True)
            for field, inner in fields.items():
                if field != "return":
                    flags.update(_names_of(field, inner, name))
        else:
            flags.update(_names_of(name, hint, ""))
    return flags, makers


def _names_of(field: str, hint: Any, group: str) -> Iterator[tuple[str, _Flag]]:
    kind, parameter = _declared(hint)
    repeats = get_origin(kind) is tuple
    kind = get_args(kind)[0] if repeats else kind
    names = parameter.name or (f"--{field.replace('_', '-')}",)
    for name in names:
        yield name, _Flag(field, kind, repeats, True if kind is bool else None, group)
        if kind is bool and parameter.negative != "":
            negative = parameter.negative or f"--no-{name.removeprefix('--')}"
            yield negative, _Flag(field, kind, repeats, False, group)


def _declared(hint: Any) -> tuple[Any, Parameter]:
    """Return the type of a hint without None, and how it is declared."""
    parameter = Parameter()
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        parameter = next((one for one in more if isinstance(one, Parameter)), parameter)
    if isinstance(hint, UnionType):
        left = [part for part in get_args(hint) if part is not type(None)]
        hint = left[0] if len(left) == 1 else hint
    return hint, parameter


def _split(
    arguments: Sequence[str], flags: dict[str, _Flag]
) -> Iterator[tuple[_Flag | None, str | None]]:
    """Yield each flag with the text of its value, each word without one; a word None is not plain."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            yield None, argument
            continue
        name, equals, behind = argument.partition("=")
        flag = flags.get(name)
        if flag is None or (flag.value is not None and equals):
            yield None, None
        elif flag.value is not None:
            yield flag, None
        else:
            text = behind if equals else next(rest, "-")
            yield (None, None) if text.startswith("-") else (flag, text)


def _placed(
    words: list[Any],
    in_order: Sequence[str],
    rest: Sequence[str],
    hints: dict[str, Any],
    verb: Callable[..., Any],
) -> tuple[Any, ...] | None:
    """Return the words as the verb takes them; None if there are too many, too few, or wrong ones."""
    needed = len(in_order) - len(verb.__defaults__ or ())
    if len(words) < needed or (len(words) > len(in_order) and not rest):
        return None
    kinds = [_declared(hints[name])[0] for name in in_order]
    kinds += [_declared(hints[name])[0] for name in rest for _ in words[len(in_order) :]]
    placed = tuple(_value(kind, word) for kind, word in zip(kinds, words, strict=False))
    return None if None in placed else placed


def _value(kind: Any, text: str) -> Any:
    """Return what a text is as a value of this kind; None if that is not plain."""
    if not text:
        return None
    if get_origin(kind) is Literal:
        return text if text in get_args(kind) else None
    if kind is int:
        return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
    if kind is float:
        return float(text) if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?", text) else None
    return kind(text) if kind in (str, Path) else None
