"""A daemon with one model and adapters: requests choose by name and by list, a bad adapter hurts nobody else."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from test_several_models import asked

from uma_trio.app import daemon
from uma_trio.backend.base import ModelError
from uma_trio.config.settings import load

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from models.adapters import write_adapter
from models.synthetic import write_model

pytestmark = pytest.mark.real


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model, two adapters, and one that has the tensors of none."""
    write_model(tmp_path / "tiny.gguf", name="tiny")
    for seed, name in enumerate(("one", "two"), start=1):
        write_adapter(tmp_path / f"{name}.gguf", seed=seed)
    whole = (tmp_path / "one.gguf").read_bytes()
    (tmp_path / "bad.gguf").write_bytes(whole.replace(b"blk.1.attn_q", b"blk.7.attn_q"))
    return tmp_path


def settings(folder: Path, **flags: Any) -> Any:
    """Return a configuration of the model with its adapters."""
    lora = tuple(f"{name}={folder / name}.gguf" for name in ("one", "two", "bad"))
    given = {"model": folder / "tiny.gguf", "socket": str(folder / "s"), "policy": "baseline"}
    return load({**given, "n_ctx": "256", "parallel": "2", "lora": lora, **flags}, {})


async def test_requests_choose_their_adapters(folder: Path) -> None:
    """Answers of variants that are computed at once are those of each alone, and no cached prefix is shared."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ready, texts = trio.Event(), dict[str, str]()

    async def answer(name: str, **more: Any) -> tuple[int, Any]:
        body = {
            "prompt": "Once upon a time " * 4,
            "max_tokens": 12,
            "temperature": 0,
            "model": name,
        }
        return await asked(port, "POST", "/v1/completions", {**body, "ignore_eos": True, **more})

    async def note(name: str) -> None:
        status, found = await answer(name)
        assert status == 200, found
        texts[name] = found["choices"][0]["text"]
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            config = settings(folder, http=f"127.0.0.1:{port}")
            nursery.start_soon(partial(daemon.serve, config, on_ready=lambda _info: ready.set()))
            await ready.wait()
            _, listed = await asked(port, "GET", "/lora-adapters")
            assert [(one["id"], one["name"]) for one in listed] == [
                (0, "one"),
                (1, "two"),
                (2, "bad"),
            ]
            for name in ("tiny", "tiny:one", "tiny:two"):
                await note(name)
            assert len(set(texts.values())) == 3
            _, found = await answer("anything", lora=[{"id": 0, "scale": 1.0}])
            assert found["choices"][0]["text"] == texts["tiny:one"]
            alone = dict(texts)
            async with trio.open_nursery() as crowd:
                for name, more in (("tiny:one", {}), ("tiny:two", {}), ("tiny", {})):
                    crowd.start_soon(partial(answer, name, **more))
            for name, text in alone.items():
                _, found = await answer(name)
                assert found["choices"][0]["text"] == text
            status, found = await answer("tiny:bad")
            assert (status, found["error"]["code"]) == (503, "model_not_loaded")
            assert "does not exist in base model" in found["error"]["message"]
            status, found = await answer("tiny:on")
            assert (status, found["error"]["code"]) == (404, "model_not_found")
            assert (await answer("tiny", lora=[{"id": 9}]))[0] == 400
            _, listed = await asked(port, "GET", "/v1/models")
            states = {one["id"]: one["status"]["value"] for one in listed["data"]}
            assert states["tiny:one"] == states["tiny:two"] == "loaded"
            assert states["tiny:bad"] == "failed"
            nursery.cancel_scope.cancel()


async def test_a_file_that_is_no_adapter_is_refused_at_start(folder: Path) -> None:
    """Before anything is loaded."""
    for text, said in ((folder / "tiny.gguf", "no LoRA adapter"), (folder / "no.gguf", "no")):
        with pytest.raises(ModelError, match=said):
            await daemon.serve(settings(folder, lora=(str(text),)))
