"""Verbs start without slow imports; what command lines mean, help and completion."""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from cli_kit import answer, double, environment
from cli_kit import run as command

from uma_trio.cli.explain import explain
from uma_trio.cli.launch import launch
from uma_trio.cli.metrics import metrics
from uma_trio.cli.models import models
from uma_trio.cli.parser import WrongArguments, run_verb
from uma_trio.cli.prefix import prefix
from uma_trio.cli.ps import priority, ps
from uma_trio.cli.run import Asking, run
from uma_trio.cli.service import service
from uma_trio.config.options import OPTIONS
from uma_trio_cluster.commands.cluster import cluster
from uma_trio_sim.commands.simulate import simulate

_SLOW = {
    "numpy",
    "cattrs",
    "huggingface_hub",
    "yaml",
    "jinja2",
    "structlog",
    "llama_cpp",
    "prometheus_client",
}
_PICTURES = {"rich", "prompt_toolkit"}

_RUN = "from uma_trio.cli.main import main; main()"
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
    assert not there & {*_SLOW, *_PICTURES, "trio", "uma_protocol", "msgspec"}


def _parsed(verb: Callable[..., Any], line: str) -> tuple[Any, ...]:
    """Return what a verb is called with for a command line."""
    calls: list[tuple[Any, ...]] = []

    @functools.wraps(verb)
    def called(*words: Any, **named: Any) -> int:
        calls.append((words, named))
        return 0

    run_verb("uma-trio", verb.__name__, called, line.split())
    (call,) = calls
    return call


@pytest.mark.parametrize(
    ("verb", "line", "words", "named"),
    [
        (ps, "", (), {}),
        (ps, "--json --no-wait", (), {"json": True, "wait": False}),
        (ps, "--socket=/x/y", (), {"socket": "/x/y"}),
        (metrics, "--watch 1e3", (), {"watch": 1000.0}),
        (explain, "--ticks 3 7", (7,), {"ticks": 3}),
        (priority, "7 background", (7, "background"), {}),
        (prefix, "pin mine --seconds 5", ("pin", "mine"), {"seconds": 5}),
        (models, "--model-dir /a --model-dir /b", (), {"model_dir": ("/a", "/b")}),
        (service, "install --show", ("install",), {"show": True}),
        (launch, "--http 80 aider --model x -v", ("aider", "--model", "x", "-v"), {"http": "80"}),
        (launch, "-- aider --help", ("aider", "--help"), {}),
        (simulate, "--policy a b --cap 1.2 2", (), {"policy": ("a", "b"), "cap": (1.2, 2.0)}),
        (cluster, "add h:1 h:2 --slots 4", ("add", ("h:1", "h:2")), {"slots": 4}),
    ],
)
def test_a_command_line_is_a_call_of_the_verb(
    verb: Callable[..., Any], line: str, words: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """With what was typed alone: the verb has the defaults."""
    assert _parsed(verb, line) == (words, named)


@pytest.mark.parametrize(
    ("line", "words", "given"),
    [
        ("some words of mine", ("some", "words", "of", "mine"), {}),
        (
            "a --temp 0.5 b --stop x --stop -y",
            ("a", "b"),
            {"temperature": 0.5, "stop": ("x", "-y")},
        ),
        ("--presence-penalty -1.5 hi", ("hi",), {"presence_penalty": -1.5}),
        ("--no-stream --max-tokens 7 -", ("-",), {"stream": False, "max_tokens": 7}),
        ("--speculation off -- --json", ("--json",), {"speculation": "off"}),
    ],
)
def test_flags_that_verbs_share_are_read_into_their_class(
    line: str, words: tuple[str, ...], given: dict[str, Any]
) -> None:
    """Wherever they are among the words."""
    found, named = _parsed(run, line)
    assert found == words
    assert named.get("asking", Asking()) == Asking(**given)


@pytest.mark.parametrize(
    ("verb", "line", "message"),
    [
        (ps, "--json=true", "--json"),
        (ps, "word", "Unexpected argument: word."),
        (explain, "7 8", "Unexpected argument: 8."),
        (explain, "it", "REQUEST: 'it' is not a valid integer"),
        (priority, "7 back", "LANE: 'back' is not one of 'interactive', 'background'"),
        (priority, "7", "LANE is missing: interactive, background."),
        (run, "--prompt --json", "--prompt needs a value, and --json is an option."),
        (run, "--prompt", "--prompt needs a value."),
        (run, "--tempreature 1", "Did you mean --temperature?"),
        (ps, "--watch", "`uma-trio top`"),
        (service, "", "ACTION is missing: install, uninstall"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_is_right(
    verb: Callable[..., Any], line: str, message: str
) -> None:
    """And with where the help is."""
    with pytest.raises(WrongArguments) as caught:
        _parsed(verb, line)
    assert message in str(caught.value)
    assert str(caught.value).endswith("--help.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
async def test_a_shell_completes_commands_and_options(shell: str, tmp_path: Path) -> None:
    """By asking the program, in each shell's own way."""
    status, script, _ = await command("uma-trio", "completion", shell)
    assert (status, "_UMA_TRIO_COMPLETE" in script) == (0, True)
    typed = {
        "COMP_WORDS": "uma-trio serve --n-c",
        "COMP_CWORD": "--n-c" if shell == "fish" else "2",
    }
    _, found, _ = await command("uma-trio", **typed, _UMA_TRIO_COMPLETE=f"{shell}_complete")
    assert "--n-ctx" in found
    assert "--parallel" not in found


async def test_a_completion_is_installed_once(tmp_path: Path) -> None:
    """Where the shell finds it, or loaded by its start-up file."""
    home = {"HOME": str(tmp_path), "ZDOTDIR": "", "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    for _ in range(2):
        for shell in ("bash", "zsh"):
            status, _, errors = await command("uma-trio", "completion", shell, "--install", **home)
            assert (status, errors) == (0, "")
    data = tmp_path / ".local" / "share"
    assert (data / "bash-completion" / "completions" / "uma-trio").is_file()
    assert (tmp_path / ".zshrc").read_text() == f'. "{data}/uma-trio/completion.zsh"\n'


async def test_help_groups_the_verbs_that_are_installed() -> None:
    """A verb of a distribution that is missing is not listed, and says how to install it."""
    _, text, _ = await command("uma-trio", "--help")
    assert "Serve:\n" in text
    assert "  simulate " in text
    hidden = "import sys; sys.modules['uma_trio_sim'] = None"
    done = await trio.run_process(
        [sys.executable, "-c", f"{hidden}; sys.argv = ['uma-trio', '--help']; {_RUN}"],
        capture_stdout=True,
        env=environment(),
    )
    assert b"  simulate " not in done.stdout
    done = await trio.run_process(
        [sys.executable, "-c", f"{hidden}; sys.argv = ['uma-trio', 'simulate', '--x']; {_RUN}"],
        check=False,
        capture_stderr=True,
        env=environment(),
    )
    assert b"pip install 'uma-trio[sim]'" in done.stderr


async def test_serve_shows_the_usual_options_and_all_on_request() -> None:
    """About twenty of them, and where the others are."""
    _, usual, _ = await command("umad", "--help")
    _, every, _ = await command("umad", "--help-all")
    assert 15 <= len(re.findall(r"^  --", usual, re.MULTILINE)) <= 25
    assert "--help-all" in usual
    assert len(re.findall(r"^  --", every, re.MULTILINE)) >= len(OPTIONS)


@pytest.mark.parametrize("topic", ["config", "metrics", "ps", ""])
async def test_references_are_printed_by_the_program(topic: str) -> None:
    """A wheel has no documents."""
    status, text, _ = await command("uma-trio", "help", *filter(None, [topic]))
    assert status == 0
    expected = {"config": "--n-ctx", "metrics": "tokens_generated_per_s"}
    assert expected.get(topic, "Usage") in text
