"""Starts and stops what is measured, one at a time, and waits until it answers.

Each measurement has a process of its own, alone on the machine: nothing that idles beside it takes
memory, polls, or shares the pages of the model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.clients import FramedWire, SseWire, Wire
from benches.host import ROOT
from uma_trio.config.hardware import limit_spinning

FAKE = Path("fake")  # in place of a model: the daemon computes nothing
START_S = 120.0
_STOP_S, _END_S = 20.0, 2.0
# `serve` prints it when all is open. A client can connect earlier: what is counted then is not yet complete.
_READY = b" is ready after "


class DidNotStart(Exception):
    """A server ended or stayed silent; the message has the end of its log."""


@dataclass(frozen=True)
class Setup:
    """What every system in a comparison is given alike."""

    model: Path
    threads: int
    n_ctx: int = 4096
    slots: int = 16


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    pid: int
    wire: Wire


@contextlib.contextmanager
def daemon(
    setup: Setup,
    launcher: Sequence[str] = ("-m", "uma_trio.cli.main"),
    extra: Sequence[str] = (),
) -> Iterator[Running]:
    """Run our daemon with `extra` flags; `launcher` is what Python is given before ``serve``.

    It knows nothing of this machine but what it measures while it starts: a daemon stores what its
    ticks taught, so with a cache that is shared one measurement would depend on those before it.
    """
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        path = Path(folder) / "s"
        command = [
            sys.executable, *launcher, "serve",
            "--model", str(setup.model), "--socket", str(path), "--n-ctx", str(setup.n_ctx),
            "--parallel", str(setup.slots), "--threads", str(setup.threads),
            "--max-prompt-bytes", str(1 << 20), *extra,
        ]  # fmt: skip
        wire, log, own = FramedWire(path), Path(folder) / "log", {"XDG_CACHE_HOME": folder}
        with _process(command, log, lambda: _READY in log.read_bytes(), own) as pid:
            yield Running(pid, wire)


@contextlib.contextmanager
def llama_server(programs: Path, setup: Setup, extra: Sequence[str] = ()) -> Iterator[Running]:
    """Run llama-server with its defaults and `extra`."""
    port = free_port()
    command = [
        str(programs / "llama-server"),
        "--model", str(setup.model), "--host", "127.0.0.1", "--port", str(port),
        "--ctx-size", str(setup.n_ctx), "--threads", str(setup.threads), *extra,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        healthy = lambda: _healthy(port)  # noqa: E731
        with _process(command, Path(folder) / "log", healthy) as pid:
            yield Running(pid, SseWire(port))


def metered(meter: Path, *options: str) -> tuple[str, ...]:
    """Return the launcher of a daemon that counts its computing in the file `meter`."""
    return ("-m", "benches.metered", str(meter), *options)


@contextlib.contextmanager
def fake_daemon(setup: Setup, extra: Sequence[str] = (), tick_ms: float = 1.0) -> Iterator[Running]:
    """Run our daemon without a model; a tick takes `tick_ms`."""
    with tempfile.TemporaryDirectory(prefix="meter-") as folder:
        launcher = metered(Path(folder) / "meter", "--tick-ms", str(tick_ms))
        with daemon(setup, launcher, extra) as running:
            yield running


def ours(setup: Setup, *extra: str) -> contextlib.AbstractContextManager[Running]:
    """Run our daemon with `extra` flags, on the model of the setup or on the fake."""
    return (fake_daemon if setup.model == FAKE else daemon)(setup, extra=extra)


def server_flags(variant: str, k: int) -> tuple[str, ...]:
    """Return llama-server's flags for one of the variants that are compared, at `k` clients."""
    return {
        "stock": (),  # as it comes: 4 slots in one unified KV cache
        "np": ("--parallel", str(k)),  # a slot for each client, the context cut in k parts
        "np-kvu": ("--parallel", str(k), "--kv-unified"),
    }[variant]


def peer_flags(text: str, slots: int) -> tuple[str, ...]:
    """Return llama-server's flags in `text`, after a slot for each client and one KV cache.

    If `text` says how many slots there are, nothing comes before it; ``default`` is no flag at all.
    """
    if text == "default":
        return ()
    flags = tuple(text.split())
    return flags if "-np" in flags else (*server_flags("np-kvu", slots), *flags)


def batch_flags(slots: int, size: int) -> tuple[str, ...]:
    """Return llama-server's flags for one KV cache and a batch of `size`, 0 for its own.

    It has no more slots than the batch has tokens, or it would not start.
    """
    if not size:
        return server_flags("np-kvu", slots)
    return (*server_flags("np-kvu", min(slots, size)), "-b", str(size))


def environment() -> dict[str, str]:
    """Return the environment of every program that is measured, ours and others' alike.

    The daemon limits how long OpenMP's threads spin, which beside other work makes a large
    difference: it would be no comparison of servers if only one of them did. What the user's own
    environment says to the daemon is not part of the comparison.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("UMA_")}
    limit_spinning(env)
    return env | {"PYTHONPATH": str(ROOT)}


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def _process(
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    own: Mapping[str, str] | None = None,
) -> Iterator[int]:
    env = environment() | dict(own or {})
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=ROOT
        )
    try:
        _wait_until(ready, process, command, log)
        yield process.pid
    except OSError as broken:
        # Its log says more than that nobody listens any more; it may still be about to end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            raise _ended(process, command, log) from broken
        raise
    finally:
        _stop(process)


def _wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], command: Sequence[str], log: Path
) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise _ended(process, command, log)
        time.sleep(0.05)


def _ended(process: subprocess.Popen[bytes], command: Sequence[str], log: Path) -> DidNotStart:
    fate = "is silent" if process.poll() is None else f"ended with {process.returncode}"
    tail = log.read_text(errors="replace")[-2000:]
    return DidNotStart(f"{' '.join(command)}\n{fate}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in sock.recv(64)
    except OSError:
        return False
