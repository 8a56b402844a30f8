"""Just enough of llama.cpp to measure a model: load, tokenise, decode greedily."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BATCH = 2048


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    """Drop llama.cpp's log."""


class Model:
    """One GGUF in one context of one sequence."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # Repacked weights are no faster at this size, and AMX set-up is miscompiled by
        # some compilers (gcc before 12.4): a native build crashes on its first batch.
        params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = wanted.n_batch = BATCH
        wanted.n_threads = wanted.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, wanted)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.seen: list[int] = []
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def template(self) -> str:
        """The chat template the file carries."""
        return llama_cpp.llama_model_chat_template(self.model, None).decode()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text; control tokens may be written out."""
        raw = text.encode()
        room = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), room, len(room), False, True)
        return list(room[:count])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without control tokens."""
        pieces = b""
        room = ctypes.create_string_buffer(64)
        for token in tokens:
            length = llama_cpp.llama_token_to_piece(self.vocab, token, room, 64, 0, False)
            pieces += room.raw[:length]
        return pieces.decode(errors="replace")

    def ends(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def forget(self, keep: int = 0) -> None:
        """Drop what was read, but for the first `keep` tokens."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, keep, -1)
        self.seen = self.seen[:keep]

    def read(self, tokens: Sequence[int], *, every: bool = False) -> np.ndarray:
        """Decode the tokens; return the logits of the last one, or of every one."""
        batch, start = self._batch, len(self.seen)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = every or index == len(tokens) - 1
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self.seen += tokens
        rows = len(tokens) if every else 1
        first = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(first, (rows, self.size)).copy()

    def resume(self, tokens: Sequence[int]) -> np.ndarray:
        """Make the context hold exactly these tokens; return the last one's logits."""
        same = 0
        for one, other in zip(self.seen, tokens, strict=False):
            if one != other:
                break
            same += 1
        self.forget(min(same, len(tokens) - 1))
        return self.read(tokens[len(self.seen) :])[-1]

    def greedy(self, prompt: Sequence[int], most: int) -> list[int]:
        """Continue the prompt by the likeliest token each time; the end token is kept."""
        logits = self.resume(prompt)
        said: list[int] = []
        for _ in range(most):
            token = int(logits.argmax())
            said.append(token)
            if self.ends(token) or len(self.seen) >= BATCH - 1:
                break
            logits = self.read([token])[-1]
        return said

    def close(self) -> None:
        """Give everything back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
