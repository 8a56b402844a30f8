"""Variants of a model: contexts on the same weights up to a bound, adapters that are bad, requests that make them up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from test_keeper import GIB, Shelf, shelf
from trio.testing import MockClock

from uma_trio.backend.base import Adapter, ModelError
from uma_trio.keeper import trial
from uma_trio.service.ask import Refusal

TRIED: list[str] = []
"""The adapters that were tried with a model, in order."""


@asynccontextmanager
async def adapted(
    monkeypatch: pytest.MonkeyPatch, bad: tuple[str, ...] = (), **changes: Any
) -> AsyncIterator[Shelf]:
    """Run models with the adapters `x`, `y` and `z`, of which some are `bad`."""

    def try_adapters(_config: object, adapters: Sequence[Adapter]) -> None:
        for each in adapters:
            TRIED.append(each.name)
            if each.name in bad:
                raise ModelError(f"llama.cpp cannot load the adapter {each.path}.")

    monkeypatch.setattr(trial, "variant_estimate", lambda config: trial.estimate(config))  # noqa: PLW0108 - it is replaced later
    monkeypatch.setattr(trial, "try_adapters", try_adapters)
    TRIED.clear()
    lora = ("x=x.gguf", "y=y.gguf:0.5", "z=z.gguf")
    options = {"lora": lora, "lora_contexts": 2, **changes}
    async with shelf(monkeypatch, 64 * GIB, **options) as models:
        yield models


async def test_a_variant_is_loaded_on_the_weights_of_its_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The model is loaded first, and stays for as long as the variant does."""
    async with adapted(monkeypatch) as models:
        assert await models.ask("a:x") == "a:x"
        assert models.loads == ["a", "a:x"]
        assert not await models.keeper.unload(models.entry("a"))
        assert await models.keeper.unload(models.entry("a:x"))
        assert await models.keeper.unload(models.entry("a"))


async def test_prefixes_of_an_adapter_that_was_replaced_are_dropped(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Those of the same file are there when the variant is loaded again."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"one")
    kept, given = object(), list[object]()
    async with adapted(monkeypatch, lora=(f"x={file}",)) as models:
        deploy = models.keeper._deploy

        def noting(entry: Any, loaded: Any) -> Any:
            given.append(entry.prefixes)
            made: Any = deploy(entry, loaded)
            made.prefixes = lambda: kept
            return made

        monkeypatch.setattr(models.keeper, "_deploy", noting)
        await models.ask("a")
        for content in (b"one", b"one", b"three"):
            if content != file.read_bytes():
                file.write_bytes(content)
            await models.ask("a:x")
            assert await models.keeper.unload(models.entry("a:x"))
        assert given[1:] == [None, kept, None]


async def test_an_adapter_is_tried_once_with_its_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Whatever scales are asked for: who asks for many does not keep other models waiting for trials."""
    async with adapted(monkeypatch) as models:
        for name in ("a:x", "a:x=0.3", "a:x=0.4+y", "b:x"):
            await models.ask(name)
        assert TRIED == ["x", "y", "x"]


async def test_there_are_no_more_variants_than_contexts(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The one that was idle for the longest time goes; those of another model are not counted."""
    async with adapted(monkeypatch) as models:
        for name in ("b:x", "a:x", "a:y", "a:z"):
            await models.ask(name)
            await trio.sleep(5)
        assert models.loaded == ["a", "b", "a:y", "a:z", "b:x"]


async def test_who_needs_a_context_waits_until_a_variant_is_idle(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """An answer is never cut off for it."""
    async with adapted(monkeypatch, lora_contexts=1) as models, trio.open_nursery() as nursery:
        nursery.start_soon(models.ask, "a:x", 60.0)
        await trio.sleep(5)
        nursery.start_soon(models.ask, "a:y")
        await trio.sleep(50)
        assert models.entry("a:x").deployment is not None
        await trio.sleep(15)
        assert models.loaded == ["a", "a:y"]


async def test_a_bad_adapter_is_told_to_its_asker(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The model and its other variants are served."""
    async with adapted(monkeypatch, bad=("y",)) as models:
        with pytest.raises(Refusal, match=r"cannot load the adapter y\.gguf") as refused:
            await models.ask("a:y")
        assert refused.value.code == "E_MODEL_001"
        assert await models.ask("a") == "a"
        assert await models.ask("a:x") == "a:x"


async def test_a_model_that_cannot_be_loaded_has_no_variants(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Whoever asks for one reads why."""
    async with adapted(monkeypatch) as models:
        models.broken["a"] = ModelError("the file is damaged.")
        with pytest.raises(Refusal, match="the file is damaged"):
            await models.ask("a:x")


async def test_declared_adapters_are_listed_and_others_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """However many scales a client tries."""
    async with adapted(monkeypatch) as models:
        declared = [entry.names[0] for entry in models.keeper.entries]
        assert declared[:3] == ["a", "b", "c"]
        assert set(declared[3:6]) == {"a:x", "a:y", "a:z"}
        for n in range(1, 300):
            await models.ask(f"a:x={n / 100}")
            await trio.sleep(5)
        assert len(models.keeper.entries) <= len(declared) + 3


async def test_the_same_adapters_are_the_same_variant(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """However a request says it; no adapters are the model itself."""
    async with adapted(monkeypatch) as models:
        entry = models.entry
        assert entry("a:y") is entry("a:y=0.5")
        assert entry("a:z+x") is entry("a:x+z=1")
        assert entry("a:x=0") is entry("a")
        assert entry("a:x") is not entry("a:x=0.5")
        named = models.keeper.with_adapters(entry("a:x"), [{"id": 1}])
        assert named == "a:y"
        with pytest.raises(Refusal, match="no adapter is called w"):
            entry("a:w")
        assert models.keeper.find("w:x") is None


async def test_a_variant_that_waits_its_turn_does_not_keep_its_model_in_memory(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Another model waits for that memory before it, and is loaded."""
    async with adapted(monkeypatch) as models, trio.open_nursery() as nursery:
        models.free = 2 * GIB

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
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It is refused with the sum, and others are loaded."""
    async with adapted(monkeypatch) as models:
        models.free = 3 * GIB
        await models.ask("a")
        with trio.fail_after(200), pytest.raises(Refusal, match="are free"):
            await models.ask("a:x")
        await trio.sleep(5)
        assert await models.ask("b") == "b"
