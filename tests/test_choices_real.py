"""Several answers from the bundled model, by a whole daemon over its socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

pytest.importorskip("llama_cpp")

from uma_trio.app import daemon
from uma_trio.client import Client, connect
from uma_trio.config.settings import load
from uma_trio.models import bundled_model

pytestmark = pytest.mark.real

PROMPT = (
    "Tell me a story about an owl who lives in a tower by the sea and looks for a lost lantern."
)
PATIENCE_S = 60.0


@asynccontextmanager
async def served() -> AsyncIterator[Client]:
    """Run a daemon with the bundled model, and connect to it."""
    with tempfile.TemporaryDirectory(prefix="uma") as folder:
        path = Path(folder) / "s"
        flags = {"n-ctx": "2048", "parallel": "4", "threads": "1", "prefix-ram": "32MiB"}
        flags |= {"policy": "baseline", "flash_attention": "off"}
        config = load(
            {"socket": str(path), "model": str(bundled_model()), **flags},
            env={},
        )
        ready = trio.Event()
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                run = daemon.serve
                nursery.start_soon(lambda: run(config, on_ready=lambda _: ready.set()))
                await ready.wait()
                async with connect(path) as client:
                    yield client
                nursery.cancel_scope.cancel()


async def test_three_answers_share_the_prompt_and_clear_leaves_nothing() -> None:
    """Two of them fork from the first; greedy, they say what one says alone."""
    async with served() as client:
        generation = client.generate(PROMPT, n=3, max_tokens=24, temperature=0)
        texts = await generation.texts()
        assert generation.eos is not None
        usage = generation.eos.usage
        assert (usage.completion_tokens, usage.cached_tokens) == (72, 0)
        found = {story.choice: story for story in (await client.explain()).requests}
        beginnings = [found[choice].beginning for choice in (1, 2)]
        assert [(b.source, b.tokens) for b in beginnings if b is not None] == [
            ("fork", usage.prompt_tokens - 1)
        ] * 2
        assert texts == [await client.generate(PROMPT, max_tokens=24, temperature=0).text()] * 3

        sampled = client.generate(PROMPT, n=3, max_tokens=24, temperature=0.9, seed=4)
        assert len(set(await sampled.texts())) == 3
        assert sampled.eos is not None
        # What is cached leaves two tokens to compute without flash attention, which is off here.
        assert sampled.eos.usage.cached_tokens == usage.prompt_tokens - 2

        cleared = await client.prefix("clear")
        assert (cleared.used_bytes, cleared.prefixes) == (0, ())
        held = ("kv_cells_used", "prefix_bytes")
        while any([(await client.metrics())[name] for name in held]):
            await trio.lowlevel.checkpoint()  # the engine writes them behind its answer
