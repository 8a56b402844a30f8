"""What the ollama package for Python does: ``python tests/sdk_ollama.py BASE_URL``.

Needs nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import ollama

ASK: dict[str, Any] = {"model": "any", "options": {"seed": 1, "num_predict": 400, "stop": ["z"]}}
SAID = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def look(thing: str) -> str:
    """Look at a thing.

    Args:
        thing: what to look at
    """
    return f"{thing} is full"


def main(base_url: str) -> None:
    """Use everything that programs use, and check what comes."""
    client = ollama.Client(host=base_url)
    whole = client.chat(**ASK, messages=SAID)
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "any")
    assert whole.message.role == "assistant"
    text = whole.message.content
    assert text
    assert whole.eval_count
    assert whole.total_duration
    parts = list(client.chat(**ASK, messages=SAID, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    generated(client)
    formatted(client)
    models(client)
    refused(client)
    asyncio.run(asynchronous(base_url, text))
    print("ok")


def generated(client: ollama.Client) -> None:
    """A prompt is answered, whole and streamed; none loads the model."""
    whole = client.generate(**ASK, prompt="hello", system="be kind")
    parts = list(client.generate(**ASK, prompt="hello", system="be kind", stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response
    raw = client.generate(**ASK, prompt="hello", raw=True, logprobs=True, top_logprobs=2)
    assert raw.prompt_eval_count is not None
    assert whole.prompt_eval_count is not None
    assert raw.prompt_eval_count < whole.prompt_eval_count
    assert raw.logprobs
    assert raw.eval_count is not None
    assert len(raw.logprobs) <= raw.eval_count
    assert len(raw.logprobs[0].top_logprobs or ()) == 2
    assert client.generate(model="any", keep_alive=5).done_reason == "load"


def formatted(client: ollama.Client) -> None:
    """An answer in the form of a schema, and one that is any object."""
    asked = {"model": "any", "messages": SAID, "options": {"temperature": 0, "num_predict": 300}}
    said = client.chat(**asked, format=SCHEMA, think=False).message.content
    assert json.loads(said or "")["kind"] in ("cat", "dog")
    assert (client.chat(**asked, format="json").message.content or "").lstrip().startswith("{")


def models(client: ollama.Client) -> None:
    """The model is listed, described and running, under a name with a tag."""
    (model,) = client.list().models
    assert (model.model or "").endswith(":latest")
    (running,) = client.ps().models
    assert running.digest == model.digest
    assert running.context_length
    shown = client.show(model.model or "")
    assert "completion" in (shown.capabilities or ())
    assert shown.modelinfo
    assert client.chat(model=model.model or "", messages=SAID, options={"num_predict": 1}).done


def refused(client: ollama.Client) -> None:
    """What is wrong or not served is raised with its status."""
    for status, ask in (
        (400, lambda: client.chat(model="any", messages=[{"role": "user", "content": "x" * 9000}])),
        (400, lambda: list(client.chat(model="any", messages=SAID, think="much", stream=True))),
        (400, lambda: client.generate(model="any", prompt="x", images=["aGk="])),
        (400, lambda: client.embed("any", "x")),
        (400, lambda: client.pull("any")),
    ):
        error = raised(ask)
        assert error.status_code == status, error
        assert error.error, error
        assert not error.error.startswith("{"), error


def raised(ask: Callable[[], object]) -> ollama.ResponseError:
    """Return the exception that a call raises."""
    try:
        ask()
    except ollama.ResponseError as error:
        return error
    raise AssertionError("it was not refused")


async def asynchronous(base_url: str, text: str) -> None:
    """The asynchronous client, whose connection is used again behind a stream."""
    client = ollama.AsyncClient(host=base_url)
    for _ in range(2):
        parts = [part async for part in await client.chat(**ASK, messages=SAID, stream=True)]
        assert "".join(part.message.content or "" for part in parts) == text


def called(base_url: str) -> None:
    """A model that thinks calls a function of ours, and is told what came of it."""
    client = ollama.Client(host=base_url)
    messages: list[Any] = [{"role": "user", "content": "What is in the cup?"}]
    asked: dict[str, Any] = {"model": "any", "tools": [look], "think": True}
    parts = list(client.chat(**asked, messages=messages, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "I look first."
    ((call,),) = [part.message.tool_calls for part in parts if part.message.tool_calls]
    assert call.function.name == "look"
    assert look(**call.function.arguments) == "the cup is full"
    assert parts[-1].done_reason == "stop"
    turn = {"role": "assistant", "thinking": "I look first.", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "look", "content": "full"}
    final = client.chat(**asked, messages=[*messages, turn, result])
    assert final.message.content == "It is full."
    print("ok")


def embedded(base_url: str) -> None:
    """Vectors of texts from a second model, beside chats with the first."""
    client = ollama.Client(host=base_url)
    found = client.embed(model="any", input=["a fox", "the sea"])
    one, two = found.embeddings
    assert len(one) == len(two) > 8
    assert one != two
    assert abs(sum(x * x for x in one) - 1) < 1e-3
    assert found.prompt_eval_count
    (alone,) = client.embed(model="any", input="a fox").embeddings
    # Computed beside another text a vector differs in its last bits.
    assert max(abs(x - y) for x, y in zip(one, alone, strict=True)) < 1e-3
    assert len(client.embed(model="any", input="a fox", dimensions=8).embeddings[0]) == 8
    assert len(client.embeddings(model="any", prompt="a fox").embedding) == len(one)
    error = raised(lambda: client.embed(model="any", input="fox " * 4000, truncate=False))
    assert error.status_code == 400, error
    names = [model.model for model in client.list().models]
    assert len(names) == len(set(names)) == 2, names
    assert len(client.ps().models) == 2
    assert client.chat(model="any", messages=SAID, options={"num_predict": 2}).message.content
    vectors = asyncio.run(ollama.AsyncClient(host=base_url).embed(model="any", input=["a fox"]))
    assert vectors.embeddings == [alone]
    print("ok")


if __name__ == "__main__":
    kinds = {"--tools": called, "--embed": embedded}
    kinds.get(sys.argv[-1], main)(sys.argv[1])
