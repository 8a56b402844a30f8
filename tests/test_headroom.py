"""The load of a machine for routers: headroom, the reading that is shared, and HAProxy's agent."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve
from engine_kit import Bench
from net_kit import LogBook
from trio.testing import MockClock

from uma_trio.engine.messages import Snapshot
from uma_trio.observe.figures import Outlook, Promise, prompt_rate
from uma_trio.observe.metrics import Metrics
from uma_trio.service.agent import MAX_CLIENTS, Agent, line_of
from uma_trio.service.load import (
    FRESH_S,
    HALVING_S,
    PATIENCE_S,
    SILENT_S,
    LoadMonitor,
    LoadReading,
    NodeLoad,
    headroom,
    load_of,
)
from uma_trio_sim.fake import FakeBackend

IDLE = NodeLoad(slots=7, cells_total=1000)


def test_an_idle_machine_has_all_of_its_headroom() -> None:
    """Nothing that was measured of requests which have ended counts."""
    assert headroom(IDLE) == 1.0
    seen = Bench().snapshot()
    old = Outlook(shown_ratio_p95=9.0, latency_cap=1.5, moved_ratio=3.0, prompt_tokens_per_s=10)
    assert headroom(load_of(seen, old, 4)) == 1.0


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (evolve(IDLE, running=3, waiting=1), 0.5),
        (evolve(IDLE, running=7, waiting=90), 0.0),
        (evolve(IDLE, cells_reserved=750), 0.25),
        (evolve(IDLE, running=2, cells_reserved=750), 0.25),
        (evolve(IDLE, backlog_s=HALVING_S), 0.5),
        (evolve(IDLE, shown_ratio=1.0, latency_cap=1.5), 1.0),
        (evolve(IDLE, shown_ratio=1.5, latency_cap=1.5), 0.5),
        (evolve(IDLE, shown_ratio=9.0, latency_cap=1.5), 0.1),
        (evolve(IDLE, shown_ratio=9.0, latency_cap=None), 1.0),
        (evolve(IDLE, moved_ratio=0.9), 1.0),
        (evolve(IDLE, moved_ratio=2.0), 0.5),
        (evolve(IDLE, running=4, backlog_s=HALVING_S), 0.25),
    ],
)
def test_headroom_is_the_product_of_what_is_left(load: NodeLoad, expected: float) -> None:
    """Slots or cells, the backlog, what readers see, and the bytes moved."""
    assert headroom(load) == pytest.approx(expected)


def test_the_backlog_is_what_is_left_of_all_prompts() -> None:
    """Those that are computed and those that wait, at the rate of prompts."""
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("x" * 20, 20)
    bench.ticks(3)
    bench.submit("y" * 30, 20)
    bench.ticks(1)
    seen = bench.snapshot()
    left = sum(max(0, one.prompt_tokens - one.computed_tokens) for one in seen.requests)
    assert left >= 30
    load = load_of(seen, Outlook(prompt_tokens_per_s=10.0), 1)
    assert load.backlog_s == pytest.approx(left / 10)
    assert (load.running, load.waiting) == (1, 1)
    more = evolve(seen, waiting=3)  # of which the snapshot describes one
    assert load_of(more, Outlook(prompt_tokens_per_s=10.0), 1).backlog_s > load.backlog_s
    assert load_of(seen, Outlook(), 1).backlog_s == 0.0, "nobody knows the rate"


def test_the_rate_of_prompts_is_that_of_the_best_batch() -> None:
    """By the cost table, scaled; nothing is known of an empty one."""
    assert prompt_rate({1: 0.01, 64: 0.1, 512: 1.0}, 2.0) == pytest.approx(320)
    assert prompt_rate({}, 1.0) is None


def test_the_outlook_is_what_the_metrics_say() -> None:
    """The same figures as in the catalogue, without all the others."""
    metrics = Metrics()
    assert metrics.outlook() == Outlook()
    metrics.promised(
        Promise(limit_s=0.1, solo_s=0.01, predicted_s=0.02, moved_bytes=30.0, bmt_budget=1000.0),
        0.02,
    )
    metrics.shown(0.03, "interactive")
    outlook = metrics.outlook()
    assert outlook.shown_ratio_p95 == metrics.snapshot()["shown_ratio_p95"] == pytest.approx(3.0)
    assert outlook.moved_ratio == pytest.approx(1.5)


class Engine:
    """Answers questions after `takes_s`."""

    def __init__(self) -> None:
        self.takes_s = 0.0
        self.asked = 0
        self.newest: Snapshot | None = None
        self.pulse = LoadMonitor(self.fresh, lambda: self.newest, Outlook, 4)

    async def fresh(self) -> Snapshot:
        """Answer, as late as told."""
        self.asked += 1
        await trio.sleep(self.takes_s)
        self.newest = Bench().snapshot()
        return self.newest


async def test_many_routers_cost_four_questions_a_second(autojump_clock: MockClock) -> None:
    """A reading is given again until it is a quarter of a second old."""
    engine = Engine()
    for _ in range(100):
        await engine.pulse.read()
        await trio.sleep(0.01)
    assert engine.asked <= 1 / FRESH_S + 1


async def test_a_router_waits_for_no_tick(autojump_clock: MockClock) -> None:
    """It gets the reading before; when the engine is silent for long, it hangs."""
    engine = Engine()
    assert not (await engine.pulse.read()).hangs
    await trio.sleep(1)
    engine.takes_s = 1e9
    began = trio.current_time()
    reading = await engine.pulse.read()
    assert trio.current_time() - began == pytest.approx(PATIENCE_S)
    assert reading.headroom == 1.0
    assert not reading.hangs
    await trio.sleep(SILENT_S)
    assert (await engine.pulse.read()).hangs
    engine.newest = Bench().snapshot()  # the answer to an earlier question
    assert not (await engine.pulse.read()).hangs


def test_the_agent_says_what_haproxy_understands() -> None:
    """One of `up ready` with a weight, `drain` and `down`; a weight is never 0, which would drain."""
    half = LoadReading(evolve(IDLE, running=4))
    assert line_of(half, draining=False) == "up ready 75%"
    assert line_of(LoadReading(evolve(IDLE, backlog_s=1e9)), draining=False) == "up ready 1%"
    assert line_of(half, draining=True) == "drain"
    assert line_of(None, draining=False).startswith("down #")
    hung = line_of(LoadReading(IDLE, silent_s=SILENT_S), draining=False)
    assert hung == "down #the engine has not answered for 30 s"


async def test_the_agent_answers_each_client_and_can_pause() -> None:
    """A paused one leaves clients in the backlog for the daemon that takes over."""

    async def read() -> LoadReading:
        return LoadReading(IDLE)

    agent = Agent(read, lambda: False, LogBook())
    sock = trio.socket.socket()
    await sock.bind(("127.0.0.1", 0))
    sock.listen(64)
    port = sock.getsockname()[1]

    async def ask() -> bytes:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            return b"".join([data async for data in stream])

    with trio.fail_after(10), sock:
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.serve, sock._sock)
            assert await ask() == b"up ready 100%\n"
            assert await ask() == b"up ready 100%\n"
            agent.pause_accepting()
            waiting = await trio.open_tcp_stream("127.0.0.1", port)
            agent.resume_accepting()
            assert await waiting.receive_some() == b"up ready 100%\n"
            await waiting.aclose()
            silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(MAX_CLIENTS + 1)]
            for stream in silent:
                await stream.aclose()
            assert await ask() == b"up ready 100%\n", "who leaves gives its place back"
            nursery.cancel_scope.cancel()
