"""The contract between the engine and whatever computes logits.

A backend owns one model, one KV cache shared by all slots, and one batch whose arrays the
engine fills by slices. It never plans, samples or keeps requests. Everything here except
:class:`Vocabulary` and :data:`Interrupt` is called from the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from attrs import Factory, field, frozen
from numpy.typing import NDArray

from uma_trio.words import one_line

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

Saved = memoryview
"""The cells of a part of one sequence, outside of the cache. Means something only to the backend,
or to one with the same model and the same options."""

Interrupt = Callable[[], object]
"""Ends one decode early. May be called from any thread, at any time, more than once: it reaches
that decode and no other, so that after it, or after `close`, nothing happens."""

Overlap = Callable[[], object]
"""What the engine's thread does while a decode runs. It must not touch the backend; if it raises,
the decode's outcome is lost with it."""


def nothing() -> None:
    """Overlap a decode with nothing."""


class DecodeStatus(IntEnum):
    """What ``llama_decode`` returns (llama.h); any other negative value is a compute failure."""

    OK = 0
    NO_KV_ROOM = 1  # nothing was computed, the KV cache is as before
    ABORTED = 2  # it was interrupted: nothing was computed, the KV cache is as before
    INVALID = -1  # the batch breaks a rule; nothing was computed
    ALLOC_FAILED = -2
    COMPUTE_FAILED = -3


class ModelError(Exception):
    """The model cannot be used: missing, unreadable, not GGUF, truncated, too large.

    The message is one sentence for the operator, naming the file and what to do. It may quote the file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class BackendDied(Exception):
    """The backend is broken beyond one batch; the daemon must end."""


@frozen
class Adapter:
    """A LoRA adapter: what requests call it, its file, and how much of it is added to the weights."""

    name: str
    path: Path
    scale: float = 1.0


@frozen
class ModelFacts:
    """What is loaded, as read from the model file itself."""

    name: str
    description: str
    n_vocab: int
    n_ctx_train: int
    n_params: int
    size_bytes: int
    n_embd: int
    chat_template: str | None
    weight_bytes: float = 0.0  # read by every decode
    cell_bytes: float = 0.0  # one KV position
    expert_bytes: float = 0.0  # one expert, all layers together
    experts: int = 0
    experts_used: int = 0
    path: str = ""
    metadata: Mapping[str, str] = {}


@frozen
class ContextLimits:
    """The real sizes of the context, read back after it was created.

    `n_rows` is how many rows of logits one decode may ask for, `n_slots` where None is given.
    """

    n_ctx: int  # KV cells of all slots together
    n_ctx_seq: int  # the longest one sequence may be
    n_slots: int  # KV sequence ids that a batch may name: 0..n_slots-1
    n_batch: int  # the most tokens of one decode
    whole_cache: bool = False  # a token pays for every cell as for its own (no flash attention)
    leaf_ids: range = range(0)  # KV sequence ids that hold cells and cannot be in a batch
    can_go_back: bool = True  # whether a part of a sequence can be dropped, as attention can
    window: int = 0  # how far some layers look back (sliding-window attention); 0: to the start
    n_streams: int = 1  # the KV cache is in so many parts, and each sequence in one of them
    n_rows: int = field(default=Factory(lambda self: self.n_slots, takes_self=True))


@frozen
class Traits:
    """What kind of machine computes, as far as planning depends on it.

    `overlaps`: the host is free while a decode runs. `interruptible`: a running decode can be
    ended early. `shape_costs`: a tick whose batch differs in shape from the one before is slow
    (graph capture). `longest_part`: the longest part of a decode that can be computed in parts, relative to the decode; 1 if
    it cannot.
    """

    overlaps: bool = False
    interruptible: bool = False
    shape_costs: bool = False
    longest_part: float = 1.0


class Batch:
    """The arrays of one decode. The engine writes rows ``[:n]``; the backend reads them.

    ``token``, ``pos`` and ``slot`` are int32; ``want`` is int8, 1 where logits are wanted.
    The arrays keep their addresses for the life of the backend.
    """

    __slots__ = ("_ints", "capacity", "pos", "slot", "token", "want")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ints: IntArray = np.zeros((3, capacity), np.int32)
        self.token: IntArray = self._ints[0]
        self.pos: IntArray = self._ints[1]
        self.slot: IntArray = self._ints[2]
        self.want: NDArray[np.int8] = np.zeros(capacity, np.int8)

    def take(self, other: Batch, n_tokens: int) -> None:
        """Copy rows ``[:n_tokens]`` of `other`."""
        self._ints[:, :n_tokens] = other._ints[:, :n_tokens]
        self.want[:n_tokens] = other.want[:n_tokens]


@frozen
class SpecialToken:
    """A token that is recognised in a text by its spelling.

    One that is no `is_control` is recognised without `parse_special`, too. `strips_left` and `strips_right` remove white
    space beside it.
    """

    id: int
    text: str
    is_control: bool = True
    strips_left: bool = False
    strips_right: bool = False


class Vocabulary(Protocol):
    """Text in, tokens out. Safe to call from any thread."""

    @property
    def n_vocab(self) -> int:
        """How many tokens there are."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """End-of-generation tokens: sampled, they end a sequence and are never sent."""

    @property
    def bos_text(self) -> str:
        """The text of the beginning-of-sequence token, for chat templates ("" if none)."""

    @property
    def eos_text(self) -> str:
        """The text of the end-of-sequence token, for chat templates ("" if none)."""

    @property
    def adds_bos(self) -> bool:
        """Whether the model was trained to see its beginning-of-sequence token first."""

    @property
    def parts_at_lines(self) -> bool:
        """Whether the tokens of a text are those of its two parts, where it is cut as said here.

        It is cut behind a line end that follows a visible ASCII character, before an ASCII letter. Holds
        for texts without special tokens, and but for the space that some vocabularies begin a text with.
        """

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens of `text`.

        `add_special` puts the model's own beginning (and end) tokens around it;
        `parse_special` lets text such as ``<|im_end|>`` become a control token, and is
        never set for anything a user wrote.
        """

    def apart(self, text: str) -> Sequence[str]:
        """Return `text` in the parts that :meth:`tokenize` takes one by one: their tokens are those of the text.

        If the text goes on, all parts but the last stay as they are. So does each of several parts together.
        """

    def pieces(self) -> Sequence[bytes]:
        """Return the bytes of every token, indexed by id; control tokens are empty."""

    def specials(self) -> Sequence[SpecialToken]:
        """Return the tokens that :meth:`tokenize` recognises by their whole spelling. Takes milliseconds."""


class Backend(Protocol):
    """One model, one KV cache, one batch."""

    @property
    def model(self) -> ModelFacts:
        """What is loaded."""

    @property
    def limits(self) -> ContextLimits:
        """The real sizes."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""

    @property
    def batch(self) -> Batch:
        """The arrays of the next decode."""

    @property
    def description(self) -> str:
        """One line for people: the compute backend, threads, KV type."""

    @property
    def traits(self) -> Traits:
        """What the machine is like for the next decode; `overlaps` may change with each."""

    def arm(self) -> Interrupt | None:
        """Let the next decode, and only that one, be interrupted; return what does it.

        An interrupted decode returns ``ABORTED`` soon, unless it was as good as done. None where
        the hardware or the model's kind of memory does not allow it.
        """

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute rows ``[:n_tokens]`` of the batch; return a :class:`DecodeStatus` or below.

        Per slot, positions must be consecutive and start right behind what the KV cache
        holds. May raise :class:`BackendDied`.

        `while_computing` is called once, whatever the status, where it delays the computation
        least: while a device computes, or right before a call that blocks, so that the threads it
        wakes run meanwhile. It must change no cell: a device chose those of the batch before. A
        decode that raises may not have called it.
        """

    def begin_decode(
        self, n_tokens: int, while_computing: Overlap = nothing, *, predicted_s: float
    ) -> None:
        """Begin a decode, which should take `predicted_s`, where ``traits.longest_part`` is below 1.

        Until :meth:`advance_decode` has returned its status only that may be called, and other backends.
        """

    def advance_decode(self, most_s: float, is_wanted: Callable[[], bool] = bool) -> int | None:
        """Compute parts of the decode for at most `most_s`, by prediction, and one at least.

        Return what :meth:`decode` returns, or None if it has not ended. It stops earlier when something else
        `is_wanted`, which may be asked on any thread. The parts change nothing of what is computed.
        """

    def logits(self, n_rows: int) -> FloatArray:
        """Return ``[n_rows, n_vocab]`` logits, a row per wanted output, in batch order.

        A view, valid until the next decode.
        """

    def kv_remove(self, slot: int, first: int = 0) -> bool:
        """Drop the cells of `slot` from position `first` on, which others may still hold.

        False if this kind of memory cannot drop a part; the engine then drops all.
        """

    def kv_retire(self, slot: int) -> None:
        """Drop all cells of `slot`, as at the end of a sequence that others go on beside.

        A backend whose ticks are slow when its cache shrinks may keep it as large as it is, until
        :meth:`kv_lower_high_water` or until a decode needs the room.
        """

    def kv_lower_high_water(self) -> None:
        """Let the high-water mark fall to the cells in use. Costs nothing where it is."""

    def kv_length(self, slot: int) -> int:
        """Return how many positions `slot` holds, counted from 0."""

    def kv_first(self, slot: int) -> int:
        """Return the first position from which on `slot` has everything; -1 if it holds nothing.

        Behind 0 where sliding-window layers have lost what is out of every window. A sequence
        may go on behind position m only if this is at most ``max(0, m - limits.window)``.
        """

    def kv_copy(self, src: int, dst: int, first: int, last: int) -> bool:
        """Let `dst`, which ends at `first`, hold positions ``[first, last)`` of `src` too.

        No data moves: the cells have one more holder, and go when the last one drops them. False,
        and nothing has changed, if `src` does not hold them all or `dst` ends elsewhere. `src` and
        `dst` may be slots or ``limits.leaf_ids``, as in every verb that begins with ``kv_``.
        """

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Return positions ``[first, last)`` of `slot`, which keeps them, in parts of `page`; None if that failed."""

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        """Put saved parts, one behind the other, into `slot`, which ends where they begin.

        In one run of cells if possible. False, and `slot` is as before, if there is no room or they do not
        belong there.
        """

    def kv_shortage(self, slots: Sequence[int], n_tokens: int) -> int:
        """Return how many cells leaves have to free before these slots can compute `n_tokens` together."""

    def kv_stream(self, slot: int) -> int:
        """Return in which stream of the KV cache `slot` lies; 0 where there is one stream for all.

        A decode is cheapest if its rows are in the order of their streams.
        """

    def kv_used(self) -> int:
        """Return how many cells slots and leaves hold, shared ones once."""

    def kv_shared(self, slots: Sequence[int]) -> int:
        """Return how many cells fewer `slots` hold than each would alone."""

    def kv_portions(self, leaves: Sequence[int]) -> list[float]:
        """Return how many cells each of `leaves` holds that no slot does.

        Of a cell that several of them hold each has an equal part, so that the sum is how many cells
        only leaves keep.
        """

    def kv_runs(self, slot: int, first: int, last: int) -> int:
        """Return in how many runs of neighbouring cells positions ``[first, last)`` lie.

        Saving takes as many copies, and where V is stored across many times that.
        """

    def kv_high_water(self) -> int:
        """Return how many cells a decode spans: up to the highest one in use, whosever it is.

        0 where this kind of memory does not tell.
        """

    def variant(self, adapters: Sequence[Adapter]) -> Backend:
        """Return a backend with the same weights and these adapters, with cells of its own.

        May be called on any thread, also while this one computes. Raises :class:`ModelError`.
        """

    def kv_identity(self) -> str:
        """Return what saved cells depend on: another backend may restore them if its own is the same.

        "" if that cannot be known. Reads files; may be called on any thread.
        """

    def close(self) -> None:
        """Free everything. Idempotent; nothing else may be called after but :meth:`variant`."""
