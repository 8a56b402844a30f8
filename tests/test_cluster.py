"""The files of a cluster: what its nodes' file may say, what HAProxy is given, and what it answers."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import PROGRAM

from uma_trio.config.errors import ConfigError
from uma_trio.sockets.address import parse_address
from uma_trio_cluster.commands.cluster import cluster
from uma_trio_cluster.haproxy import IN_FLIGHT, Files, configuration, key_map, moves_at
from uma_trio_cluster.nodes import MOST_NODES, Cluster, cluster_of, read, written
from uma_trio_cluster.process import CannotRun, check, write
from uma_trio_cluster.runtime import NotRunning, Runtime, pins_of, states_of

FOLDER = Path("/srv")
THREE = {
    "listen": "127.0.0.1:8300",
    "slots": 4,
    "nodes": [
        "10.0.0.1:8080",
        {"address": "10.0.0.2:8080", "agent": 9000, "slots": 16},
        "[fd00::3]:8080",
    ],
}


def of(**changes: Any) -> Cluster:
    """Return the three nodes with some values changed."""
    return cluster_of({**THREE, **changes}, "file", FOLDER)


def test_a_node_is_an_address_or_more(tmp_path: Path) -> None:
    """Its agent is on the next port and it has the slots of all, unless it says otherwise."""
    found = of()
    assert [(n.id, n.host_port, n.agent, n.slots) for n in found.nodes] == [
        (1, "10.0.0.1:8080", 8081, 4),
        (2, "10.0.0.2:8080", 9000, 16),
        (3, "[fd00::3]:8080", 8081, 4),
    ]
    (tmp_path / "c.yaml").write_text(written(found.drained(found.nodes[1], drained=True)))
    again = read(tmp_path / "c.yaml")
    assert again.nodes[1].drained
    assert again.drained(again.nodes[1], drained=False) == found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"listen": None}, "listen: give the address"),
        ({"listen": "0.0.0.0:8300"}, "needs keys"),
        ({"listen": "unix:/tmp/x"}, "no HOST:PORT"),
        ({"nodes": []}, "1 to 512 nodes"),
        ({"nodes": ["10.0.0.1:8080"] * (MOST_NODES + 1)}, "1 to 512 nodes"),
        ({"nodes": ["10.0.0.1:8080", "10.0.0.1:8080"]}, "the same address"),
        ({"nodes": [{"address": "a:1", "id": 2}, "b:2"]}, "the same id"),
        ({"nodes": ["10.0.0.1"]}, "nodes[0].address"),
        ({"nodes": ["a b:80"]}, "no HOST:PORT"),
        ({"nodes": [{"address": "a:1", "slots": True}]}, "nodes[0].slots"),
        ({"nodes": [{"adress": "a:1"}]}, "adress is unknown"),
        ({"color": "red"}, "color is unknown"),
        ({"edge": "a b"}, "edge"),
        ({"certificate": "a\nuser root"}, "certificate"),
        ({"peers": {"edge2": "nowhere"}}, "peers.edge2"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], said: str) -> None:
    """With its place in the file and what it may be."""
    with pytest.raises(ConfigError, match="file") as caught:
        of(**changes)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["- a", "a: [", "\xff"])
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    """In one sentence, with its name."""
    (tmp_path / "c.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="init"):
        read(tmp_path / "none.yaml")


def test_nodes_come_and_go_with_ids_of_their_own() -> None:
    """A new one is like the last one; the last one that is left stays."""
    found = of().without(of().find("2")).with_node(parse_address("10.0.0.4:8090"), None, None)
    new = found.nodes[-1]
    assert (new.id, new.agent, new.slots) == (4, 8091, 4)
    with pytest.raises(ConfigError, match="already"):
        found.with_node(parse_address("10.0.0.4:8090"), None, None)
    with pytest.raises(ConfigError, match="there are 1"):
        found.find("10.0.0.2:8080")
    one = of(nodes=["10.0.0.1:8080"])
    with pytest.raises(ConfigError, match="last node"):
        one.without(one.nodes[0])


def test_haproxy_is_told_everything_that_the_file_says() -> None:
    """Each node with its agent and its share of requests; TLS, keys and peers only if they are wanted."""
    files = Files(folder=FOLDER)
    plain = configuration(of(), files)
    assert "server 2 10.0.0.2:8080 id 2 check inter 500ms" in plain
    assert "agent-port 9000 slowstart 10s" in plain
    assert f"maxconn {IN_FLIGHT * 16}" in plain
    assert f"mul({moves_at(3)})" in plain
    assert [moves_at(n) for n in (1, 16, 17, 512)] == [3, 3, 2, 2]
    assert "X-UMA-Head first-token" in plain
    assert not any(word in plain for word in ("ssl crt", "map_str_int", "edge2"))
    full = configuration(
        of(
            certificate="edge.pem",
            keys="keys",
            peers={"edge2": "10.0.0.9:10020"},
            listen="0.0.0.0:443",
        ),
        files,
    )
    assert "bind 0.0.0.0:443 ssl crt /srv/edge.pem alpn h2,http/1.1" in full
    assert "map_str_int(/srv/keys.map,0)" in full
    assert "server edge2 10.0.0.9:10020" in full
    assert key_map((b"sk-1", b"sk-2")) == b"sk-1 1\nsk-2 1\n"


@pytest.mark.skipif(
    PROGRAM is None, reason="HAProxy is not installed; on Debian: apt install haproxy"
)
def test_haproxy_takes_the_file(tmp_path: Path) -> None:
    """With one node and with hundreds; its own words are passed on where it refuses."""
    files = Files(folder=tmp_path / "c.d")
    for n in (1, 200):
        nodes = [f"10.0.{i // 200}.{i % 200 + 1}:8080" for i in range(n)]
        write(of(nodes=nodes), files, ())
        check(files)
    assert files.folder.stat().st_mode & 0o077 == 0
    files.configuration.write_text("frontend x\n  nonsense\n")
    with pytest.raises(CannotRun, match="nonsense"):
        check(files)


def test_what_haproxy_tells_is_read() -> None:
    """Rows of servers alone, by the columns' names; pins by server."""
    text = (
        "# pxname,svname,qcur,scur,stot,status,weight,sid,last_agt,uweight\n"
        "edge,FRONTEND,,3,9,OPEN,,0,,\n"
        "nodes,1,2,3,9,UP,7,1,via agent : up,50\n"
        "nodes,BACKEND,0,3,9,UP,57,0,,\n"
    )
    (state,) = states_of(
        text, pins_of("0x1: server_id=1 exp=1\n0x2: server_id=1\n0x3: server_id=2\n")
    )
    assert (state.id, state.status, state.weight, state.active) == (1, "UP", 50, 3)
    assert (state.waiting, state.served, state.pins) == (2, 9, 2)


class Edge:
    """A double of HAProxy's socket: its servers, with their states, and what it refuses."""

    def __init__(self, path: Path, servers: dict[str, str]) -> None:
        self.servers, self.refused = servers, ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.sendall(self._answer(connection.recv(65_536).decode()).encode())

    def _answer(self, command: str) -> str:
        if self.refused and command.startswith(self.refused):
            return "Not now.\n"
        match command.split():
            case ["show", "stat", *_]:
                rows = [f"nodes,{name},{name},UP,1,0,0,0" for name in self.servers]
                return "\n".join(["# pxname,svname,sid,status,weight,scur,qcur,stot", *rows])
            case ["add", "server", name, *_]:
                if name.removeprefix("nodes/") in self.servers:
                    return "Already exists a server with the same name.\n"
                self.servers[name.removeprefix("nodes/")] = "maint"
                return "New server registered.\n"
            case ["enable", "server", name]:
                self.servers[name.removeprefix("nodes/")] = "ready"
            case ["set", "server", name, "state", state]:
                self.servers[name.removeprefix("nodes/")] = state
            case ["del", "server", name]:
                del self.servers[name.removeprefix("nodes/")]
                return "Server deleted.\n"
        return "\n"

    def stop(self) -> None:
        """Answer nobody any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def edge_of(folder: Path) -> tuple[Path, Edge]:
    """Return a file of two nodes, the second of them drained, and the HAProxy that has them."""
    path = folder / "c.yaml"
    assert cluster("init", ("10.0.0.1:8080", "10.0.0.2:8080"), file=path) == 0
    edge = Edge(Files(folder=path.with_suffix(".d")).socket, {"1": "ready", "2": "ready"})
    assert cluster("drain", ("2",), file=path) == 0
    return path, edge


CHANGES: list[tuple[Any, ...]] = [
    ("add", "10.0.0.3:8080", "add server"),
    ("add", "10.0.0.3:8080", "enable health"),
    ("add", "10.0.0.3:8080", "enable server"),
    ("remove", "1", "set server nodes/1 state maint"),
    ("remove", "2", "set server nodes/2 state maint"),
    ("drain", "1", "set server nodes/1 state drain"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma-") as made:
        yield Path(made)


@pytest.mark.parametrize(("action", "name", "refused"), CHANGES)
def test_a_change_that_haproxy_refuses_changes_nothing(
    folder: Path, action: Any, name: str, refused: str
) -> None:
    """Neither the files nor HAProxy, so that it can be tried again."""
    path, edge = edge_of(folder)
    conf = Files(folder=path.with_suffix(".d")).configuration
    before = (path.read_bytes(), conf.read_bytes(), dict(edge.servers))
    edge.refused = refused
    assert cluster(action, (name,), file=path) == 2
    assert (path.read_bytes(), conf.read_bytes(), edge.servers) == before
    edge.refused = ""
    assert cluster(action, (name,), file=path) == 0
    assert (path.read_bytes(), edge.servers) != (before[0], before[2])
    edge.stop()


@pytest.mark.parametrize(("action", "name"), sorted({change[:2] for change in CHANGES}))
def test_a_change_without_haproxy_changes_nothing(folder: Path, action: Any, name: str) -> None:
    """It says how to start one."""
    path, edge = edge_of(folder)
    edge.stop()
    before = path.read_bytes()
    assert cluster(action, (name,), file=path) == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize(("action", "name"), sorted({change[:2] for change in CHANGES}))
def test_a_change_that_cannot_be_written_is_undone_in_haproxy(
    folder: Path, action: Any, name: str
) -> None:
    """A node that is in no file would be gone with the next reload."""
    path, edge = edge_of(folder)
    before, servers = path.read_bytes(), dict(edge.servers)
    path.with_suffix(".new").mkdir()  # where the file is written before it is replaced
    assert cluster(action, (name,), file=path) == 2
    assert (path.read_bytes(), edge.servers) == (before, servers)
    edge.stop()


def test_without_haproxy_a_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to do; nothing is changed that a later start would not use."""
    file = tmp_path / "cluster.yaml"
    assert cluster("init", ("127.0.0.1:9", "127.0.0.1:19"), file=file, slots=2) == 0
    assert read(file).nodes[1].slots == 2
    assert cluster("init", ("127.0.0.1:9",), file=file) == 2
    assert cluster("init", (), file=tmp_path / "other.yaml") == 2
    assert cluster("status", (), file=file) == 2
    assert cluster("down", (), file=file) == 2
    assert cluster("drain", ("1", "2"), file=file) == 2
    assert cluster("add", ("nonsense",), file=file) == 2
    said = capsys.readouterr().err
    for words in (
        "is there already",
        "Give the address",
        "uma-trio cluster up",
        "No HAProxy runs",
        "Give one",
    ):
        assert words in said
    with pytest.raises(NotRunning):
        Runtime(tmp_path / "none").worker()
