"""What a context of llama.cpp takes, by the kind of memory, as llama.cpp itself adds it up.

``llama_get_memory_breakdown`` (src/llama-ext.h) returns a ``std::map``, which is read here as GNU's C++ library lays it
out (bits/stl_tree.h). Called only in a process that may end, and only on Linux.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from attrs import frozen

from uma_trio.backend import _llama_lib as lib

_NAME: Final = "_Z26llama_get_memory_breakdownPK13llama_context"
_DEEPEST: Final = 64  # of a balanced tree with a handful of kinds
_IN_MACHINE: Final = (0, 3)  # ggml-backend.h: GGML_BACKEND_DEVICE_TYPE_CPU, _ACCEL
_DEFAULT: Final = "CPU"  # the kind that is mapped instead, where files are


class _Node(ctypes.Structure):
    """A node of the tree: its links, and the pair in it."""


_NODE: Final = ctypes.POINTER(_Node)
_Node._fields_ = (
    ("colour", ctypes.c_size_t),
    ("parent", _NODE),
    ("left", _NODE),
    ("right", _NODE),
    ("kind", ctypes.c_void_p),
    ("model", ctypes.c_size_t),
    ("context", ctypes.c_size_t),
    ("compute", ctypes.c_size_t),
)


class _Map(ctypes.Structure):
    """A ``std::map``; `root` is the parent of its header."""

    _fields_ = (
        ("compare", ctypes.c_size_t),
        ("colour", ctypes.c_size_t),
        ("root", _NODE),
        ("first", _NODE),
        ("last", _NODE),
        ("count", ctypes.c_size_t),
    )


@frozen
class MemoryKind:
    """The bytes of one kind of memory. `mappable` weights are not read where files are mapped."""

    on_device: bool
    mappable: bool
    model: int
    context: int
    compute: int


def breakdown(context: int) -> list[MemoryKind] | None:
    """Return the kinds of memory of a context; None where that cannot be read."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        get = lib.freed(_NAME, _Map, ctypes.c_void_p)
        judge = _judge()
    except AttributeError:
        return None
    found = get(context)
    parts = [judge(node) for node in _nodes(found.root, _DEEPEST)]
    return parts if len(parts) == found.count else None


def _nodes(node: Any, depth: int) -> Iterator[Any]:
    if node and depth:
        yield from _nodes(node.contents.left, depth - 1)
        yield node.contents
        yield from _nodes(node.contents.right, depth - 1)


def _judge() -> Callable[[Any], MemoryKind]:
    name = lib.freed("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    is_host = lib.freed("ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)
    device_of = lib.freed("ggml_backend_buft_get_device", ctypes.c_void_p, ctypes.c_void_p)
    type_of = lib.freed("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)

    def judge(node: Any) -> MemoryKind:
        device = device_of(node.kind)
        in_machine = is_host(node.kind) or not device or type_of(device) in _IN_MACHINE
        mappable = (name(node.kind) or b"").decode() == _DEFAULT
        return MemoryKind(not in_machine, mappable, node.model, node.context, node.compute)

    return judge
