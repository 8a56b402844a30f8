"""A reader of one model while another one is loaded from a cold file, and then computes 2,000 tokens. Half a minute.

    python -m benches loading --no-peers

The second model is a copy of the first, whose pages are dropped from the page cache. The reader's stream is read and timed
by this process: the gaps between its tokens alone, while the other model is loaded (until `/models/load` answers), and while that
one computes a prompt of 2,000 tokens. Targets: p95 of at most a step (40 ms) and a little, worst gap of at most 150 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from benches import contest, servers
from benches.contest import Medians, Row, System
from benches.driver import Comparison, Here, Table, scene

STEP_MS, WORST_MS = 40.0, 150.0  # the step of a reader by default, and the target
_ALONE_S, _PROMPT_TOKENS, _TOKENS = 5.0, 2_000, 3_900
_OTHER = "other"


def _arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


@scene(_arguments)
def loading(given: argparse.Namespace, here: Here) -> Comparison:
    """Return what is measured: one daemon, with a case for each thing that the other model does."""
    if given.dry_run:
        raise SystemExit("there is no dry run: fake models are loaded in tests/test_loading.py")
    setup = servers.Setup(here.model, here.threads, n_ctx=4096, slots=4)
    columns = (("gap p50 ms", "p50_ms", 1), ("p95 ms", "p95_ms", 1), ("worst ms", "worst_ms", 1),
               ("took s", "took_s", 2))  # fmt: skip
    return Comparison(
        [System("uma-trio", "", lambda _seed: _measure(setup))],
        seconds=40,
        tables=[Table("What the reader of the first model saw", columns)],
        repetitions=3,
        verdicts=_verdicts,
    )


def _verdicts(medians: Medians) -> Iterable[str]:
    for figure, target in (("p95_ms", 1.05 * STEP_MS), ("worst_ms", WORST_MS)):
        found = [value for s in medians.systems if (value := medians(s, figure)) is not None]
        yield contest.verdict(f"worst {figure}", max(found, default=None), target, at_most=True)


def _measure(setup: servers.Setup) -> list[Row]:
    port = servers.free_port()
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        other = _cold_copy(setup.model, Path(folder) / f"{_OTHER}.gguf")
        flags = ("--http", str(port), "--model", str(other), "--load", "on-demand")
        with servers.ours(setup, *flags), _reader(port) as times:
            prompt = list(itertools.islice(itertools.cycle(range(300, 1_300)), _PROMPT_TOKENS))
            compute = {"model": _OTHER, "prompt": prompt, "max_tokens": 1}
            return [
                _case("alone", times, lambda: time.sleep(_ALONE_S)),
                _case("is loaded", times, lambda: _ask(port, "/models/load", {"model": _OTHER})),
                _case("computes 2,000", times, lambda: _ask(port, "/v1/completions", compute)),
            ]


def _cold_copy(model: Path, to: Path) -> Path:
    """Copy a model, and drop its pages from the page cache."""
    shutil.copyfile(model, to)
    with to.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return to


def _case(name: str, times: Sequence[float], act: Callable[[], object]) -> Row:
    """Return the gaps between the reader's tokens while something is done; one that began before counts."""
    began = time.monotonic()
    act()
    ended = time.monotonic()
    pairs = list(itertools.pairwise(times))
    gaps = [(b - a) * 1e3 for a, b in pairs if b >= began and a <= ended] or [float("nan")]
    cuts = quantiles(gaps, n=20) if len(gaps) > 1 else gaps * 19
    return {
        "case": name,
        "p50_ms": cuts[9],
        "p95_ms": cuts[18],
        "worst_ms": max(gaps),
        "took_s": ended - began,
    }


def _ask(port: int, path: str, body: Any) -> None:
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    ) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise servers.DidNotStart(
                f"{path} was answered with {answer.status}: {answer.read()!r}"
            )
        answer.read()


@contextlib.contextmanager
def _reader(port: int) -> Iterator[list[float]]:
    """Read a stream of the first model in a thread; the list gets the time of each token."""
    times: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"prompt": "Once upon a time", "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    over = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            while not over.is_set() and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while len(times) < 25:  # the first tokens come as fast as they are computed
            time.sleep(0.05)
        yield times
    finally:
        over.set()
        thread.join(5.0)
        connection.close()
