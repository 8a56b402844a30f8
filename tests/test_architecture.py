"""Import rules, and what shipped code and tests must not do, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (
    ROOT / "uma_trio",
    ROOT / "protocol" / "uma_protocol",
    ROOT / "sim" / "uma_trio_sim",
    ROOT / "cluster" / "uma_trio_cluster",
)
TESTS = (ROOT / "tests", ROOT / "protocol" / "tests")

# Packages of the daemon, lowest first: one imports only packages of earlier rows.
LADDER = (
    {"uma_protocol", "uma_trio.words", "uma_trio.confined", "uma_trio.sockets"},
    {"uma_trio.library", "uma_trio.client", "uma_trio.backend"},
    {"uma_trio.config", "uma_trio.text"},
    {"uma_trio.policy"},
    {"uma_trio.observe", "uma_trio.machine"},
    {"uma_trio.engine"},
    {"uma_trio.models"},
    {"uma_trio.service"},
    {"uma_trio.http", "uma_trio.uds"},
    {"uma_trio.api"},
    {"uma_trio.app"},
    {"uma_trio.cli"},
    {"uma_trio.__main__"},
)
RANK = {package: rank for rank, packages in enumerate(LADDER) for package in packages}

# Distributions that a package may import beside the standard library.
THIRD_PARTY = {
    "uma_protocol": {"msgspec"},
    "uma_trio.api": {"attrs", "msgspec", "numpy", "trio"},
    "uma_trio.app": {"attrs", "trio"},
    "uma_trio.backend": {"attrs", "numpy"},
    "uma_trio.cli": {"attrs", "click", "msgspec", "prompt_toolkit", "rich", "trio"},
    "uma_trio.client": {"trio"},
    "uma_trio.config": {"attrs", "yaml"},
    "uma_trio.confined": {"msgspec"},
    "uma_trio.engine": {"attrs", "numpy", "trio"},
    "uma_trio.http": {"attrs", "backports", "compression", "h11", "msgspec", "numpy", "trio"},
    "uma_trio.library": {"attrs", "huggingface_hub", "tqdm"},
    "uma_trio.machine": {"attrs", "trio"},
    "uma_trio.models": {"attrs", "numpy", "trio"},
    "uma_trio.observe": {"attrs", "msgspec", "prometheus_client", "structlog", "trio"},
    "uma_trio.policy": {"attrs", "cattrs", "msgspec", "numpy"},
    "uma_trio.service": {"attrs", "msgspec", "numpy", "trio"},
    "uma_trio.sockets": {"attrs", "trio"},
    "uma_trio.text": {"attrs", "jinja2", "llguidance", "msgspec", "numpy"},
    "uma_trio.uds": {"attrs", "numpy", "trio"},
    "uma_trio_cluster": {"attrs", "rich", "uma_trio_sim", "yaml"},
    "uma_trio_sim": {"attrs", "numpy", "rich"},
}

# What is behind `engine.cells`. Its background work and what administers it take the cache itself.
PREFIX_ROOMS = {
    *("cache", "leaves", "pages", "room", "saving", "search", "store", "usage"),
}

THREADS = {
    "uma_trio.backend.gguf_header",  # heads are known to all threads
    "uma_trio.backend.llama_probe",  # so are the answers of probes; and a probe shows that it lives
    "uma_trio.backend._llama_parts",  # a call waits on a thread of its own between two parts
    "uma_trio.backend.polite",  # a thread has a niceness that it keeps
    "uma_trio.machine.bell",  # the compute thread sleeps until it rings
    "uma_trio.engine.kv.disk",  # the engine has pages written and read, and waits for no disk
    "uma_trio.engine.sampling.masks",  # helper threads find them, and the first one is waited for
    "uma_trio.observe.log",  # one line at a time
    "uma_trio.observe.trace",  # a disk may be slow, the engine not
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


def package_of(name: str) -> str:
    """Return the package of the daemon, or the distribution, that `name` belongs to."""
    return ".".join(name.split(".")[:2]) if within(name, "uma_trio") else name.split(".")[0]


def is_llama_adapter(name: str) -> bool:
    """Whether `name` is one of the modules of the backend that are written for llama.cpp."""
    last = name.rpartition(".")[2]
    return within(name, "uma_trio.backend") and last.lstrip("_").startswith("llama")


def forbidden(name: str, imported: str) -> bool:
    """Whether the ladder or the list of distributions keeps `name` from importing `imported`."""
    package, other = package_of(name), package_of(imported)
    if other.split(".")[0] not in ("uma_trio", "uma_protocol"):
        external = other not in sys.stdlib_module_names and other != package
        return external and not is_llama_adapter(name) and other not in THIRD_PARTY.get(package, ())
    if other == package or not {package, other} <= RANK.keys():
        return False
    return RANK[other] >= RANK[package]


def test_a_module_imports_only_packages_below_its_own() -> None:
    wrong = [
        f"{name_of(path)} may not import {found}"
        for path in modules(*SHIPPED)
        for found in sorted(set(imports(path)))
        if forbidden(name_of(path), found)
    ]
    assert not wrong


def test_every_package_has_a_place_on_the_ladder() -> None:
    packages = {package_of(name_of(path)) for path in modules(ROOT / "uma_trio")}
    assert packages - RANK.keys() <= {"uma_trio"}


def test_only_the_adapter_knows_llama_cpp() -> None:
    """Everything else can be run, tested and replaced without llama.cpp."""
    names = ("llama_cpp", "uma_trio_llama", "uma_trio.backend._llama_binding")
    importers = {
        name_of(path)
        for path in modules(*SHIPPED)
        if any(within(found, name) for found in imports(path) for name in names)
    }
    assert all(is_llama_adapter(name) for name in importers)


def test_the_import_graph_has_no_cycle() -> None:
    """There is an order in which the modules can be read, each after all that it uses."""
    graph = {name_of(path): set(imports(path)) & known() for path in modules(*SHIPPED)}
    remaining = {name: needs - {name} for name, needs in graph.items()}
    while ready := {name for name, needs in remaining.items() if not needs & remaining.keys()}:
        remaining = {name: needs for name, needs in remaining.items() if name not in ready}
    assert not remaining, f"a cycle among {', '.join(sorted(remaining))}"


def test_the_daemon_is_imported_by_the_command_line_alone() -> None:
    importers = {
        name_of(path) for path in modules(*SHIPPED) if "uma_trio.app.daemon" in set(imports(path))
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
    inner = {f"uma_trio.engine.kv.{name}" for name in PREFIX_ROOMS}
    for path in modules(ROOT / "uma_trio" / "engine"):
        name = name_of(path)
        if name == "uma_trio.engine.cells" or within(name, "uma_trio.engine.kv"):
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


def test_shipped_code_has_no_assert() -> None:
    """What a user can reach is answered with an error that says something."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules(*SHIPPED)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_no_test_really_sleeps() -> None:
    """Tests wait for what happens, or live in virtual time.

    Where another process has to be watched, one helper polls, up to a deadline: `eventually`.
    """
    found = []
    for path in modules(*TESTS):
        if not path.name.startswith("test_"):
            continue
        polling = {
            inner
            for node in ast.walk(tree(path))
            if isinstance(node, ast.FunctionDef) and node.name == "eventually"
            for inner in ast.walk(node)
        }
        for node in set(ast.walk(tree(path))) - polling:
            if isinstance(node, ast.Attribute) and node.attr == "sleep":
                named = node.value.id if isinstance(node.value, ast.Name) else ""
                found += [f"{path.name}:{node.lineno}"] * (named == "time")
    assert not found
