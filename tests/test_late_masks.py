"""Rows whose masks take long: they sit out, nobody waits for them, and they lose nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread

import numpy as np
import pytest
from constraint_kit import Constraining, IdArray, Turns
from drafts_kit import Babbler, speaking
from engine_kit import KINDS, Bench, OnDevice, Sink, compute, told_to_people
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from uma_protocol import Explain, Explanation
from uma_trio.cli.explain import tick_table
from uma_trio.engine.messages import Finished, SamplingParams, StreamItem, TokenOut
from uma_trio.engine.recorder import LATE as LATE_MASK
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sampling import LATE, Mask, MaskThreads, Sampler, TickSampler
from uma_trio.engine.sampling.checking import PATIENCE_S
from uma_trio.observe.trace import traced
from uma_trio.policy.portable import TracedTick
from uma_trio.text.constraint import Constraint, UnderWay
from uma_trio_sim.fake import EOS, FakeBackend

N_VOCAB = 128


class Letters(Constraining):
    """Allows "x", "y" and "z" but never one twice in a row, and an end behind `most` of them."""

    def __init__(self, most: int = 12) -> None:
        super().__init__()
        self._most = most

    def allowed(self) -> IdArray:
        """Return what may come next."""
        if len(self.told) >= self._most:
            return np.array([EOS], np.intp)
        return np.array([t for t in b"xyz" if self.told[-1:] != [t]], np.intp)


class Scripted:
    """A mask that is there when its test says so; notes how long it was waited for."""

    def __init__(self, found: Callable[[], IdArray], *, ready: bool = False) -> None:
        self._found = found
        self.ready = ready
        self.dropped = False
        self.comes = False  # while somebody waits to be told of it
        self.waits: list[float] = []
        self._told: list[Callable[[], object]] = []

    def wait(self, seconds: float) -> bool:
        """Tell whether it is there."""
        self.waits.append(seconds)
        return self.ready

    def notify(self, there: Callable[[], object]) -> None:
        """Tell when it comes."""
        self._told.append(there)
        if self.ready or self.comes:
            self.come()

    def come(self) -> None:
        """Be there from now on."""
        self.ready, told, self._told = True, self._told, []
        for there in told:
            there()

    def ids(self) -> IdArray:
        """Return the tokens."""
        assert self.ready
        assert not self.dropped
        return self._found()

    def drop(self) -> None:
        """Note that nobody asks for it any more."""
        self.dropped = True


class ByHand:
    """Keeps the masks that are being made."""

    def __init__(self) -> None:
        self.begun: list[Scripted] = []

    def begin(self, constraint: Constraint) -> Mask:
        """Begin one that is not there until it is `ready`."""
        self.begun.append(Scripted(constraint.deferred()))
        return self.begun[-1]

    def release(self) -> None:
        """Let all be there."""
        for mask in self.begun:
            mask.ready = True


class AtRandom(ByHand):
    """Finds some masks in time, and others some ticks later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def begin(self, constraint: Constraint) -> Mask:
        """Begin one that is there half of the time."""
        mask = Scripted(constraint.deferred(), ready=self._random.random() < 0.5)
        self.begun.append(mask)
        return mask

    def some(self) -> None:
        """Let some be there."""
        for mask in self.begun:
            mask.ready |= self._random.random() < 0.4


class Awaited(Sink):
    """A stream whose end another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = Event()

    def send_nowait(self, item: StreamItem) -> None:
        """Keep it, and tell that it was the last."""
        super().send_nowait(item)
        if isinstance(item, Finished):
            self.ended.set()


def ended(sink: Sink) -> bool:
    """Wait until a stream has ended; False if it does not."""
    assert isinstance(sink, Awaited)
    return sink.ended.wait(10)


def run(bench: Bench, masks: AtRandom) -> None:
    """Tick until nothing is left to do."""
    for _ in range(3000):
        if not bench.engine.tick() and not bench.engine.registry.awaits_masks:
            bench.check_idle()
            return
        masks.some()
    raise AssertionError("still busy")


def told(sink: Sink) -> list[object]:
    """Return what a stream was told of each token."""
    return [
        (item.token_id, item.text, item.logprobs)
        for item in sink.items
        if isinstance(item, TokenOut)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_mask_is_late_sits_out_and_others_go_on(kind: type[FakeBackend]) -> None:
    """It computes nothing meanwhile; with its mask it has the tokens that it would have had."""
    masks = ByHand()
    bench = Bench(kind(), masks=masks)
    _, late = bench.submit("one", 30, constraint=Letters(), temperature=1.0, seed=4)
    _, free = bench.submit("two", 30)
    bench.ticks(8)
    bench.check_idle()
    assert late.tokens == []
    assert len(free.tokens) >= 6
    assert len(masks.begun) == 1
    masks.release()
    bench.ticks(2)
    assert len(late.tokens) == 1
    while not late.ends:
        masks.release()
        bench.ticks(1)
    assert bench.metrics.snapshot()["structured_output_total"]["late mask"] == len(masks.begun)
    bench.run()
    assert free.tokens == bench.expected("two", 30)
    alone = Bench()
    _, expected = alone.submit("one", 30, constraint=Letters(), temperature=1.0, seed=4)
    alone.run()
    assert late.tokens == expected.tokens
    assert late.end.reason == "stop"


@pytest.mark.parametrize("first", [0, 1])
def test_the_late_mask_that_comes_first_wakes_the_engine(first: int) -> None:
    """Whichever it is, its request goes on while the other one's is still made."""
    masks = ByHand()
    bench = Bench(FakeBackend(), masks=masks)
    sinks = [bench.submit(text, 30, constraint=Letters())[1] for text in ("one", "two")]
    while bench.engine.tick():
        pass
    while bench.inbox.bell.wait(0.0):
        pass
    assert bench.engine.registry.awaits_masks
    masks.begun[first].come()
    assert bench.inbox.bell.wait(0.0)
    bench.ticks(2)
    assert [bool(sink.tokens) for sink in sinks] == [n == first for n in range(2)]
    bench.cancel(1)
    bench.cancel(2)
    bench.run()
    assert not bench.engine.registry.awaits_masks


def test_an_engine_that_waits_for_masks_hears_of_each_and_of_messages() -> None:
    """One that is not made until another request has ended holds up nothing but its own."""
    may = Event()
    bench = Bench(FakeBackend(), masks=MaskThreads())
    bench.sink = Awaited
    _, slow = bench.submit("one", 30, constraint=Blocked(may))
    _, quick = bench.submit("two", 30, constraint=Letters())
    engine = Thread(target=compute, args=(bench.engine, bench.clock), daemon=True)
    engine.start()
    assert ended(quick)
    assert not slow.tokens
    _, free = bench.submit("three", 5)
    assert ended(free)
    assert not slow.tokens
    may.set()
    assert ended(slow)
    bench.inbox.close()
    engine.join(10)
    assert not engine.is_alive()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_whatever_masks_are_late_the_answers_are_the_same(
    kind: type[FakeBackend], temperature: float, seed: int
) -> None:
    """Drawn with their own numbers, with the same logprobs; and every request ends once."""
    masks = AtRandom(seed)
    late, calm = Bench(kind(), masks=masks), Bench(kind())
    streams = []
    for bench in (late, calm):
        for n in range(4):
            streams.append(
                bench.submit(
                    f"request {n}",
                    25,
                    constraint=Letters(8 + n) if n % 2 else None,
                    temperature=temperature,
                    seed=n,
                    logprobs=2,
                )[1]
            )
    run(late, masks)
    calm.run()
    assert [told(sink) for sink in streams[:4]] == [told(sink) for sink in streams[4:]]
    assert [sink.end.reason for sink in streams[:4]] == [sink.end.reason for sink in streams[4:]]


class Elsewhere(Letters):
    """The same, which another process knows: nobody may ask it about one token."""

    elsewhere = True
    problem = None

    def allows(self, token: int) -> bool:
        """Fail: the engine would wait."""
        raise AssertionError(token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_what_another_process_knows_gives_the_same_answers(
    kind: type[FakeBackend], temperature: float, seed: int
) -> None:
    """Whenever its masks come: a token that is allowed stays, and has used the same numbers."""
    masks = AtRandom(seed)
    apart, here = Bench(kind(), masks=masks), Bench(kind())
    found = []
    for bench, constraint in ((apart, Elsewhere), (here, Letters)):
        sinks = [
            bench.submit(
                f"request {n}",
                25,
                constraint=constraint(8 + n),
                temperature=temperature,
                seed=n,
                logprobs=2,
            )[1]
            for n in range(3)
        ]
        if bench is apart:
            run(bench, masks)
        else:
            bench.run()
        found.append([(told(sink), sink.end.reason) for sink in sinks])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_another_process_finds_is_begun_once_for_each_token(
    kind: type[FakeBackend],
) -> None:
    """During the decode, on any backend: the other process has a core of its own."""
    masks = ByHand()
    masks.begin = lambda constraint: _begun(masks, constraint)  # type: ignore[method-assign]
    bench = Bench(kind(), masks=masks)
    _, sink = bench.submit("one", 10, constraint=Elsewhere(20))
    bench.run()
    assert len(sink.tokens) == 10
    assert 10 <= len(masks.begun) <= 11


def _begun(masks: ByHand, constraint: Constraint) -> Mask:
    masks.begun.append(Scripted(constraint.deferred(), ready=True))
    return masks.begun[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_late_masks_behind_right_guesses_change_nothing(temperature: float, seed: int) -> None:
    """What was guessed right before them is given at once."""
    masks = AtRandom(seed)
    found = []
    for bench in (
        speaking(drafts=True, kind=Babbler, masks=masks),
        speaking(drafts=False, kind=Babbler),
    ):
        sinks = [
            bench.submit(
                "abba baba abba baba ab" + "ab"[n % 2] * n,
                40,
                constraint=Turns(30),
                temperature=temperature,
                seed=n,
            )[1]
            for n in range(3)
        ]
        run(bench, masks)
        found.append([told(sink) for sink in sinks])
    assert found[0] == found[1]


def test_the_wait_for_a_mask_is_a_part_of_a_requests_time() -> None:
    """While it lasts, too; at the end the parts add up."""
    masks = ByHand()
    bench = Bench(masks=masks)
    late, sink = bench.submit("one", 30, constraint=Letters(), temperature=1.0, seed=4)
    bench.submit("two", 30)
    bench.ticks(8)
    assert bench.explain(late).requests[0].mask_s > 0.01
    while not sink.ends:
        masks.release()
        bench.ticks(1)
    (record,) = bench.explain(late).requests
    spent = [record.prefill, record.decode]
    parts = sum(one.computing_s + one.waiting_s for one in spent) + record.mask_s + record.aside_s
    assert record.admitted is not None
    assert record.ended is not None
    assert parts == pytest.approx(record.ended - record.admitted, abs=0.01)


def test_a_late_mask_is_told_to_people_and_in_traces() -> None:
    """A token that is computed again counts once, and unknown guesses are not taken for wrong ones."""
    traces: list[TracedTick] = []
    recorder = Recorder(
        lambda state, plan, record: traces.append(traced(state, plan, record)), ticks=10_000
    )
    masks = AtRandom(2)
    bench = speaking(drafts=True, kind=Babbler, masks=masks, recorder=recorder)
    handle, sink = bench.submit(
        "abba baba abba baba abab", 60, constraint=Turns(100), temperature=1.0, seed=1
    )
    run(bench, masks)
    recorded = bench.explain(handle, ticks=10_000)
    late = [tick for tick in recorded.ticks if tick.late]
    n_late = bench.metrics.snapshot()["structured_output_total"]["late mask"]
    assert len(late) == n_late > 5
    behind = [one for tick in late for one in tick.drafted if one.right < one.n]
    assert behind, "some guesses stand behind a late mask"
    (request,) = recorded.requests
    assert request.decode.tokens + request.prefill.tokens == request.prompt_tokens + 59
    assert (
        sum(spent.skipped.get(LATE_MASK, 0) for spent in (request.prefill, request.decode))
        == n_late
    )
    shown = told_to_people(Explain(handle, ticks=10_000), recorded)
    assert isinstance(shown, Explanation)
    whys = [tick_table([tick], handle)[0]["WHY"] for tick in shown.ticks]
    assert sum("its next token waits: a mask was late" in why for why in whys) == n_late
    assert sum(tick.gave(handle) for tick in traces) == len(sink.tokens) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_can_be_cancelled_while_its_mask_is_made(kind: type[FakeBackend]) -> None:
    """Its slot is free at once, and the mask is nobody's."""
    masks = ByHand()
    bench = Bench(kind(n_slots=1), masks=masks)
    handle, late = bench.submit("one", 30, constraint=Letters())
    _, waits = bench.submit("two", 5)
    bench.ticks(3)
    bench.cancel(handle)
    bench.ticks(3)
    assert late.end.reason == "cancelled"
    masks.release()
    bench.run()
    assert waits.tokens == bench.expected("two", 5)


def test_where_nothing_can_be_computed_again_the_tick_waits() -> None:
    """A recurrent model cannot go back by one token."""
    masks = ByHand()
    bench = Bench(FakeBackend(can_remove_part=False), masks=masks)
    _, one = bench.submit("one", 30, constraint=Letters())
    _, two = bench.submit("two", 5)
    bench.run()
    assert masks.begun == []
    assert len(one.tokens) == 12
    assert two.tokens == bench.expected("two", 5)


class Noting:
    """Finds masks at once, and notes whether a decode was running."""

    def __init__(self, backend: OnDevice) -> None:
        self._backend = backend
        self.computing: list[bool] = []

    def begin(self, constraint: Constraint) -> Mask:
        """Find it."""
        self.computing.append(self._backend.computing)
        return Scripted(constraint.deferred(), ready=True)


def test_where_the_host_is_free_masks_that_may_be_needed_are_begun_during_the_decode() -> None:
    """That is where one of the latest draws was refused; no decode ends before they are begun."""
    backend = OnDevice()
    masks = Noting(backend)
    bench = Bench(backend, masks=masks)
    _, refused = bench.submit("one", 12, constraint=Letters())
    bench.submit("two", 12, constraint=Turns(0))
    bench.run()
    assert len(refused.tokens) == 12
    assert masks.computing.count(False) == 2  # the first of each
    assert masks.computing.count(True) == len(masks.computing) - 2 >= 11


def rows(n: int) -> NDArray[np.float32]:
    """Return `n` rows of logits that want token 1."""
    logits = np.zeros((n, N_VOCAB), np.float32)
    logits[:, 1] = 1.0
    return logits


def bound(n: int) -> list[Sampler]:
    """Return samplers of rows that may not have it."""
    return [Sampler(SamplingParams(), (), constraint=Letters()) for _ in range(n)]


def test_masks_are_waited_for_together_no_longer_than_the_bound() -> None:
    """However many rows need one."""
    masks = ByHand()
    tokens = TickSampler([*bound(4), Sampler(SamplingParams(), ())], N_VOCAB, masks)(rows(5)).tokens
    assert tokens == [LATE] * 4 + [1]
    assert sum(max(mask.waits) for mask in masks.begun) <= 4 * PATIENCE_S
    assert all(wait <= PATIENCE_S for mask in masks.begun for wait in mask.waits)


@pytest.mark.parametrize("first", [0, 1])
def test_where_no_row_has_its_token_the_mask_that_comes_first_is_waited_for_longer(
    first: int,
) -> None:
    """Nobody gains by an empty tick."""
    masks = ByHand()
    samplers = bound(2)
    for sampler in samplers:
        sampler.mask(masks, 0)
    masks.begun[first].comes = True
    found = [LATE, LATE]
    found[first] = ord("x")
    assert TickSampler(samplers, N_VOCAB, masks)(rows(2)).tokens == found
    masks = ByHand()
    samplers = bound(2)
    for sampler in samplers:
        sampler.mask(masks, 0)
    masks.begun[first].comes = True
    chosen = TickSampler([*samplers, Sampler(SamplingParams(), ())], N_VOCAB, masks)(rows(3))
    assert chosen.tokens == [LATE, LATE, 1]


def test_a_late_row_is_drawn_again_with_the_number_that_it_had() -> None:
    """The first draw of each token decides as if its mask had been there at once."""
    answers = []
    for masks in (ByHand(), AtRandom(1)):
        params = SamplingParams(1.0, seed=3)
        sampler = Sampler(params, (), constraint=Letters(most=100))
        choice, tokens = TickSampler([sampler], N_VOCAB, masks), []
        for n in range(60):
            row = np.random.default_rng(n).standard_normal((1, N_VOCAB)).astype(np.float32)
            row[0, list(b"xyz")] += 4.0
            while (token := choice(row).tokens[0]) == LATE:
                sampler.given(0)
                masks.release()
            sampler.given(1)
            sampler.accept(token)
            tokens.append(token)
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3


class Blocked(Letters):
    """Its masks take until `may` is set."""

    def __init__(self, may: Event, error: Exception | None = None) -> None:
        super().__init__()
        self._may, self._error = may, error

    def deferred(self) -> Callable[[], IdArray]:
        """Return what waits."""

        def find() -> IdArray:
            self._may.wait(10)
            if self._error is not None:
                raise self._error
            return np.array([7, 9], np.intp)

        return find


def test_threads_find_masks_while_others_go_on() -> None:
    """One that takes long is no other one's business."""
    may, threads = Event(), MaskThreads()
    slow = threads.begin(Blocked(may))
    assert not slow.wait(0.0)
    may.set()
    assert slow.wait(10)
    assert slow.ids().tolist() == [7, 9]


def test_a_mask_that_is_under_way_takes_no_thread() -> None:
    """However many others are; it is there when its future is."""
    may, threads = Event(), MaskThreads()
    future: Future[IdArray] = Future()

    class Asked(Letters):
        def deferred(self) -> Callable[[], IdArray]:
            return UnderWay(future)

    busy = [threads.begin(Blocked(may)) for _ in range(4)]
    mask = threads.begin(Asked())
    assert not mask.wait(0.0)
    future.set_result(np.array([3], np.intp))
    assert mask.wait(0.0)
    assert mask.ids().tolist() == [3]
    assert not any(other.wait(0.0) for other in busy)
    may.set()


def test_a_mask_that_nobody_asks_for_any_more_is_not_made() -> None:
    """Requests that have ended, and tokens that needed none, hold nobody up."""
    may, asked, threads = Event(), Event(), MaskThreads()

    class Noted(Letters):
        def deferred(self) -> Callable[[], IdArray]:
            def find() -> IdArray:
                asked.set()
                return self.allowed()

            return find

    busy = [threads.begin(Blocked(may)) for _ in range(4)]
    dropped = threads.begin(Noted())
    dropped.drop()
    behind = threads.begin(Letters())
    may.set()
    assert all(mask.wait(10) for mask in (*busy, behind))
    assert not asked.is_set()


def test_a_request_that_is_cancelled_drops_its_mask() -> None:
    """Whether it ever came or not."""
    masks = ByHand()
    bench = Bench(FakeBackend(), masks=masks)
    handle, _ = bench.submit("one", 30, constraint=Letters())
    bench.ticks(8)
    assert [mask.dropped for mask in masks.begun] == [False]
    bench.cancel(handle)
    bench.ticks(1)
    assert [mask.dropped for mask in masks.begun] == [True]


def test_a_mask_that_was_made_in_vain_is_dropped_with_its_token() -> None:
    """What was likely enough to be refused was allowed."""
    masks, sampler = ByHand(), Sampler(SamplingParams(), (), constraint=Letters())
    sampler.mask(masks, 0)
    sampler.accept(ord("x"))
    assert [mask.dropped for mask in masks.begun] == [True]


def test_a_mask_that_cannot_be_found_allows_nothing() -> None:
    """So the request ends with its code; the thread goes on."""
    may, threads = Event(), MaskThreads()
    may.set()
    for error in (ArithmeticError(), MemoryError()):
        broken = threads.begin(Blocked(may, error))
        assert broken.wait(10)
        assert broken.ids().tolist() == []
