"""How fast one build of llama.cpp is beside another: the packaged one and the one compiled here. Ten minutes.

    python -m benches builds                                          uma_trio_llama beside llama_cpp
    python -m benches builds --builds FOLDER llama_cpp --pairs 40     a folder of libraries

Each build is loaded by a process of its own with the same model. They take turns, so that both meet the same
other load of the machine, and the one that goes first changes with every pair. Shown are the medians, the median of
the pairs' ratios (over 1: the first build is faster), the ratios' quartiles, and the median ratio of processor time: with
--threads 1 the figure to read where other programs use the machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any, Final

from benches.driver import tool
from benches.model import bench_model
from benches.report import note, table

_SLOTS: Final = 8
_PROMPT: Final = 256
_STEPS: Final = 16
Turn = tuple[float, float]
"""Seconds of the clock, and of processor time."""

_CHILD: Final = "from benches.scenes.builds import take_turns; take_turns()"
#: What is timed: its name, tokens of a decode, slots that they are of, decodes.
_WORK: Final = {
    "prompt": (_PROMPT, 1, 1),
    "1 stream": (1, 1, _STEPS),
    "8 streams": (_SLOTS, _SLOTS, _STEPS),
}


def take_turns() -> None:
    """Load the model that the arguments name, then time each work that standard input names."""
    from uma_trio.machine import limit_spinning

    limit_spinning()  # or the one that waits would slow the one that computes
    from uma_trio.backend.llama import LlamaBackend

    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    sizes = {"n_ctx": 4096, "n_slots": _SLOTS, "threads": threads}
    backend = LlamaBackend.load(path, **sizes, flash_attention="on")
    print(backend.description, flush=True)
    for line in sys.stdin:
        print(*_seconds(backend, *_WORK[line.strip()]), flush=True)


def _seconds(backend: Any, n_tokens: int, n_slots: int, steps: int) -> Turn:
    """Return how long `steps` decodes of `n_tokens` take, of so many slots that are empty before."""
    batch, each = backend.batch, n_tokens // n_slots
    rows = slice(0, n_tokens)
    batch.token[rows] = range(100, 100 + n_tokens)
    batch.slot[rows] = [row // each for row in range(n_tokens)]
    batch.want[rows] = [row % each == each - 1 for row in range(n_tokens)]
    began, used = time.perf_counter(), time.process_time()
    for step in range(steps):
        batch.pos[rows] = [step * each + row % each for row in range(n_tokens)]
        backend.decode(n_tokens)
        backend.logits(n_slots)
    took = time.perf_counter() - began, time.process_time() - used
    for slot in range(n_slots):
        backend.kv_remove(slot)
    return took


class _Child:
    """One build, in a process of its own."""

    def __init__(self, build: str, model: Path, threads: int) -> None:
        env = {**os.environ, "UMA_LLAMA": build}
        command = [sys.executable, "-c", _CHILD, str(model), str(threads)]
        self._process = subprocess.Popen(
            command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.about = self._line()

    def _line(self) -> str:
        out: IO[str] = self._process.stdout  # type: ignore[assignment]
        line = out.readline().strip()
        if not line:
            raise SystemExit("a build could not be measured; its error is above")
        return line

    def time(self, work: str) -> Turn:
        """Have it do `work`; return what that took."""
        given: IO[str] = self._process.stdin  # type: ignore[assignment]
        given.write(f"{work}\n")
        given.flush()
        wall, cpu = self._line().split()
        return float(wall), float(cpu)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def ratios(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the median and the quartiles of how much faster the first of each pair is."""
    each = [second / first for first, second in pairs]
    low, _, high = quantiles(each, n=4)
    return median(each), low, high


def _pairs(
    first: Callable[[], Turn], second: Callable[[], Turn], n: int
) -> list[tuple[Turn, Turn]]:
    """Time both `n` times in turns, each going first in every other pair."""
    found = []
    for turn in range(n):
        if turn % 2:
            after = second()
            found.append((first(), after))
        else:
            found.append((first(), second()))
    return found


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--builds", nargs=2, default=["uma_trio_llama", "llama_cpp"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--work", nargs="+", choices=list(_WORK), default=list(_WORK))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path)


@tool(_arguments)
def builds(given: argparse.Namespace) -> int:
    """Time two builds of llama.cpp in turns, and print the table."""
    path = bench_model(given.model)
    children = [_Child(build, path, given.threads) for build in given.builds]
    rows: list[list[object]] = []
    for build, child in zip(given.builds, children, strict=True):
        note(f"{build}: {child.about}")
    for work in given.work:
        n_tokens, _, steps = _WORK[work]
        one, other = (partial(child.time, work) for child in children)
        _pairs(one, other, 1)  # the first of a shape is slower
        pairs = _pairs(one, other, given.pairs)
        wall, cpu = ([(a[n], b[n]) for a, b in pairs] for n in range(2))
        rates = [n_tokens * steps / median(column) for column in zip(*wall, strict=True)]
        rows.append([work, *rates, *ratios(wall), ratios(cpu)[0], len(pairs)])
    for child in children:
        child.close()
    first, second = given.builds
    head = ["work", f"{first} tok/s", f"{second} tok/s", "ratio", "quartile", "quartile"]
    head += ["of CPU time", "pairs"]
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print(table(head, rows))
    return 0
