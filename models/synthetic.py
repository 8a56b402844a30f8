"""Random-weight GGUF files of any Llama shape, for tests and benchmarks.

The speed of a model does not depend on the values of its weights, so a file of
random blocks of the right shape and type measures as well as a trained one, and
takes seconds to make. A byte vocabulary makes a real, very small model for tests;
a vocabulary copied from another GGUF makes tokenising and sampling cost what they
cost in life.

    python -m models.synthetic --preset tiny --out tiny.gguf
    python -m models.synthetic --preset 0.5b --type Q4_0 --vocab ggml-vocab-qwen2.gguf --out half.gguf
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QType

from models.vocabulary import add_byte_vocabulary, copy_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: llama.cpp pads nothing: a row must be a whole number of blocks. Where a width is no
#: multiple of 256 its own quantiser falls back to these types, and so do we.
_FALLBACK = {QType.Q4_K: QType.Q5_0, QType.Q6_K: QType.Q8_0}

_FILE_TYPES = {
    QType.F32: gguf.LlamaFileType.ALL_F32,
    QType.F16: gguf.LlamaFileType.MOSTLY_F16,
    QType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    QType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    QType.Q5_0: gguf.LlamaFileType.MOSTLY_Q5_0,
    QType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    QType.Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M,
    QType.Q6_K: gguf.LlamaFileType.MOSTLY_Q6_K,
}

TYPES = tuple(kind.name for kind in _FILE_TYPES)


@dataclass(frozen=True)
class Shape:
    """The dimensions of one Llama-shaped model, and how its matrices are stored."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 256
    experts: int = 0
    experts_used: int = 2
    head_dim: int | None = None
    context: int = 2048
    rope_base: float = 10000.0
    tied: bool = True
    kind: str = "Q8_0"
    embedding_kind: str | None = None
    window: int = 0
    state: int = 0
    convolution: int = 0

    @property
    def architecture(self) -> str:
        """What llama.cpp calls such a model.

        With a window three layers of four have it; with a state there is no attention (Mamba). With a
        convolution each second layer has one of so many tokens in place of attention: a hybrid.
        """
        if self.state:
            return "mamba"
        if self.convolution:
            return "lfm2"
        return "cohere2" if self.window else "llama"

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_dim or self.width // self.heads

    def check(self) -> None:
        """Refuse a shape that llama.cpp could not run, in words that say what is wrong."""
        if min(self.layers, self.width, self.heads, self.kv_heads, self.ffn, self.context) < 1:
            raise ValueError("layers, width, heads, KV heads, FFN and context must be 1 or more")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} KV heads")
        if self.head_width % 2:
            raise ValueError(f"head width {self.head_width} is odd; rotary positions need pairs")
        if self.window and (self.experts or not self.tied):
            raise ValueError("a model with a window has no experts and tied embeddings")
        if self.state and (self.window or self.experts):
            raise ValueError("a recurrent model has neither a window nor experts")
        if self.convolution and (self.window or self.state or self.experts or not self.tied):
            raise ValueError("a hybrid model has no window, state or experts, and tied embeddings")
        if self.experts and not 1 <= self.experts_used <= self.experts:
            raise ValueError(f"{self.experts_used} of {self.experts} experts cannot be used")


PRESETS: dict[str, Shape] = {
    # F16: quantised matrices take machine-specific paths (repacking, AMX) that a small
    # test model should not depend on.
    "tiny": Shape(kind="F16"),
    "window-tiny": Shape(layers=4, kind="F16", window=32),
    "recurrent-tiny": Shape(kind="F16", state=16),
    "hybrid-tiny": Shape(layers=4, kind="F16", convolution=3),
    "moe-tiny": Shape(experts=4, ffn=128, kind="F16"),
    "moe": Shape(
        layers=12,
        width=1024,
        heads=16,
        kv_heads=4,
        ffn=1792,
        experts=8,
        context=32768,
        rope_base=1e6,
    ),
    "0.5b": Shape(
        layers=24, width=896, heads=14, kv_heads=2, ffn=4864, context=32768, rope_base=1e6
    ),
    "1b": Shape(
        layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, context=131072, rope_base=5e5
    ),
    "8b": Shape(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        context=131072,
        rope_base=5e5,
        tied=False,
    ),
}


_CONVOLUTION = 4  # tokens that a Mamba layer's convolution sees
# By role, of what is stored in full: how far its values are spread.
_SPREADS = {"norm": 0.0, "router": 0.1, "small": 0.5, "decay": 0.5}


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write: its name, its shape (rows last), its type and its spread."""

    name: str
    shape: tuple[int, ...]
    kind: QType
    spread: float


def _usable(kind: QType, row: int, name: str) -> QType:
    """Return `kind`, or what llama.cpp would fall back to for a row of this width."""
    if row % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    fallback = _FALLBACK.get(kind, QType.F16)
    return fallback if row % gguf.GGML_QUANT_SIZES[fallback][0] == 0 else QType.F16


def _recurrent_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and role of the tensors of one Mamba layer."""
    width, inner, rank, state = shape.width, 2 * shape.width, _rank(shape), shape.state
    prefix = f"blk.{layer}."
    yield prefix + "attn_norm.weight", (width,), "norm"
    yield prefix + "ssm_in.weight", (2 * inner, width), "matrix"
    yield prefix + "ssm_conv1d.weight", (inner, _CONVOLUTION), "small"
    yield prefix + "ssm_conv1d.bias", (inner,), "small"
    yield prefix + "ssm_x.weight", (rank + 2 * state, inner), "matrix"
    yield prefix + "ssm_dt.weight", (inner, rank), "matrix"
    yield prefix + "ssm_dt.bias", (inner,), "small"
    yield prefix + "ssm_a", (inner, state), "decay"
    yield prefix + "ssm_d", (inner,), "small"
    yield prefix + "ssm_out.weight", (width, inner), "matrix"


def _convolves(shape: Shape, layer: int) -> bool:
    return shape.convolution > 0 and layer % 2 == 0


def _rank(shape: Shape) -> int:
    return max(1, shape.width // 16)


def _layer_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and role of the tensors of one layer."""
    if shape.state:
        yield from _recurrent_tensors(shape, layer)
        return
    width, ffn, head = shape.width, shape.ffn, shape.head_width
    prefix = f"blk.{layer}."
    yield prefix + "attn_norm.weight", (width,), "norm"
    if _convolves(shape, layer):
        yield prefix + "shortconv.conv.weight", (width, shape.convolution), "small"
        yield prefix + "shortconv.in_proj.weight", (3 * width, width), "matrix"
        yield prefix + "shortconv.out_proj.weight", (width, width), "matrix"
    else:
        yield prefix + "attn_q.weight", (shape.heads * head, width), "matrix"
        yield prefix + "attn_k.weight", (shape.kv_heads * head, width), "matrix"
        yield prefix + "attn_v.weight", (shape.kv_heads * head, width), "matrix"
        yield prefix + "attn_output.weight", (width, shape.heads * head), "matrix"
        if shape.convolution:
            yield prefix + "attn_q_norm.weight", (head,), "norm"
            yield prefix + "attn_k_norm.weight", (head,), "norm"
    if not shape.window:
        yield prefix + "ffn_norm.weight", (width,), "norm"
    if shape.experts:
        yield prefix + "ffn_gate_inp.weight", (shape.experts, width), "router"
        yield prefix + "ffn_gate_exps.weight", (shape.experts, ffn, width), "matrix"
        yield prefix + "ffn_down_exps.weight", (shape.experts, width, ffn), "matrix"
        yield prefix + "ffn_up_exps.weight", (shape.experts, ffn, width), "matrix"
    else:
        yield prefix + "ffn_gate.weight", (ffn, width), "matrix"
        yield prefix + "ffn_down.weight", (width, ffn), "matrix"
        yield prefix + "ffn_up.weight", (ffn, width), "matrix"


def _tensors(shape: Shape, vocabulary: int) -> Iterator[_Tensor]:
    """Yield every tensor of the model in file order."""
    kind = QType[shape.kind]
    embedding = QType[shape.embedding_kind or shape.kind]

    def one(name: str, dims: tuple[int, ...], role: str) -> _Tensor:
        if role in _SPREADS:
            return _Tensor(name, dims, QType.F32, _SPREADS[role])
        wanted = embedding if role == "embedding" else kind
        # A spread of 1/sqrt(row) keeps activations near 1 through any number of layers.
        return _Tensor(name, dims, _usable(wanted, dims[-1], name), dims[-1] ** -0.5)

    yield one("token_embd.weight", (vocabulary, shape.width), "embedding")
    last = "token_embd_norm" if shape.convolution else "output_norm"  # as LFM2's files call it
    yield one(f"{last}.weight", (shape.width,), "norm")
    if not shape.tied:
        yield one("output.weight", (vocabulary, shape.width), "embedding")
    for layer in range(shape.layers):
        for name, dims, role in _layer_tensors(shape, layer):
            yield one(name, dims, role)


def _scaled(blocks: np.ndarray, at: int, scale: float) -> None:
    """Write one half-precision scale into every block, at byte `at`."""
    blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)


def _q4_0(blocks: np.ndarray, spread: float) -> None:
    _scaled(blocks, 0, spread / 4.61)  # 4.61: the deviation of 16 even steps


def _q5_0(blocks: np.ndarray, spread: float) -> None:
    _scaled(blocks, 0, spread / 9.23)


def _q8_0(blocks: np.ndarray, spread: float) -> None:
    _scaled(blocks, 0, spread / 73.9)


def _q4_k(blocks: np.ndarray, spread: float) -> None:
    """Scale and minimum 32 in all eight groups, so values are d*32*(q - 7.5)."""
    step = spread / (4.61 * 32)
    _scaled(blocks, 0, step)
    _scaled(blocks, 2, step * 7.5)
    blocks[:, 4:12] = 0xA0
    blocks[:, 12:16] = 0


def _q6_k(blocks: np.ndarray, spread: float) -> None:
    """Scale 1 in all sixteen groups, so values are d*(q - 32)."""
    blocks[:, 192:208] = 1
    _scaled(blocks, 208, spread / 18.5)


_SCALERS: dict[QType, Callable[[np.ndarray, float], None]] = {
    QType.Q4_0: _q4_0,
    QType.Q5_0: _q5_0,
    QType.Q8_0: _q8_0,
    QType.Q4_K: _q4_k,
    QType.Q6_K: _q6_k,
}


def _data(tensor: _Tensor, rng: np.random.Generator) -> np.ndarray:
    """Random contents of one tensor; quantised ones are random blocks with a sane scale."""
    if tensor.name.endswith("norm.weight"):
        return np.ones(tensor.shape, dtype=np.float32)
    if tensor.kind in _SCALERS:
        block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        count = int(np.prod(tensor.shape)) // block
        blocks = np.frombuffer(rng.bytes(count * size), dtype=np.uint8).reshape(count, size).copy()
        _SCALERS[tensor.kind](blocks, tensor.spread)
        return blocks.reshape(*tensor.shape[:-1], -1)
    values = rng.standard_normal(tensor.shape, dtype=np.float32) * np.float32(tensor.spread)
    if tensor.name.endswith("ssm_a"):  # a state fades
        values = -np.exp(values)
    return np.asarray(gguf.quants.quantize(values, tensor.kind))


def _add_shape(writer: gguf.GGUFWriter, shape: Shape, vocabulary: int, name: str) -> None:
    """Add the fields that tell llama.cpp the dimensions."""
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[QType[shape.kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.convolution:
        layers = range(shape.layers)
        writer.add_head_count_kv([0 if _convolves(shape, n) else shape.kv_heads for n in layers])
        writer.add_shortconv_l_cache(shape.convolution)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.window:
        writer.add_layer_norm_eps(1e-5)
        writer.add_sliding_window(shape.window)
        writer.add_logit_scale(1.0)
    if shape.state:
        writer.add_ssm_conv_kernel(_CONVOLUTION)
        writer.add_ssm_inner_size(2 * shape.width)
        writer.add_ssm_state_size(shape.state)
        writer.add_ssm_time_step_rank(_rank(shape))
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)


def write_model(
    out: Path,
    shape: Shape = PRESETS["tiny"],
    *,
    vocabulary: Path | None = None,
    seed: int = 0,
    name: str = "synthetic",
) -> Path:
    """Write a random-weight model of this shape to `out`, and return `out`.

    Args:
        out: The file to write; its folder must exist.
        shape: Dimensions and storage types.
        vocabulary: A GGUF whose tokenizer is copied; without it, a byte vocabulary.
        seed: The same seed gives the same file.
        name: The model's name in the file.
    """
    shape.check()
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, shape.architecture)
    size = copy_vocabulary(writer, vocabulary) if vocabulary else add_byte_vocabulary(writer)
    _add_shape(writer, shape, size, name)
    tensors = list(_tensors(shape, size))
    for tensor in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        count = int(np.prod(tensor.shape))
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            count // block * block_bytes,
            raw_dtype=tensor.kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:  # one at a time: a large model never has to fit in memory
        writer.write_tensor_data(_data(tensor, rng))
    writer.close()
    return out


def _arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; a dimension that is given overrides the preset's."""
    parser = argparse.ArgumentParser(prog="python -m models.synthetic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="the GGUF to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    for field in ("layers", "width", "heads", "kv-heads", "ffn", "head-dim", "context"):
        parser.add_argument(f"--{field}", type=int)
    parser.add_argument("--experts", type=int, help="0 for a dense model")
    parser.add_argument("--experts-used", type=int)
    parser.add_argument("--window", type=int, help="how far three layers of four look back")
    parser.add_argument("--state", type=int, help="numbers a channel's state has: a Mamba model")
    parser.add_argument(
        "--convolution", type=int, help="tokens that each second layer sees: a hybrid"
    )
    parser.add_argument("--type", dest="kind", type=str.upper, choices=TYPES)
    parser.add_argument("--embedding-type", dest="embedding_kind", type=str.upper, choices=TYPES)
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--vocab", type=Path, help="copy the tokenizer of this GGUF")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Write the model the command line asks for and say what was written."""
    given = _arguments(sys.argv[1:] if argv is None else argv)
    wanted = {
        field: value
        for field, value in vars(given).items()
        if field in Shape.__dataclass_fields__ and value is not None
    }
    shape = replace(PRESETS[given.preset], **wanted)
    try:
        write_model(given.out, shape, vocabulary=given.vocab, seed=given.seed, name=given.preset)
    except ValueError as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    sys.stdout.write(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB, {shape}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
