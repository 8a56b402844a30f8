"""How LoRA adapters are written: ``[NAME=]FILE[:SCALE]``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final, NamedTuple

MOST_SCALE: Final = 100.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WANTED: Final = "an adapter, [NAME=]FILE[:SCALE]"


class AdapterSpec(NamedTuple):
    """An adapter as it is declared: what requests call it, its file, and its scale where a request says none."""

    name: str
    path: Path
    scale: float


def read_adapters(raw: object) -> list[str]:
    """Read adapters: of repeated flags, of a list in YAML, one, or a map of names to files.

    Raises ValueError.
    """
    if isinstance(raw, dict):
        raw = [f"{name}={file}" for name, file in raw.items()]
    texts = [str(each) for each in (raw if isinstance(raw, list | tuple) else (raw,))]
    names = [adapter_spec(text).name for text in texts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"a list of adapters of different names: {twice} is there twice")
    return texts


def adapter_spec(text: str) -> AdapterSpec:
    """Return what one text says; without a name it has that of its file. Raises ValueError."""
    name, is_named, rest = text.partition("=")
    if not is_named:
        name, rest = "", text
    file, _, tail = rest.rpartition(":")
    scale = _scale(tail) if file else None
    path = Path(rest if scale is None else file).expanduser()
    if not path.name or (is_named and not name):
        raise ValueError(_WANTED)
    name = name or path.stem
    if not _NAME.fullmatch(name):
        raise ValueError(f"{_WANTED}; a name has up to 64 letters, digits and . _ -")
    if scale is not None and not abs(scale) <= MOST_SCALE:
        raise ValueError(f"{_WANTED}; a scale is {-MOST_SCALE:g} to {MOST_SCALE:g}")
    return AdapterSpec(name, path, 1.0 if scale is None else scale)


def _scale(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
