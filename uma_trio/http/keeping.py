"""`keep_alive`: how long a model stays loaded behind a request, as Ollama's clients say it."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from uma_protocol.rules import FieldFault
from uma_trio.http.fields import Body, Field, honoured

# https://pkg.go.dev/time#ParseDuration, which Ollama reads it by.
_UNITS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|\u00b5s|ms|s|m|h)")
_NUMBER: Final = re.compile(r"-?\d{1,12}(\.\d{1,9})?")
_MOST_S: Final = 3.2e9


class Duration:
    """A number of seconds, or a text such as 10m or 1h30m."""

    text = "a number of seconds or a duration such as 10m, up to 100 years; below 0: for ever"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Tell what is no duration."""
        return None if _seconds(value) is not None else FieldFault(path, f"must be {self.text}")


KEEP_ALIVE: Final[tuple[Field, ...]] = (
    honoured(
        "keep_alive",
        Duration(),
        "how long the model stays loaded behind its latest request; 0 unloads it at once, below 0 it stays until its "
        "memory is needed; of operators, where there are several models",
        default="the model's ttl",
    ),
)


def keep_alive_of(body: Body) -> float | None:
    """Return for how many seconds a request keeps its model loaded, infinite for ever; None if it does not say."""
    value = body.get("keep_alive")
    return None if value is None else _seconds(value)


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = _of_text(value.strip())
    if not isinstance(value, int | float) or value != value or value > _MOST_S:
        return None
    return math.inf if value < 0 else float(value)


def _of_text(text: str) -> float | None:
    """Return the seconds of a text; None if it is no duration."""
    if _NUMBER.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    rest = text.removeprefix("-")
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -1.0 if rest != text and seconds else seconds
