"""Agents as they ask: the shapes of Codex' and Claude Code's requests, and sessions of several turns."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from http_kit import Answer, HttpHouse, http_house
from net_kit import TICK_S
from reply_kit import THINKING_TEMPLATE
from trio.testing import MockClock

from uma_trio.api.responses.messages import seal
from uma_trio_sim.fake import linear_cost
from uma_trio_sim.scripted import ScriptedBackend

DATA = Path(__file__).resolve().parent / "data"
# Tokens of the fake are bytes; this is what a prompt ends with that the next turn need not begin with.
ENDING = len("<|im_start|>assistant\n")


def house(*replies: str) -> Any:
    """Return a daemon whose model says this, with room for an agent's prompts and a prefix cache."""
    backend = ScriptedBackend(
        [list(reply.encode()) for reply in replies or ("I see.",)],
        n_ctx=32_768,
        n_batch=512,
        cost=linear_cost(TICK_S, 0),
        chat_template=THINKING_TEMPLATE,
    )
    return http_house(backend=backend, prefix_bytes=64 << 20)


def fixture(name: str) -> dict[str, Any]:
    """Return the first request of a session."""
    found: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return {**found, "temperature": 0}  # so that the model keeps to its script


def grows(used: list[tuple[int, int]]) -> None:
    """Check that each turn begins with all of the prompt before it, as far as that goes on."""
    for (before, _), (_, cached) in itertools.pairwise(used):
        assert cached >= before - ENDING, used


# --- Codex ---


async def codex(daemon: HttpHouse, request: dict[str, Any]) -> tuple[Answer, tuple[int, int]]:
    """Ask as Codex does, read as it does; return the tokens of the prompt, and those cached."""
    answer = await daemon.ask("POST", "/v1/responses", request, accept="text/event-stream")
    assert answer.status == 200, answer.body
    events = answer.events
    assert events[0]["type"] == "response.created"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert all(item["type"] in ("message", "reasoning", "function_call") for item in items)
    last = events[-1]
    assert last["type"] == "response.completed", "else it says that the stream was closed before"
    usage = last["response"]["usage"]
    return answer, (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


async def test_a_session_of_codex_computes_each_turn_once(autojump_clock: MockClock) -> None:
    """Its tools and fields are all taken or named; what it sends again is found in the cache."""
    request = fixture("agent_codex.json")
    call = {"type": "function_call", "call_id": "c1", "name": "exec_command"}
    note = {"type": "function_call", "call_id": "c2", "namespace": "mcp__notes", "name": "find"}
    turns: list[list[dict[str, Any]]] = [
        [
            {"type": "reasoning", "summary": [], "encrypted_content": seal("I look first.")},
            {**call, "arguments": '{"cmd": "cat greet.py"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "print('hello')\n"},
        ],
        [
            {**note, "arguments": '{"query": "greet"}'},
            {"type": "function_call_output", "call_id": "c2", "output": "no notes"},
        ],
        [
            {"type": "message", "role": "assistant", "content": text("output_text", "hello")},
            {"type": "message", "role": "developer", "content": text("input_text", "<mode/>")},
            {"type": "message", "role": "user", "content": text("input_text", "Say goodbye.")},
        ],
    ]
    async with house() as daemon:
        answer, first = await codex(daemon, request)
        used = [first]
        named = answer.headers["x-uma-ignored"].split(", ")
        assert named == ["client_metadata", "tools[2] custom", "tools[3] web_search"]
        for turn in turns:
            request["input"] += turn
            used.append((await codex(daemon, request))[1])
        grows(used)


LOOKS = (
    "<think>\nI look first.\n</think>\n\nLet me look."
    '<tool_call>\n{"name": "%s", "arguments": {"%s": "cat greet.py"}}\n</tool_call>'
)


async def test_codex_sends_back_what_the_model_said(autojump_clock: MockClock) -> None:
    """Thought, words and call, of which nothing has to be computed again."""
    request = fixture("agent_codex.json")
    async with house(LOOKS % ("exec_command", "cmd"), "It prints hello.") as daemon:
        answer, (prompt, _) = await codex(daemon, request)
        response = answer.events[-1]["response"]
        thought, words, call = response["output"]
        assert thought["summary"] == [{"type": "summary_text", "text": "I look first."}]
        assert words["content"][0]["text"] == "Let me look."
        assert json.loads(call["arguments"]) == {"cmd": "cat greet.py"}
        carried = {**thought, "summary": []}  # it comes back by what is sealed
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "hello"}
        request["input"] += [carried, words, call, output]
        answer, (_, cached) = await codex(daemon, request)
        assert cached >= prompt + response["usage"]["output_tokens"] - 1
        (item,) = answer.events[-1]["response"]["output"]
        assert item["content"][0]["text"] == "It prints hello."


def text(kind: str, said: str) -> list[dict[str, str]]:
    """Return a content of one part."""
    return [{"type": kind, "text": said}]


# --- Claude Code ---

HEADERS = {"anthropic_version": "2023-06-01", "anthropic_beta": "claude-code-20250219"}


async def claude(daemon: HttpHouse, request: dict[str, Any]) -> tuple[Answer, tuple[int, int]]:
    """Ask as Claude Code does; return the tokens of the prompt, and those cached."""
    answer = await daemon.ask("POST", "/v1/messages?beta=true", request, **HEADERS)
    assert answer.status == 200, answer.body
    start, *_, delta, _ = answer.events
    usage = delta["usage"]
    cached = usage["cache_read_input_tokens"]
    prompt = usage["input_tokens"] + cached
    assert start["message"]["usage"]["input_tokens"] == prompt
    return answer, (prompt, cached)


async def test_a_session_of_claude_code_computes_each_turn_once(autojump_clock: MockClock) -> None:
    """Although a line of its system text differs in each request."""
    request = fixture("agent_claude_code.json")
    turns: list[list[dict[str, Any]]] = [
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look first.", "signature": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a"}},
                    {"type": "tool_use", "id": "t2", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "print('hello')"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": text("text", "no such folder"),
                    },
                    {"type": "text", "text": "<system-reminder>Two files.</system-reminder>"},
                ],
            },
        ],
        [
            {"role": "assistant", "content": text("text", "It prints hello.")},
            {"role": "user", "content": "Say goodbye."},
        ],
    ]
    async with house() as daemon:
        answer, first = await claude(daemon, request)
        used = [first]
        named = answer.headers["x-uma-ignored"].split(", ")
        assert sorted(named) == ["context_management", "metadata", "tools[2] web_search_20250305"]
        for nth, turn in enumerate(turns):
            request["messages"] += turn
            line = request["system"][0]
            line["text"] = f"{line['text'].rpartition('=')[0]}={nth:05x};"
            used.append((await claude(daemon, request))[1])
        grows(used)


async def test_claude_code_sends_back_what_the_model_said(autojump_clock: MockClock) -> None:
    """Thought, words and use, of which nothing has to be computed again."""
    request = fixture("agent_claude_code.json")
    async with house(LOOKS % ("Bash", "command"), "It prints hello.") as daemon:
        whole = await daemon.ask("POST", "/v1/messages", {**request, "stream": False}, **HEADERS)
        said = whole.json
        thought, words, use = said["content"]
        assert (thought["thinking"], words["text"]) == ("I look first.", "Let me look.")
        assert (use["name"], use["input"]) == ("Bash", {"command": "cat greet.py"})
        assert said["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "hello"}
        request["messages"] += [
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": [result]},
        ]
        answer, (_, cached) = await claude(daemon, request)
        used = said["usage"]
        assert cached >= used["input_tokens"] + used["output_tokens"] - 1
        deltas = [e["delta"] for e in answer.events if e["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == "It prints hello."


async def test_what_claude_code_asks_beside_its_session(autojump_clock: MockClock) -> None:
    """Counts, short requests to a model of another name, and reports that nobody reads here."""
    request = fixture("agent_claude_code.json")
    counted = {name: request[name] for name in ("model", "messages", "system", "tools")}
    side = {"model": "claude-haiku-any", "max_tokens": 512, "stream": True}
    side |= {"system": "Write a title.", "messages": [{"role": "user", "content": "hello"}]}
    async with house() as daemon:
        path = "/v1/messages/count_tokens?beta=true"
        answer = await daemon.ask("POST", path, counted, **HEADERS)
        # The request itself thinks, which the count was not told.
        assert answer.json["input_tokens"] == (await claude(daemon, request))[1][0]
        assert (await claude(daemon, side))[0].events[0]["message"]["model"] == "claude-haiku-any"
        assert (await daemon.ask("POST", "/api/event_logging/batch", {})).status == 404
        assert (await daemon.ask("GET", "/v1/models", **HEADERS)).json["has_more"] is False
