"""Moving cells down into free ones, so that decodes span fewer cells.

A decode spans all cells up to the highest used one (:mod:`uma_trio.backend.cell_map`). After a leaf
is gone, the cells above it keep that mark up, and each token pays for the free cells below it. When
these have cost as much as moving would (ski rental, as for leaves), the highest cells are moved in
slices, for at most the time that the free cells have cost. The content of the cells does not
change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

from uma_trio.backend.base import Backend
from uma_trio.engine.kv.measured import CellTimes
from uma_trio.policy.prefix import PAGE, SCATTERED

#: llama.cpp rounds the cells that a decode spans up to this (`get_n_kv`), so that fewer change nothing.
LEAST_GAP: Final = 256


@define(eq=False)
class Compaction:
    """Decides when cells are moved, and moves them. `moved` counts cells, `failures` failed moves.

    `under_way` is true from the decision to the end of the moves. The cost of moving is known only
    after some cells were moved, so a slice that would take more than the remaining time ends the
    moves. Before that it is estimated as twice the cost of saving (`saves`), since cells are copied
    to host memory and back.
    """

    backend: Backend
    clock: Callable[[], float]
    saves: CellTimes
    moved: int = 0
    failures: int = 0
    under_way: bool = False
    mark_s: float = 0.0  # what free cells below the mark have cost since it was lowered
    _paid_s: float = 0.0  # the same since they last were few
    _left_s: float = 0.0  # of what moving may take
    _need_s: float = 0.0  # what the slice takes that was too dear
    _takes: CellTimes = field(factory=lambda: CellTimes(0.0, 0.0))

    @property
    def spans_a_gap(self) -> bool:
        """Whether there are free cells that moving could remove."""
        return self.under_way or self.gap >= LEAST_GAP

    @property
    def gap(self) -> int:
        """The number of free cells that a decode spans."""
        return self.backend.kv_high_water() - self.backend.kv_used()

    def charge(self, cell_s: float) -> None:
        """Note a tick, which pays `cell_s` for every cell that it spans."""
        gap = self.gap
        if gap >= LEAST_GAP:
            self._paid_s += cell_s * gap
            self.mark_s += cell_s * gap
        else:
            self._paid_s = self._need_s = self.mark_s = 0.0

    def due(self, cell_s: float) -> bool:
        """Whether moving pays for itself, before work that pays `cell_s` for every cell."""
        if self.under_way:
            return True
        gap = self.gap
        if gap < LEAST_GAP or not cell_s:
            return False
        cells = min(gap, self.backend.kv_used())  # no more than these lie above a free one
        self._left_s = self._paid_s + cell_s * gap
        self.under_way = self._left_s >= max(self._need_s, self._token_s(scattered=False) * cells)
        return self.under_way

    def some(self, most_s: float) -> float:
        """Move slices that should take no longer than `most_s`; return the seconds that it took."""
        spent_s = 0.0
        while self.under_way:
            part = self.backend.kv_highest(PAGE)
            if part is None:
                self._stop()
                break
            seq, first, last = part
            n, scattered = last - first, self.backend.kv_runs(*part) >= SCATTERED
            need_s = n * self._token_s(scattered=scattered)
            if need_s > self._left_s:
                self.under_way, self._paid_s, self._need_s = False, self._left_s, need_s
                break
            if spent_s + need_s > most_s:
                break
            began = self.clock()
            moved = self.backend.kv_move(seq, first, last)
            took_s = self.clock() - began
            self._left_s -= took_s
            spent_s += took_s
            if moved:
                self.moved += n
                self._takes.learn(scattered=scattered, token_s=took_s / n)
            else:  # the time of which says nothing of what moving takes
                self.failures += 1
                self._stop()
        return spent_s

    def _token_s(self, *, scattered: bool) -> float:
        if self._takes.guessed(scattered=scattered):
            return 2.0 * self.saves[scattered]
        return self._takes[scattered]

    def _stop(self) -> None:
        self.under_way, self._paid_s, self._need_s = False, 0.0, 0.0
