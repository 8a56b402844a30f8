"""Random-weight GGUF files of encoders, for tests and measurements: embedders of each pooling, and rerankers.

They have BERT's shape, or with --causal that of Qwen3-Embedding and Qwen3-Reranker (pooling last or rank).

python -m models.encoders --out small.gguf --layers 12 --width 384 --heads 12 --ffn 1536
"""

from __future__ import annotations

import argparse
import string
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import gguf
import numpy as np

from models.vocabulary import add_byte_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

Pooling = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: dict[Pooling, gguf.PoolingType] = {
    "none": gguf.PoolingType.NONE,
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "last": gguf.PoolingType.LAST,
    "rank": gguf.PoolingType.RANK,
}
_CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPREAD = 0.3
RERANK_TEMPLATE = (
    "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class EncoderShape:
    """The dimensions of one encoder. `context` is the longest input in tokens; `labels` are a reranker's outputs.

    One that is `causal` has half as many KV heads as heads.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    ffn: int = 128
    context: int = 128
    pooling: Pooling = "mean"
    labels: int = 1
    causal: bool = False


def _add_vocabulary(writer: gguf.GGUFWriter) -> int:
    """Add a WordPiece vocabulary of ASCII characters; return its size."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    # llama.cpp marks the beginning of a word, where the published files mark its continuation.
    tokens = [*_CONTROL, *(f"\u2581{letter}" for letter in letters), *letters]
    kinds = [gguf.TokenType.CONTROL] * len(_CONTROL)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(_CONTROL))
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_mask_token_id(4)
    return len(tokens)


def _tensors(shape: EncoderShape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, rows last."""
    width, ffn = shape.width, shape.ffn
    yield "token_embd.weight", (vocabulary, width)
    yield "token_types.weight", (2, width)
    yield "position_embd.weight", (shape.context, width)
    yield from _pair("token_embd_norm", (width,))
    for layer in range(shape.layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield from _pair(f"blk.{layer}.{name}", (width, width))
        yield from _pair(f"blk.{layer}.attn_output_norm", (width,))
        yield from _pair(f"blk.{layer}.ffn_up", (ffn, width))
        yield from _pair(f"blk.{layer}.ffn_down", (width, ffn))
        yield from _pair(f"blk.{layer}.layer_output_norm", (width,))
    if shape.pooling == "rank":
        yield from _pair("cls", (width, width))
        yield from _pair("cls.output", (shape.labels, width))


def _causal_tensors(shape: EncoderShape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn, head = shape.width, shape.ffn, shape.width // shape.heads
    kv = width // 2
    yield "token_embd.weight", (vocabulary, width)
    yield "output_norm.weight", (width,)
    for layer in range(shape.layers):
        for name, rows in (
            ("attn_q", width),
            ("attn_k", kv),
            ("attn_v", kv),
            ("attn_output", width),
        ):
            yield f"blk.{layer}.{name}.weight", (rows, width)
        for name, size in (("attn_q", head), ("attn_k", head), ("attn", width), ("ffn", width)):
            yield f"blk.{layer}.{name}_norm.weight", (size,)
        for name in ("ffn_gate", "ffn_up"):
            yield f"blk.{layer}.{name}.weight", (ffn, width)
        yield f"blk.{layer}.ffn_down.weight", (width, ffn)
    if shape.pooling == "rank":
        yield "cls.output.weight", (shape.labels, width)


def _pair(name: str, dims: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", dims
    yield f"{name}.bias", dims[:1]


def _add_causal(writer: gguf.GGUFWriter, shape: EncoderShape) -> None:
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count_kv(shape.heads // 2)
    writer.add_key_length(shape.width // shape.heads)
    writer.add_value_length(shape.width // shape.heads)
    writer.add_rope_freq_base(1e6)
    writer.add_add_eos_token(shape.pooling == "last")
    if shape.pooling == "rank":
        writer.add_chat_template([{"name": "rerank", "template": RERANK_TEMPLATE}])


def write_encoder(
    out: Path, shape: EncoderShape | None = None, *, seed: int = 0, name: str = "encoder"
) -> Path:
    """Write a random-weight encoder to `out`, and return `out`. The same seed gives the same file."""
    shape = shape or EncoderShape()
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, "qwen3" if shape.causal else "bert")
    size = add_byte_vocabulary(writer) if shape.causal else _add_vocabulary(writer)
    writer.add_name(name)
    writer.add_vocab_size(size)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.causal:
        _add_causal(writer, shape)
    else:
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(value=False)
    writer.add_pooling_type(POOLINGS[shape.pooling])
    if shape.pooling == "rank":
        writer.add_classifier_output_labels([f"label {n}" for n in range(shape.labels)])
    for tensor, dims in (_causal_tensors if shape.causal else _tensors)(shape, size):
        values = rng.standard_normal(dims, dtype=np.float32)
        if tensor.endswith("norm.weight"):
            values = np.ones(dims, np.float32)
        elif tensor.endswith("bias"):
            values *= np.float32(0.02)
        else:
            values *= np.float32(_SPREAD if tensor.endswith("embd.weight") else dims[-1] ** -0.5)
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def main(argv: list[str] | None = None) -> int:
    """Write the encoder that the command line asks for and say what was written."""
    parser = argparse.ArgumentParser(prog="python -m models.encoders", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the GGUF to write")
    parser.add_argument("--seed", type=int, default=0)
    for each in fields(EncoderShape):
        if each.name == "causal":
            parser.add_argument("--causal", action="store_true")
        elif each.name == "pooling":
            parser.add_argument("--pooling", choices=sorted(POOLINGS), default=each.default)
        else:
            parser.add_argument(f"--{each.name}", type=int, default=each.default)
    given = vars(parser.parse_args(sys.argv[1:] if argv is None else argv))
    shape = EncoderShape(**{each.name: given[each.name] for each in fields(EncoderShape)})
    write_encoder(given["out"], shape, seed=given["seed"])
    sys.stdout.write(f"{given['out']}: {given['out'].stat().st_size / 1e6:.1f} MB, {shape}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
