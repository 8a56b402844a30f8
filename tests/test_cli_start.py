"""Client verbs start without slow imports, and plain command lines mean what cyclopts reads in them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import trio
from cli_kit import answer, double, environment
from cyclopts import App, CycloptsError

from uma_trio.cli.chat import chat
from uma_trio.cli.explain import explain
from uma_trio.cli.flags import plain
from uma_trio.cli.metrics import metrics
from uma_trio.cli.models import models
from uma_trio.cli.parser import declared
from uma_trio.cli.prefix import prefix
from uma_trio.cli.priority import priority
from uma_trio.cli.ps import ps
from uma_trio.cli.run import cli, run

_SLOW = {
    "cyclopts",
    "numpy",
    "cattrs",
    "yaml",
    "jinja2",
    "structlog",
    "llama_cpp",
    "prometheus_client",
}
_PICTURES = {"rich", "prompt_toolkit"}

_LISTS = """
import json, sys
sys.argv = ["uma-trio", *json.loads(sys.argv[1])]
from uma_trio.cli.main import main
try:
    main()
finally:
    sys.stderr.write("\\n" + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma-") as made:
        yield Path(made)


async def _imported(*arguments: str, **env: str) -> set[str]:
    """Return the packages that a command has imported when it ends, by their first name."""
    done = await trio.run_process(
        [sys.executable, "-c", _LISTS, json.dumps(arguments)],
        check=False,
        capture_stdout=True,
        capture_stderr=True,
        env=environment(**env),
    )
    return {*json.loads(done.stderr.decode().splitlines()[-1])}


@pytest.mark.parametrize(
    ("verb", "never"),
    [
        (["run", "hi", "--temp", "0.5", "--max-tokens", "4"], _SLOW | _PICTURES),
        (["run", "hi", "--json"], _SLOW | _PICTURES),
        (["ps", "--json"], _SLOW | _PICTURES),
        (["ps"], _SLOW),
        (["metrics", "--json"], _SLOW | _PICTURES),
    ],
)
async def test_a_clients_verb_imports_nothing_slow(
    folder: Path, verb: list[str], never: set[str]
) -> None:
    """It would take longer to start than to answer."""
    async with double(folder, answer("ok")) as daemon:
        there = await _imported(*verb, UMA_SOCK=str(daemon.path), HOME=str(folder))
    assert "uma_protocol" in there
    assert not there & never


@pytest.mark.parametrize(
    ("verb", "never"),
    [("doctor", set()), ("serve", set()), ("launch", {"cattrs"}), ("service", {"cattrs"})],
)
async def test_the_help_of_a_verb_waits_for_nothing_that_it_does_not_say(
    verb: str, never: set[str]
) -> None:
    """What a verb does with the model and the settings is imported when it does it."""
    there = await _imported(verb, "--help")
    assert not there & {"numpy", "trio", *never}


async def test_help_imports_no_daemon_and_no_client() -> None:
    """It needs the verbs' names alone."""
    there = await _imported("--help")
    assert "cyclopts" in there
    assert not there & {*(_SLOW - {"cyclopts"}), "trio", "uma_protocol", "msgspec"}


def _fresh(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function: to declare it to cyclopts changes it."""
    assert isinstance(verb, FunctionType)
    made = FunctionType(
        verb.__code__, verb.__globals__, verb.__name__, verb.__defaults__, verb.__closure__
    )
    made.__kwdefaults__ = verb.__kwdefaults__
    made.__annotations__ = dict(verb.__annotations__)
    return made


def _by_cyclopts(verb: Callable[..., Any], words: list[str]) -> tuple[Any, ...] | None:
    """Return the arguments that cyclopts reads, with defaults; None if it refuses them."""
    app = App()
    app.default(declared(_fresh(verb)))
    try:
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError:
        return None
    bound.apply_defaults()
    return bound.args, bound.kwargs


@pytest.mark.parametrize(
    ("verb", "line", "is_plain"),
    [
        (ps, "", True),
        (ps, "--json --no-wait", True),
        (ps, "--socket /x/y --json", True),
        (ps, "--socket=/x/y", True),
        (ps, "--socket=", False),
        (ps, "--json=true", False),
        (ps, "word", False),
        (metrics, "--watch 0.5", True),
        (metrics, "--watch 1e3", False),
        (metrics, "--watch -1", False),
        (explain, "7 --ticks 3", True),
        (explain, "--ticks 3 7", True),
        (explain, "7 8", False),
        (explain, "it", False),
        (priority, "7 background", True),
        (priority, "7 back", False),
        (priority, "7", False),
        (prefix, "pin mine --seconds 5", True),
        (prefix, "clear", True),
        (models, "--model-dir /a --model-dir /b", True),
        (chat, "--temp 0.3 --system terse --stats", True),
        (chat, "--stats --stats", False),
        (run, "some words of mine", True),
        (run, "words --temp 0.5 more --stop a --stop b", True),
        (run, "--raw hi", True),
        (run, "--no-stream --max-tokens 7 --priority background", True),
        (run, "--priority none hi", False),
        (run, "--schema some/file.json hi", True),
        (run, "-- --json", False),
        (run, "--max-tokens 1_000 hi", False),
        (run, "--max_tokens 3 hi", False),
        (run, "--prompt", False),
        (run, "--help", False),
        (cli, "--n 3 --json --tool-choice auto hi", True),
    ],
)
def test_a_plain_command_line_means_what_cyclopts_reads(
    verb: Callable[..., Any], line: str, is_plain: bool
) -> None:
    """Whatever is not plain is left to cyclopts, which knows more spellings and explains errors."""
    words = line.split()
    call = plain(verb, words)
    assert (call is not None) is is_plain
    if call is not None:
        app = App()
        app.default(declared(_fresh(verb)))
        bound = app.parse_args(words)[1].signature.bind(*call.words, **call.flags)
        bound.apply_defaults()
        assert (bound.args, bound.kwargs) == _by_cyclopts(verb, words)
