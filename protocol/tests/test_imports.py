"""What the library may know: msgspec, the standard library, and the rungs below."""

import ast
import pathlib
import subprocess
import sys

import msgspec
import pytest

import uma_protocol

PACKAGE = pathlib.Path(uma_protocol.__file__).parent
LADDER = [
    "errors",
    "requests",
    "stories",
    "infos",
    "events",
    "states",
    "inputs",
    "frames",
    "rules",
    "schema",
    "scan",
    "codec",
    "running",
    "connection",
    "testing",
]
# Parts of the standard library that a library without I/O has no business with.
NO_BUSINESS = {"asyncio", "io", "os", "pathlib", "select", "socket", "threading", "time", "random"}
MODULES = sorted(PACKAGE.glob("*.py"))


def _imports(path):
    """Names of what a module imports: absolute ones as they are, relative ones with a dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not node.level:
                yield module.partition(".")[0]
            elif module:
                yield "." + module
            else:
                yield from ("." + alias.name for alias in node.names)


def test_the_ladder_names_every_module():
    """A new module has to find its rung."""
    assert {path.stem for path in MODULES} == {*LADDER, "__init__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_only_from_below(path):
    """The graph has no cycle: each module knows only those before it on the ladder."""
    rung = LADDER.index(path.stem) if path.stem in LADDER else len(LADDER)
    inner = {name[1:] for name in _imports(path) if name.startswith(".")}
    assert inner <= set(LADDER[:rung])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_needs_only_msgspec_and_the_standard_library(path):
    """And of the standard library nothing that waits, reads or starts something."""
    outer = {name for name in _imports(path) if not name.startswith(".")}
    assert outer <= (sys.stdlib_module_names - NO_BUSINESS) | {"msgspec"}


PROGRAM = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {"msgspec", "uma_protocol"}:
            raise ModuleNotFoundError(name)

sys.path += sys.argv[1:]
sys.meta_path.insert(0, Hidden())
from uma_protocol import Generate, Role
from uma_protocol.testing import ConnectionPair

ConnectionPair().send(Role.CLIENT, Generate("a", prompt="p"))
print({"trio", "asyncio", "socket", "threading"} & set(sys.modules) or "clean")
"""


def test_it_works_where_nothing_else_is_installed():
    """In a process that sees no other distribution, a conversation needs no I/O module either."""
    paths = [str(PACKAGE.parent), str(pathlib.Path(msgspec.__file__).parent.parent)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, *paths], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("clean", "")
