"""Tries a model's files in a process of their own, before they are loaded: llama.cpp ends the process at some.

``python -m uma_trio.backend.llama_probe TASK FILE [ARGUMENT]`` writes its answer as JSON on stdout, behind a line end for each second in
which it was alive. The tasks are `head` (what the head of the file says), `needs` (the memory that the model takes; QUESTION),
`compute` (two tokens of the model; QUESTION) and `adapter` (two tokens with an adapter; ADAPTER).

A probe belongs to the thread that started it: it is killed and waited for before the call returns, whatever ends the call, and dies with
the daemon, even while it is stopped (its stdin, a pipe, is closed, its process group is orphaned, and on Linux PR_SET_PDEATHSIG). Answers are remembered for
the files as they were, refusals too.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import (
    GgufHeader,
    adopt_header,
    from_plain,
    known_header,
    mark_of,
    read_header,
    to_plain,
)
from uma_trio.backend.needs import Estimate, Needs, Question
from uma_trio.backend.polite import POLITE

SILENT_S: Final = 10.0
"""A probe that shows no life for so long is killed."""
LONGEST_S: Final = 60.0
"""A probe takes so long at most; one that reads the weights takes a second more for each `BYTES_PER_S` of the file."""
BYTES_PER_S: Final = 64 << 20
REFUSED_S: Final = 600.0
"""A file that was refused is not tried again for so long, unless it changes: the reason may lie in the machine."""
_MOST_BYTES: Final = 32 << 20  # of an answer
_MOST_ERRORS: Final = 1 << 16  # bytes of stderr, of which the last are kept
_MOST_REMEMBERED: Final = 256
_POLL_S: Final = 0.05
_BEAT_S: Final = 1.0
_PDEATHSIG: Final = 1  # PR_SET_PDEATHSIG of prctl(2)
# What llama.cpp does at a file. Other signals come from outside, and say nothing about the file.
_ENDED_BY_FILE: Final = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
)


class Untried(Exception):
    """The answer is not known without a process, and none may be started."""


class _Terms(threading.local):
    poll: Callable[[], None] | None = None
    starts = True


_terms = _Terms()
_remembered: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()  # answers, and until when
_lock = threading.Lock()


@contextmanager
def probing(*, poll: Callable[[], None] | None = None, starts: bool = True) -> Iterator[None]:
    """Set how this thread probes within the block.

    What `poll`, called every 50 ms, raises ends a probe and comes out of the call. Without `starts` no process is started:
    :class:`Untried` is raised instead.
    """
    before = _terms.poll, _terms.starts
    _terms.poll, _terms.starts = poll, starts
    try:
        yield
    finally:
        _terms.poll, _terms.starts = before


def header(path: Path) -> GgufHeader:
    """Return the head of a model's file, read in a process of its own unless it is known. Raises :class:`ModelError`.

    A large vocabulary takes 100 ms to read, with the interpreter's lock held.
    """
    found = known_header(path)
    if found is None:
        mark_of(path)  # raises what has to be said of a file that is not there
        began_ns = time.time_ns()
        found = from_plain(_answer("head", path, None, (path,), LONGEST_S), path)
        adopt_header(found, began_ns)
    return found


def probe(path: Path) -> Needs:
    """Return what an encoder needs. Takes about a second. Raises ModelError if it cannot be loaded."""
    return Needs(**_asked("needs", path, None, LONGEST_S)["needs"])


def estimate(path: Path, question: Question | None) -> Estimate:
    """Return what a model that writes needs, or, without a question, an encoder. Raises as :func:`probe`."""
    if question is None:
        needs = probe(path)
        return Estimate(needs, (needs,))
    found = _asked("needs", path, question, LONGEST_S)
    curve = tuple(Needs(**each) for each in found["curve"])
    return Estimate(Needs(**found["needs"]), curve, found["trained"])


def try_computing(path: Path, question: Question | None) -> None:
    """Compute two tokens of a model, or, without a question, of an encoder. It reads the weights, mapped: they stay in the page cache.

    Raises:
        ModelError: llama.cpp cannot, or ends its process.
    """
    _asked("compute", path, question, _longest(path))


def probe_adapter(path: Path, adapter: Path) -> None:
    """Try an adapter with the model that it is for. Takes seconds, as the model is read.

    Raises:
        ModelError: it cannot be used.
    """
    files = (*header(path).parts, adapter)
    _answer("adapter", path, str(adapter), files, _longest(path), looked_at=adapter)


def _longest(path: Path) -> float:
    return LONGEST_S + header(path).size_bytes / BYTES_PER_S


def _asked(task: str, path: Path, question: Question | None, longest_s: float) -> Any:
    asked = json.dumps(None if question is None else asdict(question))
    return _answer(task, path, asked, header(path).parts, longest_s)


def _answer(
    task: str,
    path: Path,
    argument: str | None,
    files: Sequence[Path],
    longest_s: float,
    looked_at: Path | None = None,
) -> Any:
    """Return what a process of its own says of `files`, or said of them as they are now. Raises :class:`ModelError`."""
    marks = tuple(map(mark_of, files))
    key = (task, path, argument, marks)
    with _lock:
        answer, until = _remembered.get(key, (None, 0.0))
    if answer is None or time.monotonic() > until:
        if not _terms.starts:
            raise Untried
        words = [task, str(path), *([] if argument is None else [argument])]
        answer, keeps_s = _run(words, looked_at or path, longest_s)
        if tuple(map(mark_of, files)) != marks:
            keeps_s = 0.0  # it was replaced meanwhile
        if task == "head" and "problem" not in answer:
            return answer  # which is kept as a header
        with _lock:
            _remembered[key] = answer, time.monotonic() + keeps_s
            _remembered.move_to_end(key)
            while len(_remembered) > _MOST_REMEMBERED:
                _remembered.popitem(last=False)
    if "problem" in answer:
        raise ModelError(str(answer["problem"]))
    return answer


def _run(words: Sequence[str], looked_at: Path, longest_s: float) -> tuple[dict[str, Any], float]:
    """Return what a probe answers, and for how long that is to be remembered. Raises what the thread's `poll` raises."""
    command = [sys.executable, "-P", "-m", "uma_trio.backend.llama_probe", *words]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # no debugger is started on an assertion
    pipe = subprocess.PIPE
    # A process group of its own is orphaned by the daemon's death, and the kernel hangs up on one that is stopped (setpgid(2)).
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, process_group=0
    )
    try:
        out, errors, problem = _heard(process, longest_s)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if problem:
        return {"problem": f"llama.cpp {problem} with {looked_at}, and was ended."}, 0.0
    with suppress(ValueError, UnicodeDecodeError):
        answer: dict[str, Any] = json.loads(out)
        return answer, REFUSED_S if "problem" in answer else float("inf")
    ended = -process.returncode
    if ended not in _ENDED_BY_FILE:
        how = f"signal {ended}" if ended > 0 else "itself"
        return {
            "problem": f"the process that looked at {looked_at} was ended by {how}; try again."
        }, 0.0
    why = "the file is damaged or not supported; download it again."
    if (said := _assertion(errors)) is not None:
        why = f"{said}: {why}"
    problem = f"llama.cpp ended its process when it read {looked_at}: {why}"
    return {"problem": problem}, REFUSED_S


def _heard(process: subprocess.Popen[bytes], longest_s: float) -> tuple[bytes, bytes, str]:
    """Return all that a process writes until it ends, and what is wrong if it does not end."""
    out, errors = bytearray(), bytearray()
    began = heard = time.monotonic()
    if process.stdout is None or process.stderr is None:
        raise ValueError("a probe has pipes")
    streams = {process.stdout.fileno(): out, process.stderr.fileno(): errors}
    while streams:
        if _terms.poll is not None:
            _terms.poll()
        ready, _, _ = select.select([*streams], [], [], _POLL_S)
        now = time.monotonic()
        for fd in ready:
            data = os.read(fd, 1 << 16)
            streams[fd].extend(data)
            if not data:
                del streams[fd]
            heard = now
        del errors[:-_MOST_ERRORS]
        if len(out) > _MOST_BYTES:
            return b"", b"", f"said more than {_MOST_BYTES >> 20} MiB"
        if now - heard > SILENT_S:
            return b"", b"", f"stood still for {SILENT_S:g} s"
        if now - began > longest_s:
            return b"", b"", f"took more than {longest_s:.0f} s"
    with suppress(subprocess.TimeoutExpired):
        process.wait(_BEAT_S)  # it has closed its pipes
    return bytes(out), bytes(errors), ""


def _assertion(errors: bytes) -> str | None:
    """Return the assertion of ggml that failed, without the path of its source."""
    lines = errors.decode("utf-8", "replace").splitlines()
    found = next((line for line in lines if "GGML_ASSERT(" in line), None)
    if found is None:
        return None
    return "".join(c for c in found[found.index("GGML_ASSERT(") :] if c.isprintable())[:200]


# --- the process ---


def _live(parent: int) -> None:
    """Write a line end a second, so that the daemon sees life; end with the daemon."""
    while True:
        ready, _, _ = select.select([0], [], [], _BEAT_S)
        if ready or os.getppid() != parent:
            os._exit(1)  # nothing is ever written to stdin: it is closed
        os.write(1, b"\n")


def _own() -> None:
    """Tie this process to the daemon, behind all that computes for readers."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_live, args=(parent,), name="life", daemon=True).start()
    with suppress(OSError):
        os.nice(POLITE)


def _found(task: str, path: Path, argument: str) -> dict[str, Any]:
    """Return the answer to a task. Raises :class:`ModelError`."""
    if task == "head":
        return to_plain(read_header(path))
    from uma_trio.backend import _llama_load, llama_needs

    if task == "adapter":
        _llama_load.try_adapter(path, Path(argument))
        return {}
    asked = json.loads(argument)
    question = None
    if asked is not None:
        question = Question(**asked | {"others": tuple(asked["others"])})
    if task == "compute":
        llama_needs.compute_two_tokens(path, question)
        return {}
    if question is None:
        return {"needs": asdict(llama_needs.of_encoder(path))}
    return asdict(llama_needs.of_model(path, question))


def main(task: str, path: Path, argument: str = "") -> None:
    _own()
    try:
        answer = _found(task, path, argument)
    except ModelError as error:
        answer = {"problem": str(error)}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # no destructor of a damaged model may spoil the answer


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
