"""What a policy is given: one frozen picture of the engine, with the time in it."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

Lane = Literal["interactive", "background"]


@frozen
class SequenceView:
    """One sequence that owns a slot, as the policy sees it.

    There are no phases, only counters: a sequence has `pending` tokens that it knows and the
    KV cache does not. One pending token of a started sequence is a decode; more, or one of a
    sequence that has not started, is prefill.
    """

    key: int
    lane: Lane
    pending: int
    computed: int
    started: bool  # its first token has been sampled
    credit: int  # free places in its stream; 0 means its reader is behind
    arrived: float  # seconds, engine clock

    @property
    def decoding(self) -> bool:
        """Whether its next step is one token that yields one token."""
        return self.started and self.pending == 1


@frozen
class Waiting:
    """One request that waits for a slot. `cells` is what admission would reserve for it."""

    key: int
    lane: Lane
    client: int  # who sent it: peers share fairly among clients
    cells: int
    passed_over: int  # how often a later arrival was admitted before it
    arrived: float


@frozen
class LastTick:
    """The measured tick before this one; zeros before the first."""

    n_tokens: int = 0
    decode_s: float = 0.0


@frozen
class Memory:
    """What a policy remembers between ticks; it returns the next one in its plan."""

    target_tokens: int = 32
    decode_ewma_s: float = 0.0
    decode_cursor: int = -1  # key served last, round robin goes on behind it
    prefill_cursor: int = -1


@frozen
class SchedulerState:
    """Everything a plan may depend on. Same state, same plan."""

    now: float
    tick: int
    sequences: tuple[SequenceView, ...]
    n_batch: int
    free_cells: int
    tick_budget_s: float = 0.030
    last: LastTick = field(factory=LastTick)
    memory: Memory = field(factory=Memory)


@frozen
class AdmissionState:
    """What admission may depend on: who waits, who runs, and what room there is."""

    now: float
    waiting: tuple[Waiting, ...]
    running_by_client: dict[int, int] = field(factory=dict)
    free_slots: int = 0
    free_cells: int = 0
