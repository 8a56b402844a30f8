"""Hostile shapes: the longest step that a daemon takes for them, and its memory after a hundred. Four minutes.

    python -m benches shapes --no-daemon --shapes 1000     steps only
    python -m benches shapes --shapes 0                    memory only

*Steps*: shapes that can be read in many ways are drawn (`fuzz/ambiguous.py`), checked in a process as the daemon does
it, and answers of those that the daemon would follow itself are walked. A step, a look at a token and the
copy for a mask hold the interpreter's lock; their times are of the thread's CPU. Another thread
that only reads the clock says how long it was kept waiting; the time for a processor is left out.

*Memory*: a daemon gets a hundred requests one after the other, each with a shape that nobody sent before and that
takes all it can: repeats, multiples, ambiguous grammars, long words. Private memory of the daemon and all of its
processes is told, and the longest gap of a stream beside them. Known and new ordinary schemas are
timed before. The exit status is 1 if a step takes more than 20 ms or memory grows by more than 100 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from benches import beside, host, servers
from benches.driver import tool
from benches.model import bench_model
from fuzz.ambiguous import drawn
from fuzz.step_target import STEP_S, Took, walked
from uma_trio.backend.base import Vocabulary
from uma_trio.models import bundled_model
from uma_trio.text.confinement import Confinement
from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.shape import Shape, Unconstrainable
from uma_trio.text.shape_worker import dearest
from uma_trio_sim.latency import percentile

_MOST_MIB: Final = 100.0
_WALKS: Final = 3
_HOSTILE: Final = 100
_EVERY: Final = 20


class _Waiter:
    """A thread that reads the clock and notes how long it could not, for want of the lock.

    Time in which it, or the thread that has the lock, waited for a processor is left out.
    """

    def __init__(self) -> None:
        self._holder = threading.get_native_id()
        self.longest = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        sys.setswitchinterval(0.0005)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        mine = threading.get_native_id()
        last, queued = time.perf_counter(), 0.0
        while not self._ended:
            time.sleep(0.0002)
            before, queued = queued, _queued_s(mine) + _queued_s(self._holder)
            now = time.perf_counter()
            if before:
                self.longest = max(self.longest, now - last - (queued - before))
            last = now


def _queued_s(thread: int) -> float:
    """Return how long a thread of this process has waited for a processor."""
    return int((host.PROC / "self/task" / str(thread) / "schedstat").read_text().split()[1]) / 1e9


def _vocabulary(model: Path) -> Vocabulary:
    from uma_trio.backend._llama_vocab import LlamaVocabulary  # loads llama.cpp

    return LlamaVocabulary.load(model)


def _steps(vocabulary: Vocabulary, n: int, seed: int) -> float:
    """Walk answers to `n` shapes; return the longest step in seconds."""
    grammarian = Grammarian(vocabulary, confinement=Confinement(vocabulary))
    grammarian.prepare()
    dear = dearest(vocabulary.pieces())
    found, outcomes, waited = list[tuple[float, str]](), Counter[str](), list[float]()
    try:
        for number in range(seed, seed + n):
            kind, text = drawn(random.Random(number))
            waiter = _Waiter()
            with waiter:
                outcome, took = _walked(grammarian, vocabulary, dear, Shape(kind, text), number)
            outcomes[f"{kind}: {outcome}"] += 1
            found += [(one.seconds, f"{one.what}, {kind} {number}") for one in took]
            waited.append(waiter.longest)
    finally:
        grammarian.close()
    print(", ".join(f"{what} {count}" for what, count in sorted(outcomes.items())))
    found.sort()
    ms = [seconds * 1e3 for seconds, _ in found]
    print(f"{len(ms)} steps that hold the lock: p50 {percentile(ms, 50):.3f}, p99 {percentile(ms, 99):.2f}, "
          f"worst {ms[-1]:.1f} ms ({found[-1][1]})")  # fmt: skip
    print(f"another thread waited {max(waited) * 1e3:.1f} ms at the longest, "
          f"{statistics.median(waited) * 1e3:.1f} ms beside the median shape")  # fmt: skip
    return found[-1][0]


def _walked(
    grammarian: Grammarian, vocabulary: Vocabulary, dear: Sequence[int], shape: Shape, seed: int
) -> tuple[str, list[Took]]:
    took: list[Took] = []
    for walk in range(_WALKS):
        try:
            follower = grammarian.follow(shape)
        except Unconstrainable:
            return "refused", took
        if not isinstance(follower, Follower):
            return "moved" if walk else "apart", took
        took += walked(follower, vocabulary, dear, random.Random(f"{seed} {walk}"))
    return "here", took


# --- a daemon -----------------------------------------------------------------------------------


def hostile(n: int) -> dict[str, Any]:
    """Return the fields of a request whose shape takes what it can; no two are the same."""
    kinds: list[dict[str, Any]] = [
        {"guided_regex": f"a{{40000000{n:02}}}"},
        {"json_schema": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9001 + n}]}},
        {"grammar": f'root ::= s "{n}"?\ns ::= s s s s | s s s | s s | "a"'},
        {"json_schema": {"enum": ["a" * (50_000 + n)]}},
        {"guided_regex": f"((a{{1000}}){{1000}}){{{1000 + n}}}"},
        {"grammar": "root ::= a" + "\n" * (16_000 + n)},
        {"guided_choice": [chr(97 + k % 26) * 199 + f"{k} {n}" for k in range(2000)]},
        {"json_schema": {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": k} for k in range(n, n + 30)]}},
        {"json_schema": {"properties": {f"p{k} {n}": {"$ref": "#"} for k in range(1500)}}},
        {"guided_regex": f"(.*a.{{{12 + n % 7}}}|.*b.{{14}}){n}"},
    ]  # fmt: skip
    return kinds[n % len(kinds)]


def _post(port: int, fields: dict[str, Any]) -> tuple[int, float, str]:
    """Return the status of a completion, how long it took, and the code of its error."""
    body = json.dumps({"prompt": "a", "max_tokens": 40, "temperature": 1, "seed": 1, **fields})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
        code = said.get("error", {}).get("code", "") if isinstance(said, dict) else ""
        return answer.status, time.monotonic() - began, str(code)
    finally:
        connection.close()


def _private_mib(pid: int) -> float:
    """Return the private memory of a process and of all below it."""
    children = (host.PROC / str(pid) / "task").glob("*/children")
    below = [int(child) for file in children for child in file.read_text().split()]
    total = 0.0
    with contextlib.suppress(OSError):  # it has ended meanwhile
        total = host.memory(pid).anonymous
    return total + sum(map(_private_mib, below))


def _hurt(threads: int) -> float:
    """Send hostile shapes to a daemon; return by how many MiB it grew."""
    port = servers.free_port()
    setup = servers.Setup(bundled_model(), threads, n_ctx=4096, slots=4)
    # What prefixes take is no matter of shapes: a stream beside them fills all that it may.
    extra = ("--http", str(port), "--prefix-ram", "0")
    with servers.ours(setup, *extra) as running, beside.stream(port) as stream:
        _tell_ordinary(port)
        before = _private_mib(running.pid)
        print(f"private memory before: {before:.0f} MiB", flush=True)
        seen, codes, seconds = [before], Counter[str](), list[float]()
        stream.restart()
        for n in range(_HOSTILE):
            status, took, code = _post(port, hostile(n))
            codes[f"{status} {code}".strip()] += 1
            seconds.append(took)
            if not (n + 1) % _EVERY:
                seen.append(_private_mib(running.pid))
                print(
                    f"  after {n + 1:3}: {seen[-1]:.0f} MiB, gap {stream.gap_ms():.0f} ms",
                    flush=True,
                )
        again = [_post(port, hostile(n))[1] for n in (0, 1, 4, 5)]
    print(f"answers: {dict(codes)}; {statistics.median(seconds):.2f} s at the median, {max(seconds):.1f} s "
          f"at most; refused again in {max(again) * 1e3:.0f} ms at most")  # fmt: skip
    return max(seen) - before


def _tell_ordinary(port: int) -> None:
    """Time ordinary schemas: a daemon's first, later ones, known ones, and none."""

    def asked(n: int | None) -> float:
        schema = {
            "properties": {f"name{n}": {"type": "string", "maxLength": 3}},
            "required": [f"name{n}"],
        }
        fields = {} if n is None else {"json_schema": {"type": "object", **schema}}
        return 1e3 * _post(port, {**fields, "max_tokens": 1})[1]

    asked(None)
    first = asked(0)
    figures: dict[str, list[float]] = {"none": [], "new": [], "known": []}
    for n in range(1, 31):  # they take turns, as the machine changes
        figures["none"].append(asked(None))
        figures["new"].append(asked(n))
        figures["known"].append(asked(n))
    told = ", ".join(f"{name} {statistics.median(ms):.1f}" for name, ms in figures.items())
    print(f"one token, ms: the first schema {first:.0f}, medians of 30: {told}", flush=True)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-daemon", action="store_true")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--model", type=Path, help="whose vocabulary the steps are taken with")


@tool(_arguments)
def shapes(given: argparse.Namespace) -> int:
    """Measure, and say whether the targets are met."""
    longest = grown = 0.0
    if given.shapes:
        longest = _steps(_vocabulary(bench_model(given.model)), given.shapes, given.seed)
    if not given.no_daemon:
        grown = _hurt(given.threads)
        print(f"{grown:+.0f} MiB at most (target {_MOST_MIB:+.0f})")
    return 0 if longest <= STEP_S and grown <= _MOST_MIB else 1
