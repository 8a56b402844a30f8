"""An option: how it is spelled in each place, what it accepts, and how that is converted.

:mod:`uma_trio.config.options` declares the options. Values arrive as text (flags, environment) or as what
YAML makes of them. The conversion is strict: ``true`` is not a number and ``1.5`` is not a count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import attrs
from attrs import frozen

from uma_trio.config.errors import ConfigError as ConfigError
from uma_trio.config.place import ENV_PREFIX

AUTO = "auto"
_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@frozen
class Option:
    """One option, declared once and rendered into the help, the checks and the reference.

    The environment variable is ``UMA_`` and the flag's name; `older_env` lists further ones, which it precedes.
    The key in the YAML file is the flag's name with underscores. `metavar` stands for the value in the help, if
    that is no number. `read` normalises what was written before it is converted to `type_`. The flag of an option
    with `several` may be repeated, though one value is converted at a time.
    """

    name: str
    type_: Any
    default: object
    flag: str
    help: str
    older_env: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    shown_default: str = ""
    metavar: str = ""
    read: Callable[[object], object] | None = None
    several: bool = False

    @property
    def key(self) -> str:
        """The key in the YAML file, and the flag's name for :func:`settings.load`."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def env(self) -> tuple[str, ...]:
        """The environment variables, in order of precedence."""
        return (f"{ENV_PREFIX}{self.key.upper()}", *self.older_env)

    @property
    def default_text(self) -> str:
        """The default as a person reads it."""
        return self.shown_default or show(self.default)

    @property
    def bounds(self) -> str:
        """What it takes, such as ``1 to 256 slots`` or ``auto, on or off``; "" if any word."""
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(others)} or {last}"
        low = self.minimum if self.minimum is not None else self.above
        if low is None or self.maximum is None:
            return self.unit if low is None else f"more than {show(low)} {self.unit}".strip()
        span = f"{show(low)} to {show(self.maximum)}"
        if self.above is not None:
            span = f"more than {show(low)}, to {show(self.maximum)}"
        return f"{span} {self.unit}".strip()

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, so that its flag takes no value."""
        return self.type_ is bool

    @property
    def repeats(self) -> bool:
        """Whether its flag may be given several times."""
        return self.several or get_origin(self.type_) is tuple

    def value(self, raw: object, source: str) -> object:
        """Return `raw` converted and within bounds. Raises :class:`ConfigError`, naming `source`."""
        kind, optional = _without_none(self.type_)
        try:
            written = self.read(raw) if self.read else raw
            if optional and (written is None or written == AUTO):
                return None
            value = _converted(written, kind)
        except (ValueError, TypeError) as error:
            wanted = f"{error}; it takes {self.bounds}" if self.bounds else str(error)
            message = f"{source}: {as_written(raw)} is not {wanted}"
            raise ConfigError(message) from error
        self.check(value, source)
        return value

    def check(self, value: object, source: str) -> None:
        """Raise if `value` is out of bounds or not among the choices."""
        if self.choices and value not in self.choices:
            known = ", ".join(self.choices)
            message = f"{source}: {as_written(value)} is not one of {known}"
            raise ConfigError(message)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        if self.minimum is not None and value < self.minimum:
            bound = f"the least is {show(self.minimum)}"
        elif self.maximum is not None and value > self.maximum:
            bound = f"the most is {show(self.maximum)}"
        elif self.above is not None and value <= self.above:
            bound = f"it must be more than {show(self.above)}"
        else:
            return
        message = f"{source}: {show(value)} is out of range, {bound}"
        raise ConfigError(message)


def option(
    default: object,
    *,
    within: tuple[float, float] | tuple[float, float, str] | None = None,
    **declared: Any,
) -> Any:
    """Declare a field of the configuration and the option that fills it.

    `within` has its minimum, maximum and unit. The flag is the field's name without a final ``_s``, unless given.
    """
    if within is not None:
        declared |= dict(zip(("minimum", "maximum", "unit"), within, strict=False))
    return attrs.field(default=default, metadata={"option": declared})


def options_of(cls: type, hints: Mapping[str, Any]) -> tuple[Option, ...]:
    """Return the options of a class whose fields were declared by :func:`option`."""
    return tuple(
        Option(
            name=field.name,
            type_=hints[field.name],
            default=field.default,
            **{"flag": f"--{field.name.removesuffix('_s').replace('_', '-')}"}
            | field.metadata["option"],
        )
        for field in attrs.fields(cls)
        if "option" in field.metadata
    )


def show(value: object) -> str:
    """Write a value as it would be typed."""
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        plain = format(Decimal(repr(value)), "f")  # never 2e+06
        return plain.removesuffix(".0")
    return str(value)


def as_written(raw: object) -> str:
    """Quote a value as it stands in a command line or a YAML file, for a message about it."""
    if raw is None:
        return "null"
    if isinstance(raw, bool):
        return "true" if raw else "false"
    return repr(raw) if isinstance(raw, str) else show(raw)


def seconds(raw: object) -> object:
    """Read a duration: a number of seconds, or text with a unit such as ``500ms`` or ``5m``."""
    if not isinstance(raw, str):
        return raw
    match = re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|m|h|)\s*", raw)
    if not match:
        message = "a duration (300, 300s, 5m, 500ms)"
        raise ValueError(message)
    return _number(match[1]) * _UNITS[match[2]]


_POWERS = {"": 0, "k": 10, "m": 20, "g": 30}


def n_bytes(raw: object) -> object:
    """Read ``2GiB``, ``512 MiB``, ``512M`` (powers of 1,024) or a bare number of bytes."""
    if not isinstance(raw, str):
        return raw
    text = raw.strip().lower()
    number = text.rstrip("bigkm ")
    unit = text[len(number) :].strip().removesuffix("b").removesuffix("i")
    if unit not in _POWERS:
        raise ValueError("a number of bytes, such as 512MiB or 2GiB")
    try:
        value = float(number)
    except ValueError:
        raise ValueError("a number of bytes, such as 512MiB or 2GiB") from None
    return int(value * (1 << _POWERS[unit]))


def _without_none(kind: Any) -> tuple[Any, bool]:
    if isinstance(kind, UnionType):
        (inner,) = (part for part in get_args(kind) if part is not type(None))
        return inner, True
    return kind, False


def _whole(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"\s*[+-]?[0-9][0-9_]*\s*", raw):
        return int(raw)
    raise ValueError("a whole number")


def _number(raw: object) -> float:
    message = "a number"
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(message)
    try:
        value = float(raw)
    except ValueError:
        raise ValueError(message) from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(message)
    return value


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("on or off")


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("a word")
    return raw.strip()


def _path(raw: object) -> Path:
    if not isinstance(raw, str | Path) or not str(raw):
        raise ValueError("a path")
    if "\0" in str(raw):
        raise ValueError("a path: it holds a NUL byte")
    return Path(raw).expanduser()


_CONVERTERS: Mapping[Any, Callable[[object], object]] = {
    int: _whole,
    float: _number,
    bool: _switch,
    str: _text,
    Path: _path,
}


def _converted(raw: object, kind: Any) -> object:
    if get_origin(kind) is tuple:
        if not isinstance(raw, list | tuple):
            raise ValueError("a list")
        return tuple(_converted(each, get_args(kind)[0]) for each in raw)
    return _CONVERTERS[kind](raw)
