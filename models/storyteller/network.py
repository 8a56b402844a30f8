"""The network: a small Llama, written so that its weights go into a GGUF as they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """The dimensions of a network."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head: int = 64
    context: int = 2048
    vocabulary: int = 3072
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    def as_dict(self) -> dict[str, float]:
        """The dimensions, to save beside the weights."""
        return asdict(self)


STORYTELLER = Size(width=256, layers=8, heads=4, kv_heads=2, ffn=768)


def _angles(size: Size, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, one pair of neighbours after another."""
    rates = size.rope_base ** (-torch.arange(0, size.head, 2).float() / size.head)
    angles = torch.outer(torch.arange(positions).float(), rates)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs: the order llama.cpp expects of this architecture."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to length one, times a weight per channel."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight.type_as(x), self.epsilon)


class Layer(nn.Module):
    """Attention with shared keys, then a gated feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        inner, shared = size.heads * size.head, size.kv_heads * size.head
        self.attn_norm = Norm(size.width, size.epsilon)
        self.attn_q = nn.Linear(size.width, inner, bias=False)
        self.attn_k = nn.Linear(size.width, shared, bias=False)
        self.attn_v = nn.Linear(size.width, shared, bias=False)
        self.attn_output = nn.Linear(inner, size.width, bias=False)
        self.ffn_norm = Norm(size.width, size.epsilon)
        self.ffn_gate = nn.Linear(size.width, size.ffn, bias=False)
        self.ffn_up = nn.Linear(size.width, size.ffn, bias=False)
        self.ffn_down = nn.Linear(size.ffn, size.width, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention over `x`."""
        rows, length, _ = x.shape
        heads = self.size.head
        q = self.attn_q(x).view(rows, length, -1, heads).transpose(1, 2)
        k = self.attn_k(x).view(rows, length, -1, heads).transpose(1, 2)
        v = self.attn_v(x).view(rows, length, -1, heads).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.attn_output(out.transpose(1, 2).reshape(rows, length, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attend(self.attn_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))


class Network(nn.Module):
    """The whole network; the embedding serves as output matrix too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.token_embd = nn.Embedding(size.vocabulary, size.width)
        self.blk = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.output_norm = Norm(size.width, size.epsilon)
        cos, sin = _angles(size, size.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._start()

    def _start(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 if not deep else 0.02 / self.size.layers**0.5)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The vectors before the output matrix."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.token_embd(tokens)
        for layer in self.blk:
            x = layer(x, cos, sin)
        return self.output_norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of every position."""
        return functional.linear(self.hidden(tokens), self.token_embd.weight)

    @property
    def parameters_in_all(self) -> int:
        """How many numbers the network has."""
        return sum(weight.numel() for weight in self.parameters())
