"""The real clients of OpenAI's and Anthropic's APIs against a real daemon process, as far as they are installed.

The packages come with ``pip install '.[sdk]'``. Other versions: ``UMA_SDK_PYTHONS`` names interpreters
beside which another openai is installed, ``UMA_SDK_NODE`` a folder in which npm has installed it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PYTHONS = [sys.executable, *filter(None, os.environ.get("UMA_SDK_PYTHONS", "").split(":"))]
pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """Serve the fake model, also over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            HERE / "fake_daemon.py",
            f"{folder}/s",
            f"http={port}",
            "cost=0.001",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                assert daemon.stdout.readline() == "ready\n"
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                daemon.terminate()
                daemon.communicate(timeout=60)


def run(*command: str | Path, cwd: str | None = None) -> str:
    """Run a client to its end; return what it printed."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, check=False, timeout=120
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


def test_the_openai_package_for_node(base_url: str) -> None:
    """Its streaming helper is the strictest of all."""
    folder = os.environ.get("UMA_SDK_NODE")
    if folder is None or shutil.which("node") is None:
        pytest.skip("UMA_SDK_NODE names no folder with node_modules/openai, or there is no node")
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
        "class Pet(BaseModel):\n"
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
