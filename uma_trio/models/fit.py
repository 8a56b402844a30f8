"""Context and slots of a model that is about to be loaded, from what it was trained for and from the memory that is free. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from attrs import frozen

from uma_trio.config.options import SLOTS
from uma_trio.words import size

#: Sizes of a slot. Coarse, so that a restart with a little less free memory finds the same estimates and saved prefixes.
SIZES: Final = (
    512,
    1024,
    2048,
    3072,
    4096,
    6144,
    8192,
    12288,
    16384,
    24576,
    32768,
    49152,
    65536,
    98304,
    131072,
)
#: A larger slot is not chosen by itself. A CPU computes a prompt of 32,768 tokens in minutes; agents compact at 100,000 to 200,000.
LONGEST_ON_CPU, LONGEST_ON_GPU = 32_768, 131_072
#: Slots are halved rather than that each has fewer tokens: coding agents begin with 10,000 and more, chats fit into 4,096.
_AGENT, _CHAT = 8192, 4096
_FEWER: Final = 4
#: Bytes of a GPU for what is neither weights nor KV cache: buffers of a tick of 1,024 tokens, the driver's context.
DEVICE_MARGIN: Final = 1536 << 20
#: Of the machine's memory beside the weights, the part that the KV cache may take; the rest is for other programs.
HOST_SHARE: Final = 0.5
#: Assumed if the system does not tell what is free.
UNKNOWN_ROOM: Final = 4 << 30


@frozen
class Memory:
    """Bytes that are free for the weights and the KV cache of all configured models, on a GPU or not."""

    free: int
    on_device: bool = False


@frozen
class Fit:
    """A chosen context: `n_ctx` tokens in all for `slots`, and why. The machine has memory for one of `largest` tokens."""

    n_ctx: int
    slots: int
    reason: str
    largest: int


def fit_context(
    memory: Memory,
    weights: int,
    cell_bytes: float,
    trained: int,
    slots: int | None = None,
    shares: int = 1,
) -> Fit:
    """Choose the context of a model.

    `weights` are bytes of all configured models, `cell_bytes` those of a token in the KV cache (0 if unknown), `trained` tokens (0 if
    unknown), and `shares` the number of contexts that are to have room.
    """
    longest = LONGEST_ON_GPU if memory.on_device else LONGEST_ON_CPU
    cap = min(trained or longest, longest)
    beside = max(0, memory.free - weights)
    budget = beside - DEVICE_MARGIN if memory.on_device else int(beside * HOST_SHARE)
    cells = max(0, budget) / shares / cell_bytes if cell_bytes else SLOTS * _AGENT
    chosen = slots or SLOTS
    if slots is None:
        while chosen > _FEWER and cells / chosen < min(cap, _AGENT):
            chosen //= 2
        while chosen > 1 and cells / chosen < min(cap, _CHAT):
            chosen //= 2
    each = _largest_size(cells / chosen, cap)
    if each == trained:
        reason = "the model was trained for no more"
    elif each == cap:
        reason = (
            "a longer one is slow on this CPU" if not memory.on_device else "more is seldom used"
        )
    else:
        where = "GPU" if memory.on_device else "machine"
        reason = f"of the {size(memory.free)} free on the {where}, {size(weights)} are for weights, {size(max(0, budget))} for KV cache"
    most = min(beside / shares / cell_bytes if cell_bytes else cells, (trained or longest) * chosen)
    largest = int(most / chosen) // 256 * 256 * chosen
    return Fit(each * chosen, chosen, reason, max(largest, each * chosen))


def _largest_size(cells: float, cap: int) -> int:
    return max(
        (each for each in (*SIZES, cap) if each <= min(cells, cap)), default=min(cap, SIZES[0])
    )


def layers_of_experts_off_device(expert_bytes: Iterable[int], others: int, room: int) -> int:
    """Return for how many layers, the first ones, the routed experts have to stay in the machine's memory.

    `expert_bytes` are those of each layer, `others` the bytes that have to be on the device. 0 if all fit.
    """
    remaining = list(expert_bytes)
    moved = 0
    while moved < len(remaining) and others + sum(remaining[moved:]) > room:
        moved += 1
    return moved
