"""Requests that come whether or not others are answered: when, how long, and what is waited for.

Lengths and times are those of a public trace, or made up. Two formats are read:

- CSV with the columns ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Azure's LLM inference traces);
- lines of JSON with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, the
  names of the prompt's blocks of 512 tokens (Mooncake's traces). Prompts with equal first names
  begin with the same text.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benches import clients
from benches.clients import Job

BLOCK = 512  # tokens of a block that has a name, in Mooncake's traces
MOST_LINES = 100_000
LEAST_TOKENS = 4  # of a prompt
_MADE_UP = 2000
# Medians of the conversations in Azure's trace of 2023 (Patel et al., Splitwise, ISCA 2024).
_PROMPT, _ANSWER, _SIGMA = 1020, 129, 1.0


class BadTrace(Exception):
    """A trace cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Recorded:
    """One request of a trace, `at_s` after some moment. Lengths in tokens."""

    at_s: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """One request of a run. `due` is in seconds at a rate of one request per second."""

    due: float
    prompt: int
    answer: int
    awaits: str
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scale:
    """How much shorter prompts and answers are than in the trace; longer prompts are left out."""

    prompts: float = 1.0
    answers: float = 1.0
    longest: int = 1 << 20


def read(path: Path) -> list[Recorded]:
    """Return the first :data:`MOST_LINES` requests of a trace.

    Raises:
        BadTrace: it cannot be read, has neither format, or a line lacks a field.
    """
    try:
        with path.open(newline="") as file:
            first = file.readline()
            file.seek(0)
            parse = _mooncake if first.startswith("{") else _azure
            found = list(itertools.islice(parse(path, file), MOST_LINES))
    except (OSError, UnicodeDecodeError) as failure:
        raise BadTrace(f"{path} cannot be read: {failure}") from failure
    if not found:
        raise BadTrace(f"{path} has no requests")
    return found


def _azure(path: Path, lines: Iterable[str]) -> Iterator[Recorded]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        with _line(path, number):
            at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            yield _checked(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[Recorded]:
    for number, line in enumerate(lines, start=1):
        with _line(path, number):
            row: dict[str, Any] = json.loads(line)
            at, names = float(row["timestamp"]) / 1e3, tuple(map(int, row.get("hash_ids", ())))
            yield _checked(at, int(row["input_length"]), int(row["output_length"]), names)


def _checked(at_s: float, prompt: int, answer: int, blocks: tuple[int, ...] = ()) -> Recorded:
    if not math.isfinite(at_s) or prompt < 0 or answer < 0:
        raise ValueError("a time that is no number, or a negative length")
    return Recorded(at_s, prompt, answer, blocks)


@contextlib.contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    """Say of which line of which file an error is."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise BadTrace(
            f"{path}, line {number}: {what}; wanted are TIMESTAMP, ContextTokens and GeneratedTokens "
            "(CSV), or timestamp, input_length and output_length (lines of JSON)"
        ) from error


def made_up(seed: str, n: int = _MADE_UP) -> list[Recorded]:
    """Return a trace whose lengths are drawn around those of conversations."""
    draw, at = random.Random(f"{seed}/trace"), 0.0
    found = []
    for _ in range(n):
        at += draw.expovariate(1.0)
        prompt, answer = (
            round(draw.lognormvariate(math.log(m), _SIGMA)) for m in (_PROMPT, _ANSWER)
        )
        found.append(Recorded(at, prompt, answer))
    return found


def scaled(trace: Sequence[Recorded], scale: Scale) -> list[Recorded]:
    """Return the requests with scaled lengths, without those longer than the longest.

    Raises:
        BadTrace: none is left.
    """
    found = [
        replace(
            each,
            prompt=max(LEAST_TOKENS, round(each.prompt * scale.prompts)),
            answer=max(1, round(each.answer * scale.answers)),
        )
        for each in trace
    ]
    found = [each for each in found if each.prompt + each.answer <= scale.longest]
    if not found:
        raise BadTrace(f"no request is left with at most {scale.longest} tokens")
    return found


def drawn(trace: Sequence[Recorded], n: int, seed: str, *, by_trace: bool = False) -> list[Asked]:
    """Return `n` requests that follow one another in the trace, from a place that is drawn.

    They come at random (Poisson), or `by_trace` at its times; either way one a second in the mean.
    Half of them, drawn, wait for the end of the answer.
    """
    draw = random.Random(f"{seed}/arrivals")
    n = min(n, len(trace))
    begin = draw.randrange(len(trace) - n + 1)
    taken = sorted(trace[begin : begin + n], key=lambda each: each.at_s)
    waits = ["answer"] * (n // 2) + ["tokens"] * (n - n // 2)
    draw.shuffle(waits)
    if by_trace:
        begin_s, span = taken[0].at_s, taken[-1].at_s - taken[0].at_s
        if n > 1 and span <= 0:
            raise BadTrace(f"{n} requests of the trace have one time; use random arrivals")
        due = [(each.at_s - begin_s) / span * (n - 1) if span else 0.0 for each in taken]
    else:
        due = list(itertools.accumulate(draw.expovariate(1.0) for _ in taken))
    return [
        Asked(at, each.prompt, each.answer, awaits, each.blocks)
        for at, each, awaits in zip(due, taken, waits, strict=True)
    ]


def jobs(asked: Sequence[Asked], seed: str, block: int = BLOCK) -> list[Job]:
    """Return the requests with their texts. Blocks of one name, of `block` tokens, are equal."""
    words = clients.WORDS

    def text(number: int, each: Asked) -> str:
        found: list[str] = []
        for name in each.blocks[: -(-each.prompt // block)]:
            found += random.Random(f"{seed}/block/{name}").choices(words, k=block)
        own = random.Random(f"{seed}/{number}")
        found += own.choices(words, k=max(0, each.prompt - len(found)))
        return " ".join(found[: each.prompt])

    return [
        Job(f"asked-{i}", text(i, each), each.answer, "interactive", awaits=each.awaits)
        for i, each in enumerate(asked)
    ]
