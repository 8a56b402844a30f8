"""What the engine does after a failed decode.

If the KV cache has no room, :func:`uma_trio.policy.pressure.relieve` decides. After any other
failure every sequence of the batch is synchronised with the real content of the cache, and the tick
is repeated. If that fails, too, the sequences are computed one by one: the one that fails ends with
``E_RUNTIME_001``, and the others continue.
"""

from __future__ import annotations

from collections import deque

from uma_trio.backend.base import BackendDied, DecodeStatus
from uma_trio.engine.recorder import NO_ROOM
from uma_trio.engine.registry import Registry
from uma_trio.policy.plan import Plan
from uma_trio.policy.pressure import Fail, Preempt, Shrink, relieve
from uma_trio.policy.state import SequenceView

# A backend that fails this often in a row, whatever is in the batch, will not recover.
HOPELESS = 32


class Recovery:
    """The engine's memory of failed decodes.

    `batch_limit` is how many tokens the next batch may hold; `suspect` is the one sequence
    that the next batch may hold, if any.
    """

    def __init__(self, n_batch: int, registry: Registry) -> None:
        self._n_batch = n_batch
        self._registry = registry
        self._suspects: deque[int] = deque()
        self._failures = 0  # in a row, for other reasons than room
        self.batch_limit = n_batch
        self._made_room = False

    def just_made_room(self) -> bool:
        """Say whether a sequence was preempted since this was asked last."""
        made_room, self._made_room = self._made_room, False
        return made_room

    @property
    def suspect(self) -> int | None:
        """The sequence to compute alone, None in normal times."""
        while self._suspects:
            key = self._suspects[0]
            sequence = self._registry.running.get(key)
            # One that has ended, is parked or absent cannot be tried, and must not hold the others up.
            absent = key in self._registry.absent
            if sequence is not None and sequence.credit > 0 and not absent:
                return key
            self._suspects.popleft()
        return None

    def succeeded(self) -> None:
        """Note a decode that worked: a sequence that was computed alone is cleared."""
        self.batch_limit = self._n_batch
        self._failures = 0
        if self._suspects:
            self._suspects.popleft()

    def failed(
        self, status: int, plan: Plan, sequences: tuple[SequenceView, ...], now: float
    ) -> str:
        """Decide and act after `status`, and return what was done, for a person.

        Raises :class:`BackendDied` when there is no hope.
        """
        if status == DecodeStatus.NO_KV_ROOM:
            return self._make_room(plan, sequences, now)
        self._failures += 1
        if self._failures >= HOPELESS:
            raise BackendDied(f"{self._failures} decodes failed in a row, the last with {status}")
        for item in plan.items:
            self._resynchronise(item.key)
        if self._suspects:
            self._suspects.popleft()
            return self._fail(plan.items[0].key, status, now)
        if self._failures == 1:
            return "positions re-synchronised, to be tried again"
        if len(plan.items) == 1:
            return self._fail(plan.items[0].key, status, now)
        self._suspects.extend(item.key for item in plan.items)
        return "each of its requests is computed alone, to find the culprit"

    def _make_room(self, plan: Plan, sequences: tuple[SequenceView, ...], now: float) -> str:
        if self._registry.cells.drop_leaves():
            return "no room: cached prefixes were dropped"
        match relieve(plan, sequences):
            case Shrink(n_tokens):
                self.batch_limit = n_tokens
                return f"no room: the next batch holds {n_tokens} tokens at most"
            case Preempt(key):
                self._registry.preempt(key, NO_ROOM)
                self._made_room = True
                return f"no room: request {key} was preempted"
            case Fail(key):
                self._registry.end(
                    self._registry.running[key],
                    "error",
                    now,
                    code="E_RUNTIME_002",
                    message="the KV cache has no room for this request; "
                    "send it again with a shorter prompt or a smaller max_tokens",
                )
                return f"no room: request {key} was ended"

    def _fail(self, key: int, status: int, now: float) -> str:
        sequence = self._registry.running.get(key)
        if sequence is not None:
            self._registry.end(
                sequence,
                "error",
                now,
                code="E_RUNTIME_001",
                message=f"llama_decode failed with {status}, also when tried again",
            )
        return f"request {key} was ended"

    def _resynchronise(self, key: int) -> None:
        sequence = self._registry.running.get(key)
        if sequence is None:
            return
        self._registry.cells.truncate(sequence)
