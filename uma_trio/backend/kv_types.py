"""How a KV cache can be stored: what llama.cpp offers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from uma_trio.words import nearest


@frozen
class KvType:
    """How the KV cache stores a number: ggml's type id, and bytes for a block of elements."""

    ggml_type: int
    block: int
    block_bytes: int

    @property
    def quantised(self) -> bool:
        """Whether several elements share a scale; the V cache then needs flash attention."""
        return self.block > 1


#: As in llama.cpp's common/arg.cpp, kv_cache_types.
KV_TYPES: Final[Mapping[str, KvType]] = {
    "f16": KvType(1, 1, 2),
    "f32": KvType(0, 1, 4),
    "bf16": KvType(30, 1, 2),
    "q8_0": KvType(8, 32, 34),
    "q5_0": KvType(6, 32, 22),
    "q5_1": KvType(7, 32, 24),
    "q4_0": KvType(2, 32, 18),
    "q4_1": KvType(3, 32, 20),
    "iq4_nl": KvType(20, 32, 18),
}
KV_ALIASES: Final = {"q8": "q8_0", "q5": "q5_0", "q4": "q4_0"}


def kv_type_name(name: str) -> str:
    """Return the full name of a KV type, or of one for K and one for V: ``k=q8_0,v=f16``.

    ``q8`` is ``q8_0``; a pair of the same is that type. Raises ValueError with a hint.
    """
    if "=" not in name:
        return _one(name)
    parts = dict(part.strip().lower().split("=", 1) for part in name.split(",") if "=" in part)
    if parts.keys() != {"k", "v"} or name.count(",") != 1:
        raise ValueError(f"{name!r} names no KV type for each of k and v, as k=q8_0,v=f16 does")
    k, v = _one(parts["k"]), _one(parts["v"])
    return k if k == v else f"k={k},v={v}"


def kv_pair(name: str) -> tuple[KvType, KvType]:
    """Return the types of K and of V by a full name."""
    if "=" not in name:
        return KV_TYPES[name], KV_TYPES[name]
    k, v = (part.partition("=")[2] for part in name.split(","))
    return KV_TYPES[k], KV_TYPES[v]


def _one(name: str) -> str:
    wanted = KV_ALIASES.get(name.lower(), name.lower())
    if wanted in KV_TYPES:
        return wanted
    hint = nearest(wanted, KV_TYPES)
    raise ValueError(f"there is no KV type {name!r}{hint}; llama.cpp has {', '.join(KV_TYPES)}")
