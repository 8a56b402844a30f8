"""`uma-trio stop`: end the daemon on a socket after its running requests, or unload one of its models."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated

from uma_trio.cli.output import OK, REFUSED, USAGE, SocketFlag, complain, say, socket_path
from uma_trio.cli.parser import Parameter
from uma_trio.sockets.address import FRAMED_TCP

_POLL_S = 0.05


def stop(
    model: Annotated[
        str | None, Parameter(help="Unload this model instead; the daemon continues.")
    ] = None,
    /,
    *,
    now: Annotated[bool, Parameter(help="Do not wait for the running requests: end them.")] = False,
    socket: SocketFlag = None,
) -> int:
    """Stop the daemon, or unload MODEL. The daemon's requests may finish first, for as long as --drain says."""
    path = socket_path(socket)
    if model is not None:
        if now:
            complain("--now ends the requests of a daemon that stops; omit it, or omit the model.")
            return USAGE
        from uma_trio.cli.attempt import attempt
        from uma_trio.cli.load import unload_at

        return attempt(unload_at, path, model)
    if str(path).startswith(FRAMED_TCP):
        complain(f"The process behind {path} is not known; end that daemon where it was started.")
        return REFUSED
    pid = daemon_of(path)
    if pid is None:
        say(f"No daemon serves on {path}.")
        return OK
    try:
        os.kill(pid, signal.SIGTERM)
        if now:
            # A second SIGTERM could be merged with the first (signal(7)).
            os.kill(pid, signal.SIGINT)
    except PermissionError:
        complain(f"The daemon on {path} is process {pid} of another user; ask them to stop it.")
        return REFUSED
    except ProcessLookupError:
        pass  # it has just ended by itself
    _wait_for_end(pid)
    say(f"Stopped process {pid}, which served on {path}.")
    return OK


def daemon_of(path: Path) -> int | None:
    """Return the process that serves on a socket, or is about to; None if there is none."""
    from uma_trio.sockets.path import holder_of
    from uma_trio.sockets.peers import peer_of

    if (pid := holder_of(str(path))) is not None:
        return pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
            peer = peer_of(probe).pid
        except OSError:
            return None
    # Behind a supervisor's socket there may be no daemon yet: the peer is then the socket's creator.
    return None if peer is None or _is_supervisor(peer) else peer


def _is_supervisor(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return pid == 1 or name.startswith("systemd")


def _wait_for_end(pid: int) -> None:
    """Return when a process has ended, which need not be a child of ours."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if _is_zombie(pid):
            return
        time.sleep(_POLL_S)


def _is_zombie(pid: int) -> bool:
    """Whether it has ended and its status was not collected yet (proc_pid_stat(5))."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "Z"
