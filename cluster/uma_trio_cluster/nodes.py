"""The nodes of a cluster, as a short YAML file describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import evolve, field, frozen

from uma_trio.config.errors import ConfigError
from uma_trio.sockets.address import Address, parse_address

#: HAProxy's file has two rules for each node, which every request goes through.
MOST_NODES: Final = 512
_MOST_BYTES: Final = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TOP = ("listen", "certificate", "keys", "slots", "edge", "sync", "peers", "nodes")
_NODE = ("id", "address", "agent", "slots", "drained")


@frozen(kw_only=True)
class Node:
    """One daemon: where it serves HTTP, and the port of its agent. `id` names it in HAProxy.

    A drained node gets no new conversation.
    """

    id: int
    address: Address
    agent: int
    slots: int
    drained: bool = False

    @property
    def host_port(self) -> str:
        """The address as HAProxy writes it."""
        host = self.address.host
        return f"[{host}]:{self.address.port}" if ":" in host else f"{host}:{self.address.port}"


@frozen(kw_only=True)
class Cluster:
    """All nodes and the edge in front of them.

    `certificate` is a PEM file with its key, for TLS; `keys` a file of keys that the edge asks for. `edge` is the
    name of this HAProxy among its `peers`, whose pins it shares over `sync`.
    """

    listen: Address
    nodes: tuple[Node, ...]
    certificate: Path | None = None
    keys: Path | None = None
    edge: str = "edge1"
    sync: Address = field(factory=lambda: Address("127.0.0.1", 10020))
    peers: Mapping[str, Address] = field(factory=dict)

    def with_node(self, address: Address, agent: int | None, slots: int | None) -> Cluster:
        """Return the cluster with one node more, whose id no other has.

        Raises:
            ConfigError: the node is there already, or there are too many.
        """
        if any(node.address == address for node in self.nodes):
            raise ConfigError(f"{address.host}:{address.port} is a node already")
        if len(self.nodes) >= MOST_NODES:
            raise ConfigError(f"a cluster has {MOST_NODES} nodes at most; use several")
        last = self.nodes[-1]
        node = Node(
            id=max(node.id for node in self.nodes) + 1,
            address=address,
            agent=agent or address.port + last.agent - last.address.port,
            slots=slots or last.slots,
        )
        return evolve(self, nodes=(*self.nodes, node))

    def without(self, node: Node) -> Cluster:
        """Return the cluster without a node. Raises ConfigError if it is the last one."""
        if len(self.nodes) == 1:
            raise ConfigError("the last node cannot be removed; stop the cluster instead")
        return evolve(self, nodes=tuple(one for one in self.nodes if one.id != node.id))

    def drained(self, node: Node, *, drained: bool) -> Cluster:
        """Return the cluster with a node that is drained, or is not any more."""
        changed = evolve(node, drained=drained)
        return evolve(
            self, nodes=tuple(changed if one.id == node.id else one for one in self.nodes)
        )

    def find(self, name: str) -> Node:
        """Return a node by its id or address. Raises ConfigError."""
        for node in self.nodes:
            if name in (str(node.id), node.host_port):
                return node
        known = ", ".join(f"{node.id} ({node.host_port})" for node in self.nodes)
        raise ConfigError(f"{name} is no node; there are {known}")


def read(path: Path) -> Cluster:
    """Read a file of nodes.

    Raises:
        ConfigError: it cannot be read, or a value is wrong; the message names the place.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read {path}: {why}; `uma-trio cluster init` makes one") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES} characters")
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return cluster_of(document, str(path), path.parent)


def cluster_of(document: object, source: str, folder: Path) -> Cluster:
    """Return what a document describes; relative paths are below `folder`. Raises ConfigError."""
    top = _mapping(document, _TOP, source)
    if top.get("listen") is None:
        raise ConfigError(f"{source}: listen: give the address for clients, such as 127.0.0.1:8300")
    nodes = _nodes(top.get("nodes"), _whole(top, "slots", source, 8), source)
    peers = _mapping(top.get("peers") or {}, None, f"{source}: peers")
    cluster = Cluster(
        listen=_address(top["listen"], f"{source}: listen"),
        nodes=nodes,
        certificate=_file(top, "certificate", source, folder),
        keys=_file(top, "keys", source, folder),
        edge=_name(top.get("edge", "edge1"), f"{source}: edge"),
        sync=_address(top.get("sync", "127.0.0.1:10020"), f"{source}: sync"),
        peers={
            _name(name, f"{source}: peers"): _address(value, f"{source}: peers.{name}")
            for name, value in peers.items()
        },
    )
    if not cluster.listen.is_loopback and cluster.keys is None:
        raise ConfigError(f"{source}: listen: others can reach that address, so it needs keys")
    return cluster


def written(cluster: Cluster) -> str:
    """Return the file that :func:`read` reads as `cluster`."""
    document: dict[str, Any] = {"listen": _text(cluster.listen)}
    if cluster.certificate is not None:
        document["certificate"] = str(cluster.certificate)
    if cluster.keys is not None:
        document["keys"] = str(cluster.keys)
    document |= {"edge": cluster.edge, "sync": _text(cluster.sync)}
    if cluster.peers:
        document["peers"] = {name: _text(address) for name, address in cluster.peers.items()}
    document["nodes"] = [
        {
            "id": node.id,
            "address": node.host_port,
            "agent": node.agent,
            "slots": node.slots,
            **({"drained": True} if node.drained else {}),
        }
        for node in cluster.nodes
    ]
    return yaml.safe_dump(document, sort_keys=False)


def _nodes(found: object, slots: int, source: str) -> tuple[Node, ...]:
    if not isinstance(found, list) or not 0 < len(found) <= MOST_NODES:
        raise ConfigError(f"{source}: nodes: give a list of 1 to {MOST_NODES} nodes")
    nodes: list[Node] = []
    for index, raw in enumerate(found):
        place = f"{source}: nodes[{index}]"
        item = _mapping(raw if isinstance(raw, dict) else {"address": raw}, _NODE, place)
        address = _address(item.get("address"), f"{place}.address")
        nodes.append(
            Node(
                id=_whole(item, "id", place, index + 1),
                address=address,
                agent=_whole(item, "agent", place, address.port + 1),
                slots=_whole(item, "slots", place, slots),
                drained=item.get("drained") is True,
            )
        )
    for what in ("id", "address"):
        if len({getattr(node, what) for node in nodes}) < len(nodes):
            raise ConfigError(f"{source}: nodes: two of them have the same {what}")
    return tuple(nodes)


def _mapping(found: object, names: Sequence[str] | None, place: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: give names and values, such as `listen: 127.0.0.1:8300`")
    unknown = [str(name) for name in found if names is not None and name not in names]
    if unknown and names is not None:
        raise ConfigError(f"{place}: {unknown[0]} is unknown; there are {', '.join(names)}")
    return found


def _address(found: object, place: str) -> Address:
    try:
        address = parse_address(str(found))
    except ValueError as error:
        raise ConfigError(f"{place}: {found!r} is not {error}") from None
    if address.path or re.search(r"[^\w.:-]", address.host):
        raise ConfigError(f"{place}: {found!r} is no HOST:PORT")
    return address


def _whole(found: Mapping[str, Any], name: str, place: str, default: int) -> int:
    value = found.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65_536:
        raise ConfigError(f"{place}.{name}: {value!r} is not a whole number from 1 to 65535")
    return value


def _name(found: object, place: str) -> str:
    if not _NAME.fullmatch(str(found)):
        raise ConfigError(f"{place}: {found!r} is no name of letters, digits, dots and dashes")
    return str(found)


def _file(found: Mapping[str, Any], name: str, source: str, folder: Path) -> Path | None:
    value = found.get(name)
    if value is None:
        return None
    path = (folder / Path(str(value)).expanduser()).absolute()
    if re.search(r"[^\w./@+-]", str(path)):
        raise ConfigError(f"{source}: {name}: a path of letters, digits and ./@+- only: {value!r}")
    return path


def _text(address: Address) -> str:
    return (
        f"[{address.host}]:{address.port}"
        if ":" in address.host
        else f"{address.host}:{address.port}"
    )
