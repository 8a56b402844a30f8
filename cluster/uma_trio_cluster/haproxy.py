"""The file for HAProxy 2.6 and later: every directive was run with daemons behind it. Pure.

Requests of a conversation go to the machine that has its prefix: a stick table pins the first user message, which never
changes between turns. A pin gives way when its machine has little headroom. New conversations go to the machine with the
fewest connections for its weight, and the weight is its headroom, which its agent tells four times a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import frozen

from uma_trio_cluster.nodes import Cluster, Node

#: A pin gives way when the best machine has so many times the headroom, in clusters of up to so many machines.
#: Of many machines the best one is nearly idle at any time. Simulated: cluster/README.md.
_MOVES_AT: Final = ((16, 3),)
_MOVES_AT_MANY: Final = 2
#: A pin gives way to so many requests that wait at the edge for its machine.
MOVES_WAITING: Final = 2
#: Requests that a machine has at once, by its slots; others wait at the edge, for all machines.
IN_FLIGHT: Final = 3
#: A stream is silent for 15 s at most (`: keep-alive`), so that a machine that is silent for longer hangs.
STREAM_S: Final = 45


@frozen(kw_only=True)
class Files:
    """Where HAProxy's own files are. The folder is private to the user that runs it."""

    folder: Path

    @property
    def configuration(self) -> Path:
        """What this module writes."""
        return self.folder / "haproxy.cfg"

    @property
    def socket(self) -> Path:
        """Where a running HAProxy is asked and told."""
        return self.folder / "haproxy.sock"

    @property
    def keys(self) -> Path:
        """The keys that the edge knows, as a map."""
        return self.folder / "keys.map"

    @property
    def pid(self) -> Path:
        """The number of the master process."""
        return self.folder / "haproxy.pid"


def configuration(cluster: Cluster, files: Files) -> str:
    """Return the whole file."""
    parts = (_global(cluster, files), _peers(cluster), _DEFAULTS, _edge(cluster, files))
    return "\n".join((*parts, _nodes(cluster)))


def moves_at(n_nodes: int) -> int:
    """Return how many times the headroom of its machine another one has when a pin gives way."""
    return next((times for most, times in _MOVES_AT if n_nodes <= most), _MOVES_AT_MANY)


def key_map(keys: tuple[bytes, ...]) -> bytes:
    """Return the map of keys that the file names. A key has no blanks."""
    return b"".join(key + b" 1\n" for key in keys)


def server_words(node: Node) -> str:
    """Return how a server is checked, for the file and for `add server` at run time."""
    return (
        "check inter 500ms fastinter 200ms fall 2 rise 1 agent-check agent-inter 250ms "
        f"agent-port {node.agent} slowstart 10s observe layer4 error-limit 1 on-error mark-down "
        f"weight 100 maxconn {IN_FLIGHT * node.slots}"
    )


def _global(cluster: Cluster, files: Files) -> str:
    return f"""\
# Written by `uma-trio cluster init`: change the file of nodes instead.
global
  log stdout format raw local0 info
  localpeer {cluster.edge}
  # A body that does not fit is neither hashed nor sent again.
  tune.bufsize 262144
  hard-stop-after 15m
  stats socket {files.socket} mode 600 level admin expose-fd listeners
"""


def _peers(cluster: Cluster) -> str:
    others = "".join(
        f"  server {name} {address.host}:{address.port}\n"
        for name, address in cluster.peers.items()
    )
    return f"""\
# Keeps the pins over a reload, and shares them with other edges.
peers fleet
  bind {cluster.sync.host}:{cluster.sync.port}
  server {cluster.edge}
{others}"""


_DEFAULTS = """\
defaults api
  mode http
  log global
  option httplog
  option http-no-delay
  option abortonclose
  option redispatch 1
  retries 5
  retry-on conn-failure empty-response response-timeout 503
  timeout connect 1s
  timeout client 1h
  timeout server 1h
  timeout http-request 10s
  timeout queue 30s
  timeout check 1s
"""

_IDENTITY = """\
  option http-buffer-request
  # What never changes between the turns of a chat: its first user message, or the name of the conversation.
  http-request set-var(txn.role) req.body,json_query('$.messages[0].role')
  http-request set-var(txn.s) req.body,json_query('$.messages[0].content') if { var(txn.role) -m str user }
  http-request set-var(txn.s) req.body,json_query('$.messages[0].content[0].text') if { var(txn.role) -m str user } !{ var(txn.s) -m found }
  http-request set-var(txn.s) req.body,json_query('$.messages[1].content') if !{ var(txn.role) -m str user }
  http-request set-var(txn.s) req.body,json_query('$.messages[1].content[0].text') if !{ var(txn.role) -m str user } !{ var(txn.s) -m found }
  http-request set-var(txn.s) req.body,json_query('$.input') if !{ var(txn.s) -m found }
  http-request set-var(txn.s) req.body,json_query('$.input[0].content[0].text') if !{ var(txn.s) -m found }
  http-request set-var(txn.s) req.body,json_query('$.input[0].content') if !{ var(txn.s) -m found }
  http-request set-var(txn.s) req.body,json_query('$.prompt_cache_key') if { req.body,json_query('$.prompt_cache_key') -m found }
  http-request set-var(txn.s) req.hdr(x-session-id) if { req.hdr(x-session-id) -m found }
  http-request set-var(txn.who) src
  http-request set-var(txn.who) req.hdr(x-api-key) if { req.hdr(x-api-key) -m found }
  http-request set-var(txn.who) req.hdr(authorization) if { req.hdr(authorization) -m found }
  http-request set-var(txn.key) var(txn.who),concat(/,txn.s),sha1 if { var(txn.s) -m found }
  http-request set-var(txn.pin) var(txn.key),table_server_id(nodes) if { var(txn.key) -m found }
  http-request set-var(txn.wait) str(nodes/),concat(,txn.pin),srv_queue if { var(txn.pin) -m found }
"""

_ANSWERING = """\
  http-request set-header Host localhost
  # A machine that dies before the first token costs no request: it is sent to another one.
  http-request set-header X-UMA-Head first-token
  http-request set-var(txn.stream) bool(true) if { req.body,json_query('$.stream') -m str true }
  http-response set-header X-UMA-Node %s
  default_backend nodes
"""


def _edge(cluster: Cluster, files: Files) -> str:
    tls = "" if cluster.certificate is None else f" ssl crt {cluster.certificate} alpn h2,http/1.1"
    return (
        f"frontend edge from api\n  bind {_bound(cluster)}{tls}\n"
        + ("" if cluster.keys is None else _keys(files))
        + _IDENTITY
        + _moves(cluster)
        + _ANSWERING
    )


def _bound(cluster: Cluster) -> str:
    host, port = cluster.listen.host, cluster.listen.port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _keys(files: Files) -> str:
    refused = '{"error":{"message":"a key is needed","type":"authentication_error","code":"invalid_api_key","param":null}}'
    return f"""\
  http-request set-var(txn.secret) req.hdr(x-api-key)
  http-request set-var(txn.secret) req.hdr(authorization),word(2,' ') if {{ req.hdr(authorization) -m beg -i 'bearer ' }}
  http-request return status 401 content-type application/json string '{refused}' hdr WWW-Authenticate Bearer unless {{ path /health }} or {{ var(txn.secret),map_str_int({files.keys},0) -m int gt 0 }}
"""


def _moves(cluster: Cluster) -> str:
    """Return the rules that compare the headroom of a pin with the best one's."""
    lines: list[str] = []
    for node in cluster.nodes:
        name = f"nodes/{node.id}"
        up, weight = f"{{ srv_is_up({name}) }}", f"srv_uweight({name})"
        better = "" if not lines else f" {{ {weight},sub(txn.best) -m int gt 0 }}"
        lines.append(f"  http-request set-var(txn.best) {weight} if {up}{better}\n")
        if not better:
            lines.insert(0, "  http-request set-var(txn.best) int(0)\n")
        lines.append(
            f"  http-request set-var(txn.own) {weight} if {{ var(txn.pin) -m int {node.id} }}\n"
        )
    lines.append(
        "  http-request set-var(txn.moves) bool(true) if { var(txn.own) -m found }"
        f" {{ var(txn.own),mul({moves_at(len(cluster.nodes))}),sub(txn.best) -m int lt 0 }}\n"
        f"  http-request set-var(txn.moves) bool(true) if {{ var(txn.wait) -m int gt {MOVES_WAITING} }}\n"
    )
    return "".join(lines)


def _nodes(cluster: Cluster) -> str:
    servers = "".join(
        f"  server {node.id} {node.host_port} id {node.id} {server_words(node)}\n"
        for node in cluster.nodes
    )
    return f"""\
backend nodes from api
  balance leastconn
  option forwardfor
  http-request set-timeout server {STREAM_S}s if {{ var(txn.stream) -m bool }}
  stick-table type binary len 20 size 200k expire 60m peers fleet
  stick match var(txn.key) if {{ var(txn.key) -m found }} !{{ var(txn.moves) -m bool }}
  stick store-request var(txn.key) if {{ var(txn.key) -m found }}
  option httpchk
  http-check send meth GET uri /health?ready ver HTTP/1.1 hdr Host localhost
  http-check expect status 200
{servers}"""
