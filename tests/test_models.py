"""Which models are loaded: room, least recent use, models in use, waiting requests, failures, deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from attrs import evolve
from models_kit import GIB, LOAD_S, PROBE_S, managed
from trio.testing import MockClock

from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import read_header
from uma_trio.config.options import Config
from uma_trio.models.fit import DEVICE_MARGIN
from uma_trio.models.host import Host
from uma_trio.models.manager import RETRY_S, has_several_contexts
from uma_trio.models.model import Model
from uma_trio.models.refusal import Refusal
from uma_trio.models.room import SWAP_AFTER_S


async def test_the_least_recently_used_model_makes_room(
    autojump_clock: MockClock,
) -> None:
    """One that was asked again meanwhile stays."""
    async with managed(4 * GIB) as models:
        for name in ("a", "b", "a", "c"):
            assert await models.ask(name) == name
            await trio.sleep(5)
        assert models.loaded == ["a", "c"]
        assert models.free == 0


async def test_a_model_in_use_is_never_unloaded(
    autojump_clock: MockClock,
) -> None:
    """Who needs its memory waits until its answer is whole, and is loaded then."""
    async with managed(3 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 60.0)
        await trio.sleep(2)
        began = trio.current_time()
        nursery.start_soon(models.ask, "b")
        await trio.sleep(50)
        assert models.model("a").loaded is not None
        await trio.sleep(15)
        assert models.loaded == ["b"]
        assert models.model("b").loaded_at - began == pytest.approx(58 + LOAD_S + 1, abs=1.2)


async def test_readers_are_told_when_a_model_is_tried_and_loaded(
    autojump_clock: MockClock,
) -> None:
    """And not while it waits for memory."""
    async with managed(3 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 60.0)
        await trio.sleep(LOAD_S + 1)
        models.machine.times.clear()
        models.host.untried.add("b")
        await models.ask("b")
        tried, was_tried, began, ended = models.machine.times
        assert was_tried - tried == pytest.approx(PROBE_S)
        assert began - was_tried > 50
        assert ended - began == pytest.approx(LOAD_S)


async def test_who_never_fits_is_refused_with_the_sum(
    autojump_clock: MockClock,
) -> None:
    """At once, whatever is loaded."""
    async with managed(1 * GIB) as models:
        with pytest.raises(Refusal, match=r"needs 2,048 MiB: .*; 1,024 MiB are free") as refused:
            await models.ask("b")
        assert refused.value.code == "E_MODEL_001"


async def test_memory_of_a_gpu_is_made_room_in(
    autojump_clock: MockClock,
) -> None:
    """As that of the machine; a model that never fits there is refused with the sum."""
    async with managed(64 * GIB) as models:
        gpu = 4 * GIB
        models.host.on_device = 3 * GIB
        models.host.needs = dict.fromkeys("ab", 1)
        models.host.free_on_gpu = lambda: gpu - 3 * GIB * len(models.loaded)
        await models.ask("a")
        await trio.sleep(SWAP_AFTER_S)
        assert await models.ask("b") == "b"
        assert models.loaded == ["b"]
        gpu = 2 * GIB
        await models.manager.unload(models.model("b"))
        with pytest.raises(Refusal, match="3,072 MiB on the GPU, and 2,048 MiB are free there"):
            await models.ask("a")


async def test_a_pinned_model_makes_room_for_nobody(
    autojump_clock: MockClock,
) -> None:
    """It stays until an operator unloads it, also where a request kept it for no time."""
    async with managed(3 * GIB, ttl_s=None, model_pin=True) as models:
        await models.ask("a")
        models.manager.keep("a", 0.0)
        await trio.sleep(60)
        with pytest.raises(Refusal):
            await models.ask("b")
        assert await models.manager.unload(models.model("a"))
        assert models.free == 3 * GIB


async def test_those_who_ask_meanwhile_wait_for_one_load(
    autojump_clock: MockClock,
) -> None:
    """Ten requests load it once."""
    async with managed(4 * GIB) as models:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(models.ask, "a")
        assert models.loads == ["a"]


async def test_an_idle_model_is_unloaded_after_its_time(
    autojump_clock: MockClock,
) -> None:
    """The time begins when the last request has ended."""
    async with managed(4 * GIB, ttl_s=10.0) as models:
        await models.ask("a", 20)
        await trio.sleep(9)
        assert models.loaded == ["a"]
        assert models.model("a").expires_s == pytest.approx(1.0, abs=0.3)
        await trio.sleep(2)
        assert models.loaded == []


@pytest.mark.parametrize("asks_other", [False, True])
async def test_an_unloading_goes_on_when_who_wanted_it_is_gone(
    autojump_clock: MockClock, *, asks_other: bool
) -> None:
    """Who asked for it, or for another model that needs its memory; the model can be loaded again."""
    async with managed(2 * GIB) as models:
        await models.ask("a")
        await trio.sleep(SWAP_AFTER_S)
        models.machine.end_s = 0.5
        with trio.move_on_after(0.2):
            if asks_other:
                await models.ask("b")
            else:
                await models.manager.unload(models.model("a"))
        assert models.model("a").is_unloading
        await trio.sleep(1)
        assert (models.model("a").state, models.free) == ("unloaded", 2 * GIB)
        assert await models.ask("a") == "a"


async def test_memory_that_is_about_to_be_freed_is_waited_for(
    autojump_clock: MockClock,
) -> None:
    """A model that is asked for while another one is unloaded has room then."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:
        await models.ask("a")
        models.machine.end_s = 0.5
        nursery.start_soon(models.manager.unload, models.model("a"))
        await trio.sleep(0.1)
        assert await models.ask("b") == "b"


async def test_a_model_whose_engine_died_is_freed_and_loaded_again(
    autojump_clock: MockClock,
) -> None:
    """The daemon serves on, also if no other model is loaded; the next request loads it again."""
    async with managed(2 * GIB) as models:
        await models.ask("a")
        await trio.sleep(RETRY_S)
        models.die("a")
        await trio.sleep(0.1)
        assert (models.free, models.manager.died) == (2 * GIB, None)
        assert await models.ask("a") == "a"
        assert models.loads == ["a", "a"]


async def test_a_model_whose_engine_dies_as_soon_as_it_is_loaded_is_not_loaded_at_once(
    autojump_clock: MockClock,
) -> None:
    """A request reads why, and other models have its memory."""
    async with managed(2 * GIB) as models:
        await models.ask("a")
        models.die("a")
        with pytest.raises(Refusal, match="the engine of this model has stopped") as refused:
            await models.ask("a")
        assert refused.value.retry_after_s == pytest.approx(RETRY_S, abs=0.1)
        assert await models.ask("b") == "b"
        await trio.sleep(RETRY_S)
        assert await models.ask("a") == "a"


async def test_the_daemon_ends_with_the_only_model(autojump_clock: MockClock) -> None:
    """Its supervisor starts it again."""
    async with managed(2 * GIB, names=("a",)) as models:
        await models.ask("a")
        await trio.sleep(RETRY_S)
        models.die("a")
        assert "broke" in str(models.manager.died)


async def test_an_engine_that_dies_while_its_model_is_unloaded_hurts_nobody(
    autojump_clock: MockClock,
) -> None:
    """Its memory is freed, and nothing of it is kept."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:
        await models.ask("a")
        await trio.sleep(RETRY_S)
        models.machine.end_s = 5.0
        nursery.start_soon(models.manager.unload, models.model("a"))
        await trio.sleep(0.1)
        models.die("a")
        await trio.sleep(5.0)
        assert (models.model("a").state, models.free) == ("unloaded", 2 * GIB)
        assert models.model("a").prefixes is None
        nursery.cancel_scope.cancel()


async def test_a_load_that_ends_while_the_daemon_stops_is_closed(
    autojump_clock: MockClock,
) -> None:
    """Its engine is never computed, and whoever waits for it is refused."""
    async with managed(4 * GIB) as models, trio.open_nursery() as nursery:
        refused: list[str] = []

        async def ask() -> None:
            with pytest.raises(Refusal) as error:
                await models.ask("a")
            refused.append(error.value.code)

        models.after_progress["a"] = models.manager.stop
        nursery.start_soon(ask)
        await trio.sleep(LOAD_S + 0.1)
        assert (refused, models.free) == (["E_LIFECYCLE_001"], 4 * GIB)
        assert models.machine.added == {}


async def test_a_file_that_was_removed_fails_only_its_own_model(
    autojump_clock: MockClock,
) -> None:
    """Not one that is loaded beside it: what it takes is known by its weights and its KV cache then."""
    async with managed(2 * GIB) as models:
        await models.ask("a")
        await trio.sleep(SWAP_AFTER_S)
        models.model("a").estimate = None  # as of one that was loaded with the daemon
        models.host.removed.add("a")
        assert await models.ask("b") == "b"
        assert models.loaded == ["b"]


async def test_variants_that_come_while_another_model_is_unloaded_hide_no_model(
    autojump_clock: MockClock,
) -> None:
    """Each whose time is over goes in the same pass, also where requests change the list meanwhile."""
    async with managed(8 * GIB, lora=("x=x.gguf",), model_ttl_s=5.0) as models:
        for name in "abc":
            await models.ask(name)
        models.model("a:x=0.3")  # at the end of the list, and forgotten when the next one is named
        models.machine.on_remove = lambda: models.model("b:x=0.7")
        models.machine.end_s = 0.01
        for each in models.manager.models:
            each.used_at = trio.current_time()
        while len(models.loaded) == 3:  # noqa: ASYNC110 - in virtual time
            await trio.sleep(0.01)
        await trio.sleep(0.1)
        assert models.loaded == []


async def test_memory_that_has_come_free_is_used_by_the_next_request(
    autojump_clock: MockClock,
) -> None:
    """A refusal for want of memory is not kept; those who waited for that attempt are all refused by it."""
    async with managed(1 * GIB) as models:
        refused: list[float | None] = []

        async def ask() -> None:
            with pytest.raises(Refusal, match="are free") as error:
                await models.ask("a")
            refused.append(error.value.retry_after_s)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert refused == [1.0] * 3
        models.host.free = 2 * GIB
        assert await models.ask("a") == "a"


async def test_a_request_says_how_long_its_model_stays(
    autojump_clock: MockClock,
) -> None:
    """Until the model is unloaded: then its own time holds again."""
    async with managed(4 * GIB, ttl_s=10.0) as models:
        await models.ask("a")
        models.manager.keep("a", float("inf"))
        await trio.sleep(10_000)
        assert models.loaded == ["a"]
        assert models.model("a").expires_s is None
        models.manager.keep("a", 0.0)
        await trio.sleep(0.5)
        assert models.loaded == []
        await models.ask("a")
        await trio.sleep(5)
        assert models.loaded == ["a"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModelError("the file is damaged."), "the file is damaged"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("!"), "a fault of the daemon's"),
    ],
)
async def test_what_failed_is_not_tried_again_at_once(
    autojump_clock: MockClock, error: Exception, said: str
) -> None:
    """The reason is told for half a minute; a file that was mended is loaded then. The manager goes on."""
    async with managed(4 * GIB) as models:
        models.broken["a"] = error
        began = trio.current_time()
        for _ in range(2):
            with pytest.raises(Refusal, match=said) as refused:
                await models.ask("a")
        assert trio.current_time() - began == pytest.approx(LOAD_S, abs=0.01)
        assert said in models.model("a").wait_reason, "as lists say it"
        assert refused.value.retry_after_s == pytest.approx(RETRY_S, abs=0.1)
        assert await models.ask("b") == "b"
        models.broken.clear()
        await trio.sleep(RETRY_S)
        assert await models.ask("a") == "a"


async def test_a_wait_is_told_with_how_far_the_loading_is(
    autojump_clock: MockClock,
) -> None:
    """Also what is waited for before it."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 30.0)
        await trio.sleep(0.45)
        model = models.model("a")
        assert (model.wait_reason, model.progress) == ("model a is loading, 40%", 0.4)
        await trio.sleep(1)
        assert model.wait_reason == ""
        nursery.start_soon(models.ask, "b")
        await trio.sleep(1)
        assert models.model("b").wait_reason == "model b waits for memory that a has"
        nursery.cancel_scope.cancel()


async def test_a_load_ends_with_the_last_who_waits_for_it(
    autojump_clock: MockClock,
) -> None:
    """While another one waits it goes on; the next request begins a new one."""
    async with managed(4 * GIB) as models, trio.open_nursery() as nursery:
        one, two = trio.CancelScope(), trio.CancelScope()

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                await models.ask("a")

        nursery.start_soon(ask, one)
        nursery.start_soon(ask, two)
        await trio.sleep(0.25)
        one.cancel()
        await trio.sleep(0.25)
        assert models.model("a").state == "loading"
        two.cancel()
        await trio.sleep(0.25)
        assert (models.model("a").state, models.loads, models.free) == ("unloaded", [], 4 * GIB)
        assert await models.ask("a") == "a"


async def test_who_waits_for_memory_and_leaves_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    """A model that was about to make room takes requests again."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 100.0)
        await trio.sleep(2)
        with trio.move_on_after(SWAP_AFTER_S + 1):
            await models.ask("b")
        await trio.sleep(0.1)
        assert models.loaded == ["a"]
        assert await models.ask("a") == "a"
        assert models.loads == ["a"]
        nursery.cancel_scope.cancel()


async def test_too_many_who_wait_for_a_model_are_refused(
    autojump_clock: MockClock,
) -> None:
    """As many wait as wait for a slot."""
    async with managed(4 * GIB, max_queue=2) as models, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(models.ask, "a")
        await trio.sleep(0.1)
        with pytest.raises(Refusal, match="--max-queue") as refused:
            await models.ask("a")
        assert refused.value.code == "E_LIMIT_003"


async def test_an_explicit_model_is_loaded_by_name_only(
    autojump_clock: MockClock,
) -> None:
    """A request is told how; once it is loaded, it answers."""
    async with managed(4 * GIB, load="explicit") as models:
        with pytest.raises(Refusal, match="uma-trio load a"):
            await models.ask("a")
        await models.manager.ready(models.model("a"), by_operator=True)
        assert await models.ask("a") == "a"


# --- memory for one of two ---


async def test_requests_in_turn_for_two_models_are_collated(
    autojump_clock: MockClock,
) -> None:
    """Four clients ask A B A B, each one after the other: at most three loads serve the eight requests."""
    async with managed(2 * GIB) as models:
        answers: list[str] = []

        async def client(names: str) -> None:
            for name in names:
                answers.append(await models.ask(name, 0.5))

        async with trio.open_nursery() as nursery:
            for names in ("ab", "ba", "ab", "ba"):
                nursery.start_soon(client, names)
        assert sorted(answers) == list("aaaabbbb")
        assert len(models.loads) <= 3


async def test_a_model_stays_as_long_as_its_loading_took(
    autojump_clock: MockClock,
) -> None:
    """So that at most half of the time goes into changes, however they ask."""
    async with managed(2 * GIB) as models:

        async def client(name: str) -> None:
            while True:
                await models.ask(name, 0.01)
                await trio.sleep(0.01)

        with trio.move_on_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client, "a")
                nursery.start_soon(client, "b")
        assert 4 <= len(models.loads) <= 16


async def test_what_is_loaded_quickly_gives_way_soon(
    autojump_clock: MockClock,
) -> None:
    """Ten times of what its loading took is waited, so that a tenth of the time goes into changes."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:

        async def stream() -> None:
            while True:
                await models.ask("a", 0.3)

        for delay in (0.1, 0.15, 1.1):
            nursery.start_soon(stream)
            await trio.sleep(delay)
        models.model("a").load_s = 0.2
        began = trio.current_time()
        assert await models.ask("b") == "b"
        assert 2.0 <= trio.current_time() - began <= 2.0 + 0.5 + LOAD_S
        nursery.cancel_scope.cancel()


async def test_a_model_with_work_for_ever_gives_way(
    autojump_clock: MockClock,
) -> None:
    """It takes no further requests after a while, and those that run come to their end."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:
        ended: list[float] = []

        async def stream() -> None:
            while True:
                await models.ask("a", 4.0)
                ended.append(trio.current_time())

        for delay in range(3):
            nursery.start_soon(stream)
            await trio.sleep(1 + delay / 10)
        began = trio.current_time()
        assert await models.ask("b") == "b"
        assert SWAP_AFTER_S <= trio.current_time() - began <= SWAP_AFTER_S + 4.0 + 2 * LOAD_S
        before = len(ended)
        await trio.sleep(10)
        assert len(ended) > before  # a was loaded again
        nursery.cancel_scope.cancel()


async def test_a_model_that_fits_does_not_wait_for_one_that_does_not(
    autojump_clock: MockClock,
) -> None:
    """The latter waits for the memory of a model with one long answer."""
    async with managed(5 * GIB) as models, trio.open_nursery() as nursery:
        models.host.needs = {"a": 2, "b": 4, "c": 2}
        nursery.start_soon(models.ask, "a", 300.0)
        await trio.sleep(2)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(1)
        began = trio.current_time()
        await models.ask("c")
        assert trio.current_time() - began == pytest.approx(LOAD_S, abs=0.2)
        assert models.model("a").loaded is not None
        await trio.sleep(320)
        assert models.loads == ["a", "c", "b"]


async def test_an_idle_model_stays_while_its_memory_alone_is_not_enough(
    autojump_clock: MockClock,
) -> None:
    """It answers while another one waits for a busy model's memory besides."""
    async with managed(6 * GIB) as models, trio.open_nursery() as nursery:
        models.host.needs = {"a": 2, "b": 6, "c": 2}
        nursery.start_soon(models.ask, "a", 300.0)
        await models.ask("c")
        await trio.sleep(60)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(8)
        assert models.model("c").state == "loaded"
        began = trio.current_time()
        await models.ask("c")
        assert trio.current_time() - began < 1
        await trio.sleep(300)
        assert models.loaded == ["b"]


async def test_who_does_not_fit_beside_a_model_that_is_being_loaded_waits_for_it(
    autojump_clock: MockClock,
) -> None:
    """Its memory is not free, and it cannot be unloaded yet: that is no reason to refuse."""
    async with managed(2 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a")
        await trio.sleep(LOAD_S / 2)
        models.host.free = 0
        models.before_free["a"] = 2 * GIB  # which the load has already
        assert await models.ask("b") == "b"
        assert models.loads == ["a", "b"]


async def test_those_who_ask_and_leave_share_one_trial(
    autojump_clock: MockClock,
) -> None:
    """It runs to its end, and is charged to the first of them, who may never ask again; the model is not loaded for nobody."""
    async with managed(4 * GIB) as models:
        models.host.untried.add("a")
        for _ in range(20):
            with trio.move_on_after(0.03):
                await models.ask("a", payer="mallory")
        assert models.host.probes == ["a"]
        assert models.model("a").state == "loading"
        await trio.sleep(PROBE_S)
        assert (models.model("a").state, models.loads) == ("unloaded", [])
        assert models.manager.debts == {"mallory": pytest.approx(PROBE_S)}
        await models.ask("a")
        assert (models.host.probes, models.loads) == (["a"], ["a"])


async def test_who_asks_again_during_a_trial_gets_the_model(
    autojump_clock: MockClock,
) -> None:
    """One who left has ended nothing for others."""
    async with managed(4 * GIB) as models:
        models.host.untried.add("a")
        with trio.move_on_after(PROBE_S / 2):
            await models.ask("a")
        assert await models.ask("a") == "a"
        assert (models.host.probes, models.loads) == (["a"], ["a"])


async def test_a_refusal_counts_also_when_everybody_has_left(
    autojump_clock: MockClock,
) -> None:
    """So that a damaged file is not tried anew by each who asks and leaves."""
    async with managed(4 * GIB) as models:
        models.host.untried.add("a")
        models.host.damaged.add("a")
        models.host.removed.add("a")
        with trio.move_on_after(PROBE_S / 2):
            await models.ask("a")
        await trio.sleep(PROBE_S)
        assert models.model("a").state == "failed"
        with pytest.raises(Refusal, match="there is no file"):
            await models.ask("a")
        assert models.host.probes == ["a"]


async def test_one_trial_at_a_time_delays_only_those_who_need_one(
    autojump_clock: MockClock,
) -> None:
    """A model whose files are known is loaded while the files of another are looked at."""
    async with managed(8 * GIB) as models, trio.open_nursery() as nursery:
        models.host.untried |= {"a", "b"}
        nursery.start_soon(models.ask, "a")
        await trio.sleep(0.1)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(0.1)
        assert models.host.probes == ["a"]
        with trio.fail_after(LOAD_S + 0.2):
            await models.ask("c")
        await trio.sleep(5)
        assert models.host.probes == ["a", "b"]
        assert sorted(models.loads) == ["a", "b", "c"]


async def test_a_model_that_is_known_to_assert_unloads_nobody(
    autojump_clock: MockClock,
) -> None:
    """Whoever asks for it reads why."""
    async with managed(2 * GIB) as models:
        models.host.damaged.add("b")
        await models.ask("a")
        await trio.sleep(60)
        with pytest.raises(Refusal, match="GGML_ASSERT") as refused:
            await models.ask("b")
        assert refused.value.code == "E_MODEL_001"
        assert models.loaded == ["a"]


async def test_a_file_that_is_replaced_while_it_waits_is_tried_again(
    autojump_clock: MockClock,
) -> None:
    """What is loaded is the file that was tried, and room is made for that."""
    async with managed(4 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 20.0)
        nursery.start_soon(models.ask, "c", 20.0)
        await trio.sleep(3)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(1)
        models.host.needs = {"a": 2, "b": 4, "c": 2}
        await trio.sleep(60)
        assert models.loaded == ["b"]


async def test_an_unloading_is_finished_while_the_daemon_ends(
    autojump_clock: MockClock,
) -> None:
    """What was opened for the model is closed: its memory, and its trace."""
    async with managed(4 * GIB) as models:
        await models.ask("a")
        model = models.model("a")
        models.machine.end_s = 0.5
        with trio.move_on_after(0.1):
            await models.manager.unload(model)
        assert model.held is not None  # whoever ends the daemon could close it
    assert (models.free, model.held, model.state) == (4 * GIB, None, "unloaded")


async def test_the_loader_is_charged_also_for_a_load_that_fails(
    autojump_clock: MockClock,
) -> None:
    """The machine was taken from the others all the same."""
    async with managed(4 * GIB) as models:
        models.broken["a"] = ModelError("the file is damaged.")
        with pytest.raises(Refusal):
            await models.ask("a", payer="eve")
        assert models.manager.debts == {"eve": pytest.approx(LOAD_S)}


async def test_each_loading_has_a_trace_of_its_own(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """That of the loading before is not lost."""
    async with managed(4 * GIB, trace=tmp_path / "t.jsonl") as models:
        for _ in range(3):
            await models.ask("a")
            await models.manager.unload(models.model("a"))
    assert [path.name for path in models.traces] == ["t.jsonl", "t-2.jsonl", "t-3.jsonl"]


@pytest.mark.parametrize(
    ("names", "lora", "several"), [("a", (), False), ("ab", (), True), ("a", ("x=x.gguf",), True)]
)
def test_a_model_with_adapters_has_several_contexts_that_stop_for_one_anothers_readers(
    names: str, lora: tuple[str, ...], several: bool
) -> None:
    """A variant is computed beside its model."""
    models = [Model(Config(alias=(name,), lora=lora)) for name in names]
    assert has_several_contexts(models) is several


@pytest.mark.parametrize("on_gpu", [True, False])
async def test_a_model_that_is_loaded_later_has_the_context_that_it_would_have_had_first(
    on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """What the loaded ones have is no less room for it, though nothing has been estimated."""
    pytest.importorskip("gguf")
    from models.synthetic import write_model

    files = [write_model(tmp_path / f"{name}.gguf", name=name) for name in "ab"]
    weights, kv = read_header(files[0]).size_bytes, 8 * 1024 * 512
    free = [2 * weights + (DEVICE_MARGIN + 2 * kv if on_gpu else 4 * kv)]
    monkeypatch.setattr("uma_trio.models.files._uses_gpu", lambda _config: on_gpu)
    monkeypatch.setattr("uma_trio.backend._llama_lib.free_device_memory", lambda: free[0])
    monkeypatch.setattr("uma_trio.models.files.available_memory", lambda: free[0])
    one, two = [Model(Config(model=each)) for each in files]
    host = Host()
    first = host.fit(one, [one, two])
    assert first.config.n_ctx == 8 * 1024
    async with managed(2 * GIB) as models:
        await models.ask("a")
        one.config, one.loaded = first.config, models.model("a").loaded
        assert one.loaded is not None
        one.loaded.facts = evolve(one.loaded.facts, size_bytes=weights, cell_bytes=512)
        free[0] -= weights + kv if on_gpu else kv
        assert host.fit(two, [one, two]).config.n_ctx == first.config.n_ctx


async def test_an_engine_may_die_after_the_manager_has_ended() -> None:
    """As where the daemon is cancelled within a tick. Nothing is loaded again then."""
    async with managed(2 * GIB) as models:
        await models.ask("a")
    models.die("a")
    assert "broke" in str(models.manager.died)


async def test_an_engine_that_cannot_end_its_requests_ends_no_other_model(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with managed(4 * GIB) as models:
        await models.ask("a")
        await models.ask("b")

        def fail_all(_engine: object, _code: str, _message: str) -> None:
            raise RuntimeError("it is broken")

        monkeypatch.setattr("models_kit.StubEngine.fail_all", fail_all)
        models.die("a")
        await trio.sleep(1.0)
        assert models.loaded == ["b"]
