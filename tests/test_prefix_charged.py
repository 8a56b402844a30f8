"""Who pays for the time that the prefix cache takes beside ticks: whoever profits, each second once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from attrs import evolve
from engine_kit import KINDS, Bench, OnDevice
from policy_kit import decoder, state
from test_prefix_cache import MINE, forget_cells, letters, priced, save_all

from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.chunk import Tick
from uma_trio.engine.loop import Engine
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Memory
from uma_trio_sim.fake import FakeBackend


class Charging(Engine):
    """An engine that keeps what was spent beside ticks, and what computed ticks charged of it."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self.spent: Counter[int] = Counter()
        self.charged: Counter[int] = Counter()
        charge = self.background.charge

        def charged(spent: Mapping[tuple[int, ...], float]) -> None:
            self.spent.update({client: seconds for (client,), seconds in spent.items()})
            charge(spent)

        self.background.charge = charged

    def finish(self, tick: Tick, status: int) -> None:
        """Note what was charged."""
        super().finish(tick, status)
        if status == DecodeStatus.OK:
            for client, seconds in tick.state.charges:
                self.charged[client] += seconds  # type: ignore[assignment]


def bench(
    kind: type[FakeBackend], policy: Policy = deadline, used_cell_s: float = 0.0
) -> tuple[Bench, Charging]:
    """Return a bench and its engine."""
    made = Bench(
        kind(n_ctx=4096, n_slots=4, n_batch=64),
        policy=policy,
        settings=priced(used_cell_s),
        engine=Charging,
    )
    assert isinstance(made.engine, Charging)
    return made, made.engine


def assert_equal(one: Mapping[int, float], two: Mapping[int, float]) -> None:
    """Check that the same clients have the same seconds, but for rounding."""
    assert dict(one) == pytest.approx(dict(two))


@pytest.mark.parametrize("kind", KINDS)
def test_restores_and_saves_are_charged_to_whom_they_serve(kind: type[FakeBackend]) -> None:
    """Their seconds count as the client's machine time, where it is one of those that compete."""
    made, engine = bench(kind)
    made.submit(letters(1, 640), 4, namespace=MINE, client=7)
    made.run()
    save_all(made)
    spent = made.engine.cells.prefix.charges.take()
    assert spent[7,] > 0
    made.engine.cells.prefix.charges.spend((7,), spent[7,])
    forget_cells(made)
    made.submit(letters(2, 40), 90, namespace="2", client=8, lane="background")
    made.submit(letters(3, 40), 90, namespace="3", client=7, lane="background")
    made.ticks(4)
    before = engine.memory.used_s[7] - engine.memory.used_s[8]
    made.submit(letters(1, 640), 4, namespace=MINE, client=7, lane="background")
    made.ticks(3)
    after = engine.memory.used_s[7] - engine.memory.used_s[8]
    assert after - before > 0.010, "ten pages of a millisecond each"
    made.run()
    assert_equal(engine.charged, engine.spent)


def test_where_ticks_are_prepared_each_charge_reaches_the_memory_once() -> None:
    """Though that of the next plan was made before the cells were moved."""
    made, engine = bench(OnDevice)
    for client in (7, 8):
        made.submit(letters(client, 60), 300, namespace=str(client), client=client)
    made.ticks(20)
    before = engine.memory.used_s[7] - engine.memory.used_s[8]
    for _ in range(10):
        engine.cells.prefix.charges.spend((7,), 3.0)
        made.engine.tick()
    made.ticks(4)
    after = engine.memory.used_s[7] - engine.memory.used_s[8]
    assert after - before == pytest.approx(30.0, abs=1.0)


def test_a_client_of_whom_nothing_is_known_is_not_charged() -> None:
    """It starts later than the others anyway."""
    now = evolve(
        state(decoder(1, client=5)),
        memory=Memory(cost=priced(0.0).cost, used_s={5: 1.0}),
        charges=((5, 2.0), (6, 2.0)),
    )
    used_s = deadline(now).memory.used_s
    assert used_s[5] == pytest.approx(3.0, abs=0.1)
    assert 6 not in used_s


def test_what_a_loading_cost_is_charged_to_who_caused_it() -> None:
    """The seconds count as machine time of its client, once, with the first tick that it is in."""
    made, engine = bench(FakeBackend)
    made.submit(letters(1, 64), 4, client=7, owes_s=1.5)
    made.submit(letters(2, 64), 4, client=8)
    made.run()
    assert engine.charged == {7: 1.5}
