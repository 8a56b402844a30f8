"""The prefix cache in the engine, on the fake: it saves work and never changes an answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from attrs import evolve
from engine_kit import Bench, OnDevice, Sink
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from uma_trio.backend.base import Saved, Traits
from uma_trio.engine.kv.admin import clear, report
from uma_trio.engine.kv.leaves import Leaf
from uma_trio.engine.kv.saving import CellTimes
from uma_trio.engine.messages import Keep, SetLane
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.baseline import baseline
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.plan import Plan
from uma_trio.policy.prefix import PAGE
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

MIB = 1 << 20
MINE = "1000"


def bench(backend: FakeBackend | None = None, budget: int = MIB, **options: object) -> Bench:
    """Return an engine that keeps prefixes within `budget` bytes."""
    made = backend or FakeBackend(n_ctx=2048, n_slots=4, n_batch=64)
    return Bench(made, settings=EngineSettings(prefix_bytes=budget), **options)  # type: ignore[arg-type]


def letters(seed: int, n: int) -> list[int]:
    """Return `n` tokens that another seed does not give."""
    return [97 + (seed * 7 + i * (3 + seed % 5)) % 26 for i in range(n)]


def ask(made: Bench, prompt: list[int], n: int = 4, **options: object) -> Sink:
    """Run one request to its end and check its answer."""
    _, sink = made.submit(prompt, n, **({"namespace": MINE} | options))  # type: ignore[arg-type]
    made.run()
    assert sink.tokens == made.backend.continuation(prompt, n)
    return sink


def save_all(made: Bench) -> None:
    """Save every leaf, as idle time would."""
    while made.engine.cells.prefix.saving.one():
        pass


def forget_cells(made: Bench) -> None:
    """Take all leaves out of the KV cache; only what is saved is left."""
    made.engine.cells.prefix.room.drop_all()
    assert made.backend.kv_used() == 0


def test_a_conversation_computes_only_what_is_new() -> None:
    """The second turn shares the cells of the first, answer included, but for the last token."""
    made = bench()
    prompt = letters(1, 100)
    first = ask(made, prompt, 10)
    assert first.end.cached_tokens == 0
    before = sum(made.backend.computed.values())
    turn = [*prompt, *first.tokens, *letters(2, 20)]
    second = ask(made, turn, 5)
    # The last token of an answer is never computed: nobody asked what follows it.
    assert second.end.cached_tokens == 109
    assert sum(made.backend.computed.values()) - before == len(turn) - 109 + 4


def test_a_prompt_that_is_wholly_cached_computes_its_last_token() -> None:
    """Its logits are in no cell."""
    made = bench()
    prompt = letters(1, 64)
    ask(made, prompt, 1)
    assert ask(made, prompt, 5).end.cached_tokens == 63


def test_saved_pages_are_restored_when_the_cells_are_gone() -> None:
    """Exact to the token, in the middle of a page too."""
    made = bench()
    prompt = letters(1, 150)
    ask(made, prompt, 8)
    save_all(made)
    forget_cells(made)
    assert ask(made, [*prompt[:130], *letters(9, 30)]).end.cached_tokens == 130
    assert made.engine.cells.prefix.hits["saved"] == 1


def test_what_is_not_saved_is_lost_with_its_cells() -> None:
    """A miss, and the same answer."""
    made = bench()
    ask(made, letters(1, 150))
    forget_cells(made)
    assert ask(made, letters(1, 150)).end.cached_tokens == 0


def test_what_was_found_is_told() -> None:
    """How much, from where, and the token at which the nearest beginning is another."""
    made = bench()
    prompt = letters(1, 100)
    ask(made, prompt)
    handle, _ = made.submit([*prompt[:60], 33, *letters(2, 20)], 4, namespace=MINE)
    made.run()
    (record,) = made.explain(handle).requests
    assert record.beginning is not None
    assert (record.beginning.tokens, record.beginning.source) == (60, "leaf")
    assert (record.beginning.apart, record.beginning.mine) == (60, 33)
    assert record.beginning.other == prompt[60]
    assert record.beginning.saved_s > 0
    assert record.namespace == MINE


def test_a_short_beginning_is_computed() -> None:
    """Fewer than 16 tokens are not worth looking after."""
    made = bench()
    ask(made, letters(1, 100))
    assert ask(made, [*letters(1, 15), *letters(5, 30)]).end.cached_tokens == 0
    assert ask(made, [*letters(1, 16), *letters(6, 30)]).end.cached_tokens == 16


@pytest.mark.parametrize("other", ["1001", "1000/salt", "1000/private/7", None])
def test_another_namespace_has_nothing(other: str | None) -> None:
    """Neither cells, nor pages, nor a fork, nor cached tokens."""
    made = bench()
    prompt = letters(1, 150)
    ask(made, prompt)
    save_all(made)
    assert ask(made, prompt, namespace=other).end.cached_tokens == 0
    fresh = letters(3, 150)
    made.submit(fresh, 4, namespace=MINE)
    _, sink = made.submit(fresh, 4, namespace=other)
    made.run()
    assert sink.end.cached_tokens == 0


class Stopwatch:
    """A clock that stands still but for what decodes cost, in sums without rounding; an engine on it."""

    def __init__(self) -> None:
        self.now = 0.0
        backend = FakeBackend(n_ctx=2048, n_slots=4, n_batch=64, cost=linear_cost(2**-9, 2**-10))
        self.made = bench(backend, clock=lambda: self.now)

    def ttft_s(self, prompt: list[int], namespace: str) -> float | None:
        """Run a request to its end, and save all that is left; return its time to first token."""
        engine, backend = self.made.engine, self.made.backend
        _, sink = self.made.submit(prompt, 3, namespace=namespace)
        while (tick := engine.next_tick()) is not None:
            status = engine.compute(tick)
            self.now += backend.last_cost_s
            engine.finish(tick, status)
        save_all(self.made)
        return sink.end.ttft_s


def test_a_prompt_that_is_cached_for_somebody_else_takes_as_long_as_one_that_is_not() -> None:
    """200 of each, resident or saved: the times are the same, and one's own is quicker."""
    rng, watch = Random(5), Stopwatch()
    for n in range(200):
        cached, unknown = ([rng.randrange(97, 123) for _ in range(150)] for _ in range(2))
        alone = watch.ttft_s(cached, "1")
        if n % 2:
            forget_cells(watch.made)
        assert watch.ttft_s(cached, "2") == watch.ttft_s(unknown, "2") == alone
        assert (watch.ttft_s(cached, "1") or 0.0) < 0.1 * (alone or 0.0)


def test_a_budget_of_nothing_turns_it_off() -> None:
    """Nothing is kept, looked up or waited for."""
    made = bench(budget=0)
    ask(made, letters(1, 100))
    assert made.backend.kv_used() == 0
    assert ask(made, letters(1, 100)).end.cached_tokens == 0


def test_the_prefix_of_a_busy_stream_is_shared() -> None:
    """Who comes while it is read needs not wait for its end."""
    made = bench()
    prompt = letters(1, 200)
    _, reader = made.submit(prompt, 50, namespace=MINE)
    made.ticks(12)
    assert reader.tokens
    assert not reader.ends
    _, second = made.submit([*prompt, *letters(2, 30)], 5, namespace=MINE)
    made.run()
    assert second.end.cached_tokens == 200
    assert reader.tokens == made.backend.continuation(prompt, 50)
    assert second.tokens == made.backend.continuation([*prompt, *letters(2, 30)], 5)


def test_requests_that_begin_alike_compute_that_once() -> None:
    """Who finds it being computed waits for it and forks."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    prompts = [[*shared, *letters(n, 20)] for n in (2, 3, 4, 5)]
    sinks = [made.submit(prompt, 4, namespace=MINE)[1] for prompt in prompts]
    made.run()
    assert sum(made.backend.computed.values()) <= 600 + 4 * (20 + 4)
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == made.backend.continuation(prompt, 4)
    assert made.engine.cells.prefix.hits["fork"] == 3


@pytest.mark.parametrize("n_prompt", [20, 40, 600])
def test_samples_of_one_prompt_compute_it_once(n_prompt: int) -> None:
    """But for its last token, whose logits each needs; seeded, they are what each would be alone."""
    made, alone = (
        bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64), budget=budget) for budget in (MIB, 0)
    )
    prompt, drawn = letters(1, n_prompt), {"temperature": 3.0, "top_k": 40}
    sinks = [made.submit(prompt, 12, namespace=MINE, seed=s, **drawn)[1] for s in range(4)]
    made.run()
    assert sum(made.backend.computed.values()) == n_prompt + 3 + 4 * 11
    assert made.engine.cells.prefix.hits["fork"] == 3
    texts = []
    for seed in range(4):
        _, sink = alone.submit(prompt, 12, seed=seed, **drawn)
        alone.run()
        texts.append(sink.tokens)
    assert [sink.tokens for sink in sinks] == texts
    assert len(set(map(tuple, texts))) == 4, "they differ by their seeds"


@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_leader_that_goes_harms_nobody(after: int) -> None:
    """What it had computed is kept, and the next one goes on from there."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    prompts = [[*shared, *letters(n, 20)] for n in (2, 3, 4)]
    handles = [made.submit(prompt, 4, namespace=MINE) for prompt in prompts]
    made.ticks(after)
    made.cancel(handles[0][0])
    made.run()
    for prompt, (_, sink) in list(zip(prompts, handles, strict=True))[1:]:
        assert sink.tokens == made.backend.continuation(prompt, 4)
    assert sum(made.backend.computed.values()) <= 700 + 64


def test_a_leader_whose_reader_is_behind_is_not_waited_for() -> None:
    """It may stand still for ever."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    leader, _ = made.submit(shared, 4, namespace=MINE, credit=0)
    made.ticks(1)
    prompt = [*shared, *letters(2, 20)]
    _, sink = made.submit(prompt, 4, namespace=MINE)
    for _ in range(40):
        made.engine.tick()
    made.engine.publish()
    assert sink.tokens == made.backend.continuation(prompt, 4)
    made.cancel(leader)
    made.run()


def test_a_leader_is_as_urgent_as_who_waits_for_it() -> None:
    """A person does not wait behind a batch job's prompt; afterwards it is one again."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    leader, _ = made.submit(shared, 40, namespace=MINE, lane="background")
    made.ticks(2)
    made.submit([*shared, *letters(2, 20)], 4, namespace=MINE)
    made.ticks(2)
    assert made.engine.registry.running[leader].lane == "interactive"
    made.ticks(12)
    assert made.engine.registry.running[leader].lane == "background"
    made.run()


def test_a_leader_that_is_preempted_is_what_it_was_again() -> None:
    """It waits in its own lane; who waited for it goes on without."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    leader, _ = made.submit(shared, 40, namespace=MINE, lane="background")
    made.ticks(2)
    made.submit([*shared, *letters(2, 20)], 4, namespace=MINE)
    made.ticks(1)
    assert made.engine.registry.running[leader].lane == "interactive"
    made.engine.registry.preempt(leader, "for a test")
    assert made.engine.registry.waiting[leader].lane == "background"
    made.run()


def test_a_leader_is_promoted_when_who_waits_for_it_is() -> None:
    """However a person comes to wait for it."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 900)
    leader, _ = made.submit(shared, 40, namespace=MINE, lane="background")
    made.ticks(2)
    follower, _ = made.submit([*shared, *letters(2, 20)], 4, namespace=MINE, lane="background")
    made.ticks(1)
    assert made.engine.registry.running[leader].lane == "background"
    made.inbox.put(SetLane(follower, "interactive"))
    made.ticks(1)
    assert made.engine.registry.running[leader].lane == "interactive"
    made.run()


def test_nobody_waits_for_one_that_waits() -> None:
    """A leader that loses its slot and has it again at once does not wait for its follower."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    leader, first = made.submit(shared, 4, namespace=MINE)
    made.ticks(2)
    follower = [*shared, *letters(2, 20)]
    _, second = made.submit(follower, 4, namespace=MINE)
    made.ticks(1)
    made.engine.cells.prefix.room.drop_all()
    made.engine.registry.preempt(leader, "for a test")
    made.engine.cells.prefix.room.drop_all()  # it has to compute all of it again
    made.run()
    assert first.tokens == made.backend.continuation(shared, 4)
    assert second.tokens == made.backend.continuation(follower, 4)


def test_a_leaf_that_cannot_be_saved_does_not_stay_for_ever() -> None:
    """It goes when it has cost what it is worth, and when the machine has nothing else to do."""
    made = bench()
    made.backend.kv_fails = lambda verb: verb == "save"
    ask(made, letters(1, 200))
    save_all(made)
    (leaf,) = made.engine.cells.prefix.leaves
    assert leaf.unsaved
    assert not made.engine.cells.prefix.room.lingers()
    assert not len(made.engine.cells.prefix.leaves)


def test_a_preempted_request_goes_on_from_its_cells() -> None:
    """What it had computed is a leaf until it comes back."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=1, n_batch=64))
    prompt = letters(1, 500)
    _, batch = made.submit(prompt, 30, namespace=MINE, lane="background")
    made.ticks(14)
    person = letters(2, 50)
    _, sink = made.submit(person, 5, namespace=MINE)
    made.run()
    assert sink.tokens == made.backend.continuation(person, 5)
    assert batch.tokens == made.backend.continuation(prompt, 30)
    assert batch.end.cached_tokens == 0, "its own cells are no hit"
    assert sum(made.backend.computed.values()) < 500 + 30 + 50 + 5 + 10


def test_shared_cells_are_reserved_once() -> None:
    """Four that share 600 of 700 tokens fit into 1,100 cells together."""
    made = bench(FakeBackend(n_ctx=1152, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    _, first = made.submit(shared, 60, namespace=MINE)
    made.ticks(12)
    sinks = [made.submit([*shared, *letters(n, 80)], 4, namespace=MINE)[1] for n in (2, 3, 4)]
    made.ticks(2)
    assert len(made.engine.registry.running) == 4
    made.run()
    assert all(sink.end.reason == "length" for sink in [first, *sinks])


def test_leaves_give_their_cells_to_who_computes() -> None:
    """However much is kept, a request that fits into an empty cache is computed."""
    made = bench(FakeBackend(n_ctx=512, n_slots=4, n_batch=64))
    for n in range(1, 12):
        ask(made, letters(n, 200))
    ask(made, letters(50, 500))


@pytest.mark.parametrize("kind", [FakeBackend, OnDevice])
def test_a_context_no_larger_than_a_batch_is_used_again(kind: type[FakeBackend]) -> None:
    """Leaves make room for what a tick has, and not for the largest that there could be."""
    made = bench(kind(n_ctx=512, n_slots=4, n_batch=512))
    prompt, other = letters(1, 150), letters(2, 150)
    ask(made, prompt)
    ask(made, other)
    assert ask(made, prompt).end.cached_tokens == 149
    assert ask(made, other).end.cached_tokens == 149
    made.submit(letters(3, 100), 60, namespace="3")
    made.ticks(3)
    assert len(made.engine.cells.prefix.leaves) == 2, "what is computed fits beside them"
    made.run()


def test_a_full_context_costs_only_as_many_leaves_as_are_in_the_way() -> None:
    """The one that was used longest ago goes, and the others stay."""
    made = bench(FakeBackend(n_ctx=512, n_slots=4, n_batch=512))
    for client in (1, 2, 3):
        ask(made, letters(client, 140))
    ask(made, letters(4, 140))
    assert [len(leaf.tokens) for leaf in made.engine.cells.prefix.leaves] == [143] * 3
    assert ask(made, letters(2, 140)).end.cached_tokens == 139


def measured(together_s: float, scattered_s: float) -> CellTimes:
    """Return what moving a token takes, as if it had been seen."""
    takes = CellTimes(0.0, 0.0)
    takes.learn(scattered=False, token_s=together_s)
    takes.learn(scattered=True, token_s=scattered_s)
    return takes


def priced(used_cell_s: float) -> EngineSettings:
    """Return settings with a cost model in which a cell of anybody costs each token `used_cell_s`."""
    cost = CostModel(Staircase((1, 64), (0.001, 0.010)), used_cell_s=used_cell_s)
    return EngineSettings(prefix_bytes=MIB, cost=cost)


@pytest.mark.parametrize(("used_cell_s", "stays"), [(1e-3, False), (0.0, True)])
def test_a_leaf_pays_rent_while_others_compute(used_cell_s: float, stays: bool) -> None:
    """Where its cells cost readers more than the way back, it leaves, and comes back when asked for."""
    made = Bench(FakeBackend(n_ctx=2048, n_slots=4, n_batch=64), settings=priced(used_cell_s))
    made.submit(letters(2, 40), 60, namespace="2")
    ask_on = letters(1, 200)
    made.submit(ask_on, 4, namespace=MINE)
    made.run()
    save_all(made)
    prefix = made.engine.cells.prefix
    assert prefix.room.rent_s > 0 or stays
    made.submit(letters(3, 30), 60, namespace="3")
    made.run()
    leaves = [leaf for leaf in prefix.leaves if leaf.namespace == MINE]
    assert bool(leaves) is stays
    assert ask(made, ask_on).end.cached_tokens == 199


def test_predictions_follow_the_mark_where_others_hold_cells() -> None:
    """Where requests hold all that is used, a state does not name it."""
    states: list[SchedulerState] = []

    def watched(state: SchedulerState) -> Plan:
        states.append(state)
        return baseline(state)

    made = bench(policy=watched)
    ask(made, letters(1, 100))
    assert all(state.high_water is None for state in states)
    states.clear()
    ask(made, letters(2, 50))
    assert states[0].high_water == 103
    assert states[0].used_cells == 103
    assert all(state.high_water is not None for state in states)


def test_without_a_cache_policies_see_the_cells_that_a_tick_spans_too() -> None:
    """Who began later may lie behind the cells that somebody else gave back."""
    seen: list[int] = []

    def watched(state: SchedulerState) -> Plan:
        seen.append(state.used_cells)
        return baseline(state)

    made = Bench(FakeBackend(n_ctx=1024), watched)
    made.submit(letters(1, 200), 2)
    made.submit(letters(2, 100), 40)
    made.run()
    held = 100 + 40
    assert seen[-1] > 2 * held


def test_beside_a_reader_cells_are_moved_in_slices() -> None:
    """A restore that would take longer than a part of a tick is spread over several."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    prompt = letters(1, 640)
    ask(made, prompt)
    save_all(made)
    forget_cells(made)
    _, reader = made.submit(letters(2, 40), 200, namespace="2")
    made.ticks(6)
    assert reader.tokens
    made.engine.cells.prefix.saving.restore_takes = measured(1e-6, 1e-6)
    before, _ = len(reader.tokens), made.submit(prompt, 4, namespace=MINE)
    made.ticks(2)
    (blocked,) = made.engine.cells.prefix.blocked.values()
    assert 0 < len(blocked.pages) < 10
    made.ticks(4)
    assert len(reader.tokens) >= before + 5, "every tick gave the reader its token"
    made.run()
    assert made.engine.cells.prefix.hits["saved"] == 1


def test_a_restore_that_is_slower_than_a_tick_comes_about_beside_a_reader() -> None:
    """What each tick may spend on moving cells adds up until a page fits."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    prompt = letters(1, 128)
    ask(made, prompt)
    save_all(made)
    forget_cells(made)
    made.submit(letters(2, 40), 400, namespace="2")
    made.ticks(6)
    page_s = 0.002  # as long as some decodes
    made.engine.cells.prefix.saving.restore_takes = measured(page_s / PAGE, page_s / PAGE)
    _, sink = made.submit(prompt, 4, namespace=MINE)
    made.ticks(200)
    assert sink.end.cached_tokens == 127


class Captured(FakeBackend):
    """A backend whose attention reads every cell up to the mark, as on CUDA."""

    @property
    def traits(self) -> Traits:
        """Another shape of a batch costs."""
        return evolve(super().traits, shape_costs=True)


@pytest.mark.parametrize(("spanned_cell_s", "stays"), [(1e-3, False), (0.0, True)])
def test_on_a_gpu_an_idle_leaf_pays_for_each_tick_that_spans_it(
    spanned_cell_s: float, stays: bool
) -> None:
    """So that a saved leaf makes way there although a token pays nothing for cells of others."""
    cost = CostModel(Staircase((1, 64), (0.001, 0.010)), spanned_cell_s=spanned_cell_s)
    made = Bench(
        Captured(n_ctx=2048, n_slots=4, n_batch=64),
        settings=EngineSettings(prefix_bytes=MIB, cost=cost),
    )
    made.submit(letters(1, 200), 4, namespace=MINE)
    made.run()
    save_all(made)
    made.submit(letters(3, 30), 60, namespace="3")
    made.run()
    assert any(leaf.namespace == MINE for leaf in made.engine.cells.prefix.leaves) is stays


class SlowToGather(Captured):
    """A device on which saving cells that lie scattered takes a quarter of a second."""

    now_s = 0.0

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Save, and let time pass."""
        if self.kv_runs(slot, first, last) >= 8:
            self.now_s += 0.25
        return super().kv_save(slot, first, last, page)


def after_a_crowd() -> tuple[Bench, SlowToGather]:
    """Return an engine whose leaves lie scattered, as their answers were computed in turn."""
    backend, ticks = SlowToGather(n_ctx=8192, n_slots=8, n_batch=64), count()
    cost = CostModel(Staircase((1, 64), (0.001, 0.010)), context_cell_s=1e-7)
    made = Bench(
        backend,
        settings=EngineSettings(prefix_bytes=MIB, cost=cost),
        clock=lambda: backend.now_s + next(ticks) / 1000,
    )
    for client in range(4):
        made.submit(letters(client, 40), 150, namespace=str(client))
    made.run()
    return made, backend


def test_on_a_gpu_nobody_waits_for_scattered_cells_to_be_saved() -> None:
    """What that takes is not known there, and so it is left to idle time."""
    made, backend = after_a_crowd()
    prefix = made.engine.cells.prefix
    while prefix.saving.one(1e-3):
        pass
    _, sink = made.submit(letters(9, 40), 100, namespace="9")
    made.run()
    assert sink.tokens
    assert backend.now_s == 0.0


def test_what_takes_longer_to_save_than_to_compute_is_saved_once_at_most() -> None:
    """The first page shows it, in idle time; the leaves stay until their cells are needed."""
    made, backend = after_a_crowd()
    save_all(made)
    assert backend.now_s == 0.25
    assert len(made.engine.cells.prefix.leaves) == 4
    _, again = made.submit(letters(1, 40), 20, namespace="1")
    made.run()
    assert again.end.cached_tokens == 39


def costly_leaf() -> tuple[Bench, Leaf]:
    """Return an engine with an unsaved leaf whose cells cost everybody else a lot."""
    made = Bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64), settings=priced(1e-3))
    made.submit(letters(1, 200), 4, namespace=MINE)
    made.submit(letters(2, 40), 30, namespace="2")
    made.run()
    (mine,) = (leaf for leaf in made.engine.cells.prefix.leaves if leaf.namespace == MINE)
    return made, mine


def test_an_unsaved_leaf_is_saved_before_those_compute_who_would_pay_more_for_it() -> None:
    """Nobody had time to save it before; it comes back when it is asked for."""
    made, mine = costly_leaf()
    made.submit(letters(3, 100), 300, namespace="3")
    made.ticks(1)
    assert mine not in tuple(made.engine.cells.prefix.leaves)
    made.run()
    assert ask(made, letters(1, 200)).end.cached_tokens == 199


def test_an_unsaved_leaf_goes_when_it_cannot_be_saved_and_costs_more_than_it_is_worth() -> None:
    """Saving it failed, and what is computed beside it pays for its cells."""
    made, mine = costly_leaf()
    made.backend.kv_fails = lambda verb: verb == "save"
    save_all(made)
    made.submit(letters(3, 100), 300, namespace="3")
    made.ticks(1)
    assert mine.unsaved
    assert mine not in tuple(made.engine.cells.prefix.leaves)


def test_only_quick_pages_are_saved_at_once() -> None:
    """One that lies scattered may delay who comes, and waits until the machine has been idle."""
    made = bench()
    made.submit(letters(1, 128), 40, namespace=MINE)
    made.submit(letters(2, 128), 40, namespace="2")
    made.run()
    prefix = made.engine.cells.prefix
    # What was computed in one piece is quick, and what was generated in turn is scattered.
    prefix.saving.save_takes = measured(1e-6, 1e-3)
    while prefix.saving.one(1e-3):
        pass
    assert [leaf.unsaved for leaf in prefix.leaves] == [39, 39]
    save_all(made)
    assert [leaf.unsaved for leaf in prefix.leaves] == [0, 0]


def test_a_leaf_that_is_used_again_owes_nothing_for_what_came_before() -> None:
    """Rent, past and to come, is counted from its latest use."""
    made = Bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64), settings=priced(1e-6))
    made.submit(letters(1, 200), 4, namespace=MINE)
    made.run()
    made.submit(letters(2, 40), 30, namespace="2")
    made.ticks(3)
    prefix = made.engine.cells.prefix
    (mine,) = (leaf for leaf in prefix.leaves if leaf.namespace == MINE)
    assert mine.coming_s > 0
    prefix.leaves.use(mine, made.clock())
    assert (mine.paid_s, mine.coming_s, mine.leaving) == (0.0, 0.0, False)


def test_a_session_is_kept_when_others_are_evicted() -> None:
    """Its latest turn is pinned, so that a flood of single prompts leaves it."""
    made = bench(budget=60_000)
    prompt = letters(1, 150)
    ask(made, prompt, session="s")
    save_all(made)
    for n in range(2, 60):
        ask(made, letters(n, 200), client=n)
        save_all(made)
    forget_cells(made)
    assert made.engine.cells.prefix.store.evicted > 0
    assert ask(made, prompt).end.cached_tokens == 149


@pytest.mark.parametrize("saved_before", [True, False])
@pytest.mark.parametrize("session", ["s", None])
def test_what_called_a_tool_is_kept_for_longer(session: str | None, saved_before: bool) -> None:
    """Twice as long as a session, whether its pages are saved when the call is told of or later."""
    made = bench()
    handle, _ = made.submit(letters(1, 150), 4, namespace=MINE, session=session)
    made.run()
    if saved_before:
        save_all(made)
        forget_cells(made)
    made.inbox.put(Keep(handle))
    made.run()
    save_all(made)
    pages = list(made.engine.cells.prefix.store.trie.pages(MINE))
    assert pages
    assert all(page.pinned_until > made.clock() + 500 for page in pages)


@pytest.mark.parametrize("late", ["told of a call", "saved"])
def test_an_older_turn_of_a_session_is_not_kept_in_place_of_a_later_one(late: str) -> None:
    """Whether it is saved last, or its reader tells only then that it called a tool."""
    made = bench()
    older, _ = made.submit(letters(1, 150), 4, namespace=MINE, session="s")
    made.run()
    if late == "told of a call":
        save_all(made)
    made.submit(letters(2, 150), 4, namespace=MINE, session="s")
    made.run()
    prefix = made.engine.cells.prefix
    first, second = prefix.leaves
    prefix.saving.first(second)
    save_all(made)
    made.inbox.put(Keep(older))
    made.run()
    assert first.page is not None
    assert second.page is not None
    now = made.clock()
    assert all(page.pinned_until > now for page in second.page.path)
    assert not any(page.pinned_until > now for page in first.page.path)


def test_keeping_what_left_nothing_does_nothing() -> None:
    """The request may have failed, or is unknown."""
    made = bench()
    made.inbox.put(Keep(77))
    made.run()
    assert len(made.engine.cells.prefix.leaves) == 0


def test_use_is_counted_by_namespace() -> None:
    """What came, what was there, and what twice the budget would have had; cleared, nothing is left."""
    made = bench(budget=120_000)
    prefix, prompt = made.engine.cells.prefix, letters(1, 320)
    ask(made, prompt)
    save_all(made)
    for n in range(2, 14):
        ask(made, letters(n, 320), namespace="2")
        save_all(made)
        forget_cells(made)
    assert prefix.store.evicted
    for n in range(2, 14):
        ask(made, letters(n, 320), namespace="2")
    ask(made, [*prompt, 33])
    mine, two = report(prefix, lambda _name: True).namespaces
    assert (mine.asked, mine.there + mine.missed) == (641, 5 * PAGE)
    assert mine.missed == PAGE, "its last page was evicted"
    assert two.asked == 24 * 320
    assert clear(prefix, lambda name: name == MINE).namespaces == ()
    assert {one.namespace for one in report(prefix, lambda _name: True).namespaces} == {"2"}


def test_clear_leaves_nothing() -> None:
    """No cell, no id, no byte; and only of the namespaces that are named."""
    made = bench()
    ask(made, letters(1, 150))
    ask(made, letters(1, 150), namespace="1001")
    save_all(made)
    prefix = made.engine.cells.prefix
    assert prefix.clear(lambda name: name == MINE) > 0
    assert ask(made, letters(1, 150), namespace="1001").end.cached_tokens > 0
    prefix.clear(lambda _name: True)
    assert (made.backend.kv_used(), len(prefix.leaves), prefix.store.n_bytes) == (0, 0, 0)


@pytest.mark.parametrize("verb", ["copy", "save", "restore"])
def test_a_verb_that_fails_is_a_miss(verb: str) -> None:
    """Counted, and the answer is the same."""
    made = bench()
    prompt = letters(1, 150)
    ask(made, prompt)
    if verb == "restore":
        save_all(made)
        forget_cells(made)
    made.backend.kv_fails = lambda called: called == verb
    sink = ask(made, [*prompt, 97])
    save_all(made)
    if verb != "save":
        assert sink.end.cached_tokens == 0
    prefix = made.engine.cells.prefix
    assert prefix.failures[verb] + (prefix.saving.failures if verb == "save" else 0) > 0


def test_a_lost_window_is_a_miss() -> None:
    """On sliding-window models a beginning is used only where nothing of its window is gone."""
    made = bench(FakeBackend(n_ctx=2048, n_slots=4, n_batch=64, window=64))
    prompt = letters(1, 300)
    first = ask(made, prompt, 8)
    assert ask(made, [*prompt, *first.tokens[:-1], *letters(2, 9)]).end.cached_tokens == 307
    ask(made, [*prompt[:150], *letters(3, 40)])


def test_a_memory_that_cannot_go_back_keeps_nothing() -> None:
    """Recurrent models compute every prompt."""
    made = bench(FakeBackend(n_ctx=512, n_slots=2, n_batch=64, can_remove_part=False))
    ask(made, letters(1, 100))
    assert ask(made, letters(1, 100)).end.cached_tokens == 0


def test_what_ended_with_an_error_is_not_kept() -> None:
    """Its cells may hold numbers that are none."""
    made = bench(
        FakeBackend(n_ctx=512, n_slots=2, n_batch=128, faults={0: InjectedFault(bad_rows=(0,))})
    )
    _, sink = made.submit(letters(1, 100), 4, namespace=MINE)
    made.run()
    assert sink.end.reason == "error"
    assert len(made.engine.cells.prefix.leaves) == 0
    assert ask(made, letters(1, 100)).end.cached_tokens == 0


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda kinds: [token for kind in kinds for token in letters(kind, 37)]
)


class Answers(RuleBasedStateMachine):
    """Requests, ticks, cancels, evictions and failures at random: every answer is the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.made = bench(self.backend(), budget=120_000)
        self.asked: dict[int, tuple[list[int], int, Sink]] = {}
        self.cancelled: set[int] = set()

    def backend(self) -> FakeBackend:
        """Return a small cache."""
        return FakeBackend(n_ctx=640, n_slots=3, n_batch=48)

    @rule(
        prompt=TEXT,
        n=st.integers(1, 30),
        namespace=st.sampled_from(["1", "1/s", "2", None]),
        lane=st.sampled_from(["interactive", "background"]),
        credit=st.sampled_from([3, 1000]),
    )
    def submit(
        self, prompt: list[int], n: int, namespace: str | None, lane: str, credit: int
    ) -> None:
        """Send a request."""
        handle, sink = self.made.submit(
            prompt,
            n,
            namespace=namespace,
            lane=lane,  # type: ignore[arg-type]
            credit=credit,
            client=int(namespace[0]) if namespace else 0,
        )
        self.asked[handle] = (prompt, n, sink)

    @rule(n=st.integers(1, 12))
    def tick(self, n: int) -> None:
        """Compute."""
        self.made.ticks(n)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """End one early."""
        handle = data.draw(st.sampled_from(sorted(self.asked)))
        self.cancelled.add(handle)
        self.made.cancel(handle)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A reader catches up."""
        self.made.credit(data.draw(st.sampled_from(sorted(self.asked))), 100)

    @rule()
    def idle(self) -> None:
        """Save a page."""
        self.made.engine.cells.prefix.saving.one()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Take a leaf out of the cache."""
        leaves = list(self.made.engine.cells.prefix.leaves)
        if leaves:
            self.made.engine.cells.prefix.room.drop(data.draw(st.sampled_from(leaves)))

    @rule(verbs=st.sets(st.sampled_from(["copy", "save", "restore"])))
    def fail(self, verbs: set[str]) -> None:
        """Let some verbs fail from now on."""
        self.made.backend.kv_fails = lambda verb: verb in verbs

    @rule(budget=st.sampled_from([1000, 40_000, 120_000]))
    def budget(self, budget: int) -> None:
        """Change the budget; what is over it goes with the next page."""
        self.made.engine.cells.prefix.store.budget = budget

    @rule()
    def clear(self) -> None:
        """Drop one user's prefixes."""
        self.made.engine.cells.prefix.clear(lambda name: name.startswith("1"))

    @invariant()
    def answers_are_right(self) -> None:
        """What was streamed is what the model says, whoever came before."""
        for prompt, n, sink in self.asked.values():
            want = self.made.backend.continuation(prompt, n)
            assert sink.tokens == want[: len(sink.tokens)]

    @invariant()
    def cells_are_counted(self) -> None:
        """Running requests and leaves hold all cells there are, and nobody else does."""
        made, prefix = self.made, self.made.engine.cells.prefix
        running = made.engine.registry.running
        seqs = [s.slot for s in running.values()] + [leaf.seq for leaf in prefix.leaves]
        held = sum(made.backend.kv_length(seq) for seq in seqs)
        assert held - made.backend.kv_shared(seqs) == made.backend.kv_used() <= 640
        for sequence in running.values():
            if sequence.handle not in prefix.blocked:
                assert made.backend.kv_length(sequence.slot) == sequence.computed
        for leaf in prefix.leaves:
            assert made.backend.kv_length(leaf.seq) == len(leaf.tokens)
        locked = {id(page) for blocked in prefix.blocked.values() for page in blocked.pages}
        pages = [p for name in prefix.store.trie.namespaces for p in prefix.store.trie.pages(name)]
        assert {id(page) for page in pages if page.locked} == locked

    def teardown(self) -> None:
        """All that was not cancelled ends whole; cleared, nothing is left."""
        for handle in self.asked:
            self.made.credit(handle, 10_000)
        for _ in range(5_000):
            if not self.made.engine.tick():
                break
        for handle, (prompt, n, sink) in self.asked.items():
            assert len(sink.ends) == 1
            if handle not in self.cancelled and sink.end.reason != "error":
                assert sink.tokens == self.made.backend.continuation(prompt, n)
        self.made.engine.cells.prefix.clear(lambda _name: True)
        assert self.made.backend.kv_used() == 0
        assert self.made.engine.cells.prefix.store.n_bytes == 0


class WindowedAnswers(Answers):
    """The same on a model some of whose layers lose what is out of everybody's window."""

    def backend(self) -> FakeBackend:
        """Return a small cache with a window of a page and a half."""
        return FakeBackend(n_ctx=640, n_slots=3, n_batch=48, window=PAGE * 3 // 2)


TestAnswers = Answers.TestCase
TestAnswers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestWindowedAnswers = WindowedAnswers.TestCase
TestWindowedAnswers.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_leaves_are_saved_while_a_gpu_goes_from_one_prepared_tick_to_the_next() -> None:
    """There is time for it between two decodes, whoever planned them."""
    made = bench(OnDevice(n_ctx=4096, n_slots=4, n_batch=64))
    made.backend.meanwhile = lambda: [made.clock() for _ in range(20)]  # a decode takes 20 ms
    made.submit(letters(3, 20), 3000, namespace=MINE)
    _, other = made.submit(letters(1, 300), 4, namespace=MINE)
    while not other.ends:
        made.ticks(1)
    (leaf,) = made.engine.cells.prefix.leaves
    made.engine.tick()  # behind which the next one is prepared
    made.engine._planner.plan = None  # type: ignore[method-assign, assignment]
    assert leaf.unsaved
    for _ in range(200):
        made.engine.tick()
    assert not leaf.unsaved


def test_a_leaf_leaves_between_two_decodes_of_a_gpu() -> None:
    """Its rent is due while the next tick is computed, whose cells were chosen beside its own."""
    made = Bench(OnDevice(n_ctx=4096, n_slots=4, n_batch=64), settings=priced(1e-6))
    made.submit(letters(2, 40), 3000, namespace="2")
    _, other = made.submit(letters(1, 300), 4, namespace=MINE)
    while not other.ends:
        made.engine.tick()
    save_all(made)
    prefix = made.engine.cells.prefix
    (leaf,) = prefix.leaves
    prefix.room.saving.restored(len(leaf.page.tokens), 0.001)  # so that it is worth a few ticks
    for _ in range(2500):
        made.engine.tick()
        if not len(prefix.leaves):
            break
    assert not len(prefix.leaves)
    assert made.engine.registry.running
