"""`uma-trio cluster`: several machines behind HAProxy, from a short file of nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from attrs import asdict, frozen

from uma_trio.cli.output import OK, REFUSED, USAGE, Trouble, complain, console, print_json
from uma_trio.cli.parser import Parameter
from uma_trio.sockets.address import parse_address
from uma_trio_cluster import nodes as nodes_file
from uma_trio_cluster import process
from uma_trio_cluster.haproxy import Files
from uma_trio_cluster.nodes import Cluster, cluster_of
from uma_trio_cluster.probing import probe_all
from uma_trio_cluster.runtime import NotDone, NotRunning, Runtime

Action = Literal["init", "check", "up", "status", "drain", "add", "remove", "down", "simulate"]
_START_S: Final = 10.0
_LOOK_S: Final = 0.1
_MOST_SIMULATED: Final = 10_000
_LISTEN: Final = "127.0.0.1:8300"


def _flag(text: str, metavar: str | None = None, *, many: bool = False) -> Parameter:
    return Parameter(help=text, metavar=metavar, many=many)


@frozen(kw_only=True)
class _Asked:
    """One command: what it is about, and the files that it works on."""

    names: tuple[str, ...]
    path: Path
    files: Files
    flags: Mapping[str, Any]

    def read(self) -> Cluster:
        return nodes_file.read(self.path)

    def runtime(self) -> Runtime:
        return Runtime(self.files.socket)

    def one(self, what: str) -> str:
        if len(self.names) != 1:
            raise Trouble(f"Give one {what}.")
        return self.names[0]


ActionArgument = Annotated[
    Action,
    Parameter(
        help="init HOST:PORT...: write the file of nodes and HAProxy's. check: have HAProxy check its file, and ask"
        " every node. up: start HAProxy, or have the running one load its file again. status: show every node. drain"
        " NODE, add HOST:PORT, remove NODE: at run time. down: end HAProxy after its streams. simulate N...: place"
        " the requests of a trace on N machines in virtual time."
    ),
]
Names = Annotated[
    tuple[str, ...], Parameter(help="Nodes: HOST:PORT, or the number of one.", metavar="NODE")
]
FileFlag = Annotated[
    Path | None, _flag("The file of nodes; default: ~/.config/uma-trio/cluster.yaml.", "FILE")
]
CertificateFlag = Annotated[
    Path | None, _flag("With init: a PEM file with certificate and key, for TLS.", "FILE")
]
KeysFlag = Annotated[
    Path | None,
    _flag("With init: the keys that clients give, the --http-key-file of every node.", "FILE"),
]
AgentFlag = Annotated[
    int | None,
    _flag("With init and add: the port of the node's --agent; default: its port and one.", "PORT"),
]
ListenFlag = Annotated[str, _flag("With init: where clients connect.", "HOST:PORT")]
SlotsFlag = Annotated[int | None, _flag("With init and add: the --parallel of the nodes (8).", "N")]

TraceFlag = Annotated[
    Path | None,
    _flag("With simulate: a trace in Mooncake's form; default: one that is made up.", "FILE"),
]
MovesFlag = Annotated[
    tuple[float, ...],
    _flag(
        "With simulate: also let pins move at so many times the headroom; 0: never.", "X", many=True
    ),
]
StaleFlag = Annotated[
    tuple[float, ...],
    _flag("With simulate: also with headroom that is so old.", "SECONDS", many=True),
]
LoadFlag = Annotated[
    float, _flag("With simulate: prompt tokens, by those that the machines can compute.", "X")
]
MachineFlag = Annotated[
    str | None,
    _flag(
        "With simulate: a machine of `uma-trio simulate`, whose rates are measured first.", "NAME"
    ),
]
DeathsFlag = Annotated[
    float, _flag("With simulate: a machine dies so often, and is back after 60 s.", "SECONDS")
]


def cluster(
    action: ActionArgument,
    names: Names = (),
    /,
    *,
    file: FileFlag = None,
    listen: ListenFlag = _LISTEN,
    certificate: CertificateFlag = None,
    keys: KeysFlag = None,
    slots: SlotsFlag = None,
    agent: AgentFlag = None,
    undo: Annotated[bool, _flag("With drain: send requests there again.")] = False,
    json: Annotated[bool, _flag("With status: as JSON.")] = False,
    trace: TraceFlag = None,
    moves: MovesFlag = (),
    stale: StaleFlag = (),
    load: LoadFlag = 1.0,
    machine: MachineFlag = None,
    deaths: DeathsFlag = 0.0,
) -> int:
    """Place requests on several machines by their headroom, with HAProxy.

    Turns of a conversation stay on the machine that has its prefix. Streams survive changes of the nodes.
    """
    if action == "simulate":
        more = {"trace": trace, "moves": moves, "stale": stale, "load": load}
        return _simulate(names, **more, machine=machine, death_every_s=deaths)
    path = (file or _default_file(os.environ)).expanduser().absolute()
    flags = {"listen": listen, "certificate": certificate, "keys": keys, "slots": slots}
    asked = _Asked(
        names=names,
        path=path,
        files=Files(folder=path.with_suffix(".d")),
        flags={**flags, "agent": agent, "undo": undo, "json": json},
    )
    try:
        _ACTIONS[action](asked)
    except (Trouble, NotRunning, NotDone, process.CannotRun) as trouble:
        complain(str(trouble))
        return REFUSED
    return OK


def _init(asked: _Asked) -> None:
    if asked.path.exists():
        raise Trouble(f"{asked.path} is there already; change it, and run `uma-trio cluster up`.")
    if not asked.names:
        raise Trouble("Give the address of each node's --http, such as 10.0.0.11:8080.")
    flags = asked.flags
    nodes = [
        {"address": name, **({"agent": flags["agent"]} if flags["agent"] else {})}
        for name in asked.names
    ]
    document = {"listen": flags["listen"], "slots": flags["slots"] or 8, "nodes": nodes}
    document |= {k: str(flags[k].absolute()) for k in ("certificate", "keys") if flags[k]}
    _save(asked, cluster_of(document, "init", Path.cwd()))
    console().print(f"{asked.path}: the nodes.")
    console().print(f"{asked.files.configuration}: HAProxy's file. Next: uma-trio cluster check")


def _check(asked: _Asked) -> None:
    found = asked.read()
    _write(asked, found)
    process.check(asked.files)
    console().print(f"{asked.files.configuration}: HAProxy takes it.")
    wrong = 0
    probes = probe_all(found.nodes, _key(found))
    for probe in probes:
        wrong += bool(probe.problem)
        said = probe.problem or f"{probe.agent}, {probe.model}"
        console().print(f"node {probe.node.id}, {probe.node.host_port}: {said}")
    models = sorted({probe.model for probe in probes if probe.model})
    if len(models) > 1:
        raise Trouble(f"The nodes serve different models: {', '.join(models)}.")
    if wrong:
        raise Trouble(f"{wrong} of {len(found.nodes)} nodes cannot take requests.")


def _up(asked: _Asked) -> None:
    found = asked.read()
    _write(asked, found)
    process.check(asked.files)
    ran = _load(asked, found)
    scheme = "http" if found.certificate is None else "https"
    what = "HAProxy has loaded its file again" if ran else "HAProxy serves"
    console().print(f"{what}: {scheme}://{found.listen.host}:{found.listen.port}/v1")


def _down(asked: _Asked) -> None:
    if not process.stop(asked.files):
        raise Trouble(f"No HAProxy runs with {asked.files.configuration}.")
    console().print("HAProxy takes no new requests, and ends with its last stream.")


def _status(asked: _Asked) -> None:
    found = asked.read()
    states = {state.id: state for state in asked.runtime().nodes()}
    probes = {probe.node.id: probe for probe in probe_all(found.nodes, _key(found))}
    if asked.flags["json"]:
        rows = [
            {**asdict(state), "address": probes[i].node.host_port, "cached": probes[i].cached}
            for i, state in states.items()
            if i in probes
        ]
        print_json({"nodes": rows})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in (
        "NODE",
        "ADDRESS",
        "STATE",
        "HEADROOM",
        "RUNS",
        "WAITS",
        "SERVED",
        "PINS",
        "CACHED",
        "",
    ):
        table.add_column(title, justify="left" if title in ("ADDRESS", "STATE", "") else "right")
    for node in found.nodes:
        state, probe = states.get(node.id), probes[node.id]
        if state is None:
            table.add_row(
                str(node.id), node.host_port, "not loaded", *[""] * 6, "uma-trio cluster up"
            )
            continue
        cached = "" if probe.cached is None else f"{probe.cached:.0%}"
        figures = (state.active, state.waiting, state.served, state.pins)
        table.add_row(
            *(str(node.id), node.host_port, state.status, f"{state.weight} %", *map(str, figures)),
            *(cached, probe.problem),
        )
    console().print(table)


def _drain(asked: _Asked) -> None:
    found, undo = asked.read(), asked.flags["undo"]
    node = found.find(asked.one("node to drain"))
    runtime = asked.runtime()
    with _changing(asked, found, lambda: runtime.take_up(node)):
        (runtime.ready if undo else runtime.drain)(node.id)
        _save(asked, found.drained(node, drained=not undo))
    said = "takes requests again" if undo else "gets no new conversation; those that it has go on"
    console().print(f"Node {node.id} {said}.")


def _add(asked: _Asked) -> None:
    text = asked.one("address of a node")
    try:
        address = parse_address(text)
    except ValueError as error:
        raise Trouble(f"{text} is not {error}.") from None
    found = asked.read()
    changed = found.with_node(address, asked.flags["agent"], asked.flags["slots"])
    node = changed.nodes[-1]
    runtime = asked.runtime()
    runtime.add(node)
    with _changing(asked, found, lambda: runtime.take_away(node)):
        _save(asked, changed)
    console().print(f"Node {node.id} takes requests when its checks pass.")


def _remove(asked: _Asked) -> None:
    found = asked.read()
    node = found.find(asked.one("node to remove"))
    left = found.without(node)
    runtime = asked.runtime()
    with _changing(asked, found, lambda: runtime.take_up(node)):
        runtime.close(node.id)
        try:
            runtime.delete(node.id)
        except NotDone:
            # It has streams, or HAProxy's file had it: then a process with the new file takes over, and the
            # one that runs ends with its last stream.
            _write(asked, left)
            _load(asked, left)
        _save(asked, left)
    console().print(f"Node {node.id} is removed.")


def _simulate(names: tuple[str, ...], **flags: Any) -> int:
    from uma_trio_cluster.simulation import report
    from uma_trio_cluster.simulation.requests import BadTrace

    if not all(name.isdigit() and 0 < int(name) <= _MOST_SIMULATED for name in names):
        complain(f"Give numbers of machines from 1 to {_MOST_SIMULATED}.")
        return USAGE
    try:
        console().print(report.fleet([int(name) for name in names], **flags))
    except ModuleNotFoundError:
        complain("--machine is not installed: pip install 'uma-trio[sim]'.")
        return REFUSED
    except (OSError, ValueError, BadTrace) as error:
        complain(f"Nothing is simulated: {error}.")
        return REFUSED
    return OK


_ACTIONS: Final[Mapping[Action, Callable[[_Asked], None]]] = {
    "init": _init,
    "check": _check,
    "up": _up,
    "down": _down,
    "status": _status,
    "drain": _drain,
    "add": _add,
    "remove": _remove,
}


def _load(asked: _Asked, found: Cluster) -> bool:
    """Start HAProxy or have it load its file again, and tell it which nodes are drained; whether it ran.

    Raises:
        Trouble: no new process answers within ten seconds.
    """
    runtime = asked.runtime()
    before = _worker(runtime)
    ran = process.start(asked.files)
    deadline = time.monotonic() + _START_S
    while _worker(runtime) in (before, ""):
        if time.monotonic() > deadline:
            raise Trouble(
                "No new process of HAProxy answers; its log says why. The old one goes on."
            )
        time.sleep(_LOOK_S)
    for node in found.nodes:
        if node.drained:
            runtime.drain(node.id)
    return ran


def _worker(runtime: Runtime) -> str:
    try:
        return runtime.worker()
    except NotRunning:
        return ""


@contextmanager
def _changing(asked: _Asked, found: Cluster, undo: Callable[[], None]) -> Iterator[None]:
    """Leave the files and HAProxy as they were if the change in the block fails, so that it can be tried again."""
    try:
        yield
    except BaseException:
        with suppress(Trouble):
            _write(asked, found)
        with suppress(NotRunning, NotDone):
            undo()
        raise


def _save(asked: _Asked, changed: Cluster) -> None:
    """Write the file of nodes, and HAProxy's for its next start."""
    _write(asked, changed)
    new = asked.path.with_suffix(".new")
    try:
        new.write_text(nodes_file.written(changed), encoding="utf-8")
        new.replace(asked.path)
    except OSError as error:
        raise Trouble(f"Cannot write {asked.path}: {error.strerror}.") from None


def _write(asked: _Asked, found: Cluster) -> None:
    try:
        process.write(found, asked.files, _keys(found))
    except OSError as error:
        raise Trouble(f"Cannot write {asked.files.folder}: {error.strerror}.") from None


def _keys(found: Cluster) -> tuple[bytes, ...]:
    from uma_trio.http.settings import KeyFileUnusable, read_keys

    if found.keys is None:
        return ()
    try:
        return read_keys(found.keys)
    except KeyFileUnusable as error:
        raise Trouble(str(error)) from None


def _key(found: Cluster) -> str | None:
    keys = _keys(found)
    return keys[0].decode("latin-1") if keys else None


def _default_file(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CONFIG_HOME") or "~/.config", "uma-trio", "cluster.yaml")
