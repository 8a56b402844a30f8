"""The read model: what it keeps of a model that is gone, and what a viewer may see."""

from __future__ import annotations

from engine_kit import Bench
from net_kit import TICK_S, house
from trio.testing import MockClock

from uma_protocol import Eos
from uma_trio.observe.records import Recorded, Snapshot
from uma_trio.observe.view import ANOTHER_USER, MOST_ENDED, Named, ReadModel, State, Viewer
from uma_trio.sockets.principal import Principal
from uma_trio_sim.fake import FakeBackend

ALICE, BOB = Principal(connection=1, uid=1), Principal(connection=2, uid=2)


def computed(n: int = 1) -> Bench:
    """Return an engine that has answered `n` requests."""
    bench = Bench(FakeBackend())
    for _ in range(n):
        bench.submit("hello", 20)
        bench.run()
    return bench


def test_ticks_and_requests_of_an_ended_model_can_still_be_explained() -> None:
    """One request with the ticks around its worst gap, until later requests push it out."""
    view, bench = ReadModel(), computed()
    view.take("code", bench.snapshot())
    last = bench.explain(None, 64)
    view.close("code", last)
    (record,) = view.records()
    alone = view.explain(9.0, record.handle, 5)
    assert alone is not None
    assert alone.requests == (record,)
    assert len(alone.ticks) == 5
    assert record.worst_gap is not None
    assert record.worst_gap.tick in alone.ticks
    assert view.explain(9.0, 10**9, 5) is None
    others = tuple(computed(MOST_ENDED).explain(None, 0).requests)
    view.close("chat", Recorded(9.0, others, ()))
    assert [one.handle for one in view.records()] == [one.handle for one in others]


def test_a_model_that_is_loaded_again_numbers_its_ticks_from_the_start() -> None:
    """So a watcher can tell; the ticks of the time before are gone then."""
    view, bench = ReadModel(), computed()
    view.take("code", bench.snapshot())
    assert (view.loads("code"), len(view.ticks_after("code", -1, 999))) == (1, 20)
    view.close("code", bench.explain(None, 64))
    assert view.newest(3)[0][0] == "code"
    view.take("code", Snapshot(at=0.0, tick=-1))
    assert (view.loads("code"), view.newest(3)) == (2, [])


def test_of_another_users_request_only_state_and_lane_are_shown() -> None:
    """No counts, no names, no handle, no reason to wait."""
    bench = Bench(FakeBackend(n_slots=1))
    mine, _ = bench.submit("hello", 20)
    bench.submit("another", 20)
    bench.ticks(3)
    owners = {mine: Named("a", "editor", principal=ALICE)}
    names = lambda handle: owners.get(handle, Named("b", "agent", principal=BOB))  # noqa: E731
    state = State.of([bench.snapshot()], names)
    own, other = Viewer(ALICE, names).requests(state)
    assert (own.record.handle, own.named.app, own.record.prompt_tokens) == (mine, "editor", 6)
    assert other.is_hidden
    assert (other.named.app, other.record.state, other.waits) == (ANOTHER_USER, "queued", "")
    assert (other.record.prompt_tokens, other.age_s) == (0, 0.0)


async def test_requests_of_an_engine_that_died_are_explained(autojump_clock: MockClock) -> None:
    """Its records are read once it has ended, and no engine is asked for them."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=5)
        end = await client.until(Eos)
        bench, observer = daemon.bench, daemon.service.observer
        daemon.served.history = lambda: bench.engine._recorder.explain(TICK_S, None, 64)
        bench.inbox.close()
        observer.close(daemon.served)
        found = observer.view.explain(1.0, end.request, 15)
        assert found is not None
        assert found.requests[0].completion_tokens == 5
        assert daemon.served.history().requests == (), "nothing refers to the engine any more"
