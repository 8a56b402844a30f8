"""A machine whose decodes take as long as a cost model says, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, evolve

from uma_trio.backend.base import Overlap, Saved, Traits, nothing
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio_sim.fake import FakeBackend

TRUTH = CostModel(
    Staircase((1, 3, 4, 16, 512), (0.008, 0.016, 0.011, 0.026, 0.770)),
    output=Staircase((1, 16), (0.0, 0.003)),
    context_cell_s=2e-7,
    used_cell_s=5e-8,
)


@define
class Clock:
    """Virtual seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def passes(self, seconds: float) -> None:
        """Let it pass."""
        self.now += seconds


class Machine(FakeBackend):
    """See the module. `noise` is asked for a factor at each decode.

    `took` are the seconds of all decodes, `sizes` their tokens, and `statuses` what they returned. A page that is saved
    or restored takes `page_s`. Where `eager_s` or
    `captures_s` are given, a decode of a new shape takes so much longer, and the next one of it.
    """

    def __init__(
        self,
        truth: CostModel,
        clock: Clock,
        n_batch: int = 512,
        noise: Callable[[], float] = lambda: 1.0,
        n_slots: int = 17,
        parts: int = 1,
    ) -> None:
        super().__init__(n_ctx=4096, n_slots=n_slots, n_batch=n_batch, parts=parts)
        self.truth, self.clock, self.noise = truth, clock, noise
        self.eager_s = self.captures_s = 0.0
        self.overlaps = False
        self.shapes = [(0, 0), (0, 0)]
        self.page_s = 0.0
        self.took: list[float] = []
        self.sizes: list[int] = []
        self.statuses: list[int] = []

    @property
    def traits(self) -> Traits:
        """Return what a device is like, where a change of shape costs."""
        captures = self.eager_s > 0 or self.captures_s > 0
        return evolve(super().traits, shape_costs=captures, overlaps=self.overlaps)

    def begin_decode(
        self, n_tokens: int, while_computing: Overlap = nothing, *, predicted_s: float
    ) -> None:
        """Begin a decode, of which each part lets the same time pass."""
        self.sizes.append(n_tokens)
        slots = self.batch.slot[:n_tokens].tolist()
        before = {slot: self.kv_length(slot) for slot in range(self.limits.n_slots)}
        work = Work(
            tokens=n_tokens,
            rows=int(self.batch.want[:n_tokens].sum()),
            context_cells=sum(before[slot] for slot in slots),
            used_cells=sum(before.values()),
        )
        seconds = self.truth.seconds(work) * self.noise()
        if work.shape != self.shapes[-1]:
            seconds += self.eager_s
        elif self.shapes[-2] != work.shape:
            seconds += self.captures_s
        self.shapes.append(work.shape)
        self.took.append(seconds)

        def part() -> None:
            self.clock.now += seconds / self.parts

        self.part = part
        super().begin_decode(n_tokens, while_computing, predicted_s=predicted_s)

    def advance_decode(self, most_s: float, is_wanted: Callable[[], bool] = bool) -> int | None:
        """Compute parts, and note how the decode ends."""
        status = super().advance_decode(most_s, is_wanted)
        if status is not None:
            self.statuses.append(status)
        return status

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Copy pages, and let the time pass."""
        self.clock.now += self.page_s * -(-(last - first) // page)
        return super().kv_save(slot, first, last, page)

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        """Copy pages, and let the time pass."""
        self.clock.now += self.page_s * len(saved)
        return super().kv_restore(slot, saved)
