"""Whether flash attention is worth it on a CPU: what is timed both ways, and what follows from the times.

llama.cpp computes attention on a CPU in one of two ways, fixed when the context is made. Without flash
attention each token of a tick pays for every cell of the cache, whosever it is. With it a token pays for
its own cells only, but 2 to 63 tokens are taken one at a time (`ggml-cpu/ops.cpp`, `ggml_fa_tile_config`),
which is slow on some processors and fast on others. Which of the two is faster therefore depends on the processor, the heads of the
model and on how many sequences share the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import frozen

#: The cells that each of the sequences holds behind which is timed, about a chat's prompt (below).
SEQUENCES: Final = 4
DEPTH: Final = 1024


@frozen
class AttentionShape:
    """A decode: so many sequences, so many tokens of each."""

    sequences: int
    tokens: int

    @property
    def n_tokens(self) -> int:
        """The tokens of all sequences."""
        return self.sequences * self.tokens


@frozen
class Subject:
    """What is timed: a model by its name and the bytes of its file, and how it is computed.

    `library` tells builds of llama.cpp apart.
    """

    model: str
    size_bytes: int
    kv_type: str
    threads: int
    library: str


#: Seconds of a shape without flash attention, and with it.
Seconds = dict[AttentionShape, tuple[float, float]]

#: Says whether flash attention is faster for a subject, None if that is not known. May measure it by the function.
Chooser = Callable[[Subject, Callable[[], Seconds]], bool | None]

#: A chunk of a prompt alone, and one beside streams.
WIDE: Final = AttentionShape(1, 64)
MIXED: Final = AttentionShape(SEQUENCES, 4)
#: How many decodes of each shape a chat takes: 1,020 tokens of prompt and 129 of answer, the medians of the
#: conversations in Azure's public trace (Patel and others, Splitwise, ISCA 2024). Half of the prompt is computed in
#: chunks of 64, half in ticks of 16 beside streams; half of the answer alone, half in ticks of four. A prompt that was
#: begun is finished before another one, so a chunk has tokens of one sequence.
CHAT: Final = {
    AttentionShape(1, 1): 129 / 2,
    AttentionShape(SEQUENCES, 1): 129 / 2 / SEQUENCES,
    MIXED: 1020 / 2 / 16,
    WIDE: 1020 / 2 / 64,
}
SHAPES: Final = tuple(CHAT)
#: Those without which nothing is known. The rest is left out where tokens are slow.
NEEDED: Final = tuple(shape for shape in SHAPES if shape != WIDE)
#: The size of a context in which they can be timed.
PROBE_BATCH: Final = max(shape.n_tokens for shape in SHAPES)
PROBE_CELLS: Final = SEQUENCES * DEPTH + PROBE_BATCH
#: So much faster flash attention must be to be chosen: without it a lone answer with a seed is exactly repeatable.
WORTH: Final = 0.03


def chat_s(seconds: Seconds) -> tuple[float, float]:
    """Return the seconds of the decodes of a chat, without flash attention and with it.

    Where `WIDE` was not timed, all of the prompt is computed in ticks like `MIXED`.
    """
    decodes = dict(CHAT)
    if WIDE not in seconds:
        decodes[MIXED] += decodes.pop(WIDE) * WIDE.n_tokens / MIXED.n_tokens
    return (
        sum(n * seconds[shape][0] for shape, n in decodes.items()),
        sum(n * seconds[shape][1] for shape, n in decodes.items()),
    )


def prefers_flash(seconds: Seconds) -> bool:
    """Whether flash attention should be used, by the times of all shapes, or of `NEEDED`."""
    off_s, on_s = chat_s(seconds)
    return on_s < (1.0 - WORTH) * off_s
