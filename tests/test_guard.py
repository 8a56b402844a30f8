"""The parts of the contract, one by one: the ledger, limits, sizes, bursts."""

from __future__ import annotations

import pytest
from attrs import asdict, evolve
from policy_kit import after, decoder, prompt, state

from uma_trio.policy.accounting import as_measured, planned_work
from uma_trio.policy.contract import contract
from uma_trio.policy.contract.ballast import TRY_WITHOUT
from uma_trio.policy.contract.candidates import Candidates
from uma_trio.policy.contract.error_budget import (
    DEEPEST_DEBT,
    EARNED_PER_TOKEN,
    MOST_BUDGET,
    MOST_NOISE,
    keep_error_budget,
)
from uma_trio.policy.contract.fill import fill_within_limit
from uma_trio.policy.contract.learn import learn_cost
from uma_trio.policy.contract.limit import set_limit
from uma_trio.policy.contract.rules import CAPTURED_SHAPES, FREE_SHAPES
from uma_trio.policy.contract.sizes import (
    BURST,
    HELD,
    sweet_spot,
)
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.find import find_policy
from uma_trio.policy.pipeline import PolicyError
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import (
    Contract,
    GuardMemory,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
    Served,
)

STAIRS = {1: 8.0, 2: 11.7, 3: 16.2, 4: 11.1, 5: 15.2, 8: 18.8, 16: 25.9, 32: 48.7, 64: 93.5}
COST = CostModel(Staircase(tuple(STAIRS), tuple(ms / 1e3 for ms in STAIRS.values())))
SOLO = 0.008


def situation(*views: SequenceView, **remembered: object) -> SchedulerState:
    """Return a state in the middle of things: the cost is known, old streams are old."""
    guard = GuardMemory(**remembered)  # type: ignore[arg-type]
    return evolve(state(*views), tick=1, memory=Memory(cost=COST, guard=guard))


def started(state_: SchedulerState) -> Plan:
    """Return the empty plan that a policy begins with."""
    return Plan(memory=state_.memory)


def stream(key: int = 1, **changes: object) -> SequenceView:
    """Return an interactive stream that began long ago."""
    return decoder(key, **{"first_token_at": 0.0, "computed": 0} | changes)


def remembered_after(*itl: float, mixed: bool = False, **remembered: object) -> GuardMemory:
    """Return what the guard remembers after these gaps of one stream, a tick each."""
    ticks = [MeasuredTick(itl_s, itl={1: itl_s}, solo_s=SOLO, mixed=mixed) for itl_s in itl]
    now = after(situation(stream(), **remembered), *ticks)
    return keep_error_budget(now, started(now)).memory.guard


def test_a_gap_in_time_earns_a_little() -> None:
    """Less than a twentieth, and never more than two long gaps' worth."""
    assert remembered_after(SOLO).budgets == {1: EARNED_PER_TOKEN}
    assert remembered_after(SOLO, budgets={1: MOST_BUDGET}).budgets == {1: MOST_BUDGET}


def test_a_late_gap_costs_one_and_debt_is_bounded() -> None:
    """Whatever made it late; one bad stretch does not starve the background for ever."""
    assert remembered_after(3 * SOLO, budgets={1: 1.5}).budgets == {1: 0.5}
    assert remembered_after(3 * SOLO, budgets={1: DEEPEST_DEBT}).budgets == {1: DEEPEST_DEBT}


def test_ticks_that_were_measured_together_are_entered_one_after_the_other() -> None:
    """Where plans are made ahead, one that was thrown away leaves two ticks to the next."""
    for first, second in ((SOLO, 3 * SOLO), (3 * SOLO, SOLO)):
        guard = remembered_after(first, budgets={1: MOST_BUDGET})
        then = remembered_after(second, **asdict(guard))
        assert remembered_after(first, second, budgets={1: MOST_BUDGET}) == then
    ticks = [MeasuredTick(took, 0.001, Work(1, 1, after=(1, 1))) for took in (0.01, 0.012)]
    now = state(stream())
    now = evolve(now, memory=Memory(cost=COST))
    once = learn_cost(after(now, ticks[0]), started(now)).memory
    assert learn_cost(after(now, *ticks), started(now)).memory.cost == (
        learn_cost(after(now, ticks[1]), Plan(memory=once)).memory.cost
    )


def test_late_is_beyond_what_the_machine_does_to_a_stream_alone() -> None:
    """A gap that streams alone would see one time in twenty is nobody's fault."""
    assert remembered_after(1.5 * SOLO, noise=1.0).budgets == {1: -1.0}
    assert remembered_after(1.5 * SOLO, noise=1.4).budgets == {1: EARNED_PER_TOKEN}


def test_the_unrest_of_the_machine_is_learnt_from_ticks_alone() -> None:
    """Above the estimate it goes up, below it down, slowly; ticks with company say nothing."""
    assert remembered_after(2 * SOLO, noise=1.2).noise > 1.2
    assert 1.19 < remembered_after(SOLO, noise=1.2).noise < 1.2
    assert remembered_after(2 * SOLO, noise=1.2, mixed=True).noise == 1.2
    assert remembered_after(9 * SOLO, noise=MOST_NOISE).noise == MOST_NOISE


def limit(credit: float, *views: SequenceView, **remembered: object) -> Plan:
    """Return the plan with its limit, where stream 1 has so much credit."""
    now = situation(*(views or (stream(),)), budgets={1: credit}, **remembered)
    return set_limit(now, started(now))


def test_only_credit_buys_a_long_tick() -> None:
    """Four times solo with credit, two when the stream is young, else the cap."""
    assert limit(1.0).limit.seconds == pytest.approx(4 * SOLO)
    assert limit(1.0, stream(first_token_at=99.0)).limit.seconds == pytest.approx(2 * SOLO)
    assert limit(0.5).limit.seconds == pytest.approx(1.2 * SOLO)


def test_a_long_tick_is_paid_for_before_there_is_another() -> None:
    """What one cost is not known yet to a plan that is made while it is computed."""
    for long, prepared in ((True, False), (False, True), (True, True)):
        now = evolve(situation(stream(), budgets={1: 1.0}, long=long), prepared=prepared)
        plan = set_limit(now, started(now))
        assert plan.limit.long == plan.memory.guard.long == (not (long and prepared))


def test_a_newcomer_may_take_what_a_single_pause_may() -> None:
    """Few long gaps instead of many of twice solo, unless a stream is young or visits never end."""
    assert limit(0.0).limit.newcomer_s == pytest.approx(4 * SOLO)
    assert limit(0.0, stream(first_token_at=99.0)).limit.newcomer_s == pytest.approx(2 * SOLO)
    assert limit(0.0, newcomers=0.3).limit.newcomer_s == pytest.approx(2 * SOLO)


def test_the_beginning_of_a_paste_makes_no_gap_longer_than_twice_solo() -> None:
    """Who sends a document waits anyway; a question has the pause cap."""
    for pending, times in ((512, 4), (513, 2)):
        plan = limit(0.0, stream(), prompt(2, pending))
        assert plan.limit.newcomer_s == pytest.approx(times * SOLO)
    begun = prompt(2, 100, computed=512)
    assert limit(0.0, stream(), begun).limit.newcomer_s == pytest.approx(4 * SOLO)


def test_only_waiting_background_work_is_owed_a_floor() -> None:
    """Newcomers have a limit of their own and are granted nothing beyond it."""
    assert (
        "floor grant" in limit(0.0, stream(), decoder(2, lane="background"), share=0.0).limit.reason
    )
    assert "floor grant" not in limit(0.0, stream(), prompt(2, 30), share=0.0).limit.reason


def test_a_grant_stays_within_the_pause_cap() -> None:
    """One application's `slo` narrows other ticks, and does not take the floor from everyone else."""
    views = (stream(), decoder(2, lane="background"))
    now = evolve(situation(*views, share=0.0), contract=Contract(pause_cap=2.0))
    assert set_limit(now, started(now)).limit.seconds == pytest.approx(2 * SOLO)
    for share, seconds in ((1.0, 0.009), (0.0, 4 * SOLO)):
        asking = situation(stream(target_itl_s=0.009), views[1], share=share)
        assert set_limit(asking, started(asking)).limit.seconds == pytest.approx(seconds)


def test_the_share_of_the_background_is_followed_where_nobody_reads_too() -> None:
    """A moment without a stream, as between two answers, is no gift of a whole share."""
    now = situation(prompt(1, 30), share=0.01)
    assert contract(now).memory.guard.share <= 0.01
    tick = MeasuredTick(1.0, 0.0, Work(512), mixed=True, background=1.0)
    busy = after(situation(share=0.01), tick)
    assert contract(busy).memory.guard.share > 0.3


def test_a_larger_floor_is_granted_more_often() -> None:
    """One tick of four times solo in 25 is a tenth of the time; a floor of 0.3 takes one in seven."""
    views = (stream(), decoder(2, lane="background"))
    for floor, since, granted in (
        (0.05, 23, False),
        (0.05, 24, True),
        (0.3, 5, False),
        (0.3, 6, True),
    ):
        now = situation(*views, share=0.0, since_grant=since)
        now = evolve(now, contract=Contract(background_floor=floor))
        assert set_limit(now, started(now)).limit.grant == granted


def test_who_is_parked_for_a_while_finds_credit_and_debt_again() -> None:
    """Reading slowly for a moment, or a change of lane, is no way out of the ledger."""
    for away in (stream(1, credit=0), stream(1, lane="background")):
        now = situation(away, stream(2), budgets={1: -2.0, 2: 0.0, 3: 1.0})
        now = after(now, MeasuredTick(SOLO, itl={2: SOLO}, solo_s=SOLO))
        assert keep_error_budget(now, started(now)).memory.guard.budgets == {
            1: -2.0,
            2: EARNED_PER_TOKEN,
        }


def test_a_grant_is_not_for_newcomers() -> None:
    """They have their limit in every other tick; what is granted and counted goes to the rest."""
    now = situation(stream(), prompt(2, 30), prompt(3, 500, lane="background"), share=0.0)
    plan = contract(now)
    assert plan.limit.grant
    assert {item.key for item in plan.items} == {1, 3}


def test_company_does_not_change_what_the_streams_cost_alone() -> None:
    """The slots that others hold would be ballast's, were the streams alone."""
    streams = [stream(key) for key in range(5)]
    others = [decoder(key, lane="background") for key in range(10, 13)]
    quiet = evolve(situation(*streams), spare_rows=4)
    busy = evolve(situation(*streams, *others), spare_rows=1)
    solos = [set_limit(now, started(now)).limit.solo_s for now in (quiet, busy)]
    assert solos[0] == solos[1]


def test_without_ballast_the_streams_are_measured_without_it() -> None:
    """Three streams that may not run as four are no slower than themselves."""
    now = evolve(situation(stream(1), stream(2), stream(3)), spare_rows=2)
    assert contract(now).limit.solo_s == pytest.approx(0.0111)
    assert find_policy("contract,-stairs")(now).limit.solo_s == pytest.approx(0.0162)


@pytest.mark.parametrize(
    ("cap", "error", "long"),
    [(1.2, 0.0, True), (3.0, 0.0, True), (3.0, 0.15, False), (4.0, 0.0, False)],
)
def test_no_tick_is_rare_where_its_margin_leaves_it_less_room_than_others(
    cap: float, error: float, *, long: bool
) -> None:
    """Whoever bears more than a margin would allow has every tick as long as that."""
    cost = evolve(COST, error=error, table_error=error)
    memory = Memory(cost=cost, guard=GuardMemory(budgets={1: 2.0}))
    now = evolve(situation(stream()), memory=memory, contract=Contract(latency_cap=cap))
    limit = set_limit(now, started(now)).limit
    assert (limit.long, limit.seconds) == (long, pytest.approx((4.0 if long else cap) * SOLO))


def test_deep_debt_narrows_the_limit() -> None:
    """Until the stream has recovered, at the deepest only what costs nothing rides along."""
    assert limit(-1.0).limit.seconds == pytest.approx(1.2 * SOLO)
    assert limit(-2.0).limit.seconds == pytest.approx(1.1 * SOLO)
    assert limit(DEEPEST_DEBT).limit.seconds == pytest.approx(SOLO)


def test_a_tick_that_measures_the_streams_alone_is_closed() -> None:
    """Nothing rides along, not even what would fit, so that it measures what it says."""
    now = situation(stream(), prompt(2, 30), mixed=True, mixed_ticks=1000)
    plan = contract(now)
    assert plan.limit.isolated
    assert [item.key for item in plan.items] == [1]


def filled(now: SchedulerState) -> dict[int, int]:
    """Return the tokens of each sequence that rides along."""
    plan = fill_within_limit(now, set_limit(now, started(now)))
    return {item.key: item.n_tokens for item in plan.items}


def test_nothing_slows_down_a_newcomer_who_is_alone() -> None:
    """With no stream to protect, a tick with a person's prompt has no room for a batch's."""
    now = situation(prompt(1, 30), prompt(2, 500, lane="background"))
    assert filled(now) == {1: 30}


def test_alone_the_background_takes_the_smallest_chunk_at_full_rate() -> None:
    """So that the next newcomer waits least."""
    now = situation(prompt(2, 64, lane="background"))
    assert filled(now) == {2: 32}


def test_no_tick_is_larger_than_the_largest_step_that_is_known() -> None:
    """Two noisy steps with little between them would make the next chunk look free."""
    steep = CostModel(Staircase((1, 32, 64), (0.008, 0.049, 0.050)))
    now = evolve(situation(prompt(1, 500, lane="background")), memory=Memory(cost=steep))
    assert filled(now) == {1: 64}


def test_where_shapes_cost_a_tick_asks_for_a_row_as_if_a_prompt_ended() -> None:
    """So that the ticks beside a long prompt, its end included, all have one shape."""
    rules = Contract(latency_cap=4.0)
    captured = evolve(COST, recapture_s=0.002)
    memory = Memory(cost=captured, guard=GuardMemory())
    for pending in (500, 15):
        views = (stream(), prompt(2, pending, lane="background"))
        now = evolve(situation(*views), memory=memory, contract=rules)
        plan = contract(now)
        assert (planned_work(now, plan).shape, plan.extra_rows) == ((16, 2), pending == 500)
    assert not contract(evolve(now, memory=evolve(memory, cost=COST))).extra_rows


def test_a_tick_has_the_rows_of_the_one_before_where_it_has_its_size() -> None:
    """Decoders whose turn is over leave their rows to a prompt that asks for nothing."""
    rules, captured = Contract(latency_cap=4.0), evolve(COST, recapture_s=0.002)
    memory = Memory(cost=captured, guard=GuardMemory())
    views = (stream(), stream(3), prompt(2, 500, lane="background"), prompt(4, lane="background"))
    now = evolve(situation(*views), memory=memory, contract=rules)
    size = contract(now).n_tokens
    for before, rows in (((size, 4), 4), ((size, 9), 4), ((size - 1, 4), 3), ((size, 2), 3)):
        plan = contract(after(now, MeasuredTick(0.02, 0.0, Work(*before, after=before))))
        assert planned_work(now, plan).shape == (size, rows)


def test_a_tick_of_the_size_in_use_is_not_charged_for_a_new_shape() -> None:
    """The row that keeps the shape comes after the size is chosen, and must not make it dearer."""
    captured = evolve(COST, recapture_s=0.02)
    memory = Memory(cost=captured, guard=GuardMemory(), served=Served(tokens=16))
    before = MeasuredTick(0.0259, 0.0, Work(16, 2, after=(16, 2)))
    views = (stream(), prompt(2, 500, lane="background"))
    now = evolve(situation(*views), memory=memory, contract=Contract(latency_cap=4.0))
    now = after(now, before)
    plan = contract(now)
    assert planned_work(now, plan).shape == (16, 2)
    assert plan.predicted_s == pytest.approx(0.0259, rel=0.01)


def test_ballast_takes_no_cell_that_a_stream_needs() -> None:
    """Or the last token of an answer that fills the cache would find no room."""
    now = evolve(situation(stream(1), stream(2), stream(3)), spare_rows=2)
    assert contract(evolve(now, empty_cells=4)).ballast == 1
    assert contract(evolve(now, empty_cells=3)).ballast == 0


def test_ballast_is_left_out_now_and_then() -> None:
    """Three streams run as four, but for the tick that shows what three take."""
    now = evolve(situation(stream(1), stream(2), stream(3)), spare_rows=2)
    assert contract(now).ballast == 1
    assert contract(evolve(now, tick=TRY_WITHOUT)).ballast == 0


def test_a_step_that_was_measured_too_high_is_not_avoided_for_ever() -> None:
    """One row that seemed to cost more than four gets its chance, and ballast ends."""
    believed = CostModel(Staircase((1, 4), (0.012, 0.0105)))
    truth = CostModel(Staircase((1, 4), (0.008, 0.0111)))
    memory, last, ballast = Memory(cost=believed), MeasuredTick(), []
    for tick in range(6000):
        now = after(evolve(state(stream()), tick=tick, memory=memory, spare_rows=3), last)
        plan = contract(now)
        work = planned_work(now, plan)
        memory, last = plan.memory, as_measured(plan, work, truth.seconds(work), 0.0, {})
        ballast.append(plan.ballast)
    assert ballast[1] == 3
    assert ballast[-1] == 0


def test_where_graphs_are_captured_streams_run_alone_for_a_while_and_less_often() -> None:
    """The first two ticks of a shape are slow, so one alone would measure nothing."""
    captured = evolve(COST, recapture_s=0.002)
    guard = GuardMemory(mixed=True, mixed_ticks=1000)
    now = evolve(situation(stream()), memory=Memory(cost=captured, guard=guard))
    isolated = []
    for _ in range(6):
        plan = set_limit(now, started(now), CAPTURED_SHAPES)
        isolated.append(plan.limit.isolated)
        now = evolve(now, memory=plan.memory)
    assert isolated == [True] * 4 + [False] * 2


@pytest.mark.parametrize("credit", [1.5, 0.0, -2.0])
def test_where_graphs_are_captured_the_limit_stands_still(credit: float) -> None:
    """A limit that moved with the credit would change shapes, and that makes ticks late."""
    memory = Memory(cost=evolve(COST, recapture_s=0.002), guard=GuardMemory(budgets={1: credit}))
    now = evolve(situation(stream()), memory=memory)
    limit = set_limit(now, started(now), CAPTURED_SHAPES).limit
    assert limit.seconds == pytest.approx(1.2 * SOLO)


def test_a_tick_of_a_shape_in_use_tells_though_another_shape_came_behind_it() -> None:
    """Two ticks that were measured together, of which the second is the first of its shape."""
    memory = Memory(cost=evolve(COST, recapture_s=0.002), same_shape=50)
    settled = MeasuredTick(SOLO, 0.0, Work(1, 1, after=(1, 1)), {1: 3 * SOLO}, SOLO)
    other = MeasuredTick(SOLO, 0.0, Work(9, 2, after=(1, 1)), {1: 3 * SOLO}, SOLO)
    now = after(evolve(situation(stream()), memory=memory), settled, other)
    assert keep_error_budget(now, started(now), CAPTURED_SHAPES).memory.guard.noise > 1.0
    now = after(now, other, other)
    assert keep_error_budget(now, started(now), CAPTURED_SHAPES).memory.guard.noise == 1.0


@pytest.mark.parametrize(("same_shape", "learns"), [(0, False), (1, True)])
def test_the_first_ticks_of_a_captured_shape_teach_nothing(same_shape: int, learns: bool) -> None:
    """Neither the model nor the unrest of the machine; elsewhere every tick does."""
    last = MeasuredTick(0.02, 0.0, Work(1, 1, after=(1, 1)))
    for rules in (CAPTURED_SHAPES, FREE_SHAPES):
        memory = Memory(cost=COST, same_shape=same_shape)
        now = after(evolve(state(stream()), memory=memory), last)
        plan = learn_cost(now, started(now), rules)
        assert (plan.memory.cost != memory.cost) == (learns or rules is FREE_SHAPES)


def rates(**changes: object) -> SchedulerState:
    """Return a state in which sizes are chosen."""
    return evolve(state(), **{"tick": 1} | changes)


def test_more_streams_than_rows_leave_out_each_of_the_others_once() -> None:
    """A batch that was made smaller for want of room: who is left out is told why, and nobody fails."""
    now = situation(*(stream(key) for key in range(5)), decoder(9, lane="background"))
    plan = contract(evolve(now, n_batch=4))
    assert [item.key for item in plan.items] == [0, 1, 2, 3]
    assert [skip.key for skip in plan.skipped] == [4, 9]
    assert plan.skipped[0].reason == "decode: the batch is full, its turn is next"


@pytest.mark.parametrize(("computed", "gets"), [(0, 3), (511, 1), (512, 0)])
def test_only_the_beginning_of_a_long_prompt_is_a_newcomers(computed: int, gets: int) -> None:
    """Its first 512 tokens may make a tick late, the rest of a paste may not."""
    now = situation(stream(), prompt(2, 3000, computed=computed))
    items = {item.key: item.n_tokens for item in contract(now).items}
    assert items.get(2, 0) == gets
    now = situation(prompt(2, 3000, computed=500))
    assert [item.n_tokens for item in contract(now).items] == [COST.quickest(512)]


def test_what_a_long_prompt_must_leave_the_next_newcomer_takes() -> None:
    """A tick goes on with the next in the line; only a prompt that ends asks for a row of logits."""
    now = situation(stream(), prompt(2, 3000, computed=510), prompt(3, 100, arrived=100.0))
    plan = contract(now)
    assert [(item.key, item.n_tokens) for item in plan.items[:2]] == [(1, 1), (2, 2)]
    assert plan.items[2].key == 3
    assert Candidates(Work(1), now.sequences[1:], within=512).adds(102) == (102, 1, 2 * 510)


def test_prompts_go_in_the_chunks_that_doctor_names() -> None:
    """With nobody to protect: the plateau's for the background, the quickest for a newcomer."""
    for lane, chunk in (("background", COST.plateau(512)), ("interactive", COST.quickest(512))):
        now = situation(prompt(1, 2000, lane=lane))
        assert [item.n_tokens for item in contract(now).items] == [chunk]


def test_the_sweet_spot_is_the_most_tokens_a_second() -> None:
    """Four rows of the staircase above beat three and five; nearly as good and smaller wins."""
    took = {3: 0.0111, 4: 0.0152, 7: 0.0188}
    assert sweet_spot(rates(), took, 1) == 7
    assert sweet_spot(rates(), {3: 0.0111, 4: 0.0152}, 1) == 3
    assert sweet_spot(rates(), {30: 0.1, 31: 0.102}, 1) == 30


def test_a_size_in_use_is_kept_for_a_small_gain() -> None:
    """Noise must not make the batch's shape flutter."""
    took = {4: 0.0100, 8: 0.0187}  # eight are 7 % better than four
    assert sweet_spot(rates(), took, 1) == 8
    using_four = Memory(served=Served(tokens=5))
    assert sweet_spot(rates(memory=using_four), took, 1) == 4


def test_now_and_then_a_neighbour_is_tried() -> None:
    """Only ticks of a size tell what it costs, so no size is given up for ever."""
    took = {3: 0.0111, 4: 0.0152, 7: 0.0188}
    tried = {sweet_spot(rates(tick=tick), took, 1) for tick in range(2 * FREE_SHAPES.probe_every)}
    assert tried == {4, 7}
    captured = {
        sweet_spot(rates(tick=tick), took, 1, CAPTURED_SHAPES)
        for tick in range(1, 2 * FREE_SHAPES.probe_every)
    }
    assert captured == {7}, "there a neighbour makes ticks slow"


def test_a_size_that_did_not_fit_any_more_is_not_tried_again_at_once() -> None:
    """A prompt that begins leaves more room than one that ends; each change makes two ticks slow."""
    caps = {1: 4.0, 2: 3.0, 3: 4.0, HELD + 1: 4.0, HELD + 2: 4.0}
    for recapture_s, sizes in ((0.002, [16, 8, 8, 8, 16]), (0.0, [16, 8, 16, 16, 16])):
        memory = Memory(cost=evolve(COST, recapture_s=recapture_s), guard=GuardMemory())
        for (tick, cap), size in zip(caps.items(), sizes, strict=True):
            views = (stream(), prompt(2, 500, lane="background"))
            rules = Contract(latency_cap=cap, pause_cap=cap)
            now = evolve(situation(*views), tick=tick, memory=memory, contract=rules)
            plan = contract(now)
            memory = plan.memory
            assert plan.n_tokens == size


def test_a_neighbour_that_is_only_tried_holds_no_size_down() -> None:
    """Held is what did not fit, not what was chosen."""
    memory = Memory(cost=evolve(COST, recapture_s=0.002), guard=GuardMemory())
    memory = evolve(memory, served=Served(tokens=16))
    views, rules = (stream(), prompt(2, 500, lane="background")), Contract(latency_cap=4.0)
    sizes = []
    every = CAPTURED_SHAPES.probe_every
    for tick in (2 * every, 2 * every + 1):
        now = evolve(situation(*views), tick=tick, memory=memory, contract=rules)
        plan = contract(now)
        memory = plan.memory
        sizes.append(plan.n_tokens)
    assert sizes == [8, 16]


def test_beside_a_stream_that_joined_the_smallest_size_is_the_one_that_is_held() -> None:
    """Where nothing is as small as what is held, nothing larger than it must be is taken."""
    memory = Memory(served=Served(tokens=2, most=2, held_until=99))
    took = {3: 0.0111, 4: 0.0152, 7: 0.0188}
    assert sweet_spot(rates(memory=memory), took, 1, CAPTURED_SHAPES) == 3


def test_background_decoders_go_on_together_for_a_burst() -> None:
    """Five that share rows of four: the same four for a while, then the fifth has its turn."""
    views = [decoder(i, lane="background", client=i, computed=0) for i in range(5)]
    memory = Memory(cost=COST)
    turns = []
    for tick in range(1, 3 * BURST):
        plan = contract(evolve(state(*views), tick=tick, memory=memory))
        memory = plan.memory
        turns.append(tuple(sorted(item.key for item in plan.items)))
    assert len(turns[0]) == 4
    assert turns[: BURST - 1] == [turns[0]] * (BURST - 1)
    assert turns[BURST + 1] != turns[0]


@pytest.mark.parametrize("contended", [False, True])
def test_what_others_cost_between_two_decodes_is_not_the_streams_own(*, contended: bool) -> None:
    """Planning takes longer beside others; counted as the streams' own it would widen every limit."""
    now = situation(stream())
    now = after(now, MeasuredTick(SOLO, 0.002, Work(1, 1, contended=contended)))
    cost = learn_cost(now, started(now)).memory.cost
    assert cost is not None
    assert (cost.host_s > 0, cost.contended_host_s > 0) == (not contended, contended)
    only = cost.between_s(Work(1, contended=contended))
    assert cost.between_s(Work(1, contended=not contended)) == only > 0, (
        "while that is all there is"
    )
    other = cost.learn(Work(1, contended=not contended), SOLO, 4 * only)
    assert other.between_s(Work(1, contended=contended)) == only
    assert other.between_s(Work(1, contended=not contended)) == pytest.approx(1.3 * only)


@pytest.mark.parametrize("spec", ["contract,stairs", "contract,-fill", "contract,-", "x,-y"])
def test_what_cannot_be_left_out_is_refused(spec: str) -> None:
    """The message says what can be."""
    with pytest.raises(PolicyError, match=r"learning, error-budget|-PART|baseline, contract"):
        find_policy(spec)


@pytest.mark.parametrize("recapture_s", [0.0, 0.002])
def test_the_cost_of_a_change_of_shape_decides_which_pipeline_plans(recapture_s: float) -> None:
    """Once, for all stages; only one of the two has a stage that keeps the shape."""
    cost = CostModel(Staircase((1, 8), (0.008, 0.02)), recapture_s=recapture_s)
    now = evolve(state(decoder(1), prompt(2)), memory=Memory(cost=cost))
    chosen = contract.captured if recapture_s else contract.free
    assert contract(now) == chosen(now)
    assert ("shape" in chosen.stages) == bool(recapture_s)


def test_a_part_is_left_out_of_both_pipelines() -> None:
    """So that a comparison means the same on every machine."""
    without = contract.without("shape", "stairs")
    assert without.optional == without.captured.optional
    assert {"shape", "stairs"}.isdisjoint({*without.free.stages, *without.captured.stages})
