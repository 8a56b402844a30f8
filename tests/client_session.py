"""One session of five turns, with tools and a schema, as unmodified clients play it: ``client_session.py CLIENT BASE_URL``.

It prints what the client heard as one JSON object. `tests/sessions_kit.py` has the model's side of it. Needs nothing but the
client's packages, so that it runs beside any interpreter. ``--stream`` as a third argument streams, where the client can.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

QUESTIONS = ("What is in the cup, and what does it weigh?", "Is that heavy?")
MODEL = "any"

heard: dict[str, Any] = {"calls": [], "texts": [], "verdict": None}


def look(thing: str) -> str:
    """Look at a thing.

    Args:
        thing: What to look at.
    """
    heard["calls"].append(["look", {"thing": thing}])
    return f"{thing} is full"


def weigh(thing: str, unit: str | None = None) -> str:
    """Weigh a thing.

    Args:
        thing: What to weigh.
        unit: The unit, or nothing.
    """
    heard["calls"].append(["weigh", {"thing": thing, "unit": unit}])
    return f"{thing}: 300 {unit or 'grams'}"


class Verdict(BaseModel, extra="forbid"):
    """Whether a thing is heavy."""

    heavy: bool
    grams: int


TOOLS = (look, weigh)
PARAMETERS: dict[str, Any] = {
    "look": {"thing": {"type": "string"}},
    "weigh": {"thing": {"type": "string"}, "unit": {"type": ["string", "null"]}},
}
FORM = {
    "type": "object",
    "properties": {"heavy": {"type": "boolean"}, "grams": {"type": "integer"}},
    "required": ["heavy", "grams"],
    "additionalProperties": False,
}


def schemas(key: str = "parameters", **more: Any) -> list[dict[str, Any]]:
    """Return the functions as APIs describe them."""
    return [
        {
            "name": tool.__name__,
            "description": (tool.__doc__ or "").splitlines()[0],
            key: {
                "type": "object",
                "properties": PARAMETERS[tool.__name__],
                "required": list(PARAMETERS[tool.__name__]),
            },
            **more,
        }
        for tool in TOOLS
    ]


def run(name: str, arguments: str | dict[str, Any]) -> str:
    """Run a tool as a client does that gets a call."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {tool.__name__: tool for tool in TOOLS}[name](**given)


# --- OpenAI's form of a conversation, which several clients have ---

Message = dict[str, Any]
Ask = Callable[[list[Message], dict[str, Any]], Message]
CHAT_TOOLS = [{"type": "function", "function": each} for each in schemas()]
CHAT_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "schema": FORM, "strict": True},
}


def converse(ask: Ask, judge: Callable[[list[Message]], Any] | None = None) -> None:
    """Play the session with `ask`, which returns the assistant's message to messages and further arguments."""
    messages: list[Message] = [{"role": "system", "content": "Be brief."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            last = messages[-1]["role"] == "tool" and question is QUESTIONS[-1]
            if last and judge is not None:
                heard["verdict"] = judge(messages)
                return
            more = {"response_format": CHAT_FORM} if last else {"tools": CHAT_TOOLS}
            said = ask(messages, more)
            messages.append(said)
            if not said.get("tool_calls"):
                break
            for call in said["tool_calls"]:
                made = call["function"]
                result = run(made["name"], made["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        heard["texts"].append(said["content"])
    heard["verdict"] = json.loads(heard["texts"].pop())


def gathered(chunks: Iterable[Any]) -> Message:
    """Return the message that came as a stream."""
    content, calls = "", {}
    current: dict[
        int, Any
    ] = {}  # LiteLLM numbers every call of Ollama's API 0, with ids of their own
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                key = current[part.index] = part.id or current.get(part.index)
                call = calls.setdefault(key, {"id": key, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    made = [{"id": one.pop("id"), "type": "function", "function": one} for one in calls.values()]
    said = {"role": "assistant", "content": content or None}
    return {**said, "tool_calls": made} if made else said


def by_openai(create: Callable[..., Any], stream: bool, **fixed: Any) -> Ask:
    """Return what asks by a function with the arguments of OpenAI's `create`."""

    def ask(messages: list[Message], more: dict[str, Any]) -> Message:
        asked = {"messages": messages, **fixed, **more}
        if stream:
            return gathered(create(**asked, stream=True))
        message = create(**asked).choices[0].message
        found: Message = message.model_dump(exclude_none=True)
        return {"content": None, **found}  # some clients read it unguarded

    return ask


# --- the clients ---


def openai_chat(url: str, stream: bool) -> None:
    """Chat completions, with the answer parsed by the package."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def judge(messages: list[Message]) -> Any:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=Verdict
        )
        return parsed.choices[0].message.parsed.model_dump()

    ask = by_openai(client.chat.completions.create, stream, model=MODEL)
    converse(ask, None if stream else judge)


def openai_responses(url: str, stream: bool) -> None:
    """Responses, with the items that came sent back."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "strict": False, **each} for each in schemas()]
    items: list[Any] = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            last = question is QUESTIONS[-1] and items[-1].get("type") == "function_call_output"
            asked = {"model": MODEL, "input": items, "store": False}
            asked |= {"text_format": Verdict} if last else {"tools": tools}
            if stream:
                with client.responses.stream(**asked) as events:
                    found = events.get_final_response()
            elif last:
                found = client.responses.parse(**asked)
            else:
                found = client.responses.create(**asked)
            items += [
                item.model_dump(exclude_none=True, exclude={"parsed", "parsed_arguments"})
                for item in found.output
            ]
            calls = [item for item in found.output if item.type == "function_call"]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": run(call.name, call.arguments),
                }
                for call in calls
            ]
            if not calls:
                break
        if not last:
            heard["texts"].append(found.output_text)
    heard["verdict"] = found.output_parsed.model_dump()


def anthropic(url: str, stream: bool) -> None:
    """Messages, with the blocks that came sent back."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = schemas("input_schema")
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            last = question is QUESTIONS[-1] and not isinstance(messages[-1]["content"], str)
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": messages}
            asked |= {"output_format": Verdict} if last else {"tools": tools}
            if stream:
                with client.messages.stream(**asked) as events:
                    found = events.get_final_message()
            elif last:
                found = client.messages.parse(**asked)
            else:
                found = client.messages.create(**asked)
            uses = [block for block in found.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": found.content})
            if not uses:
                break
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": run(use.name, use.input)}
                for use in uses
            ]
            messages.append({"role": "user", "content": results})
        if not last:
            heard["texts"].append(found.content[-1].text)
    heard["verdict"] = found.parsed_output.model_dump()


def ollama(url: str, stream: bool) -> None:
    """Ollama's chat, with the functions themselves as tools."""
    import ollama as package

    client = package.Client(host=url)
    messages: list[Any] = []

    def ask(**asked: Any) -> Any:
        if not stream:
            return client.chat(model=MODEL, messages=messages, **asked).message
        parts = [
            part.message
            for part in client.chat(model=MODEL, messages=messages, stream=True, **asked)
        ]
        return package.Message(
            role="assistant",
            content="".join(part.content or "" for part in parts),
            thinking="".join(part.thinking or "" for part in parts) or None,
            tool_calls=[call for part in parts for call in part.tool_calls or ()] or None,
        )

    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            last = question is QUESTIONS[-1] and messages[-1]["role"] == "tool"
            said = ask(**({"format": Verdict.model_json_schema()} if last else {"tools": TOOLS}))
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                name = call.function.name
                result = run(name, dict(call.function.arguments))
                messages.append({"role": "tool", "tool_name": name, "content": result})
        heard["texts"].append(said.content)
    heard["verdict"] = Verdict.model_validate_json(heard["texts"].pop()).model_dump()


def langchain(url: str, stream: bool) -> None:
    """ChatOpenAI with bound tools, and with_structured_output."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0)
    bound = model.bind_tools(list(TOOLS))
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        while not (question is QUESTIONS[-1] and isinstance(messages[-1], ToolMessage)):
            if stream:
                said: Any = None
                for chunk in bound.stream(messages):
                    said = chunk if said is None else said + chunk
            else:
                said = bound.invoke(messages)
            messages.append(said)
            if not said.tool_calls:
                heard["texts"].append(said.text)
                break
            messages += [
                ToolMessage(run(call["name"], call["args"]), tool_call_id=call["id"])
                for call in said.tool_calls
            ]
    found = model.with_structured_output(Verdict, method="json_schema").invoke(messages)
    heard["verdict"] = found.model_dump()


def pydantic_ai(url: str, stream: bool) -> None:
    """Two runs of an agent, the second of which gives an object by a tool."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    first = Agent(model, tools=list(TOOLS), retries=0)
    second = Agent(model, tools=list(TOOLS), output_type=Verdict, retries=0)

    async def handle(_: Any, events: Any) -> None:
        async for _event in events:
            pass

    more = {"event_stream_handler": handle} if stream else {}
    result = first.run_sync(QUESTIONS[0], **more)
    heard["texts"].append(result.output)
    other = second.run_sync(QUESTIONS[1], message_history=result.all_messages(), **more)
    heard["verdict"] = other.output.model_dump()


def llm(url: str, stream: bool) -> None:
    """A conversation of the package behind the command `llm`."""
    with tempfile.TemporaryDirectory() as folder:
        entry = f'- model_id: local\n  model_name: {MODEL}\n  api_base: "{url}/v1"\n'
        able = "  supports_tools: true\n  supports_schema: true\n"
        Path(folder, "extra-openai-models.yaml").write_text(entry + able, encoding="utf-8")
        os.environ["LLM_USER_PATH"] = folder
        import llm as package

        model = package.get_model("local")
        model.key = "none"
        talk = model.conversation(tools=list(TOOLS))
        *_, last = talk.chain(QUESTIONS[0], stream=stream).responses()
        heard["texts"].append(last.text())
        asked = talk.prompt(QUESTIONS[1], tools=list(TOOLS), stream=stream)
        results = asked.execute_tool_calls()
        judged = talk.prompt("", tools=[], tool_results=results, schema=Verdict, stream=stream)
        heard["verdict"] = json.loads(judged.text())


def openai_agents(url: str, stream: bool) -> None:
    """Two runs of OpenAI's agents; the second has an output type."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    tools = [function_tool(tool) for tool in TOOLS]
    first = Agent(name="first", instructions="Be brief.", model=model, tools=tools)
    second = first.clone(name="second", output_type=Verdict)

    async def both() -> None:
        async def ask(agent: Any, said: Any) -> Any:
            if not stream:
                return await Runner.run(agent, said)
            running = Runner.run_streamed(agent, said)
            async for _ in running.stream_events():
                pass
            return running

        result = await ask(first, QUESTIONS[0])
        heard["texts"].append(result.final_output)
        asked = [*result.to_input_list(), {"role": "user", "content": QUESTIONS[1]}]
        heard["verdict"] = (await ask(second, asked)).final_output.model_dump()

    asyncio.run(both())


def litellm(url: str, stream: bool, route: str = "openai", base: str = "/v1") -> None:
    """LiteLLM by one of its routes."""
    import litellm as package

    package.drop_params = True
    fixed = {"model": f"{route}/{MODEL}", "api_base": url + base, "api_key": "none"}
    converse(by_openai(package.completion, stream, max_tokens=500, **fixed))


def litellm_ollama(url: str, stream: bool) -> None:
    """LiteLLM by Ollama's API."""
    litellm(url, stream, "ollama_chat", "")


def litellm_anthropic(url: str, stream: bool) -> None:
    """LiteLLM by Anthropic's API."""
    litellm(url, stream, "anthropic", "")


def instructor(url: str, stream: bool, mode: str = "JSON_SCHEMA") -> None:
    """Tools by the client underneath, and the object by a response model."""
    import instructor as package
    from openai import OpenAI

    plain = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    patched = package.from_openai(plain, mode=getattr(package.Mode, mode))

    def judge(messages: list[Message]) -> Any:
        asked = {"model": MODEL, "messages": messages, "response_model": Verdict}
        if stream:
            *_, found = patched.chat.completions.create_partial(**asked)
        else:
            found = patched.chat.completions.create(**asked, max_retries=0)
        return found.model_dump()

    converse(by_openai(plain.chat.completions.create, stream, model=MODEL), judge)


def instructor_tools(url: str, stream: bool) -> None:
    """The object by a tool that has to be called."""
    instructor(url, stream, "TOOLS")


def llama_index(url: str, stream: bool) -> None:
    """An agent of functions, and a structured model."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    able = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    model = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", max_retries=0, **able)
    tools = [FunctionTool.from_defaults(tool) for tool in TOOLS]
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(ChatMessage(role="user", content=question))
        while not (question is QUESTIONS[-1] and messages[-1].role == "tool"):
            asked: dict[str, Any] = {"chat_history": messages, "allow_parallel_tool_calls": True}
            if stream:
                *_, said = model.stream_chat_with_tools(tools, **asked)
            else:
                said = model.chat_with_tools(tools, **asked)
            messages.append(said.message)
            calls = model.get_tool_calls_from_response(said, error_on_no_tool_call=False)
            if not calls:
                heard["texts"].append(said.message.content)
                break
            messages += [
                ChatMessage(
                    role="tool",
                    content=run(call.tool_name, call.tool_kwargs),
                    additional_kwargs={"tool_call_id": call.tool_id},
                )
                for call in calls
            ]
    judged = model.as_structured_llm(Verdict).chat(messages)
    heard["verdict"] = judged.raw.model_dump()


def smolagents(url: str, stream: bool) -> None:
    """An agent that calls tools, also for its answers."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none")
    tools = [tool(each) for each in TOOLS]
    agent = ToolCallingAgent(
        tools=tools, model=model, stream_outputs=stream, verbosity_level=LogLevel.OFF, max_steps=4
    )
    heard["texts"].append(agent.run(QUESTIONS[0]))
    heard["verdict"] = json.loads(agent.run(QUESTIONS[1], reset=False))


CLIENTS: dict[str, tuple[str, Callable[[str, bool], None]]] = {
    "openai": ("openai", openai_chat),
    "openai-responses": ("openai", openai_responses),
    "anthropic": ("anthropic", anthropic),
    "ollama": ("ollama", ollama),
    "langchain": ("langchain-openai", langchain),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
    "llm": ("llm", llm),
    "openai-agents": ("openai-agents", openai_agents),
    "litellm": ("litellm", litellm),
    "litellm-ollama": ("litellm", litellm_ollama),
    "litellm-anthropic": ("litellm", litellm_anthropic),
    "instructor": ("instructor", instructor),
    "instructor-tools": ("instructor", instructor_tools),
    "llama-index": ("llama-index-llms-openai-like", llama_index),
    "smolagents": ("smolagents", smolagents),
}
"""The distribution of each client, and what plays the session."""


def main(client: str, url: str, *flags: str) -> None:
    """Play the session and print what was heard."""
    package, play = CLIENTS[client]
    play(url, "--stream" in flags)
    print(
        f"\n{json.dumps({**heard, 'version': version(package)})}"
    )  # some write without a line end before


if __name__ == "__main__":
    main(*sys.argv[1:])
