"""What a request waits for, told while it waits: by the engine, and in words to whoever may see it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_kit import Bench
from machine_kit import TRUTH, Clock, Machine
from test_explain import STORY
from test_prefix_cache import MINE, bench, letters

from uma_protocol import PhaseInfo
from uma_trio.cli.explain import News, progress
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import NEEDED
from uma_trio.observe.records import Wait
from uma_trio.observe.sentences import parts_ms, sentences, verdict
from uma_trio.observe.view import Viewer
from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.fill import SAVING, TOO_LONG
from uma_trio.policy.line import MOST_PASSED_OVER
from uma_trio.service.directory import Directory
from uma_trio.sockets.principal import Principal
from uma_trio_sim.fake import FakeBackend

OPERATOR = Viewer(Principal(connection=0, is_operator=True), Directory().name_of)
STRANGER = Viewer(Principal(connection=0, uid=4711), Directory().name_of)


def waits(made: Bench, handle: int) -> Wait | None:
    """Return what a live request waits for."""
    (found,) = [one for one in made.snapshot().requests if one.handle == handle]
    return found.wait


def test_who_waits_for_a_prompt_that_another_computes_knows_how_far_that_is() -> None:
    """And afterwards how long that took: the parts of its time add up."""
    made = bench(FakeBackend(n_ctx=4096, n_slots=4, n_batch=64))
    shared = letters(1, 600)
    leader, _ = made.submit(shared, 40, namespace=MINE)
    made.ticks(2)
    follower, _ = made.submit([*shared, *letters(2, 20)], 4, namespace=MINE)
    made.ticks(2)
    found = waits(made, follower)
    assert found is not None
    assert (found.by, found.shared) == ((leader,), 600)
    before = found.done
    assert 0 < before < 600
    made.ticks(2)
    later = waits(made, follower)
    assert later is not None
    assert later.done > before
    told = made.explain(follower).requests[0].wait
    assert told is not None
    assert told.by == (leader,)
    made.run()
    (record,) = made.explain(follower).requests
    assert record.wait is None
    assert record.prefix_s > 0
    assert record.admitted is not None
    assert record.ended is not None
    spent = [record.prefill, record.decode]
    parts = sum(one.computing_s + one.waiting_s for one in spent) + record.prefix_s
    assert parts == pytest.approx(record.ended - record.admitted, abs=0.05)


def test_who_waits_for_a_slot_knows_who_has_it() -> None:
    """At the moment of the question, not of its arrival."""
    made = Bench(FakeBackend(n_slots=1))
    first, _ = made.submit("hello", 5)
    second, _ = made.submit("another", 50)
    third, _ = made.submit("third", 5)
    made.ticks(2)
    assert waits(made, third) == Wait("the slot is taken", (first,))
    made.ticks(12)
    assert waits(made, third) == Wait("the slot is taken", (second,))
    made.run()


def test_who_waits_for_cells_knows_how_many() -> None:
    """And who has them."""
    made = Bench(FakeBackend(n_ctx=100, n_slots=4))
    first, _ = made.submit("hello", 80)
    second, _ = made.submit("another", 60)
    made.ticks(2)
    found = waits(made, second)
    assert found is not None
    assert "KV cells" in found.reason
    assert found.by == (first,)
    made.run()


def test_who_lost_its_slot_knows_to_whom() -> None:
    """An interactive request has it now."""
    made = Bench(FakeBackend(n_slots=1))
    background, _ = made.submit("background work", 60, lane="background")
    made.ticks(3)
    person, _ = made.submit("hello", 20)
    made.ticks(1)
    registry = made.engine.registry
    registry.preempt(background, NEEDED)
    registry.made_way((background,), (person,))
    found = waits(made, background)
    assert found is not None
    assert found.reason.startswith("preempted: ")
    assert found.by == (person,)
    made.run()


def beside_a_reader(clock: Clock, truth: CostModel = TRUTH) -> Bench:
    """Return an engine in virtual time that plans for readers."""
    machine = Machine(truth, clock)
    return Bench(machine, deadline, clock=clock, settings=EngineSettings(cost=TRUTH, drafts=False))


def numbers(n: int) -> list[int]:
    """Return a prompt of so many tokens."""
    return [token % 200 for token in range(n)]


def test_who_is_left_out_of_ticks_knows_the_readers_that_decide_on_them() -> None:
    """And not the background work that was let in before."""
    made = beside_a_reader(Clock())
    reader, _ = made.submit("hello", 400)
    made.ticks(3)
    late, _ = made.submit(numbers(600), 5, lane="background", client=2)
    made.ticks(3)
    found = waits(made, late)
    assert found is not None
    assert found.reason in {SAVING, TOO_LONG} or found.reason.startswith("the next token is due")
    assert found.by == (reader,)


def test_who_does_not_fit_into_a_tick_knows_who_has_it() -> None:
    """Where nobody reads, whoever had most of the latest ticks comes first."""
    made = Bench(FakeBackend(n_batch=4, n_slots=8))
    first, _ = made.submit("a prompt of some length", 5)
    second, _ = made.submit("another", 5)
    made.ticks(2)
    found = waits(made, second)
    assert found is not None
    assert "used up" in found.reason
    assert found.by == (first,)
    made.run()


def test_room_that_is_kept_is_for_somebody() -> None:
    """For who was passed over most often; that one waits for cells."""
    made = Bench(FakeBackend(n_ctx=100, n_slots=4))
    made.submit("hello", 60)
    large, _ = made.submit("large", 80, client=1)
    made.ticks(2)
    made.engine.registry.waiting[large].passed_over = MOST_PASSED_OVER
    small, _ = made.submit("small", 8, client=2)
    made.ticks(1)
    assert waits(made, small) == Wait("room is kept for requests before it", (large,))
    made.run()


def test_who_is_computed_by_a_slow_machine_knows_how_slow_it_is() -> None:
    """Once it has waited for a second; the scale factor of the cost model says so."""
    clock = Clock()
    made = beside_a_reader(clock, TRUTH.times(4.0))
    handle, _ = made.submit(numbers(3000), 5)
    made.ticks(2)
    assert waits(made, handle) is None
    made.ticks(8)
    found = waits(made, handle)
    assert found is not None
    assert found.reason.startswith("the machine takes ")
    made.run()


def test_others_requests_have_no_names() -> None:
    """Neither their handles nor their programs."""
    wait = Wait("all 4 slots are taken", (14, 15, 16, 17))
    assert OPERATOR.wait(wait) == (
        "all 4 slots are taken: by request 14, request 15, request 16 and 1 more"
    )
    assert "14" not in STRANGER.wait(wait)
    assert STRANGER.wait(wait).count("another user's request") == 3
    shared = Wait("another request computes the same beginning", (14,), 1758, 316)
    assert OPERATOR.wait(shared) == (
        "waits for request 14, which computes the same 1,758 tokens: 316 done"
    )
    assert OPERATOR.wait(None) == ""


def test_a_story_says_what_it_waits_for_and_what_most_of_its_time_was() -> None:
    """Behind its head; where no part stands out there is no verdict."""
    live = msgspec.structs.replace(STORY, reason=None, waits="all 4 slots are taken")
    assert sentences(live)[1] == "now: all 4 slots are taken"
    assert progress(live) == "length, 90 tokens of answer; all 4 slots are taken"
    assert verdict(STORY) == []
    queued = msgspec.structs.replace(STORY, queue_ms=3000.0)
    assert verdict(queued) == [
        "mostly, 3.0 s of 4.0 s, it waited for a slot: all 8 slots were busy"
    ]
    held = msgspec.structs.replace(STORY, prefix_ms=2000.0)
    assert verdict(held) == ["mostly, 2.0 s of 4.0 s, it waited for its prefix"]
    assert parts_ms(held)["prefix"] == 2000.0


def test_who_is_followed_says_what_changes_and_figures_now_and_then() -> None:
    """A wait that begins, whose cause changes or ends has a line at once."""
    waits, news = msgspec.structs.replace(STORY, state="queued", completion_tokens=0), News()

    def said(age_ms: float, **changes: Any) -> str:
        return news.line(msgspec.structs.replace(waits, age_ms=age_ms, **changes))

    full = "all 2 slots are taken: by request 1 (editor) and request 2 (batch)"
    assert said(600.0, waits=full) == f"600 ms: queued; {full}"
    assert said(1100.0, waits=full) == ""
    prefill = {"state": "prefill", "prompt_tokens": 9000}
    assert said(2000.0, **prefill) == "2.0 s: prefill, 700 of 9,000 tokens of its prompt"
    further = {**prefill, "prefill": PhaseInfo(tokens=800)}
    assert said(2500.0, **further) == ""
    assert said(7000.0, **further) == "7.0 s: prefill, 800 of 9,000 tokens of its prompt"
    assert said(7500.0, state="decode", completion_tokens=1) == "7.5 s: decode, 1 token of answer"
