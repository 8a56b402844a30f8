"""What the anthropic package for Python does with Messages: ``python tests/sdk_messages.py BASE_URL``.

Needs nothing else.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

ASK: dict[str, Any] = {"model": "claude-any", "max_tokens": 400, "stop_sequences": ["z"]}
ASK |= {"messages": [{"role": "user", "content": "hello"}], "extra_body": {"seed": 1}}
TOOL: Any = {
    "name": "look",
    "description": "Looks at a thing.",
    "input_schema": {
        "type": "object",
        "properties": {"thing": {"enum": ["cup", "jar"]}},
        "required": ["thing"],
        "additionalProperties": False,
    },
}


class Pet(BaseModel):
    """What an answer has to be."""

    kind: Literal["cat", "dog"]


def main(base_url: str) -> None:
    """Use everything that programs use, and check what comes."""
    client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
    whole = client.messages.create(**ASK)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "z")
    text = whole.content[0].text
    streamed(client, text, whole.usage)
    asked = {name: ASK[name] for name in ("model", "messages")}
    counted = client.messages.count_tokens(**asked)
    cached = whole.usage.cache_read_input_tokens
    assert counted.input_tokens == whole.usage.input_tokens + cached
    called(client)
    pet = client.messages.parse(**{**ASK, "stop_sequences": []}, output_format=Pet)
    assert isinstance(pet.parsed_output, Pet)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    refusal = refused(client)
    assert "prompt is too long" in str(refusal)
    assert refusal.request_id
    asyncio.run(asynchronous(base_url, text))
    client.close()
    print("ok", anthropic.__version__)


def streamed(client: anthropic.Anthropic, text: str, usage: Any) -> None:
    """The streaming helper keeps a snapshot."""
    with client.messages.stream(**ASK) as stream:
        heard = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert heard == text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("stop_sequence", usage.output_tokens)


def called(client: anthropic.Anthropic) -> None:
    """A use that is asked for comes, and its result goes back."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {**ASK, "tools": [TOOL], "tool_choice": choice, "stop_sequences": []}
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (use,) = [block for block in final.content if block.type == "tool_use"][:1]
    assert use.input["thing"] in ("cup", "jar")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "full"}
    turns = [*ASK["messages"], {"role": "assistant", "content": final.content}]
    turns.append({"role": "user", "content": [result]})
    after = client.messages.create(**{**ASK, "messages": turns, "tools": [TOOL]})
    before = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > before


def refused(client: anthropic.Anthropic) -> anthropic.BadRequestError:
    """Return the exception that a prompt raises which is too long."""
    try:
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 9000}]})
    except anthropic.BadRequestError as error:
        return error
    raise AssertionError("it was not refused")


async def asynchronous(base_url: str, text: str) -> None:
    """The asynchronous client, whose connection is used again behind a stream."""
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none") as client:
        for _ in range(2):
            async with client.messages.stream(**ASK) as stream:
                assert await stream.get_final_text() == text


if __name__ == "__main__":
    main(sys.argv[1])
