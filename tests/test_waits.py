"""What a request waits for, told while it waits: by the engine, and in words to whoever may see it."""

from __future__ import annotations

import msgspec
import pytest
from engine_kit import Bench
from test_explain import STORY
from test_prefix_cache import MINE, bench, letters

from uma_trio.backend.fake import FakeBackend
from uma_trio.cli.explain import progress
from uma_trio.engine.recorder import NEEDED
from uma_trio.engine.records import Wait
from uma_trio.service.directory import Directory
from uma_trio.service.visibility import Viewer
from uma_trio.sockets.principal import Principal
from uma_trio.stories.sentences import parts_ms, sentences, verdict

OPERATOR = Viewer(Principal(connection=0, is_operator=True))
STRANGER = Viewer(Principal(connection=0, uid=4711))


def waits(made: Bench, handle: int) -> Wait | None:
    """Return what a live request waits for."""
    (found,) = [one for one in made.snapshot().requests if one.handle == handle]
    return found.waits


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


def test_others_requests_have_no_names() -> None:
    """Neither their handles nor their programs."""
    nobody = Directory()
    wait = Wait("all 4 slots are taken", (14, 15, 16, 17))
    assert OPERATOR.wait(wait, nobody) == (
        "all 4 slots are taken: by request 14, request 15, request 16 and 1 more"
    )
    assert "14" not in STRANGER.wait(wait, nobody)
    assert STRANGER.wait(wait, nobody).count("another user's request") == 3
    shared = Wait("another request computes the same beginning", (14,), 1758, 316)
    assert OPERATOR.wait(shared, nobody) == (
        "waits for request 14, which computes the same 1,758 tokens: 316 done"
    )
    assert OPERATOR.wait(None, nobody) == ""


def test_a_story_says_what_it_waits_for_and_what_most_of_its_time_was() -> None:
    """Behind its head; where no part stands out there is no verdict."""
    live = msgspec.structs.replace(STORY, reason=None, waits="all 4 slots are taken")
    assert sentences(live)[1] == "now: all 4 slots are taken"
    assert progress(live) == "length; all 4 slots are taken"
    assert verdict(STORY) == []
    queued = msgspec.structs.replace(STORY, queue_ms=3000.0)
    assert verdict(queued) == [
        "mostly, 3.0 s of 4.0 s, it waited for a slot: all 8 slots were busy"
    ]
    held = msgspec.structs.replace(STORY, prefix_ms=2000.0)
    assert verdict(held) == ["mostly, 2.0 s of 4.0 s, it waited for its beginning"]
    assert parts_ms(held)["prefix"] == 2000.0
