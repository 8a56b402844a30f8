"""The stages of the policy beside its limit, one by one: learning, sizes, shapes, ballast, bursts."""

from __future__ import annotations

import pytest
from attrs import evolve
from policy_kit import COST, after, decoder, prompt, situation, state

from uma_trio.policy.accounting import as_measured, learn_cost, owed_after, planned_work
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.candidates import BURST, Candidates
from uma_trio.policy.deadline.fill import PROBE_EVERY, sweet_spot
from uma_trio.policy.deadline.shape import TRY_WITHOUT
from uma_trio.policy.deadline.slack import set_slack
from uma_trio.policy.pipeline import PolicyError
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import (
    Contract,
    GuardMemory,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
    Served,
)
from uma_trio_sim.ablation import ablated

SOLO = 0.008


def captured_situation(*views: SequenceView, **changes: object) -> SchedulerState:
    """Return a state where shapes cost and readers are far ahead, before ticks of 16 tokens at most."""
    now = situation(*views)
    guard, cost = GuardMemory(), evolve(COST, recapture_s=0.002)
    memory = Memory(cost=cost, guard=guard)
    return evolve(
        now, **{"memory": memory, "n_batch": 16, "contract": Contract(latency_cap=4.0)} | changes
    )


def far_ahead(key: int = 1) -> SequenceView:
    """Return a stream of which tokens are computed for the next 0.3 s."""
    return stream(key, shown_at=100.3)


def started(state_: SchedulerState) -> Plan:
    """Return the empty plan that a policy begins with."""
    return Plan(memory=state_.memory)


def stream(key: int = 1, **changes: object) -> SequenceView:
    """Return an interactive stream that began long ago."""
    return decoder(key, **{"first_token_at": 0.0, "computed": 0} | changes)


def test_ticks_that_were_measured_together_are_entered_one_after_the_other() -> None:
    """Where plans are made ahead, one that was thrown away leaves two ticks to the next."""
    ticks = [MeasuredTick(took, 0.001, Work(1, 1, after=(1, 1))) for took in (0.01, 0.012)]
    now = state(stream())
    now = evolve(now, memory=Memory(cost=COST))
    once = learn_cost(after(now, ticks[0]), started(now)).memory
    assert learn_cost(after(now, *ticks), started(now)).memory.cost == (
        learn_cost(after(now, ticks[1]), Plan(memory=once)).memory.cost
    )


BESIDE = Limit(SOLO, "", SOLO)


def owed(share: float, floor: float = 0.1, ticks: int = 1000) -> float:
    """Return what background work is owed that had such a part of each of so many ticks."""
    views = (stream(), decoder(2, lane="background"))
    now = evolve(situation(*views, owed_s=-1e9), contract=Contract(background_floor=floor))
    for _ in range(ticks):
        owed_s = owed_after(now, BESIDE, SOLO / (1 - share), background=1.0)
        now = evolve(now, memory=evolve(now.memory, guard=GuardMemory(owed_s=owed_s)))
    return now.memory.guard.owed_s


def test_background_work_is_owed_what_it_had_less_than_half_of_its_floor() -> None:
    """And nothing while readers may be getting as far ahead as they can."""
    seconds = 400 * SOLO
    assert owed(0.0, ticks=400) == pytest.approx(0.05 * seconds - 0.15, abs=1e-3)
    assert owed(0.0, floor=0.2, ticks=200) == pytest.approx(0.1 * seconds / 2 - 0.15, abs=1e-3)
    assert owed(0.02, ticks=400) == pytest.approx(0.03 * seconds / 0.98 - 0.15, abs=1e-3)
    assert owed(0.06) == -0.15
    assert owed(0.0, ticks=int(0.3 / 0.1 / SOLO)) == pytest.approx(0.0, abs=1e-3)


def test_background_work_is_owed_no_more_than_a_grant_can_give() -> None:
    """Or where grants help little they would be given in each tick, for ever after."""
    assert owed(0.0, ticks=5000) == Contract().pause_cap * SOLO


def test_nothing_is_owed_to_work_that_is_not_there() -> None:
    """What newcomers, or nobody, wait for is not the background's."""
    for views in ((stream(),), (stream(), prompt(2, 40))):
        assert owed_after(situation(*views, owed_s=1.0), BESIDE, SOLO, background=0.0) == -0.15
    waits = situation(stream(), prompt(2, 40, lane="background"), owed_s=0.01)
    assert owed_after(waits, BESIDE, SOLO, background=0.0) > 0.01
    assert owed_after(waits, NO_LIMIT, SOLO, background=1.0) == -0.15, "nobody reads or asks"


def test_newcomers_without_end_leave_the_whole_floor() -> None:
    """With a reader they have the slack that would be it, without one the machine."""
    views = (prompt(2, 40), prompt(3, 40, lane="background"))
    for limit, others in ((BESIDE, (stream(),)), (evolve(NO_LIMIT, brief_s=0.2), ())):
        now = situation(*others, *views, owed_s=0.0)
        assert owed_after(now, limit, SOLO, background=0.0) == pytest.approx(0.05 * SOLO)
    now = situation(*views, owed_s=0.0)
    brief_s = set_slack(now, started(now)).limit.brief_s
    for owed_s, granted in ((0.9 * brief_s, False), (brief_s, True)):
        plan = deadline(situation(*views, owed_s=owed_s))
        assert plan.limit.grant == granted
        assert {item.key for item in plan.items} == ({3} if granted else {2})


def test_a_grant_is_given_for_as_much_as_it_adds() -> None:
    """Which is three times solo where a pause may be four."""
    views = (stream(), decoder(2, lane="background"))
    for owed_s, grant in ((2.9 * SOLO, False), (3.0 * SOLO, True)):
        now = situation(*views, owed_s=owed_s)
        assert set_slack(now, started(now)).limit.grant == grant


def test_a_grant_is_not_for_newcomers() -> None:
    """They have their limit in every other tick; what is granted and counted goes to the rest."""
    now = situation(stream(), prompt(2, 30), prompt(3, 500, lane="background"), owed_s=1.0)
    plan = deadline(now)
    assert plan.limit.grant
    assert {item.key for item in plan.items} == {1, 3}


def test_company_does_not_change_what_the_streams_cost_alone() -> None:
    """The slots that others hold would be ballast's, were the streams alone."""
    streams = [stream(key) for key in range(5)]
    others = [decoder(key, lane="background") for key in range(10, 13)]
    quiet = evolve(situation(*streams), spare_rows=4)
    busy = evolve(situation(*streams, *others), spare_rows=1)
    solos = [set_slack(now, started(now)).limit.solo_s for now in (quiet, busy)]
    assert solos[0] == solos[1]


def test_without_ballast_the_streams_are_measured_without_it() -> None:
    """Three streams that may not run as four are no slower than themselves."""
    now = evolve(situation(stream(1), stream(2), stream(3)), spare_rows=2)
    assert deadline(now).limit.solo_s == pytest.approx(0.0111)
    assert ablated("deadline,-stairs")(now).limit.solo_s == pytest.approx(0.0162)


def test_a_tick_that_measures_the_streams_alone_is_closed() -> None:
    """Nothing rides along, not even what would fit, so that it measures what it says."""
    now = situation(stream(), prompt(2, 30), mixed=True, mixed_ticks=1000)
    plan = deadline(now)
    assert plan.limit.isolated
    assert [item.key for item in plan.items] == [1]


def filled(now: SchedulerState) -> dict[int, int]:
    """Return the tokens of each sequence that gets any."""
    return {item.key: item.n_tokens for item in deadline(now).items}


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
    for pending in (500, 15):
        now = captured_situation(far_ahead(), prompt(2, pending, lane="background"))
        plan = deadline(now)
        assert (planned_work(now, plan).shape, plan.extra_rows) == ((16, 2), pending == 500)
    free = evolve(now, memory=evolve(now.memory, cost=COST))
    assert not deadline(free).extra_rows


def test_a_tick_has_the_rows_of_the_one_before_where_it_has_its_size() -> None:
    """Decoders whose turn is over leave their rows to a prompt that asks for nothing."""
    batch = (prompt(2, 500, lane="background"), prompt(4, lane="background"))
    now = captured_situation(far_ahead(1), far_ahead(3), *batch)
    size = deadline(now).n_tokens
    for before, rows in (((size, 4), 4), ((size, 9), 4), ((size - 1, 4), 3), ((size, 2), 3)):
        plan = deadline(after(now, MeasuredTick(0.02, 0.0, Work(*before, after=before))))
        assert planned_work(now, plan).shape == (size, rows)


def test_a_tick_of_the_size_in_use_is_not_charged_for_a_new_shape() -> None:
    """The row that keeps the shape comes after the size is chosen, and must not make it dearer."""
    captured = evolve(COST, recapture_s=0.02)
    memory = Memory(cost=captured, guard=GuardMemory(mixed=True), served=Served(tokens=16))
    before = MeasuredTick(0.0259, 0.0, Work(16, 2, after=(16, 2)))
    now = captured_situation(far_ahead(), prompt(2, 500, lane="background"), memory=memory)
    now = after(now, before)
    plan = deadline(now)
    assert planned_work(now, plan).shape == (16, 2)
    assert plan.predicted_s == pytest.approx(0.0259, rel=0.01)


def test_ballast_takes_no_cell_that_a_stream_needs() -> None:
    """Or the last token of an answer that fills the cache would find no room."""
    now = evolve(situation(stream(1), stream(2), stream(3)), spare_rows=2)
    assert deadline(evolve(now, empty_cells=4)).ballast == 1
    assert deadline(evolve(now, empty_cells=3)).ballast == 0


def test_ballast_is_left_out_now_and_then() -> None:
    """Three streams run as four, but for the tick that shows what three take."""
    now = evolve(situation(stream(1), stream(2), stream(3)), spare_rows=2)
    assert deadline(now).ballast == 1
    assert deadline(evolve(now, tick=TRY_WITHOUT)).ballast == 0


def test_others_ride_along_in_a_tick_that_only_ballast_makes_short_enough() -> None:
    """Three rows take longer than the reader has, four do not: both decoders go on, with one row of ballast."""
    views = (stream(shown_at=100.004), decoder(2, lane="background"), decoder(3, lane="background"))
    now = evolve(situation(*views), spare_rows=1)
    plan = deadline(now)
    assert {item.key for item in plan.items} == {1, 2, 3}
    assert plan.ballast == 1
    assert plan.predicted_s < plan.limit.seconds < 0.0162
    assert deadline(evolve(now, tick=TRY_WITHOUT)).ballast == 1, "no reader pays for the try"


def test_a_step_that_was_measured_too_high_is_not_avoided_for_ever() -> None:
    """Two rows that seemed to cost more than four get their chance, and ballast ends."""
    believed = CostModel(Staircase((1, 2, 4), (0.008, 0.012, 0.0105)))
    truth = CostModel(Staircase((1, 2, 4), (0.008, 0.0095, 0.0111)))
    memory, last, ballast = Memory(cost=believed), MeasuredTick(), []
    for tick in range(6000):
        streams = state(stream(1), stream(2))
        now = after(evolve(streams, tick=tick, memory=memory, spare_rows=3), last)
        plan = deadline(now)
        work = planned_work(now, plan)
        memory, last = plan.memory, as_measured(plan, work, truth.seconds(work), 0.0, {})
        ballast.append(plan.ballast)
    assert ballast[1] == 2
    assert ballast[-1] == 0


def test_one_row_never_gets_ballast() -> None:
    """Its sums would be others by noise of a measurement, and a seed would give another answer."""
    believed = CostModel(Staircase((1, 2), (0.012, 0.0105)))
    now = evolve(state(stream()), memory=Memory(cost=believed), spare_rows=3)
    assert deadline(now).ballast == 0


def test_where_graphs_are_captured_streams_run_alone_for_a_while_and_less_often() -> None:
    """The first two ticks of a shape are slow, so one alone would measure nothing."""
    captured = evolve(COST, recapture_s=0.002)
    guard = GuardMemory(mixed=True, mixed_ticks=1000)
    now = evolve(situation(stream()), memory=Memory(cost=captured, guard=guard))
    isolated = []
    for _ in range(6):
        plan = set_slack(now, started(now))
        isolated.append(plan.limit.isolated)
        now = evolve(now, memory=plan.memory)
    assert isolated == [True] * 4 + [False] * 2


CHANGES = evolve(COST, recapture_s=0.002, capture_s=0.003)


@pytest.mark.parametrize("owed_s", [0.0, 9.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_machine_that_is_slower_today_pays_more_for_a_change_too(
    owed_s: float, mixed: bool
) -> None:
    """Twice the scale factor is the same as a table that says twice as much."""
    changing = evolve(COST, recapture_s=0.01, capture_s=0.02)
    guard, served = GuardMemory(owed_s=owed_s, mixed=mixed), Served(tokens=16 if mixed else 0)
    sizes: list[list[int]] = []
    for cost in (evolve(changing, scale=2.0), changing.times(2.0)):
        memory = Memory(cost=cost, guard=guard, served=served)
        sizes.append([])
        for ahead in range(60):
            views = (stream(shown_at=100 + 0.005 * ahead), prompt(2, 500, lane="background"))
            now = captured_situation(*views, memory=memory, n_batch=512)
            sizes[-1].append(deadline(now).n_tokens)
    assert len(set(sizes[0])) > 1
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("settled", [False, True])
def test_the_first_ticks_of_a_captured_shape_correct_no_step(settled: bool) -> None:
    """They are longer for another reason; where no graphs are captured every tick corrects its step."""
    last = MeasuredTick(0.012, 0.0, Work(1, 1, after=(1, 1), settled=settled))
    for cost in (CHANGES, COST):
        now = after(evolve(state(stream()), memory=Memory(cost=cost)), last)
        learnt = learn_cost(now, started(now)).memory.cost
        assert learnt is not None
        assert (learnt.computing != COST.computing) == (settled or cost is COST)


@pytest.mark.parametrize(("settled", "name"), [(True, "recapture_s"), (False, "capture_s")])
def test_the_first_ticks_of_a_shape_teach_what_a_change_costs(settled: bool, name: str) -> None:
    """The first what another shape than before costs, the second what a new one costs."""
    before = (1, 1) if not settled else (8, 8)
    last = MeasuredTick(0.014, 0.0, Work(1, 1, after=before, settled=settled))
    memory = Memory(cost=CHANGES)
    for _ in range(200):
        now = after(evolve(state(stream()), memory=memory), last)
        memory = learn_cost(now, started(now)).memory
    assert memory.cost is not None
    assert getattr(memory.cost, name) == pytest.approx(0.006, rel=0.01)
    assert evolve(memory.cost, **{name: getattr(CHANGES, name)}) == CHANGES


def test_a_wide_tick_teaches_although_its_shape_is_new() -> None:
    """A chunk beside a reader is often the only tick of its shape; the change is lost in it."""
    last = MeasuredTick(0.12, 0.0, Work(64, 1, after=(1, 1)))
    memory = Memory(cost=CHANGES)
    now = after(evolve(state(stream()), memory=memory), last)
    learnt = learn_cost(now, started(now)).memory.cost
    assert learnt is not None
    assert learnt.computing(64) > COST.computing(64)


def rates(**changes: object) -> SchedulerState:
    """Return a state in which sizes are chosen."""
    return evolve(state(), **{"tick": 1} | changes)


def test_more_streams_than_rows_leave_out_each_of_the_others_once() -> None:
    """A batch that was made smaller for want of room: who is left out is told why, and nobody fails."""
    now = situation(*(stream(key) for key in range(5)), decoder(9, lane="background"))
    plan = deadline(evolve(now, n_batch=4))
    assert [item.key for item in plan.items] == [0, 1, 2, 3]
    assert [skip.key for skip in plan.skipped] == [4, 9]
    assert plan.skipped[0].reason == "decode: the batch is full, its turn is next"


@pytest.mark.parametrize(("computed", "gets"), [(0, 15), (511, 1), (512, 0)])
def test_only_the_beginning_of_a_long_prompt_is_a_newcomers(computed: int, gets: int) -> None:
    """Its first 512 tokens may make a tick late, the rest of a paste may not."""
    now = situation(stream(), prompt(2, 3000, computed=computed))
    items = {item.key: item.n_tokens for item in deadline(now).items}
    assert items.get(2, 0) == gets
    now = situation(prompt(2, 3000, computed=500))
    assert [item.n_tokens for item in deadline(now).items] == [COST.quickest(512)]


def test_what_a_long_prompt_must_leave_the_next_newcomer_takes() -> None:
    """A tick goes on with the next in the line; only a prompt that ends asks for a row of logits."""
    first = prompt(2, 300, computed=510, arrived=99.0)
    now = situation(stream(), first, prompt(3, 400, arrived=100.0))
    plan = deadline(now)
    assert [(item.key, item.n_tokens) for item in plan.items[:2]] == [(1, 1), (2, 2)]
    assert plan.items[2].key == 3
    assert Candidates(Work(1), now.sequences[1:], within=512).adds(102) == (102, 0, 2 * 510)


def test_prompts_go_in_the_chunks_that_doctor_names() -> None:
    """With nobody to protect: the plateau's for the background, the quickest for a newcomer."""
    for lane, chunk in (("background", COST.plateau(512)), ("interactive", COST.quickest(512))):
        now = situation(prompt(1, 2000, lane=lane))
        assert [item.n_tokens for item in deadline(now).items] == [chunk]


def test_the_sweet_spot_is_the_most_tokens_a_second() -> None:
    """Four rows of the staircase above beat three and five; nearly as good and smaller wins."""
    took = {3: 0.0111, 4: 0.0152, 7: 0.0188}
    assert sweet_spot(rates(), COST, took, 1) == 7
    assert sweet_spot(rates(), COST, {3: 0.0111, 4: 0.0152}, 1) == 3
    assert sweet_spot(rates(), COST, {30: 0.1, 31: 0.102}, 1) == 30


def test_a_size_in_use_is_kept_for_a_small_gain() -> None:
    """Noise must not make the batch's shape flutter."""
    took = {4: 0.0100, 8: 0.0187}  # eight are 7 % better than four
    assert sweet_spot(rates(), COST, took, 1) == 8
    using_four = Memory(served=Served(tokens=5))
    assert sweet_spot(rates(memory=using_four), COST, took, 1) == 4


def test_now_and_then_a_neighbour_is_tried() -> None:
    """Only ticks of a size tell what it costs, so no size is given up for ever."""
    took = {3: 0.0111, 4: 0.0152, 7: 0.0188}
    tried = {sweet_spot(rates(tick=tick), COST, took, 1) for tick in range(2 * PROBE_EVERY)}
    assert tried == {4, 7}


def test_background_decoders_go_on_together_for_a_burst() -> None:
    """Five that share rows of four: the same four for a while, then the fifth has its turn."""
    views = [decoder(i, lane="background", client=i, computed=0) for i in range(5)]
    memory = Memory(cost=COST)
    turns = []
    for tick in range(1, 3 * BURST):
        plan = deadline(evolve(state(*views), tick=tick, memory=memory))
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


@pytest.mark.parametrize("spec", ["deadline,stairs", "deadline,-fill", "deadline,-", "x,-y"])
def test_what_cannot_be_left_out_is_refused(spec: str) -> None:
    """The message says what can be."""
    with pytest.raises(PolicyError, match=r"learning, newcomers|-STAGE|baseline, deadline"):
        ablated(spec)
