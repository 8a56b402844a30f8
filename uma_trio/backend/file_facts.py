"""What the head of a model's file says of a model that is not loaded."""

from __future__ import annotations

from pathlib import Path

from uma_trio.backend.base import ModelFacts
from uma_trio.backend.gguf_header import GgufHeader, Value, read_header
from uma_trio.words import one_line

_TEMPLATE = "tokenizer.chat_template"


def facts_of_file(path: Path) -> ModelFacts:
    """Return what a model's file says, in the words of llama.cpp. Raises :class:`ModelError`.

    Reading takes some tenths of a second for the largest vocabularies.
    """
    return facts_of(read_header(path))


def facts_of(header: GgufHeader) -> ModelFacts:
    """Return what a header says; `description` is the name of the file, which has the type of its weights."""
    template = header.metadata.get(_TEMPLATE)
    metadata = {
        key: _text(value)
        for key, value in header.metadata.items()
        if not isinstance(value, tuple) and not key.startswith("tokenizer.")
    }
    return ModelFacts(
        name=header.name,
        description=one_line(header.path.stem).upper().replace("-", " ").replace(".", " "),
        n_vocab=header.number("vocab_size"),
        n_ctx_train=header.number("context_length"),
        n_params=sum(tensor.n_elements for tensor in header.tensors),
        size_bytes=sum(tensor.n_bytes for tensor in header.tensors),
        n_embd=header.number("embedding_length"),
        chat_template=template if isinstance(template, str) else None,
        path=str(header.path),
        metadata=metadata,
    )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
