"""Models that make vectors and scores in a real daemon: alone, several of them, on demand, beside an engine that dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from real_kit import asked, served

from models.encoders import EncoderShape, write_encoder
from uma_trio.client import connect
from uma_trio_sim.fake import FakeBackend, InjectedFault

EMBED, CHAT = "/v1/embeddings", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "model": "gpt-4", "max_tokens": 4}


async def width_of(port: int, **more: Any) -> int:
    """Ask for a vector; return how many numbers it has."""
    status, found = await asked(port, "POST", EMBED, {"input": "a fox", **more})
    assert status == 200, found
    return len(found["data"][0]["embedding"])


async def state_of(port: int, name: str) -> str:
    """Return whether a model is loaded, as the list of models says."""
    _, found = await asked(port, "GET", "/v1/models")
    states = {each["id"]: each["status"]["value"] for each in found["data"]}
    return str(states[name])


async def test_an_encoder_is_the_only_model(tmp_path: Path) -> None:
    """On both transports; who wants a chat is told what this model does."""
    file = write_encoder(tmp_path / "nomic-embed.gguf")
    async with served(tmp_path, "", model=str(file), threads="1") as port:
        assert await width_of(port, model="text-embedding-3-small") == 64
        status, found = await asked(port, "POST", CHAT, HELLO)
        assert (status, found["error"]["code"]) == (400, "unsupported_value")
        assert "nomic-embed makes vectors of texts" in found["error"]["message"]
        _, found = await asked(port, "POST", "/embedding", {"content": "a fox"})
        assert len(found[0]["embedding"][0]) == 64
        status, found = await asked(port, "POST", "/v1/rerank", {"query": "q", "documents": ["d"]})
        assert (status, "--rerank-model" in found["error"]["message"]) == (400, True)
        for path in ("/v1/models", "/api/tags", "/api/ps", "/props", "/slots", "/health"):
            assert (await asked(port, "GET", path))[0] == 200, path
        async with connect(tmp_path / "s") as client:
            assert len((await client.embed(["a fox"])).vectors[0]) == 64
            (model,) = (await client.overview()).models
            assert (model.name, model.gives) == ("nomic-embed", "vectors")


async def test_encoders_are_chosen_loaded_and_unloaded_by_name(tmp_path: Path) -> None:
    """By the same means as a model that writes."""
    small = write_encoder(tmp_path / "small.gguf")
    wide = write_encoder(tmp_path / "wide.gguf", EncoderShape(width=96, ffn=192))
    rank = write_encoder(tmp_path / "rank.gguf", EncoderShape(pooling="rank"))
    models = (
        f"  notes: {small}\n"
        f"  code: {{model: {wide}, load: on-demand, ttl: 10m, aliases: deep}}\n"
        f"  order: {{model: {rank}, load: on-demand}}\n"
    )
    async with served(tmp_path, models, threads="1") as port:
        assert await width_of(port) == 64
        assert await state_of(port, "code") == "unloaded"
        assert await width_of(port, model="deep") == 96
        assert await state_of(port, "code") == "loaded"
        status, found = await asked(port, "POST", EMBED, {"input": "a", "model": "notse"})
        assert (status, "did you mean notes" in found["error"]["message"]) == (404, True)
        status, found = await asked(port, "POST", EMBED, {"input": "a", "model": "order"})
        assert (status, "scores documents" in found["error"]["message"]) == (400, True)
        body = {"query": "q", "documents": ["a", "b"]}
        assert (await asked(port, "POST", "/v1/rerank", body))[0] == 200
        assert (await asked(port, "POST", "/unload", {"model": "code"}))[0] == 200
        assert await state_of(port, "code") == "unloaded"
        status, _ = await asked(port, "POST", "/api/embed", {"input": "a", "model": "code"})
        assert (status, await state_of(port, "code")) == (200, "loaded")
        forget = {"input": "a", "model": "code", "keep_alive": 0}
        assert (await asked(port, "POST", "/api/embed", forget))[0] == 200
        with trio.fail_after(10):
            while await state_of(port, "code") != "unloaded":  # noqa: ASYNC110 - asked by another process
                await trio.sleep(0.05)


async def test_encoders_outlive_the_engine_of_the_first_model(tmp_path: Path) -> None:
    """Its requests end with E_RUNTIME_004, and vectors are made as before."""
    breaks = FakeBackend(faults={2: InjectedFault(died="told to")})
    file = write_encoder(tmp_path / "embedder.gguf")
    more = {"embedding_model": str(file), "threads": "1"}
    async with served(tmp_path, "", breaks, **more) as port:
        status, found = await asked(port, "POST", "/v1/completions", {"prompt": "hello"})
        assert (status, found["error"]["uma_code"]) == (503, "E_RUNTIME_004")
        assert await width_of(port) == 64
        status, found = await asked(port, "POST", "/v1/completions", {"prompt": "hello"})
        assert (status, found["error"]["code"]) == (503, "model_not_loaded")
