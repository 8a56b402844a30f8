"""Import rules, and what shipped code and tests must not do, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (
    ROOT / "uma_trio",
    ROOT / "protocol" / "uma_protocol",
    ROOT / "sim" / "uma_trio_sim",
    ROOT / "cluster" / "uma_trio_cluster",
)
TESTS = (ROOT / "tests", ROOT / "protocol" / "tests")

# What each part may import beyond the standard library and itself; longest prefix first counts.
# "uma_trio" alone is the version, which anybody may know.
ALLOWED = {
    "uma_protocol": {"msgspec"},
    "uma_trio": set(),
    "uma_trio.machine": set(),
    "uma_trio.spelling": set(),
    "uma_trio.saying": set(),
    "uma_trio.sizes": set(),
    "uma_trio.stories": {
        *("attrs", "msgspec", "trio", "uma_protocol", "uma_trio.saying", "uma_trio.wire"),
        *("uma_trio.engine.records", "uma_trio.service", "uma_trio.sockets.principal"),
    },
    "uma_trio.stories.sentences": {"uma_protocol", "uma_trio.saying"},
    "uma_trio.words": set(),
    "uma_trio.config": {
        *("attrs", "cattrs", "uma_trio.sizes", "uma_trio.spelling", "uma_trio.words"),
        *("uma_trio.backend.kv_types", "uma_trio.sockets.path", "uma_trio.sockets.address"),
        "uma_trio.sockets.token",
    },
    "uma_trio.config.settings": {
        *("yaml", "uma_trio.config", "uma_trio.spelling", "uma_trio.sockets.path"),
    },
    "uma_trio.models": set(),
    "uma_trio.library": {"attrs", "uma_trio.saying", "uma_trio.spelling"},
    "uma_trio.costing": {
        *("attrs", "numpy", "msgspec"),
        *("uma_trio.backend.base", "uma_trio.machine", "uma_trio.policy", "uma_trio.telemetry"),
        *("uma_trio.backend.attention", "uma_trio.backend.needs", "uma_trio.backend.polite"),
    },
    "uma_trio.policy": {"attrs", "numpy", "uma_trio.words", "uma_trio.spelling"},
    "uma_trio.policy.portable": {"attrs", "cattrs", "msgspec"},
    "uma_trio.telemetry": {"attrs", "prometheus_client", "structlog", "uma_trio.words"},
    "uma_trio.telemetry.scorekeeper": {"trio", "uma_trio.telemetry"},
    "uma_trio.text": {
        *("attrs", "numpy"),
        *("uma_trio.backend.base", "uma_trio.policy", "uma_trio.telemetry"),
    },
    "uma_trio.text.constrain": {
        *("attrs", "numpy", "llguidance", "uma_trio.backend.base", "uma_trio.text"),
    },
    "uma_trio.http.wire.pieces": {"attrs", "msgspec", "numpy", "uma_trio.text.slices"},
    "uma_trio.text.grammars": {"llguidance", "uma_trio.text.shape"},
    "uma_trio.text.shape_worker": {"llguidance", "msgspec", "uma_trio.confined", "uma_trio.text"},
    "uma_trio.text.confinement": {
        *("attrs", "msgspec", "numpy", "uma_trio.backend.base", "uma_trio.confined"),
        *("uma_trio.text", "uma_trio.telemetry.shapes"),
    },
    "uma_trio.text.prompt": {"attrs", "msgspec", "uma_trio.text"},
    "uma_trio.text.render_worker": {
        *("attrs", "jinja2", "msgspec", "uma_trio.confined", "uma_trio.text"),
    },
    "uma_trio.text.template": {
        *("attrs", "msgspec", "uma_trio.backend.base", "uma_trio.confined", "uma_trio.text"),
    },
    "uma_trio.confined": {"msgspec"},
    "uma_trio.backend": {
        *("attrs", "numpy", "uma_trio.telemetry", "uma_trio.sizes", "uma_trio.spelling"),
        "uma_trio.saying",
    },
    "uma_trio.backend.llama": {
        *("attrs", "numpy", "uma_trio.backend", "uma_trio.saying", "uma_trio.sizes"),
    },
    "uma_trio.engine": {
        "uma_trio.words",
        *("attrs", "numpy", "uma_trio.text", "uma_trio.telemetry"),
        *("uma_trio.policy", "uma_trio.backend.base", "uma_trio.backend.encoder"),
        "uma_trio.costing.refine",
        *("uma_trio.costing.neighbours", "uma_trio.costing.remeasure"),
    },
    "uma_trio.engine.outlet": {"trio", "uma_trio.engine"},
    "uma_trio.engine.inbox": {"trio", "uma_trio.engine"},
    "uma_trio.engine.task": {"trio", "uma_trio.engine", "uma_trio.telemetry"},
    "uma_trio.sockets": {"attrs", "trio"},
    "uma_trio.service": {
        "uma_trio.sockets.principal",
        "uma_trio.words",
        *(
            "attrs",
            "msgspec",
            "numpy",
            "trio",
            "uma_protocol.errors",
            "uma_trio.text",
            "uma_trio.backend.base",
            "uma_trio.backend.encoder",
        ),
        *("uma_trio.engine.messages", "uma_trio.engine.inbox", "uma_trio.engine.records"),
        *("uma_trio.engine.playout", "uma_trio.policy.state", "uma_trio.telemetry.outlook"),
        "uma_trio.telemetry.catalogue",
        "uma_trio.spelling",
    },
    "uma_trio.service.agent": {"trio", "uma_trio.service", "uma_trio.sockets.accepting"},
    "uma_trio.wire": {
        "uma_protocol",
        "uma_trio.engine.messages",
        "uma_trio.service",
        "uma_trio.sockets.principal",
        "uma_trio.engine.records",
        *("uma_trio.text.replies", "uma_trio.text.slices"),
    },
    "uma_trio.service.front": {"trio", "uma_trio.service", "uma_trio.sockets"},
    "uma_trio.net": {
        "numpy",
        "uma_trio.words",
        "uma_trio.text.replies",
        *("attrs", "trio", "msgspec", "uma_protocol", "uma_trio.service", "uma_trio.sockets"),
        *("uma_trio.engine.messages", "uma_trio.engine.records", "uma_trio.wire"),
        *("uma_trio.stories", "uma_trio.sizes"),
    },
    "uma_trio.http": {
        *("attrs", "h11", "msgspec", "numpy", "trio", "uma_trio.service", "uma_trio.sockets"),
        *("uma_protocol.errors", "uma_protocol.events", "uma_protocol.rules"),
        "uma_protocol.fields",
        *("uma_trio.engine.messages", "uma_trio.words", "uma_trio.telemetry.exposition"),
        "uma_trio.sizes",
        "uma_trio.engine.records",
        *("uma_trio.text.replies", "uma_trio.text.slices"),
        "uma_trio.text.schemas",
    },
    "uma_trio.http.wire.encodings": {"attrs", "backports", "compression"},
    "uma_trio.http.explain": {"msgspec", "uma_protocol", "uma_trio.http", "uma_trio.stories"},
    "uma_trio.http.generate": {
        *("attrs", "msgspec", "uma_protocol", "uma_trio.wire", "uma_trio.http"),
        *("uma_trio.engine.messages", "uma_trio.service.answers", "uma_trio.service.ask"),
    },
    "uma_trio_cluster": {"attrs", "yaml", "uma_trio.config.errors", "uma_trio.sockets.address"},
    "uma_trio_cluster.commands": {
        *("attrs", "cyclopts", "rich", "uma_trio.cli.output", "uma_trio.http.wire.settings"),
        *("uma_trio.sockets.address", "uma_trio_cluster"),
    },
    # Under any event loop; the two that know one are below. What imports trio is not for asyncio.
    "uma_trio.client": {
        *("uma_protocol", "uma_trio.sockets.address", "uma_trio.sockets.holder"),
        *("uma_trio.sockets.path", "uma_trio.sockets.peers", "uma_trio.sockets.platform"),
        *("uma_trio.sockets.sock_diag", "uma_trio.sockets.token"),
    },
    "uma_trio.client.on_trio": {"trio", "uma_trio.client", "uma_trio.sockets.transport"},
    "uma_trio_sim.commands": {
        *("attrs", "cyclopts", "rich", "uma_trio.cli", "uma_trio.policy", "uma_trio_sim"),
        "uma_trio.saying",
    },
    "uma_trio_cluster.simulation": {
        *("attrs", "uma_trio.policy.deadline", "uma_trio.service.headroom"),
        *("uma_trio_cluster.haproxy", "uma_trio_sim"),
    },
    "uma_trio_sim": {
        "uma_trio.words",
        *("attrs", "numpy", "uma_trio.costing.store", "uma_trio.engine", "uma_trio.policy"),
        *("uma_trio.backend.base", "uma_trio.backend.cell_map", "uma_trio.telemetry.metrics"),
    },
}
UNBOUND = (
    "uma_trio.__main__",
    "uma_trio.cli",
    "uma_trio.daemon",
    "uma_trio.deployment",
    "uma_trio.keeper",
    "uma_trio.replacing",
    "uma_trio.wiring",
    "uma_trio.wiring_encoders",
    "uma_trio.wiring_http",
    "uma_trio.wiring_shapes",
    "uma_trio.wiring_sockets",
)  # they put everything together

# What is behind `engine.cells`. Its side work and what administers it take the cache itself.
PREFIX_ROOMS = {
    *("cache", "compaction", "leaves", "pages", "room", "saving", "search", "store", "usage"),
}

THREADS = {
    "uma_trio.backend.gguf_header",  # heads are known to all threads
    "uma_trio.backend.llama_probe",  # so are the answers of probes; and a probe shows that it lives
    "uma_trio.backend._llama_parts",  # an encoder's step waits in a thread of its own between two parts
    "uma_trio.backend.polite",  # a thread has a niceness that it keeps
    "uma_trio.engine.inbox",  # the engine sleeps on its door
    "uma_trio.engine.prefix.disk",  # the engine has pages written and read, and waits for no disk
    "uma_trio.engine.sampling.masks",  # helper threads find them, and the first one is waited for
    "uma_trio.telemetry.log",  # one line at a time
    "uma_trio.telemetry.trace",  # a disk may be slow, the engine not
    "uma_trio.client.streaming",  # to know its own thread when it is dropped
    "uma_trio.text.template",  # helper threads share the processes that render
    "uma_trio.text.derivation",  # a template is tried by the first helper thread that asks
    "uma_trio.text.tokeniser",  # helper threads tokenise
    "uma_trio.text.constrain",  # helper threads share what is compiled
    "uma_trio.text.frontend",  # helper threads share one compiler, which the first of them makes
    "uma_trio.text.confinement",  # helper threads count what they had checked
    "uma_trio.confined.post",  # carries frames while the engine computes
    "uma_trio.confined.workers",  # the engine and helper threads start and end workers
}


def modules(*roots: Path) -> list[Path]:
    """Return every Python file under `roots`."""
    return sorted(path for root in roots for path in root.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name of a shipped module."""
    base = next(root.parent for root in SHIPPED if path.is_relative_to(root))
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed source of `path`."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def known() -> frozenset[str]:
    """Return the dotted names of all shipped modules."""
    return frozenset(name_of(path) for path in modules(*SHIPPED))


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything `path` imports, wherever in the file it does."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in known() else base


def within(name: str, prefix: str) -> bool:
    """Whether `name` is `prefix` or below it."""
    return name == prefix or name.startswith(f"{prefix}.")


def part_of(name: str) -> str | None:
    """Return the most specific part of the architecture that `name` belongs to."""
    if any(within(name, prefix) for prefix in UNBOUND):
        return None
    # The adapter is two kinds of files: what knows llama.cpp, and what does not.
    if within(name, "uma_trio.backend") and name.rpartition(".")[2].lstrip("_").startswith("llama"):
        return "uma_trio.backend.llama"
    return max((part for part in ALLOWED if within(name, part)), key=len)


def forbidden(name: str, imported: str) -> bool:
    """Whether the architecture keeps `name` from importing `imported`."""
    part = part_of(name)
    if part is None or imported.split(".")[0] in sys.stdlib_module_names:
        return False
    package = part if part.count(".") < 2 else part.rpartition(".")[0]
    if imported == "uma_trio" or (part != "uma_trio" and within(imported, package)):
        return imported == "uma_trio.backend.llama" and part != "uma_trio.backend.llama"
    return not any(within(imported, allowed) for allowed in ALLOWED[part])


@pytest.mark.parametrize("path", modules(*SHIPPED), ids=name_of)
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    """Each part knows only the parts below it, so that each can be read and tested alone."""
    name = name_of(path)
    wrong = sorted({found for found in imports(path) if forbidden(name, found)})
    assert not wrong, f"{name} may not import {', '.join(wrong)}"


def test_only_the_adapter_knows_llama_cpp() -> None:
    """Everything else can be run, tested and replaced without llama.cpp."""
    names = ("llama_cpp", "uma_trio_llama", "uma_trio.backend._llama_binding")
    importers = {
        name_of(path)
        for path in modules(*SHIPPED)
        if any(within(found, name) for found in imports(path) for name in names)
    }
    assert {part_of(name) for name in importers} == {"uma_trio.backend.llama"}


def test_the_import_graph_has_no_cycle() -> None:
    """There is an order in which the modules can be read, each after all that it uses."""
    graph = {name_of(path): set(imports(path)) & known() for path in modules(*SHIPPED)}
    remaining = {name: needs - {name} for name, needs in graph.items()}
    while ready := {name for name, needs in remaining.items() if not needs & remaining.keys()}:
        remaining = {name: needs for name, needs in remaining.items() if name not in ready}
    assert not remaining, f"a cycle among {', '.join(sorted(remaining))}"


def test_the_daemon_is_imported_by_the_command_line_alone() -> None:
    """The composition root composes; nothing that it composes knows it."""
    importers = {
        name_of(path) for path in modules(*SHIPPED) if "uma_trio.daemon" in set(imports(path))
    }
    assert all(within(name, "uma_trio.cli") for name in importers)


def test_the_daemon_carries_no_simulator() -> None:
    """Nor what places requests on several: both are distributions that a user need not have."""
    plugged = {"uma_trio_sim", "uma_trio_cluster"}
    importers = {
        name_of(path).partition(".")[0]
        for path in modules(*SHIPPED)
        if any(within(found, name) for found in imports(path) for name in plugged)
    }
    assert importers <= plugged


def test_the_asyncio_client_reaches_no_trio() -> None:
    """Nor does anything that it imports, so that a program without trio can use it."""
    files = {name_of(path): path for path in modules(*SHIPPED)}
    met, ahead = set(), {"uma_trio.client.aio"}
    while ahead:
        met |= ahead
        found = {name for module in ahead & files.keys() for name in imports(files[module])}
        # The package itself gives trio's names when they are asked for.
        ahead = found - met - {"uma_trio.client", "uma_trio.client.on_trio"}
    assert "uma_trio.client.on_asyncio" in met
    assert "trio" not in met


def test_the_prefix_cache_is_reached_by_its_face() -> None:
    """The engine sees prefixes as `Cells`, and nothing of what is behind it."""
    inner = {f"uma_trio.engine.prefix.{name}" for name in PREFIX_ROOMS}
    for path in modules(ROOT / "uma_trio" / "engine"):
        name = name_of(path)
        if name == "uma_trio.engine.cells" or within(name, "uma_trio.engine.prefix"):
            continue
        assert not inner & set(imports(path)), f"{name} reaches behind engine/cells.py"
        for node in ast.walk(tree(path)):
            reached = isinstance(node, ast.Attribute) and node.attr in PREFIX_ROOMS
            assert not reached, f"{name} reaches into the prefix cache in line {node.lineno}"


def test_nobody_outside_reaches_through_the_engine_into_its_prefix_cache() -> None:
    """What the daemon asks of saved prefixes is a question to `Cells`."""
    for path in modules(ROOT / "uma_trio"):
        if within(name_of(path), "uma_trio.engine"):
            continue
        for node in ast.walk(tree(path)):
            reached = isinstance(node, ast.Attribute) and node.attr in PREFIX_ROOMS
            through = getattr(node, "value", None) if reached else None
            deep = isinstance(through, ast.Attribute) and through.attr == "prefix"
            assert not deep, f"{name_of(path)} reaches into the prefix cache"


def test_threads_are_touched_in_few_places() -> None:
    """Two doors lead between the threads; a lock or a queue elsewhere would be a third."""
    users = {
        name_of(path)
        for path in modules(*SHIPPED)
        if {"threading", "queue", "multiprocessing"} & set(imports(path))
    }
    assert users <= THREADS


@pytest.mark.parametrize("path", modules(*SHIPPED), ids=name_of)
def test_shipped_code_has_no_assert(path: Path) -> None:
    """What a user can reach is answered with an error that says something."""
    found = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert not found, f"assert in line {found}"


@pytest.mark.parametrize(
    "path",
    [path for path in modules(*TESTS) if path.name.startswith("test_")],
    ids=lambda p: p.name,
)
def test_no_test_really_sleeps(path: Path) -> None:
    """Tests wait for what happens, or live in virtual time.

    Where another process has to be watched, one helper polls, up to a deadline: `eventually`.
    """
    polling = {
        inner
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name == "eventually"
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree(path))) - polling:
        if isinstance(node, ast.Attribute) and node.attr == "sleep":
            named = node.value.id if isinstance(node.value, ast.Name) else ""
            assert named != "time", f"time.sleep in line {node.lineno}"
