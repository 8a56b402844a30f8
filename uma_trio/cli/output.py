"""What every verb writes with: plain sentences to standard error, results to standard output."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from uma_trio.cli.flags import Parameter
from uma_trio.cli.streams import is_unicode
from uma_trio.sockets.path import SHARED_SOCKET, default_socket, socket_to_ask
from uma_trio.sockets.token import TOKEN_FILE_ENV

if TYPE_CHECKING:
    from rich.console import Console

SocketFlag = Annotated[
    str | None, Parameter(help="The daemon's socket. Environment: UMA_SOCK.", metavar="PATH")
]

WaitFlag = Annotated[
    bool,
    Parameter(
        name="--wait",
        negative="--no-wait",
        help="Wait for a daemon that is starting, such as one that loads its model, or fail at once.",
    ),
]

StartFlag = Annotated[
    bool | None,
    Parameter(
        name="--start",
        negative="--no-start",
        help="Start a daemon if none serves there, with the settings of this user's file; default: ask, on a "
        "terminal.",
    ),
]

OK = 0
USAGE = 1
REFUSED = 2  # the server said no; for the daemon, the model is unusable
UNREACHABLE = 3
INTERRUPTED = 130
ENGINE_DIED = 70  # EX_SOFTWARE
CANNOT_WRITE = 74  # EX_IOERR
SOCKET_TAKEN = 75  # EX_TEMPFAIL


class Trouble(Exception):
    """A verb could not do its work; the message is one sentence for the person in front."""


def complain(message: str) -> None:
    """Write one sentence about what went wrong, and what to do, to standard error."""
    try:
        sys.stderr.write(f"{message.rstrip()}\n")
        sys.stderr.flush()
    except OSError:
        return  # nobody reads it; the exit status still tells


def print_json(value: Any) -> None:
    """Write `value` as one line of JSON to standard output."""
    sys.stdout.write(json_line(value) + "\n")
    sys.stdout.flush()


def json_line(value: Any) -> str:
    """Return `value` as one line of JSON that standard output can hold."""
    return json.dumps(value, ensure_ascii=not is_unicode(), default=str)


def console(*, stderr: bool = False) -> Console:
    """Return a rich console that neither guesses at markup nor highlights numbers.

    What is not a terminal has no edge: nothing is cut or broken there.
    """
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else 10_000
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what really happened, out of the groups that nurseries wrap it in."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def socket_path(flag: str | None) -> Path:
    """Return the daemon's socket: the flag, UMA_SOCK, the YAML file, or where a daemon is found."""
    if _only_the_socket_is_set():
        given = flag if flag is not None else os.environ.get("UMA_SOCK")
        if given is None:
            return Path(socket_to_ask())
        if given.isprintable() and given.strip() == given != "":
            return Path(given).expanduser()
    # The rest of what may be written, and errors in it. Slow to import.
    from uma_trio.config import settings
    from uma_trio.config.place import CONFIG_ENV

    # The daemon's other variables are not read here. What is no variable at all may be a misspelt
    # UMA_SOCK, which must not go unnoticed.
    others = {*settings.known_env()} - {"UMA_SOCK", TOKEN_FILE_ENV, CONFIG_ENV}
    env = {name: text for name, text in os.environ.items() if name not in others}
    config = settings.load({"socket": flag}, env)
    if config.token_file is not None:
        os.environ[TOKEN_FILE_ENV] = str(config.token_file)  # where the client looks for it
    return config.socket if "socket" in config.sources else Path(socket_to_ask(env))


def _only_the_socket_is_set() -> bool:
    """Whether no variable of ours but UMA_SOCK is set, and there is no file of settings."""
    from uma_trio.config.place import ENV_PREFIX, users_file

    if any(name.startswith(ENV_PREFIX) and name != "UMA_SOCK" for name in os.environ):
        return False
    own = users_file(os.environ)
    return own is None or not own.is_file()


def how_to_ask(socket: Path) -> str:
    """Return a command that asks the daemon on `socket` for something, to be copied."""
    # What the bundled model can do; others can too.
    return command_at(socket, "run", '"Tell me a story about a fox and a lantern"')


def command_at(socket: Path, verb: str, words: str) -> str:
    """Return a command to the daemon on `socket`, to be copied."""
    where = (
        ""
        if str(socket) in (default_socket(), SHARED_SOCKET)
        else f" --socket {shlex.quote(str(socket))}"
    )
    return f"uma-trio {verb}{where} {words}"
