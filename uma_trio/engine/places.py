"""Who gets a slot now, and the books of what background work is owed: :mod:`uma_trio.policy.floor`."""

from __future__ import annotations

from collections.abc import Iterable

from uma_trio.engine.chunk import Chunk, Completed
from uma_trio.engine.recorder import AWAY, NEEDED
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.admission import admit, gives_place, gives_turn, makes_way
from uma_trio.policy.floor import bucket_after
from uma_trio.policy.state import Contract


class Places:
    """Gives slots to those that wait, and takes them from others. For the engine's thread."""

    def __init__(self, registry: Registry, recovery: Recovery, contract: Contract) -> None:
        self._registry = registry
        self._recovery = recovery
        self._floor = contract.background_floor

    def give(self, now: float) -> None:
        """Admit those that get a slot, and preempt those that make room for them."""
        registry = self._registry
        registry.note_waiting(now)
        made_room = self._recovery.just_made_room()
        if not registry.to_be_asked(now):
            return
        # Admission right after room was made would undo it, unless there is nobody it was for.
        if made_room and any(sequence.credit > 0 for sequence in registry.running.values()):
            return
        state = registry.admission(now)
        chosen = admit(state)
        if not chosen and registry.lend(now):
            state = registry.admission(now)
            chosen = admit(state)
        for making_room, reason in (
            (makes_way, AWAY),
            (gives_place, NEEDED),
            (gives_turn, NEEDED),
        ):
            places = () if chosen else making_room(state)
            for place in places:
                registry.preempt(place, reason)
            if places:
                state = registry.admission(now)
                chosen = admit(state)
                registry.made_way(places, chosen)
        registry.admit(chosen, now)

    def charge(self, completed: Completed, chunks: Iterable[tuple[Sequence, Chunk]]) -> None:
        """Note what background requests had of a tick that is not committed yet."""
        chunks = list(chunks)
        tick_s, had_s = completed.decode_s + completed.host_s, 0.0
        n_tokens = sum([chunk.n_tokens for _, chunk in chunks])
        for sequence, chunk in chunks:
            if sequence.lane == "background":
                share_s, decoding = tick_s * chunk.n_tokens / n_tokens, sequence.view.decoding
                had_s += sequence.tenancy.spend(chunk, share_s, decoding=decoding)
        registry = self._registry
        contended = registry.beside_others
        registry.owe(
            bucket_after(registry.bucket_s, self._floor, tick_s, had_s, contended=contended)
        )
