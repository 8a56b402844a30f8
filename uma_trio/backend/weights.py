"""What a tick reads of a model's weights: arithmetic on the tensors that its header lists."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from uma_trio.backend.gguf_header import GgufHeader

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
