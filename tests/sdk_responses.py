"""What the openai package for Python does with Responses: ``python tests/sdk_responses.py BASE_URL``.

Needs a version that has ``responses.stream``; needs nothing else.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai
from pydantic import BaseModel

ASK: dict[str, Any] = {"model": "any", "input": "hello", "max_output_tokens": 400}
ASK["extra_body"] = {"seed": 1, "stop": ["z"]}
TOOL: Any = {
    "type": "function",
    "name": "look",
    "description": "Looks at a thing.",
    "parameters": {
        "type": "object",
        "properties": {"thing": {"enum": ["cup", "jar"]}},
        "required": ["thing"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Pet(BaseModel):
    """What an answer has to be."""

    kind: Literal["cat", "dog"]


def main(base_url: str) -> None:
    """Use everything that programs use, and check what comes."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    whole = client.responses.create(**ASK)
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    streamed(client, whole.output_text)
    cut = client.responses.create(**{**ASK, "max_output_tokens": 3, "extra_body": {}})
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    parsed(client)
    called(client)
    assert client.responses.input_tokens.count(model="any", input="hello").input_tokens > 0
    for more, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
    ):
        assert refused(partial(client.responses.create, **{**ASK, **more})).param == param
    assert refused(lambda: client.responses.retrieve("resp_1")).code == "response_not_found"
    asyncio.run(asynchronous(base_url, whole.output_text))
    client.close()
    print("ok", openai.__version__)


def streamed(client: openai.OpenAI, text: str) -> None:
    """The streaming helper keeps a snapshot, which it is strict about."""
    with client.responses.stream(**ASK) as stream:
        heard = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert heard == text == final.output_text
    assert final.status == "completed"


def parsed(client: openai.OpenAI) -> None:
    """Answers of a type, whole and streamed, by both APIs."""
    whole = client.responses.parse(**ASK, text_format=Pet)
    assert isinstance(whole.output_parsed, Pet)
    with client.responses.stream(**ASK, text_format=Pet) as stream:
        final = stream.get_final_response()
    assert final.output_parsed is not None
    chat: Any = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    chat |= {"max_tokens": 400, "response_format": Pet}
    assert client.chat.completions.parse(**chat).choices[0].message.parsed is not None
    with client.chat.completions.stream(**chat) as chunks:
        chunks.until_done()
        assert chunks.get_final_completion().choices[0].message.parsed is not None


def called(client: openai.OpenAI) -> None:
    """A call that is asked for comes, and its output goes back."""
    asked: dict[str, Any] = {**ASK, "tools": [TOOL], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "extra_body": {"seed": 1}}
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"][:1]
    assert call.name == "look"
    assert call.parsed_arguments["thing"] in ("cup", "jar")
    turns: list[Any] = [{"role": "user", "content": "hello"}]
    turns += [item.to_dict() for item in final.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "full"})
    after = client.responses.create(**{**ASK, "input": turns, "tools": [TOOL]})
    assert after.usage is not None
    assert final.usage is not None
    assert after.usage.input_tokens > final.usage.input_tokens


def refused(ask: Callable[[], object]) -> openai.APIStatusError:
    """Return the exception that a request raises."""
    try:
        ask()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it was not refused")


async def asynchronous(base_url: str, text: str) -> None:
    """The asynchronous client, whose connection is used again behind a stream."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for _ in range(2):
            async with client.responses.stream(**ASK) as stream:
                assert (await stream.get_final_response()).output_text == text


if __name__ == "__main__":
    main(sys.argv[1])
