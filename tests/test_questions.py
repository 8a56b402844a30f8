"""Questions take turns and a bounded part of trio's thread, however many are asked."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio
from http_kit import http_house
from net_kit import house
from trio.testing import MockClock

from uma_protocol import Eos, Explain, Explanation, Generate, GetMetrics
from uma_trio.observe import explain
from uma_trio.service.loop import MAX_PAUSE_S, MIN_QUESTION_S, QUESTION_PAUSE, Questions
from uma_trio.sockets.principal import Principal

WORK_S = 0.01


def made(clock: MockClock, told: list[str], name: str) -> Callable[[], Coroutine[Any, Any, str]]:
    """Return a question that takes `WORK_S` of the thread and is noted in `told`."""

    async def make() -> str:
        clock.jump(WORK_S)
        told.append(name)
        return name

    return make


async def flood(
    questions: Questions, clock: MockClock, names: list[str]
) -> tuple[list[str], float]:
    """Ask all at once, as whom the first letter says; return the order and the seconds."""
    told: list[str] = []
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(questions.answer, name[0], made(clock, told, name))
            await trio.testing.wait_all_tasks_blocked()
    return told, trio.current_time() - began


@pytest.mark.parametrize("busy", [True, False])
async def test_a_flood_gets_one_part_in_twenty(autojump_clock: MockClock, busy: bool) -> None:
    """While requests run there is a pause of 19 times the work behind each answer; else there is none."""
    questions = Questions(trio.current_time, lambda: busy)
    n = 40
    told, seconds = await flood(questions, autojump_clock, ["a"] * n)
    assert len(told) == n
    each = WORK_S + QUESTION_PAUSE * (WORK_S + MIN_QUESTION_S) if busy else WORK_S
    assert seconds == pytest.approx(WORK_S + (n - 1) * each, rel=0.1)


async def test_principals_take_turns(autojump_clock: MockClock) -> None:
    """One question of b's is answered after three of a's thirty, which came before."""
    names = [f"a{n}" for n in range(30)] + ["b"]
    told, _ = await flood(Questions(trio.current_time, lambda: True), autojump_clock, names)
    assert sorted(told) == sorted(names)
    assert told.index("b") <= 3
    assert [name for name in told if name != "b"] == names[:-1]


async def test_waiting_for_the_engine_delays_no_other_question(autojump_clock: MockClock) -> None:
    """A question whose answer does not come neither holds the turn nor is charged for its wait."""
    questions = Questions(trio.current_time, lambda: True)
    told: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(questions.answer, "a", trio.sleep_forever)
        await trio.sleep(10)
        began = trio.current_time()
        await questions.answer("a", made(autojump_clock, told, "a"))
        assert trio.current_time() - began == pytest.approx(WORK_S)
        nursery.cancel_scope.cancel()


async def test_who_leaves_holds_nobody_up(autojump_clock: MockClock) -> None:
    """Cancelled at the head of the queue, in it, or when just called: the next one has its turn."""
    questions = Questions(trio.current_time, lambda: True)
    told: list[str] = []
    for patience in (0.0, 0.05, QUESTION_PAUSE * WORK_S, 0.5):
        async with trio.open_nursery() as nursery:
            for asker in "aab":
                with trio.move_on_after(0):
                    await questions.answer(asker, made(autojump_clock, told, asker))

            async def leaves(patience: float = patience) -> None:
                with trio.move_on_after(patience):
                    await questions.answer("c", made(autojump_clock, told, "c"))

            for _ in range(3):
                nursery.start_soon(leaves)
        with trio.fail_after(4 * MAX_PAUSE_S):
            await questions.answer("d", made(autojump_clock, told, "d"))
    assert told.count("d") == 4


async def test_what_a_question_raises_is_raised(autojump_clock: MockClock) -> None:
    """And the next question is answered."""
    questions = Questions(trio.current_time, lambda: True)

    async def fails() -> None:
        await trio.sleep(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await questions.answer("a", fails)
    assert await questions.answer("a", made(autojump_clock, [], "a")) == "a"


async def test_the_socket_s_questions_take_turns(autojump_clock: MockClock) -> None:
    """Every question that is answered with figures or lists passes the queue."""
    async with house() as daemon:
        asked: list[str] = []
        answer = daemon.service.questions.answer

        async def noted(asker: str, make: Any) -> Any:
            asked.append(asker)
            return await answer(asker, make)

        daemon.service.questions.answer = noted  # type: ignore[method-assign]
        client = daemon.connect()
        await client.send(Explain())
        assert isinstance(await client.next(), Explanation)
        await client.send(GetMetrics())
        await client.next()
        assert len(asked) == 2


@pytest.mark.parametrize("path", ["/metrics", "/slots", "/v1/models", "/props", "/health"])
async def test_what_is_asked_by_http_takes_turns(autojump_clock: MockClock, path: str) -> None:
    """Every GET passes the queue, each under its principal; a request for an answer does not."""
    async with http_house() as daemon:
        asked: list[str] = []
        questions = daemon.inner.service.questions
        answer = questions.answer

        async def noted(asker: str, make: Any) -> Any:
            asked.append(asker)
            return await answer(asker, make)

        questions.answer = noted  # type: ignore[method-assign]
        found = await daemon.ask("POST", "/completion", {"prompt": "a", "n_predict": 1})
        assert (found.status, asked) == (200, [])
        for uid in (1001, 1002):
            daemon.peer = Principal(connection=0, uid=uid)
            assert (await daemon.ask("GET", path)).status == 200
        assert len(set(asked)) == len(asked) == 2


async def test_a_flood_of_gets_leaves_readers_their_turn(autojump_clock: MockClock) -> None:
    """While a request runs, a hundred of one user's delay another user's by one or two pauses."""
    async with http_house() as daemon:
        await daemon.connect().send("POST", "/completion", {"prompt": "a", "n_predict": 900})
        await trio.sleep(1)
        ended: list[str] = []

        async def ask(name: str, uid: int) -> None:
            daemon.peer = Principal(connection=0, uid=uid)
            client = daemon.connect()
            assert (await client.ask("GET", "/health")).status == 200
            ended.append(name)

        async with trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(ask, f"a{n}", 1001)
            nursery.start_soon(ask, "b", 1002)
        assert len(ended) == 51
        assert ended.index("b") <= 3


async def test_an_explanation_is_made_in_slices(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than so many ticks are put into words before other tasks run."""
    made_at_once, most = 0, 0
    tick = explain._tick

    def counted(*given: Any) -> Any:
        nonlocal made_at_once, most
        made_at_once += 1
        most = max(most, made_at_once)
        return tick(*given)

    async def between(stop: trio.Event) -> None:
        nonlocal made_at_once
        while not stop.is_set():
            made_at_once = 0
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(explain, "_tick", counted)
    async with house() as daemon:
        client = daemon.connect()
        await client.send(Generate(id="g", prompt="hello", max_tokens=100))
        await client.until(Eos)
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(between, stop)
            await client.send(Explain(ticks=100))
            told = await client.next()
            stop.set()
    assert isinstance(told, Explanation)
    assert len(told.ticks) > 3 * explain._AT_ONCE
    assert most <= 2 * explain._AT_ONCE
