"""What the openai package for Python does with a daemon: ``python tests/sdk_client.py BASE_URL``.

Runs with any version of the package that is installed beside the interpreter; needs nothing else.
"""

from __future__ import annotations

import asyncio
import sys

import openai

HELLO = [{"role": "user", "content": "hello"}]
ASK = {"model": "any", "messages": HELLO, "max_tokens": 12, "seed": 1}


def main(base_url: str) -> None:
    """Use everything that programs use, and check what comes."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    models = client.models.list()
    assert client.models.retrieve(models.data[0].id).id == models.data[0].id
    whole = client.chat.completions.create(**ASK)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    pieces = client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(pieces)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == 12
    several = client.chat.completions.create(**ASK, n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in several:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] == text
    helper(client)
    probable = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3)
    assert len(probable.choices[0].logprobs.content[0].top_logprobs) == 3
    legacy = client.completions.create(model="any", prompt="hello", max_tokens=5, logprobs=1)
    assert len(legacy.choices[0].logprobs.tokens) == 5
    errors(client)
    asyncio.run(asynchronous(base_url, text))
    client.close()
    print("ok", openai.__version__)


def helper(client: openai.OpenAI) -> None:
    """The streaming helper keeps a snapshot, which it is strict about."""
    kinds = set()
    with client.chat.completions.stream(**{**ASK, "stop": ["\u0000none"]}) as stream:
        for event in stream:
            kinds.add(event.type)
    assert {"chunk", "content.delta"} <= kinds


def errors(client: openai.OpenAI) -> None:
    """Each becomes the exception of its status, with the code and the field."""
    long = [{"role": "user", "content": "x" * 9000}]
    assert refused(client, {**ASK, "messages": long}).code == "context_length_exceeded"
    assert refused(client, {**ASK, "temperature": -1}).param == "temperature"


def refused(client: openai.OpenAI, asked: dict[str, object]) -> openai.BadRequestError:
    """Return the exception that a request raises."""
    try:
        client.chat.completions.create(**asked)
    except openai.BadRequestError as error:
        return error
    raise AssertionError("it was not refused")


async def asynchronous(base_url: str, text: str) -> None:
    """The asynchronous client, whose connection is used again behind a stream."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for _ in range(2):
            stream = await client.chat.completions.create(**ASK, stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == text


if __name__ == "__main__":
    main(sys.argv[1])
