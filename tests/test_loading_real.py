"""Loading in a real daemon: files that end llama.cpp's process, a killed trial, memory for one of two models."""

from __future__ import annotations

import gc
import json
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import trio
from damage_kit import called, refused, with_float
from real_kit import asked, served
from test_probes import children as probes

from models.encoders import write_encoder
from uma_trio.app.build import Builder
from uma_trio.backend import llama_probe
from uma_trio.backend._llama_vocab import ModelHandle
from uma_trio.backend.gguf_header import read_header
from uma_trio.models import bundled_model, host
from uma_trio.models.model import Model

ASK = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


def with_a_token_twice(path: Path) -> Path:
    """Write the bundled model with two equal tokens in its vocabulary, at which llama.cpp aborts."""
    data = bytearray(bundled_model().read_bytes())
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    _, _, n = struct.unpack_from("<IIQ", data, at)
    at += struct.calcsize("<IIQ")
    first: dict[int, bytes] = {}
    for _ in range(n):
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
        token = bytes(data[at : at + length])
        if length > 4 and first.setdefault(length, token) != token:
            data[at : at + length] = first[length]
            path.write_bytes(data)
            return path
        at += length
    raise AssertionError("no two tokens of one length")


def copy(path: Path) -> Path:
    """Write the bundled model."""
    path.write_bytes(bundled_model().read_bytes())
    return path


def cut(path: Path) -> Path:
    """Write the beginning of the bundled model."""
    whole = bundled_model().read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


@pytest.mark.parametrize("damage", [with_a_token_twice, cut])
async def test_a_file_that_ends_llama_cpp_ends_its_own_request_only(
    tmp_path: Path, damage: Callable[[Path], Path]
) -> None:
    """It is tried in a child: a stream of another model goes on, and the asker gets 503 with the reason."""
    bad = damage(tmp_path / "bad.gguf")
    models = f"  one: {bundled_model()}\n  bad: {{model: {bad}, load: on-demand}}\n"
    async with served(tmp_path, models) as port, trio.open_nursery() as nursery:
        found: list[tuple[int, Any]] = []

        async def stream() -> None:
            body = {**ASK, "max_tokens": 200, "ignore_eos": True}
            found.append(await asked(port, "POST", "/v1/completions", body))

        nursery.start_soon(stream)
        status, answer = await asked(port, "POST", "/v1/completions", {**ASK, "model": "bad"})
        assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
        assert "bad cannot be loaded" in answer["error"]["message"]
    (status, answer) = found[0]
    assert (status, answer["usage"]["completion_tokens"]) == (200, 200)


async def test_a_trial_that_is_killed_ends_its_own_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does where memory is short."""
    real = llama_probe.subprocess.Popen

    def killed(command: list[str], **options: Any) -> Any:
        script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        return real([command[0], "-c", script], **options)

    models = f"  one: {bundled_model()}\n  two: {{model: {bundled_model()}, load: on-demand}}\n"
    async with served(tmp_path, models) as port:
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no trial is remembered
            patch.setattr(llama_probe, "_remembered", OrderedDict())
            patch.setattr(llama_probe.subprocess, "Popen", killed)
            status, _ = await asked(port, "POST", "/v1/completions", {**ASK, "model": "two"})
        assert status == 503
        assert (await asked(port, "POST", "/v1/completions", ASK))[0] == 200


@pytest.mark.parametrize("epsilon", [-1e-5, float("nan")])
async def test_a_file_that_asserts_at_its_first_token_ends_its_own_request_only(
    tmp_path: Path, epsilon: float
) -> None:
    """llama.cpp loads it without a word: two tokens are computed in a process of their own first."""
    bad = with_float(copy(tmp_path / "bad.gguf"), "layer_norm_rms_epsilon", epsilon)
    models = f"  one: {bundled_model()}\n  bad: {{model: {bad}, load: on-demand}}\n"
    async with served(tmp_path, models) as port:
        for stream in (False, True):
            body = {**ASK, "model": "bad", "stream": stream}
            status, answer = await asked(port, "POST", "/v1/completions", body)
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
            assert "GGML_ASSERT(eps >= 0.0f)" in answer["error"]["message"]
        assert (await asked(port, "POST", "/v1/completions", ASK))[0] == 200


async def test_an_encoder_that_asserts_at_its_first_text_ends_its_own_request_only(
    tmp_path: Path,
) -> None:
    """As a model that writes does."""
    bad = with_float(write_encoder(tmp_path / "bad.gguf"), "layer_norm_epsilon", -1.0)
    models = f"  one: {bundled_model()}\n  bad: {{model: {bad}, load: on-demand}}\n"
    async with served(tmp_path, models) as port:
        status, answer = await asked(port, "POST", "/v1/embeddings", {"model": "bad", "input": "x"})
        assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
        assert (await asked(port, "POST", "/v1/completions", ASK))[0] == 200


async def test_a_file_cannot_take_the_name_of_another_model(tmp_path: Path) -> None:
    """Before and after its own model is loaded: for requests, what is told of a model, and loading and unloading."""
    name = "victimvictimvictim"[: len(read_header(bundled_model()).name)]
    thief = called(tmp_path / "thief.gguf", name.encode())
    models = (
        f"  pinned: {{model: {bundled_model()}, pin: true}}\n"
        f"  thief: {{model: {thief}, n_ctx: 256, load: on-demand}}\n"
        f"  {name}: {{model: {bundled_model()}, n_ctx: 1024, load: on-demand}}\n"
    )
    async with served(tmp_path, models) as port:

        async def states() -> dict[str, str]:
            _, listed = await asked(port, "GET", "/v1/models")
            assert all(name not in one["aliases"] for one in listed["data"])
            return {one["id"]: one["status"]["value"] for one in listed["data"]}

        for is_loaded in (False, True):
            if is_loaded:
                assert (await asked(port, "POST", "/load", {"model": "thief"}))[0] == 200
            for asks in (name, f"{name}:latest"):
                assert (await asked(port, "POST", "/load", {"model": asks}))[0] == 200
                _, props = await asked(port, "GET", f"/props?model={asks}")
                assert props["model_alias"] == name
                assert props["default_generation_settings"]["n_ctx"] == 1024
                body = {**ASK, "model": asks}
                assert (await asked(port, "POST", "/v1/completions", body))[0] == 200
                assert (await asked(port, "POST", "/unload", {"model": asks}))[0] == 200
                wanted = "loaded" if is_loaded else "unloaded"
                assert await states() == {"thief": wanted, "pinned": "loaded", name: "unloaded"}


async def test_a_name_from_a_file_is_a_name_before_it_is_loaded(tmp_path: Path) -> None:
    """What a name means does not depend on what happens to be in memory."""
    file = called(tmp_path / "x.gguf", b"filesnamefilesname")
    name = read_header(file).name
    models = f"  one: {bundled_model()}\n  two: {{model: {file}, n_ctx: 256, load: on-demand}}\n"
    async with served(tmp_path, models) as port:
        assert (await asked(port, "POST", "/v1/completions", {**ASK, "model": name}))[0] == 200
        _, props = await asked(port, "GET", f"/props?model={name}")
        assert props["model_alias"] == "two"


async def test_a_default_model_without_a_name_does_not_take_one_from_its_file(
    tmp_path: Path,
) -> None:
    """It is called by its file then, and two models are never listed under one name."""
    thief = called(tmp_path / "thief.gguf", b"coder-coder-coder")
    name = read_header(thief).name
    models = f"  {name}: {{model: {bundled_model()}, n_ctx: 1024}}\n"
    async with served(tmp_path, models, model=str(thief)) as port:
        _, listed = await asked(port, "GET", "/v1/models")
        assert sorted(one["id"] for one in listed["data"]) == sorted([name, "thief"])
        _, props = await asked(port, "GET", f"/props?model={name}")
        assert props["default_generation_settings"]["n_ctx"] == 1024
        _, answer = await asked(port, "POST", "/v1/completions", ASK)
        assert answer["model"] == "thief"


async def test_cancelled_requests_for_a_model_leave_nothing(tmp_path: Path) -> None:
    """They share one trial, which outlives them; the last probe is waited for when the daemon ends."""
    bad = refused(tmp_path / "bad.gguf")
    models = f"  one: {bundled_model()}\n  bad: {{model: {bad}, load: on-demand}}\n"
    before = threading.active_count()
    most = 0
    async with served(tmp_path, models) as port:
        body = json.dumps({**ASK, "model": "bad"}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Content-Type: application/json\r\n\r\n"
        for _ in range(40):
            client = await trio.open_tcp_stream("127.0.0.1", port)
            await client.send_all(head.encode() + body)
            await trio.sleep(0.02)
            await client.aclose()
            most = max(most, len(probes(os.getpid())))
        status, answer = await asked(port, "POST", "/v1/completions", {**ASK, "model": "bad"})
        assert (status, "bad cannot be loaded" in answer["error"]["message"]) == (503, True)
    assert most == 1
    assert probes(os.getpid()) == []
    assert threading.active_count() <= before + 8


async def test_the_weights_of_every_model_are_freed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that were loaded with the daemon: whoever holds a vocabulary keeps the weights."""
    weights: list[Callable[[], object]] = []
    real = ModelHandle.__init__

    def noted(handle: ModelHandle, pointer: int) -> None:
        real(handle, pointer)
        weights.append(ref(handle))

    monkeypatch.setattr(ModelHandle, "__init__", noted)
    models = f"  one: {bundled_model()}\n  two: {{model: {bundled_model()}, load: start}}\n"
    async with served(tmp_path, models) as port:
        assert len(weights) >= 2
        for name in ("one", "two"):
            held = {**ASK, "model": name, "json_schema": {"type": "boolean"}}
            assert (await asked(port, "POST", "/completion", held))[0] == 200
            assert (await asked(port, "POST", "/models/unload", {"model": name}))[0] == 200
        gc.collect()
        assert [handle() for handle in weights if handle() is not None] == []


async def test_two_models_on_memory_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients ask A B A B: nothing is cut off, at most three loads, and a prompt of before is still cached."""
    loads: list[str] = []
    real = Builder.build

    async def counted(builder: Builder, model: Model, *rest: Any) -> Any:
        made = await real(builder, model, *rest)
        loads.append(model.names[0])
        return made

    monkeypatch.setattr(Builder, "build", counted)
    models = f"  a: {bundled_model()}\n  b: {{model: {bundled_model()}, load: on-demand}}\n"
    prompt = "Once upon a time there was a fox. " * 12
    async with served(tmp_path, models) as port:

        def free() -> int:
            return 0 if resident() else 1 << 40

        def resident() -> bool:
            import gc

            return any(
                isinstance(each, Model) and each.loaded is not None for each in gc.get_objects()
            )

        monkeypatch.setattr(host, "available_memory", free)
        answers: list[tuple[int, Any]] = []

        async def client(names: str) -> None:
            for name in names:
                body = {
                    **ASK,
                    "model": name,
                    "prompt": prompt,
                    "max_tokens": 12,
                    "ignore_eos": True,
                }
                answers.append(await asked(port, "POST", "/v1/completions", body))

        async with trio.open_nursery() as nursery:
            for names in ("ab", "ba", "ab", "ba"):
                nursery.start_soon(client, names)
        assert [status for status, _ in answers] == [200] * 8
        assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {12}
        assert len(loads) <= 3
        assert (await asked(port, "POST", "/models/unload", {"model": loads[-1]}))[0] == 200
        body = {**ASK, "model": "a", "prompt": prompt}
        _, answer = await asked(port, "POST", "/v1/completions", body)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


async def test_a_file_that_was_replaced_is_loaded_under_its_own_name(tmp_path: Path) -> None:
    """Where the model has no other name: it answers requests that name none, as before."""
    file, data = tmp_path / "first.gguf", bundled_model().read_bytes()
    file.write_bytes(data)
    at = data.index(b"general.name") + len("general.name") + struct.calcsize("<IQ")
    async with served(tmp_path, f"  b: {bundled_model()}\n", model=str(file)) as port:
        _, listed = await asked(port, "GET", "/v1/models")
        name = listed["data"][0]["id"]
        assert (await asked(port, "POST", "/models/unload", {"model": name}))[0] == 200
        (tmp_path / "new").write_bytes(data[:at] + name[::-1].encode() + data[at + len(name) :])
        (tmp_path / "new").replace(file)
        status, answer = await asked(port, "POST", "/v1/completions", ASK)
        assert (status, answer["model"]) == (200, name[::-1])
        assert (await asked(port, "GET", "/props"))[1]["model_alias"] == name[::-1]
