"""Unmodified clients play a session of five turns, with tools and a schema, against a real daemon process.

Those here are installed by ``make test`` (extra ``sdk``); ``make clients`` plays it with all of them.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from client_session import CLIENTS
from sessions_kit import CHECKED_OUT, NODE_CLIENTS, TURNS, VENVS, play, script

pytestmark = pytest.mark.daemon


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CHECKED_OUT)
def test_a_session_in_python(client: str, stream: bool) -> None:
    """Each call comes with its arguments, the text and the object as the model said them."""
    package, _ = CLIENTS[client]
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make setup-test")
    play(client, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_session_in_node(stream: bool) -> None:
    """By the package of OpenAI."""
    folder = Path(sys.prefix) / "node"
    if shutil.which("node") is None or not (folder / "node_modules" / "openai").exists():
        pytest.skip("there is no node, or no openai for it (make test installs it where npm is)")
    play("openai-node", stream=stream, python=str(folder))


def test_make_clients_plays_every_client() -> None:
    """Each is in one environment, and the model has a turn of each kind for it."""
    elsewhere = [name for _, names in VENVS.values() for name in names]
    assert sorted([*CHECKED_OUT, *elsewhere]) == sorted([*CLIENTS, "aiperf"])
    for name in (*CLIENTS, *NODE_CLIENTS):
        assert len(script(name)) == len(TURNS)
        assert json.dumps(TURNS[4]) in script(name)[4] or name == "smolagents"
