"""An encoder's batch: arrays of numpy, and the struct of llama.cpp that points at them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_options import MAX_SLOTS
from uma_trio.backend.base import IntArray


class Rows:
    """Room for `capacity` tokens. `struct` is what is computed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq_id = np.ones(capacity, np.int32)
        self._want = np.ones(capacity, np.int8)
        self._ids = np.arange(MAX_SLOTS, dtype=np.int32)
        self._addresses = self._ids.ctypes.data + np.arange(MAX_SLOTS, dtype=np.uintp) * 4
        self._seq_id = np.full(capacity, self._addresses[0], np.uintp)
        self.struct = llama.llama_batch()
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq_id),
            ("seq_id", self._seq_id),
            ("logits", self._want),
        ):
            kind = dict(llama.llama_batch._fields_)[name]
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kind))

    def put(self, inputs: Sequence[IntArray], firsts: Sequence[int]) -> int:
        """Write the tokens of inputs, each from position `firsts` on; return how many they are.

        An input is the sequence of its number. Raises ValueError where llama.cpp would end the process.
        """
        n_tokens = sum(map(len, inputs))
        if not 0 < n_tokens <= self._capacity or len(inputs) > MAX_SLOTS:
            raise ValueError(f"{len(inputs)} inputs of {n_tokens} tokens are no batch")
        at = 0
        for index, (tokens, first) in enumerate(zip(inputs, firsts, strict=True)):
            end = at + len(tokens)
            self._token[at:end] = tokens
            self._pos[at:end] = np.arange(first, first + len(tokens))
            self._seq_id[at:end] = self._addresses[index]
            at = end
        self.struct.n_tokens = n_tokens
        return n_tokens
