"""The oracle of ``python -m benches speculation``, and its rate."""

from __future__ import annotations

import pytest

from benches.clients import Answer, NotServed
from benches.oracle import Oracle
from benches.scenes.speculation import rate
from tests.drafts_kit import speaking
from uma_trio.engine.drafts import drafter
from uma_trio.policy.cost import CostModel, Staircase

FLAT = CostModel(Staircase((1, 16), (0.010, 0.011)))


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_guesses_of_the_oracle_are_right_as_often_as_it_was_told(
    acceptance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that was answered before is guessed from its answer, and answered alike."""
    monkeypatch.setattr(drafter, "Drafter", lambda: Oracle(acceptance, seed=1))
    bench = speaking(drafts=True, cost=FLAT)
    told = []
    for speculation in ("off", "auto"):
        _, sink = bench.submit("please say it", 400, speculation=speculation, credit=1000)
        before = bench.backend.decodes
        bench.run()
        told.append((sink.tokens, bench.backend.decodes - before))
    (plain, slow), (again, quick) = told
    assert again == plain
    right = int(str(bench.metrics.totals().drafts_right))
    if acceptance == 0.0:
        assert right == 0
        assert quick >= slow - 1
    else:
        # A chain ends at its first wrong guess.
        assert quick < slow * (0.45 if acceptance < 1.0 else 0.3)
        assert right > 0


def test_the_rate_leaves_out_what_came_before_all_decode() -> None:
    """Tokens that came together with the last first token are no tokens of that time."""
    one, other = Answer(0.0, [1.0, 2.0, 2.0, 3.0]), Answer(0.0, [2.0, 2.0, 3.0, 4.0])
    assert rate([one, other]) == pytest.approx(2.0)
    with pytest.raises(NotServed):
        rate([Answer(0.0, [1.0]), Answer(0.0, [2.0, 3.0])])
