"""The background work of drafts: texts are taken in, so that what follows can be looked up in them.

A prompt of 10,000 tokens takes 30 ms to take in, and its answer has no guesses before that is done. So it is done in parts,
between two ticks of a CPU within what readers leave, and beside the decode of a GPU, where it delays nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from attrs import define, evolve, field

from uma_trio.engine.drafts.drafting import Drafting, Unread
from uma_trio.engine.drafts.lookup import INDEXED_A_TICK, ORDERS
from uma_trio.engine.sequences import Sequence
from uma_trio.machine.background import Bound, Charges, Part

# A token and order takes about so long, until it is measured.
_ONE_S: Final = 1e-6
# What earlier parts still count, beside the latest one, for how long a token takes.
_FADE: Final = 0.8


@define(eq=False)
class Feeding:
    """Takes in the texts of `running` requests. `overlaps` says whether decodes leave the host free now."""

    drafter: Drafting
    charges: Charges
    clock: Callable[[], float]
    overlaps: Callable[[], bool]
    running: Mapping[int, Sequence]
    bound: Bound = "ticks"
    makes_room: bool = False
    _unread: list[Unread] = field(factory=list, init=False)
    _read: float = field(
        default=INDEXED_A_TICK, init=False
    )  # tokens, and the seconds that these took
    _read_s: float = field(default=_ONE_S * len(ORDERS) * INDEXED_A_TICK, init=False)

    def claim(self, *, idle: bool) -> Part | None:
        """Return a part if there are texts to take in; where decodes overlap that is done during them."""
        self._unread = [] if idle or self.overlaps() else self.drafter.unread(self.running)
        return Part() if self._unread else None

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Take in what fits; charge those whose texts these are."""
        took_s = 0.0
        for part in self._unread:
            n = min(part.n_tokens, int((most_s - took_s) * self._read / self._read_s))
            if n <= 0:
                break
            began = self.clock()
            self.drafter.take_in(evolve(part, n_tokens=n))
            part_s = self.clock() - began
            if part_s > 0:
                self._read, self._read_s = _FADE * self._read + n, _FADE * self._read_s + part_s
                self.charges.spend(part.program, part_s)
            took_s += part_s
        self._unread = []
        return took_s

    def take_in_all(self) -> None:
        """Take in texts while a decode leaves the host free."""
        for part in self.drafter.unread(self.running):
            self.drafter.take_in(part)
