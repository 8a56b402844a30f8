"""`uma-trio launch`, and what `doctor` and `serve` say about HTTP."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from uma_trio.cli.check_place import check_http
from uma_trio.cli.launch import environment, is_welcome, unreachable
from uma_trio.cli.main import apart
from uma_trio.cli.serve import _base_url
from uma_trio.config.option import ConfigError
from uma_trio.config.settings import load
from uma_trio.http.wire.settings import KeyFileUnusable, read_keys
from uma_trio.sockets.address import Address, parse_address
from uma_trio.wiring_http import http_port, http_settings


def key_file(folder: Path, text: str = "# mine\none\n\ntwo\n", mode: int = 0o600) -> Path:
    """Write a file of keys."""
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["ps", "--json"], ["ps", "--json"]),
        (["launch", "aider", "--model", "x"], ["launch", "--", "aider", "--model", "x"]),
        (
            ["launch", "--http", "1", "a", "--http", "2"],
            ["launch", "--http", "1", "--", "a", "--http", "2"],
        ),
        (["launch", "--http=1", "a"], ["launch", "--http=1", "--", "a"]),
        (["launch", "--", "a", "--b"], ["launch", "--", "a", "--b"]),
        (["launch", "--help"], ["launch", "--help", "--"]),
    ],
)
def test_the_flags_of_a_launched_program_are_its_own(given: list[str], wanted: list[str]) -> None:
    """Ours stand before it."""
    assert apart(given) == wanted


def test_a_program_finds_the_daemon_by_every_usual_name(tmp_path: Path) -> None:
    """With a key, or one that means nothing, as clients refuse to start without."""
    address = parse_address("8080")
    found = environment(address, None)
    assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert found["ANTHROPIC_BASE_URL"] == found["OLLAMA_HOST"] == "http://127.0.0.1:8080"
    assert environment(address, key_file(tmp_path))["OPENAI_API_KEY"] == "one"


def test_nobody_at_a_port_is_noticed() -> None:
    """Before a program is started that would not know what to say."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    why = unreachable(Address("127.0.0.1", port))
    assert why == f"nobody listens there. Start it: uma-trio serve --http {port}"
    assert "serve --http [::1]:9" in (unreachable(Address("::1", 9)) or "")


class Guarded(BaseHTTPRequestHandler):
    """Answers 401 to all but one key, as the daemon does."""

    def do_GET(self) -> None:
        """Answer with a status and nothing else."""
        welcome = self.headers["Authorization"] == "Bearer one"
        self.send_response(200 if welcome else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_key_that_the_daemon_refuses_is_noticed_before_the_program_runs() -> None:
    """The program would only report that it may not come in."""
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = Address("127.0.0.1", server.server_port)
        found = [is_welcome(address, key) for key in ("one", "none")]
        server.shutdown()
        thread.join()
    assert found == [True, False]
    assert is_welcome(address, "none"), "nobody is there, and another check reports that"


@pytest.mark.parametrize(
    ("text", "wanted", "loopback"),
    [
        ("8080", Address("127.0.0.1", 8080), True),
        ("localhost:1", Address("localhost", 1), True),
        ("[::1]:8080", Address("::1", 8080), True),
        ("192.168.1.2:8080", Address("192.168.1.2", 8080), False),
        ("box.lan:80", Address("box.lan", 80), False),
        ("unix:/run/x", Address(path="/run/x"), True),
    ],
)
def test_an_address_is_read_as_it_is_typed(text: str, wanted: Address, loopback: bool) -> None:
    """A port alone is this machine's own."""
    address = parse_address(text)
    assert (address, address.is_loopback) == (wanted, loopback)


@pytest.mark.parametrize(
    "text", ["", "http", "0", "65536", "::1:8080", "unix:", "-1", "localhost:"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """With what one looks like."""
    with pytest.raises(ValueError, match="an address"):
        parse_address(text)


def test_http_is_off_until_it_is_asked_for() -> None:
    """By a flag, a variable or YAML, which reads off as false."""
    assert load({}, env={}).http_address is None
    assert load({"http": "no"}, env={}).http_address is None
    assert load({}, env={"UMA_HTTP": "9"}).http_address == Address("127.0.0.1", 9)


def test_a_file_of_keys_is_the_users_alone(tmp_path: Path) -> None:
    """Comments and empty lines are no keys; a file that others read, or an empty one, is refused."""
    assert read_keys(key_file(tmp_path)) == (b"one", b"two")
    for text, mode, why in (("one", 0o640, "chmod 600"), ("#\n", 0o600, "0 keys")):
        with pytest.raises(KeyFileUnusable, match=why):
            read_keys(key_file(tmp_path, text, mode))
    with pytest.raises(KeyFileUnusable, match="cannot read"):
        read_keys(tmp_path / "missing")


def test_an_address_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    """The daemon does not start without."""
    with (
        pytest.raises(ConfigError, match="--http-key-file"),
        http_port(load({"http": "0.0.0.0:9"}, {})),
    ):
        pass


def test_the_settings_name_who_may_come() -> None:
    """Hosts and pages are lists, in lower case; the bound host is one of ours."""
    flags = {"http": "Box:9", "http_host": "A.lan, b", "http_origin": "http://x:3000/,app://y"}
    settings = http_settings(load(flags, env={}))
    assert settings.hosts == {"box", "a.lan", "b"}
    assert settings.origins == {"http://x:3000", "app://y"}


def test_doctor_looks_at_the_port(tmp_path: Path) -> None:
    """Free, taken by somebody else, open to others, with keys that cannot be used, or off."""

    def found(**flags: str) -> tuple[str, str]:
        (finding,) = check_http(load(flags, env={}))
        return finding.weight, finding.what

    assert found()[0] == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        taken.close()
        assert found(http=port) == ("ok", f"http://127.0.0.1:{port} is free")
    assert found(http="0.0.0.0:9")[0] == "blocks"
    assert found(http="9", http_key_file=str(tmp_path / "no"))[0] == "blocks"
    assert found(http=f"unix:{tmp_path}/x")[0] == "ok"


def test_serve_prints_the_line_that_a_client_needs() -> None:
    """To be copied."""
    open_to_all = _base_url("http://127.0.0.1:8080", None)
    assert "OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none" in open_to_all
    assert "OPENAI_API_KEY is in /k" in _base_url("http://127.0.0.1:8080", Path("/k"))
    assert _base_url("unix:/x", None) == "unix:/x"
