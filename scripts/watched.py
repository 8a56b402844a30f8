"""Runs a long command with a clock in front of it, and its output in a file behind it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_STEP = re.compile(rb"\[(\d+)/(\d+)\]")
_TALKATIVE = sys.stderr.isatty() and not os.environ.get("CI")
_EVERY_S = 1.0 if _TALKATIVE else 20.0


class Failed(Exception):
    """A step failed; the message says which, with the end of what it printed."""


def watched(
    what: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> None:
    """Run `command`, showing `what` and the time that passes. Raises :class:`Failed`."""
    started = time.monotonic()
    with open(log, "w+b") if log else tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = _watch(process, what, started, output.fileno())
        except BaseException:
            process.kill()
            process.wait()
            raise
        _show(f"{what}: {_clock(started)}, {'done' if status == 0 else 'failed'}", last=True)
        if status:
            raise Failed(_explain(what, status, _tail(output.fileno(), 200_000), log))


def _watch(process: subprocess.Popen[bytes], what: str, started: float, output: int) -> int:
    while True:
        try:
            return process.wait(_EVERY_S)
        except subprocess.TimeoutExpired:
            steps = _STEP.findall(_tail(output, 20_000))
            done = f", step {int(steps[-1][0])} of {int(steps[-1][1])}" if steps else ""
            _show(f"{what}: {_clock(started)}{done}", last=False)


def _tail(descriptor: int, size: int) -> bytes:
    end = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, max(0, end - size))


def _show(text: str, *, last: bool) -> None:
    if _TALKATIVE:
        sys.stderr.write(f"\r\033[K{text}" + ("\n" if last else ""))
    else:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _clock(started: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    return f"{minutes}:{seconds:02}"


def _explain(what: str, status: int, output: bytes, log: Path | None) -> str:
    lines = output.decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)][:10]
    parts = [
        f"{what} failed with status {status}. Its last words:",
        *errors[-5:],
        "...",
        *lines[-20:],
    ]
    if log:
        parts.append(f"All of it is in {log}.")
    return "\n".join(parts)
