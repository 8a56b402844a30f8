"""States and plans as lines of JSON, and back, exactly.

Finite floats are written with as many digits as their exact value needs; infinities and NaN, which
JSON lacks, are written as words. An unknown field is refused, because a plan made from an
incomplete state would differ. Traces of earlier formats are read, too: renamed fields are
translated, and memory that no longer exists is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from attrs import field, frozen
from cattrs import BaseValidationError, Converter, transform_error
from cattrs.gen import make_dict_structure_fn

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.plan import Limit, Plan
from uma_trio.policy.state import (
    Contract,
    GuardMemory,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
    Served,
)

FORMAT = 6
_FORMATS = (2, 3, 4, 5, FORMAT)
# What format 2 called the fields of each class, inner classes first.
_NAMES_OF_2: dict[type, dict[str, str]] = {
    Work: {"looked": "context_cells", "resident": "used_cells", "company": "contended"},
    CostModel: {
        "depth_s": "context_cell_s",
        "wide_depth_s": "wide_context_cell_s",
        "crowd_s": "used_cell_s",
        "switch_s": "recapture_s",
        "company_s": "contended_host_s",
    },
    MeasuredTick: {"gaps": "itl", "loaded": "mixed"},
    GuardMemory: {
        "loaded": "mixed",
        "loaded_ticks": "mixed_ticks",
        "closed_ticks": "isolated_ticks",
    },
    Contract: {"young_cap": "startup_cap", "young_s": "startup_s"},
    Served: {},
    Memory: {},
    Limit: {"closed": "isolated"},
    SequenceView: {"target_gap_s": "target_itl_s"},
    SchedulerState: {"ahead": "prepared"},
}
# What earlier formats have, and nobody needs.
_GONE: dict[type, frozenset[str]] = {
    GuardMemory: frozenset(
        {
            *("credits", "budgets", "jitter", "noise", "rare", "long"),
            *("share", "since_grant", "floor_grants", "infeasible"),
        }
    ),
    Served: frozenset({"most", "held_until"}),
    Memory: frozenset({"same_shape"}),
    Contract: frozenset({"background_weight"}),
    Limit: frozenset({"rare", "long"}),
}


class TraceError(Exception):
    """A line is not part of a readable trace; the message says why."""


@frozen
class Header:
    """The first line: the program, and its `slots` including ballast (0: unknown)."""

    version: str
    model: str
    policy: str
    contract: Contract = field(factory=Contract)
    format: int = FORMAT
    slots: int = 0


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
    if name == "header" and isinstance(body, dict) and body.get("format") not in _FORMATS:
        known = ", ".join(map(str, _FORMATS))
        message = f"its format is {body.get('format')}, this version reads {known}"
        raise TraceError(message)
    return structured(body, _KINDS[name])


def plain(value: Any) -> Any:
    """Return an attrs value as what JSON has."""
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


def _reads_earlier(kind: type[_T], names: dict[str, str]) -> Callable[[Any, Any], _T]:
    """Return what structures `kind`, also where its fields are those of an earlier format."""
    structure = make_dict_structure_fn(kind, _converter, _cattrs_forbid_extra_keys=True)
    gone = _GONE.get(kind, frozenset())
    earlier = names.keys() | gone

    def hook(body: Any, _: Any) -> _T:
        if isinstance(body, dict) and not earlier.isdisjoint(body):
            body = {
                names.get(name, name): value for name, value in body.items() if name not in gone
            }
        return structure(body, kind)

    return hook


_converter = Converter(forbid_extra_keys=True)
_converter.register_unstructure_hook(float, _float)
for _kind, _names in _NAMES_OF_2.items():
    _converter.register_structure_hook(_kind, _reads_earlier(_kind, _names))
