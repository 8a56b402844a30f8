"""Jinja for templates that come out of model files: no escape, no runaway, no flood.

jinja2's own sandbox keeps a template away from Python. It does not keep it from looping for
hours or from doubling a string forty times, so this environment adds, inside the compiled
template and without a trace function or a second process:

* a step at every turn of a loop, every call of a macro and every item a loop's filter looks at;
  a step counts and, now and then, looks at the thread's CPU time, so that nested empty loops end;
* a bound on every operation that makes a long value from short ones: ``+ * ** % ~``, ``join``,
  ``replace``, ``indent``, ``tojson``, ``format``, macros' and ``set`` blocks' output;
* lists of the filters, globals and string methods that chat templates use; no others exist.

Not covered is one primitive operation on values within the bounds: sorting 10,000 items
takes milliseconds, but comparing two lists that were nested into each other forty times
takes for ever. Nor is what compiling costs, which the template's length and Python's
recursion limit bound. A template is part of a model file that the operator chose.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT: Final = 4 << 20  # characters of any value; chat templates make a few thousand
MAX_RANGE: Final = 10_000  # a request has at most 1024 messages
MAX_STEPS: Final = 2_000_000  # 1024 messages, each looked at once for each other one
CPU_SECONDS: Final = 1.0  # of the thread, so that a machine under load does not matter
_LOOK_EVERY: Final = 8
_MAX_INT_BITS: Final = 256
_MAX_INDENT: Final = 64

# fmt: off
_FILTERS: Final = (
    "abs", "count", "d", "default", "dictsort", "first", "float", "int", "items",
    "last", "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse",
    "select", "selectattr", "sort", "unique",
)
_TEXT_FILTERS: Final = ("capitalize", "lower", "title", "trim", "upper")
_STR_METHODS: Final = frozenset({
    "capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper",
    "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper",
})
# fmt: on
_PLAIN_FIELD: Final = re.compile(r"\{(\w*)\}")


class Runaway(TemplateError):
    """The template did more than it may: too long, too many steps, too large a value."""


class _Budget(threading.local):
    """What the rendering on this thread has used."""

    steps = 0
    until = 0.0


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. One for the process is enough; rendering is safe from any thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,  # both as the model families' own tools render templates
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,  # folding constants would run filters while compiling
            finalize=_text,
        )
        self._budget = _Budget()
        known = self.filters
        self.filters = {name: known[name] for name in _FILTERS} | {
            **{name: _of_text(known[name]) for name in _TEXT_FILTERS},
            "join": self.join_filter,
            "replace": _replace,
            "indent": _indent,
            "tojson": self.to_json,
            "string": _text,
            "safe": _text,  # nothing is escaped here
        }
        allowed = ("dict", "namespace", "joiner", "cycler")
        self.globals = {name: self.globals[name] for name in allowed} | {
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

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
            _bounded(length)
            kept.append(part)
            self.step()
        return "".join(kept)

    def join_text(self, *values: Any) -> str:
        """Do what ``~`` does."""
        return self.concat(map(_text, values))

    def join_filter(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        """Do what the filter ``join`` does."""
        parts: list[str] = []
        for index, value in enumerate(values):
            item = value if attribute is None else self.getitem(value, attribute)
            parts += [d, _text(item)] if index else [_text(item)]
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
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=None if indent is None else min(max(indent, 0), _MAX_INDENT),
            separators=separators,
            sort_keys=sort_keys,
        )
        return self.concat(encoder.iterencode(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do an operation that can make a long value, if the result is short enough."""
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "+" and sized:
            _bounded(sum(map(len, sized)))
        elif operator == "*" and sized:
            times = right if sized[0] is left else left
            _bounded(len(sized[0]) * (times if isinstance(times, int) else 0))
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not available")
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1)
            if bits + right.bit_length() > _MAX_INT_BITS:
                raise Runaway("a number gets too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Strings have the methods that chat templates use, others what jinja2 allows."""
        if isinstance(obj, str):
            return attr in _STR_METHODS
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
                parts[index] = _text(kwargs[name])
                continue
            parts[index] = _text(args[int(name) if name else unnamed])
            unnamed += 1
        return self.concat(parts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls; string methods that multiply are bounded first."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(obj, "__name__", "")
            if name == "replace" and len(args) >= 2:
                return _replace(owner, *args[:3])
            if name == "join" and args:
                return self.join_filter(args[0], owner)
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Puts a step into everything that repeats, and bounds ``~``.

    `EnvironmentAttribute` compiles to a look at the environment itself, which a template
    cannot name, so it cannot replace what is called there.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Step at every turn, and at every item that ``for ... if`` looks at."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_step(node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        """Step at every call: macros can call themselves."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        """Step whenever a macro calls back."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        """Make ``a ~ b`` a call that can refuse."""
        self.generic_visit(node)
        target = nodes.EnvironmentAttribute("join_text", lineno=node.lineno)
        return nodes.Call(target, list(node.nodes), [], None, None, lineno=node.lineno)


def _step(lineno: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute("step", lineno=lineno)
    return nodes.Call(target, [], [], None, None, lineno=lineno)


def _statement(lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_step(lineno), lineno=lineno)


def _bounded(length: int) -> None:
    if length > MAX_TEXT:
        raise Runaway(f"a value gets longer than {MAX_TEXT:,} characters")


def _text(value: Any) -> str:
    """Write a value into the output. Lists would be written out for ever if nested deeply."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float | Undefined):
        return str(value)
    raise SecurityError(f"a {type(value).__name__} cannot be written; tojson can")


def _of_text(known: Callable[..., str]) -> Callable[..., str]:
    """Make a filter of strings write its value the bounded way first."""
    return lambda value, *args, **kwargs: known(_text(value), *args, **kwargs)


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    text = _text(s)
    _bounded(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(s)
    pad = width if isinstance(width, str) else " " * min(max(width, 0), _MAX_INDENT)
    lines = text.split("\n")
    _bounded(len(text) + len(lines) * len(pad))
    indented = [pad + line if line or blank else line for line in lines[1:]]
    return "\n".join([pad + lines[0] if first else lines[0], *indented])


def _range(*args: int) -> range:
    values = range(*args)
    if len(values) > MAX_RANGE:
        raise Runaway(f"a range has more than {MAX_RANGE:,} items")
    return values


def _raise_exception(message: object) -> None:
    raise TemplateError(_text(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout[:100])
