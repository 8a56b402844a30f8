"""The compute thread, and how it ends."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import trio
from attrs import frozen
from engine_kit import Bench, slow
from inline_kit import Wakeup, run_inline

from uma_trio.engine.inbox import EngineDied, Inbox, bury
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Finished, SamplingParams, StreamItem, Submit, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.machine.bell import Bell
from uma_trio.machine.machine import Machine as Compute
from uma_trio.machine.machine import run_machine
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.baseline import baseline
from uma_trio.policy.pipeline import Policy
from uma_trio.words import Lane
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost


@frozen
class Threaded:
    """One engine, whose outlet wakes this trio run, and the task that computes it; `deaths` are errors it died of."""

    compute: Compute
    engine: Engine
    deaths: list[EngineDied]

    @property
    def inbox(self) -> Inbox:
        """Where requests go."""
        return self.engine.inbox


def threaded(*backends: FakeBackend, policy: Policy = baseline) -> list[Threaded]:
    """Return an engine for each backend; one task computes them all."""
    bell, post = Bell(), trio.lowlevel.current_trio_token().run_sync_soon
    deaths: list[EngineDied] = []

    def died(engine: Engine, error: Exception) -> None:
        deaths.append(bury(engine, error, "it has stopped"))

    task = Compute(bell, time.monotonic, post)
    found = []
    for backend in backends:
        inbox = Inbox(16, bell=bell)
        engine = Engine(backend, policy, inbox, Outlet(post), Metrics(), time.monotonic)
        task.add(engine, partial(died, engine))
        found.append(Threaded(task, engine, deaths))
    return found


@frozen
class Line:
    """A stream that is read as it comes."""

    channel: trio.MemorySendChannel[StreamItem]

    def send_nowait(self, item: StreamItem) -> None:
        """Put it into the channel."""
        self.channel.send_nowait(item)

    def flush(self) -> None:
        """Whoever reads the channel was woken."""


def request(
    backend: FakeBackend, inbox: Inbox, n: int, *, handle: int = 1, lane: Lane = "interactive"
) -> trio.MemoryReceiveChannel[StreamItem]:
    """Submit a prompt of one word; return its stream."""
    send, receive = trio.open_memory_channel[StreamItem](n + 2)
    prompt = backend.vocabulary.tokenize("hello", add_special=True, parse_special=False)
    inbox.submit(Submit(handle, prompt, n, SamplingParams(), (), lane, 0, n, Line(send), 0.0))
    return receive


async def read(stream: trio.MemoryReceiveChannel[StreamItem]) -> list[StreamItem]:
    """Read a stream to its terminal item."""
    items: list[StreamItem] = []
    async for item in stream:
        items.append(item)
        if isinstance(item, Finished):
            break
    return items


async def test_a_stream_crosses_the_thread_whole_and_in_order() -> None:
    """What the engine's thread emits arrives on trio's, token by token."""
    backend = FakeBackend()
    (one,) = threaded(backend)
    inbox = one.inbox
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_machine, one.compute)
        items = await read(request(backend, inbox, 50))
        one.compute.close()
    tokens = [item.token_id for item in items if isinstance(item, TokenOut)]
    prompt = backend.vocabulary.tokenize("hello", add_special=True, parse_special=False)
    assert tokens == backend.continuation(prompt, 50)


async def test_who_submits_on_trios_thread_ends_the_tick_on_the_engines() -> None:
    """While the backend computes a batch job's prompt, a person comes and is served first."""
    backend = FakeBackend()
    (one,) = threaded(backend, policy=slow)
    inbox = one.inbox
    computing, came = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def meanwhile() -> None:
        if not came.is_set():
            token.run_sync_soon(computing.set)
            came.wait(10)  # so that a test that fails ends

    backend.meanwhile = meanwhile
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_machine, one.compute)
        batch = request(backend, inbox, 3, lane="background")
        await computing.wait()
        person = request(backend, inbox, 3, handle=2)
        assert backend.computed == {}
        came.set()
        assert [type(item) for item in await read(person)] == [
            type(item) for item in await read(batch)
        ]
        one.compute.close()
    assert backend.decodes == 1 + 3
    assert sum(backend.computed.values()) == 2 * (6 + 2)


async def test_closing_the_task_ends_an_idle_engine() -> None:
    """An engine with nothing to do wakes up to leave."""
    (one,) = threaded(FakeBackend())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_machine, one.compute)
        await trio.testing.wait_all_tasks_blocked()
        one.compute.close()


async def test_being_cancelled_ends_the_thread_too() -> None:
    """A cancelled daemon does not wait for an idle engine."""
    (one,) = threaded(FakeBackend())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_machine, one.compute)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert one.inbox.closed


async def test_an_engine_that_dies_tells_its_streams_and_the_others_go_on() -> None:
    """Its streams get E_RUNTIME_004; another model's whole answer comes."""
    bad, good = threaded(
        FakeBackend(faults={3: InjectedFault(died="the card fell off the bus")}), FakeBackend()
    )
    async with trio.open_nursery() as nursery:
        lost = request(FakeBackend(), bad.inbox, 50)
        whole = request(FakeBackend(), good.inbox, 50, handle=2)
        nursery.start_soon(run_machine, bad.compute)
        end, other = (await read(lost))[-1], (await read(whole))[-1]
        bad.compute.close()
    assert isinstance(end, Finished)
    assert isinstance(other, Finished)
    assert (end.code, other.reason) == ("E_RUNTIME_004", "length")
    assert "fell off the bus" in str(bad.deaths[0])


async def test_the_only_engine_that_dies_ends_no_task() -> None:
    """Whoever owns the task decides what then happens."""
    (one,) = threaded(FakeBackend(faults={3: InjectedFault(died="the card fell off the bus")}))
    async with trio.open_nursery() as nursery:
        stream = request(FakeBackend(), one.inbox, 50)
        nursery.start_soon(run_machine, one.compute)
        await read(stream)
        assert one.inbox.closed
        one.compute.close()
    assert len(one.deaths) == 1


async def test_inline_a_tick_costs_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    """Ten tokens at 20 ms and one prompt tick take what the cost model says."""
    backend = FakeBackend(cost=linear_cost(0.020, 0.0))
    wakeup = Wakeup()
    bench = Bench(backend, clock=trio.current_time, wake=wakeup.set)
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(
            run_inline, bench.engine, bench.inbox, wakeup, lambda: backend.last_cost_s
        )
        items = await read(request(backend, bench.inbox, 10))
        assert trio.current_time() - began == pytest.approx(0.2)
        end = items[-1]
        assert isinstance(end, Finished)
        assert end.ttft_s == pytest.approx(0.020)
        nursery.cancel_scope.cancel()


async def test_inline_an_engine_that_is_closed_while_it_computes_has_told_all(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """As on its own thread, what was sampled last is told before it ends."""
    backend = FakeBackend()
    wakeup = Wakeup()
    bench = Bench(backend, clock=trio.current_time, wake=wakeup.set)
    backend.meanwhile = lambda: bench.inbox.close() if backend.decodes == 5 else None
    stream = request(backend, bench.inbox, 10)
    await run_inline(bench.engine, bench.inbox, wakeup, lambda: 0.020)
    assert stream.statistics().current_buffer_used == 1 + 5  # the end of the prompt comes first
