"""Run a client's verb: wait for a daemon or start one, and report what fails in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from uma_trio.cli.output import (
    REFUSED,
    UNREACHABLE,
    USAGE,
    Trouble,
    complain,
    is_write_error,
    leaves,
)
from uma_trio.sockets.address import FRAMED_TCP
from uma_trio.sockets.path import default_socket

if TYPE_CHECKING:
    from uma_trio.client import Client

_T = TypeVar("_T")
_LOOK_S: Final = 0.1
_PATIENCE_S: Final = 2.0
_MOST_LOG: Final = 4096


def attempt(
    verb: Callable[..., Awaitable[int]],
    *arguments: Any,
    wait_at: Path | None = None,
    start: Callable[[], bool] | None = None,
) -> int:
    """Run a client's verb on trio, report an error in one sentence, and return the exit status.

    `wait_at` and `start` are the `socket` and `start` of :func:`run_when_served`.
    """
    from uma_protocol import ProtocolError
    from uma_trio.client import ConnectionFailed, ServerError

    statuses: dict[type[BaseException], int] = {
        ServerError: REFUSED,
        Trouble: REFUSED,
        ConnectionFailed: UNREACHABLE,
        ProtocolError: USAGE,  # ours: what the daemon gets wrong is a ConnectionFailed
    }
    try:
        status: int = run_when_served(verb, *arguments, socket=wait_at, start=start)
        return status
    except BaseException as error:
        for cause in leaves(error):
            if isinstance(cause, BrokenPipeError | KeyboardInterrupt) or is_write_error(cause):
                raise cause from None
            for kind, status in statuses.items():
                if isinstance(cause, kind):
                    complain(sentence(cause))
                    return status
        raise


def run_when_served(
    verb: Callable[..., Awaitable[Any]],
    *arguments: Any,
    socket: Path | None,
    start: Callable[[], bool] | None = None,
) -> Any:
    """Run a client's verb on trio and return its result.

    If a daemon is starting at `socket`, the verb is run again as soon as it serves: nothing was sent before. Without
    a `socket` the first error is raised. If there is no daemon, `start` is called once and returns whether it has
    started one; not if the daemon ended during the verb, whose output would come twice.
    """
    import trio

    from uma_trio.client import ConnectionFailed
    from uma_trio.client.errors import ConnectionLost

    while True:
        try:
            return trio.run(verb, *arguments)
        except BaseException as error:
            failures = (one for one in leaves(error) if isinstance(one, ConnectionFailed))
            failure = next(failures, None)
            holder = None if failure is None else failure.holder
            is_absent = isinstance(failure, ConnectionFailed) and not isinstance(
                failure, ConnectionLost
            )
            if is_absent and holder is None and start is not None and start():
                start = None
                continue
            if socket is None or holder is None:
                raise
        complain(
            f"The daemon (pid {holder}) is starting or stopping; waiting until it serves or has ended. "
            "Ctrl-C or --no-wait: do not wait."
        )
        wait_for_daemon(socket)


def starter(path: Path, flag: bool | None) -> Callable[[], bool]:
    """Return :func:`start_if_wanted` for a socket and the value of `--start`."""
    return lambda: start_if_wanted(path, flag)


def start_if_wanted(path: Path, flag: bool | None) -> bool:
    """Start a daemon at `path` if `flag` or the user at the terminal agrees; whether one was started.

    It continues when this process has ended. Raises :class:`Trouble` with its last message if it ends at once.
    """
    from uma_trio.sockets.path import holder_of

    if flag is False or str(path).startswith(FRAMED_TCP):
        return False
    if accepts(path) or holder_of(str(path)) is not None:
        return False  # there is a daemon: something else failed
    if not flag and not _agreed(path):
        return False
    if _by_service(path):
        return True
    from uma_trio.cli.units import log_file

    log = log_file()
    with log.open("wb") as output:
        running = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "uma_trio", "serve", *_where(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    complain(
        f"Starting a daemon, process {running.pid}; it logs to {log}. `uma-trio stop` ends it."
    )
    wait_until_served(path, running.poll, log)
    return True


def wait_until_served(
    path: Path,
    poll: Callable[[], int | None],
    log: Path,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the daemon accepts connections; `poll` returns its exit status, None while it runs.

    Raises:
        Trouble: it has ended; the message is the last line of its log.
    """
    while not accepts(path):
        if poll() is not None:
            lines = log.read_bytes()[-_MOST_LOG:].decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "its log is empty"
            raise Trouble(f"The daemon has ended: {why}")
        pause(_LOOK_S)


def _agreed(path: Path) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"No daemon serves on {path}. Start one now? [Y/n] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    return answer.strip().lower() in ("", "y", "yes") and answer != ""


def _by_service(path: Path) -> bool:
    """Start the installed service, if it serves there; whether it was started."""
    from uma_trio.cli.units import SERVICE_UNIT, SOCKET_UNIT, units_folder

    program = shutil.which("systemctl")
    if program is None or str(path) != default_socket():
        return False
    if not (units_folder(os.environ) / SERVICE_UNIT).exists():
        return False
    words = [program, "--user", "start", SOCKET_UNIT, SERVICE_UNIT]
    return subprocess.run(words, check=False).returncode == 0  # noqa: S603 - fixed words


def _where(path: Path) -> tuple[str, ...]:
    return () if str(path) == default_socket() else ("--socket", str(path.absolute()))


def wait_for_daemon(path: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Return when a daemon accepts connections at `path`, or none holds its name any more."""
    from uma_trio.sockets.path import holder_of

    while not accepts(path) and holder_of(str(path)) is not None:
        pause(_LOOK_S)


def answer_of(path: Path, question: Callable[[Client], Awaitable[_T]]) -> _T | None:
    """Return what a daemon answers; None unless one answers within two seconds."""
    import trio

    from uma_protocol import ProtocolError
    from uma_trio.client import Client, ConnectionFailed, ServerError

    async def answer() -> _T | None:
        with trio.move_on_after(_PATIENCE_S):
            return await question(Client(path))
        return None

    try:
        return trio.run(answer)
    except BaseException as error:
        known = (ConnectionFailed, ServerError, ProtocolError, OSError)
        if all(isinstance(cause, known) for cause in leaves(error)):
            return None
        raise


def accepts(path: Path) -> bool:
    """Whether a daemon accepts connections at `path`."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full: it serves
        except OSError:
            return False
    return True


def sentence(error: BaseException) -> str:
    """Return what an error says, as one sentence; its code is behind it, in parentheses."""
    from uma_protocol import Generate, ProtocolError
    from uma_trio.client import ServerError

    if not isinstance(error, ServerError | ProtocolError):
        return _capital(str(error))
    # A field has a flag of the same name. One that is also a plain word counts only at the beginning.
    names = (*Generate.__struct_fields__, "seconds", "ticks")
    unmistakable = "|".join(name for name in names if "_" in name or name == "temperature")
    begins = re.compile(rf"({'|'.join(names)})(\[\d+\])?(?=(\.\w+)* (must|is|has|cannot)\b)")
    text = error.message
    if begin := begins.match(text):
        text = _flag(begin[1]) + text[begin.end() :]
    text = re.sub(rf"(?<![-\w])({unmistakable})\b", lambda found: _flag(found[1]), text)
    return f"{_capital(text).rstrip('.')}. ({error.code})"


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _capital(text: str) -> str:
    """Return `text` with a capital letter, unless it begins with a name: a path, a flag, a command."""
    first = text.split(" ", 1)[0]
    return text[:1].upper() + text[1:] if first.isalpha() else text
