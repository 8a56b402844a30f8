"""Conversion to GGUF: the weights as they are, the tokenizer, and a chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import torch
from gguf import GGMLQuantizationType as QType

from models.storyteller import corpus
from models.vocabulary import CHAT_TEMPLATE

if TYPE_CHECKING:
    from pathlib import Path

_DESCRIPTION = "A tiny demonstration model that tells little stories; trained from nothing."


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> int:
    """Add the vocabulary and the merges; return the size of the vocabulary."""
    saved = json.loads(source.read_text(encoding="utf-8"))["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    special = {corpus.TEXT_END, corpus.START, corpus.END}
    kinds = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(corpus.TEXT_END))
    writer.add_eos_token_id(tokens.index(corpus.END))
    writer.add_eot_token_id(tokens.index(corpus.END))
    writer.add_pad_token_id(tokens.index(corpus.TEXT_END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def _add_shape(writer: gguf.GGUFWriter, size: dict, vocabulary: int, name: str) -> None:
    writer.add_name(name)
    writer.add_description(_DESCRIPTION)
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(size["context"])
    writer.add_embedding_length(size["width"])
    writer.add_block_count(size["layers"])
    writer.add_feed_forward_length(size["ffn"])
    writer.add_head_count(size["heads"])
    writer.add_head_count_kv(size["kv_heads"])
    writer.add_key_length(size["head"])
    writer.add_value_length(size["head"])
    writer.add_rope_dimension_count(size["head"])
    writer.add_rope_freq_base(size["rope_base"])
    writer.add_layer_norm_rms_eps(size["epsilon"])


def convert(weights: Path, tokenizer: Path, out: Path, name: str) -> None:
    """Write a trained network as a GGUF: matrices as Q8_0, norms as they are."""
    saved = torch.load(weights, map_location="cpu", weights_only=True)
    writer = gguf.GGUFWriter(out, "llama")
    vocabulary = _add_tokenizer(writer, tokenizer)
    if vocabulary != saved["size"]["vocabulary"]:
        raise ValueError(f"{tokenizer} has {vocabulary} tokens, {weights} expects others")
    _add_shape(writer, saved["size"], vocabulary, name)
    for tensor, value in saved["weights"].items():
        data = value.float().numpy()
        if data.ndim == 2:
            packed = gguf.quants.quantize(data, QType.Q8_0)
            writer.add_tensor(tensor, packed, raw_dtype=QType.Q8_0)
        else:
            writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
