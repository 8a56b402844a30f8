"""Which models are loaded: room, the least recently used, who is in use, failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from attrs import define
from trio.testing import MockClock

from uma_trio import keeper
from uma_trio.backend.base import ModelError
from uma_trio.backend.needs import OURS, Estimate, Needs
from uma_trio.config.options import Config
from uma_trio.keeper import AGAIN_S, Entry, Keeper
from uma_trio.service.ask import Refusal

GIB = 1 << 30


@define
class Shelf:
    """A keeper of models of 2 GiB each, on a machine with so much free; `busy` are those that requests have."""

    keeper: Keeper
    free: int
    busy: list[str]
    loads: list[str]
    broken: list[str]

    async def ask(self, name: str) -> str:
        """Ask a model; return what it is called."""
        entry = self.keeper.find(name)
        assert entry is not None
        return str((await self.keeper.ready(entry)).bounds.model)

    @property
    def loaded(self) -> list[str]:
        """The models in memory."""
        return [entry.names[0] for entry in self.keeper.entries if entry.state == "loaded"]


async def at_once(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    """Call a function without a thread."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@asynccontextmanager
async def shelf(
    monkeypatch: pytest.MonkeyPatch, free: int, ttl_s: float | None = 1000.0
) -> AsyncIterator[Shelf]:
    """Run it in virtual time, with models that need nothing but numbers."""
    busy: list[str] = []
    names = ("a", "b", "c")
    entries = [
        Entry(Config(alias=(name,), model_ttl_s=ttl_s, loads_on_request=True)) for name in names
    ]
    default, service = SimpleNamespace(bounds=SimpleNamespace(model="first")), SimpleNamespace()
    service.default, service.removed = default, []
    service.remove = service.removed.append
    made: Any = None

    def deploy(loaded: Any) -> Any:
        name = loaded.config.alias[0]
        bounds = SimpleNamespace(model=name)
        return SimpleNamespace(served=SimpleNamespace(bounds=bounds, names=(name,)), name=name)

    async def let_go(deployment: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def load(config: Config, held: ExitStack, *_rest: Any) -> Any:
        await trio.sleep(1.0)
        if config.alias[0] in made.broken:
            raise ModelError("the file is damaged.")
        made.loads.append(config.alias[0])
        made.free -= 2 * GIB
        held.callback(lambda: setattr(made, "free", made.free + 2 * GIB))
        return SimpleNamespace(config=config)

    kept = Keeper(entries, service, deploy, let_go)  # type: ignore[arg-type]
    made = Shelf(kept, free, busy, [], [])

    class Directory:
        def __iter__(self) -> Any:
            return iter([SimpleNamespace(model=name) for name in busy])

    service.directory = Directory()
    needs = Needs(4096, own=2 * GIB - OURS, mapped=0, kv=0, compute=0)
    monkeypatch.setattr(keeper, "estimate", lambda _config: Estimate(needs, needs, (needs,)))
    monkeypatch.setattr(keeper, "available_memory", lambda: made.free)
    monkeypatch.setattr(keeper, "load", load)
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
    """Who has no room beside it is refused with the sum."""
    async with shelf(monkeypatch, 3 * GIB) as models:
        await models.ask("a")
        models.busy.append("a")
        with pytest.raises(Refusal, match=r"needs 2,048 MiB: .*; 1,024 MiB are free") as refused:
            await models.ask("b")
        assert refused.value.code == "E_MODEL_001"
        assert models.loaded == ["a"]


async def test_a_model_without_a_time_to_live_makes_room_for_nobody(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It stays until an operator unloads it."""
    async with shelf(monkeypatch, 3 * GIB, ttl_s=None) as models:
        await models.ask("a")
        with pytest.raises(Refusal):
            await models.ask("b")
        entry = models.keeper.find("a")
        assert entry is not None
        assert await models.keeper.unload(entry)
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
        await models.ask("a")
        models.busy.append("a")
        await trio.sleep(20)
        models.busy.clear()
        await trio.sleep(9)
        assert models.loaded == ["a"]
        await trio.sleep(2)
        assert models.loaded == []


async def test_what_failed_is_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The reason is told for half a minute; a file that was mended is loaded then."""
    async with shelf(monkeypatch, 4 * GIB) as models:
        models.broken.append("a")
        began = trio.current_time()
        for _ in range(2):
            with pytest.raises(Refusal, match="the file is damaged") as refused:
                await models.ask("a")
        assert trio.current_time() - began == pytest.approx(1.0, abs=0.01)
        assert refused.value.retry_after_s == pytest.approx(AGAIN_S, abs=0.1)
        models.broken.clear()
        await trio.sleep(AGAIN_S)
        assert await models.ask("a") == "a"
