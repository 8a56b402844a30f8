"""What a context costs, and what memory there is: pure arithmetic on a model's header.

Used before a model is loaded, because a machine that overcommits grants any allocation and
kills the process when it is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from attrs import frozen

from uma_trio.backend.gguf_header import GgufHeader
from uma_trio.backend.kv_types import kv_pair

#: The tokens of one decode at the most, unless a caller says otherwise; and where a GPU computes all layers,
#: if there is room: wider chunks of a prompt take less time a token there.
N_BATCH: Final = 512
GPU_BATCH: Final = 1024
# What the header of a model has whose layers keep a state, or some of them; and the kinds that have a
# state without saying so there (`llm_arch_is_recurrent`, `llm_arch_is_hybrid` of llama.cpp).
_STATEFUL: Final = ("ssm.", "wkv.", "shortconv.")
_HYBRID: Final = frozenset({"deepseek4", "minimax-01"})


def kv_bytes(header: GgufHeader, n_ctx: int, kv_type: str) -> int:
    """Return the bytes of a KV cache of `n_ctx` cells; 0 if the header does not tell.

    Right for plain attention, with or without a sliding window (we keep full-size caches);
    too much, at most twice, for multi-head latent attention, which stores no V.
    """
    layers = min(header.number("block_count"), 4096)
    heads = header.number("attention.head_count")
    if not layers or not heads:
        return 0
    head_size = header.number("embedding_length") // heads
    kv_heads = sum(header.numbers("attention.head_count_kv", layers, heads))
    sizes = [header.number(f"attention.{part}_length", head_size) for part in ("key", "value")]
    return sum(
        n_ctx * kv_heads * size * kind.block_bytes // kind.block
        for size, kind in zip(sizes, kv_pair(kv_type), strict=True)
    )


def score_bytes(header: GgufHeader, n_ctx: int, n_batch: int) -> int:
    """Return the bytes of the scores of attention where flash attention is off; 0 if unknown.

    A float for each head, each token of a decode and each cell that there is, of one layer at a
    time. llama.cpp reserves them when the context is made; they are used as the cache fills.
    """
    return 4 * header.number("attention.head_count") * n_ctx * n_batch


def score_copy_bytes(header: GgufHeader, n_ctx: int, n_batch: int) -> int:
    """Return the bytes of the scores in half precision, beside :func:`score_bytes`; 0 if unknown.

    ggml's CPU backend converts them for the product with V (ggml-cpu.c, `ggml_graph_plan`: work_size), in a buffer of its own that
    llama.cpp's sums leave out. It grows as the cache fills.
    """
    return score_bytes(header, n_ctx, n_batch) // 2


def attention_only(header: GgufHeader) -> bool:
    """Whether every layer keeps its past in the KV cache, so that `kv_bytes` is meaningful."""
    if header.architecture in _HYBRID:
        return False
    stateful = tuple(f"{header.architecture}.{key}" for key in _STATEFUL)
    return not any(key.startswith(stateful) for key in header.metadata)


def sliding_window(header: GgufHeader) -> int:
    """Return how far layers with a sliding window look back; 0 if there are none."""
    return header.number("attention.sliding_window")


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes this process may still use, by the kernel and its cgroup; None if unknown.

    `root` is for tests: the directory that holds ``proc`` and ``sys``.
    """
    rooms = [_meminfo(root / "proc/meminfo"), _cgroup_v2(root), _cgroup_v1(root)]
    known = [room for room in rooms if room is not None]
    return min(known) if known else None


def _meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup_v2(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return None
    top = root / "sys/fs/cgroup"
    rooms = []
    for group in [top / own, *(top / own).parents]:
        if not group.is_relative_to(top):
            break
        room = _room(group / "memory.max", group / "memory.current")
        if room is not None:
            rooms.append(room)
    return min(rooms) if rooms else None


def _cgroup_v1(root: Path) -> int | None:
    group = root / "sys/fs/cgroup/memory"
    return _room(group / "memory.limit_in_bytes", group / "memory.usage_in_bytes")


def _room(limit: Path, used: Path) -> int | None:
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no such controller, or "max"
        return None


_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_ROUTED: Final = "_exps."  # the experts of a layer, stacked; shared ones are "_shexp."
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"  # where it is missing the embedding does its work
_LOOKED_UP: Final = "per_layer_token_embd.weight"


@frozen
class WeightsRead:
    """Bytes of weights: `always` by every tick, `expert` for each one that is reached.

    `expert` is one of them in all layers together; 0 for a dense model.
    """

    always: float
    expert: float


def weights_read(header: GgufHeader, size_bytes: int) -> WeightsRead:
    """Return what a tick reads of a model whose weights have `size_bytes` in all.

    Tables of which it reads a row for each token count for nothing. Tensors of a type that the
    header's reader does not know count as read always.
    """
    sizes = {tensor.name: tensor.n_bytes for tensor in header.tensors}
    tables = {_LOOKED_UP} | ({_EMBEDDING} if _OUTPUT in sizes else set())
    looked_up = sum(sizes.get(name, 0) for name in tables)
    experts = header.number("expert_count")
    routed = sum(size for name, size in sizes.items() if _ROUTED in name) if experts else 0
    return WeightsRead(size_bytes - looked_up - routed, routed / experts if experts else 0.0)


def expert_bytes_by_layer(header: GgufHeader) -> tuple[int, ...]:
    """Return the bytes of the routed experts of each layer, in order; empty for a dense model."""
    found: dict[int, int] = {}
    for tensor in header.tensors:
        layer = _BLOCK.match(tensor.name)
        if layer is not None and _ROUTED in tensor.name:
            found[int(layer[1])] = found.get(int(layer[1]), 0) + tensor.n_bytes
    if not found or not header.number("expert_count"):
        return ()
    return tuple(found.get(layer, 0) for layer in range(max(found) + 1))
