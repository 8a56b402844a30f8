"""Who may have a shape compiled when: nobody waits for one client's shapes but that client."""

from __future__ import annotations

import threading

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from uma_trio.service.fair import (
    COMPILE_S,
    QUEUE_S,
    FairPlaces,
    UserProgram,
    in_fair_threads,
    in_threads,
    program_of,
    set_client,
)
from uma_trio.sockets.principal import Principal
from uma_trio.text.shape import NotChecked, Unconstrainable, waits_until


def by(user: str, program: str = "one") -> UserProgram:
    """Return somebody."""
    return UserProgram(user, program)


async def test_a_user_of_many_names_leaves_a_place_to_the_others() -> None:
    """What a program calls itself gives it no more than its user's share."""
    places = FairPlaces(4)
    for name in ("a", "b", "c"):
        await places.acquire(by("greedy", name))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(places.acquire, by("greedy", "d"))
        await wait_all_tasks_blocked()
        await places.acquire(by("other"))
        places.release(by("greedy", "a"))


async def test_one_client_has_one_place_and_the_others_theirs() -> None:
    """However many requests it sends first."""
    places, had = FairPlaces(2), list[str]()

    async def want(client: str) -> None:
        await places.acquire(by(client))
        had.append(client)

    async with trio.open_nursery() as nursery:
        for client in ("greedy", "greedy", "greedy", "other", "third"):
            nursery.start_soon(want, client)
            await wait_all_tasks_blocked()
        assert had == ["greedy", "other"]
        places.release(by("greedy"))
        await wait_all_tasks_blocked()
        assert had == ["greedy", "other", "greedy"]
        places.release(by("other"))
        await wait_all_tasks_blocked()
        assert had[3:] == ["third"]
        places.release(by("greedy"))
        places.release(by("third"))


async def test_a_place_that_is_granted_to_who_leaves_is_free_again() -> None:
    """A request is cancelled and a place becomes free before its task runs again."""
    places = FairPlaces(1)
    await places.acquire(by("holder"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(places.acquire, by("leaves"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        places.release(by("holder"))
    with trio.fail_after(60):
        await places.acquire(by("next"))


async def test_who_waits_is_served_in_turn() -> None:
    """A client that has had its turn is behind those who wait."""
    places, had = FairPlaces(1), list[str]()
    await places.acquire(by("holder"))

    async def want(client: str) -> None:
        await places.acquire(by(client))
        had.append(client)
        await trio.lowlevel.checkpoint()
        places.release(by(client))

    async with trio.open_nursery() as nursery:
        for client in ("a", "a", "a", "b", "b", "c"):
            nursery.start_soon(want, client)
            await wait_all_tasks_blocked()
        places.release(by("holder"))
    assert had == ["a", "b", "c", "a", "b", "a"]
    await places.acquire(by("later"))


async def test_who_gives_up_takes_no_place(autojump_clock: MockClock) -> None:
    """Neither while it waits nor before; whoever waits behind it is served."""
    places = FairPlaces(1)
    await places.acquire(by("holder"))
    with trio.move_on_after(1):
        await places.acquire(by("a"))
    with trio.move_on_after(0):
        await places.acquire(by("a"))
    places.release(by("holder"))
    with trio.fail_after(1):
        await places.acquire(by("c"))


async def test_a_thread_that_was_given_up_keeps_its_place_and_begins_nothing() -> None:
    """Until it ends; what it would wait for next is over."""
    run = in_fair_threads(FairPlaces(1))
    begun, go_on, patience = threading.Event(), threading.Event(), list[float]()

    def slow() -> None:
        begun.set()
        go_on.wait(60)
        patience.append(waits_until())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, slow, by("a"))
        await trio.to_thread.run_sync(begun.wait, 60)
        nursery.cancel_scope.cancel()
    go_on.set()
    assert await run(lambda: 7, by("b")) == 7
    assert patience == [0.0]


async def test_the_time_of_a_request_begins_when_it_has_its_place(
    autojump_clock: MockClock,
) -> None:
    """Not when it begins to wait for it: others' shapes would be held against its own."""
    places, done = FairPlaces(1), list[int]()
    run = in_fair_threads(places)

    async def ask() -> None:
        done.append(await run(lambda: 7, by("a")))

    await places.acquire(by("holder"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(COMPILE_S * 2)
        autojump_clock.autojump_threshold = 3600.0  # a thread takes real time
        places.release(by("holder"))
    assert done == [7]


async def test_who_waits_too_long_for_a_place_is_told_so(autojump_clock: MockClock) -> None:
    """It is no fault of its shape, and is not called one; its place in the queue is free."""
    places = FairPlaces(1)
    await places.acquire(by("holder"))
    run = in_fair_threads(places)
    with pytest.raises(NotChecked, match=r"waited 60 s behind other compilations; try again"):
        await run(lambda: 7, by("a"))
    assert trio.current_time() == pytest.approx(QUEUE_S)
    places.release(by("holder"))
    await places.acquire(by("next"))


async def test_what_takes_too_long_in_its_place_is_told_so(autojump_clock: MockClock) -> None:
    """Its thread goes on by itself, and keeps the place until it ends."""
    places, go_on = FairPlaces(1), threading.Event()
    try:
        with pytest.raises(Unconstrainable, match=r"takes longer than 10 s.*simplify") as caught:
            await in_fair_threads(places)(go_on.wait, by("a"))
    finally:
        go_on.set()
    assert not isinstance(caught.value, NotChecked)


async def test_what_a_compiler_raises_reaches_who_asked() -> None:
    """And the place is free again."""
    run = in_fair_threads(FairPlaces(1))

    def fail() -> None:
        raise ArithmeticError

    for _ in range(3):
        with pytest.raises(ArithmeticError):
            await run(fail, by("a"))


def test_connections_of_unknown_users_are_one_client() -> None:
    """A client that closes at once is not known, and would otherwise be a user for each connection."""
    first, second = (Principal(connection=n, host="127.0.0.1") for n in (1, 2))
    assert program_of(first, None) == program_of(second, None)
    assert program_of(first, None).user != program_of(Principal(connection=3, uid=1000), None).user


async def test_a_flood_of_one_user_leaves_a_helper_thread_to_the_others() -> None:
    """Also if each of its requests names another program; what it gave up keeps its place."""
    run, ends = in_threads(3), threading.Event()
    began: list[str] = []

    async def work(user: str, program: str) -> None:
        set_client(by(user, program))

        def block() -> None:
            began.append(user)
            if user == "greedy":
                ends.wait()

        await run(block)

    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(work, "greedy", str(n))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    try:
        with trio.fail_after(60):
            await work("other", "one")
        assert began[-1] == "other"
        assert began.count("greedy") <= 2
    finally:
        ends.set()
