"""The vocabularies of synthetic models: bytes, or that of another GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
from gguf import GGUFValueType

if TYPE_CHECKING:
    from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _byte_pieces() -> list[str]:
    """The 256 byte tokens, in the printable alphabet byte-level BPE spells bytes with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def add_byte_vocabulary(writer: gguf.GGUFWriter) -> int:
    """Add a vocabulary of bytes and three control tokens; return its size."""
    pieces = _byte_pieces()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # The reader of the file insists on a list of merges, and the writer on one element.
    tokens = [*pieces, "th", *control]
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def copy_vocabulary(writer: gguf.GGUFWriter, source: Path) -> int:
    """Copy every tokenizer field of another GGUF; return the size of its vocabulary."""
    reader = gguf.GGUFReader(source)
    size = 0
    for name, field in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        if name == gguf.Keys.Tokenizer.LIST:
            size = len(value)
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], inner)
    if not size:
        raise ValueError(f"{source} holds no token list")
    if gguf.Keys.Tokenizer.CHAT_TEMPLATE not in reader.fields:
        writer.add_chat_template(CHAT_TEMPLATE)
    return size
