"""The real clients of OpenAI's, Anthropic's and Ollama's APIs against a real daemon process, as far as they are installed.

``make test`` installs them: the packages of the extra ``sdk``, and openai for Node where npm is. Other
versions: ``UMA_SDK_PYTHONS`` names interpreters beside which another openai is installed,
``UMA_SDK_NODE`` a folder in which npm has installed it.
``UMA_SDK_CODEX`` and ``UMA_SDK_CLAUDE`` name the agents' programs, which npm installs, too
(@openai/codex, @anthropic-ai/claude-code).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PYTHONS = [sys.executable, *filter(None, os.environ.get("UMA_SDK_PYTHONS", "").split(":"))]
pytestmark = pytest.mark.daemon


@contextmanager
def served(port: int = 0, **options: str) -> Iterator[str]:
    """Serve the fake model, also over HTTP; yield the address."""
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, HERE / "fake_daemon.py", f"{folder}/s", f"http={port}", *given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                assert daemon.stdout.readline() == "ready\n"
                yield f"http://127.0.0.1:{port}"
            finally:
                daemon.terminate()
                daemon.communicate(timeout=60)


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """Serve the fake model."""
    with served(cost="0.001") as address:
        yield f"{address}/v1"


def run(
    *command: str | Path, cwd: str | Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run a client to its end; return what it printed."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=None if env is None else {"PATH": os.environ["PATH"], **env},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def having(package: str, python: str) -> None:
    """Skip the test where an interpreter has no such package."""
    command = [python, "-c", f"import {package}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"{package} is not installed beside {python}")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_openai_package_for_python(base_url: str, python: str) -> None:
    """Whole answers, streams, the helper, errors, sync and async."""
    having("openai", python)
    assert run(python, HERE / "sdk_client.py", base_url).startswith("ok")


@pytest.mark.parametrize("python", PYTHONS)
def test_responses_of_the_openai_package_for_python(base_url: str, python: str) -> None:
    """Whole, streamed, parsed, with calls of tools; errors; sync and async."""
    having("openai.resources.responses.input_tokens", python)
    assert run(python, HERE / "sdk_responses.py", base_url).startswith("ok")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_anthropic_package_for_python(base_url: str, python: str) -> None:
    """Whole, streamed, parsed, with uses of tools; errors; sync and async."""
    having("anthropic", python)
    url = base_url.removesuffix("/v1")
    assert run(python, HERE / "sdk_messages.py", url).startswith("ok")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_ollama_package_for_python(base_url: str, python: str) -> None:
    """Whole, streamed, in a form; models; errors; sync and async."""
    having("ollama", python)
    assert run(python, HERE / "sdk_ollama.py", base_url.removesuffix("/v1")) == "ok\n"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_ollama_package_for_python_calls_a_function(tmp_path: Path, python: str) -> None:
    """A thought, a call, and the answer to its result."""
    having("ollama", python)
    call = json.dumps({"name": "look", "arguments": {"thing": "the cup"}})
    thought = f"<think>\nI look first.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    path = tmp_path / "script.json"
    path.write_text(json.dumps([thought, "It is full."]))
    with served(script=str(path)) as address:
        assert run(python, HERE / "sdk_ollama.py", address, "--tools") == "ok\n"


_OF_OPENAI = """
import sys, openai, langchain_openai
url = sys.argv[1] + "/v1"
texts = ["a fox", "the sea"]
found = openai.OpenAI(base_url=url, api_key="none").embeddings.create(model="any", input=texts)
assert [each.index for each in found.data] == [0, 1] and found.usage.prompt_tokens > 0
chain = langchain_openai.OpenAIEmbeddings(base_url=url, api_key="none", check_embedding_ctx_length=False)
for one, other in zip(found.data, chain.embed_documents(texts), strict=True):
    assert max(abs(a - b) for a, b in zip(one.embedding, other, strict=True)) < 1e-4
print("ok")
"""


@pytest.mark.real
@pytest.mark.parametrize("python", PYTHONS)
def test_packages_for_python_get_vectors(tmp_path: Path, python: str) -> None:
    """Those of Ollama, OpenAI and LangChain: of several texts and of one, cut, too long; beside the model that chats."""
    for package in ("ollama", "openai", "langchain_openai"):
        having(package, python)
    encoders = pytest.importorskip("models.encoders", reason="gguf is not installed")
    file = encoders.write_encoder(tmp_path / "small.gguf", encoders.EncoderShape())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "uma_trio", "serve", "--policy", "baseline"),
        *("--socket", tmp_path / "s", "--http", str(port), "--embedding-model", file),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert "is ready" in daemon.stdout.readline()
            address = f"http://127.0.0.1:{port}"
            assert run(python, HERE / "sdk_ollama.py", address, "--embed") == "ok\n"
            assert run(python, "-c", _OF_OPENAI, address) == "ok\n"
        finally:
            daemon.terminate()
            daemon.communicate(timeout=60)


def test_the_openai_package_for_node(base_url: str) -> None:
    """Its streaming helper is the strictest of all."""
    folder = os.environ.get("UMA_SDK_NODE") or Path(sys.prefix) / "node"
    if shutil.which("node") is None or not Path(folder, "node_modules", "openai").exists():
        pytest.skip("there is no node, or no openai for it (make test installs it where npm is)")
    assert run("node", HERE / "sdk_client.mjs", base_url, cwd=folder) == "ok\n"


@pytest.mark.parametrize("python", PYTHONS)
def test_langchain(base_url: str, python: str) -> None:
    """Whole and streamed."""
    having("langchain_openai", python)
    code = (
        "import sys; from langchain_openai import ChatOpenAI\n"
        "m = ChatOpenAI(base_url=sys.argv[1], api_key='none', model='x', max_tokens=8, seed=1)\n"
        "whole = m.invoke('hello').content\n"
        "assert ''.join(c.content for c in m.stream('hello')) == whole\n"
    )
    run(python, "-c", code, base_url)


@pytest.mark.parametrize("python", PYTHONS)
def test_langchain_by_responses(base_url: str, python: str) -> None:
    """Whole and streamed, by the newer API."""
    having("langchain_openai", python)
    code = (
        "import sys; from langchain_openai import ChatOpenAI\n"
        "m = ChatOpenAI(base_url=sys.argv[1], api_key='none', model='x', use_responses_api=True,\n"
        "               temperature=0, max_tokens=16)\n"
        "whole = m.invoke('hello').text\n"
        "assert whole and ''.join(c.text for c in m.stream('hello')) == whole\n"
    )
    run(python, "-c", code, base_url)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_pydantic_ai_with_a_tool(base_url: str, python: str, api: str) -> None:
    """An agent that calls a tool, is told what came of it, and answers with an object."""
    having(f"pydantic_ai.models.{api}", python)
    code = (
        "import sys; from pydantic import BaseModel; from pydantic_ai import Agent\n"
        "from pydantic_ai.models.openai import OpenAIResponsesModel as openai_model\n"
        "from pydantic_ai.providers.openai import OpenAIProvider as openai_provider\n"
        "if sys.argv[2] == 'anthropic':\n"
        "    from pydantic_ai.models.anthropic import AnthropicModel as openai_model\n"
        "    from pydantic_ai.providers.anthropic import AnthropicProvider as openai_provider\n"
        "class Pet(BaseModel, extra='forbid'):\n"
        "    old: bool\n"
        "provider = openai_provider(base_url=sys.argv[1], api_key='none')\n"
        "agent = Agent(openai_model('x', provider=provider), output_type=Pet, retries=3)\n"
        "asked = {'max_tokens': 400, 'temperature': 0}\n"
        "assert isinstance(agent.run_sync('hello', model_settings=asked).output, Pet)\n"
    )
    url = base_url if api == "openai" else base_url.removesuffix("/v1")
    run(python, "-c", code, url, api)


@pytest.mark.parametrize("python", PYTHONS)
def test_pydantic_ai(base_url: str, python: str) -> None:
    """An agent without tools."""
    having("pydantic_ai", python)
    code = (
        "import sys; from pydantic_ai import Agent\n"
        "from pydantic_ai.models.openai import OpenAIChatModel\n"
        "from pydantic_ai.providers.openai import OpenAIProvider\n"
        "model = OpenAIChatModel('x', provider=OpenAIProvider(base_url=sys.argv[1], api_key='none'))\n"
        "print(repr(Agent(model).run_sync('hello', model_settings={'max_tokens': 8, 'seed': 1}).output))\n"
    )
    run(python, "-c", code, base_url)


def test_llm(base_url: str, tmp_path: Path) -> None:
    """The command `llm` with our daemon as one of its models."""
    having("llm", sys.executable)
    (tmp_path / "extra-openai-models.yaml").write_text(
        f'- model_id: local\n  model_name: local\n  api_base: "{base_url}"\n'
    )
    command = [sys.executable, "-m", "llm", "--no-log", "--key", "none", "-m", "local"]
    command += ["-o", "max_tokens", "8"]
    env = {"LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
    streamed = run(*command, "-o", "seed", "1", "hello", env=env)
    assert streamed.strip()
    assert run(*command, "-o", "seed", "1", "--no-stream", "hello", env=env) == streamed


def agent(name: str) -> str:
    """Return where an agent is; skip the test if nobody says."""
    found = os.environ.get(name)
    if found is None:
        pytest.skip(f"{name} names no program")
    return found


def script(folder: Path, tool: str, key: str) -> Path:
    """Write what the model says: a thought, a few words, a call; then the answer."""
    call = json.dumps({"name": tool, "arguments": {key: "cat greet.py"}})
    looks = "<think>\nI look first.\n</think>\n\nLet me look."
    path = folder / "script.json"
    path.write_text(json.dumps([f"{looks}<tool_call>\n{call}\n</tool_call>", "It prints 'hello'."]))
    (folder / "greet.py").write_text("print('hello')\n")
    return path


def test_codex_uses_a_tool(tmp_path: Path) -> None:
    """The program itself: it runs the command that the model asks for, and prints the answer."""
    program = agent("UMA_SDK_CODEX")
    with served(script=str(script(tmp_path, "exec_command", "cmd"))) as address:
        home = tmp_path / ".codex"
        home.mkdir()
        (home / "config.toml").write_text(
            'model = "local"\nmodel_provider = "uma"\nmodel_context_window = 1000000\n'
            '[model_providers.uma]\nname = "uma-trio"\nwire_api = "responses"\n'
            f'base_url = "{address}/v1"\n'
        )
        flags = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
        env = {"HOME": str(tmp_path), "CODEX_HOME": str(home)}
        said = run(program, "exec", *flags, "What does greet.py print?", cwd=tmp_path, env=env)
    assert "It prints 'hello'." in said


def test_claude_code_uses_a_tool(tmp_path: Path) -> None:
    """The program itself: it runs the command that the model asks for, and prints the answer."""
    program = agent("UMA_SDK_CLAUDE")
    with served(script=str(script(tmp_path, "Bash", "command"))) as address:
        env = {"HOME": str(tmp_path), "ANTHROPIC_BASE_URL": address}
        env |= {"ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        asked = ("-p", "What does greet.py print?", "--allowedTools", "Bash")
        assert run(program, *asked, cwd=tmp_path, env=env) == "It prints 'hello'.\n"
