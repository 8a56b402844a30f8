"""Starting a daemon for a client that finds none: `--start`, or a question on a terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from uma_trio.cli.listening import accepts
from uma_trio.cli.output import Trouble, complain
from uma_trio.sockets.address import FRAMED_TCP
from uma_trio.sockets.path import default_socket

_LOOK_S = 0.1
_MOST_SAID = 4096


class Started(Protocol):
    """A process, as far as it is looked at."""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""


def start_if_wanted(path: Path, flag: bool | None) -> bool:
    """Start a daemon at `path` if `flag` or the person at the terminal says so; whether one serves now.

    It goes on when this process has ended. Returns False if somebody serves there already.

    Raises:
        Trouble: it could not be started; the message is what it said.
    """
    from uma_trio.sockets.holder import holder_of

    if flag is False or str(path).startswith(FRAMED_TCP):
        return False
    if accepts(path) or holder_of(str(path)) is not None:
        return False  # there is a daemon: that was not what failed
    if not flag and not _agreed(path):
        return False
    if _by_service(path):
        return True
    log = _log_file()
    with log.open("wb") as said:
        running = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "uma_trio", "serve", *_where(path)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd="/",
            start_new_session=True,
        )
    complain(
        f"Starting a daemon, process {running.pid}; it logs to {log}. `uma-trio stop` ends it."
    )
    wait_until_served(path, running, log)
    return True


def wait_until_served(
    path: Path, running: Started, log: Path, pause: Callable[[float], None] = time.sleep
) -> None:
    """Return when the daemon accepts connections. Raises :class:`Trouble` with its last line if it ends."""
    while not accepts(path):
        if running.poll() is not None:
            lines = log.read_bytes()[-_MOST_SAID:].decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "it said nothing"
            raise Trouble(f"The daemon has ended: {why}")
        pause(_LOOK_S)


def _agreed(path: Path) -> bool:
    """Ask the person, where there is one."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"No daemon serves on {path}. Start one now? [Y/n] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    return answer.strip().lower() in ("", "y", "yes") and answer != ""


def _by_service(path: Path) -> bool:
    """Start the installed service, if it serves there; whether its socket is there now."""
    from uma_trio.cli.service import units_folder
    from uma_trio.cli.units import SERVICE_UNIT, SOCKET_UNIT

    program = shutil.which("systemctl")
    if program is None or str(path) != default_socket():
        return False
    if not (units_folder(os.environ) / SERVICE_UNIT).exists():
        return False
    words = [program, "--user", "start", SOCKET_UNIT, SERVICE_UNIT]
    return subprocess.run(words, check=False).returncode == 0  # noqa: S603 - fixed words


def _where(path: Path) -> tuple[str, ...]:
    return () if str(path) == default_socket() else ("--socket", str(path.absolute()))


def _log_file() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "uma-trio")
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Trouble(
            f"There is no place for the daemon's log: {state}: {error.strerror}; start it with `uma-trio serve`."
        ) from None
    return state / "serve.log"
