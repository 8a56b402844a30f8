"""What a node says of itself when it is asked directly, past HAProxy."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from attrs import frozen

from uma_trio_cluster.nodes import Node

_TIMEOUT_S: Final = 3.0
_AT_ONCE: Final = 16
_MOST_BYTES: Final = 1 << 20


@frozen(kw_only=True)
class NodeProbe:
    """The answers of a node. `problem` is a sentence about the first thing that is wrong, "" if nothing is.

    `cached` is the part of all prompt tokens since its start that were cached, None if it does not tell.
    """

    node: Node
    agent: str = ""
    problem: str = ""
    cached: float | None = None
    model: str = ""


def probe_all(nodes: Sequence[Node], key: str | None) -> list[NodeProbe]:
    """Ask all nodes, several at once. Each takes about ten seconds at most."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as pool:
        return list(pool.map(lambda node: probe(node, key), nodes))


def probe(node: Node, key: str | None) -> NodeProbe:
    """Ask one node for its health, its agent and its figures. Never raises for what the node does."""
    problem, agent, figures = "", "", {}
    try:
        status, _ = _get(node, "/health?ready", None)
        if status != 200:
            problem = f"/health?ready is answered with {status}: it is starting, stopping or hangs"
        status, body = _get(node, "/metrics?format=json", key)
        if status in (401, 403):
            problem = problem or "it refuses the key: give it the same --http-key-file as the edge"
        elif status == 200:
            figures = json.loads(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return NodeProbe(
            node=node, problem=f"it does not answer on {node.host_port}: {_why(error)}"
        )
    try:
        agent = _agent(node)
    except OSError as error:
        problem = problem or (
            f"no agent answers on port {node.agent} ({_why(error)}): start it with --agent "
            f"{node.address.host}:{node.agent}"
        )
    return NodeProbe(
        node=node,
        agent=agent,
        problem=problem,
        cached=_cached(figures),
        model=str(figures.get("model", "")),
    )


def _cached(figures: dict[str, Any]) -> float | None:
    there, computed = figures.get("prefix_tokens_total"), figures.get("prompt_tokens_total")
    if not isinstance(there, int) or not isinstance(computed, int) or not there + computed:
        return None
    return there / (there + computed)


def _get(node: Node, path: str, key: str | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(
        node.address.host, node.address.port, timeout=_TIMEOUT_S
    )
    headers = {"Host": "localhost", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        connection.close()


def _agent(node: Node) -> str:
    with socket.create_connection((node.address.host, node.agent), _TIMEOUT_S) as sock:
        return sock.recv(256).decode("utf-8", "replace").strip()


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
