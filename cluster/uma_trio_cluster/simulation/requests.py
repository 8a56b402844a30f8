"""What is asked of a fleet: a public trace, or one that is made up."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

BLOCK: Final = 512  # tokens of a block in Mooncake's traces
_COMMON: Final = (
    0.01  # a block in more of the prompts than that is no beginning of one conversation
)


@frozen
class TraceRequest:
    """One request: seconds since the start, tokens of prompt and answer, its blocks, and its conversation."""

    at: float
    prompt: int
    answer: int
    blocks: tuple[int, ...]
    chat: int


class BadTrace(Exception):
    """The file is no trace; the message names the line."""


def read(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace in Mooncake's form, by time.

    Its lines have `timestamp` in ms, `input_length`, `output_length` and `hash_ids`. A conversation is known by the
    first block that fewer than one request in a hundred has, as the edge knows it by its first user message.

    Raises:
        BadTrace: a line is none.
        OSError: the file cannot be read.
    """
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                lengths = max(2, int(row["input_length"])), max(1, int(row["output_length"]))
                rows.append((row["timestamp"] / 1e3, *lengths, tuple(map(int, row["hash_ids"]))))
            except (ValueError, KeyError, TypeError) as error:
                raise BadTrace(f"{path}, line {number}: {error!r}") from None
    often = Counter(name for row in rows for name in set(row[3]))
    most = _COMMON * len(rows)
    return sorted(
        (
            TraceRequest(*row, chat=next((n for n in row[3] if often[n] < most), -i - 1))
            for i, row in enumerate(rows)
        ),
        key=lambda asked: asked.at,
    )


def made_up(seconds: float, per_s: float, seed: int = 1) -> list[TraceRequest]:
    """Return conversations that open at random, whose turns repeat all that was said.

    Prompts grow by some 2,000 tokens a turn from some 6,000, log-normal, answers have some 300.
    """
    draw = random.Random(seed)
    turns = 3.0
    names = iter(range(1, 1 << 60))
    shared = (0,)
    found: list[TraceRequest] = []
    now = 0.0
    while now < seconds:
        now += draw.expovariate(per_s / turns)
        found += _chat(draw, now, shared, names, turns)
    return sorted((one for one in found if one.at < seconds), key=lambda asked: asked.at)


def _chat(
    draw: random.Random, at: float, shared: tuple[int, ...], names: Iterator[int], turns: float
) -> list[TraceRequest]:
    blocks = shared
    found: list[TraceRequest] = []
    length = draw.lognormvariate(math.log(6000), 0.8)
    for _ in range(1 + int(draw.expovariate(1 / (turns - 1)))):
        n = max(len(blocks) + 1, round(length / BLOCK))
        blocks = (*blocks, *(next(names) for _ in range(n - len(blocks))))
        answer = max(1, round(draw.lognormvariate(math.log(300), 0.6)))
        found.append(TraceRequest(at, n * BLOCK, answer, blocks, blocks[1]))
        at += 10 + draw.expovariate(1 / 30)
        length += draw.lognormvariate(math.log(2000), 0.6)
    return found


def copies(requests: Sequence[TraceRequest], n: int) -> list[TraceRequest]:
    """Return `n` times as many requests: copies with blocks of their own, each shifted within the trace."""
    span = max(asked.at for asked in requests) + 1.0
    far = 1 << 40
    return sorted(
        (
            evolve(
                asked,
                at=(asked.at + span * i / n) % span,
                blocks=tuple(name + i * far for name in asked.blocks),
                chat=asked.chat + i * far if asked.chat >= 0 else asked.chat - i * far,
            )
            for i in range(n)
            for asked in requests
        ),
        key=lambda asked: asked.at,
    )
