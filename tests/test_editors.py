"""The adapters for editors: their manifests, and what they ask a daemon for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_http_sdk import served

from uma_trio.cli.parser import command_of
from uma_trio.cli.run import run

HERE = Path(__file__).resolve().parent
CODE = HERE.parent / "packaging" / "editors" / "vscode"
ZED = HERE.parent / "packaging" / "editors" / "zed"


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


def test_the_manifest_has_what_an_extension_is_packaged_by() -> None:
    """Without one of these vsce refuses or asks."""
    manifest = json.loads((CODE / "package.json").read_text(encoding="utf-8"))
    assert {"name", "publisher", "version", "engines", "license", "repository"} <= set(manifest)


@pytest.mark.daemon
def test_the_extension_can_be_packaged(tmp_path: Path) -> None:
    """By Microsoft's own tool, where npm reaches it."""
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("there is no npm")
    vsce, made = [npx, "--yes", "@vscode/vsce"], tmp_path / "made.vsix"
    try:
        subprocess.run([*vsce, "--version"], capture_output=True, check=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm does not reach @vscode/vsce")
    command = [*vsce, "package", "--no-dependencies", "--out", str(made)]
    subprocess.run(command, cwd=CODE, check=True, timeout=120)
    with zipfile.ZipFile(made) as packed:
        assert {"extension/extension.js", "extension/api.js"} <= set(packed.namelist())


def test_the_settings_of_zed_lead_to_the_daemon() -> None:
    """They are what the guide shows."""
    text = (ZED / "settings.json").read_text(encoding="utf-8")
    guide = (HERE.parent / "docs" / "guide" / "programs.md").read_text(encoding="utf-8")
    block = re.search(r"### Zed.*?```json\n(.*?)```", guide, re.DOTALL)
    assert block is not None
    assert json.loads(block[1]) == json.loads(text)


TASKS = json.loads((ZED / "tasks.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["label"])
def test_a_task_of_zed_sends_the_selection_as_it_is(task: dict[str, Any], tmp_path: Path) -> None:
    """Quotes, dollars and backticks of a program reach the daemon, and no shell runs them."""
    program = tmp_path / "uma-trio"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps([sys.argv[1:], sys.stdin.read()]))\n"
    )
    program.chmod(0o755)
    assert task["env"] == {"UMA_SELECTION": "$ZED_SELECTED_TEXT"}
    assert "$" not in task["command"]
    selected = "echo \"$HOME\" `id` 'x'; exit 3\nsecond line"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "UMA_SELECTION": selected}
    done = subprocess.run(
        ["/bin/sh", "-c", task["command"]], env=env, capture_output=True, text=True, check=True
    )
    arguments, said = json.loads(done.stdout)
    assert said == f"{selected}\n"
    assert arguments[0] == "run"
    context = command_of("run", run).make_context("run", arguments[1:])
    lane = "background" if "rewrite" in task["label"] else "interactive"
    assert (context.params["asking__priority"] or "interactive") == lane


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
