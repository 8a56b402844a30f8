"""docs/reference/protocol.md: what is drawn in it is fresh, what it names exists, and its client works."""

import ast
import contextlib
import importlib.util
import io
import pathlib
import re
import socket
import threading

import pytest

from uma_protocol import Code
from uma_protocol.requests import BY_TYPE
from uma_protocol.schema import fields_of

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "protocol.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT)))
RULES = re.findall(r"^\d+\. .*?(?=^\d+\. |^\n(?=\S)|^#|\Z)", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture(name="script")
def _script():
    """The script that draws the document, as a module."""
    spec = importlib.util.spec_from_file_location("draw_states", ROOT / "docs" / "draw_states.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_diagrams_and_tables_are_fresh(script):
    """Drawing the document again changes nothing; if it does, run docs/draw_states.py."""
    assert script.render(TEXT) == TEXT


@pytest.mark.parametrize(
    ("arrow", "lie"),
    [("RECV_REQ --> PREFILL", "RECV_REQ --> DECODE"), ("| `E_PROTO_001` |", "| `E_PROTO_099` |")],
)
def test_a_stale_document_is_noticed(script, arrow, lie):
    """The check would fail if somebody edited a drawing by hand or changed a table."""
    assert arrow in TEXT
    assert script.render(TEXT.replace(arrow, lie)) == TEXT


def test_a_missing_block_is_noticed(script):
    """A drawing cannot be dropped from the document silently."""
    with pytest.raises(SystemExit, match="states-client"):
        script.render(TEXT.replace("begin states-client", "begin nothing"))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[f"{p}-{n}" for p, n in NAMED])
def test_every_test_that_is_named_exists(path, name):
    """A rule points at a test that holds it, not at one that used to."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in tree.body if isinstance(node, functions)}


@pytest.mark.parametrize("rule", RULES, ids=[f"rule-{n}" for n in range(len(RULES))])
def test_every_rule_names_a_test(rule):
    """What nothing holds is a wish."""
    assert re.search(r"`[\w/]+\.py::\w+`", rule), rule


def test_the_document_names_tests_for_its_rules():
    """The patterns that find rules and ids still find them."""
    assert len(RULES) > 25
    assert len(NAMED) > 40


def test_every_code_and_field_is_in_the_document():
    """Nothing that a client may meet is missing."""
    for code in Code:
        assert f"`{code}`" in TEXT
    for kind in BY_TYPE.values():
        assert all(f"| `{field.name}`" in TEXT for field in fields_of(kind))


def test_the_quick_start_client_works(monkeypatch, tmp_path):
    """The client in the document, word for word, talks to a server made with the library."""
    (client,) = re.findall(r"```python\n# quick start\n(.*?)```", TEXT, re.DOTALL)
    readme = (ROOT / "protocol" / "README.md").read_text(encoding="utf-8")
    (double,) = re.findall(r"```python\n# example: server\n(.*?)```", readme, re.DOTALL)
    namespace = {}
    exec(double, namespace)  # noqa: S102
    monkeypatch.chdir(tmp_path)  # paths of sockets must be short

    def answer(listener):
        with contextlib.closing(listener.accept()[0]) as accepted:
            namespace["serve"](accepted, ["Hello", "!"])

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("uma.sock")
        listener.listen()
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(client.replace("/tmp/uma.sock", "uma.sock"), {})  # noqa: S102, S108
        thread.join(5)
    assert re.findall(r'"event": "(\w+)"', printed.getvalue()) == ["token", "token", "eos"]
