"""Drafts where another shape of the batch costs: a size that is held, on a modelled GPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve

from benches.oracle import Oracle
from tests.policy_kit import decoder
from uma_trio.backend.base import Limits, Traits
from uma_trio.backend.fake import FakeBackend
from uma_trio.config.options import Config
from uma_trio.engine.drafts import drafter
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.records import TickRecord
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.held_drafts import UNPREPARED_S, hold_drafts
from uma_trio.policy.deadline.learning import learn_cost
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import HeldDrafts, MeasuredTick, Memory, SchedulerState
from uma_trio.sim.machine import TABLES, Profile, always, staircase, steady
from uma_trio.sim.simulation import Simulation, Told, settings_for
from uma_trio.wiring import allowed_speculation

H200 = CostModel(staircase(TABLES["h200"]), host_s=0.0001, recapture_s=0.004)
LENGTH = 400


def machine() -> Profile:
    """Return an H200 on which a tick that was not prepared waits for the host."""
    decode = evolve(H200, host_s=0.0)
    return Profile(
        "h200",
        lambda work, state, _: decode.seconds(work) + (0.0 if state.prepared else UNPREPARED_S),
        H200,
        steady,
        always(H200.host_s),
        overlaps=True,
    )


def told(
    monkeypatch: pytest.MonkeyPatch, n: int, acceptance: float, *, drafts: bool
) -> tuple[float, list[int]]:
    """Return tokens a second of `n` streams, and the size of each tick, if guesses are so often right."""
    oracle, draw = Oracle(acceptance), np.random.default_rng(1)
    monkeypatch.setattr(drafter, "Drafter", lambda: oracle)
    ns, sizes = n + 1, []

    def keep(_state: SchedulerState, plan: Plan, _record: TickRecord) -> None:
        sizes.append(plan.n_tokens + plan.ballast)

    world = Simulation(
        find_policy("deadline"),
        profile=machine(),
        settings=evolve(settings_for(machine()), drafts=drafts),
        limits=Limits(1000 * ns, 1000 * ns, ns, 512, n_rows=ns + 16),
        n_vocab=5000,
        recorder=Recorder(keep),
    )
    for client in range(n):
        prompt, answer = (draw.integers(300, 4999, k).astype(np.int32) for k in (32, LENGTH))
        wrong = draw.random(LENGTH) >= acceptance
        oracle._answers[prompt.tobytes()] = np.where(wrong, answer ^ 1, answer).astype(np.int32)
        world.tell(Told(prompt, answer), client=client)
    while any(request.end is None for request in world.requests):
        world.run(1.0)
    first = min(request.token_times[0] for request in world.requests)
    last = max(request.token_times[-1] for request in world.requests)
    return n * LENGTH / (last - first), sizes


@pytest.mark.parametrize(
    ("n", "acceptance", "least"), [(1, 0.7, 1.65), (4, 0.7, 1.3), (1, 0.0, 0.97), (4, 0.0, 0.97)]
)
def test_held_drafts_pay_where_guesses_are_right_and_cost_little_where_they_are_wrong(
    n: int, acceptance: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with what a change of shape and a tick that is not prepared cost."""
    plain, _ = told(monkeypatch, n, acceptance, drafts=False)
    drafted, sizes = told(monkeypatch, n, acceptance, drafts=True)
    assert drafted / plain >= least
    changes = sum(one != other for one, other in pairwise(sizes))
    assert changes <= 12


def planned(held: HeldDrafts, *survival: float, tick: int = 1) -> Plan:
    """Return a tick of one stream with guesses of these chances."""
    n = len(survival)
    view = decoder(1, pending=1 + n, drafted=n, survival=survival, computed=10)
    memory = Memory(cost=H200, held_drafts=held)
    state = SchedulerState(
        now=1.0, tick=tick, sequences=(view,), n_batch=512, free_cells=4000, n_rows=24,
        spare_rows=20, memory=memory,
    )  # fmt: skip
    return hold_drafts(state, Plan(items=(PlanItem(1, 1, "decode", "decodes"),), memory=memory))


def test_a_tick_with_fewer_guesses_keeps_its_size_by_ballast() -> None:
    """One guess and two rows that are thrown away make up a size of four."""
    plan = planned(HeldDrafts(4), 0.9)
    assert (plan.n_tokens, plan.ballast) == (2, 2)


def test_a_size_is_held_once_it_promised_its_price() -> None:
    """One tick of likely guesses promises less than two changes of shape take, a few more."""
    held, sizes = HeldDrafts(), []
    for _ in range(4):
        plan = planned(held, 0.8, 0.64, 0.5)
        held = plan.memory.held_drafts
        sizes.append(plan.n_tokens)
    assert sizes[0] == 1
    assert sizes[-1] > 1


def test_after_a_size_that_was_not_worth_it_the_next_has_to_promise_more() -> None:
    """What was promised for a change is not enough for one in doubt."""
    promised = {4: 2.5 * H200.recapture_s}
    assert planned(HeldDrafts(0, promised), 0.1).memory.held_drafts.size == 4
    assert planned(HeldDrafts(0, promised, doubt=2), 0.1).memory.held_drafts.size == 0


def test_a_size_whose_guesses_were_wrong_is_given_up() -> None:
    """What counts is the tokens that came, not those that are guessed on."""
    lost = {0: 8.5 * H200.recapture_s}
    held = HeldDrafts(4, lost, saved_s=-0.01, known={1: 10})
    after = planned(held, 0.9, 0.9, 0.9).memory.held_drafts
    assert (after.size, after.doubt) == (0, 1)


def test_the_size_with_most_tokens_a_second_is_held() -> None:
    """Not the one with most tokens a tick: two more rows take a quarter longer here and give a tenth more."""
    held = HeldDrafts()
    while not held.size:
        held = planned(held, 0.7, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1).memory.held_drafts
    assert held.size == 4


def test_what_ticks_with_drafts_wait_for_the_host_is_learnt_and_plain_ticks_do_not_learn_it() -> (
    None
):
    """It is in the price of the next ones, and not in what a stream takes alone."""
    held = HeldDrafts(4, known={1: 10})
    work = Work(4, 4, after=(4, 4))
    memory = Memory(cost=H200)
    view = decoder(1, pending=4, drafted=3, survival=(0.9, 0.8, 0.7), computed=10)
    for _ in range(100):
        held = evolve(held, host_s=memory.held_drafts.host_s)
        memory = evolve(memory, held_drafts=held)
        state = SchedulerState(
            now=1.0, tick=1, sequences=(view,), n_batch=512, free_cells=4000, n_rows=24,
            spare_rows=20, memory=memory, measured=(MeasuredTick(0.0046, 0.002, work),),
        )  # fmt: skip
        plan = Plan(items=(PlanItem(1, 1, "decode", "decodes"),), memory=memory)
        memory = hold_drafts(state, learn_cost(state, plan)).memory
    assert memory.held_drafts.host_s == pytest.approx(0.002, rel=0.01)
    assert memory.cost is not None
    assert memory.cost.host_s == H200.host_s


class Capturing(FakeBackend):
    """A fake on which another shape of the batch costs."""

    @property
    def traits(self) -> Traits:
        """As on a GPU."""
        return evolve(super().traits, shape_costs=True)


def test_guesses_are_the_default_only_where_shapes_cost_nothing() -> None:
    """What is asked for counts on both."""
    asked = Config(speculation="free")
    for backend, default in ((FakeBackend(), "auto"), (Capturing(), "off")):
        assert allowed_speculation(Config(), backend) == default
        assert allowed_speculation(asked, backend) == "free"
