"""Jinja for templates that come out of model files: no escape, no runaway, no flood.

jinja2's own sandbox keeps a template away from Python. It does not keep it from looping for
hours or from doubling a string forty times, so this environment adds, inside the compiled
template and without a trace function or a second process:

* a step at every turn of a loop, every call of a macro and every item a loop's filter looks at;
  a step counts and, now and then, looks at the thread's CPU time, so that nested empty loops end;
* a bound on every operation that makes a long value from short ones: ``+ * ** % ~``, ``join``,
  ``replace``, ``indent``, ``tojson``, ``format``, macros' and ``set`` blocks' output;
* a bound on every operation that visits many values at once (:mod:`uma_trio.text.bounds`):
  comparing, hashing and sorting lists, looking for one text in another, dividing integers;
* lists of the filters, tests, globals and methods that chat templates use; no others exist.

So no operation holds the GIL for more than some milliseconds, and between two of them the limits
of time are looked at. What compiling costs is bounded by the template's length and Python's
recursion limit. A template is part of a model file that the operator chose.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from uma_trio.text.bounds import (
    COMPARING_TESTS,
    COMPARISONS,
    MAX_INDENT,
    MAX_INT_BITS,
    MAX_SORTED,
    Runaway,
    bounded,
    cased,
    check_length,
    check_method,
    few,
    indent,
    numeral,
    of_numbers,
    of_text,
    replace,
    searchable_for,
    small_numbers,
    sortable_dict,
    text_of,
    trim,
    weigh,
    weigh_all,
)
from uma_trio.text.instrument import Instrument

MAX_RANGE: Final = 10_000  # a request has at most 1024 messages
MAX_STEPS: Final = 2_000_000  # 1024 messages, each looked at once for each other one
CPU_SECONDS: Final = 1.0  # of the thread, so that a machine under load does not matter
_LOOK_EVERY: Final = 8

# fmt: off
_FILTERS: Final = ("abs", "count", "d", "default", "first", "last", "length")
_LAZY_FILTERS: Final = ("items", "map", "reject", "rejectattr", "select", "selectattr")
_TESTS: Final = (
    "boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none",
    "number", "sameas", "sequence", "string", "true", "undefined",
)
_TEXT_FILTERS: Final = ("capitalize", "lower", "title", "upper")
_STR_METHODS: Final = frozenset({
    "capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper",
    "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper",
})
_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_METHODS: Final[dict[type, frozenset[str]]] = {
    str: _STR_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    **{view: frozenset[str]() for view in _VIEWS},
}
# fmt: on
_PLAIN_FIELD: Final = re.compile(r"\{(\w*)\}")


class _Budget(threading.local):
    """What the rendering on this thread has used."""

    steps = 0
    until = 0.0


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. One for the process is enough; rendering is safe from any thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "/", "//"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,  # both as the model families' own tools render templates
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,  # folding constants would run filters while compiling
            finalize=text_of,
        )
        self._budget = _Budget()
        self.filters = self._known_filters()
        self.tests = self._known_tests()
        allowed = ("dict", "namespace", "joiner", "cycler")
        self.globals = {name: self.globals[name] for name in allowed} | {
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _known_filters(self) -> dict[str, Any]:
        known: dict[str, Any] = dict(self.filters)
        wrap = self._wrap
        plain = {name: wrap(known[name]) for name in _FILTERS}
        lazy = {name: wrap(known[name], after=self._each) for name in _LAZY_FILTERS}
        texts = {name: wrap(of_text(known[name]), cased) for name in _TEXT_FILTERS}
        return {
            **plain,
            **lazy,
            **texts,
            "trim": wrap(trim),
            "int": wrap(known["int"], numeral),
            "float": wrap(known["float"], numeral),
            "list": wrap(self._list),
            "sort": wrap(known["sort"], self._sortable),
            "min": wrap(known["min"], self._sortable),
            "max": wrap(known["max"], self._sortable),
            "unique": wrap(known["unique"], self._sortable, self._each),
            "dictsort": wrap(known["dictsort"], sortable_dict),
            "reverse": wrap(known["reverse"], self._sized),
            "join": self.join_filter,
            "replace": replace,
            "indent": indent,
            "tojson": self.to_json,
            "string": text_of,
            "safe": text_of,  # nothing is escaped here
        }

    def _known_tests(self) -> dict[str, Any]:
        known: dict[str, Any] = dict(self.tests)
        return {
            **{name: known[name] for name in _TESTS},
            **COMPARING_TESTS,
            **{name: of_text(known[name]) for name in ("lower", "upper")},
            **{name: of_numbers(known[name]) for name in ("divisibleby", "even", "odd")},
        }

    def _wrap(
        self,
        known: Callable[..., Any],
        before: Callable[[Any], Any] = lambda value: value,
        after: Callable[[Any], Any] = lambda value: value,
    ) -> Callable[..., Any]:
        """Make a filter take a step, weigh its arguments and change its value and its result."""
        place = 1 if hasattr(known, "jinja_pass_arg") else 0

        @functools.wraps(known)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.step()
            weigh_all(args[place + 1 :])
            weigh_all(kwargs.values())
            value = before(args[place])
            return after(known(*args[:place], value, *args[place + 1 :], **kwargs))

        return wrapped

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def _list(self, values: Any) -> list[Any]:
        if isinstance(values, Sized):
            few(len(values))
            self._budget.steps += len(values)
            self._look()
            return list(values)  # type: ignore[call-overload,no-any-return]
        made: list[Any] = []
        for value in values:
            self.step()
            few(len(made) + 1)
            made.append(value)
        return made

    def _sortable(self, values: Any) -> Any:
        made = self._list(values)
        few(len(made), MAX_SORTED)
        return weigh(made)

    def _sized(self, values: Any) -> Any:
        return values if isinstance(values, Sized) else self._list(values)

    def compare(self, value: Any, *rest: Any) -> Any:
        """Do what ``value op other op other ...`` does, with bounds; `rest` alternates the two."""
        result: Any = True
        for kind, other in zip(rest[::2], rest[1::2], strict=True):
            result = COMPARISONS[kind](value, other)
            if not result:
                return result
            value = other
        return result

    def weigh(self, value: Any) -> Any:
        """Return a value that is about to be hashed, unless that takes long."""
        return weigh(value)

    def start(self) -> None:
        """Begin a rendering on this thread with a full budget."""
        self._budget.steps = 0
        self._budget.until = time.thread_time() + CPU_SECONDS

    def step(self) -> bool:
        """Take one step; always true, so that it can stand in a condition."""
        budget = self._budget
        budget.steps += 1
        if budget.steps % _LOOK_EVERY == 0:
            self._look()
        return True

    def _look(self) -> None:
        if self._budget.steps > MAX_STEPS:
            raise Runaway(f"it takes more than {MAX_STEPS:,} steps")
        if time.thread_time() > self._budget.until:
            raise Runaway(f"it takes longer than {CPU_SECONDS:g} s")

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of the template or of a macro, within the bounds."""
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            bounded(length)
            kept.append(part)
            self.step()
        return "".join(kept)

    def join_text(self, *values: Any) -> str:
        """Do what ``~`` does."""
        return self.concat(map(text_of, values))

    def join_filter(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        """Do what the filter ``join`` does."""
        parts: list[str] = []
        for index, value in enumerate(values):
            self.step()
            item = value if attribute is None else self.getitem(value, attribute)
            parts += [d, text_of(item)] if index else [text_of(item)]
        return self.concat(parts)

    def to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Do what transformers' ``tojson`` does: no HTML escapes, any character as it is."""
        if sort_keys:
            weigh(value)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=None if indent is None else min(max(indent, 0), MAX_INDENT),
            separators=separators,
            sort_keys=sort_keys,
        )
        return self.concat(encoder.iterencode(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do an operation that can make a long value, if the result is short enough."""
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "+" and sized:
            check_length(sized[0], sum(map(len, sized)))
        elif operator == "*" and sized:
            times = right if sized[0] is left else left
            check_length(sized[0], len(sized[0]) * (times if isinstance(times, int) else 0))
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not available")
        elif operator in ("%", "/", "//"):
            small_numbers(left, right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1)
            if bits + right.bit_length() > MAX_INT_BITS:
                raise Runaway("a number gets too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Texts, lists and dicts have the methods that templates use, others what jinja2 allows."""
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods and super().is_safe_attribute(obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace ``str.format`` by one that knows plain fields and no widths."""
        if getattr(value, "__name__", "") not in ("format", "format_map"):
            return None
        template = getattr(value, "__self__", None)
        if not isinstance(template, str):
            return None
        if "{" in (rest := _PLAIN_FIELD.sub("", template)) or "}" in rest:
            raise SecurityError("format fields with widths or attributes are not available")
        return lambda *args, **kwargs: self._format(template, args, kwargs)

    def _format(self, template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        unnamed = 0
        parts = _PLAIN_FIELD.split(template)
        for index in range(1, len(parts), 2):
            name = parts[index]
            if name and not name.isdecimal():
                parts[index] = text_of(kwargs[name])
                continue
            parts[index] = text_of(args[int(name) if name else unnamed])
            unnamed += 1
        return self.concat(parts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, with the bounds of what is called."""
        owner = getattr(obj, "__self__", None)
        if owner is self:  # put there by Instrument
            return obj(*args)  # kwargs are what jinja2 adds inside loops
        self.step()
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "replace" and len(args) >= 2:
                return replace(owner, *args[:3])
            if name == "join" and args:
                return self.join_filter(args[0], owner)
            check_method(owner, name, [*args, *kwargs.values()])
        if not isinstance(obj, Macro):  # which is given its values without a look at them
            weigh_all(args)
            if isinstance(owner, list | tuple) and args:
                searchable_for(owner, args[0])
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Instrument().visit(super()._parse(source, name, filename))
        return tree


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _range(*args: int) -> range:
    values = range(*args)
    if len(values) > MAX_RANGE:
        raise Runaway(f"a range has more than {MAX_RANGE:,} items")
    return values


def _raise_exception(message: object) -> None:
    raise TemplateError(text_of(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout[:100])
