"""Time copies of cells between a device's KV cache and memory, before anybody has a request.

llama.cpp copies each run of cells in each layer with a call of its own, over a bus of unknown speed. On one H200 a page
took 16 to 34 ms, so that a guess from a CPU would be wrong by a factor of a hundred. On a CPU nothing is timed: its
memory copies fast enough for the first pages to tell. What was timed is kept beside the staircase
(:mod:`uma_trio.policy.costing.store`), so that only the first start takes time for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
from attrs import astuple

from uma_trio.backend.base import Backend, DecodeStatus
from uma_trio.policy.costing.store import cost_file, put, recall_value
from uma_trio.policy.prefix import PAGE, SCATTERED, Copying

_TIMES = 3  # the quickest counts; the first one touches memory
_FORMAT = 1


def copies_file(backend: Backend) -> Path:
    """Return the file of what copying takes: beside the one of the staircase, with the same parts in its name."""
    path = cost_file(backend)
    return path.with_name(f"copies-{_FORMAT}-{path.name}")


def known_copies(backend: Backend, clock: Callable[[], float]) -> Copying | None:
    """Return what copying takes, recalled or timed as :func:`time_copies` does.

    What cannot be read, or cannot be true, is timed again. A copy that failed is tried at the next start.
    """
    if not backend.traits.shape_costs:
        return None
    path = copies_file(backend)
    found = recall_value(path, Copying)
    if found is None or not all(0 < seconds < math.inf for seconds in astuple(found)):
        found = time_copies(backend, clock)
        if found is not None:
            put(path, msgspec.json.encode(found))
    return found


def time_copies(backend: Backend, clock: Callable[[], float]) -> Copying | None:
    """Return what copying takes on the device that `backend` computes on.

    None on a CPU, and where a copy fails. The slots must be empty, and are empty afterwards. Takes two decodes of
    up to :data:`PAGE` tokens and ten copies.
    """
    limits = backend.limits
    n = min(PAGE, limits.n_batch, limits.n_ctx_seq, limits.n_ctx // 4)
    if not backend.traits.shape_costs or not limits.leaf_ids or limits.n_slots < 2 or n < SCATTERED:
        return None
    try:
        found = _together(backend, clock, n)
        if found is None:
            return None
        _empty(backend)
        scattered_s = _scattered(backend, clock, n)
        return Copying(*found, found[0] if scattered_s is None else scattered_s)
    finally:
        _empty(backend)


def _together(backend: Backend, clock: Callable[[], float], n: int) -> tuple[float, float] | None:
    """Return the seconds to save and to restore a token of cells that lie side by side."""
    if not _decode(backend, [0] * n):
        return None
    saving, restoring = [], []
    for _ in range(_TIMES):
        began = clock()
        saved = backend.kv_save(0, 0, n, n)
        saving.append(clock() - began)
        if saved is None:
            return None
        began = clock()
        done = backend.kv_restore(1, saved)
        restoring.append(clock() - began)
        if not done:
            return None
        backend.kv_remove(1)
    return min(saving) / n, min(restoring) / n


def _scattered(backend: Backend, clock: Callable[[], float], n: int) -> float | None:
    """Return the seconds to save a token of cells between those of others; None if they lie side by side."""
    if not _decode(backend, [row % 2 for row in range(n)]):
        return None
    mine = (n + 1) // 2
    if backend.kv_runs(0, 0, mine) < SCATTERED:
        return None
    saving = []
    for _ in range(_TIMES):
        began = clock()
        if backend.kv_save(0, 0, mine, mine) is None:
            return None
        saving.append(clock() - began)
    return min(saving) / mine


def _decode(backend: Backend, slots: list[int]) -> bool:
    """Compute a token for each of `slots`, in this order."""
    batch, lengths = backend.batch, dict.fromkeys(slots, 0)
    for row, slot in enumerate(slots):
        batch.token[row], batch.slot[row], batch.pos[row] = 1 + row, slot, lengths[slot]
        batch.want[row] = row == len(slots) - 1
        lengths[slot] += 1
    if backend.decode(len(slots)) != DecodeStatus.OK:
        return False
    backend.logits(1)
    return True


def _empty(backend: Backend) -> None:
    for slot in (0, 1):
        backend.kv_remove(slot)
