"""Lists of models and rights over them: what is described without loading it, who may unload, whose names are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from http_kit import http_house
from test_http_events import messages, watch
from test_loading import loading_house
from trio.testing import MockClock

from uma_trio.models import bundled_model
from uma_trio.service.ask import Origin
from uma_trio.sockets.principal import Principal

STRANGER = Principal(connection=0, host="127.0.0.1", uid=54321)
ORIGIN = "http://page.example"
UNLOAD = {"model": "code", "keep_alive": 0, "stream": False}


@pytest.fixture
def file() -> Path:
    return Path(bundled_model())


# --- models that are not loaded ---


async def test_a_model_is_shown_without_loading_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, file: Path
) -> None:
    async with loading_house(model=file, n_ctx=512) as daemon:
        shown = (await daemon.house.ask("POST", "/api/show", {"model": "code:latest"})).json
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["model_info"]["llama.embedding_length"] == 256
        assert shown["model_info"]["general.parameter_count"] > 1_000_000
        assert shown["capabilities"] == ["completion", "tools"]
        assert "message" in shown["template"]
        assert daemon.code.state == "unloaded"


async def test_a_model_without_its_file_is_refused_and_names_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with loading_house(model=tmp_path / "gone.gguf") as daemon:
        answer = await daemon.house.ask("POST", "/api/show", {"model": "code"})
        assert answer.status == 503
        assert "gone.gguf" in answer.json["error"]


async def test_a_model_of_openai_is_described_without_loading_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with loading_house() as daemon:
        found = (await daemon.house.ask("GET", "/v1/models/code")).json
        assert (found["id"], found["status"]["value"]) == ("code", "unloaded")
        version = {"anthropic_version": "2023-06-01"}
        found = (await daemon.house.ask("GET", "/v1/models/code", **version)).json
        assert (found["id"], found["type"]) == ("code", "model")
        assert daemon.code.state == "unloaded"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/api/show", {"model": "cod"}), ("GET", "/v1/models/cod", None)],
)
async def test_a_strict_daemon_describes_no_other_model_instead(
    method: str, path: str, body: Any, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with loading_house() as daemon:
        assert (await daemon.house.ask(method, path, body)).status == 404


async def test_the_digest_of_a_model_stays_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, file: Path
) -> None:
    """Clients take another digest for another model."""

    async def digests() -> dict[str, str]:
        listed = (await daemon.house.ask("GET", "/api/tags")).json["models"]
        return {one["name"]: one["digest"] for one in listed}

    async with loading_house(model=file) as daemon:
        before = await digests()
        await daemon.house.ask("POST", "/api/generate", {"model": "code", "stream": False})
        assert daemon.code.state == "loaded"
        assert await digests() == before
        assert len(set(before.values())) == 2


# --- who may unload ---


async def test_a_page_keeps_and_unloads_no_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Its reader may be the operator, who may; /unload refuses pages, too."""
    async with loading_house({"origins": frozenset({ORIGIN})}) as daemon:
        asked = {"prompt": "x", "model": "code", "stream": False}
        await daemon.house.ask("POST", "/api/generate", asked)
        for path, body in (
            ("/api/generate", {**asked, "keep_alive": 0}),
            ("/api/generate", UNLOAD),
            ("/v1/completions", {"prompt": "x", "model": "code", "max_tokens": 1, "keep_alive": 0}),
        ):
            answer = await daemon.house.ask("POST", path, body, Origin=ORIGIN)
            assert answer.status == 200, answer.body
            assert "keep_alive" in answer.headers["x-uma-ignored"]
        await trio.sleep(2)
        assert daemon.code.state == "loaded"


async def test_a_stranger_is_not_told_that_a_model_was_unloaded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with loading_house() as daemon:
        await daemon.house.ask("POST", "/api/generate", {"model": "code", "stream": False})
        daemon.house.peer = STRANGER
        answer = await daemon.house.ask("POST", "/api/generate", UNLOAD)
        assert (answer.json["done_reason"], answer.headers["x-uma-ignored"]) == (
            *("load", "keep_alive"),
        )
        await trio.sleep(2)
        assert daemon.code.state == "loaded"


async def test_nothing_is_loaded_or_answered_for_to_unload_an_unloaded_model(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with loading_house() as daemon:
        for peer in (None, STRANGER):
            daemon.house.peer = peer
            answer = await daemon.house.ask("POST", "/api/chat", UNLOAD)
            assert (answer.status, answer.json["done_reason"]) == (200, "unload")
            assert answer.json["message"]["content"] == ""
        assert daemon.code.state == "unloaded"


async def test_an_unknown_model_is_not_unloaded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with loading_house() as daemon:
        answer = await daemon.house.ask("POST", "/api/generate", {**UNLOAD, "model": "cod"})
        assert answer.status == 404
        assert "did you mean code" in answer.json["error"]


async def test_the_only_model_stays_loaded(autojump_clock: MockClock) -> None:
    async with http_house() as daemon:
        answer = await daemon.ask("POST", "/api/generate", UNLOAD)
        assert (answer.json["done_reason"], answer.headers["x-uma-ignored"]) == (
            *("load", "keep_alive"),
        )


# --- names ---


async def test_a_hidden_model_is_named_in_no_list(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with loading_house(alias=("secret",), model_hidden=True) as daemon:
        for load in (False, True):
            if load:
                body = {"model": "secret", "stream": False}
                assert (await daemon.house.ask("POST", "/api/generate", body)).status == 200
            for path in ("/v1/models", "/api/tags", "/api/ps", "/metrics", "/slots"):
                assert b"secret" not in (await daemon.house.ask("GET", path)).body, path
            watcher = await watch(daemon.house)
            assert "secret" not in str(await messages(watcher, 2))
            watcher.close()


async def test_a_variant_that_a_request_made_up_is_in_no_list(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Its name is another user's word."""
    async with loading_house() as daemon:
        daemon.code.is_temporary = True
        for path in ("/v1/models", "/api/tags"):
            assert b"code" not in (await daemon.house.ask("GET", path)).body, path


# --- numbers ---


async def test_moving_a_request_does_not_tell_whether_another_users_lives(
    autojump_clock: MockClock,
) -> None:
    async with http_house() as daemon:
        client = daemon.connect()
        await client.send("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 200})
        await trio.sleep(0.01)
        (running,) = list(daemon.inner.service.directory)
        assert isinstance(running.origin, Origin)
        daemon.peer = STRANGER
        answers = [
            await daemon.ask("POST", "/priority", {**asked, "priority": "background"})
            for asked in (
                {"request": running.handle},
                {"request": 999_999},
                {"id": running.origin.name},
                {"id": "nobody"},
            )
        ]
        assert {answer.status for answer in answers} == {404}
        assert len({answer.body for answer in answers}) == 1
        client.close()


async def test_no_figure_tells_a_stranger_the_length_of_a_request(
    autojump_clock: MockClock,
) -> None:
    """What did not change but by the request of another user says how long it was."""

    async def seen() -> str:
        watcher = await watch(daemon, "/events")
        told = str(await messages(watcher, 1.5))
        watcher.close()
        every = [told]
        for path in ("/metrics?format=prometheus", "/metrics?format=json", "/slots"):
            every.append((await daemon.ask("GET", path)).body.decode())
        return " ".join(every)

    async with http_house() as daemon:
        daemon.peer = STRANGER
        before = await seen()
        for name in (
            '"prompt_tokens_total"',
            "\numa_prompt_tokens_total",
            "tokens_generated_total",
            "\numa_generation_tokens_total",
            '"prefix_tokens_total"',
            "'prefixes'",
            "\numa_kv_cells_used",
            "'cells'",
        ):
            assert name not in before, name
        daemon.peer = None
        assert "'cells'" in await seen()
