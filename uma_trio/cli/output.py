"""Standard streams, exit statuses, and the options and messages that verbs share."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from uma_trio.cli.parser import Parameter
from uma_trio.cli.verbs import VERBS
from uma_trio.sockets.path import SHARED_SOCKET, default_socket, socket_to_connect
from uma_trio.sockets.token import TOKEN_FILE_ENV

if TYPE_CHECKING:
    from rich.console import Console

SocketFlag = Annotated[
    str | None, Parameter(help="The daemon's socket. Environment: UMA_SOCKET.", metavar="PATH")
]
WaitFlag = Annotated[
    bool,
    Parameter(
        negative="--no-wait",
        help="Wait for a daemon that is starting, such as one that loads its model, or fail at once.",
    ),
]
StartFlag = Annotated[
    bool | None,
    Parameter(
        negative="--no-start",
        help="Start a daemon if none serves there, with the settings of this user's file; default: ask, on a "
        "terminal.",
    ),
]
JsonFlag = Annotated[bool, Parameter(help="Print JSON.")]

OK = 0
USAGE = 1
REFUSED = 2  # the server refused; for the daemon, the model is unusable
UNREACHABLE = 3
INTERRUPTED = 130
ENGINE_DIED = 70  # EX_SOFTWARE
CANNOT_WRITE = 74  # EX_IOERR
SOCKET_TAKEN = 75  # EX_TEMPFAIL

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
#: A command in a message, which is printed as this program was called.
_COMMAND: Final = re.compile(rf"(?<![\w/.-])uma-trio (?=(?:{'|'.join(VERBS)})\b)")


class Trouble(Exception):
    """A verb could not do its work. The message is one sentence that says what to do."""


def complain(message: str) -> None:
    """Write a sentence about what went wrong, and what to do, to standard error."""
    try:
        sys.stderr.write(f"{as_called(message.rstrip())}\n")
        sys.stderr.flush()
    except OSError:
        return  # the exit status still tells


def say(message: str) -> None:
    """Write a sentence to standard output, with commands as this program was called."""
    console().print(as_called(message), soft_wrap=True)


def as_called(text: str) -> str:
    """Return `text` with the commands in it spelled as this program was called."""
    name = program()
    return text if name == "uma-trio" else _COMMAND.sub(lambda _: f"{name} ", text)


@functools.cache
def program() -> str:
    """Return what to type for `uma-trio`: its path if it is not on PATH."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "uma_trio":
        return f"{shlex.quote(sys.executable)} -m uma_trio"
    beside = called.with_name("uma-trio")
    if len(called.parts) < 2 or not beside.is_file():
        return "uma-trio"
    found = shutil.which("uma-trio")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "uma-trio"
    return shlex.quote(str(beside))


def print_json(value: Any) -> None:
    """Write `value` as one line of JSON to standard output."""
    sys.stdout.write(json_line(value) + "\n")
    sys.stdout.flush()


def json_line(value: Any) -> str:
    """Return `value` as one line of JSON that standard output can encode."""
    return json.dumps(value, ensure_ascii=not is_unicode(), default=str)


def console(*, stderr: bool = False) -> Console:
    """Return a rich console without markup and highlighting; output to a file is neither cut nor wrapped."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else 10_000
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in the groups that nurseries raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def socket_path(flag: str | None) -> Path:
    """Return the daemon's socket: the option, the environment, the YAML file, or where a daemon is found."""
    if _only_the_socket_is_set():
        given = (
            flag if flag is not None else os.environ.get("UMA_SOCKET", os.environ.get("UMA_SOCK"))
        )
        if given is None:
            return Path(socket_to_connect())
        if given.isprintable() and given.strip() == given != "":
            return Path(given).expanduser()
    # Everything else, and errors in it. Slow to import.
    from uma_trio.config import settings
    from uma_trio.config.settings import CONFIG_ENV

    # The daemon's other variables are not read. An unknown one may be a misspelt UMA_SOCKET and is refused.
    others = {*settings.known_env()} - {"UMA_SOCK", "UMA_SOCKET", TOKEN_FILE_ENV, CONFIG_ENV}
    env = {name: text for name, text in os.environ.items() if name not in others}
    config = settings.load({"socket": flag}, env)
    if config.token_file is not None:
        os.environ[TOKEN_FILE_ENV] = str(config.token_file)  # where the client looks for it
    return config.socket if "socket" in config.sources else Path(socket_to_connect(env))


def _only_the_socket_is_set() -> bool:
    """Whether no other variable of ours is set, and there is no settings file."""
    from uma_trio.config.place import ENV_PREFIX, users_file

    if any(
        name.startswith(ENV_PREFIX) and name not in ("UMA_SOCKET", "UMA_SOCK")
        for name in os.environ
    ):
        return False
    own = users_file(os.environ)
    return own is None or not own.is_file()


def how_to_ask(socket: Path) -> str:
    """Return a command that sends the daemon on `socket` a prompt that the bundled model can answer."""
    return command_at(socket, "run", '"Tell me a story about a fox and a lantern"')


def command_at(socket: Path, verb: str, words: str) -> str:
    """Return a command to the daemon on `socket`, to be copied."""
    is_usual = str(socket) in (default_socket(), SHARED_SOCKET)
    where = "" if is_usual else f" --socket {shlex.quote(str(socket))}"
    return f"{program()} {verb}{where} {words}"


def prepare_streams() -> None:
    """Make later writes to the standard streams succeed as far as the system allows.

    A closed stream (``>&-``) becomes the null device: Python has None there, and the next opened file
    would get its number. Characters that the encoding lacks are written as ``?``.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def is_unicode() -> bool:
    """Whether standard output can encode every character."""
    return (sys.stdout.encoding or "utf-8").lower().replace("_", "-").startswith("utf-")


def is_write_error(error: BaseException) -> bool:
    """Whether standard output cannot be written: errors about a file have a name, those of a stream do not."""
    return isinstance(error, OSError) and error.errno in _FULL and error.filename is None


def discard_output() -> None:
    """Drop what standard output has buffered, so that the interpreter does not write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
