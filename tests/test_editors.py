"""The adapters for editors: their manifests, and what they ask a daemon for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_http_sdk import served

HERE = Path(__file__).resolve().parent
CODE = HERE.parent / "packaging" / "editors" / "vscode"


def test_every_command_of_the_manifest_is_in_the_code() -> None:
    """And every setting that the code reads is declared."""
    manifest = json.loads((CODE / "package.json").read_text(encoding="utf-8"))
    source = (CODE / "extension.js").read_text(encoding="utf-8")
    commands = {entry["command"] for entry in manifest["contributes"]["commands"]}
    assert commands == set(re.findall(r'registerCommand\("([^"]+)"', source))
    declared = manifest["contributes"]["configuration"]["properties"]
    read = {f"uma-trio.{name}" for name in re.findall(r'given\.get\("(\w+)"\)', source)}
    assert read == set(declared)
    assert all((CODE / name).is_file() for name in manifest["files"])


def test_each_use_has_the_lane_of_who_waits_for_it() -> None:
    """Who types or reads is interactive, a rewrite is background."""
    source = (CODE / "api.js").read_text(encoding="utf-8")
    lanes = dict(re.findall(r'(\w+): \{ "X-UMA-Priority": "(\w+)"', source))
    assert lanes == {
        "completion": "interactive",
        "ask": "interactive",
        "refactor": "background",
    }


@pytest.mark.daemon
def test_the_extension_and_a_daemon_understand_each_other() -> None:
    """Streams, completions, refusals, and a reader that leaves."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node, which VS Code brings")
    with served(cost="0.001") as url:
        command = [node, HERE / "editor_client.mjs", CODE / "api.js", url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
