"""The state of one sequence, as llama.cpp writes it, cut into parts and joined again.

llama.cpp reads and writes a sequence as a whole (`state_write` and `state_read` in llama-kv-cache.cpp). Saved prefixes
are shared, restored and evicted in pages of a few tokens, so the rows of each page are cut out here. The layout::

    magic u32, sequence i32, n_streams u32
    for each stream: n_cells u32, and for the one that has cells
        n_cells x (position i32, n_sequences u32 = 1, sequence i32)
        v_is_transposed u32 = 0, n_layers u32
        for each layer: type of K i32, bytes of a row u64, n_cells rows
        for each layer that has V: the same

Models whose cells have more than a position (M-RoPE) and V across cells (no flash attention) are not understood.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from uma_trio.backend._llama_options import library
from uma_trio.backend.base import Adapter, Saved

Bytes = NDArray[np.uint8]

_HEAD: Final = struct.Struct("<IiI")
_CELL_BYTES: Final = 12
_TENSOR: Final = struct.Struct("<iQ")
_PART: Final = struct.Struct("<IIIII")  # magic, first position, rows, layers, tensors


class NotUnderstood(Exception):
    """The state is not laid out as described here."""


class _Rows(NamedTuple):
    """A row for each cell: one K or V of one layer."""

    type: int
    row_bytes: int
    data: Bytes


@frozen(eq=False)
class SequenceState:
    """The rows of consecutive positions from `first` on. The first `n_layers` of `tensors` are K, the others V."""

    magic: int
    first: int
    n_layers: int
    tensors: Sequence[_Rows]

    @classmethod
    def parse(cls, data: Bytes, n_streams: int, n_cells: int) -> SequenceState:
        """Read what llama.cpp wrote of a sequence of `n_cells` positions. Raises :class:`NotUnderstood`."""
        magic, _, streams = _HEAD.unpack_from(data.data)
        counts, at = [], _HEAD.size
        for _ in range(streams):
            (count,) = struct.unpack_from("<I", data.data, at)
            at += 4
            counts.append(count)
            if count:
                break
        if streams != n_streams or not counts or counts[-1] != n_cells or not n_cells:
            raise NotUnderstood
        end = at + n_cells * _CELL_BYTES
        meta = data[at:end].view(np.int32).reshape(n_cells, 3)
        if not (np.array_equal(meta[:, 0], np.arange(n_cells)) and (meta[:, 1] == 1).all()):
            raise NotUnderstood
        v_transposed, n_layers = struct.unpack_from("<II", data.data, end)
        if v_transposed or not 0 < n_layers < 4096:
            raise NotUnderstood
        at, tensors = end + 8, []
        last = len(data) - 4 * (streams - len(counts))  # the empty streams behind this one
        while at < last:
            kind, row_bytes = _TENSOR.unpack_from(data.data, at)
            at += _TENSOR.size
            if at + n_cells * row_bytes > last:
                raise NotUnderstood
            tensors.append(_Rows(kind, row_bytes, data[at : at + n_cells * row_bytes]))
            at += n_cells * row_bytes
        if len(tensors) < n_layers:
            raise NotUnderstood
        return cls(magic, 0, n_layers, tensors)

    def part(self, first: int, last: int) -> Saved:
        """Return a copy of the rows of positions ``[first, last)``."""
        head = _PART.pack(self.magic, first, last - first, self.n_layers, len(self.tensors))
        kinds = b"".join([_TENSOR.pack(rows.type, rows.row_bytes) for rows in self.tensors])
        begin = np.frombuffer(head + kinds, np.uint8)
        cut = [rows.data[first * rows.row_bytes : last * rows.row_bytes] for rows in self.tensors]
        return np.concatenate([begin, *cut]).data

    @staticmethod
    def joined(parts: Sequence[Saved], n_streams: int) -> tuple[Bytes, int]:
        """Return what llama.cpp reads as a sequence that consists of these parts, and its positions.

        Raises :class:`NotUnderstood` if they are not consecutive from 0, or of different caches.
        """
        found = [_opened(part) for part in parts]
        if not found:
            raise NotUnderstood
        n, kinds = 0, [(rows.type, rows.row_bytes) for rows in found[0].tensors]
        for state in found:
            if state.first != n or [(r.type, r.row_bytes) for r in state.tensors] != kinds:
                raise NotUnderstood
            n += len(state.tensors[0].data) // state.tensors[0].row_bytes
        meta = np.zeros((n, 3), np.int32)
        meta[:, 0], meta[:, 1] = np.arange(n), 1
        head = _HEAD.pack(found[0].magic, 0, n_streams) + struct.pack("<I", n)
        pieces = [np.frombuffer(head, np.uint8), meta.reshape(-1).view(np.uint8)]
        pieces.append(np.frombuffer(struct.pack("<II", 0, found[0].n_layers), np.uint8))
        for at, kind in enumerate(kinds):
            pieces.append(np.frombuffer(_TENSOR.pack(*kind), np.uint8))
            pieces += [state.tensors[at].data for state in found]
        pieces.append(np.zeros(4 * (n_streams - 1), np.uint8))
        return np.concatenate(pieces), n


def _opened(part: Saved) -> SequenceState:
    data = np.frombuffer(part, np.uint8)
    magic, first, n_rows, n_layers, n_tensors = _PART.unpack_from(data.data)
    at = _PART.size
    kinds = [_TENSOR.unpack_from(data.data, at + i * _TENSOR.size) for i in range(n_tensors)]
    at += n_tensors * _TENSOR.size
    tensors = []
    for kind, row_bytes in kinds:
        tensors.append(_Rows(kind, row_bytes, data[at : at + n_rows * row_bytes]))
        at += n_rows * row_bytes
    return SequenceState(magic, first, n_layers, tensors)


# The head of a file, which has RoPE's settings, is within these: 16 MiB with the largest vocabularies.
_HEAD_BYTES: Final = 16 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def identity_of(files: Sequence[Path], adapters: Sequence[Adapter], cache: str) -> str:
    """Return what tells cells from those of other weights, adapters, builds of llama.cpp and caches; "" if unknown.

    `cache` describes types and layout. RoPE is as the model's file says; no option changes it.
    """
    build = library()
    try:
        parts = [digest_of(file) for file in files]
        parts += [f"{digest_of(each.path)} {each.scale!r}" for each in adapters]
    except OSError:
        return ""  # removed or replaced while it was loaded
    return "\n".join([build, cache, *parts]) if build else ""


def digest_of(path: Path) -> str:
    """Return a digest of a file without reading tens of gigabytes.

    Of its size, the time of its last change, its first 16 MiB and 256 blocks spread over the rest. A file that was
    written again or replaced has another time, and other weights differ in nearly all blocks. Raises OSError.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        digest = blake2b(f"{found.st_size} {found.st_mtime_ns} ".encode(), digest_size=16)
        digest.update(file.read(_HEAD_BYTES))
        for at in range(
            _HEAD_BYTES, found.st_size, max(1, (found.st_size - _HEAD_BYTES) // _SAMPLES)
        ):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
