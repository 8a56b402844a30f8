"""Paths as clients put them together: slashes too many, /v1 twice, names of models with slashes in them."""

from __future__ import annotations

from typing import Any

import pytest
from http_kit import http_house
from trio.testing import MockClock

USER = [{"role": "user", "content": "hi"}]
CHAT = {"messages": USER, "max_tokens": 1}
OLLAMA = {"messages": USER, "stream": False, "options": {"num_predict": 1}}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "//api/chat", OLLAMA),
        ("POST", "/api//chat/", OLLAMA),
        ("POST", "/v1/api/chat", OLLAMA),
        ("POST", "/v1/chat/completions/", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "/v1/v1/v1//chat//completions//", CHAT),
        ("POST", "/v1//chat/completions", CHAT),
        ("POST", "//v1/messages/", CHAT),
        ("POST", "/v1/messages/count_tokens/", {"messages": USER}),
        ("POST", "/v1/responses/", {"input": "hi", "max_output_tokens": 1}),
        ("POST", "/completion/", {"prompt": "a", "n_predict": 1}),
        ("POST", "/tokenize/", {"content": "a"}),
        ("GET", "/v1/models/", None),
        ("GET", "//v1//models", None),
        ("GET", "/v1/v1/models/", None),
        ("HEAD", "/v1/models//", None),
        ("OPTIONS", "//v1/models/", None),
        ("GET", "/api/tags/", None),
        ("GET", "/health/", None),
        ("GET", "//", None),
        ("GET", "/v1", None),
        ("GET", "/v1/", None),
        ("GET", "/v1/v1", None),
        ("GET", "/health/?a=b//c/", None),
        ("GET", "/metrics/router/", None),
        ("GET", "/ui//app.js", None),
        ("GET", "/v1/v1/ui/", None),
        ("GET", "http://localhost//v1/models/", None),
    ],
)
async def test_slashes_and_prefixes_too_many_lead_to_the_same(
    autojump_clock: MockClock, method: str, path: str, body: Any
) -> None:
    """Without a redirect, which would lose the body of a POST."""
    async with http_house() as daemon:
        assert (await daemon.ask(method, path, body)).status == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models/org%2Fname", "org/name"),
        ("/v1/models/org/name/", "org/name"),
        ("/v1/models/a%2F%2Fb", "a//b"),
        ("/v1/models/a%2F", "a/"),
        ("/v1/models/a%2F/", "a/"),
        ("/v1/models//a//b", "a/b"),
        ("/v1/v1/models/v1/models/x", "v1/models/x"),
        ("/v1/models/%2525", "%25"),
        ("/v1/models/f%C3%BCchse", "f\u00fcchse"),
    ],
)
async def test_what_is_encoded_in_a_name_stays(
    autojump_clock: MockClock, path: str, name: str
) -> None:
    async with http_house() as daemon:
        assert (await daemon.ask("GET", path)).json["id"] == name


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models"),
        ("GET", "/v1/nothing/"),
        ("GET", "/v1v1/models"),
        ("GET", "/v1/v1x/models"),
        ("GET", "/models%2F"),
        ("POST", "/chat"),
        ("POST", "/v1/chat/completions/more"),
        ("POST", "/health/x"),
        ("GET", "/ui/nothing.js"),
        ("GET", "/ui/ui/app.js"),
        ("GET", "/ui/v1/app.js"),
    ],
)
async def test_other_paths_lead_nowhere(autojump_clock: MockClock, method: str, path: str) -> None:
    async with http_house() as daemon:
        assert (await daemon.ask(method, path, {} if method == "POST" else None)).status == 404


async def test_the_page_keeps_its_slash(autojump_clock: MockClock) -> None:
    """Its files are named beside it."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", "/ui")
        assert (answer.status, answer.headers["location"]) == (307, "ui/")
        assert (await daemon.ask("GET", "/ui/")).headers["content-type"].startswith("text/html")


async def test_embeddings_of_two_apis_stay_apart(autojump_clock: MockClock) -> None:
    """llama-server's answer is a list, OpenAI's is an object: by the prefix, however it is written."""
    async with http_house() as daemon:
        for path, chunks in (("//completions/", "content"), ("/v1/v1/completions", "choices")):
            asked = {"prompt": "a", "n_predict": 1, "max_tokens": 1}
            assert chunks in (await daemon.ask("POST", path, asked)).json


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/messages", {"type", "error", "request_id"}),
        ("/api/chat", {"error", "code"}),
        ("/v1/chat/completions", {"error"}),
    ],
)
async def test_a_wrong_method_is_told_as_the_api_does(
    autojump_clock: MockClock, path: str, form: set[str]
) -> None:
    async with http_house() as daemon:
        answer = await daemon.ask("GET", path)
        assert answer.status == 405
        assert set(answer.json) == form
