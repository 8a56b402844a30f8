"""`uma-conformance`: it passes against this daemon, and each case fails against a server that breaks its rule."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest
from faulty_server import FAULTS, RIGHT, SLOW_FAULTS, TCP_FAULTS, Fault, faulty

from uma_protocol import conformance
from uma_protocol.conformance import cases_events, command
from uma_protocol.conformance.cases_requests import OTHERS, VALUES
from uma_protocol.conformance.documents import EVENTS, REQUESTS
from uma_protocol.conformance.peer import CASES, Server
from uma_protocol.events import Event
from uma_protocol.requests import BY_TYPE
from uma_protocol.schema import fields_of

ROOT = Path(__file__).parents[1]
FAKE = Path(__file__).with_name("fake_daemon.py")
TOKEN = "5f" * 32
PATIENCE_S = 20.0
EVERY_FAULT = [*FAULTS, *TCP_FAULTS, *SLOW_FAULTS]


@contextmanager
def _daemon(command_: list[str]) -> Iterator[None]:
    """Run a daemon process until the block ends."""
    process = subprocess.Popen(
        command_, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "ready" in line:
                break
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a daemon with the fake model on a Unix socket."""
    path = str(tmp_path_factory.mktemp("c") / "s")
    with _daemon([sys.executable, str(FAKE), path]):
        yield path


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a daemon with the fake model on a TCP port, and the file of its token."""
    file = tmp_path_factory.mktemp("t") / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp:127.0.0.1:{port}"
    with _daemon([sys.executable, str(FAKE), address, f"token_file={file}"]):
        yield address, file


def _outcomes(printed: str) -> dict[str, str]:
    return {case["id"]: case["outcome"] for case in json.loads(printed)["cases"]}


@pytest.mark.daemon
def test_this_daemon_conforms(unix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each case passes, but those of a TCP port and those that wait."""
    code = command.main(["--socket", unix, "--format", "json"])
    report = json.loads(printed := capsys.readouterr().out)
    assert [case for case in report["cases"] if case["outcome"] == "failed"] == []
    assert code == 0
    skipped = {id_ for id_, outcome in _outcomes(printed).items() if outcome == "skipped"}
    assert skipped == {id_ for id_ in CASES if id_.startswith("6.") and id_ != "6.4.1"} | {"7.0.2"}


@pytest.mark.daemon
def test_this_daemon_conforms_on_a_port(
    tcp: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the token of the file, as far as it does not take seconds."""
    address, file = tcp
    code = command.main(["--socket", address, "--token-file", str(file), "--format", "json"])
    report = json.loads(printed := capsys.readouterr().out)
    assert [case for case in report["cases"] if case["outcome"] == "failed"] == []
    assert code == 0
    skipped = {id_ for id_, outcome in _outcomes(printed).items() if outcome == "skipped"}
    assert skipped == {"3.10.1", "6.3.1", "6.4.1", "7.0.2"}


@pytest.mark.real
@pytest.mark.daemon
def test_a_daemon_with_the_bundled_model_conforms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case depends on what the fake model says."""
    path = str(tmp_path / "s")
    serve = [sys.executable, "-m", "uma_trio", "serve", "--socket", path]
    with _daemon([*serve, "--model", str(ROOT / "uma_trio" / "models" / "storyteller.gguf")]):
        command.main(["--socket", path, "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert [case for case in report["cases"] if case["outcome"] == "failed"] == []


def _caught(fault: Fault, target: str, folder: Path, token: str = "") -> dict[str, str]:
    """Return the outcome of each case that should notice a fault."""
    with faulty(fault, target, folder, token) as address:
        server = Server(address, token or None, timeout_s=0.5)
        return {id_: server.run(CASES[id_])[0] for id_ in fault.fails.split()}


@pytest.mark.daemon
@pytest.mark.parametrize("fault", [*FAULTS, *SLOW_FAULTS], ids=lambda fault: fault.name)
def test_a_wrong_server_fails(unix: str, tmp_path: Path, fault: Fault) -> None:
    """Each case of the rule that it breaks notices."""
    outcomes = _caught(fault, unix, tmp_path)
    assert outcomes == dict.fromkeys(outcomes, "failed")


@pytest.mark.daemon
@pytest.mark.parametrize("fault", TCP_FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_server_on_a_port_fails(
    tcp: tuple[str, Path], tmp_path: Path, fault: Fault
) -> None:
    """Each case of the rule that it breaks notices."""
    outcomes = _caught(fault, tcp[0], tmp_path, TOKEN)
    assert outcomes == dict.fromkeys(outcomes, "failed")


@pytest.mark.daemon
def test_a_right_server_behind_the_same_proxy_passes(unix: str, tmp_path: Path) -> None:
    """What the cases notice is the fault, not the proxy."""
    with faulty(RIGHT, unix, tmp_path) as address:
        server = Server(address, timeout_s=PATIENCE_S)
        results = command.run(server, command.chosen([]), slow=False)
    assert [result for result in results if result.outcome == "failed"] == []


def test_no_case_is_without_a_server_that_fails_it() -> None:
    """A case that cannot fail proves nothing."""
    assert set(CASES) == {id_ for fault in EVERY_FAULT for id_ in fault.fails.split()}


def test_rules_and_cases_are_in_step() -> None:
    """Each rule of the reference has a case, or a reason why it has none; no case is of a rule that is gone."""
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    rules = set()
    for number, section in re.findall(
        r"^## (\d)\. (.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    ):
        rules |= {f"{number}.{rule}" for rule in re.findall(r"^(\d+)\. ", section, re.MULTILINE)}
    assert len(rules) > 40
    introductions = {"3.0", "4.0", "7.0"}  # the tables of fields, events and limits
    assert not command.NOT_TESTED.keys() & {case.rule for case in CASES.values()}
    tested = command.NOT_TESTED.keys() | {case.rule for case in CASES.values()}
    assert tested == rules | introductions


def test_every_field_of_every_request_has_values_beyond_its_bounds() -> None:
    """A field that is added is tested."""
    assert set(VALUES) == {field.name for field in fields_of(BY_TYPE["generate"])}
    for name in BY_TYPE.keys() - {"generate"}:
        assert set(OTHERS[name][1]) == {field.name for field in fields_of(BY_TYPE[name])}, name


@pytest.mark.parametrize("payload", EVENTS)
def test_right_events_have_the_fields_of_the_table(payload: bytes) -> None:
    """The judge accepts an event of every kind with any of its fields."""
    event = json.loads(payload)
    if event["event"] in cases_events.FIELDS:
        cases_events.check_fields(event)


def test_there_is_a_document_of_every_type_and_kind() -> None:
    """Whoever tests with them has met every request and every event."""
    assert {json.loads(payload)["type"] for payload in REQUESTS} == BY_TYPE.keys()
    kinds = {kind.__struct_config__.tag for kind in get_args(Event)}
    assert {json.loads(payload)["event"] for payload in EVENTS} == kinds


def test_the_judge_does_not_use_what_it_judges() -> None:
    """Of the library the cases know constants only, and beyond it the standard library."""
    folder = Path(conformance.__file__).parent
    used = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("uma_protocol"):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).partition(".")[0] in sys.stdlib_module_names
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= sys.stdlib_module_names
    assert all(name.isupper() or name == "Code" for name in used), used


@pytest.mark.daemon
def test_reports_for_programs(
    unix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JUnit XML has a failure with its reason; the exit status says so too; a section can be chosen."""
    fault = next(fault for fault in FAULTS if "4.3.2" in fault.fails)
    with faulty(fault, unix, tmp_path) as address:
        assert command.main(["--socket", address, "--format", "junit", "4.3"]) == 1
        suite = ET.fromstring(capsys.readouterr().out)  # noqa: S314  our own
        assert command.main(["--socket", address, "4.3"]) == 1
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    assert [case.get("classname") for case in suite] == ["rule 4.3", "rule 4.3"]
    assert "'done'" in suite[1][0].get("message", "")
    assert "FAIL  4.3.2" in capsys.readouterr().out


def test_what_cannot_be_tested_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens, or nothing has that number: status 2."""
    assert command.main(["--socket", str(tmp_path / "nobody")]) == 2
    assert "cannot connect" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        command.main(["--socket", "x", "9.9"])
    assert caught.value.code == 2
    assert command.main(["--list"]) == 0
    assert "1.3.2" in capsys.readouterr().out
