"""What keeps a request at this moment, and which other requests cause it: read from what is there."""

from __future__ import annotations

from itertools import islice
from typing import Final

from uma_trio.engine.recorder import LATE, Recorder
from uma_trio.engine.records import Wait
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import NO_SLOT, Sequence

#: Requests that are named as the cause; there are never more slots to be waited for than matter to a person.
MOST_NAMED: Final = 8


def wait_of(sequence: Sequence, registry: Registry, recorder: Recorder) -> Wait | None:
    """Return what a live request waits for; None if the latest tick computed it."""
    handle = sequence.handle
    if sequence.slot == NO_SLOT:
        return _for_a_place(sequence, registry, recorder)
    if (held := registry.prefix.wait_of(sequence, registry.running)) is not None:
        return held
    if sequence.credit <= 0:
        return Wait("its reader is behind")
    if handle in registry.absent:
        return Wait(LATE)
    reason = recorder.waits(handle)
    return Wait(reason) if reason else None


def _for_a_place(sequence: Sequence, registry: Registry, recorder: Recorder) -> Wait:
    """Say what there is too little of, and who has it."""
    kv = registry.kv
    holders = tuple(islice(registry.running, MOST_NAMED))
    if kv.free_slots <= 0:
        reason = "the slot is taken" if kv.n_slots == 1 else f"all {kv.n_slots} slots are taken"
    elif sequence.cells > kv.free_cells:
        reason = f"it needs {sequence.cells:,} KV cells, {max(0, kv.free_cells):,} are free"
    else:
        reason, holders = "room is kept for requests before it", ()
    told = recorder.preemption(sequence.handle)
    if told is None:
        return Wait(reason, holders)
    return Wait(f"{told.reason}; {reason}", told.by or holders)
