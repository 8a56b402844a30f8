"""The decode rate of streams that are held to a schema, by that of free ones, tick by tick of a real engine.

    python -m benches structure                  the model, then a device of 25 ms a tick (6 minutes)
    python -m benches structure --quick          (1 minute)
    python -m benches structure --tick-ms 3.1 6.5

A model of random weights wants no schema. So the model is computed as it is, and its logits then get one that
stands out: the next token of a JSON array, or where a draw is to be refused, every third time, a token that no
place of this schema allows. *device* computes nothing: its decode sleeps so long, and the host is free
meanwhile, as with a GPU. The engine, its sampling, llguidance and the vocabulary are the daemon's own.

A row of the table is k streams: *free*; *wanted*, all held to the schema; *refused*, the same with every third
draw refused; *beside*, the rate of the free half beside a half that is held to it. Rates are tokens per second
of a stream. All cases of a machine take turns, in a drawn order, and what is shown are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen

from benches.driver import tool
from benches.model import bench_model
from benches.report import note, table
from uma_trio.backend.base import (
    Backend,
    DecodeStatus,
    FloatArray,
    Overlap,
    Traits,
    Vocabulary,
    nothing,
)
from uma_trio.backend.fake import FakeBackend
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Cancel, SamplingParams, StreamItem, Submit, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.sampling import MaskThreads
from uma_trio.policy.by_name import find_policy
from uma_trio.telemetry.metrics import Metrics
from uma_trio.text.constrain import Grammarian
from uma_trio.text.shape import Shape
from uma_trio_sim.machine import built_in
from uma_trio_sim.simulation import settings_for

PEOPLE: Final = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "married": {"type": "boolean"},
        },
        "required": ["name", "age", "married"],
        "additionalProperties": False,
    },
}
_SHAPE: Final = Shape("schema", json.dumps(PEOPLE))
_N_PROMPT: Final = 20
_N_CTX: Final = 8192
_TARGETS: Final = {"wanted": 0.97, "refused": 0.90, "beside": 0.99}


@frozen
class _Script:
    """What the model wants: `tokens`, and at every third place `wrong`, if it is to be `refused`."""

    tokens: Sequence[int]
    wrong: int
    refused: bool = False

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammarian: Grammarian, n: int) -> _Script:
        """Return `n` tokens of an array of people, and one that has no place in it."""
        people = [{"name": f"person {i}", "age": i, "married": i % 2 == 0} for i in range(n // 8)]
        text = json.dumps(people, separators=(",", ":"))
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)[:n].tolist()
        follower, never = grammarian.follow(_SHAPE), set(range(vocabulary.n_vocab))
        never -= vocabulary.end_tokens
        for token in tokens:
            never -= set(follower.allowed().tolist())
            follower.accept(token)
        return cls(tokens, min(never))

    def mark(self, logits: FloatArray, places: Sequence[tuple[int, int]]) -> None:
        """Let one token stand out in each row; streams are refused at places of their own."""
        for row, (slot, place) in zip(logits, places, strict=True):
            row[self.tokens[place]] = 100.0
            if self.refused and (slot + place) % 3 == 0:
                row[self.wrong] = 101.0


def _places(backend: Backend, n_tokens: int) -> list[tuple[int, int]]:
    """Return for each row of logits its slot, and how many tokens of its answer are known."""
    batch = backend.batch
    wanted = batch.want[:n_tokens] != 0
    places = (batch.pos[:n_tokens][wanted] - _N_PROMPT + 1).tolist()
    return list(zip(batch.slot[:n_tokens][wanted].tolist(), places, strict=True))


class _Device(FakeBackend):
    """Sleeps for the time of a tick; `while_computing` runs meanwhile."""

    script: _Script

    def __init__(self, tick_s: float, vocabulary: Vocabulary) -> None:
        super().__init__(n_ctx=_N_CTX, n_slots=9, n_batch=512, vocabulary=vocabulary)
        self._tick_s = tick_s
        self._made = np.random.default_rng(1).standard_normal((9, vocabulary.n_vocab), np.float32)

    @property
    def traits(self) -> Traits:
        """As a GPU."""
        return Traits(overlaps=True)

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Take a tick's time."""
        began = time.perf_counter()
        self._wanted = _places(self, n_tokens)
        self._map.place(self.batch.slot[:n_tokens], self.batch.pos[:n_tokens])
        for slot in self.batch.slot[:n_tokens].tolist():
            self._cells[slot].append(0)
        while_computing()
        time.sleep(max(0.0, began + self._tick_s - time.perf_counter()))
        return DecodeStatus.OK

    def logits(self, n_rows: int) -> FloatArray:
        """Return rows that want the script."""
        rows = self._made[:n_rows].copy()
        self.script.mark(rows, self._wanted)
        return rows


def _model(path: Path, threads: int) -> Any:
    """Return the model, computed here, whose rows want a script."""
    from uma_trio.backend.llama import LlamaBackend  # loads llama.cpp

    class Wanting(LlamaBackend):
        script: _Script

        def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
            self._wanted = _places(self, n_tokens)
            return super().decode(n_tokens, while_computing)

        def logits(self, n_rows: int) -> FloatArray:
            rows = super().logits(n_rows)
            self.script.mark(rows, self._wanted)
            return rows

    return Wanting.load(path, n_ctx=_N_CTX, n_slots=8, threads=threads)


class _Stream:
    def __init__(self) -> None:
        self.n = 0

    def send_nowait(self, item: StreamItem) -> None:
        """Count tokens."""
        self.n += isinstance(item, TokenOut)

    def flush(self) -> None:
        """Nobody reads them."""


def _rate(
    backend: Any, grammarian: Grammarian, script: _Script, bound: Sequence[bool], ticks: int
) -> tuple[float, float]:
    """Return tokens per second of a stream, of those that are not `bound` if there are any.

    With it comes how often a stream sat out because its mask was late.
    """
    backend.script = script
    settings = evolve(settings_for(built_in("q4_0")), prefix_bytes=0, drafts=False, scratch_slots=0)
    inbox, outlet, metrics = Inbox(len(bound)), Outlet(lambda deliver: deliver()), Metrics()
    engine = Engine(
        backend,
        find_policy("deadline"),
        inbox,
        outlet,
        metrics,
        time.perf_counter,
        settings=settings,
        masks=MaskThreads(),
    )
    streams = [_Stream() for _ in bound]
    for n, (stream, held) in enumerate(zip(streams, bound, strict=True)):
        inbox.submit(
            Submit(
                handle=n + 1,
                prompt=np.arange(100, 100 + _N_PROMPT, dtype=np.int32),
                max_tokens=len(script.tokens) - 1,
                params=SamplingParams(),
                stop=(),
                lane="interactive",
                client=n,
                credit=1 << 30,
                sink=stream,
                submitted=time.perf_counter(),
                constraint=grammarian.follow(_SHAPE) if held else None,
            )
        )
    while min(stream.n for stream in streams) < 8:
        engine.tick()
    counted = [s for s, held in zip(streams, bound, strict=True) if not held] or streams
    before, began = sum(stream.n for stream in counted), time.perf_counter()
    for _ in range(ticks):
        engine.tick()
    engine.publish()
    took_s = time.perf_counter() - began
    given = sum(stream.n for stream in counted) - before
    for n in range(len(bound)):
        inbox.put(Cancel(n + 1))
    engine.tick()
    return given / len(counted) / took_s, float(str(metrics.snapshot()["late_masks_total"]))


def _cases() -> dict[tuple[int, str], tuple[list[bool], bool]]:
    """Return which streams are bound, and whether draws are refused, by k and what it is called."""
    found: dict[tuple[int, str], tuple[list[bool], bool]] = {}
    for k in (1, 8):
        found[k, "free"] = [False] * k, False
        found[k, "wanted"] = [True] * k, False
        found[k, "refused"] = [True] * k, True
    found[8, "beside"] = [n % 2 == 0 for n in range(8)], False
    return found


def _measure(name: str, backend: Any, given: argparse.Namespace) -> list[list[object]]:
    """Return a row of the table for each case but the free ones."""
    grammarian = Grammarian(backend.vocabulary)
    ticks, rounds = (30, 2) if given.quick else (given.ticks, given.rounds)
    script = _Script.of(backend.vocabulary, grammarian, ticks + 60)
    cases, chance = _cases(), random.Random(given.seed)
    rates: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    late = dict.fromkeys(cases, 0.0)
    for n in range(rounds):
        note(f"{name}: round {n + 1} of {rounds}")
        for case in chance.sample(sorted(cases), len(cases)):
            bound, refused = cases[case]
            rate, missed = _rate(backend, grammarian, evolve(script, refused=refused), bound, ticks)
            rates[case].append(rate)
            late[case] += missed
    rows: list[list[object]] = []
    for (k, what), found in rates.items():
        if what != "free":
            by_free = [rate / free for rate, free in zip(found, rates[k, "free"], strict=True)]
            rows.append(
                [name, k, what, median(rates[k, "free"]), median(found), f"{median(by_free):.3f}",
                 f"{min(by_free):.3f} to {max(by_free):.3f}", _TARGETS[what], int(late[k, what])]
            )  # fmt: skip
    return rows


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tick-ms", type=float, nargs="*", default=[25.0], metavar="MS")
    parser.add_argument("--no-model", action="store_true", help="only devices")
    parser.add_argument("--ticks", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--quick", action="store_true")


@tool(_arguments)
def structure(given: argparse.Namespace) -> int:
    """Measure every case of every machine, and print the table."""
    path = bench_model(given.model)
    rows: list[list[object]] = []
    with closing(_model(path, given.threads)) as model:
        if not given.no_model:
            rows += _measure("model", model, given)
        for tick_ms in given.tick_ms:
            device = _Device(tick_ms / 1e3, model.vocabulary)
            rows += _measure(f"device, {tick_ms:g} ms", device, given)
    headers = [
        "machine",
        "k",
        "case",
        "free tok/s",
        "tok/s",
        "by free",
        "rounds",
        "target",
        "sat out",
    ]
    print(table(headers, rows))
    return 0
