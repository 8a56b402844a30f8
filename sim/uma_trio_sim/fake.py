"""A deterministic model for tests: no weights, no threads, no clock.

Its next token is a keyed function of the sequence's whole history, so that any mix-up of
slots, positions or logits rows changes the text, and :meth:`FakeBackend.continuation` tells a
test what the text must be. It keeps KV cells with a capacity, answers with the return codes of
``llama_decode``, breaks where it is told to, and says what a tick costs in virtual seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Literal
from zlib import crc32

import numpy as np
from attrs import frozen

from uma_trio.backend.base import (
    Adapter,
    BackendDied,
    Batch,
    ContextLimits,
    DecodeStatus,
    FloatArray,
    IntArray,
    Interrupt,
    ModelFacts,
    Overlap,
    Saved,
    SpecialToken,
    Traits,
    Vocabulary,
    nothing,
)
from uma_trio.backend.cell_map import CellMap

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
N_VOCAB = 260
_SPECIAL = {BOS: "<s>", EOS: "</s>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
_NUMBERS = {text: number for number, text in _SPECIAL.items()}
_EACH_SPECIAL = re.compile(f"({'|'.join(map(re.escape, _NUMBERS))})")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the fake likes to say: words, spaces, and characters of two, three and four bytes, so
# that streams are cut inside characters.
_ALPHABET = "etaoin shrdlu cmfwyp, vbgkqjxz. é ß 漢 字 🦊 ".encode()
_MASK = (1 << 64) - 1
_WRONG = 0x5EED  # folded into what is computed behind cells that are lost
_LEAVES = 32

KvVerb = Literal["copy", "save", "restore"]
Cost = Callable[[int, int], float]


@frozen
class InjectedFault:
    """What goes wrong at one decode.

    `status` is returned instead of success. `keep` tokens of the batch reach the KV cache
    first, as a decode of several parts may leave them; then every slot loses its last `lose` cells.
    `bad_rows` get NaN logits. `died` is raised.
    """

    status: int = DecodeStatus.OK
    keep: int = 0
    lose: int = 0
    bad_rows: tuple[int, ...] = ()
    died: str | None = None

    def computed(self, n_tokens: int) -> int:
        """Return how many of `n_tokens` reach the cache, by the contract of the status."""
        if self.status == DecodeStatus.OK:
            return n_tokens
        if self.status in (DecodeStatus.NO_KV_ROOM, DecodeStatus.INVALID):
            return 0
        return min(self.keep, n_tokens)


def no_cost(_n_tokens: int, _n_rows: int) -> float:
    """A machine that needs no time."""
    return 0.0


def linear_cost(base_s: float, token_s: float) -> Cost:
    """A machine that needs `base_s` for a tick and `token_s` for each token of it."""
    return lambda n_tokens, _n_rows: base_s + token_s * n_tokens


def mix(history: int, token: int) -> int:
    """Fold one token into a history (the finaliser of a 64-bit mixing function)."""
    h = ((history ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
    h ^= h >> 29
    h = (h * 0xBF58476D1CE4E5B9) & _MASK
    return h ^ (h >> 32)


def _model_info(n_ctx: int, chat_template: str | None, n_vocab: int) -> ModelFacts:
    return ModelFacts(
        name="fake",
        description="deterministic fake",
        n_vocab=n_vocab,
        n_ctx_train=n_ctx,
        n_params=0,
        size_bytes=0,
        n_embd=0,
        chat_template=chat_template,
    )


class FakeVocabulary:
    """Bytes are tokens; four special ones follow, and as many without a text as are asked for."""

    end_tokens = frozenset({EOS, IM_END})
    bos_text = _SPECIAL[BOS]
    eos_text = _SPECIAL[EOS]
    adds_bos = True
    parts_at_lines = True

    def __init__(self, n_vocab: int = N_VOCAB) -> None:
        self.n_vocab = n_vocab

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        tokens: list[int] = [BOS] if add_special else []
        parts = _EACH_SPECIAL.split(text) if parse_special else [text]
        for n, part in enumerate(parts):  # every second one is special
            tokens.extend((_NUMBERS[part],) if n % 2 else part.encode())
        return np.array(tokens, np.int32)

    def apart(self, text: str) -> list[str]:
        return [text]

    def pieces(self) -> Sequence[bytes]:
        return [bytes([i]) for i in range(256)] + [b""] * (self.n_vocab - 256)

    def specials(self) -> Sequence[SpecialToken]:
        return [SpecialToken(number, text) for number, text in _SPECIAL.items()]


class FakeBackend:
    """See the module. `faults` maps the number of a decode (from 0) to what breaks there.

    `end_after` is the mean number of tokens before the model ends by itself; 0 is never.
    `last_cost_s` is what the latest decode cost; the inline driver sleeps it. What happens while
    a decode computes is up to `meanwhile`: it is called in the middle of each, and may interrupt it.

    Its `vocabulary` may be a real model's. With a `window` it has layers that lose what nobody's
    window holds, as llama.cpp's do: at every decode, all cells that could be taken are. Tokens
    computed behind lost cells are wrong. What of copying, saving and restoring fails is up to
    `kv_fails`. A decode has so many `parts`.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 1024,
        n_slots: int = 8,
        n_batch: int = 128,
        key: int = 1,
        cost: Cost = no_cost,
        end_after: int = 0,
        faults: Mapping[int, InjectedFault] | None = None,
        can_remove_part: bool = True,
        interruptible: bool = True,
        window: int = 0,
        chat_template: str | None = CHATML,
        n_rows: int | None = None,
        vocabulary: Vocabulary | None = None,
        parts: int = 1,
    ) -> None:
        n_seq = n_slots + _LEAVES
        self.limits = ContextLimits(
            n_ctx=n_ctx,
            n_ctx_seq=n_ctx,
            n_slots=n_slots,
            n_batch=n_batch,
            n_rows=n_slots if n_rows is None else n_rows,
            leaf_ids=range(n_slots, n_seq) if can_remove_part else range(0),
            can_go_back=can_remove_part,
            window=window,
        )
        self.vocabulary: Vocabulary = vocabulary or FakeVocabulary()
        self.model = _model_info(n_ctx, chat_template, self.vocabulary.n_vocab)
        self.batch = Batch(n_batch)
        self.description = "fake"
        self.last_cost_s, self.decodes, self.closed = 0.0, 0, False
        self.lowered = True  # since the last sequence was retired
        self.meanwhile: Overlap = nothing
        self.part: Overlap = nothing  # what happens in each part
        self.computed: dict[int, int] = {}  # tokens computed by slot, for tests of wasted work
        self._key, self._cost, self._end_after = key, cost, end_after
        self._faults = dict(faults or {})
        self._interruptible = interruptible
        self._flag = bytearray(1)  # of the next decode
        self._decoding: Generator[None, None, int] = self._decode_parts(0)
        self.decode_part_s = 0.0
        self.parts = parts
        self.kv_fails: Callable[[KvVerb], bool] = lambda _verb: False
        self._cells: list[list[int]] = [[] for _ in range(n_seq)]  # history after each position
        self._first = [0] * n_seq  # from here on layers with a window have everything
        self._map = CellMap(n_ctx, n_seq)
        self._logits = np.zeros((n_batch, self.vocabulary.n_vocab), np.float32)

    def continuation(self, prompt: Sequence[int] | IntArray, n: int) -> list[int]:
        """Return the `n` tokens that greedy decoding of `prompt` must give, ends included."""
        history = self.history(prompt)
        out: list[int] = []
        for _ in range(n):
            out.append(self.favourite(history))
            history = mix(history, out[-1])
        return out

    def favourite(self, history: int) -> int:
        """Return the token that greedy decoding gives behind what `history` stands for."""
        return self._choice(history)

    def history(self, tokens: Sequence[int] | IntArray, before: int | None = None) -> int:
        """Return what stands for a sequence of `tokens`, behind what stands for those before."""
        history = self._key if before is None else before
        for token in tokens:
            history = mix(history, int(token))
        return history

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, as a client must see it."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

    @property
    def used_cells(self) -> int:
        """KV cells in use, whosever they are; shared ones count once."""
        return self._map.used

    def arm(self) -> Interrupt | None:
        return partial(self._flag.__setitem__, 0, 1) if self._interruptible else None

    @property
    def traits(self) -> Traits:
        return Traits(interruptible=self._interruptible, longest_part=1 / self.parts)

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        self.begin_decode(n_tokens, while_computing, predicted_s=0.0)
        status = None
        while status is None:
            status = self.advance_decode(math.inf)
        return status

    def begin_decode(
        self, n_tokens: int, while_computing: Overlap = nothing, *, predicted_s: float
    ) -> None:
        while_computing()
        self.decode_part_s = predicted_s / self.parts
        self._decoding = self._decode_parts(n_tokens)

    def advance_decode(self, most_s: float, is_wanted: Callable[[], bool] = bool) -> int | None:
        left_s = most_s
        while True:
            try:
                next(self._decoding)
            except StopIteration as end:
                status: int = end.value
                return status
            left_s -= self.decode_part_s
            if left_s < self.decode_part_s or is_wanted():
                return None

    def _decode_parts(self, n_tokens: int) -> Generator[None, None, int]:
        """Compute the batch, with a stop behind each part but the last; return the status."""
        self.part()
        flag, self._flag = self._flag, bytearray(1)
        fault = self._faults.pop(self.decodes, None)
        self.decodes += 1
        self.last_cost_s = 0.0
        if fault is not None and fault.died is not None:
            raise BackendDied(fault.died)
        status = self._check(n_tokens)
        if status != DecodeStatus.OK:
            return status
        self.meanwhile()
        for _ in range(self.parts - 1):
            if flag[0]:
                return DecodeStatus.ABORTED
            yield
            self.part()
        if flag[0]:
            return DecodeStatus.ABORTED
        self._compute(n_tokens if fault is None else fault.computed(n_tokens))
        if fault is not None and fault.lose:
            for slot in range(self.limits.n_slots):
                self._drop(slot, max(0, len(self._cells[slot]) - fault.lose))
        n_rows = int(self.batch.want[:n_tokens].sum())
        self.last_cost_s = self._cost(n_tokens, n_rows)
        if fault is not None:
            for row in fault.bad_rows:
                self._logits[row] = np.nan
            return fault.status
        return DecodeStatus.OK

    def _check(self, n_tokens: int) -> DecodeStatus:
        if not 0 < n_tokens <= self.limits.n_batch:
            return DecodeStatus.INVALID
        ends = {slot: len(self._cells[slot]) for slot in range(self.limits.n_slots)}
        rows = zip(
            self.batch.slot[:n_tokens].tolist(),
            self.batch.pos[:n_tokens].tolist(),
            self.batch.token[:n_tokens].tolist(),
            strict=True,
        )
        for slot, pos, token in rows:
            if slot not in ends or pos != ends[slot] or not 0 <= token < self.vocabulary.n_vocab:
                return DecodeStatus.INVALID
            ends[slot] += 1
        if np.count_nonzero(self.batch.want[:n_tokens]) > self.limits.n_rows:
            return DecodeStatus.INVALID
        if self.used_cells + n_tokens > self.limits.n_ctx:
            return DecodeStatus.NO_KV_ROOM
        return DecodeStatus.OK

    def _compute(self, n_tokens: int) -> None:
        row = 0
        if n_tokens:
            self._lose_what_no_window_holds()
            self._map.place(self.batch.slot[:n_tokens], self.batch.pos[:n_tokens])
        for i in range(n_tokens):
            slot, token = int(self.batch.slot[i]), int(self.batch.token[i])
            cells = self._cells[slot]
            history = cells[-1] if cells else self._key
            if self.limits.window and self._first[slot] > max(
                0, len(cells) + 1 - self.limits.window
            ):
                history ^= _WRONG
            cells.append(mix(history, token))
            self.computed[slot] = self.computed.get(slot, 0) + 1
            if self.batch.want[i]:
                self._fill_row(self._logits[row], cells[-1])
                row += 1

    def _choice(self, history: int) -> int:
        """Return the favourite next token after `history`."""
        if self._end_after and (history >> 20) % self._end_after == 0:
            return EOS
        return _ALPHABET[history % len(_ALPHABET)]

    def _fill_row(self, row: FloatArray, history: int) -> None:
        row[:] = -5.0
        for rank in range(4, 0, -1):  # runners-up, for sampling with a temperature
            row[_ALPHABET[(history >> (8 * rank)) % len(_ALPHABET)]] = 2.0 - rank
        row[self._choice(history)] = 4.0

    def logits(self, n_rows: int) -> FloatArray:
        return self._logits[:n_rows]

    def kv_remove(self, slot: int, first: int = 0) -> bool:
        if first > 0 and not self.limits.can_go_back:
            return False
        self._drop(slot, first)
        return True

    def kv_retire(self, slot: int) -> None:
        self.lowered = False
        self.kv_remove(slot)

    def kv_lower_high_water(self) -> None:
        self.lowered = True

    def kv_length(self, slot: int) -> int:
        return len(self._cells[slot])

    def kv_first(self, slot: int) -> int:
        held = len(self._cells[slot])
        return self._first[slot] if self._first[slot] < held else -1

    def kv_copy(self, src: int, dst: int, first: int, last: int) -> bool:
        held, at = self._cells[src], self._cells[dst]
        if src == dst or not 0 <= first < last <= len(held) or len(at) != first:
            return False
        if not self.limits.can_go_back or self.kv_fails("copy"):
            return False
        self._map.share(src, dst, first, last)
        at.extend(held[first:last])
        if self._first[src] > first:
            self._first[dst] = min(self._first[src], last)
        return True

    def kv_shortage(self, slots: Sequence[int], n_tokens: int) -> int:
        del slots
        return max(0, self.used_cells + n_tokens - self.limits.n_ctx)

    def kv_stream(self, slot: int) -> int:
        del slot
        return 0

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        parts = [self._save(slot, at, min(at + page, last)) for at in range(first, last, page)]
        found = [part for part in parts if part is not None]
        return found if found and len(found) == len(parts) else None

    def _save(self, slot: int, first: int, last: int) -> Saved | None:
        held = self._cells[slot]
        if not 0 <= first < last <= len(held) or not self.limits.can_go_back:
            return None
        if self.kv_fails("save"):
            return None
        header = [self._key, first, max(first, min(self._first[slot], last))]
        return np.array([*header, *held[first:last]], np.uint64).data.cast("B")

    def kv_identity(self) -> str:
        return f"fake {self._key}"

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        before = len(self._cells[slot])
        for part in saved:
            if not self._restore(slot, part):
                self._drop(slot, before)
                return False
        return True

    def _restore(self, slot: int, saved: Saved) -> bool:
        key, first, whole_from, *histories = np.frombuffer(saved, np.uint64).tolist()
        n = len(histories)
        if key != self._key or len(self._cells[slot]) != first or self.kv_fails("restore"):
            return False
        self._lose_what_no_window_holds()
        ids, positions = np.full(n, slot, np.int32), np.arange(first, first + n, dtype=np.int32)
        if not self._map.place(ids, positions):
            return False
        self._cells[slot].extend(histories)
        if whole_from > first:
            self._first[slot] = whole_from
        return True

    def kv_used(self) -> int:
        return self._map.used

    def kv_shared(self, slots: Sequence[int]) -> int:
        return self._map.shared(slots)

    def kv_portions(self, leaves: Sequence[int]) -> list[float]:
        return self._map.portions(leaves, range(self.limits.n_slots))

    def kv_runs(self, slot: int, first: int, last: int) -> int:
        return self._map.runs(slot, first, last)

    def kv_high_water(self) -> int:
        return self._map.high_water

    def _drop(self, slot: int, first: int) -> None:
        self._map.drop(slot, first)
        del self._cells[slot][first:]
        self._first[slot] = min(self._first[slot], len(self._cells[slot]))

    def _lose_what_no_window_holds(self) -> None:
        """Take every cell that is out of its only holder's window; leaves are held twice."""
        if not self.limits.window:
            return
        for slot in range(self.limits.n_slots):
            behind = len(self._cells[slot]) - self.limits.window
            alone = np.flatnonzero(self._map.exclusive(slot)[: max(0, behind)])
            if len(alone):
                self._first[slot] = max(self._first[slot], int(alone[-1]) + 1)

    def variant(self, adapters: Sequence[Adapter]) -> FakeBackend:
        key = mix(self._key, crc32(repr([(a.name, a.scale) for a in adapters]).encode()))
        limits = self.limits
        return FakeBackend(
            n_ctx=limits.n_ctx, n_slots=limits.n_slots, n_batch=limits.n_batch, key=key
        )

    def close(self) -> None:
        self.closed = True
