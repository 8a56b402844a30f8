"""A plugin for pytest that lets llama.cpp's server tests start this daemon with the bundled model.

It replaces at run time, and changes no file of the tests:

- the command line of the server: each option that a test sets becomes the equal option of
  ``uma-trio serve``; where the daemon has none, it becomes a field of the test's requests;
- texts that only their model writes, and numbers of its tokens (``foreign_server_tests.toml``);
- the download of models, since one model answers all tests.

A documented difference is expected to fail: if it passes, the run fails.
"""

from __future__ import annotations

import atexit
import fnmatch
import os
import socket
import subprocess
import sys
import time
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

LIST = tomllib.loads(Path(__file__).with_name("foreign_server_tests.toml").read_text("utf-8"))
START_S = 60
FOLDER = Path(os.environ["UMA_FOREIGN"])
# Templates that llama-server knows by name, as far as tests use them.
LOOP = (
    "{%% for message in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}%s{%% endif %%}"
)
HEADER = "{{ '<|start_header_id|>%s<|end_header_id|>\\n\\n' }}"
COMMAND_R = "<|START_OF_TURN_TOKEN|><|%s_TOKEN|>"
TEMPLATES = {
    "chatml": LOOP
    % (
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        "{{ '<|im_start|>assistant\\n' }}",
    ),
    "llama3": LOOP
    % (
        HEADER % "' + message.role + '" + "{{ message.content + '<|eot_id|>' }}",
        HEADER % "assistant",
    ),
    "command-r": LOOP
    % (
        "{{ '"
        + COMMAND_R % "' + ('CHATBOT' if message.role == 'assistant' else message.role | upper) + '"
        + "' + message.content + '<|END_OF_TURN_TOKEN|>' }}",
        COMMAND_R % "CHATBOT",
    ),
}
# Paths whose requests llama-server gives the temperature and the seed of its command line.
GENERATING = ("completion", "completions", "responses", "messages")


# --- what is run ---


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that runs a part of the tests."""
    parser.addoption("--foreign-short", action="store_true", help="run only the short list")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the server before any test is imported."""
    for marker in ("slow", "serial"):
        config.addinivalue_line("markers", f"{marker}: of llama.cpp's tests")
    sys.modules.setdefault("wget", types.ModuleType("wget"))
    import utils

    utils.ServerProcess.start = start
    utils.ServerProcess.stop = stop
    utils.match_regex = matching(utils.match_regex)
    utils.download_file = lambda url, output_file_path=None: "the-draft-model.gguf"
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, asking(getattr(utils.ServerProcess, name)))
    utils.ServerProcess.make_stream_request = reading(utils.ServerProcess.make_stream_request)
    atexit.register(kill_all)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not import tests of what is not served."""
    return True if entries_of(collection_path.name, "not_served") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not served, expect the differences, put our numbers in place of theirs."""
    kept, left = [], []
    for item in items:
        name = f"{item.path.name}::{item.name}"
        short = not config.getoption("--foreign-short") or matches(name, LIST["short"]["tests"])
        slow = item.get_closest_marker("slow") is not None
        served = not slow and not entries_of(name, "not_served")
        (kept if served and short else left).append(item)
        for difference in entries_of(name, "differences"):
            item.add_marker(pytest.mark.xfail(reason=difference["topic"], strict=True))
        adapt(item, name)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def entries_of(name: str, kind: str) -> list[dict[str, Any]]:
    """Return the entries of a list that a test is in."""
    return [entry for entry in LIST[kind] if matches(name, entry["tests"])]


def matches(name: str, patterns: list[str]) -> bool:
    """Return whether a pattern fits the name of a test, with its parameters or without."""
    names = (name, name.partition("[")[0], name.partition("::")[0])
    return any(fnmatch.fnmatchcase(one, pattern) for one in names for pattern in patterns)


def adapt(item: Any, name: str) -> None:
    """Put what our model says into a test's parameters and its code."""
    callspec, code = getattr(item, "callspec", None), item.function.__code__
    for entry in entries_of(name, "parameters") if callspec else ():
        for argument in entry.keys() - {"tests"}:
            ours = entry[argument].get(str(callspec.params[argument]))
            callspec.params[argument] = callspec.params[argument] if ours is None else ours
    ours = [pair for entry in entries_of(name, "constants") for pair in entry["replace"]]
    item.function.__code__ = code.replace(co_consts=replaced(code.co_consts, ours))


def replaced(value: Any, ours: list[list[Any]]) -> Any:
    """Return a constant with other values in it."""
    if isinstance(value, tuple):
        return tuple(replaced(one, ours) for one in value)
    for old, new in ours:
        if type(value) is type(old) and value == old:
            return new
    return value.removeprefix(LIST["words"]["first_token"]) if isinstance(value, str) else value


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say the result in one line."""
    count = {
        name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error")
    }
    differences = len(terminalreporter.stats.get("xfailed", ()))
    skipped = len(terminalreporter.stats.get("skipped", ()))
    terminalreporter.write_line(
        f"{count['passed']} passed, {differences} documented differences, {skipped} skipped by llama.cpp,"
        f" {count['failed'] + count['error']} failed"
    )


@pytest.fixture(autouse=True)
def _stop_the_servers() -> Any:
    yield
    stop_all()


# --- the server ---


@dataclass
class Daemon:
    """A running daemon. `named` is what it was started with, apart from its own files."""

    named: tuple[str, ...]
    port: int
    key: str | None
    process: subprocess.Popen[bytes]
    log: Path


# Daemons that no test uses, the oldest first. To start one takes longer than most tests.
idle: list[Daemon] = []
MOST_IDLE = 4


def start(self: Any, timeout_seconds: int = START_S) -> None:
    """Give a test a daemon like the server that it describes; return when it is ready."""
    import utils

    for entry in entries_of(running_test(), "servers"):
        for attribute, value in entry["set"].items():
            setattr(self, attribute, value)
    folder = FOLDER / f"server-{time.monotonic_ns()}"
    folder.mkdir()
    given = options(self, folder)
    named = (*given, *(path.read_text() for path in sorted(folder.iterdir())))
    named = tuple(text.replace(str(folder), "") for text in named)
    fresh = matches(running_test(), LIST["fresh"]["tests"])
    found = next((one for one in idle if one.named == named), None) if not fresh else None
    if found is None:
        found = launched(named, given, folder, self.api_key)
    else:
        idle.remove(found)
    self.process = found.process
    self.foreign = found
    self.server_port = found.port
    utils.server_instances.add(self)


def launched(named: tuple[str, ...], given: list[str], folder: Path, key: str | None) -> Daemon:
    """Start a daemon and wait until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uma_trio", "serve", "--socket", str(folder / "socket")]
    command += ["--http", str(port), *given]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise RuntimeError((folder / "log").read_text()[-2000:])
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return Daemon(named, port, key, process, folder / "log")
        except requests.RequestException:
            time.sleep(0.02)
    process.kill()
    raise TimeoutError(f"the daemon did not start within {START_S} s")


def stop(self: Any) -> None:
    """Take the daemon from a test; another test may use it if nothing runs on it."""
    import utils

    utils.server_instances.discard(self)
    self.process = None
    daemon, self.foreign = getattr(self, "foreign", None), None
    if daemon is None:
        return
    if is_idle(daemon):
        idle.append(daemon)
    else:
        kill(daemon)
    while len(idle) > MOST_IDLE:
        kill(idle.pop(0))


def is_idle(daemon: Daemon) -> bool:
    """Return whether a daemon runs, and computes nothing."""
    if daemon.process.poll() is not None:
        return False
    key = {"Authorization": f"Bearer {daemon.key}"}
    answer = requests.get(f"http://127.0.0.1:{daemon.port}/slots", headers=key, timeout=20)
    return answer.status_code == 200 and not any(slot["is_processing"] for slot in answer.json())


def kill(daemon: Daemon) -> None:
    """End a daemon at once."""
    daemon.process.kill()
    daemon.process.wait()


def stop_all() -> None:
    """Take their daemons from tests that have not stopped them."""
    import utils

    for server in set(utils.server_instances):
        server.stop()


def kill_all() -> None:
    """End every daemon."""
    stop_all()
    for daemon in idle:
        kill(daemon)


def running_test() -> str:
    """Return the name of the test that runs."""
    return os.environ["PYTEST_CURRENT_TEST"].rpartition("/")[2].rpartition(" ")[0]


def environment() -> dict[str, str]:
    """Return the daemon's environment: what it measures of the machine is kept for this run only."""
    env = {
        name: text for name, text in os.environ.items() if not name.startswith(("UMA_", "LLAMA_"))
    }
    return {**env, "XDG_CACHE_HOME": str(FOLDER), "XDG_STATE_HOME": str(FOLDER)}


def options(server: Any, folder: Path) -> list[str]:
    """Return the options of ``uma-trio serve`` that equal those of a test's server."""
    slots = server.n_slots or 8
    given = ["--policy", "baseline", "--parallel", str(slots), "--drain", "0"]
    if server.n_ctx:
        # llama-server divides the context among the slots, unless it is told to share it.
        cells = server.n_ctx if server.kv_unified else server.n_ctx // slots
        given += ["--n-ctx", str(cells)]
    if server.n_predict and server.n_predict > 0:
        given += ["--max-tokens", str(server.n_predict)]
    if server.n_threads:
        given += ["--threads", str(server.n_threads)]
    for name in (server.model_alias or "").split(","):
        given += ["--alias", name] if name else []
    template = TEMPLATES.get(server.chat_template, server.chat_template)
    if template:
        (folder / "template.jinja").write_text(template, encoding="utf-8")
    file = folder / "template.jinja" if template else server.chat_template_file
    given += ["--chat-template-file", str(file)] if file else []
    if server.api_key:
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text(f"{server.api_key}\n", encoding="utf-8")
        given += ["--http-key-file", str(keys)]
    given += ["--http-origin", server.cors_origins] if server.cors_origins else []
    given += ["--reasoning", server.reasoning] if server.reasoning in ("on", "off") else []
    given += ["--prefix-ram", f"{server.cache_ram}MiB"] if server.cache_ram else []
    given += ["--speculation", "auto"] if server.model_draft else []
    if server.server_embeddings:
        given += ["--embedding-model", str(encoder(server.pooling or "mean"))]
    if server.server_reranking:
        given += ["--rerank-model", str(encoder("rank"))]
    return given


def encoder(pooling: str) -> Path:
    """Return an encoder of random weights."""
    from models.encoders import EncoderShape, write_encoder

    path = FOLDER / f"encoder-{pooling}.gguf"
    if not path.exists():
        write_encoder(path, EncoderShape(context=512, pooling=pooling), name="encoder")
    return path


# --- what is asked and said ---


def asking(method: Any) -> Any:
    """Return a method that asks as a server with the options of the test would understand it.

    llama-server has options for what this daemon takes from each request: temperature, seed, the
    prompt in the answer. Its chats continue a last message of the assistant, and its metrics have
    one format.
    """

    def ask(
        self: Any,
        verb: str,
        path: str,
        data: Any = None,
        headers: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if isinstance(data, dict):
            data = {**defaults(self, path, data), **data}
        return method(self, verb, path, data, headers, *rest, **more)

    return ask


def defaults(server: Any, path: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that stand for options of llama-server."""
    more: dict[str, Any] = {}
    for entry in entries_of(running_test(), "fields"):
        more |= entry["add"]
    if path.rsplit("/", 1)[-1] in GENERATING:
        more |= {"temperature": server.temperature, "seed": server.seed}
    if path.endswith("/chat/completions"):
        more |= {"verbose": True} if server.debug else {}
        messages = data.get("messages")
        if (
            isinstance(messages, list)
            and len(messages) > 1
            and all(isinstance(m, dict) for m in messages)
        ):
            roles = [message.get("role") for message in messages[-2:]]
            if roles == ["user", "assistant"] and "add_generation_prompt" not in data:
                more |= {"continue_final_message": True}
    return more


def reading(method: Any) -> Any:
    """Return a method that reads a stream whose first text is empty as llama-server's, where it is null."""

    def read(self: Any, *asked: Any, **more: Any) -> Any:
        for data in method(self, *asked, **more):
            choices = data.get("choices") if isinstance(data, dict) else None
            delta = choices[0].get("delta", {}) if choices else {}
            if "role" in delta and delta.get("content") == "":
                delta["content"] = None
            yield data

    return read


def matching(match: Any) -> Any:
    """Return a search that takes any text where a test expects the words of its own model."""

    def match_regex(regex: str, text: str) -> bool:
        return bool(match("." if regex in LIST["words"]["of_their_model"] else regex, text))

    return match_regex
