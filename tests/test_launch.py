"""`uma-trio launch`, and what `doctor` and `serve` say about HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from uma_trio.app import http as app_http
from uma_trio.app.http import HttpPort, http_port, http_settings, settings_of
from uma_trio.cli.doctor import check_http
from uma_trio.cli.launch import environment, is_welcome, short_context, unreachable
from uma_trio.cli.serve import _base_url
from uma_trio.config.option import ConfigError
from uma_trio.config.settings import load
from uma_trio.http.settings import KeyFileUnusable, read_keys
from uma_trio.sockets.address import Address, parse_address
from uma_trio.sockets.handover import Handed
from uma_trio.sockets.listener import Listener
from uma_trio.sockets.port import PortUnusable, TcpListener, bound


def key_file(folder: Path, text: str = "# mine\none\n\ntwo\n", mode: int = 0o600) -> Path:
    """Write a file of keys."""
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_program_finds_the_daemon_by_every_usual_name(tmp_path: Path) -> None:
    """With a key, or one that means nothing, as clients refuse to start without."""
    address = parse_address("8080")
    found = environment(address, None)
    assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert found["ANTHROPIC_BASE_URL"] == found["OLLAMA_HOST"] == "http://127.0.0.1:8080"
    assert environment(address, key_file(tmp_path))["OPENAI_API_KEY"] == "one"


@pytest.mark.parametrize(
    ("inherited", "hosts"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        (
            {"NO_PROXY": "corp.example, 10.0.0.0/8"},
            "corp.example,10.0.0.0/8,127.0.0.1,localhost,::1",
        ),
        ({"no_proxy": "localhost,a"}, "localhost,a,127.0.0.1,::1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "a,b,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": ""}, "127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_a_program_asks_no_proxy_for_a_daemon_of_this_machine(
    inherited: dict[str, str], hosts: str
) -> None:
    found = environment(parse_address("8080"), None, inherited)
    assert found["NO_PROXY"] == found["no_proxy"] == hosts


def test_a_further_loopback_address_is_asked_without_a_proxy() -> None:
    found = environment(parse_address("127.0.0.2:8080"), None, {})
    assert found["NO_PROXY"] == "127.0.0.2,127.0.0.1,localhost,::1"


def test_a_proxy_may_lead_to_a_daemon_elsewhere() -> None:
    assert "NO_PROXY" not in environment(parse_address("box.lan:8080"), None, {"NO_PROXY": "a"})


def test_nobody_at_a_port_is_noticed() -> None:
    """Before a program is started that would not know what to say."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    why = unreachable(Address("127.0.0.1", port))
    assert why == f"nothing listens there. Start it: uma-trio serve --http {port}"
    assert "serve --http [::1]:9" in (unreachable(Address("::1", 9)) or "")


class Guarded(BaseHTTPRequestHandler):
    """Answers 401 to all but one key, as the daemon does."""

    def do_GET(self) -> None:
        """Answer with a status and nothing else."""
        statuses = {"Bearer one": 200, "Bearer other's": 403}  # the second is of another user
        self.send_response(statuses.get(str(self.headers["Authorization"]), 401))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_key_that_the_daemon_refuses_is_noticed_before_the_program_runs() -> None:
    """The program would only report that it may not come in."""
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = Address("127.0.0.1", server.server_port)
        found = [is_welcome(address, key) for key in ("one", "none", "other's")]
        server.shutdown()
        thread.join()
    assert found == [True, False, False]
    assert is_welcome(address, "none"), "nobody is there, and another check reports that"


class Small(BaseHTTPRequestHandler):
    """A daemon whose requests may have 16,384 tokens."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"default_generation_settings": {"n_ctx": 16384}}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_context_that_is_too_short_for_a_program_is_noticed_before_it_runs() -> None:
    with HTTPServer(("127.0.0.1", 0), Small) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = Address("127.0.0.1", server.server_port)
        short = short_context("/usr/bin/claude", address, "none")
        others = [short_context(name, address, "none") for name in ("codex", "some-program")]
        server.shutdown()
        thread.join()
    assert short is not None
    assert "--n-ctx" in short
    assert others == [None, None]


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


def test_http_is_on_port_8080_of_this_machine_unless_it_is_off() -> None:
    """By a flag, a variable or YAML, which reads off as false."""
    assert load({}, env={}).http_address == Address("127.0.0.1", 8080)
    assert load({"http": "off"}, env={}).http_address is None
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


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("http_origin", "*", "every web page that is open"),
        ("http_origin", "http://a:1,*", "every web page that is open"),
        ("http_origin", "null", "sandboxed frame"),
        ("http_origin", "http://*.example.com", "is a pattern"),
        ("http_origin", "app://obsidian.md*", "is a pattern"),
        ("http_origin", "example.com", "SCHEME://HOST"),
        ("http_origin", "localhost:3000", "SCHEME://HOST"),
        ("http_origin", "http://a/page", "SCHEME://HOST"),
        ("http_origin", "http://a:port", "SCHEME://HOST"),
        ("http_origin", "http://a b", "SCHEME://HOST"),
        ("http_origin", "http://", "SCHEME://HOST"),
        ("http_host", "*", "every web page could have its own name"),
        ("http_host", "http://box", "without http://"),
        ("http_host", "box:8080", "without http://"),
    ],
)
def test_an_origin_or_a_host_that_no_request_has_is_refused(
    option: str, value: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load({option: value}, env={})
    assert str(caught.value).startswith(f"--{option.replace('_', '-')}: ")


@pytest.mark.parametrize(
    "origin",
    [
        "localhost",
        "http://x:3000/",
        "app://obsidian.md",
        "chrome-extension://abc",
        "http://[::1]:3",
    ],
)
def test_an_origin_as_browsers_send_it_is_taken(origin: str) -> None:
    settings = http_settings(load({"http_origin": origin}, env={}))
    assert settings.origins == {origin.rstrip("/")}


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")


def free_port() -> int:
    """Return a port that is free at both loopback addresses, as far as one can tell."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def hosts_of(port: HttpPort) -> list[str]:
    """Return the addresses that a front listens on."""
    return [each.sock.getsockname()[0] for each in all_of(port)]


def all_of(port: HttpPort) -> Sequence[Listener | TcpListener]:
    return () if port.listeners is None else port.listeners.all


@needs_ipv6
@pytest.mark.parametrize("typed", ["{}", "localhost:{}", "127.0.0.1:{}", "[::1]:{}"])
def test_a_port_is_served_at_both_loopback_addresses(typed: str) -> None:
    with http_port(load({"http": typed.format(free_port())}, env={})) as port:
        assert sorted(hosts_of(port)) == ["127.0.0.1", "::1"]
        assert not port.missing


def test_another_address_is_served_alone(tmp_path: Path) -> None:
    for typed in (f"127.0.0.2:{free_port()}", f"0.0.0.0:{free_port()}", f"unix:{tmp_path}/x"):
        keys = {"http_key_file": str(key_file(tmp_path))}
        with http_port(load({"http": typed, **keys}, env={})) as port:
            assert len(all_of(port)) == 1


@needs_ipv6
def test_it_is_said_that_only_one_loopback_address_is_served() -> None:
    """Somebody else has the port at the other one."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        number = taken.getsockname()[1]
        with http_port(load({"http": str(number)}, env={})) as port:
            assert hosts_of(port) == ["127.0.0.1"]
            assert f"[::1]:{number}: something else listens there" in port.missing


def test_a_machine_without_ipv6_is_served_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ipv6(address: Address, flag: str) -> socket.socket:
        if address.host == "::1":
            raise PortUnusable("Cannot assign requested address", is_missing=True)
        return bound(address, flag)

    monkeypatch.setattr(app_http, "bound", no_ipv6)
    with http_port(load({"http": str(free_port())}, env={})) as port:
        assert hosts_of(port) == ["127.0.0.1"]
        assert not port.missing


@needs_ipv6
def test_sockets_that_were_handed_over_are_used_by_their_names() -> None:
    """Also if the next daemon names the other address; what it does not serve is closed."""
    number = free_port()
    with http_port(load({"http": str(number)}, env={})) as old:
        for typed, used in ((f"[::1]:{number}", 2), (str(free_port()), 0)):
            handed = {each.path: Handed("http", each.path, each.sock.dup()) for each in all_of(old)}
            with http_port(load({"http": typed}, env={}), None, handed) as new:
                ours = [each.sock for each in all_of(new)]
                assert sum(one.sock in ours for one in handed.values()) == used
                assert all(one.sock.fileno() == -1 for one in handed.values() if not used)


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_default_port_that_is_free_is_served(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = default_port(monkeypatch, is_watched)
    with http_port(load({}, env={})) as found:
        assert (found.url, found.missing) == (f"http://127.0.0.1:{port}", "")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_daemon_on_a_terminal_takes_the_next_free_port(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another program has only the other loopback address, which clients may take for ours."""
    port = default_port(monkeypatch, is_watched=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, port), family=family),
        http_port(load({}, env={})) as found,
    ):
        assert found.url is not None
        assert found.url != f"http://127.0.0.1:{port}"
        assert f"port {port} is another program's" in found.missing


def test_a_service_whose_port_is_taken_serves_no_http_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = default_port(monkeypatch, is_watched=False)
    with (
        socket.create_server(("127.0.0.1", port)),
        http_port(load({}, env={})) as found,
    ):
        assert found.url is None
        assert "--http PORT" in found.missing


def test_a_default_port_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    default_port(monkeypatch, is_watched=False)
    with http_port(load({}, env={})) as old:
        handed = {each.path: Handed("http", each.path, each.sock.dup()) for each in all_of(old)}
        default_port(monkeypatch, is_watched=False)
        with http_port(load({}, env={}), None, handed) as new:
            assert new.url == old.url


def test_other_commands_hear_of_the_port_that_was_taken_and_the_key_that_was_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = default_port(monkeypatch, is_watched=False)
    key = {"http_key_file": str(key_file(tmp_path))}
    with http_port(load({}, env={})) as found:
        assert settings_of(found, load({}, env={})) == {"http": f"127.0.0.1:{port}"}
    assert settings_of(HttpPort(), load({}, env={})) == {"http": "off"}
    assert settings_of(HttpPort(), load({"http": "9", **key}, env={})) == key


def default_port(monkeypatch: pytest.MonkeyPatch, is_watched: bool) -> int:
    """Have another default port, which is free, and a daemon that a person watches or not; return the port."""
    port = free_port()
    monkeypatch.setattr(app_http, "DEFAULT_PORT", port)
    monkeypatch.setattr(app_http, "_is_watched", lambda: is_watched)
    return port


def test_doctor_looks_at_the_port(tmp_path: Path) -> None:
    """Free or off is no problem; taken, open to others without a key, and unusable keys are."""

    def found(**flags: str) -> list[str]:
        return [f"{each.weight}: {each.what}" for each in check_http(load(flags, env={}))]

    assert found(http="off") == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        taken.close()
        assert found(http=port) == []
    (exposed,) = found(http="0.0.0.0:9")
    assert exposed.startswith("blocks: other machines can reach")
    (keys,) = found(http="9", http_key_file=str(tmp_path / "no"))
    assert keys.startswith("blocks: ")
    assert found(http=f"unix:{tmp_path}/x") == []


def test_serve_prints_the_line_that_a_client_needs() -> None:
    """To be copied."""
    open_to_all = _base_url("http://127.0.0.1:8080", None)
    assert "OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none" in open_to_all
    assert "OPENAI_API_KEY is in /k" in _base_url("http://127.0.0.1:8080", Path("/k"))
    assert _base_url("unix:/x", None) == "unix:/x"
