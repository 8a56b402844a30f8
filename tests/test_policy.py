"""The baseline policy: what it promises of every plan, and what each transformer does."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import after, decoder, prompt, state

from uma_trio.app.build import describe
from uma_trio.config.options import Config
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.baseline import baseline
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.check import check_plan
from uma_trio.policy.cost import Work
from uma_trio.policy.pipeline import PolicyError, compose, keeps_latency_cap
from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.state import MeasuredTick, SchedulerState, SequenceView, is_newcomer
from uma_trio_sim.fake import FakeBackend


def tokens(plan: Plan) -> dict[int, int]:
    """Return how many tokens each sequence gets."""
    return {item.key: item.n_tokens for item in plan.items}


views = st.lists(
    st.builds(
        SequenceView,
        key=st.integers(0, 100),
        lane=st.sampled_from(["interactive", "background"]),
        pending=st.integers(1, 300),
        computed=st.integers(0, 300),
        started=st.booleans(),
        credit=st.integers(-1, 5),
        arrived=st.floats(0, 100),
    ),
    max_size=12,
    unique_by=lambda view: view.key,
)


@given(views, st.integers(1, 64), st.integers(8, 100))
def test_every_plan_keeps_the_rules(
    sequences: list[SequenceView], n_batch: int, target: int
) -> None:
    """One item a sequence, no more than pending, nothing without credit, within the batch."""
    given_state = state(*sequences, n_batch=n_batch, target=target)
    plan = baseline(given_state)
    check_plan(given_state, plan)
    named = [item.key for item in plan.items] + [skip.key for skip in plan.skipped]
    assert sorted(named) == sorted(view.key for view in sequences)
    assert all(item.reason for item in plan.items)
    assert all(skip.reason for skip in plan.skipped)


@given(views)
def test_the_same_state_gives_the_same_plan(sequences: list[SequenceView]) -> None:
    """A policy is a function of its state and nothing else."""
    assert baseline(state(*sequences)) == baseline(state(*sequences))


def test_every_decoder_gets_one_token_before_any_prompt() -> None:
    """Decode comes first, whatever the order of arrival."""
    plan = baseline(state(prompt(1, 500), decoder(2), decoder(3)))
    assert [(item.key, item.n_tokens) for item in plan.items] == [(2, 1), (3, 1), (1, 30)]


def test_it_does_not_say_that_nobody_decodes() -> None:
    """A policy without a limit says so, and nothing about streams that it does not watch."""
    assert baseline(state(decoder(1))).limit.reason == "this policy sets no limit"


def test_decoders_beyond_the_batch_take_turns() -> None:
    """With more decoders than rows, those left out are first the next time."""
    first = baseline(state(*(decoder(k) for k in range(6)), n_batch=4))
    second = baseline(
        evolve(state(*(decoder(k) for k in range(6)), n_batch=4), memory=first.memory)
    )
    assert list(tokens(first)) == [0, 1, 2, 3]
    assert list(tokens(second)) == [4, 5, 0, 1]


def test_a_parked_sequence_is_left_out_with_a_reason() -> None:
    """No credit, no work."""
    plan = baseline(state(decoder(1, credit=0), decoder(2)))
    assert tokens(plan) == {2: 1}
    assert plan.skipped == (Skip(1, "parked: its reader is behind"),)


def test_prompts_without_a_first_token_go_before_recomputed_ones() -> None:
    """Who has seen nothing yet is served before who was preempted."""
    plan = baseline(state(prompt(1, 200, started=True), prompt(2, 200), target=16))
    assert tokens(plan) == {2: 128}


def test_interactive_prompts_go_before_background_ones() -> None:
    """A person's prompt is not behind a batch job's."""
    plan = baseline(state(prompt(1, 200, lane="background"), prompt(2, 40), target=16))
    assert tokens(plan) == {2: 40, 1: 88}


def test_prompts_of_one_kind_take_turns() -> None:
    """Two long prompts progress together, a chunk each in turn."""
    first = baseline(state(prompt(1, 500), prompt(2, 500)))
    second = baseline(evolve(state(prompt(1, 468), prompt(2, 500)), memory=first.memory))
    assert list(tokens(first)) == [1]
    assert list(tokens(second)) == [2]


def test_prompts_move_even_when_decoding_fills_the_budget() -> None:
    """A request that never starts is worse than a tick that is a little long."""
    plan = baseline(state(*(decoder(k) for k in range(40)), prompt(99, 500), target=32))
    assert tokens(plan)[99] == 8


def ticked(n_tokens: int, decode_s: float) -> MeasuredTick:
    """Return a tick of that many tokens."""
    return MeasuredTick(decode_s, work=Work(n_tokens))


def next_target(last: MeasuredTick, target: int = 32) -> int:
    """Return what the budget becomes after a tick."""
    return baseline(after(state(decoder(1), target=target), last)).memory.target_tokens


def test_the_budget_grows_while_full_ticks_are_quick() -> None:
    """A full tick under the time budget lets the next one hold more."""
    assert next_target(ticked(32, 0.010)) == 40


def test_the_budget_shrinks_when_full_ticks_are_slow() -> None:
    """A full tick over the time budget makes the next one smaller, down to a floor."""
    assert next_target(ticked(32, 0.060)) == 25
    assert next_target(ticked(8, 9.9), target=8) == 8


def test_a_small_tick_says_nothing_about_the_budget() -> None:
    """Three quick decoders do not prove that a big chunk would be quick."""
    assert next_target(ticked(3, 0.001)) == 32


def test_the_budget_follows_every_measured_tick() -> None:
    """Two of them where a plan that was made ahead was thrown away."""
    now = after(state(decoder(1)), ticked(32, 0.010), ticked(40, 0.010))
    assert baseline(now).memory.target_tokens == 50


def test_prompts_alone_get_longer_ticks() -> None:
    """When nobody waits for the next word, chunks are four times as large, and never small."""
    assert tokens(baseline(state(prompt(1, 500), target=64))) == {1: 256}
    assert tokens(baseline(state(prompt(1, 500), target=8))) == {1: 128}
    assert tokens(baseline(state(prompt(1, 500), decoder(2), target=32))) == {1: 31, 2: 1}


def test_the_budget_settles_near_the_tick_time() -> None:
    """On a machine of one millisecond a token, ticks of prompts come to four times thirty."""
    current = state(prompt(1, 100_000))
    for _ in range(50):
        plan = baseline(current)
        current = SchedulerState(
            now=0,
            tick=1,
            sequences=current.sequences,
            n_batch=512,
            free_cells=0,
            measured=(ticked(plan.n_tokens, plan.n_tokens / 1000),),
            memory=plan.memory,
        )
    assert 4 * 25 <= plan.n_tokens <= 4 * 34


def test_rows_that_nobody_reads_are_those_of_an_unfinished_prompt() -> None:
    """Behind a row that is read they would be taken for it."""
    given_state = state(decoder(1), prompt(2, 10))
    items = (PlanItem(1, 1, "decode", ""), PlanItem(2, 4, "prefill", ""))
    check_plan(given_state, Plan(items, extra_rows=4))
    whole = (items[0], PlanItem(2, 10, "prefill", ""))
    for plan in (Plan(items, extra_rows=5), Plan(whole, extra_rows=1), Plan(extra_rows=1)):
        with pytest.raises(PolicyError, match="extra rows"):
            check_plan(given_state, plan)


def test_a_batch_asks_for_no_more_logits_rows_than_there_are() -> None:
    """Decoders, drafts, ends of prompts, ballast and rows that nobody reads, taken together."""
    given_state = evolve(state(decoder(1), prompt(2, 10)), n_rows=4, spare_rows=3)
    items = (PlanItem(1, 1, "decode", ""), PlanItem(2, 4, "prefill", ""))
    check_plan(given_state, Plan(items, ballast=1, extra_rows=2))
    for plan in (
        Plan(items, ballast=2, extra_rows=2),
        Plan((items[0], PlanItem(2, 10, "prefill", "")), ballast=3),
    ):
        with pytest.raises(PolicyError, match="5 logits rows, a batch may for 4"):
            check_plan(given_state, plan)


@pytest.mark.parametrize("changes", [{"ballast": -1}, {"extra_rows": -1}, {"ballast": 2}])
def test_ballast_and_unread_rows_are_counts_within_their_limits(changes: dict[str, int]) -> None:
    """A foreign policy that gets one wrong hears of it before anything is computed."""
    given_state = evolve(state(decoder(1), prompt(2, 10)), spare_rows=1)
    items = (PlanItem(1, 1, "decode", ""), PlanItem(2, 4, "prefill", ""))
    with pytest.raises(PolicyError, match="rows"):
        check_plan(given_state, evolve(Plan(items), **changes))


def test_drafts_follow_the_last_token_that_is_known() -> None:
    """As many as there are or fewer, and none before what has to be computed anyway."""
    given_state = state(decoder(1, pending=4, drafted=3), prompt(2, 10))
    for drafts in range(4):
        check_plan(given_state, Plan((PlanItem(1, 1 + drafts, "decode", "", drafts),)))
    for item in (
        PlanItem(1, 4, "decode", "", 4),
        PlanItem(1, 4, "decode", "", 2),
        PlanItem(1, 3, "decode", ""),
        PlanItem(1, 2, "decode", "", -1),
        PlanItem(2, 5, "prefill", "", 1),
    ):
        with pytest.raises(PolicyError, match="drafts"):
            check_plan(given_state, Plan((item,)))


def test_who_a_sequence_is_does_not_depend_on_drafts_or_cached_tokens() -> None:
    """A stream with drafts is still read; a long prompt that lay in the cache is a newcomer's."""
    drafting = decoder(1, pending=5, drafted=4)
    assert (drafting.decoding, drafting.protected, drafting.due) == (True, True, 1)
    assert not decoder(1, pending=5).decoding
    assert (drafting.rows(1), drafting.rows(3, 2), prompt(2, 9).rows(8)) == (1, 3, 0)
    follow_up = prompt(2, 30, computed=3000, cached=3000)
    assert is_newcomer(follow_up, 512)
    assert not is_newcomer(evolve(follow_up, cached=2000), 512)


def test_transformers_are_applied_in_order() -> None:
    """A pipeline is a row of functions; each sees the plan of those before it."""
    seen: list[int] = []

    def note(number: int, plan: Plan) -> Plan:
        seen.append(number)
        return plan

    compose(lambda _, plan: note(1, plan), lambda _, plan: note(2, plan))(state())
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("dedline", r"no policy is called 'dedline' \(did you mean deadline\?\); there are: b"),
    ],
)
def test_a_slip_in_the_name_of_a_policy_is_named(spec: str, said: str) -> None:
    """With those that there are, and the nearest one."""
    with pytest.raises(PolicyError, match=said):
        find_policy(spec)


@pytest.mark.parametrize(
    ("spec", "keeps"),
    [
        ("deadline", True),
        ("baseline", False),
    ],
)
def test_a_promise_is_published_only_where_it_is_kept(spec: str, keeps: bool) -> None:
    """A cap that nobody keeps would be a lie to whoever reads the metrics."""
    policy = find_policy(spec)
    assert keeps_latency_cap(policy) is keeps
    metrics = Metrics()
    describe(metrics, Config(), FakeBackend(), policy)
    assert metrics.snapshot()["latency_cap"] == (Config().latency_cap if keeps else None)


@pytest.mark.parametrize(("cap", "floor", "told"), [(1.5, 0.2, 1.5), (1.01, 0.2, 1.25)])
def test_no_cap_is_promised_that_does_not_leave_the_floor(
    cap: float, floor: float, told: float
) -> None:
    """Readers' tokens are as far apart as it takes, so that is what the metric says."""
    config = Config(latency_cap=cap, background_floor=floor)
    metrics = Metrics()
    describe(metrics, config, FakeBackend(), find_policy("deadline"))
    assert metrics.snapshot()["latency_cap"] == told


def test_a_policy_of_another_package_declares_what_it_keeps() -> None:
    """What says nothing promises nothing."""

    class Mine:
        keeps_latency_cap = True

        def __call__(self, state_: SchedulerState) -> Plan:
            return Plan(memory=state_.memory)

    assert keeps_latency_cap(Mine())
    assert not keeps_latency_cap(compose())
