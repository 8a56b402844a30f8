"""JSON of a client's size, written in calls of a bounded size.

msgspec writes a document in one call that holds the GIL. Here one call gets at most 1,024 values and 16,384
characters, which take less than 0.3 ms. Between two calls another thread can take the GIL. What a
`msgspec.Raw` holds is copied, and not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from uma_trio.text.slices import RUN, is_short, runs_of, slices

Part = bytes | Callable[[], bytes]
"""A part of an answer: written, or what writes it in a helper thread since it is long."""

_encode: Final = msgspec.json.encode


def written(value: Any) -> bytes:
    """Return what ``msgspec.json.encode(value)`` does. Names of members are texts.

    Raises:
        RecursionError: `value` is nested too deeply.
    """
    if is_short(value):
        return _encode(value)
    if isinstance(value, str):
        return b'"%b"' % b"".join(_encode(part)[1:-1] for part in slices(value))
    if isinstance(value, Mapping):
        return b"{%b}" % b",".join(_members(value))
    return b"[%b]" % b",".join(_elements(value))


def kept(value: Any) -> Any:
    """Return a value, or its JSON if it is long: then it is written once, however often it is told."""
    return value if is_short(value) else msgspec.Raw(written(value))


def joined(parts: Sequence[Part]) -> Part:
    """Return several parts as one."""
    ready = [part for part in parts if isinstance(part, bytes)]
    if len(ready) == len(parts):
        return b"".join(ready)
    return lambda: b"".join([part if isinstance(part, bytes) else part() for part in parts])


def _members(value: Mapping[str, Any]) -> Iterator[bytes]:
    for run in runs_of(value):
        if is_short(run):
            yield _encode(run)[1:-1]
        else:
            for name, part in run.items():
                yield b"%b:%b" % (written(name), written(part))


def _elements(value: Sequence[Any]) -> Iterator[bytes]:
    for at in range(0, len(value), RUN):
        run = value[at : at + RUN]
        if is_short(run):
            yield _encode(run)[1:-1]
        else:
            yield from map(written, run)
