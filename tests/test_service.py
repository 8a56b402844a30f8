"""The daemon as a service: sockets made by a supervisor, signs of life, units, and `stop`."""

from __future__ import annotations

import os
import plistlib
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import trio

from uma_trio.app.sockets import names_taken, with_inherited_addresses
from uma_trio.cli import service as verb
from uma_trio.cli.service import files_of_service, units_folder
from uma_trio.cli.stop import stop
from uma_trio.cli.units import SERVICE_UNIT, SOCKET_UNIT, launch_agent, systemd_units
from uma_trio.client import default_socket, generate_sync
from uma_trio.config.settings import load
from uma_trio.sockets.address import parse_address
from uma_trio.sockets.inherited import NONE, Inherited, NotUsable, inherited_sockets
from uma_trio.sockets.listener import claim
from uma_trio.sockets.path import SHARED_SOCKET, socket_to_connect
from uma_trio.sockets.supervisor import Supervisor

COMMAND = Path("/opt/uma/bin/uma-trio")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="uma") as name:
        yield Path(name)


def listening(path: Path) -> socket.socket:
    """Return a Unix socket that listens."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


@contextmanager
def passed(*socks: socket.socket, names: str = "") -> Iterator[tuple[dict[str, str], int]]:
    """Give `socks` consecutive descriptors, as a supervisor does: the variables, and the first."""
    first = 900
    with ExitStack() as stack:
        for place, sock in enumerate(socks):
            os.dup2(sock.fileno(), first + place)
            stack.callback(sock.close)
        env = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(socks))}
        yield {**env, "LISTEN_FDNAMES": names} if names else env, first


# --- inherited sockets ---


def test_sockets_are_told_apart_by_their_names(folder: Path) -> None:
    """HTTP may be on a Unix socket, too."""
    framed, http = listening(folder / "a"), listening(folder / "b")
    with passed(http, framed, names="http:uma") as (env, first):
        got = inherited_sockets(env, first)
    assert (got.path, got.http_address) == (str(folder / "a"), f"unix:{folder / 'b'}")
    assert env == {}
    got.close()


def test_sockets_without_names_are_told_apart_by_their_family(folder: Path) -> None:
    """A TCP socket is for HTTP, a Unix socket for the framed protocol."""
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    with passed(port, listening(folder / "a")) as (env, first):
        got = inherited_sockets(env, first)
    assert (got.path, got.http_address) == (str(folder / "a"), f"127.0.0.1:{number}")
    assert got.framed is not None
    assert not got.framed.getblocking()
    assert not got.framed.get_inheritable()
    got.close()


def test_sockets_for_another_process_are_left_alone() -> None:
    """A child inherits the variables of its parent, which are not meant for it."""
    assert inherited_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == NONE
    assert inherited_sockets({}) == NONE


def test_two_sockets_for_one_front_are_refused(folder: Path) -> None:
    """It is not guessed which is meant."""
    socks = (listening(folder / "a"), listening(folder / "b"))
    with passed(*socks) as (env, first), pytest.raises(NotUsable, match="the framed protocol"):
        inherited_sockets(env, first)


def test_what_does_not_listen_is_refused(folder: Path) -> None:
    """A connected socket, say."""
    refused = pytest.raises(NotUsable, match="descriptor 900 is no listening")
    with passed(socket.socket(socket.AF_UNIX)) as (env, first), refused:
        inherited_sockets(env, first)


def test_an_inherited_name_is_neither_probed_nor_removed(folder: Path) -> None:
    """Who waits in its backlog must be answered; the supervisor goes on listening there."""
    made = listening(folder / "s")
    with claim(folder / "s", inherited=made) as name, name.listen() as listener:
        assert listener.path == str(folder / "s")
    assert (folder / "s").exists()


def test_inherited_sockets_take_the_place_of_the_configured_ones(folder: Path) -> None:
    """The ready message, `ps` and the checks of the HTTP address speak of what is served."""
    with listening(folder / "s") as made:
        config = with_inherited_addresses(
            Inherited(framed=made), load({"socket": "/elsewhere"}, {})
        )
        assert (config.socket, config.source("socket")) == (folder / "s", "LISTEN_FDS")


_HOLDER = """\
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_who_connects_while_no_daemon_runs_is_answered_by_the_next(folder: Path) -> None:
    """The holder's socket outlives two daemons; no connect is refused, and each answer is whole."""
    made, path = listening(folder / "s"), str(folder / "s")

    def start() -> subprocess.Popen[bytes]:
        daemon = str(Path(__file__).parent / "fake_daemon.py")
        return subprocess.Popen(
            [sys.executable, "-c", _HOLDER, daemon, path],
            env={**os.environ, "LISTEN_FDS": "1"},
            stdin=made,
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: os.dup2(0, 3),  # noqa: PLW1509  no threads
            pass_fds=(3,) if made.fileno() != 3 else (),
        )

    for _ in range(2):
        running = start()
        try:
            assert len(list(generate_sync("hello", path, max_tokens=3))) == 3
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
        finally:
            running.kill()
            running.wait()
    made.close()


# --- default paths ---


def test_the_default_path_is_in_the_users_runtime_folder(folder: Path) -> None:
    """Only without one it is in /tmp."""
    env = {"XDG_RUNTIME_DIR": str(folder)}
    assert str(load({}, env).socket) == str(folder / "uma-trio" / "uma.sock")
    assert default_socket({}) == default_socket({"XDG_RUNTIME_DIR": "/not/there"}) == SHARED_SOCKET


async def test_a_daemon_that_was_told_no_path_is_found_under_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds' client knows /tmp/uma.sock alone."""
    shared = folder / "shared"
    for module in ("uma_trio.app.sockets", "uma_trio.sockets.path"):
        monkeypatch.setattr(f"{module}.SHARED_SOCKET", str(shared))
    config = load({}, {"XDG_RUNTIME_DIR": str(folder)})
    met: list[socket.socket] = []
    with names_taken(config, NONE) as listen, listen() as listeners:
        assert stat.S_IMODE(config.socket.parent.stat().st_mode) == 0o700
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listeners.accept_forever, met.append, lambda _: None)
            for path in (config.socket, shared):
                with trio.socket.socket(socket.AF_UNIX) as client:
                    await client.connect(str(path))
            while len(met) < 2:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    for sock in met:
        sock.close()
    assert not config.socket.exists()
    assert not shared.exists()


def test_a_shared_path_that_is_taken_stops_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users of one machine each have a daemon; the first of them has /tmp/uma.sock."""
    shared = folder / "shared"
    monkeypatch.setattr("uma_trio.app.sockets.SHARED_SOCKET", str(shared))
    config = load({}, {"XDG_RUNTIME_DIR": str(folder)})
    with claim(shared), names_taken(config, NONE) as listen, listen() as listeners:
        assert listeners.path == str(config.socket)


def test_a_daemon_that_was_told_a_path_serves_there_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever names a path does not expect another one."""
    shared = folder / "shared"
    monkeypatch.setattr("uma_trio.app.sockets.SHARED_SOCKET", str(shared))
    with names_taken(load({"socket": str(folder / "s")}, {}), NONE) as listen, listen():
        assert not shared.exists()


def test_a_daemon_behind_a_supervisors_socket_on_the_default_path_is_found_under_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds' client reaches the service, too; a socket elsewhere was somebody's choice."""
    shared = folder / "shared"
    monkeypatch.setattr("uma_trio.app.sockets.SHARED_SOCKET", str(shared))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "uma-trio").mkdir()
    for path, is_shared in ((folder / "uma-trio" / "uma.sock", True), (folder / "s", False)):
        inherited = Inherited(framed=listening(path))
        config = with_inherited_addresses(inherited, load({}, {}))
        with closing(inherited), names_taken(config, inherited) as listen, listen():
            assert shared.exists() == is_shared


def test_a_client_looks_in_both_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own comes first; with a socket in neither the message names the default."""
    shared, env = folder / "shared", {"XDG_RUNTIME_DIR": str(folder)}
    monkeypatch.setattr("uma_trio.sockets.path.SHARED_SOCKET", str(shared))
    own = Path(default_socket(env))
    assert socket_to_connect(env) == str(own)
    with listening(shared):
        assert socket_to_connect(env) == str(shared)
        own.parent.mkdir()
        with listening(own):
            assert socket_to_connect(env) == str(own)


def test_the_users_settings_file_is_read_if_it_is_there(folder: Path) -> None:
    """A service has no command line to write settings on."""
    env = {"XDG_CONFIG_HOME": str(folder)}
    assert load({}, env).n_ctx is None
    (folder / "uma-trio").mkdir()
    (folder / "uma-trio" / "config.yaml").write_text("n_ctx: 8192\n")
    assert load({}, env).n_ctx == 8192
    assert load({"n_ctx": "512"}, env).n_ctx == 512


# --- signs of life ---


@contextmanager
def supervised(folder: Path) -> Iterator[tuple[Supervisor, socket.socket]]:
    """A supervisor's end of the datagrams, and ours."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(folder / "notify"))
        heard.setblocking(False)
        env = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "2000000"}
        supervisor = Supervisor.of(env, os.getpid())
        assert "NOTIFY_SOCKET" not in env
        yield supervisor, heard


def test_a_supervisor_hears_of_loading_ready_life_and_stopping(folder: Path) -> None:
    """In sd_notify(3)'s words."""
    with supervised(folder) as (supervisor, heard):
        assert supervisor.watchdog_s == 2.0
        supervisor.loading(0.4)
        supervisor.ready("serving a model")
        supervisor.alive()
        supervisor.stopping(20)
        said = [heard.recv(4096).decode() for _ in range(4)]
    assert "STATUS=loading the model, 40%" in said[0]
    assert "EXTEND_TIMEOUT_USEC=" in said[0]
    assert said[1].splitlines() == ["READY=1", "STATUS=serving a model"]
    assert said[2] == "WATCHDOG=1"
    assert "STOPPING=1" in said[3]


def test_a_supervisor_that_does_not_listen_disturbs_nobody(folder: Path) -> None:
    """Nor one that is not there."""
    Supervisor(str(folder / "gone")).ready("")
    Supervisor().alive()
    assert Supervisor.of({"WATCHDOG_USEC": "5000000"}, 1).watchdog_s == 0.0


def test_another_process_may_be_the_one_that_is_watched() -> None:
    """WATCHDOG_PID names it (sd_watchdog_enabled(3))."""
    env = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    assert Supervisor.of(env, 2).watchdog_s == 0.0


# --- units and `service` ---


def test_the_service_has_its_sockets_and_its_time_to_drain() -> None:
    """HTTP has a unit only if the settings serve it."""
    units = systemd_units(COMMAND, parse_address("8080"), 30.0)
    assert "ListenStream=127.0.0.1:8080" in units["uma-trio-http.socket"]
    assert "TimeoutStopSec=50s" in units[SERVICE_UNIT]
    assert f"ExecStart={COMMAND} serve" in units[SERVICE_UNIT]
    assert "IPAddressDeny=any" in units[SERVICE_UNIT]
    assert set(systemd_units(COMMAND, None, 1.0)) == {SOCKET_UNIT, SERVICE_UNIT}


def test_a_service_that_others_can_reach_has_no_address_filter() -> None:
    """Its keys decide who may use it."""
    units = systemd_units(COMMAND, parse_address("0.0.0.0:8080"), 20.0)
    assert "IPAddressDeny" not in units[SERVICE_UNIT]


def test_a_path_with_spaces_and_percents_is_quoted() -> None:
    """Systemd would take it for two words and a specifier."""
    units = systemd_units(Path("/opt/my 100%/uma-trio"), None, 1.0)
    assert 'ExecStart="/opt/my 100%%/uma-trio" serve' in units[SERVICE_UNIT]


def test_a_socket_of_http_is_this_users_alone() -> None:
    """Its path may be in a folder that others may enter, and hold a percent sign."""
    unit = systemd_units(COMMAND, parse_address("unix:/srv/50%/http"), 1.0)["uma-trio-http.socket"]
    assert "ListenStream=/srv/50%%/http\n" in unit
    assert "SocketMode=0600\nDirectoryMode=0700\n" in unit


def test_the_name_of_a_host_is_written_as_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systemd takes no names."""

    def found(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host == "box.lan"
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", port, 0, 0))]

    monkeypatch.setattr("socket.getaddrinfo", found)
    units = systemd_units(COMMAND, parse_address("box.lan:8080"), 1.0)
    assert "ListenStream=[fd00::7]:8080\n" in units["uma-trio-http.socket"]


def test_the_service_is_told_where_this_users_models_are(home: Path) -> None:
    """A service manager does not read the shell's variables."""
    env = {"HF_HOME": "/data/my hf", "OLLAMA_MODELS": "/data/50%", "HF_TOKEN": "s"}
    unit = files_of_service(env, COMMAND)[units_folder(env) / SERVICE_UNIT].decode()
    assert 'Environment="HF_HUB_CACHE=/data/my hf/hub"\n' in unit
    assert "Environment=OLLAMA_MODELS=/data/50%%\n" in unit
    assert "TOKEN" not in unit
    about = plistlib.loads(launch_agent(COMMAND, Path("/logs"), {"OLLAMA_MODELS": "/data"}))
    assert about["EnvironmentVariables"] == {"OLLAMA_MODELS": "/data"}


def test_a_host_without_an_address_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a unit is written that systemd would refuse."""
    (home / "config" / "uma-trio").mkdir(parents=True)
    (home / "config" / "uma-trio" / "config.yaml").write_text(
        "http: 'no.such.host.invalid:80'\nhttp_key_file: /k\n"
    )
    assert verb.service("install") == 2
    assert "no.such.host.invalid:80 has no address" in capsys.readouterr().err


@pytest.mark.skipif(not os.access("/usr/bin/systemd-analyze", os.X_OK), reason="no systemd-analyze")
def test_systemd_takes_the_units_and_finds_little_exposed(folder: Path) -> None:
    """Its own words about them: no complaint, and an exposure of at most 2.5."""
    for name, text in systemd_units(Path(sys.executable), parse_address("8080"), 20.0).items():
        (folder / name).write_text(text)
    unit = str(folder / SERVICE_UNIT)
    checked = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert "uma-trio" not in checked.stderr
    about = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", about)
    assert found is not None
    assert float(found[1]) <= 2.5


def test_launchd_starts_it_at_login_and_when_it_fails() -> None:
    """The property list can be read back."""
    about = plistlib.loads(launch_agent(COMMAND, Path("/logs")))
    assert about["ProgramArguments"] == [str(COMMAND), "serve"]
    assert about["KeepAlive"] == {"SuccessfulExit": False}


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a `systemctl` that writes down what it is told."""
    tool = folder / "systemctl"
    tool.write_text(f'#!/bin/sh\necho "$*" >> {folder}/told\n')
    tool.chmod(0o755)
    (folder / "uma-trio").write_text("")
    monkeypatch.setattr(sys, "argv", [str(folder / "uma-trio")])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    return folder


def test_install_writes_the_units_and_starts_them(home: Path) -> None:
    """With the HTTP port of the user's settings."""
    (home / "config" / "uma-trio").mkdir(parents=True)
    (home / "config" / "uma-trio" / "config.yaml").write_text("http: '8080'\n")
    assert verb.service("install") == 0
    written = sorted(path.name for path in (home / "config" / "systemd" / "user").iterdir())
    assert written == ["uma-trio-http.socket", SERVICE_UNIT, SOCKET_UNIT]
    assert (home / "told").read_text().splitlines() == [
        "--user show-environment",
        "--user daemon-reload",
        f"--user enable --now {SOCKET_UNIT} uma-trio-http.socket {SERVICE_UNIT}",
    ]


@pytest.mark.parametrize("tool", ["", "#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n"])
def test_install_without_systemd_says_what_to_do_and_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    """There is none, or it manages no services of this user."""
    (home / "systemctl").unlink()
    monkeypatch.setenv("PATH", str(home))
    if tool:
        (home / "systemctl").write_text(tool)
        (home / "systemctl").chmod(0o755)
    assert verb.service("install") == 2
    told = capsys.readouterr()
    assert "run --start" in told.err
    assert ("connect to bus" in told.err) is bool(tool)
    assert "Wrote" not in told.out
    assert not (home / "config" / "systemd").exists()


def log_of(home: Path, monkeypatch: pytest.MonkeyPatch, journal: str = "") -> int:
    """Run `logs` where the journal has these entries."""
    (home / "journalctl").write_text(f"#!/bin/sh\nprintf '%s' '{journal}'\n")
    (home / "journalctl").chmod(0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    return verb.logs()


def test_logs_are_those_of_the_daemon_that_a_client_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also beside a service whose journal is empty; it ends, as nothing says more."""
    assert verb.service("install") == 0
    assert log_of(home, monkeypatch) == 2
    assert "There is no log" in capfd.readouterr().err
    (home / "state" / "uma-trio" / "serve.log").write_text("uma-trio is ready\n")
    assert log_of(home, monkeypatch) == 0
    assert capfd.readouterr().out == "uma-trio is ready\n"
    assert log_of(home, monkeypatch, "an entry of the service") == 0
    assert capfd.readouterr().out == "an entry of the service"


def test_uninstall_leaves_nothing(home: Path) -> None:
    """And says so when there was nothing."""
    assert verb.service("install") == 0
    assert verb.service("uninstall") == 0
    assert list((home / "config" / "systemd" / "user").iterdir()) == []
    assert verb.service("uninstall") == 0


def test_stop_stops_the_sockets_too(home: Path) -> None:
    """Or the next request would start the daemon again."""
    assert verb.service("install") == 0
    assert verb.service("stop") == 0
    assert (home / "told").read_text().splitlines()[-1] == (
        f"--user stop {SOCKET_UNIT} {SERVICE_UNIT}"
    )


def test_a_service_that_is_not_installed_says_how(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the first thing that somebody types may be `service status`."""
    assert verb.service("status") == 2
    assert "service install" in capsys.readouterr().err


# --- stop ---


def test_stop_ends_the_daemon_of_a_socket(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It returns when the process has ended."""
    daemon = str(Path(__file__).parent / "fake_daemon.py")
    path = folder / "s"
    command = [sys.executable, daemon, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().strip() == "ready"
        assert stop(socket=str(path)) == 0
        assert running.wait(60) == 0
    assert f"Stopped process {running.pid}" in capsys.readouterr().out


def test_stop_now_sends_two_signals_that_cannot_be_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two SIGTERMs that arrive together are one (signal(7)), and the daemon would drain."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    sent: list[int] = []

    def kill(pid: int, what: int) -> None:
        assert pid == ended.pid
        if not what:
            raise ProcessLookupError
        sent.append(what)

    monkeypatch.setattr("uma_trio.cli.stop.daemon_of", lambda _: ended.pid)
    monkeypatch.setattr("os.kill", kill)
    assert stop(now=True, socket=str(folder / "s")) == 0
    assert sent == [signal.SIGTERM, signal.SIGINT]


def test_stop_of_nothing_is_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that wants no daemon has what it wants."""
    assert stop(socket=str(folder / "s")) == 0
    assert "No daemon serves" in capsys.readouterr().out
