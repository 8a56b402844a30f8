"""Variants of a model: contexts on the same weights up to a bound, bad adapters, variants that requests name."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from models_kit import GIB, Models, managed
from trio.testing import MockClock

from uma_trio.backend.base import ModelError
from uma_trio.models.refusal import Refusal


@asynccontextmanager
async def adapted(bad: tuple[str, ...] = (), **changes: Any) -> AsyncIterator[Models]:
    """Run models with the adapters `x`, `y` and `z`, of which some are `bad`."""
    lora = ("x=x.gguf", "y=y.gguf:0.5", "z=z.gguf")
    async with managed(64 * GIB, **{"lora": lora, "lora_contexts": 2, **changes}) as models:
        models.host.bad_adapters = bad
        yield models


async def test_a_variant_is_loaded_on_the_weights_of_its_model(
    autojump_clock: MockClock,
) -> None:
    """The model is loaded first, and stays for as long as the variant does."""
    async with adapted() as models:
        assert await models.ask("a:x") == "a:x"
        assert models.loads == ["a", "a:x"]
        assert not await models.manager.unload(models.model("a"))
        assert await models.manager.unload(models.model("a:x"))
        assert await models.manager.unload(models.model("a"))


async def test_idle_variants_go_with_their_model(
    autojump_clock: MockClock,
) -> None:
    """None of them does while a request uses one."""
    async with adapted() as models:
        for name in ("a:x", "a:y=0.3"):
            await models.ask(name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(models.ask, "a:x", 5.0)
            await trio.sleep(1.0)
            assert not await models.manager.unload(models.model("a"), with_variants=True)
            assert models.loaded == ["a", "a:x", "a:y=0.3"]
        assert await models.manager.unload(models.model("a"), with_variants=True)
        assert (models.loaded, models.free) == ([], 64 * GIB)


async def test_prefixes_of_an_adapter_that_was_replaced_are_dropped(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Those of the same file are there when the variant is loaded again."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"one")
    kept: Any = object()
    async with adapted(lora=(f"x={file}",)) as models:
        models.kept = kept
        await models.ask("a")
        for content in (b"one", b"one", b"three"):
            if content != file.read_bytes():
                file.write_bytes(content)
            await models.ask("a:x")
            assert await models.manager.unload(models.model("a:x"))
        assert models.given[1:] == [None, kept, None]


async def test_there_are_no_more_variants_than_contexts(
    autojump_clock: MockClock,
) -> None:
    """The one that was idle for the longest time goes; those of another model are not counted."""
    async with adapted() as models:
        for name in ("b:x", "a:x", "a:y", "a:z"):
            await models.ask(name)
            await trio.sleep(5)
        assert models.loaded == ["a", "b", "a:y", "a:z", "b:x"]


async def test_who_needs_a_context_waits_until_a_variant_is_idle(
    autojump_clock: MockClock,
) -> None:
    """An answer is never cut off for it."""
    async with adapted(lora_contexts=1) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a:x", 60.0)
        await trio.sleep(5)
        nursery.start_soon(models.ask, "a:y")
        await trio.sleep(50)
        assert models.model("a:x").loaded is not None
        await trio.sleep(15)
        assert models.loaded == ["a", "a:y"]


async def test_a_bad_adapter_is_told_to_its_asker(
    autojump_clock: MockClock,
) -> None:
    """The model and its other variants are served."""
    async with adapted(bad=("y",)) as models:
        with pytest.raises(Refusal, match=r"cannot load the adapter y\.gguf") as refused:
            await models.ask("a:y")
        assert refused.value.code == "E_MODEL_001"
        assert await models.ask("a") == "a"
        assert await models.ask("a:x") == "a:x"


async def test_a_model_that_cannot_be_loaded_has_no_variants(
    autojump_clock: MockClock,
) -> None:
    """Whoever asks for one reads why."""
    async with adapted() as models:
        models.broken["a"] = ModelError("the file is damaged.")
        with pytest.raises(Refusal, match="the file is damaged"):
            await models.ask("a:x")


async def test_declared_adapters_are_listed_and_others_are_forgotten(
    autojump_clock: MockClock,
) -> None:
    """However many scales a client tries."""
    async with adapted() as models:
        declared = [each.names[0] for each in models.manager.models]
        assert declared[:3] == ["a", "b", "c"]
        assert set(declared[3:6]) == {"a:x", "a:y", "a:z"}
        for n in range(1, 300):
            await models.ask(f"a:x={n / 100}")
            await trio.sleep(5)
        assert len(models.manager.models) <= len(declared) + 3


async def test_the_same_adapters_are_the_same_variant(
    autojump_clock: MockClock,
) -> None:
    """However a request says it; no adapters are the model itself."""
    async with adapted() as models:
        model = models.model
        assert model("a:y") is model("a:y=0.5")
        assert model("a:z+x") is model("a:x+z=1")
        assert model("a:x=0") is model("a")
        assert model("a:x") is not model("a:x=0.5")
        named = models.manager.with_adapters("a:x", [{"id": 1}])
        assert named == "a:y"
        with pytest.raises(Refusal, match="no adapter is called w"):
            model("a:w")
        assert models.manager.find("w:x", exact=True) is None


async def test_a_variant_that_waits_its_turn_does_not_keep_its_model_in_memory(
    autojump_clock: MockClock,
) -> None:
    """Another model waits for that memory before it, and is loaded."""
    async with adapted() as models, trio.open_nursery() as nursery:
        models.host.free = 2 * GIB

        async def ask_in_vain() -> None:
            with pytest.raises(Refusal, match="are free"):
                await models.ask("a:x")

        nursery.start_soon(models.ask, "a", 20.0)
        await trio.sleep(2)
        nursery.start_soon(models.ask, "c")
        await trio.sleep(1)
        nursery.start_soon(ask_in_vain)
        await trio.sleep(60)
        assert models.loads[:2] == ["a", "c"]


async def test_a_variant_does_not_wait_for_the_memory_of_its_own_model(
    autojump_clock: MockClock,
) -> None:
    """It is refused with the sum, and others are loaded."""
    async with adapted() as models:
        models.host.free = 3 * GIB
        await models.ask("a")
        with trio.fail_after(200), pytest.raises(Refusal, match="are free"):
            await models.ask("a:x")
        await trio.sleep(5)
        assert await models.ask("b") == "b"


async def test_a_model_goes_with_its_variants_when_its_time_is_over(
    autojump_clock: MockClock,
) -> None:
    """A variant has the time of its model, and a request of one is a request of the other."""
    async with adapted(model_ttl_s=60.0) as models:
        await models.ask("a")
        await models.ask("a:x")
        await trio.sleep(50)
        await models.ask("a:y")
        await trio.sleep(50)
        assert models.loaded == ["a", "a:y"]
        await trio.sleep(15)
        assert models.loaded == []


async def test_a_model_that_a_request_keeps_is_kept_with_its_variants(
    autojump_clock: MockClock,
) -> None:
    """So is one that is pinned; a variant may be kept for a time of its own."""
    async with adapted(model_ttl_s=None) as models:
        await models.ask("a:x")
        await models.ask("a:y")
        models.manager.keep("a", 30.0)
        models.manager.keep("a:x", 5.0)
        await trio.sleep(10)
        assert models.loaded == ["a", "a:y"]
        await trio.sleep(25)
        assert models.loaded == []


async def test_variants_of_two_models_that_need_each_others_memory_are_both_loaded(
    autojump_clock: MockClock,
) -> None:
    """None holds its model while it waits."""
    async with adapted() as models, trio.open_nursery() as nursery:
        models.host.free = 4 * GIB
        with trio.fail_after(300):
            async with trio.open_nursery() as asking:
                for name in ("a:x", "b:x"):
                    asking.start_soon(models.ask, name)
        nursery.cancel_scope.cancel()
    assert {"a:x", "b:x"} <= set(models.loads)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_asked_at_once_is_answered_within_its_memory(
    autojump_clock: MockClock, seed: int
) -> None:
    """Models, variants, trials, clients that leave, unloads by name: memory for two models at most."""
    rng = random.Random(seed)
    async with adapted(model_ttl_s=rng.choice([None, 5.0])) as models:
        models.host.free = rng.choice([2, 4]) * GIB  # in which a variant has the context of a model
        models.host.untried |= {"b", "c"}
        least = models.free
        names = ["a", "b", "c", *(["a:x", "b:y"] if models.free == 4 * GIB else [])]
        answered: list[str] = []

        async def client(name: str, after: float, answers_s: float, patience_s: float) -> None:
            await trio.sleep(after)
            with trio.move_on_after(patience_s) as waiting:
                await models.ask(name, answers_s)
            if not waiting.cancelled_caught:
                answered.append(name)

        async def watch() -> None:
            nonlocal least
            while True:
                least = min(least, models.free)
                if rng.random() < 0.05:
                    await models.manager.unload(models.model(rng.choice(names)))
                await trio.sleep(0.1)

        with trio.fail_after(3000):
            async with trio.open_nursery() as watching:
                watching.start_soon(watch)
                async with trio.open_nursery() as clients:
                    for _ in range(60):
                        patience_s = rng.choice([0.2, 3.0, 2900.0])
                        words = rng.choice(names), 60 * rng.random(), 5 * rng.random(), patience_s
                        clients.start_soon(client, *words)
                watching.cancel_scope.cancel()
        assert least >= 0
        assert len(answered) >= 20
