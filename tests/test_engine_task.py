"""The compute task: a real thread, and how it ends."""

from __future__ import annotations

import threading
import time

import pytest
import trio
from attrs import frozen
from engine_kit import Bench, slow
from inline_kit import Wakeup, run_inline

from uma_trio.backend.fake import FakeBackend, Fault, linear_cost
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Finished, SamplingParams, StreamItem, Submit, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.task import EngineDied, run_engine
from uma_trio.policy.baseline import baseline
from uma_trio.policy.pipeline import Policy
from uma_trio.telemetry.metrics import Metrics
from uma_trio.words import Lane


def threaded(backend: FakeBackend, policy: Policy = baseline) -> tuple[Engine, Inbox]:
    """Return an engine whose outlet wakes this trio run."""
    inbox = Inbox(16)
    token = trio.lowlevel.current_trio_token()
    outlet = Outlet(token.run_sync_soon)
    return Engine(backend, policy, inbox, outlet, Metrics(), time.monotonic), inbox


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
    engine, inbox = threaded(backend)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, engine, inbox)
        items = await read(request(backend, inbox, 50))
        inbox.close()
    tokens = [item.token_id for item in items if isinstance(item, TokenOut)]
    prompt = backend.vocabulary.tokenize("hello", add_special=True, parse_special=False)
    assert tokens == backend.continuation(prompt, 50)


async def test_who_submits_on_trios_thread_ends_the_tick_on_the_engines() -> None:
    """While the backend computes a batch job's prompt, a person comes and is served first."""
    backend = FakeBackend()
    engine, inbox = threaded(backend, slow)
    computing, came = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def meanwhile() -> None:
        if not came.is_set():
            token.run_sync_soon(computing.set)
            came.wait(10)  # so that a test that fails ends

    backend.meanwhile = meanwhile
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, engine, inbox)
        batch = request(backend, inbox, 3, lane="background")
        await computing.wait()
        person = request(backend, inbox, 3, handle=2)
        assert backend.computed == {}
        came.set()
        assert [type(item) for item in await read(person)] == [
            type(item) for item in await read(batch)
        ]
        inbox.close()
    assert backend.decodes == 1 + 3
    assert sum(backend.computed.values()) == 2 * (6 + 2)


async def test_closing_the_inbox_ends_an_idle_engine() -> None:
    """An engine with nothing to do wakes up to leave."""
    engine, inbox = threaded(FakeBackend())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, engine, inbox)
        await trio.testing.wait_all_tasks_blocked()
        inbox.close()


async def test_being_cancelled_ends_the_thread_too() -> None:
    """A cancelled daemon does not wait for an idle engine."""
    engine, inbox = threaded(FakeBackend())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, engine, inbox)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert inbox.closed


async def test_a_dead_worker_tells_every_stream_and_then_the_nursery() -> None:
    """Streams get E_RUNTIME_004 before the daemon learns of it."""
    backend = FakeBackend(faults={3: Fault(died="the card fell off the bus")})
    engine, inbox = threaded(backend)
    stream = request(backend, inbox, 50)
    with pytest.raises(EngineDied, match="fell off the bus"):
        await run_engine(engine, inbox)
    end = (await read(stream))[-1]
    assert isinstance(end, Finished)
    assert end.code == "E_RUNTIME_004"


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
