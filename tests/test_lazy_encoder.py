"""An encoder that is in memory only while it is used: loaded by a request, freed when nobody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from encoder_kit import FakeEncoder, vector_of
from net_kit import house
from trio.testing import MockClock

from uma_protocol import Embed, Eos, Error, ListSessions, Sessions, Vectors
from uma_trio.backend.base import ModelError
from uma_trio.backend.encoder import EncodeFailed, EncoderModel
from uma_trio.backend.lazy_encoder import LazyEncoder

TTL_S = 5.0


def lazy(make: Callable[[], EncoderModel] = FakeEncoder) -> LazyEncoder:
    """Return an encoder that is not loaded."""
    known = FakeEncoder()
    return LazyEncoder(known.info, known.vocabulary, make)


def test_it_is_loaded_once_and_freed() -> None:
    """However often either is asked for; it computes what the model computes."""
    made: list[FakeEncoder] = []
    encoder = lazy(lambda: made.append(FakeEncoder()) or made[-1])  # type: ignore[func-returns-value]
    assert not encoder.unload()
    encoder.load()
    encoder.load()
    assert (encoder.is_loaded, len(made)) == (True, 1)
    tokens = np.arange(5, dtype=np.int32)
    encoder.begin([tokens])
    (vector,) = encoder.advance(1.0)  # type: ignore[misc]
    assert np.array_equal(vector, vector_of(tokens))
    assert (encoder.unload(), encoder.is_loaded) == (True, False)


def test_it_is_not_freed_during_a_step() -> None:
    """Which may end, fail or be dropped."""
    encoder = lazy(lambda: FakeEncoder(fails=(2,)))
    encoder.load()
    tokens = [np.arange(30, dtype=np.int32)]
    encoder.begin(tokens)
    encoder.advance(0.0)
    assert not encoder.unload()
    encoder.drop()
    encoder.begin(tokens)
    with pytest.raises(EncodeFailed, match="status 2"):
        encoder.advance(1.0)
    assert encoder.unload()


def test_a_step_of_an_encoder_that_is_not_there_fails() -> None:
    """With a reason, and without a model."""
    encoder = lazy()
    assert (encoder.rows_within(1.0), encoder.next_s()) == (1, 0.0)
    with pytest.raises(EncodeFailed, match="unloaded"):
        encoder.begin([np.arange(3, dtype=np.int32)])
    encoder.drop()
    encoder.close()


async def test_a_request_loads_it_and_a_pause_frees_it(autojump_clock: MockClock) -> None:
    """`sessions` says which it is; the next request has it again."""
    encoder = lazy()
    async with house(encoders={"embed": encoder}) as daemon:
        embedder = daemon.service.embedders["embed"]
        embedder.lazy, embedder.ttl_s = encoder, TTL_S
        daemon.nursery.start_soon(embedder.unload_idle)
        client = daemon.connect()
        for _ in range(2):
            assert not encoder.is_loaded
            await client.send(Embed(id="a", input=("b",)))
            assert len((await client.until(Vectors)).vectors) == 1
            await client.until(Eos)
            await trio.sleep(TTL_S - 1)
            await client.send(ListSessions())
            assert (await client.until(Sessions)).models[1].state == "loaded"
            await trio.sleep(2)
        await client.send(ListSessions())
        assert (await client.until(Sessions)).models[1].state == "unloaded"


async def test_a_request_that_comes_while_it_is_freed_loads_it_again(
    autojump_clock: MockClock,
) -> None:
    """The thread that frees it may begin only then."""
    encoder = lazy()
    async with house(encoders={"embed": encoder}) as daemon:
        embedder = daemon.service.embedders["embed"]
        embedder.lazy, embedder.ttl_s = encoder, TTL_S
        run_blocking, frees = embedder.run_blocking, trio.Event()

        async def run_late(function: Callable[[], Any], /) -> Any:
            if function == encoder.unload:
                frees.set()
                await trio.sleep(0.5)
            return await run_blocking(function)

        embedder.run_blocking = run_late
        client = daemon.connect()
        daemon.nursery.start_soon(embedder.unload_idle)
        await client.send(Embed(id="a", input=("b",)))
        await client.until(Eos)
        await frees.wait()
        await client.send(Embed(id="b", input=("b",)))
        assert len((await client.until(Vectors)).vectors) == 1


async def test_one_that_cannot_be_loaded_is_refused_with_the_reason(
    autojump_clock: MockClock,
) -> None:
    """And with the time after which to ask again."""

    def fails() -> EncoderModel:
        raise ModelError("it needs 500 MiB, and 3 MiB are free")

    encoder = lazy(fails)
    async with house(encoders={"embed": encoder}) as daemon:
        daemon.service.embedders["embed"].lazy = encoder
        client = daemon.connect()
        await client.send(Embed(id="a", input=("b",)))
        error = await client.until(Error)
        assert (error.code, error.retry_after_ms) == ("E_MODEL_001", 30_000)
        assert "3 MiB are free" in error.message
