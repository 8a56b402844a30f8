"""Remember the staircase between starts, so that only the first one takes time to measure it.

A file per machine, model and settings under the user's cache folder. It holds figures and
nothing else; deleting it is always safe. What cannot be read, or is outside the bounds of
:mod:`uma_trio.policy.costing.bounds`, is measured again; what cannot be written is measured next time.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from uma_trio import __version__
from uma_trio.backend.base import Backend
from uma_trio.config.hardware import identity
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.bounds import implausible

_FORMAT = 5


class Unusable(Exception):
    """There is a file, and no cost model in it; the message is a phrase that says why."""


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds; seconds by tokens, and the other terms of the model."""

    computing: dict[int, float]
    output: dict[int, float]
    context_cell_s: float
    wide_context_cell_s: float
    used_cell_s: float
    spanned_cell_s: float
    recapture_s: float
    capture_s: float
    others: float = 0.0  # files of older versions are not marked


def cache_folder(what: str = "cost") -> Path:
    """Return where files of a kind are kept: those of costs here."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "uma-trio" / what


def cost_file(backend: Backend) -> Path:
    """Return the file of this model on this backend: anything that changes T(n) is in the name.

    The machine is, since a home folder may be shared; which layers are on a GPU is in the
    backend's description.
    """
    model, limits = backend.model, backend.limits
    parts = (
        _FORMAT,
        __version__,
        identity(),
        model.name,
        model.size_bytes,
        model.n_params,
        backend.description,
        limits.n_batch,
        limits.n_slots,
    )
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"{name}.json"


def recall(path: Path, weight_bytes: float = 0.0) -> CostModel | None:
    """Return the stored model, or None if there is no file.

    `weight_bytes` are read by every decode of the model, 0 if that is not known.

    Raises:
        Unusable: the file cannot be read, or what is in it cannot be true.
    """
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unusable(error.strerror or str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unusable(str(error)) from None
    model = CostModel(
        _staircase(stored.computing),
        output=_staircase(stored.output or {1: 0.0}),
        context_cell_s=stored.context_cell_s,
        wide_context_cell_s=stored.wide_context_cell_s,
        used_cell_s=stored.used_cell_s,
        spanned_cell_s=stored.spanned_cell_s,
        recapture_s=stored.recapture_s,
        capture_s=stored.capture_s,
        others=min(1.0, max(0.0, stored.others)),
    )
    why = implausible(model, weight_bytes)
    if why is not None:
        raise Unusable(why)
    return model


def remember(path: Path, model: CostModel, weight_bytes: float = 0.0) -> None:
    """Store `model`, unless it is implausible; a cache that cannot be written is no error."""
    if implausible(model, weight_bytes) is not None:
        return
    stored = _Stored(
        computing=dict(model.table()),
        output=dict(model.output.table()),
        context_cell_s=model.context_cell_s,
        wide_context_cell_s=model.wide_context_cell_s,
        used_cell_s=model.used_cell_s,
        spanned_cell_s=model.spanned_cell_s,
        recapture_s=model.recapture_s,
        capture_s=model.capture_s,
        others=model.others,
    )
    put(path, msgspec.json.encode(stored))


def put(path: Path, content: bytes) -> None:
    """Write a file as a whole, or leave the one that is there; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError:
        return


def _staircase(seconds: dict[int, float]) -> Staircase:
    at = tuple(sorted(seconds))
    return Staircase(at, tuple(seconds[n] for n in at))
