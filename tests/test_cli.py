"""The verbs as a shell sees them: what they print where, and what they exit with.

Each test runs the real program as a process. The daemon that the client verbs talk to is a
double that plays a list of events; real daemons are for test_daemon.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from attrs import evolve
from cli_kit import PATIENCE_S, answer, command, double, environment, eos, refusal, run

from uma_protocol import Generate, SetPriority, Token, Tool, ToolCall
from uma_protocol.requests import UnloadModel
from uma_trio import __version__
from uma_trio.app.daemon import ReadyInfo
from uma_trio.backend.gguf_header import read_header
from uma_trio.cli.demo import Pane
from uma_trio.cli.doctor import (
    SelfReport,
    ask,
    check_limits,
    check_model,
    check_policy,
    check_running,
    check_socket,
    compare_features,
    flag_for_gpu,
)
from uma_trio.cli.serve import ready_block
from uma_trio.config.options import Config
from uma_trio.models import bundled_model
from uma_trio.sockets.listener import claim
from uma_trio.words import count, duration, harmless, several, size
from uma_trio_sim.fake import FakeBackend

_LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma-") as made:
        yield Path(made)


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("serve", "--help"), ("run", "--help"), ("ps", "-h"), ("--version",), ()],
)
async def test_help_is_answered(arguments: Sequence[str]) -> None:
    """Asking what can be done is never an error."""
    status, out, _ = await run("uma-trio", *arguments)
    assert status == 0
    assert out


async def test_python_runs_the_package_as_the_command() -> None:
    """As ``python -m uma_trio``, for who has no uma-trio on the PATH."""
    words = [sys.executable, "-m", "uma_trio", "--version"]
    done = await trio.run_process(words, capture_stdout=True, env=environment())
    assert done.stdout.decode().strip() == __version__


async def test_help_names_every_option_once() -> None:
    """The help is made from the declarations, and hides what is for later."""
    from uma_trio.config.options import OPTIONS

    _, out, _ = await run("umad", "serve", "--help-all")
    words = out.replace(",", " ").split()
    for option in OPTIONS:
        assert words.count(option.flag) >= 1, option.flag
    assert "--kv-pack" not in words
    assert "--no-http-strict" in words
    assert words[words.index("--threads") + 1] == "N"
    assert words[words.index("--model") + 1] == "MODEL"
    assert words[words.index("--flash-attention") + 1] == "CHOICE"
    assert "Takes auto, on or off." in " ".join(out.split())
    assert "Takes 1 to 256 slots." in " ".join(out.split())


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("uma-trio", ["serv"], "Did you mean serve?"),
        ("uma-trio", ["serve", "--n-ct", "3"], "Did you mean --n-ctx?"),
        ("uma-trio", ["serve", "--n-ctx", "3"], "--n-ctx: 3 is out of range"),
        ("uma-trio", ["serve", "some model"], "Unexpected argument: 'some model'."),
        ("uma-trio", ["ls"], "Did you mean list?"),
        ("uma-trio", ["help", "confg"], "There is no help on confg (did you mean config?)"),
        ("uma-trio", ["help", "sevre"], "(did you mean serve?)"),
        ("uma-trio", ["pull"], "MODEL is missing: The repository"),
        ("uma-trio", ["serve", "m.gguf"], "Name the model with --model m.gguf."),
        ("uma-trio", ["serve", "--port", "8080"], "Use --http 8080:"),
        ("uma-trio", ["serve", "-ngl", "99", "-t", "2"], "Use --gpu-layers 99:"),
        ("uma-trio", ["serve", "-hf", "owner/repo"], "uma-trio pull owner/repo"),
        ("uma-trio", ["serve", "-fa"], "Use --flash-attention:"),
        ("uma-trio", ["serve", "--temp", "0"], "Each request sets it"),
        ("umad", ["-m", "my model.gguf"], "Use --model 'my model.gguf':"),
        ("uma-trio", ["run", "-m", "tiny", "hi"], "Use --model tiny"),
        ("uma-cli", ["-n", "9", "hi"], "Use --max-tokens 9:"),
        ("umad", ["--n-ctx"], "--n-ctx"),
        ("umad", ["serve", "--kv-type", "q6"], "q8_0"),
        ("umad", ["--http", "on"], "PORT, HOST:PORT or unix:PATH"),
        ("umad", ["--policy", "luck"], "--policy luck: no policy is called 'luck'; there are: "),
        ("umad", ["--trace", "no/such/file", "--model", "none"], "--trace no/such/file: No such"),
        ("umad", ["--trace", "/", "--model", "none"], "--trace /: Is a directory"),
        ("uma-cli", ["--top-p", "3", "hi"], "--top-p must be"),
        ("uma-cli", ["--max-tokens", "many", "hi"], "--max-tokens"),
        ("uma-cli", ["--repeat-penalty", "0", "hi"], "--repeat-penalty must be"),
        ("uma-cli", ["--schema", "no/such/file", "hi"], "no/such/file: No such file"),
        ("uma-cli", ["--schema", "pyproject.toml", "hi"], "pyproject.toml is not JSON"),
        ("uma-cli", ["--grammar", "/", "hi"], "/: Is a directory"),
        ("uma-cli", ["--tools", "pyproject.toml", "hi"], "pyproject.toml is not JSON"),
        ("uma-cli", ["--tools", "/dev/null", "hi"], "/dev/null is not JSON"),
        ("uma-cli", ["--raw", "--tools", "t.json", "hi"], "--tools needs --chat"),
        ("uma-cli", ["--tool-choice", "required", "hi"], "--tool-choice required needs --tools"),
        ("uma-cli", ["--prompt", "a", "b"], "omit one of them"),
        ("uma-cli", ["--raw", "--system", "a", "b"], "--system needs --chat"),
        ("uma-cli", ["--metrics", "b"], "--metrics sends no prompt"),
        ("uma-cli", ["--socket", "/x"], 'Try: uma-trio run --socket /x "Tell me a story'),
        ("uma-trio", ["metrics", "--watch", "0"], "--watch"),
        ("uma-trio", ["metrics", "--prometheus", "--json"], "combined with --json"),
        (
            "uma-trio",
            ["metrics", "--prometheus", "--watch", "1"],
            "combined with --json or --watch",
        ),
        ("uma-trio", ["explain", "--ticks", "1001"], "0 to 1000"),
        ("uma-trio", ["explain", "0"], "no handle"),
        ("uma-trio", ["explain", "it"], "it"),
    ],
)
async def test_bad_arguments_exit_with_1(program: str, arguments: list[str], said: str) -> None:
    """One sentence on standard error names the argument and what would be right."""
    status, out, errors = await run(program, *arguments)
    assert (status, out) == (1, "")
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "FILE"),
        (["trace", "--polciy", "baseline"], "--policy"),
        (["no/such/file"], "no/such/file: No such file"),
        (["no/such/file", "--policy", "contrat"], "--policy contrat: no policy is called"),
    ],
)
async def test_what_replay_cannot_compare_exits_with_2(arguments: list[str], said: str) -> None:
    """As diff does, since 1 says that plans differ."""
    status, out, errors = await run("uma-trio", "replay", *arguments)
    assert (status, out) == (2, "")
    assert said in errors


@pytest.mark.parametrize("verb", [["run", "hi"], ["ps"], ["metrics"], ["explain"]])
async def test_no_daemon_exits_with_3(folder: Path, verb: list[str]) -> None:
    """Who cannot be reached is named, with the command that would start it."""
    status, _, errors = await run("uma-trio", *verb, "--socket", str(folder / "none"))
    assert status == 3
    assert "uma-trio serve" in errors


async def test_an_unusable_model_exits_with_2(folder: Path) -> None:
    """The daemon says what is wrong with the file, before a socket exists."""
    status, out, errors = await run(
        "umad", "--model", str(folder), "--socket", str(folder / "uma.sock")
    )
    assert (status, out) == (2, "")
    assert "is a directory" in errors
    assert not (folder / "uma.sock").exists()


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("{% if %}", "it does not compile")]
)
async def test_an_unusable_template_exits_with_1(folder: Path, text: str | None, why: str) -> None:
    """Before the model is loaded; names may be given several times."""
    file = folder / "chat.jinja"
    if text is not None:
        file.write_text(text)
    flags = ["--chat-template-file", str(file), "--alias=a", "--alias", "b"]
    status, _, errors = await run("umad", *flags, "--socket", str(folder / "uma.sock"))
    assert status == 1
    assert f"--chat-template-file {file}" in errors
    assert why in errors


async def test_uma_cli_streams_text_and_nothing_else(folder: Path) -> None:
    """Standard output is the answer, byte for byte; a pipe on standard error stays empty."""
    async with double(folder, answer("Once ", "upon", " a ✓")) as daemon:
        got = await run("uma-cli", "--prompt", "Hello", UMA_SOCK=str(daemon.path))
    assert got == (0, "Once upon a ✓", "")
    (asked,) = daemon.heard
    assert isinstance(asked, Generate)
    assert (asked.prompt, asked.messages, asked.temperature) == ("Hello", None, None)


async def test_every_flag_reaches_the_request(folder: Path) -> None:
    """What is typed is what is sent."""
    flags = ["--max-tokens=7", "--temp=0.5", "--top-p=0.9", "--top-k=40", "--min-p=0.05"]
    flags += ["--seed=3", "--stop=a", "--stop=b", "--no-stream", "--priority=background"]
    flags += ["--session=s", "--app=test"]
    async with double(folder, [eos(text="whole")]) as daemon:
        status, out, _ = await run("uma-cli", *flags, "hi", UMA_SOCK=str(daemon.path))
    assert (status, out) == (0, "whole")
    (asked,) = daemon.heard
    assert isinstance(asked, Generate)
    assert asked == Generate(
        id=asked.id,
        session="s",
        app="test",
        priority="background",
        max_tokens=7,
        temperature=0.5,
        default_temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=3,
        stop=("a", "b"),
        stream=False,
        prompt="hi",
    )


async def test_the_prompt_may_come_from_standard_input(folder: Path) -> None:
    """`cat file | uma-cli` works; the line break that echo adds is not part of the prompt."""
    async with double(folder, answer("ok")) as daemon:
        await run("uma-cli", stdin="grüß dich\n".encode(), UMA_SOCK=str(daemon.path))
    (asked,) = daemon.heard
    assert isinstance(asked, Generate)
    assert asked.prompt == "grüß dich"


async def test_standard_input_that_is_not_text_exits_with_1() -> None:
    """A binary file is refused here and not somewhere in the daemon."""
    status, _, errors = await run("uma-cli", stdin=b"\xff\xfe")
    assert status == 1
    assert "not UTF-8" in errors


async def test_run_talks_in_messages_and_falls_back_to_the_prompt(folder: Path) -> None:
    """A model without a template still answers."""
    async with double(folder, refusal("E_MODEL_002"), answer("raw")) as daemon:
        got = await run("uma-trio", "run", "hi", "there", UMA_SOCK=str(daemon.path))
    assert got == (0, "raw", "")
    first, second = daemon.heard
    assert isinstance(first, Generate)
    assert isinstance(second, Generate)
    assert [(m.role, m.content) for m in first.messages or ()] == [("user", "hi there")]
    assert second.prompt == "hi there"


async def test_run_sends_what_its_flags_and_files_say(folder: Path) -> None:
    """Penalties as they are, the schema and the grammar out of their files."""
    schema, grammar = folder / "schema.json", folder / "g.gbnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "a"')
    penalties = ["--presence-penalty", "0.5", "--frequency-penalty", "1", "--repeat-penalty", "1.1"]
    async with double(folder, answer("{}"), answer("a")) as daemon:
        for flags in (["--schema", str(schema), *penalties], ["--grammar", str(grammar)]):
            status, _, errors = await run("uma-cli", "hi", *flags, UMA_SOCK=str(daemon.path))
            assert (status, errors) == (0, "")
    first, second = daemon.heard
    assert isinstance(first, Generate)
    assert isinstance(second, Generate)
    assert first.schema == {"type": "object"}
    assert (first.presence_penalty, first.frequency_penalty) == (0.5, 1.0)
    assert (first.repeat_penalty, first.repeat_last_n, first.grammar) == (1.1, None, None)
    assert (second.schema, second.grammar) == (None, 'root ::= "a"')


@pytest.mark.parametrize(
    "tool", [_LOOK, {"type": "function", "function": _LOOK}], ids=["by itself", "OpenAI's"]
)
async def test_run_prints_the_calls_of_tools_behind_the_text(
    folder: Path, tool: dict[str, Any]
) -> None:
    """A line of JSON each; arguments that are no JSON as their text. The tools make it a chat."""
    file = folder / "tools.json"
    file.write_text(json.dumps([tool]))
    calls = (ToolCall("c1", "look", '{"what": "x"}'), ToolCall("c2", "look", '{"what'))
    said = [*answer("So")[:-1], msgspec.structs.replace(eos(), calls=calls)]
    async with double(folder, said) as daemon:
        flags = ["--tools", str(file), "--tool-choice", "required"]
        status, text, errors = await run("uma-cli", "hi", *flags, UMA_SOCK=str(daemon.path))
    assert (status, errors) == (0, "")
    first, *lines = text.splitlines()
    assert first == "So"
    assert [json.loads(line) for line in lines] == [
        {"name": "look", "arguments": {"what": "x"}},
        {"name": "look", "arguments": '{"what'},
    ]
    (heard,) = daemon.heard
    assert isinstance(heard, Generate)
    assert heard.tools == (Tool(**_LOOK),)
    assert heard.tool_choice == "required"
    assert heard.messages is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "is not a list of tools: write [{"),
        ("[]", "is not a list of tools: write [{"),
        ('[{"type": "function"}]', "[0] is not a function with a name"),
        ('[{"name": "look", "parameters": 3}]', "parameters"),
    ],
)
async def test_run_says_what_is_wrong_with_a_file_of_tools(
    folder: Path, text: str, problem: str
) -> None:
    """Before a daemon is looked for."""
    file = folder / "tools.json"
    file.write_text(text)
    status, _, errors = await run("uma-cli", "hi", "--tools", str(file), UMA_SOCK="/none")
    assert status == 1
    assert problem in errors


async def test_run_does_not_fall_back_when_a_chat_was_asked_for(folder: Path) -> None:
    """--chat means a chat, and the server's refusal of it is an answer."""
    async with double(folder, refusal("E_MODEL_002")) as daemon:
        status, _, errors = await run("uma-trio", "run", "--chat", "hi", UMA_SOCK=str(daemon.path))
    assert status == 2
    assert "E_MODEL_002" in errors


async def test_a_refusal_exits_with_2_and_its_code(folder: Path) -> None:
    """What the server said is what the user reads."""
    async with double(folder, refusal("E_LIMIT_003")) as daemon:
        status, out, errors = await run("uma-cli", "hi", UMA_SOCK=str(daemon.path))
    assert (status, out) == (2, "")
    assert "It said no. (E_LIMIT_003)" in errors


async def test_an_answer_that_fails_halfway_exits_with_2(folder: Path) -> None:
    """The text that came stays, and the exit status tells that it is not all."""
    play = [Token("", "half", 1), eos("error", code="E_RUNTIME_001", message="decode failed")]
    async with double(folder, play) as daemon:
        status, out, errors = await run("uma-cli", "hi", UMA_SOCK=str(daemon.path))
    assert (status, out) == (2, "half")
    assert "E_RUNTIME_001" in errors


async def test_json_is_one_object_with_everything(folder: Path) -> None:
    """A script gets the text and the figures from one line."""
    async with double(folder, answer("a", "b")) as daemon:
        _, out, _ = await run("uma-cli", "--json", "hi", UMA_SOCK=str(daemon.path))
    found = json.loads(out)
    assert (found["text"], found["reason"]) == ("ab", "stop")
    assert found["usage"]["completion_tokens"] == 2
    assert found["timings"]["ttft_ms"] == 12.0


async def test_ctrl_c_ends_the_request_in_the_daemon_first(folder: Path) -> None:
    """The daemon is told to cancel; the exit status is the shell's for an interrupt."""
    async with double(folder, [Token("", "endless", 1)]) as daemon:
        process = await trio.lowlevel.open_process(
            command("uma-cli", "hi"),
            stdout=subprocess.PIPE,
            env=environment(UMA_SOCK=str(daemon.path)),
        )
        with trio.fail_after(PATIENCE_S):
            assert process.stdout is not None
            assert await process.stdout.receive_some() == b"endless"
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
            await process.stdout.aclose()
    assert [type(request).__name__ for request in daemon.heard] == ["Generate", "Cancel"]


async def test_metrics_come_as_json_for_scripts(folder: Path) -> None:
    """`uma-cli --metrics` and `uma-trio metrics --json` print the same line."""
    async with double(folder) as daemon:
        sock = str(daemon.path)
        first = await run("uma-cli", "--metrics", UMA_SOCK=sock)
        second = await run("uma-trio", "metrics", "--json", "--socket", sock)
        _, plain, _ = await run("uma-trio", "metrics", "--all", "--socket", sock)
    assert first == second == (0, '{"sessions": 3, "p95_ms": null}\n', "")
    assert [line.split() for line in plain.splitlines()] == [
        ["sessions", "3", "connections"],
        ["p95_ms", "-"],
    ]


@pytest.mark.parametrize("verb", ["metrics", "ps"])
async def test_who_asks_takes_one_place(folder: Path, verb: str) -> None:
    """Of --max-sessions, so that the last one that is free is enough to look what goes on."""
    async with double(folder) as daemon:
        await run("uma-trio", verb, "--socket", str(daemon.path))
        assert daemon.connections == 1


async def test_metrics_come_as_prometheus_text_for_scrapers(folder: Path) -> None:
    """What is not known is left out; the answer to one request is enough for it."""
    async with double(folder) as daemon:
        status, out, errors = await run(
            "uma-trio", "metrics", "--prometheus", "--socket", str(daemon.path)
        )
    assert (status, errors) == (0, "")
    assert "# TYPE uma_connections gauge\numa_connections 3.0\n" in out
    assert "p95" not in out


async def test_ps_shows_whose_request_it_is_and_how_far(folder: Path) -> None:
    """One line for each request, or JSON."""
    async with double(folder) as daemon:
        _, shown, _ = await run("uma-trio", "ps", "--socket", str(daemon.path))
        _, as_json, _ = await run("uma-trio", "ps", "--json", "--socket", str(daemon.path))
    line = shown.splitlines()[1]
    for word in ("7", "editor", str(os.getpid()), "decode", "interactive", "20/20", "42.0"):
        assert word in line
    assert json.loads(as_json)[0]["request"] == 7


async def test_priority_moves_a_request(folder: Path) -> None:
    """It is named by the handle that ps shows."""
    async with double(folder) as daemon:
        sock = str(daemon.path)
        got = await run("uma-trio", "priority", "7", "background", UMA_SOCK=sock)
        wrong, _, errors = await run("uma-trio", "priority", "7", "low", UMA_SOCK=sock)
    assert got == (0, "Request 7 is in the background lane.\n", "")
    assert daemon.heard == [SetPriority(request=7, priority="background")]
    assert (wrong, "'interactive', 'background'" in errors) == (1, True)


async def test_stop_with_a_model_unloads_it_and_the_daemon_continues(folder: Path) -> None:
    """As Ollama's users mean it; --now is about a daemon."""
    async with double(folder) as daemon:
        sock = str(daemon.path)
        assert await run("uma-trio", "stop", "code", UMA_SOCK=sock) == (
            0,
            "code is unloaded.\n",
            "",
        )
        status, _, _ = await run("uma-trio", "stop", "code", "--now", UMA_SOCK=sock)
        assert status == 1
        assert (await run("uma-trio", "ps", UMA_SOCKET=sock))[0] == 0
    assert daemon.heard[0] == UnloadModel(model="code")


@pytest.mark.parametrize(("session", "status"), [("kept", 0), ("lost", 2)])
async def test_a_pin_of_what_is_not_there_is_told(folder: Path, session: str, status: int) -> None:
    """Somebody relies on it; a session that was misspelt or forgotten is not kept."""
    async with double(folder) as daemon:
        got, _, errors = await run("uma-trio", "prefix", "pin", session, UMA_SOCK=str(daemon.path))
    assert got == status
    assert ("Nothing was pinned" in errors) is (status == 2)


def test_doctor_finds_a_socket_that_serve_cannot_take(folder: Path) -> None:
    """One that is free, served or stale is no problem."""
    path = folder / "uma.sock"
    assert [*check_socket(path)] == []
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert [*check_socket(path)] == []
    path.unlink()
    path.write_text("a file", encoding="utf-8")
    (file,) = check_socket(path)
    assert (file.weight, file.fix) == ("blocks", "move it away, or choose another --socket")
    with claim(folder / "taken"):
        (taken,) = check_socket(folder / "taken")
    assert (taken.weight, "its socket was removed" in taken.what) == ("blocks", True)
    (missing,) = check_socket(folder / "no" / "uma.sock")
    assert (missing.weight, missing.fix.startswith("mkdir -p ")) == ("blocks", True)
    with claim(folder / "ending") as mine, mine.listen() as listener:
        assert [*check_socket(folder / "ending")] == []
        listener.stop()
        (ending,) = check_socket(folder / "ending")
    assert (ending.weight, "is stopping" in ending.what) == ("blocks", True)
    (long,) = check_socket(folder / ("x" * 120))
    assert "bytes too long" in long.what


def test_doctor_says_what_twice_the_memory_would_have_saved() -> None:
    """Of all prompt tokens, if that is worth a change."""
    metrics = {"prompt_tokens_total": 6000, "prefix_tokens_total": 4000, "prefix_bytes": 2e9}
    assert [*check_running(metrics | {"prefix_ghost_hits_total": 7})] == []
    (more,) = check_running(metrics | {"prefix_ghost_hits_total": 20})
    assert more.weight == "slow"
    assert more.what.endswith("twice the --prefix-ram would have cached 13% more")
    (all_of_it,) = check_running(metrics | {"prefix_ghost_hits_total": 9000})
    assert all_of_it.what.endswith("60% more"), "no more than was computed"
    assert [*check_running({"prompt_tokens_total": 10}), *check_running({})] == []
    assert [*check_running({"prefix_ghost_hits_total": 1})] == [], "before any prompt is counted"


def test_doctor_knows_nothing_of_a_daemon_that_does_not_answer(folder: Path) -> None:
    """None there, a stale socket, and what is no daemon."""
    assert ask(folder / "uma.sock") == SelfReport()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "dead"))
    assert ask(folder / "dead") == SelfReport()
    (folder / "file").write_text("a file", encoding="utf-8")
    assert ask(folder / "file") == SelfReport()


def test_doctor_names_processor_features_that_are_not_used() -> None:
    """A library built without AVX2 on a processor that has it is several times slower."""
    used = {"AVX": "1", "SSE3": "1"}
    (slow,) = compare_features(used, frozenset({"avx", "avx2", "fma"}))
    assert slow.weight == "slow"
    assert slow.what.endswith("AVX2 FMA")
    (broken,) = compare_features({"AMX_INT8": "miscompiled"}, frozenset({"amx_int8"}))
    assert (broken.weight, "a GCC that miscompiles AMX" in broken.what) == ("slow", True)
    everything = compare_features({"AVX": "1", "AVX2": "1"}, frozenset({"avx", "avx2"}))
    assert [*everything] == []


def test_doctor_refuses_what_is_not_a_model(folder: Path) -> None:
    """The sentence is the one that `serve` would say."""
    (finding,) = check_model(Config(model=folder / "none.gguf"))
    assert finding.weight == "blocks"
    assert "There is no model file" in finding.what


def test_doctor_finds_a_policy_that_serve_would_refuse() -> None:
    """In the same words."""
    (wrong,) = check_policy(Config(policy="dedline"))
    assert (wrong.weight, "did you mean deadline?" in wrong.what) == ("blocks", True)
    assert [*check_policy(Config(policy="baseline"))] == []


async def test_a_misspelt_variable_is_no_question_to_another_daemon(folder: Path) -> None:
    """Every client refuses it; the daemon's own variables are not looked at."""
    status, _, errors = await run("uma-trio", "ps", UMA_SOCKTE=str(folder / "uma.sock"))
    assert (status, "did you mean UMA_SOCK" in errors) == (1, True)
    async with double(folder) as daemon:
        got = await run("uma-trio", "ps", UMA_SOCK=str(daemon.path), UMA_N_CTX="many")
    assert got[0] == 0


def test_two_sizes_of_a_model_have_two_names() -> None:
    """The file is larger than the weights in it, so nobody has to wonder which number is right."""
    fake = FakeBackend()
    ready = ready_block(ReadyInfo("uma.sock", fake.model, fake.limits, "cpu", "baseline"), 1.0)
    assert "0 bytes of weights)" in ready


def test_it_is_told_at_the_start_that_http_is_at_one_address_only() -> None:
    fake = FakeBackend()
    about = ReadyInfo("uma.sock", fake.model, fake.limits, "cpu", "baseline", "http://127.0.0.1:1")
    assert "note" not in ready_block(about, 1.0)
    missing = ready_block(evolve(about, http_missing="HTTP is served on x alone: why"), 1.0)
    assert "  note     HTTP is served on x alone: why\n" in missing


@pytest.mark.parametrize(
    ("gpu_layers", "devices", "what"),
    [
        (-1, ["Big GPU"], ""),
        (4, ["Big GPU"], "4 of 9 on Big GPU; the CPU computes the rest"),
        (0, ["Big GPU"], "all 9 on the CPU because of --gpu-layers 0; available: Big GPU"),
        (4, [], "all 9 on the CPU: --gpu-layers 4, and llama.cpp finds no GPU"),
        (-1, [], ""),
    ],
)
def test_doctor_says_what_to_do_about_layers_on_the_cpu(
    gpu_layers: int, devices: list[str], what: str
) -> None:
    """Nothing where they are as fast as can be."""
    blocks = read_header(bundled_model()).number("block_count")
    found = [*check_model(Config(gpu_layers=gpu_layers), devices)]
    assert [each.what for each in found] == [what.replace("9", str(blocks + 1))][: bool(what)]
    assert all(each.fix for each in found)


def test_doctor_tells_how_to_compile_for_a_gpu_that_is_there(tmp_path: Path) -> None:
    """By the device file of its driver; without one nothing is missing."""
    assert flag_for_gpu(tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    assert flag_for_gpu(tmp_path) == "-DGGML_HIP=on"
    (tmp_path / "dev" / "nvidiactl").touch()
    assert flag_for_gpu(tmp_path) == "-DGGML_CUDA=on"


def test_the_line_to_try_names_a_socket_that_is_not_the_usual_one() -> None:
    """It can be copied into a shell as it stands."""
    fake = FakeBackend()
    usual, other = (
        ready_block(ReadyInfo(path, fake.model, fake.limits, "cpu", "baseline"), 1.0)
        for path in (str(Config().socket), "/run/my socket")
    )
    assert '  try      uma-trio run "Tell me a story' in usual
    assert "  try      uma-trio run --socket '/run/my socket' \"Tell me a story" in other


def test_doctor_counts_files_as_the_daemon_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each client and some of its own; it is the hard limit that counts."""

    def limits(hard: int) -> list[str]:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
        return [each.what for each in check_limits(Config(max_sessions=32, threads=1))]

    assert limits(1408) == limits(resource.RLIM_INFINITY) == []
    assert limits(1407) == ["--max-sessions 32 needs 1408 open files, 1407 are allowed"]


def test_doctor_counts_threads() -> None:
    """More of them than cores are told with the number to use."""
    found = check_limits(Config(threads=512))
    assert {finding.about: finding.weight for finding in found}["threads"] == "slow"


def test_a_pane_measures_what_its_client_felt() -> None:
    """Gaps and rate come from when tokens were seen."""
    pane = Pane("client", "prompt", asked=10.0, came=[10.5, 10.6, 10.9])
    assert pane.gaps == pytest.approx([0.1, 0.3])
    assert pane.rate == pytest.approx(5.0)


def test_numbers_are_shown_as_people_say_them() -> None:
    """Units are chosen so that three digits tell the story."""
    assert [several(n, "run") for n in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]
    assert [duration(s) for s in (0.0456, 3.21, 750, 9000)] == ["46 ms", "3.2 s", "12 min", "2.5 h"]
    assert [size(n) for n in (812e6, 4.1e9, 900)] == ["812 MB", "4.1 GB", "900 bytes"]
    assert [count(n) for n in (494e6, 7.2e9, 12)] == ["494M", "7.2B", "12"]


def test_a_terminal_gets_no_control_characters() -> None:
    """What a model makes up does not steer the terminal of who reads it."""
    assert harmless("a\x1b[31m\x07b\n\tc\x9b") == "a[31mb\n\tc"
