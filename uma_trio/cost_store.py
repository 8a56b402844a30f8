"""Remember the staircase between starts, so that only the first one takes time to measure it.

A file per machine, model and settings under the user's cache folder. It holds figures and
nothing else; deleting it is always safe. What cannot be read is measured again, and what cannot
be written is measured again next time.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from uma_trio import __version__
from uma_trio.backend.base import Backend
from uma_trio.policy.cost import CostModel, Staircase

_FORMAT = 2


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds; seconds by tokens, and the other terms of the model."""

    computing: dict[int, float]
    output: dict[int, float]
    depth_s: float
    wide_depth_s: float
    crowd_s: float
    switch_s: float


def cache_folder() -> Path:
    """Return where cost files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "uma-trio" / "cost"


def cost_file(backend: Backend) -> Path:
    """Return the file of this model on this backend: anything that changes T(n) is in the name."""
    model, limits = backend.model, backend.limits
    parts = (
        _FORMAT,
        __version__,
        model.name,
        model.size_bytes,
        model.n_params,
        backend.description,
        limits.n_batch,
        limits.n_slots,
    )
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"{name}.json"


def recall(path: Path) -> CostModel | None:
    """Return the stored model, or None if there is none that can be used."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (OSError, msgspec.DecodeError):
        return None
    computing = stored.computing
    if not computing or min(computing) < 1 or min(computing.values()) <= 0:
        return None
    return CostModel(
        _staircase(computing),
        output=_staircase(stored.output or {1: 0.0}),
        depth_s=max(0.0, stored.depth_s),
        wide_depth_s=max(0.0, stored.wide_depth_s),
        crowd_s=max(0.0, stored.crowd_s),
        switch_s=max(0.0, stored.switch_s),
    )


def remember(path: Path, model: CostModel) -> None:
    """Store `model`; a cache that cannot be written is not worth an error."""
    stored = _Stored(
        computing=dict(model.table()),
        output=dict(model.output.table()),
        depth_s=model.depth_s,
        wide_depth_s=model.wide_depth_s,
        crowd_s=model.crowd_s,
        switch_s=model.switch_s,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(stored))
        fresh.replace(path)
    except OSError:
        return


def _staircase(seconds: dict[int, float]) -> Staircase:
    at = tuple(sorted(seconds))
    return Staircase(at, tuple(seconds[n] for n in at))
