"""Which models are loaded: room, the least recently used, who is in use, who waits, failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from inspect import isawaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock

from uma_trio.backend.base import ModelError
from uma_trio.backend.llama_probe import Untried
from uma_trio.backend.needs import OURS, Estimate, Needs
from uma_trio.config.options import Config
from uma_trio.models import keeper, room, trial
from uma_trio.models.catalogue import AGAIN_S
from uma_trio.models.entry import Entry
from uma_trio.models.keeper import Keeper
from uma_trio.models.room import SWAP_AFTER_S
from uma_trio.service.ask import Refusal
from uma_trio.service.served import Uses
from uma_trio.service.variants import by_name

GIB = 1 << 30
LOAD_S = 1.0
PROBE_S = 0.8


@define
class Shelf:
    """A keeper of models of 2 GiB each, on a machine with so much free. `loads` and `told` are what happened.

    `times` are when readers were told that a model is tried or loaded, and no more.
    """

    keeper: Keeper
    free: int
    service: Any
    loads: list[str] = field(factory=list)
    broken: dict[str, Exception] = field(factory=dict)
    tried: list[str] = field(factory=list)
    times: list[float] = field(factory=list)
    damaged: set[str] = field(factory=set)
    untried: set[str] = field(factory=set)
    probes: list[str] = field(factory=list)

    def recall(self, look: Callable[[Entry], Any], entry: Entry) -> Any:
        """Return what is known of a model without a process of its own: nothing of one that is untried."""
        if entry.names[0] in self.untried:
            raise Untried
        return look(entry)

    async def probe(self, look: Callable[[Entry], Any], entry: Entry) -> None:
        """Find out about a model in a second, in a process that cannot be seen here."""
        self.probes.append(entry.names[0])
        await trio.sleep(PROBE_S)
        self.untried.discard(entry.names[0])
        look(entry)

    def compute(self, config: Config) -> None:
        """Compute two tokens of a model, which fails if it is damaged."""
        if config.alias[0] in self.damaged:
            raise ModelError("GGML_ASSERT(eps >= 0.0f) failed")

    def entry(self, name: str) -> Entry:
        """Return the entry of a model."""
        found = self.keeper.find(name)
        assert found is not None
        return found

    async def ask(self, name: str, seconds: float = 0.0) -> str:
        """Ask a model, which answers for so long; return what it is called."""
        served = await self.keeper.ready(self.entry(name))
        end = served.uses.begin()
        try:
            if seconds:
                await trio.sleep(seconds)
        finally:
            end()
        return str(served.bounds.model)

    @property
    def loaded(self) -> list[str]:
        """The models in memory."""
        return [entry.names[0] for entry in self.keeper.entries if entry.state == "loaded"]


async def at_once(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    """Call a function without a thread; one that takes a while sleeps instead."""
    await trio.lowlevel.checkpoint()
    found = function(*arguments)
    return await found if isawaitable(found) else found


async def let_go_slowly(_deployment: Any) -> None:
    """End the computing of a model in half a second."""
    await trio.sleep(0.5)


@asynccontextmanager
async def shelf(
    monkeypatch: pytest.MonkeyPatch, free: int, ttl_s: float | None = 1000.0, **changes: Any
) -> AsyncIterator[Shelf]:
    """Run it in virtual time, with models that need nothing but numbers; `changes` are of all configurations."""
    names = ("a", "b", "c")
    base = evolve(Config(load="on-demand", model_ttl_s=ttl_s), **changes)
    entries = [Entry(evolve(base, alias=(name,))) for name in names]
    service = SimpleNamespace(removed=[], debts={})
    service.charge = lambda payer, seconds: service.debts.update({payer: seconds})
    service.remove = service.removed.append
    service.observer = SimpleNamespace(close=lambda served: None)
    made: Any = None

    def deploy(entry: Entry, loaded: Any) -> Any:
        name = loaded.config.alias[0]
        bounds = SimpleNamespace(model=name)
        served = SimpleNamespace(
            bounds=bounds,
            names=(name,),
            uses=Uses(),
            retire=lambda: None,
            model=SimpleNamespace(weight_bytes=2 * GIB, cell_bytes=0),
        )
        return SimpleNamespace(
            served=served,
            name=name,
            backend=SimpleNamespace(variant=lambda _adapters: None),
            as_neighbour=lambda: None,
            prefixes=lambda: None,
        )

    async def let_go(deployment: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def load(
        config: Config, held: ExitStack, on_loading: Any, *_rest: Any, **_more: Any
    ) -> Any:
        for part in range(10):
            await trio.sleep(LOAD_S / 10)
            on_loading((part + 1) / 10)
        if config.alias[0] in made.broken:
            raise made.broken[config.alias[0]]
        made.loads.append(config.alias[0])
        made.free -= 2 * GIB
        held.callback(lambda: setattr(made, "free", made.free + 2 * GIB))
        return SimpleNamespace(config=config)

    @contextmanager
    def loading() -> Iterator[None]:
        made.times.append(trio.current_time())
        yield
        made.times.append(trio.current_time())

    kept = Keeper(entries, service, deploy, let_go, loading)  # type: ignore[arg-type]
    made = Shelf(kept, free, service)
    needs = Needs(4096, own=2 * GIB - OURS, mapped=0, kv=0, compute=0)
    monkeypatch.setattr(trial, "estimate", lambda _config: Estimate(needs, (needs,)))
    monkeypatch.setattr(trial, "try_computing", made.compute)
    monkeypatch.setattr(room, "available_memory", lambda: made.free)
    monkeypatch.setattr(keeper, "load", load)
    for module in (keeper, room):
        monkeypatch.setattr(module, "collect", lambda: None)  # of all objects of all tests
    monkeypatch.setattr(keeper, "recalled", made.recall)
    monkeypatch.setattr(keeper, "probed", made.probe)
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # the clock cannot see threads
    async with trio.open_nursery() as nursery:
        await nursery.start(kept.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_the_least_recently_used_model_makes_room(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """One that was asked again meanwhile stays."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        for name in ("a", "b", "a", "c"):
            assert await models.ask(name) == name
            await trio.sleep(5)
        assert models.loaded == ["a", "c"]
        assert models.free == 0


async def test_a_model_in_use_is_never_unloaded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Who needs its memory waits until its answer is whole, and is loaded then."""
    async with shelf(monkeypatch, 3 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 60.0)
        await trio.sleep(2)
        began = trio.current_time()
        nursery.start_soon(models.ask, "b")
        await trio.sleep(50)
        assert models.entry("a").deployment is not None
        await trio.sleep(15)
        assert models.loaded == ["b"]
        assert models.entry("b").loaded_at - began == pytest.approx(58 + LOAD_S + 1, abs=1.2)


async def test_readers_are_told_when_a_model_is_tried_and_loaded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """And not while it waits for memory."""
    async with shelf(monkeypatch, 3 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 60.0)
        await trio.sleep(LOAD_S + 1)
        models.times.clear()
        models.untried.add("b")
        await models.ask("b")
        tried, was_tried, began, ended = models.times
        assert was_tried - tried == pytest.approx(PROBE_S)
        assert began - was_tried > 50
        assert ended - began == pytest.approx(LOAD_S)


async def test_who_never_fits_is_refused_with_the_sum(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """At once, whatever is loaded."""
    async with shelf(monkeypatch, 1 * GIB) as models:
        with pytest.raises(Refusal, match=r"needs 2,048 MiB: .*; 1,024 MiB are free") as refused:
            await models.ask("b")
        assert refused.value.code == "E_MODEL_001"


async def test_memory_of_a_gpu_is_made_room_in(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """As that of the machine; who never fits there is refused with the sum."""
    async with shelf(monkeypatch, 64 * GIB) as models:
        needs = Needs(4096, own=GIB, mapped=0, kv=0, compute=0, device=3 * GIB)
        monkeypatch.setattr(trial, "estimate", lambda _config: Estimate(needs))
        gpu = 4 * GIB
        monkeypatch.setattr(room, "free_device_memory", lambda: gpu - 3 * GIB * len(models.loaded))
        await models.ask("a")
        await trio.sleep(SWAP_AFTER_S)
        assert await models.ask("b") == "b"
        assert models.loaded == ["b"]
        gpu = 2 * GIB
        await models.keeper.unload(models.entry("b"))
        with pytest.raises(Refusal, match="3,072 MiB on the GPU, and 2,048 MiB are free there"):
            await models.ask("a")


async def test_a_pinned_model_makes_room_for_nobody(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It stays until an operator unloads it, also where a request kept it for no time."""
    async with shelf(monkeypatch, 3 * GIB, ttl_s=None, model_pin=True) as models:
        await models.ask("a")
        models.keeper.keep(models.entry("a"), 0.0)
        await trio.sleep(60)
        with pytest.raises(Refusal):
            await models.ask("b")
        assert await models.keeper.unload(models.entry("a"))
        assert models.free == 3 * GIB


async def test_those_who_ask_meanwhile_wait_for_one_load(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Ten requests load it once."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(models.ask, "a")
        assert models.loads == ["a"]


async def test_an_idle_model_is_unloaded_after_its_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The time begins when the last request has ended."""
    async with shelf(monkeypatch, 4 * GIB, ttl_s=10.0) as models:
        await models.ask("a", 20)
        await trio.sleep(9)
        assert models.loaded == ["a"]
        assert models.entry("a").expires_s == pytest.approx(1.0, abs=0.3)
        await trio.sleep(2)
        assert models.loaded == []


@pytest.mark.parametrize("asks_other", [False, True])
async def test_an_unloading_goes_on_when_who_wanted_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, *, asks_other: bool
) -> None:
    """Who asked for it, or for another model that needs its memory; the model can be loaded again."""
    async with shelf(monkeypatch, 2 * GIB) as models:
        await models.ask("a")
        await trio.sleep(SWAP_AFTER_S)
        monkeypatch.setattr(models.keeper, "_let_go", let_go_slowly)
        with trio.move_on_after(0.2):
            if asks_other:
                await models.ask("b")
            else:
                await models.keeper.unload(models.entry("a"))
        assert models.entry("a").state == "unloading"
        await trio.sleep(1)
        assert (models.entry("a").state, models.free) == ("unloaded", 2 * GIB)
        assert await models.ask("a") == "a"


async def test_memory_that_is_about_to_be_freed_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A model that is asked for while another one is unloaded has room then."""
    async with shelf(monkeypatch, 2 * GIB) as models, trio.open_nursery() as nursery:
        await models.ask("a")
        monkeypatch.setattr(models.keeper, "_let_go", let_go_slowly)
        nursery.start_soon(models.keeper.unload, models.entry("a"))
        await trio.sleep(0.1)
        assert await models.ask("b") == "b"


async def test_the_memory_of_a_model_whose_engine_died_is_freed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """At once, and not when another one is loaded; who asks for it is told why it is not there."""
    async with shelf(monkeypatch, 2 * GIB) as models:
        await models.ask("a")
        deployment = models.entry("a").deployment
        assert deployment is not None
        models.keeper.lost(deployment)
        with pytest.raises(Refusal, match="the engine of this model has stopped"):
            await models.ask("a")
        assert models.free == 2 * GIB
        assert await models.ask("b") == "b"


async def test_a_file_that_was_removed_fails_only_its_own_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Not one that is loaded beside it: what it takes is known by its weights and its KV cache then."""
    async with shelf(monkeypatch, 2 * GIB) as models:
        await models.ask("a")
        await trio.sleep(SWAP_AFTER_S)
        models.entry("a").estimate = None  # as of one that was loaded with the daemon
        real = trial.estimate

        def estimate(config: Config) -> Estimate:
            if config.alias == ("a",):
                raise ModelError("there is no file a.gguf.")
            return real(config)

        monkeypatch.setattr(trial, "estimate", estimate)
        assert await models.ask("b") == "b"
        assert models.loaded == ["b"]


async def test_variants_that_come_while_another_model_is_unloaded_hide_no_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Each whose time is over goes in the same pass, also where requests change the list meanwhile."""
    changes = {"lora": ("x=x.gguf",), "model_ttl_s": 5.0}
    async with shelf(monkeypatch, 8 * GIB, **changes) as models:
        for name in "abc":
            await models.ask(name)
        monkeypatch.setattr(trial, "variant_estimate", trial.estimate)
        monkeypatch.setattr(trial, "try_adapters", lambda *_: None)
        made = models.keeper.variant(models.entry("a"), by_name("x=0.3", models.entry("a").known))
        models.keeper.entries[:] = [made, *models.keeper.entries]  # type: ignore[index]

        async def let_go(_deployment: Any) -> None:
            models.entry("b:x=0.7")  # `made` is forgotten: all behind it move on by one
            await trio.sleep(0.01)

        monkeypatch.setattr(models.keeper, "_let_go", let_go)
        for each in models.keeper.entries:
            each.used_at = trio.current_time()
        while len(models.loaded) == 3:  # noqa: ASYNC110 - in virtual time
            await trio.sleep(0.01)
        await trio.sleep(0.1)
        assert models.loaded == []


async def test_memory_that_has_come_free_is_used_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A refusal for want of memory is not kept; those who waited for that attempt are all refused by it."""
    async with shelf(monkeypatch, 1 * GIB) as models:
        refused: list[float | None] = []

        async def ask() -> None:
            with pytest.raises(Refusal, match="are free") as error:
                await models.ask("a")
            refused.append(error.value.retry_after_s)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert refused == [1.0] * 3
        models.free = 2 * GIB
        assert await models.ask("a") == "a"


async def test_a_request_says_how_long_its_model_stays(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Until the model is unloaded: then its own time holds again."""
    async with shelf(monkeypatch, 4 * GIB, ttl_s=10.0) as models:
        await models.ask("a")
        models.keeper.keep(models.entry("a"), float("inf"))
        await trio.sleep(10_000)
        assert models.loaded == ["a"]
        assert models.entry("a").expires_s is None
        models.keeper.keep(models.entry("a"), 0.0)
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
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, error: Exception, said: str
) -> None:
    """The reason is told for half a minute; a file that was mended is loaded then. The keeper lives on."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        models.broken["a"] = error
        began = trio.current_time()
        for _ in range(2):
            with pytest.raises(Refusal, match=said) as refused:
                await models.ask("a")
        assert trio.current_time() - began == pytest.approx(LOAD_S, abs=0.01)
        assert said in models.entry("a").wait, "as lists say it"
        assert refused.value.retry_after_s == pytest.approx(AGAIN_S, abs=0.1)
        assert await models.ask("b") == "b"
        models.broken.clear()
        await trio.sleep(AGAIN_S)
        assert await models.ask("a") == "a"


async def test_a_wait_is_told_with_how_far_the_loading_is(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Also what is waited for before it."""
    async with shelf(monkeypatch, 2 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 30.0)
        await trio.sleep(0.45)
        entry = models.entry("a")
        assert (entry.wait, entry.progress) == ("model a is loading, 40%", 0.4)
        await trio.sleep(1)
        assert entry.wait == ""
        nursery.start_soon(models.ask, "b")
        await trio.sleep(1)
        assert models.entry("b").wait == "model b waits for memory that a has"
        nursery.cancel_scope.cancel()


async def test_a_load_ends_with_the_last_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """While another one waits it goes on; the next request begins a new one."""
    async with shelf(monkeypatch, 4 * GIB) as models, trio.open_nursery() as nursery:
        one, two = trio.CancelScope(), trio.CancelScope()

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                await models.ask("a")

        nursery.start_soon(ask, one)
        nursery.start_soon(ask, two)
        await trio.sleep(0.25)
        one.cancel()
        await trio.sleep(0.25)
        assert models.entry("a").state == "loading"
        two.cancel()
        await trio.sleep(0.25)
        assert (models.entry("a").state, models.loads, models.free) == ("unloaded", [], 4 * GIB)
        assert await models.ask("a") == "a"


async def test_who_waits_for_memory_and_leaves_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A model that was about to make room takes requests again."""
    async with shelf(monkeypatch, 2 * GIB) as models, trio.open_nursery() as nursery:
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
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """As many wait as wait for a slot."""
    async with shelf(monkeypatch, 4 * GIB, max_queue=2) as models, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(models.ask, "a")
        await trio.sleep(0.1)
        with pytest.raises(Refusal, match="--max-queue") as refused:
            await models.ask("a")
        assert refused.value.code == "E_LIMIT_003"


async def test_an_explicit_model_is_loaded_by_name_only(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A request is told how; once it is loaded, it answers."""
    async with shelf(monkeypatch, 4 * GIB, load="explicit") as models:
        with pytest.raises(Refusal, match="uma-trio load a"):
            await models.ask("a")
        await models.keeper.ready(models.entry("a"), by_name=True)
        assert await models.ask("a") == "a"


# --- memory for one of two ---


async def test_requests_in_turn_for_two_models_are_collated(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Four clients ask A B A B, each one after the other: at most three loads serve the eight requests."""
    async with shelf(monkeypatch, 2 * GIB) as models:
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
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """So that at most half of the time goes into changes, however they ask."""
    async with shelf(monkeypatch, 2 * GIB) as models:

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
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Ten times of what its loading took is waited, so that a tenth of the time goes into changes."""
    async with shelf(monkeypatch, 2 * GIB) as models, trio.open_nursery() as nursery:

        async def stream() -> None:
            while True:
                await models.ask("a", 0.3)

        for delay in (0.1, 0.15, 1.1):
            nursery.start_soon(stream)
            await trio.sleep(delay)
        models.entry("a").took_s = 0.2
        began = trio.current_time()
        assert await models.ask("b") == "b"
        assert 2.0 <= trio.current_time() - began <= 2.0 + 0.5 + LOAD_S
        nursery.cancel_scope.cancel()


async def test_a_model_with_work_for_ever_gives_way(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It takes no further requests after a while, and those that run come to their end."""
    async with shelf(monkeypatch, 2 * GIB) as models, trio.open_nursery() as nursery:
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


def needing(models: Shelf, monkeypatch: pytest.MonkeyPatch, **gib: int) -> None:
    """Have models need so many GiB of memory, and take 2 of them when they are loaded."""

    def estimate(config: Config) -> Estimate:
        needs = Needs(4096, own=gib[config.alias[0]] * GIB - OURS, mapped=0, kv=0, compute=0)
        return Estimate(needs, (needs,))

    monkeypatch.setattr(trial, "estimate", estimate)


async def test_a_model_that_fits_does_not_wait_for_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The latter waits for the memory of a model with one long answer."""
    async with shelf(monkeypatch, 5 * GIB) as models, trio.open_nursery() as nursery:
        needing(models, monkeypatch, a=2, b=4, c=2)
        nursery.start_soon(models.ask, "a", 300.0)
        await trio.sleep(2)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(1)
        began = trio.current_time()
        await models.ask("c")
        assert trio.current_time() - began == pytest.approx(LOAD_S, abs=0.2)
        assert models.entry("a").deployment is not None
        await trio.sleep(320)
        assert models.loads == ["a", "c", "b"]


async def test_an_idle_model_stays_while_its_memory_alone_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It answers while another one waits for a busy model's memory besides."""
    async with shelf(monkeypatch, 6 * GIB) as models, trio.open_nursery() as nursery:
        needing(models, monkeypatch, a=2, b=6, c=2)
        nursery.start_soon(models.ask, "a", 300.0)
        await models.ask("c")
        await trio.sleep(60)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(8)
        assert models.entry("c").state == "loaded"
        began = trio.current_time()
        await models.ask("c")
        assert trio.current_time() - began < 1
        await trio.sleep(300)
        assert models.loaded == ["b"]


async def test_who_does_not_fit_beside_a_model_that_is_being_loaded_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Its memory is not free, and it cannot be unloaded yet: that is no reason to refuse."""
    async with shelf(monkeypatch, 2 * GIB) as models, trio.open_nursery() as nursery:
        real = room.available_memory
        nursery.start_soon(models.ask, "a")
        await trio.sleep(LOAD_S / 2)
        monkeypatch.setattr(
            room, "available_memory", lambda: 0 if models.entry("a").state == "loading" else real()
        )
        assert await models.ask("b") == "b"
        assert models.loads == ["a", "b"]


async def test_those_who_ask_and_leave_share_one_trial(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It runs to its end, and is charged to the first of them, who may never ask again; the model is not loaded for nobody."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        models.untried.add("a")
        for _ in range(20):
            with trio.move_on_after(0.03):
                await models.keeper.ready(models.entry("a"), "mallory")
        assert models.probes == ["a"]
        assert models.entry("a").state == "loading"
        await trio.sleep(PROBE_S)
        assert (models.entry("a").state, models.loads) == ("unloaded", [])
        assert models.service.debts == {"mallory": pytest.approx(PROBE_S)}
        await models.ask("a")
        assert (models.probes, models.loads) == (["a"], ["a"])


async def test_who_asks_again_during_a_trial_gets_the_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """One who left has ended nothing for others."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        models.untried.add("a")
        with trio.move_on_after(PROBE_S / 2):
            await models.ask("a")
        assert await models.ask("a") == "a"
        assert (models.probes, models.loads) == (["a"], ["a"])


async def test_a_refusal_counts_also_when_everybody_has_left(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """So that a damaged file is not tried anew by each who asks and leaves."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        models.untried.add("a")
        models.damaged.add("a")
        monkeypatch.setattr(trial, "estimate", models.compute)
        with trio.move_on_after(PROBE_S / 2):
            await models.ask("a")
        await trio.sleep(PROBE_S)
        assert models.entry("a").state == "failed"
        with pytest.raises(Refusal, match="GGML_ASSERT"):
            await models.ask("a")
        assert models.probes == ["a"]


async def test_one_trial_at_a_time_delays_only_those_who_need_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A model whose files are known is loaded while the files of another are looked at."""
    async with shelf(monkeypatch, 8 * GIB) as models, trio.open_nursery() as nursery:
        models.untried |= {"a", "b"}
        nursery.start_soon(models.ask, "a")
        await trio.sleep(0.1)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(0.1)
        assert models.probes == ["a"]
        with trio.fail_after(LOAD_S + 0.2):
            await models.ask("c")
        await trio.sleep(5)
        assert models.probes == ["a", "b"]
        assert sorted(models.loads) == ["a", "b", "c"]


async def test_a_model_that_is_known_to_assert_unloads_nobody(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Whoever asks for it reads why."""
    async with shelf(monkeypatch, 2 * GIB) as models:
        models.damaged.add("b")
        await models.ask("a")
        await trio.sleep(60)
        with pytest.raises(Refusal, match="GGML_ASSERT") as refused:
            await models.ask("b")
        assert refused.value.code == "E_MODEL_001"
        assert models.loaded == ["a"]


async def test_a_file_that_is_replaced_while_it_waits_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """What is loaded is the file that was tried, and room is made for that."""
    async with shelf(monkeypatch, 4 * GIB) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a", 20.0)
        nursery.start_soon(models.ask, "c", 20.0)
        await trio.sleep(3)
        nursery.start_soon(models.ask, "b")
        await trio.sleep(1)
        needing(models, monkeypatch, a=2, b=4, c=2)
        await trio.sleep(60)
        assert models.loaded == ["b"]


async def test_an_unloading_is_finished_while_the_daemon_ends(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """What was opened for the model is closed: its memory, and its trace."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        await models.ask("a")
        entry = models.entry("a")
        monkeypatch.setattr(models.keeper, "_let_go", let_go_slowly)
        with trio.move_on_after(0.1):
            await models.keeper.unload(entry)
        assert entry.held is not None  # whoever ends the daemon could close it
    assert (models.free, entry.held, entry.state) == (4 * GIB, None, "unloaded")


async def test_the_loader_is_charged_also_for_a_load_that_fails(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The machine was taken from the others all the same."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        models.broken["a"] = ModelError("the file is damaged.")
        with pytest.raises(Refusal):
            await models.keeper.ready(models.entry("a"), "eve")
        assert models.service.debts == {"eve": pytest.approx(LOAD_S)}


async def test_each_loading_has_a_trace_of_its_own(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """That of the loading before is not lost."""
    found: list[Path | None] = []
    async with shelf(monkeypatch, 4 * GIB, trace=tmp_path / "t.jsonl") as models:
        real = keeper.load

        async def noted(config: Config, *rest: Any, **more: Any) -> Any:
            found.append(config.trace)
            return await real(config, *rest, **more)

        monkeypatch.setattr(keeper, "load", noted)
        for _ in range(3):
            await models.ask("a")
            await models.keeper.unload(models.entry("a"))
    assert [path.name for path in found if path] == ["t.jsonl", "t-2.jsonl", "t-3.jsonl"]
