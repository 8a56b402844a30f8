"""The model's side of the session that unmodified clients play, and what each of them must have heard."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_session import CHAT_FORM, CHAT_TOOLS, QUESTIONS
from test_http_sdk import served

HERE = Path(__file__).resolve().parent
PATIENCE_S = 240

#: Clients of the extra `sdk`, which tests play, too.
CHECKED_OUT = (
    *("openai", "openai-responses", "anthropic", "ollama", "langchain", "pydantic-ai", "llm"),
    "openai-agents",
)
#: Other environments: what is installed in each, and its clients.
VENVS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "litellm": ("litellm>=1.110,<2", ("litellm", "litellm-ollama", "litellm-anthropic")),
    "instructor": ("instructor>=1.17,<2", ("instructor", "instructor-tools")),
    "llama-index": ("llama-index-llms-openai-like>=0.8,<0.9", ("llama-index",)),
    "smolagents": ("smolagents[openai]>=1.26,<2", ("smolagents",)),
    "aiperf": ("aiperf>=0.13,<0.14", ("aiperf",)),
}
NODE_PACKAGES = ("ai@^6", "@ai-sdk/openai-compatible@^2", "ollama@^0.6.4", "zod@^4")
NODE_CLIENTS = ("openai-node", "ollama-node", "ai-node")

Call = tuple[str, dict[str, Any]]
#: What the model does in its five turns: calls, a text, calls, an object. The first has two calls at once, the second a
#: text beside its call, and a value that is null.
TURNS: tuple[tuple[Call, ...] | str | dict[str, Any], ...] = (
    (("look", {"thing": "the cup"}), ("weigh", {"thing": "the cup", "unit": "oz"})),
    (("weigh", {"thing": "the cup", "unit": None}),),
    "The cup is full. It weighs 300 grams.",
    (("weigh", {"thing": "the jar", "unit": "g"}),),
    {"heavy": False, "grams": 300},
)
CALLS = [list(call) for turn in TURNS if isinstance(turn, tuple) for call in turn]
THOUGHT = "<think>\nI think about it.\n</think>\n\n"
#: The tool by which a client has the object, and that by which it has texts, where it has them so.
OBJECT_TOOLS = {
    "pydantic-ai": "final_result",
    "instructor-tools": "Verdict",
    "llama-index": "Verdict",
    "smolagents": "final_answer",
    "litellm-anthropic": "json_tool_call",
}
TEXT_TOOLS = {"smolagents": "final_answer"}
#: The turns in which a client asks for a call, or for a call or an object. With a vocabulary of bytes the model cannot think
#: then: the first byte of its thought is that of a call, too.
WITHOUT_THOUGHT: dict[str, Collection[int]] = {
    "openai-agents": (3, 4),
    "ai-node": (3, 4),
    "llm": (4,),
    "aiperf": (4,),
    "pydantic-ai": (3, 4),
    "instructor-tools": (4,),
    "llama-index": (4,),
    "litellm-anthropic": (4,),
    "smolagents": range(5),
}
#: Clients that describe an optional argument as one that is never null, so that it is left out.
WITHOUT_NULL = ("ollama", "smolagents")


def script(client: str) -> list[str]:
    """Return what the model says to a client."""
    return [_said(client, n) for n in range(len(TURNS))]


def _said(client: str, n: int) -> str:
    turn = TURNS[n]
    if isinstance(turn, str) and client in TEXT_TOOLS:
        turn = ((TEXT_TOOLS[client], {"answer": turn}),)
    if isinstance(turn, dict) and client in OBJECT_TOOLS:
        answer = {"answer": json.dumps(turn)} if client in TEXT_TOOLS else turn
        turn = ((OBJECT_TOOLS[client], answer),)
    thinks = n not in WITHOUT_THOUGHT.get(client, ())
    thought = THOUGHT if thinks else ""
    if isinstance(turn, str):
        return thought + turn
    if isinstance(turn, dict):
        return thought + json.dumps(turn)
    calls = [
        json.dumps({"name": name, "arguments": _given(client, arguments)})
        for name, arguments in turn
    ]
    said = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"{thought}Let me see.\n{said}" if n == 1 and thinks else thought + said


def _given(client: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if client in WITHOUT_NULL:
        return {name: value for name, value in arguments.items() if value is not None}
    return arguments


def play(client: str, *, stream: bool, python: str = sys.executable) -> dict[str, Any]:
    """Have a client play the session with a daemon; return what it heard.

    Raises:
        AssertionError: the program fails, or has heard something else.
    """
    flags, is_node = ["--stream"] if stream else [], client.endswith("-node")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.json")
        path.write_text(json.dumps(script(client)), encoding="utf-8")
        with served(script=str(path)) as address:
            program = (
                ["node", HERE / "client_session.mjs"]
                if is_node
                else [python, HERE / "client_session.py"]
            )
            done = subprocess.run(
                [*program, client, address, *flags],
                capture_output=True,
                text=True,
                check=False,
                cwd=python if is_node else folder,
                env={
                    **{k: os.environ[k] for k in ("PATH", "LANG") if k in os.environ},
                    "HOME": folder,
                },
                timeout=PATIENCE_S,
            )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    check(found)
    return found


def check(found: dict[str, Any]) -> None:
    """Compare what a client has heard with what the model has said."""
    heard = {
        "calls": sorted(found["calls"], key=str),
        "texts": [text.strip() for text in found["texts"]],
        "verdict": found["verdict"],
    }
    expected = {"calls": sorted(CALLS, key=str), "texts": [TURNS[2]], "verdict": TURNS[4]}
    assert heard == expected, json.dumps(heard)


# --- aiperf, which plays no conversation but sends what it is given ---

_TOKENISER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = pre_tokenizers.ByteLevel.alphabet()
made = Tokenizer(models.BPE({**{one: n for n, one in enumerate(letters)}, "<end>": 256}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", bos_token="<end>").save_pretrained(sys.argv[1])
"""
_ASKED = ("--request-count", "6", "--concurrency", "3")
_LENGTHS = ("--synthetic-input-tokens-mean", "60", "--output-tokens-mean", "20")
#: The runs of aiperf against a model that says anything.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "chat": (*_ASKED, *_LENGTHS),
    "streaming": (*_ASKED, *_LENGTHS, "--streaming", "--extra-inputs", "ignore_eos:true"),
    "agents": (
        *(*_ASKED, *_LENGTHS, "--streaming", "--extra-inputs"),
        json.dumps({"ignore_eos": True, "tools": CHAT_TOOLS}),
    ),
}


def play_aiperf(python: str) -> dict[str, Any]:
    """Run aiperf without and with streaming, and with the turns of the session as payloads; return its version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([python, "-c", _TOKENISER, str(folder / "tokeniser")], folder)
        with served() as address:
            for kind, flags in BENCHMARKS.items():
                _profile(python, folder, kind, address, flags)
        path, payloads = folder / "script.json", folder / "payloads.jsonl"
        path.write_text(json.dumps(script("aiperf")), encoding="utf-8")
        payloads.write_text(
            "".join(f"{json.dumps(each)}\n" for each in _payloads()), encoding="utf-8"
        )
        flags = (
            "--input-file",
            str(payloads),
            "--custom-dataset-type",
            "raw-payload",
            "--streaming",
        )
        flags += ("--dataset-sampling-strategy", "sequential", "--request-count", str(len(TURNS)))
        with served(script=str(path)) as address:
            _profile(python, folder, "tools", address, (*flags, "--export-level", "raw"))
        check(_heard_by_aiperf(folder / "tools" / "profile_export_raw.jsonl"))
        said = _run(
            [python, "-c", "from importlib.metadata import version as v; print(v('aiperf'))"],
            folder,
        )
    return {"version": said.strip()}


def _profile(python: str, folder: Path, kind: str, address: str, flags: Iterable[str]) -> None:
    """Run aiperf once. Raises AssertionError if it fails, or a request of it does."""
    program = Path(python).with_name("aiperf")
    about = ("-m", "any", "--url", address, "--tokenizer", str(folder / "tokeniser"))
    quiet = ("--ui", "none", "--random-seed", "1", "--artifact-dir", str(folder / kind))
    _run([str(program), "profile", *about, "--endpoint-type", "chat", *quiet, *flags], folder)
    found = json.loads((folder / kind / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert not found["error_summary"], found["error_summary"]
    asked = int(dict(itertools.pairwise(flags))["--request-count"])
    assert found["request_count"]["avg"] == asked, found["request_count"]


def _run(command: Sequence[str], folder: Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=env,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-3000:]
    return done.stdout


def _payloads() -> Iterator[dict[str, Any]]:
    """Yield the body of each turn of the session, with all that was said before."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTIONS[0]}]
    ids = itertools.count()
    for n, turn in enumerate(TURNS):
        last = {"response_format": CHAT_FORM} if n == len(TURNS) - 1 else {}
        yield {"model": "any", "messages": [*messages], "stream": True, "tools": CHAT_TOOLS, **last}
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": turn})
            messages.append({"role": "user", "content": QUESTIONS[1]})
        elif isinstance(turn, tuple):
            calls = [
                {
                    "id": f"c{next(ids)}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(given)},
                }
                for name, given in turn
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "full"} for call in calls
            ]


def _heard_by_aiperf(path: Path) -> dict[str, Any]:
    """Return what came in the streams that aiperf wrote down."""
    calls: list[Any] = []
    texts: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        packets = [one for each in json.loads(line)["responses"] for one in each["packets"]]
        events = [json.loads(one["value"]) for one in packets if one["value"].startswith("{")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        made: dict[int, list[str]] = {}
        for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
            call = made.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name") or ""
            call[1] += part["function"].get("arguments") or ""
        calls += [[name, json.loads(given)] for name, given in made.values()]
        text = "".join(delta.get("content") or "" for delta in deltas)
        texts += [] if made else [text]
    objects = [json.loads(text) for text in texts if text.lstrip().startswith("{")]
    texts = [text for text in texts if not text.lstrip().startswith("{")]
    return {"calls": calls, "texts": texts, "verdict": objects[0] if objects else None}
