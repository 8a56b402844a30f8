"""States and plans as lines of JSON, and back, exactly.

Finite floats are written with as many digits as their exact value needs; infinities and NaN, which
JSON lacks, are written as words. An unknown field is refused, because a plan made from an
incomplete state would differ. The constants of the policy are in the header: :meth:`Header.tuned` puts them back. Traces of other formats are refused: their states lack what this
version plans from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from attrs import evolve, field, frozen
from cattrs import BaseValidationError, Converter, override, transform_error
from cattrs.gen import make_dict_unstructure_fn

from uma_trio.policy.cost import CostModel
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import (
    Contract,
    Memory,
    SchedulerState,
)
from uma_trio.policy.tuning import TUNING, Tuning

FORMAT = 10


class TraceError(Exception):
    """A line is not part of a readable trace; the message says why."""


@frozen
class Header:
    """The first line: the program, its `slots` including ballast (0: unknown), and the `tuning` of all ticks."""

    version: str
    model: str
    policy: str
    contract: Contract = field(factory=Contract)
    format: int = FORMAT
    slots: int = 0
    tuning: Tuning = TUNING

    def tuned(self, tick: TracedTick) -> TracedTick:
        """Return a tick that was read, with the constants that it was planned with."""
        if self.tuning == TUNING:
            return tick
        state, plan = tick.state, tick.plan
        return evolve(
            tick,
            state=evolve(state, memory=_tuned(state.memory, self.tuning)),
            plan=evolve(plan, memory=_tuned(plan.memory, self.tuning)),
        )


def _tuned(memory: Memory, tuning: Tuning) -> Memory:
    cost = memory.cost
    return memory if cost is None else evolve(memory, cost=evolve(cost, tuning=tuning))


@frozen
class TracedTick:
    """The line of a tick: the state, the plan and the result.

    `accepted` has, by key, the number of right guesses of each sequence that had guesses. The
    sequences `late` got no token after these, because their masks were not ready; it is unknown
    whether their other guesses are right.
    """

    state: SchedulerState
    plan: Plan
    decode_s: float
    host_s: float
    status: int
    accepted: Mapping[int, int] = field(factory=dict)
    late: tuple[int, ...] = ()

    def gave(self, key: int) -> int:
        """Return how many tokens a sequence got by it that was ready to get one."""
        return (key not in self.late) + self.accepted.get(key, 0)


@frozen
class Footer:
    """The last line of a complete trace: the numbers of written and of dropped ticks."""

    written: int
    dropped: int


Line = Header | TracedTick | Footer
_KINDS: dict[str, type] = {"header": Header, "tick": TracedTick, "footer": Footer}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_T = TypeVar("_T")


def encode(line: Line) -> bytes:
    """Return the line, with the newline that ends it.

    Raises:
        TypeError: a policy left something in its plan that is no plain value.
    """
    return msgspec.json.encode({_NAMES[type(line)]: _converter.unstructure(line)}) + b"\n"


def decode(text: bytes) -> Line:
    """Return what a line says.

    Raises:
        TraceError: it is no line of a trace, or of another version's.
    """
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"it is not JSON: {error}"
        raise TraceError(message) from None
    if not isinstance(document, dict) or len(document) != 1:
        message = "it is not a line of a trace"
        raise TraceError(message)
    ((name, body),) = document.items()
    if name not in _KINDS:
        message = f"it is not a line of a trace, which has {', '.join(_KINDS)}"
        raise TraceError(message)
    if name == "header" and isinstance(body, dict) and body.get("format") != FORMAT:
        message = f"its format is {body.get('format')}, this version reads {FORMAT}"
        raise TraceError(message)
    return structured(body, _KINDS[name])


def plain(value: Any) -> Any:
    return _converter.unstructure(value)


def structured(document: Any, kind: type[_T]) -> _T:
    """Return the value that :func:`plain` was given. Raises :class:`TraceError`."""
    try:
        return _converter.structure(document, kind)
    except (BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems = "; ".join(transform_error(error, path="line"))
        message = f"it does not fit this version: {problems}"
        raise TraceError(message) from None


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


_converter = Converter(forbid_extra_keys=True)
_converter.register_unstructure_hook(float, _float)
# The header has it, once for all ticks.
_converter.register_unstructure_hook(
    CostModel,
    make_dict_unstructure_fn(CostModel, _converter, tuning=override(omit=True)),
)
