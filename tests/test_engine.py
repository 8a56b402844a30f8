"""The engine on the fake backend: what every request gets, whatever runs beside it."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from attrs import evolve
from engine_kit import KINDS, Bench, OnDevice, Sink, compute
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import BackendDied, DecodeStatus, Overlap, nothing
from uma_trio.engine.chunk import Tick
from uma_trio.engine.inbox import EngineStopped, QueueFull
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import (
    Explain,
    InboxMessage,
    Inspect,
    Keep,
    Prefix,
    PromptDone,
    SetLane,
    Snapshot,
    StreamItem,
    TokenOut,
)
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.machine.background import BackgroundScheduler
from uma_trio.policy.baseline import baseline
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.line import MAX_PASSED_OVER
from uma_trio.policy.pipeline import Pipeline, PolicyError
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.fake import EOS, FakeBackend, InjectedFault

LONG = "A long document about many things, pasted by somebody who is in a hurry. " * 10


def test_a_request_gets_the_models_own_continuation() -> None:
    """Greedy tokens are those that the model gives for this prompt alone."""
    bench = Bench()
    _, sink = bench.submit("hello", 20)
    bench.run()
    assert sink.tokens == bench.expected("hello", 20)
    assert sink.end.reason == "length"
    assert sink.end.completion_tokens == 20


def test_the_stream_is_prompt_done_then_tokens_then_one_end() -> None:
    """The order of a stream's items is fixed."""
    bench = Bench()
    _, sink = bench.submit("hello", 3)
    bench.run()
    kinds = [type(item).__name__ for item in sink.items]
    assert kinds == ["PromptDone", "TokenOut", "TokenOut", "TokenOut", "Finished"]


def test_a_prompt_longer_than_a_chunk_is_computed_exactly() -> None:
    """A prompt of many chunks gives what it gives in one go."""
    one_go = Bench(FakeBackend(n_ctx=4096, n_batch=2048))
    _, whole = one_go.submit(LONG, 30)
    one_go.run()
    chunked = Bench(FakeBackend(n_ctx=4096, n_batch=16))
    _, parts = chunked.submit(LONG, 30)
    chunked.run()
    assert whole.tokens == parts.tokens == one_go.expected(LONG, 30)


def test_a_long_prompt_beside_running_streams_changes_nobodys_text() -> None:
    """Streams and a 700-token prompt that arrives beside them all get their own text."""
    bench = Bench(FakeBackend(n_ctx=4096, n_batch=64))
    running = [bench.submit(f"stream {i}", 120)[1] for i in range(3)]
    bench.ticks(5)
    _, late = bench.submit(LONG, 40)
    bench.run()
    assert late.tokens == bench.expected(LONG, 40)
    for i, sink in enumerate(running):
        assert sink.tokens == bench.expected(f"stream {i}", 120)


def test_a_row_that_nobody_reads_changes_nobodys_text() -> None:
    """A plan may ask for the logits of an unfinished prompt, to keep the batch's shape."""

    def asking(given: SchedulerState) -> Plan:
        plan = baseline(given)
        pending = {view.key: view.pending for view in given.sequences}
        ends = [item.n_tokens == pending[item.key] for item in plan.items]
        return evolve(
            plan, extra_rows=min(3, plan.items[-1].n_tokens) if ends and not ends[-1] else 0
        )

    bench = Bench(FakeBackend(n_ctx=4096, n_batch=32), policy=asking)
    _, short = bench.submit("hello", 40)
    _, late = bench.submit(LONG, 10)
    bench.run()
    assert short.tokens == bench.expected("hello", 40)
    assert late.tokens == bench.expected(LONG, 10)


def test_running_streams_get_a_token_each_tick_while_a_long_prompt_is_computed() -> None:
    """Decode comes first: no tick of a pasted document leaves a stream out."""
    bench = Bench(FakeBackend(n_ctx=4096, n_batch=64))
    _, stream = bench.submit("hi", 200)
    bench.ticks(3)
    before = len(stream.tokens)
    bench.submit(LONG, 4)
    bench.ticks(8)
    assert len(stream.tokens) == before + 8


def test_an_end_token_ends_the_request_and_is_not_sent() -> None:
    """The model's own end is reason stop, without a token for it."""
    bench = Bench(FakeBackend(end_after=5))
    _, sink = bench.submit("some prompt", 200)
    bench.run()
    expected = bench.expected("some prompt", 200)
    assert EOS in expected
    assert sink.tokens == expected[: expected.index(EOS)]
    assert sink.end.reason == "stop"


def test_ignore_eos_masks_the_end_tokens() -> None:
    """With ignore_eos the model cannot end by itself."""
    bench = Bench(FakeBackend(end_after=3))
    _, sink = bench.submit("some prompt", 50, ignore_eos=True)
    bench.run()
    assert sink.end.reason == "length"
    assert EOS not in sink.tokens


def test_a_stop_string_ends_the_text_before_it() -> None:
    """A stop string over token borders is found and never sent."""
    bench = Bench()
    text = bench.backend.text_of(bench.expected("hello", 60))
    stop = text[10:13]
    _, sink = bench.submit("hello", 60, stop=(stop,))
    bench.run()
    assert sink.text == text[: text.index(stop)]
    assert sink.end.reason == "stop"


def test_sampling_has_its_own_random_stream() -> None:
    """A seeded request gives the same tokens alone and in company."""
    alone = Bench()
    _, expected = alone.submit("hello", 40, temperature=1.0, seed=7)
    alone.run()
    company = Bench()
    company.submit("other", 60, temperature=1.0, seed=1)
    company.ticks(4)
    _, sink = company.submit("hello", 40, temperature=1.0, seed=7)
    company.run()
    assert sink.tokens == expected.tokens
    assert sink.tokens != company.expected("hello", 40)


def test_more_requests_than_slots_queue_and_all_end() -> None:
    """Slots are reused for ever; nobody is lost."""
    bench = Bench(FakeBackend(n_slots=2, n_ctx=256))
    sinks = [bench.submit(f"request {i}", 5)[1] for i in range(50)]
    bench.run()
    for i, sink in enumerate(sinks):
        assert sink.tokens == bench.expected(f"request {i}", 5)


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    """The door is bounded, and what is in the queue is untouched."""
    bench = Bench(max_waiting=2)
    bench.submit()
    bench.submit()
    with pytest.raises(QueueFull) as refused:
        bench.submit()
    assert refused.value.retry_after_s > 0
    bench.run()
    bench.submit()


def test_a_closed_inbox_takes_no_requests() -> None:
    """After the engine has stopped, submitting says so."""
    bench = Bench()
    bench.inbox.close()
    with pytest.raises(EngineStopped):
        bench.submit()


@pytest.mark.parametrize("ticks", [0, 1, 3, 12, 60])
def test_an_abort_ends_with_one_terminal_item_and_frees_everything(ticks: int) -> None:
    """Queued, in prefill, in decode: an abort frees slot and cells by the next tick."""
    bench = Bench(FakeBackend(n_batch=16, n_ctx=2048))
    handle, sink = bench.submit(LONG, 500)
    bench.ticks(ticks)
    bench.cancel(handle)
    bench.engine.tick()
    assert sink.end.reason == "cancelled"
    assert bench.backend.used_cells == 0
    assert bench.engine.cells.reserved == 0


def test_a_late_abort_hits_nothing() -> None:
    """Aborting what has ended changes nothing for anybody."""
    bench = Bench()
    handle, sink = bench.submit("hello", 3)
    bench.run()
    _, other = bench.submit("other", 5)
    bench.cancel(handle)
    bench.run()
    assert len(sink.ends) == 1
    assert other.end.reason == "length"


def test_a_stream_without_credit_is_parked_and_the_others_go_on() -> None:
    """A slow reader costs only itself; credit brings it back where it was."""
    bench = Bench()
    slow_handle, slow = bench.submit("slow", 30, credit=4)
    _, quick = bench.submit("quick", 30)
    bench.run()
    assert len(slow.tokens) == 4
    assert quick.end.reason == "length"
    assert bench.inspect()[0].state == "parked"
    bench.credit(slow_handle, 100)
    bench.run()
    assert slow.tokens == bench.expected("slow", 30)


def test_background_is_preempted_when_cells_run_out_and_loses_nothing() -> None:
    """The newest background request pauses, is computed again, and its text is unchanged."""
    bench = Bench(FakeBackend(n_ctx=200, n_slots=4))
    _, old = bench.submit("older background", 100, lane="background")
    bench.ticks(3)
    _, new = bench.submit("newer background", 100, lane="background")
    bench.run()
    assert old.tokens == bench.expected("older background", 100)
    assert new.tokens == bench.expected("newer background", 100)
    assert bench.metrics.snapshot()["preemptions_total"] == 1
    assert new.end.total_s > old.end.total_s


def test_an_interactive_request_keeps_the_room_it_was_promised() -> None:
    """Background that outgrows its part gives way; the interactive stream never pauses."""
    bench = Bench(FakeBackend(n_ctx=200, n_slots=4))
    _, chat = bench.submit("chat", 120)
    bench.ticks(2)
    _, batch = bench.submit("batch", 120, lane="background")
    bench.run()
    assert chat.tokens == bench.expected("chat", 120)
    assert batch.tokens == bench.expected("batch", 120)


def test_who_waits_for_a_slot_may_be_read_on_while_more_cells_are_reserved_than_there_are() -> None:
    """It has lent nothing, so nothing of it has to be free: neither it nor the engine ends."""
    bench = Bench(FakeBackend(n_ctx=52))
    queued, stream = bench.submit("hello", 20, lane="background", credit=1)
    bench.ticks(2)
    bench.engine.registry.preempt(queued, "for a test")
    parked, _ = bench.submit("other", 40, lane="background", credit=1)
    growing, _ = bench.submit("third", 40, lane="background")
    while bench.engine.cells.free_cells >= 0:
        assert bench.engine.tick()
    bench.credit(queued, 30)
    bench.ticks(1)
    assert queued in bench.engine.registry.waiting
    bench.cancel(parked)
    bench.run()
    assert stream.tokens == bench.expected("hello", 20)
    assert bench.engine.registry.has(growing) is False


def test_a_preempted_request_goes_on_when_the_others_are_parked() -> None:
    """Nobody may sleep on a request that could run: it does not wait for a stranger's message."""
    bench = Bench(FakeBackend(faults={8: InjectedFault(status=DecodeStatus.NO_KV_ROOM)}))
    bench.submit("parked soon", 50, credit=4)
    _, other = bench.submit("preempted", 30, lane="background")
    bench.run()
    assert bench.metrics.snapshot()["preemptions_total"] == 1
    assert other.tokens == bench.expected("preempted", 30)


def test_a_request_alone_that_cannot_fit_fails_alone() -> None:
    """When nothing is left to give up, one request ends with E_RUNTIME_002."""
    faults = {i: InjectedFault(status=DecodeStatus.NO_KV_ROOM) for i in range(30)}
    bench = Bench(FakeBackend(faults=faults))
    _, sink = bench.submit("hello", 5)
    bench.ticks(20)
    assert sink.end.reason == "error"
    assert sink.end.code == "E_RUNTIME_002"


def test_no_room_shrinks_the_prefill_first() -> None:
    """One refusal for want of room costs a tick, not a request."""
    bench = Bench(FakeBackend(faults={1: InjectedFault(status=DecodeStatus.NO_KV_ROOM)}))
    sinks = [bench.submit(LONG[:100] + str(i), 10)[1] for i in range(3)]
    bench.run()
    for i, sink in enumerate(sinks):
        assert sink.tokens == bench.expected(LONG[:100] + str(i), 10)
    assert bench.metrics.snapshot()["preemptions_total"] == 0


@pytest.mark.parametrize("status", [DecodeStatus.ABORTED, -2, -3, DecodeStatus.INVALID])
@pytest.mark.parametrize("can_remove_part", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_one_failed_decode_is_repaired_without_anybody_noticing(
    status: int, keep: int, can_remove_part: bool
) -> None:
    """Positions are re-synchronised with what the cache holds, and the tick is done again."""
    faults = {4: InjectedFault(status=status, keep=keep)}
    bench = Bench(FakeBackend(faults=faults, can_remove_part=can_remove_part))
    sinks = [bench.submit(f"request {i}", 20)[1] for i in range(3)]
    bench.run()
    for i, sink in enumerate(sinks):
        assert sink.tokens == bench.expected(f"request {i}", 20)


def test_cells_lost_by_a_failed_decode_are_computed_again() -> None:
    """What the cache holds decides, not what we believe it holds."""
    bench = Bench(FakeBackend(faults={6: InjectedFault(status=-3, lose=2)}))
    sinks = [bench.submit(f"request {i}", 20)[1] for i in range(3)]
    bench.run()
    for i, sink in enumerate(sinks):
        assert sink.tokens == bench.expected(f"request {i}", 20)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sequence_that_breaks_every_batch_fails_alone(kind: type[FakeBackend]) -> None:
    """After a second failure each is computed alone; only the culprit ends."""

    class Poisoned(kind):  # type: ignore[misc,valid-type]
        """Fails whenever a batch holds the token 7."""

        def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
            alone.append(len(set(self.batch.slot[:n_tokens].tolist())) == 1)
            if 7 in self.batch.token[:n_tokens]:
                while_computing()
                return DecodeStatus.COMPUTE_FAILED
            status: int = super().decode(n_tokens, while_computing)
            return status

    alone: list[bool] = []

    bench = Bench(Poisoned())
    good = [bench.submit(f"request {i}", 20)[1] for i in range(3)]
    bench.ticks(2)
    _, bad = bench.submit([1, 7, 3], 5)
    bench.run()
    assert bad.end.code == "E_RUNTIME_001"
    assert alone[2:9] == [False, False, True, True, True, True, False]
    for i, sink in enumerate(good):
        assert sink.tokens == bench.expected(f"request {i}", 20)


def test_a_backend_that_never_works_again_ends_the_engine() -> None:
    """Failing for ever is not survived in silence."""
    bench = Bench(FakeBackend(faults={i: InjectedFault(status=-3) for i in range(3, 200)}))
    for i in range(40):
        bench.submit(f"request {i}", 20)
    with pytest.raises(BackendDied):
        bench.run()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_not_numbers_fail_one_request(kind: type[FakeBackend]) -> None:
    """NaN in one row ends that stream with E_RUNTIME_003 and no other."""
    bench = Bench(kind(faults={3: InjectedFault(bad_rows=(1,))}))
    sinks = [bench.submit(f"request {i}", 20)[1] for i in range(3)]
    bench.run()
    assert [sink.end.code for sink in sinks] == [None, "E_RUNTIME_003", None]
    assert sinks[0].tokens == bench.expected("request 0", 20)
    assert sinks[2].tokens == bench.expected("request 2", 20)


def test_fail_all_gives_every_stream_its_end() -> None:
    """Running, waiting and still in the inbox: all are told once."""
    bench = Bench(FakeBackend(n_slots=1))
    sinks = [bench.submit(f"request {i}", 50)[1] for i in range(3)]
    bench.ticks(3)
    sinks.append(bench.submit("just arrived")[1])
    bench.engine.fail_all("E_RUNTIME_004", "gone")
    assert [sink.end.code for sink in sinks] == ["E_RUNTIME_004"] * 4


def test_a_promoted_request_is_interactive_from_the_next_tick() -> None:
    """A priority change reaches a running request."""
    bench = Bench()
    handle, _ = bench.submit("hello", 50, lane="background")
    bench.ticks(2)
    bench.inbox.put(SetLane(handle, "interactive"))
    assert bench.inspect()[0].lane == "interactive"


def test_inspect_tells_progress() -> None:
    """What ps shows is joined by the handle and counts what was done."""
    bench = Bench(FakeBackend(n_slots=1))
    first, _ = bench.submit("hello", 50)
    second, _ = bench.submit("world", 50)
    bench.ticks(5)
    reports = {report.handle: report for report in bench.inspect()}
    assert reports[first].state == "decode"
    assert reports[first].completion_tokens >= 4
    assert reports[second].state == "queued"


def test_computed_tokens_are_counted_by_lane() -> None:
    """For the rates of the scorecard."""
    bench = Bench(FakeBackend(n_slots=2))
    for lane, n in (("interactive", 20), ("background", 20), ("background", 5)):
        bench.submit("hello", n, lane=lane)
    bench.run()
    computed = bench.metrics.totals().lanes
    assert computed["background"] - computed["interactive"] == len("hello") + 5


def test_a_short_streams_worst_pause_counts_too() -> None:
    """Who ends before the first three seconds are over had first seconds all the same."""
    bench = Bench()
    bench.submit("hello", 5)
    bench.run()
    assert bench.metrics.snapshot()["worst_pause_ms"]["count"] == 1  # type: ignore[index]


def test_rows_that_are_copied_to_be_sampled_are_counted() -> None:
    """Greedy reads them where they lie; temperature alone needs every logit changed."""
    bench = Bench()
    bench.submit("hello", 10)
    bench.submit("hello", 10, temperature=1.0)
    bench.run()
    assert bench.metrics.snapshot()["copy_free_ratio"] == 0.5


def test_two_engines_with_the_same_input_do_the_same() -> None:
    """Nothing but the inbox and the clock decides what happens."""

    def run() -> list[list[object]]:
        bench = Bench(FakeBackend(n_slots=3, n_ctx=300, end_after=20))
        sinks = []
        for i in range(12):
            lane = "background" if i % 2 else "interactive"
            sinks.append(bench.submit(f"request {i}" * (i + 1), 40, lane=lane, temperature=0.8)[1])
            bench.ticks(i)
        bench.run()
        return [list(sink.items) for sink in sinks]

    assert run() == run()


def test_a_token_is_told_while_the_next_is_computed() -> None:
    """Nobody waits for the telling: it comes when the machine is busy, and not a tick later."""
    bench = Bench()
    _, sink = bench.submit("hello", 6)
    told: list[int] = []
    bench.backend.meanwhile = lambda: told.append(len(sink.tokens))
    bench.run()
    assert told == [0, 1, 2, 3, 4, 5]
    assert sink.end.reason == "length"


def test_what_came_while_nothing_was_told_is_told_with_it() -> None:
    """An abort and an answer for `ps` do not wait for the end of the tick that they precede."""
    bench = Bench()
    bench.submit("goes on", 20)
    handle, sink = bench.submit("hello", 20)
    bench.ticks(3)
    bench.cancel(handle)
    answers: list[object] = []
    bench.inbox.put(Inspect(answers.append))
    seen: list[tuple[int, int]] = []
    bench.backend.meanwhile = lambda: seen.append((len(sink.ends), len(answers)))
    bench.ticks(1)
    assert seen == [(1, 1)]


@pytest.mark.parametrize(
    "fault",
    [InjectedFault(status=-3), InjectedFault(status=1), InjectedFault(died="gone")],
    ids=str,
)
def test_a_tick_is_told_though_the_next_one_fails(fault: InjectedFault) -> None:
    """The tokens that there are come before whatever is done about the failure."""
    bench = Bench(FakeBackend(faults={5: fault}))
    _, sink = bench.submit("hello", 20)
    for _ in range(5):
        bench.engine.tick()
    assert len(sink.tokens) == 4
    with suppress(BackendDied):
        bench.engine.tick()
    assert sink.tokens == bench.expected("hello", 5)


def test_what_a_dying_backend_did_not_let_us_tell_is_told_before_the_end() -> None:
    """Whether or not it came to its aside, no token and no figure is lost."""

    class Dying(FakeBackend):
        """Dies in its sixth decode, at once."""

        def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
            if self.decodes == 5:
                raise BackendDied("gone")
            return super().decode(n_tokens, while_computing)

    bench = Bench(Dying())
    _, sink = bench.submit("hello", 20)
    with pytest.raises(BackendDied):
        bench.run()
    assert len(sink.tokens) == 4
    bench.engine.fail_all("E_RUNTIME_004", "gone")
    assert sink.tokens == bench.expected("hello", 5)
    assert sink.end.code == "E_RUNTIME_004"
    assert bench.metrics.snapshot()["batch_calls_total"] == 5


def test_an_engine_that_is_closed_while_it_computes_has_told_all() -> None:
    """Its thread does not end with a token in its hands."""
    bench = Bench()
    _, sink = bench.submit("hello", 20)
    bench.backend.meanwhile = lambda: bench.inbox.close() if bench.backend.decodes == 5 else None
    compute(bench.engine, bench.clock)
    assert sink.tokens == bench.expected("hello", 5)
    assert bench.metrics.snapshot()["batch_calls_total"] == 5


def test_the_trace_gets_every_tick_once_and_in_order() -> None:
    """Also those that failed, and the last before a rest."""
    traced: list[int] = []
    recorder = Recorder(lambda state, _plan, _record: traced.append(state.tick))
    bench = Bench(FakeBackend(faults={4: InjectedFault(status=-3)}), recorder=recorder)
    bench.submit("hello", 8)
    seen: list[int] = []
    bench.backend.meanwhile = lambda: seen.append(len(traced))
    bench.run()
    assert seen == list(range(9))
    assert traced == list(range(9))


prompts = st.text(alphabet="abc déf\n", min_size=1, max_size=60)


def faults(**kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[int, InjectedFault]]:
    """Return up to four decodes that go wrong, by number."""
    return st.dictionaries(st.integers(0, 60), st.builds(InjectedFault, **kinds), max_size=4)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.integers(1, 40), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("credit"), st.integers(0, 30), st.integers(1, 9)),
        st.tuples(st.just("tick"), st.integers(1, 8)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    n_slots=st.integers(1, 5),
    n_batch=st.integers(4, 40),
    faults=faults(status=st.sampled_from([1, 2, -1, -3]), keep=st.integers(0, 3)),
)
def test_whatever_happens_every_request_ends_once_with_its_own_text(
    steps: list[tuple[object, ...]], n_slots: int, n_batch: int, faults: dict[int, InjectedFault]
) -> None:
    """Any mix of arrivals, aborts and failures leaves every text intact and nothing held."""
    bench = Bench(FakeBackend(n_ctx=160, n_slots=n_slots, n_batch=n_batch, faults=faults))
    submitted = []
    for step in steps:
        match step:
            case ("submit", str(prompt), int(n), bool(background)):
                lane = "background" if background else "interactive"
                submitted.append((prompt, n, *bench.submit(prompt, n, lane=lane)))
            case ("abort", int(index)) if index < len(submitted):
                bench.cancel(submitted[index][2])
            case ("tick", int(n)):
                bench.ticks(n)
    bench.run()
    assert bench.backend.used_cells == 0
    assert bench.inbox.waiting == 0
    for prompt, n, _, sink in submitted:
        assert sink.tokens == bench.expected(prompt, n)[: len(sink.tokens)]
        assert sink.end.completion_tokens == len(sink.tokens)
        assert sum(isinstance(item, PromptDone) for item in sink.items) <= 1
        if sink.tokens:
            first = next(i for i, item in enumerate(sink.items) if isinstance(item, TokenOut))
            assert isinstance(sink.items[first - 1], PromptDone)
        if sink.end.reason == "length":
            assert len(sink.tokens) == n


def test_a_question_does_not_wait_until_a_batch_job_has_ended() -> None:
    """One of the background requests gives its slot up, and loses nothing but time."""
    bench = Bench(FakeBackend(n_slots=2))
    jobs = [bench.submit(f"job {n}", 60, lane="background") for n in range(2)]
    bench.ticks(5)
    _, question = bench.submit("question", 3)
    bench.ticks(5)
    assert question.end.reason == "length"
    bench.run()
    for n, (_, sink) in enumerate(jobs):
        assert sink.tokens == bench.expected(f"job {n}", 60)
    assert bench.metrics.snapshot()["preemptions_total"] == 1


def test_batch_jobs_get_done_though_questions_never_end() -> None:
    """Whoever gave its place up too often keeps it; the next question has another's, or waits."""
    bench = Bench(FakeBackend(n_slots=2))
    jobs = [bench.submit(f"job {n}", 300, lane="background") for n in range(2)]
    bench.ticks(5)
    for n in range(40):
        _, question = bench.submit(f"question {n}", 2)
        bench.ticks(8)
        assert question.end.reason == "length"
    bench.run()
    for n, (_, sink) in enumerate(jobs):
        assert sink.tokens == bench.expected(f"job {n}", 300)


class AtOnce(Engine):
    """An engine that tells each tick as soon as it is done."""

    def finish(self, tick: Tick, status: int) -> None:
        """Finish, and tell."""
        super().finish(tick, status)
        self.publish()


def lived(
    bench: Bench, steps: list[tuple[object, ...]], credit: int, *, breaks: bool
) -> list[list[list[StreamItem]]]:
    """Return what each stream had after each step, and at the end."""
    sinks: list[Sink] = []
    seen: list[list[list[StreamItem]]] = []
    for step in steps:
        match step:
            case ("submit", str(prompt), int(n), bool(background)):
                lane = "background" if background else "interactive"
                sinks.append(bench.submit(prompt, n, lane=lane, credit=credit)[1])
            case ("abort", int(index)):
                bench.cancel(index + 1)
            case ("credit", int(index), int(n)):
                bench.credit(index + 1, n)
            case ("tick", int(n)):
                for _ in range(n):
                    bench.engine.tick()
        seen.append([list(sink.items) for sink in sinks])
    for handle in range(1, len(sinks) + 1):
        bench.credit(handle, 100)
    if breaks:
        bench.engine.fail_all("E_RUNTIME_004", "gone")
    else:
        bench.run()
    return [*seen, [sink.items for sink in sinks]]


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    credit=st.integers(1, 20),
    n_slots=st.integers(1, 5),
    faults=faults(
        status=st.sampled_from([0, 1, 2, -1, -3]),
        keep=st.integers(0, 3),
        bad_rows=st.sampled_from([(), (0,)]),
    ),
    breaks=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_telling_later_changes_nothing_that_is_told(
    steps: list[tuple[object, ...]],
    credit: int,
    n_slots: int,
    faults: dict[int, InjectedFault],
    breaks: bool,
    kind: type[FakeBackend],
) -> None:
    """Each stream gets the same items in the same order as if each tick were told at once."""

    def bench(engine: type[Engine]) -> Bench:
        backend = kind(n_ctx=160, n_slots=n_slots, n_batch=20, faults=faults)
        return Bench(backend, engine=engine)

    later, at_once = bench(Engine), bench(AtOnce)
    some, all_of_it = (lived(b, steps, credit, breaks=breaks) for b in (later, at_once))
    assert some[-1] == all_of_it[-1]
    for early, late in zip(some, all_of_it, strict=True):
        for items, told in zip(early, late, strict=True):
            assert items == told[: len(items)]
    process = {"rss_gb": 0}
    figures = [each.metrics.snapshot() | process for each in (later, at_once)]
    assert figures[0] == figures[1]


def test_the_baseline_is_found_by_name() -> None:
    """The policy used here is the one that --policy baseline gives."""
    from uma_trio.policy.by_name import find_policy

    assert find_policy("baseline") is baseline
    with pytest.raises(PolicyError, match="baseline"):
        find_policy("nonsense")


class Noting:
    """An engine on such a backend, with a policy that notes whether that computed when it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bool, int]] = []

        def note(_state: SchedulerState, plan: Plan) -> Plan:
            self.asked.append((self.backend.computing, len(plan.items)))
            return plan

        stages = {**baseline.stages, "note": note}
        self.backend = OnDevice(n_ctx=4096)
        captured = EngineSettings(
            cost=CostModel(Staircase((1, 512), (0.01, 0.1)), recapture_s=0.003)
        )
        self.bench = Bench(self.backend, Pipeline(stages), settings=captured)

    def asked_in(self, ticks: int) -> list[tuple[bool, int]]:
        """Do so many ticks; return whether each plan was made beside a decode, and of how many."""
        self.asked.clear()
        self.bench.ticks(ticks)
        return self.asked.copy()


def test_the_next_tick_is_planned_while_a_gpu_computes() -> None:
    """Whoever is there, and as long as everybody goes on as foreseen, prompts too."""
    noting = Noting()
    noting.bench.submit(max_tokens=60)
    noting.bench.submit(LONG, max_tokens=9, lane="background")
    noting.bench.ticks(1)
    assert noting.asked_in(3) == [(True, 2)] * 3


def test_who_comes_while_a_gpu_computes_is_in_the_next_tick() -> None:
    """What was planned ahead without them is thrown away."""
    noting = Noting()
    bench = noting.bench
    _, stream = bench.submit(max_tokens=60)
    bench.ticks(2)
    _, other = bench.submit("another", max_tokens=2, lane="background")
    assert noting.asked_in(1) == [(False, 2), (True, 2)]
    bench.run()
    assert stream.tokens == bench.expected("hello", 60)
    assert other.tokens == bench.expected("another", 2)


def test_a_tick_is_planned_anew_once_somebody_is_not_where_was_foreseen() -> None:
    """Who was ended, who reads no more, who reads on, who is in the other lane."""
    noting = Noting()
    bench = noting.bench
    bench.submit(max_tokens=60)
    handle, _ = bench.submit("another", max_tokens=60, credit=4)
    bench.ticks(2)
    assert noting.asked_in(1) == [(True, 2)]
    bench.inbox.put(SetLane(handle, "background"))
    assert noting.asked_in(1) == [(False, 2), (True, 1)], "its next token would have no place"
    bench.credit(handle, 9)
    assert noting.asked_in(1) == [(False, 2), (True, 2)]
    bench.cancel(handle)
    assert noting.asked_in(1) == [(False, 1), (True, 1)]


def test_nothing_is_planned_behind_an_answer_that_has_its_last_token() -> None:
    """Others will be admitted, or nobody is left."""
    noting = Noting()
    noting.bench.submit(max_tokens=3)
    assert noting.asked_in(3) == [(False, 1), (True, 1), (True, 1)]
    assert not noting.bench.engine.tick()


class Remembering(Engine):
    """An engine that keeps its ticks, and how each decode ended."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.done: list[tuple[Tick, int]] = []

    def finish(self, tick: Tick, status: int) -> None:
        """Finish it, and keep it."""
        super().finish(tick, status)
        self.done.append((tick, status))


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    credit=st.integers(1, 20),
    n_slots=st.integers(1, 5),
    faults=faults(status=st.sampled_from([0, 1, 2, -1, -3])),
)
def test_every_tick_is_learnt_from_once_and_in_order(
    steps: list[tuple[object, ...]], credit: int, n_slots: int, faults: dict[int, InjectedFault]
) -> None:
    """However plans are made ahead, thrown away, or made twice since a decode failed."""
    backend = OnDevice(n_ctx=160, n_slots=n_slots, n_batch=20, faults=faults)
    bench = Bench(backend, engine=Remembering)
    assert isinstance(bench.engine, Remembering)
    lived(bench, steps, credit, breaks=False)
    computed = [job for job, status in bench.engine.done if status == DecodeStatus.OK]
    learnt = [tick for job in computed for tick in job.state.measured]
    assert len({id(tick) for tick in learnt}) == len(learnt)
    assert len(learnt) >= len(computed) - 2
    assert [t.n_tokens for t in learnt] == [job.n_tokens for job in computed][: len(learnt)]
    assert [job.state.before for job in computed[1:]] == [job.work for job in computed[:-1]]


@settings(max_examples=100, deadline=None)
@given(
    steps=steps,
    credit=st.integers(1, 20),
    n_slots=st.integers(1, 5),
    n_batch=st.integers(2, 20),
    end_after=st.sampled_from([0, 5]),
)
def test_planning_ahead_changes_no_stream(
    steps: list[tuple[object, ...]], credit: int, n_slots: int, n_batch: int, end_after: int
) -> None:
    """Each request gets the tokens and the end that it gets where every plan is made in its turn."""
    steps = [step for step in steps if step[0] != "abort"]
    told = []
    for kind in KINDS:
        backend = kind(n_ctx=160, n_slots=n_slots, n_batch=n_batch, end_after=end_after)
        streams = lived(Bench(backend, clock=lambda: 0.0), steps, credit, breaks=False)[-1]
        told.append(
            [[item for item in items if not isinstance(item, PromptDone)] for items in streams]
        )
    assert told[0] == told[1]


class Late(OnDevice):
    """Notes how many tokens of each request are booked when a decode begins."""

    bench: Bench

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.booked: list[list[int]] = []

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Note it, and compute."""
        running = self.bench.engine.registry.running.values()
        self.booked.append([sequence.n_generated for sequence in running])
        return super().decode(n_tokens, while_computing)


def late(**given: Any) -> tuple[Bench, Late]:
    """Return an engine on such a backend."""
    backend = Late(**given)
    backend.bench = Bench(backend)
    return backend.bench, backend


def test_a_tick_that_was_drawn_up_does_not_wait_until_tokens_are_booked() -> None:
    """Each decode but the first begins while the token that it computes is booked to nobody yet."""
    bench, backend = late()
    _, stream = bench.submit(max_tokens=6)
    bench.run()
    assert backend.booked == [[0], [0], [1], [2], [3], [4]]
    assert stream.tokens == bench.expected("hello", 6)
    assert stream.end.reason == "length"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_each_stream_gets_its_own_tokens_whoever_a_policy_serves_and_in_whatever_order(
    seed: int, lengths: list[int]
) -> None:
    """Some of them, the last first, prompts in parts before or behind: a row is found by whose it is."""
    random = Random(seed)

    def anyhow(state: SchedulerState) -> Plan:
        ready = [view for view in state.sequences if view.credit > 0]
        chosen = random.sample(ready, random.randint(1, len(ready)))
        shares = [(view, random.randint(1, min(20, view.pending))) for view in chosen]
        items = [PlanItem(v.key, n, "decode" if v.decoding else "prefill", "so") for v, n in shares]
        return Plan(items=tuple(items), memory=state.memory)

    bench = Bench(OnDevice(), anyhow)
    streams = [bench.submit([65 + n] * length, 12)[1] for n, length in enumerate(lengths)]
    bench.run()
    for n, (length, stream) in enumerate(zip(lengths, streams, strict=True)):
        assert stream.tokens == bench.backend.continuation([65 + n] * length, 12)


def test_a_batch_that_was_made_small_for_want_of_room_is_the_only_one() -> None:
    """What was drawn up beside it is as small, and is not launched."""
    sizes = []

    class Sized(OnDevice):
        def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
            sizes.append(n_tokens)
            return super().decode(n_tokens, while_computing)

    bench = Bench(Sized(n_batch=64, faults={2: InjectedFault(status=DecodeStatus.NO_KV_ROOM)}))
    bench.submit([1] * 300, max_tokens=1)
    bench.run()
    assert sizes == [64, 64, 64, 32, 64, 64, 12]


def test_credit_that_comes_in_time_keeps_no_tick_waiting() -> None:
    """A stream that is read gives some back for every token; it is booked with that token."""
    bench, backend = late()
    handle, stream = bench.submit(max_tokens=6, credit=3)
    for _ in range(6):
        bench.engine.tick()
        bench.credit(handle, 1)
    bench.run()
    assert backend.booked == [[0], [0], [1], [2], [3], [4]]
    assert stream.tokens == bench.expected("hello", 6)


def test_who_reads_on_is_in_the_next_tick_though_one_without_them_was_drawn_up() -> None:
    """Their last credit went for the token that is chosen."""
    bench, backend = late()
    handle, stream = bench.submit(max_tokens=6, credit=2)
    bench.submit("another", max_tokens=20)
    bench.engine.tick()
    bench.engine.tick()
    bench.credit(handle, 9)
    bench.engine.tick()
    assert backend.booked[-1] == [2, 2], "all is booked first"
    bench.run()
    assert stream.tokens == bench.expected("hello", 6)


@pytest.mark.parametrize("what", ["submit", "abort", "lane"])
def test_what_may_change_a_plan_finds_everything_booked(what: str) -> None:
    """Whatever comes but credit is handled after the tokens that were chosen before."""
    bench, backend = late()
    bench.submit(max_tokens=30)
    other, _ = bench.submit("another", max_tokens=30)
    for _ in range(4):
        bench.engine.tick()
    match what:
        case "submit":
            bench.submit("third", max_tokens=2)
        case "abort":
            bench.cancel(other)
        case _:
            bench.inbox.put(SetLane(other, "background"))
    bench.engine.tick()
    assert backend.booked[-1][0] == 4


@pytest.mark.parametrize("what", ["inspect", "explain", "prefix", "keep"])
def test_a_question_costs_no_tick_its_overlap(what: str) -> None:
    """The prepared tick is launched; the answer has the tokens of the tick before it."""
    bench, backend = late()
    bench.submit(max_tokens=30)
    other, _ = bench.submit("another", max_tokens=30)
    for _ in range(4):
        bench.engine.tick()
    answers: list[object] = []
    questions: dict[str, InboxMessage] = {
        "inspect": Inspect(answers.append),
        "explain": Explain(answers.append, ticks=3),
        "prefix": Prefix(answers.append, lambda _: True),
        "keep": Keep(other),
    }
    bench.inbox.put(questions[what])
    bench.engine.tick()
    assert backend.booked[-1] == [3, 3], "the tick before it is committed during the decode"
    assert len(answers) == (what != "keep")
    for answer in answers:
        if isinstance(answer, Snapshot):
            assert [one.completion_tokens for one in answer.requests] == [4, 4]


def test_clearing_prefixes_costs_the_overlap() -> None:
    """Cells are dropped, which no tick that is computed may have."""
    bench, backend = late()
    bench.submit(max_tokens=30)
    for _ in range(4):
        bench.engine.tick()
    bench.inbox.put(Prefix(lambda _: None, lambda _: True, clear=True))
    bench.engine.tick()
    assert backend.booked[-1] == [4]


def test_who_waits_without_room_keeps_no_tick_waiting_and_is_admitted_once_there_is() -> None:
    """Admission that took nobody is not asked again before something has happened."""
    bench, backend = late(n_ctx=100)
    _, first = bench.submit([1] * 40, max_tokens=20)
    _, second = bench.submit([1] * 60, max_tokens=20)
    for _ in range(9):
        bench.engine.tick()
    assert backend.booked[2:] == [[n] for n in range(1, 8)]
    while not first.ends:
        bench.engine.tick()
    assert backend.booked[-1] == [0], "the tick behind the first one's last token is the second's"
    bench.run()
    assert [len(stream.tokens) for stream in (first, second)] == [20, 20]


def test_admission_that_took_somebody_is_asked_again() -> None:
    """The others were passed over once more, and may be next by that; once nobody is taken, it rests."""
    bench = Bench(FakeBackend(n_ctx=100))
    bench.submit([1] * 40, max_tokens=20)
    bench.submit([1] * 60, max_tokens=20)
    asked = []
    for _ in range(4):
        bench.engine.tick()
        asked.append(bench.engine.registry.may_admit(bench.clock()))
    assert asked == [True, False, False, False]


def test_who_cannot_be_helped_is_not_asked_about_in_every_tick() -> None:
    """A background request could go, but its cells are too few; once the other ends, it does go."""
    bench = Bench(FakeBackend(n_ctx=200))
    _, first = bench.submit([1] * 20, max_tokens=20)
    bench.submit([1] * 5, max_tokens=100, lane="background")  # which has tenure
    bench.submit([1] * 10, max_tokens=80, lane="background")
    bench.ticks(2)
    assert len(bench.engine.registry.running) == 3
    _, person = bench.submit([1] * 150, max_tokens=15)
    asked = []
    for _ in range(9):
        bench.engine.tick()
        asked.append(bench.engine.registry.may_admit(bench.clock()))
    assert not any(asked)
    while not first.ends:
        assert not person.tokens
        bench.engine.tick()
    bench.ticks(4)
    assert person.tokens
    assert [item.preempted for item in bench.engine.registry.waiting.values()] == [True]


def test_nothing_is_kept_of_the_last_answer_once_all_is_quiet() -> None:
    """A prompt may be large, and is nobody else's."""
    bench = Bench(OnDevice())
    bench.submit(max_tokens=3)
    bench.engine.tick()
    (sequence,) = bench.engine.registry.running.values()
    left = weakref.ref(sequence.sampler.filters)
    del sequence
    bench.run()
    gc.collect()
    assert left() is None


def test_who_comes_with_room_is_admitted_past_one_who_has_none() -> None:
    """Another request is a reason to ask admission again."""
    bench = Bench(FakeBackend(n_ctx=100))
    bench.submit([1] * 40, max_tokens=20)
    bench.submit([1] * 60, max_tokens=20)
    bench.ticks(3)
    _, small = bench.submit([1] * 10, max_tokens=5)
    bench.ticks(1)
    assert len(small.tokens) == 1


def test_who_needs_less_room_in_the_other_lane_is_admitted_there() -> None:
    """A background request reserves but a part of its answer."""
    bench = Bench(FakeBackend(n_ctx=100))
    bench.submit([1] * 40, max_tokens=20)
    handle, asked = bench.submit([1] * 20, max_tokens=40)
    bench.ticks(3)
    assert not asked.items
    bench.inbox.put(SetLane(handle, "background"))
    bench.ticks(1)
    assert len(asked.tokens) == 1


def test_room_that_was_kept_for_one_who_left_is_given_to_the_others_at_once() -> None:
    """It had been passed over so often that it was next in its turn."""
    bench = Bench(FakeBackend(n_ctx=100))
    bench.submit([1] * 40, max_tokens=20)
    large, _ = bench.submit([1] * 90, max_tokens=4, lane="background")
    bench.ticks(1)
    for _ in range(MAX_PASSED_OVER):
        _, small = bench.submit([1] * 5, max_tokens=1, lane="background")
        bench.ticks(1)
        assert small.ends
    _, last = bench.submit([1] * 5, max_tokens=1, lane="background")
    bench.ticks(3)
    assert not last.items
    bench.cancel(large)
    bench.ticks(1)
    assert last.ends


@pytest.mark.parametrize("kind", KINDS)
def test_who_lost_its_place_for_want_of_room_has_it_again_two_ticks_later(
    kind: type[FakeBackend],
) -> None:
    """Not in the next tick, for which it was taken; and nothing else need happen for it."""
    backend = kind(faults={3: InjectedFault(status=DecodeStatus.NO_KV_ROOM)})
    bench = Bench(backend)
    bench.submit(max_tokens=30)
    _, job = bench.submit("another", max_tokens=30, lane="background")
    running = ""
    for _ in range(8):
        bench.engine.tick()
        running += str(len(bench.engine.registry.running))
    assert running == "22211222"
    bench.run()
    assert job.tokens == bench.expected("another", 30)


@pytest.mark.parametrize("ends", ["stop string", "end token"])
def test_an_end_that_only_its_token_tells_is_booked_before_the_next_decode(ends: str) -> None:
    """Nothing is computed behind it."""
    bench, backend = late(end_after=7 if ends == "end token" else 0)
    expected = bench.expected("hello", 30)
    text = backend.text_of(expected)
    stop = (text[5:7],) if ends == "stop string" else ()
    _, stream = bench.submit(max_tokens=30, stop=stop)
    bench.run()
    assert stream.end.reason == "stop"
    n_decodes = backend.decodes
    quiet = Bench(FakeBackend(end_after=7 if ends == "end token" else 0))
    quiet.submit(max_tokens=30, stop=stop)
    quiet.run()
    assert n_decodes == quiet.backend.decodes


def test_tokens_that_were_chosen_reach_their_streams_though_the_next_decode_kills_the_engine() -> (
    None
):
    """They were not booked yet when it died."""

    class Dying(OnDevice):
        def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
            if self.decodes == 4:
                raise BackendDied("gone before it came to its aside")
            return super().decode(n_tokens, while_computing)

    bench = Bench(Dying())
    _, stream = bench.submit(max_tokens=30)
    with pytest.raises(BackendDied):
        bench.run()
    bench.engine.fail_all("E_RUNTIME_004", "gone")
    assert stream.tokens == bench.expected("hello", 4)
    assert stream.end.code == "E_RUNTIME_004"


def test_the_high_water_mark_is_lowered_when_only_streams_are_left_and_when_nobody_is() -> None:
    """As long as others come and go it may stay as large as it was, where graphs are captured."""
    noting = Noting()
    bench, backend = noting.bench, noting.backend
    bench.submit(max_tokens=60)
    for _ in range(2):
        bench.submit("another", max_tokens=2, lane="background")
    bench.submit("long", max_tokens=9, lane="background")
    bench.ticks(3)
    assert not backend.lowered, "the first two have ended, the long one goes on"
    bench.ticks(12)
    assert backend.lowered
    bench.run()
    assert backend.lowered


def test_the_cache_keeps_its_high_water_mark_for_who_asks_again_at_once() -> None:
    """They hear of their answer beside the next decode, when everybody else is already planned."""
    noting = Noting()
    bench, backend = noting.bench, noting.backend
    bench.submit(max_tokens=60)
    lowered = []
    for _ in range(5):
        _, asked = bench.submit("another", max_tokens=2, lane="background")
        while not asked.ends:
            bench.ticks(1)
        bench.ticks(1)  # beside which a client would hear of it
        lowered.append(backend.lowered)
    assert not any(lowered)
    bench.ticks(1)
    assert backend.lowered


@pytest.mark.parametrize("cell_s", [0.0, 1e-5])
def test_the_high_water_mark_is_lowered_in_company_once_it_has_cost_a_change(cell_s: float) -> None:
    """Each tick pays for the free cells below it, as long as it stays."""
    cost = CostModel(
        Staircase((1, 512), (0.01, 0.1)), spanned_cell_s=cell_s, recapture_s=0.003, capture_s=0.004
    )
    bench = Bench(OnDevice(n_ctx=4096), settings=EngineSettings(cost=cost))
    bench.submit("x" * 600, max_tokens=5, lane="background")
    bench.ticks(2)
    bench.submit(max_tokens=60, lane="background")
    bench.ticks(14)
    assert bench.backend.kv_high_water() > 512
    assert bench.backend.lowered is (cell_s > 0)


def test_a_high_water_mark_that_cannot_fall_is_not_given_up_for_good() -> None:
    """Cells below one that is used stay free; what they cost lowers the mark once for each change."""

    class Counting(OnDevice):
        lowerings = 0

        def kv_lower_high_water(self) -> None:
            self.lowerings += 1
            super().kv_lower_high_water()

    cost = CostModel(
        Staircase((1, 512), (0.01, 0.1)), spanned_cell_s=2e-6, recapture_s=0.003, capture_s=0.004
    )
    backend = Counting(n_ctx=4096)
    bench = Bench(backend, settings=EngineSettings(cost=cost))
    bench.submit("x" * 600, max_tokens=5, lane="background")
    bench.ticks(2)
    bench.submit(max_tokens=60, lane="background")
    bench.ticks(10)
    before = backend.lowerings
    bench.ticks(40)
    assert backend.kv_high_water() - backend.kv_used() > 256
    assert 2 <= backend.lowerings - before <= 10


def test_where_no_graphs_are_captured_the_high_water_mark_is_always_lowered() -> None:
    """There a smaller cache costs nothing, and a larger one is looked through by every token."""
    bench = Bench()
    for n in range(3):
        bench.submit(max_tokens=2 + 3 * n)
    while bench.engine.tick():
        assert bench.backend.lowered


def test_a_plan_made_ahead_is_the_one_that_is_remembered_and_recorded() -> None:
    """What the policy learns is there for the tick after, and its reasons are in the record."""
    noting = Noting()
    noting.bench.submit(max_tokens=20)
    noting.bench.ticks(12)
    assert any(beside for beside, _ in noting.asked)
    recorded = noting.bench.explain(ticks=4)
    reasons = {item.reason for tick in recorded.ticks for item in tick.items}
    assert reasons == {"decode: one token each"}
    assert [tick.tick for tick in recorded.ticks] == [8, 9, 10, 11]
    assert noting.bench.engine.memory.target_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_publishing_counts_as_a_decodes_time_only_where_it_overlaps(
    kind: type[FakeBackend],
) -> None:
    """On a CPU it comes first, and is the host's: else T(n) would learn what streams cost."""

    class Slow(Sink):
        def send_nowait(self, item: StreamItem) -> None:
            """Take a second to publish."""
            now[0] += 1.0
            super().send_nowait(item)

    now = [0.0]
    bench = Bench(kind(), clock=lambda: now[0])
    bench.sink = Slow
    bench.submit("hello", 5)
    bench.run()
    middle = bench.explain(ticks=9).ticks[1:-1]
    overlaps = bench.backend.traits.overlaps
    assert {tick.decode_s > 0 for tick in middle} == {overlaps}
    assert {tick.host_s > 0 for tick in middle} == {not overlaps}


def test_a_tick_after_an_idle_time_is_learnt_without_what_passed_before_it() -> None:
    """There was no decode before it; the trace has 0 seconds, the policy hears that it is unknown."""
    seen: list[SchedulerState] = []

    def noted(state: SchedulerState) -> Plan:
        seen.append(state)
        return baseline(state)

    bench = Bench(policy=noted)
    for _ in range(2):
        bench.submit("hello", 4)
        bench.run()
    learnt = [tick.host_s for state in seen for tick in state.measured]
    assert [host_s is None for host_s in learnt] == [True, False, False, False, True, False, False]
    assert [tick.host_s for tick in bench.explain(ticks=9).ticks if tick.host_s == 0.0] == [0.0] * 2


def test_nothing_is_moved_between_the_end_of_a_prompt_and_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next decode publishes it; what was computed is saved a tick later."""
    bench = Bench(
        FakeBackend(n_ctx=4096, n_batch=64), settings=EngineSettings(prefix_bytes=1 << 24)
    )
    moved: list[int] = []

    def between_ticks(*_arguments: object) -> None:
        moved.append(len(sink.tokens))

    _, sink = bench.submit("hello", 5)
    monkeypatch.setattr(BackgroundScheduler, "between_ticks", between_ticks)
    bench.ticks(3)
    assert moved[:2] == [0, 1]
    assert len(moved) == 2  # before the prompt, and not again before its first token was there
