"""What tests of drafts are built from: staircases, and an engine with rows to spare for guesses."""

from __future__ import annotations

from engine_kit import Bench

from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sampling import AT_ONCE, Masks
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline import deadline
from uma_trio_sim.fake import FakeBackend

SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)
# Fours and eights are quick, what lies one above them is not: as measured with Q4_0 on two cores.
STAIRS = CostModel(
    Staircase(SIZES, (0.020, 0.024, 0.032, 0.028, 0.044, 0.045, 0.060, 0.062, 0.090, 0.100))
)
FLAT = CostModel(Staircase((1, 32), (0.020, 0.020)))
STEEP = CostModel(Staircase((1, 2, 32), (0.020, 0.040, 0.640)))


class Babbler(FakeBackend):
    """Says "a" and "b" in no order that lasts: guesses at it are right half of the time."""

    def _choice(self, history: int) -> int:
        return 97 + history % 2


def speaking(
    *,
    drafts: bool,
    cost: CostModel = FLAT,
    kind: type[FakeBackend] = FakeBackend,
    recorder: Recorder | None = None,
    masks: Masks = AT_ONCE,
) -> Bench:
    """Return an engine with a cost model, on a backend with rows for drafts."""
    backend = kind(n_slots=5, n_ctx=4000, n_rows=24)
    given = EngineSettings(cost=cost, scratch_slots=1, drafts=drafts)
    return Bench(backend, deadline, settings=given, recorder=recorder, masks=masks)
