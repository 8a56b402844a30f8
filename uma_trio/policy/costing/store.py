"""Remember the staircase between starts, so that only the first one takes time to measure it.

A file per machine, model and settings under the user's cache folder. It holds figures and
nothing else; deleting it is always safe. What cannot be read, or is implausible, is measured again; what cannot be written is measured next time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import astuple

from uma_trio import __version__
from uma_trio.backend.base import Backend
from uma_trio.backend.needs import Estimate, Question
from uma_trio.config.hardware import identity
from uma_trio.policy.cost import MOST_SAVED, CostModel, Staircase

_FORMAT = 5
# No decode takes less, whatever a coarse clock says, and none that takes longer is of any use.
_LEAST_S, _LONGEST_S = 1e-6, 600.0
# No machine of today moves so many bytes a second: an accelerator's memory gives 8e12, and models
# that are spread over several are read one part after the other.
MOST_BYTES_S = 2e13
# A wider tick may cost less than a narrower one, where kernels take rows in fours: half as much has
# been seen. What claims to cost less than this part was disturbed.
LEAST_OF_NARROWER = 1 / 3

_NEEDS_FORMAT = 5
_COMPUTES = ".computes"  # behind the name of the file of a model's needs
_T = TypeVar("_T")


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
    return _file(
        "",
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


def implausible(cost: CostModel, weight_bytes: float = 0.0) -> str | None:
    """Return the problem of `cost` as a phrase for people; None if there is none.

    Every decode of the model reads `weight_bytes`; 0 if that is unknown.
    """
    return next(_problems(cost, weight_bytes), None)


def _problems(cost: CostModel, weight_bytes: float) -> Iterator[str]:
    """Yield what is wrong; later checks rely on those before them."""
    figures = (*cost.computing.seconds, *cost.output.seconds, *_others(cost).values())
    if not all(map(math.isfinite, figures)):
        yield "a figure is not finite"
    sizes = cost.computing.table()
    if not sizes or not cost.output.at or min(*sizes, *cost.output.at) < 1:
        yield "it has no batch size, or one of less than one token"
    least_s = max(_LEAST_S, weight_bytes / MOST_BYTES_S)
    longest_s = 0.0
    for n, seconds in sizes.items():
        if not least_s <= seconds <= _LONGEST_S:
            yield f"{n} tokens take {seconds:g} s, outside {least_s:g} to {_LONGEST_S:g}"
        if seconds < LEAST_OF_NARROWER * longest_s:
            yield f"{n} tokens take {seconds:g} s, fewer take {longest_s:g}"
        longest_s = max(longest_s, seconds)
    for n, seconds in cost.output.table().items():
        computing_s = cost.computing(n)
        if not -MOST_SAVED * computing_s <= seconds <= 2 * n * computing_s:
            yield f"{n} logits rows add {seconds:g} s to {computing_s:g}"
    for name, seconds in _others(cost).items():
        if not 0 <= seconds <= _LONGEST_S:
            yield f"{name} is {seconds:g}"


def _others(cost: CostModel) -> dict[str, float]:
    return {
        "context_cell_s": cost.context_cell_s,
        "wide_context_cell_s": cost.wide_context_cell_s,
        "used_cell_s": cost.used_cell_s,
        "spanned_cell_s": cost.spanned_cell_s,
        "recapture_s": cost.recapture_s,
        "capture_s": cost.capture_s,
    }


def needs_file(files: Sequence[Path], question: Question | None, build: str) -> Path:
    """Return where the memory that a model needs is kept. An encoder has no question. Raises OSError.

    The name has everything that changes the sum: the model's `files` as they are, how it is loaded, and the `build` of
    llama.cpp.
    """
    marks = [(f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns) for f in (p.stat() for p in files)]
    asked = () if question is None else astuple(question)
    return _file("needs-", _NEEDS_FORMAT, __version__, identity(), build, *asked, *marks)


def recall_needs(path: Path) -> Estimate | None:
    """Return the stored estimate; None if there is none, or it cannot be used."""
    return recall_value(path, Estimate)


def remember_needs(path: Path, found: Estimate) -> None:
    """Store what a model needs; a cache that cannot be written is no error."""
    put(path, msgspec.json.encode(found))


def recall_computing(path: Path) -> bool:
    """Return whether two tokens of the model whose needs are kept in `path` were computed."""
    return path.with_suffix(_COMPUTES).exists()


def remember_computing(path: Path) -> None:
    """Store that two tokens were computed; a cache that cannot be written is no error."""
    put(path.with_suffix(_COMPUTES), b"")


def recall_value(path: Path, kind: type[_T]) -> _T | None:
    """Return the attrs value that a file holds as JSON; None if there is none, or it cannot be used."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _file(kind: str, *parts: object) -> Path:
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"{kind}{name}.json"
