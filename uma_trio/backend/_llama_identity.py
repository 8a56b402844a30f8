"""What the cells of a KV cache depend on, besides the tokens that they are of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from uma_trio.backend._llama_options import library
from uma_trio.backend.base import Adapter

# The head of a file, which has RoPE's settings, is within these: 16 MiB with the largest vocabularies.
_HEAD: Final = 16 << 20
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
        digest.update(file.read(_HEAD))
        for at in range(_HEAD, found.st_size, max(1, (found.st_size - _HEAD) // _SAMPLES)):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
