"""GET /openapi.json: what programs can read of the API."""

from __future__ import annotations

from http_kit import http_house
from trio.testing import MockClock


async def test_every_path_that_reads_a_body_has_its_fields(autojump_clock: MockClock) -> None:
    """With types and bounds, of the API's own names."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", "/openapi.json")
        assert answer.status == 200
        document = answer.json
    chat = document["paths"]["/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    properties = document["components"]["schemas"][name]["properties"]
    (top_p, _) = properties["top_p"]["anyOf"]
    assert (top_p["type"], top_p["minimum"], top_p["maximum"]) == ("number", 0, 1)
    assert "messages" in document["components"]["schemas"][name]["required"]
    assert "requestBody" not in document["paths"]["/api/pull"]["post"]
    assert document["paths"]["/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    assert document["paths"]["/health"]["get"]["security"] == []


async def test_a_body_that_has_some_fields_of_another_lists_only_these(
    autojump_clock: MockClock,
) -> None:
    """What a count of tokens ignores is not among its fields."""
    async with http_house() as daemon:
        paths = (await daemon.ask("GET", "/openapi.json")).json["paths"]
    body = paths["/messages/count_tokens"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "system", "tools"} <= fields.keys()
    assert not {"temperature", "stream", "max_tokens"} & fields.keys()


async def test_a_models_default_gives_way_to_a_field_under_any_of_its_names(
    autojump_clock: MockClock,
) -> None:
    """What decodes a body also says what its client set itself."""
    async with http_house() as daemon:
        daemon.inner.served.defaults = {"repeat_penalty": 1.5, "top_k": 7}
        used = []
        for fields in ({}, {"repeat_penalty": 1.25}, {"repetition_penalty": 1.25}):
            body = {"prompt": "hi", "n_predict": 1, **fields}
            answer = await daemon.ask("POST", "/completion", body)
            settings = answer.json["generation_settings"]
            used.append((settings["repeat_penalty"], settings["top_k"]))
        assert used == [(1.5, 7), (1.25, 7), (1.25, 7)]
