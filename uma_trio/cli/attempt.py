"""A client's verb from its start to its exit status; a daemon that is starting is waited for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from uma_trio.cli.listening import accepts
from uma_trio.cli.output import REFUSED, UNREACHABLE, USAGE, Trouble, complain, leaves
from uma_trio.cli.streams import cannot_write

_LOOK_S = 0.1


def attempt(
    verb: Callable[..., Awaitable[int]],
    *arguments: Any,
    wait_at: Path | None = None,
    start: Callable[[], bool] | None = None,
) -> int:
    """Run a client's verb on trio; say in one sentence what failed, and return its status.

    A daemon that is starting at the socket `wait_at` is waited for. `start` is as in :func:`run_when_served`.
    """
    from uma_protocol import ProtocolError
    from uma_trio.cli.spoken import sentence
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
            if isinstance(cause, BrokenPipeError | KeyboardInterrupt) or cannot_write(cause):
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
    """Run a client's verb on trio and return what it returns.

    If a daemon is starting at `socket`, the verb is run again as soon as it serves: nothing was sent
    before. A daemon that ends instead is reported as one that is not there. Without a `socket`
    to wait for, the first failure is raised. Where there is no daemon `start` is called, once: it says
    whether it has started one.
    """
    import trio

    from uma_trio.client import ConnectionFailed

    while True:
        try:
            return trio.run(verb, *arguments)
        except BaseException as error:
            failures = (one for one in leaves(error) if isinstance(one, ConnectionFailed))
            failure = next(failures, None)
            holder = None if failure is None else failure.holder
            if failure is not None and holder is None and start is not None and start():
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
    """Return what starts a daemon at `path`, if `flag` or a person says so."""

    def start() -> bool:
        from uma_trio.cli.starting import start_if_wanted  # only who finds no daemon pays for it

        return start_if_wanted(path, flag)

    return start


def wait_for_daemon(path: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Return when somebody accepts connections at `path`, or nobody holds its name any more."""
    from uma_trio.sockets.holder import holder_of

    while not accepts(path) and holder_of(str(path)) is not None:
        pause(_LOOK_S)
