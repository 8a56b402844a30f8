"""The same seed twice: how many answers are equal, and why the others are not.

    python -m fuzz.seeds                        40 answers of 150 tokens, each twice, without a word on drafts
    python -m fuzz.seeds --speculation auto     with drafts
    python -m fuzz.seeds --temperature 0        likeliest tokens, without a seed

One engine with the deadline policy, the measured costs, drafts and the prefix cache answers questions to the
bundled model, alone, one after another. Each is asked twice.

The n-th token of an answer is drawn with the n-th number of its seed. So two answers can part in one way only:
the numbers are the same, and the model's probabilities differ a little, such that the number lies within
another token's share. For each pair that parts, the rows of logits are compared there: which token's share holds
the number in each, by how much the border between them moved, and how far the logits are apart. The exit status is 1
if a difference is of any other kind.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from attrs import evolve

from fuzz.answers import SHARED, Sink
from models.storyteller.evaluate import prompt
from models.storyteller.questions import set_questions
from uma_trio.app.build import engine_settings
from uma_trio.backend.base import FloatArray, Overlap, nothing
from uma_trio.backend.llama import LlamaBackend
from uma_trio.config.options import Config
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import SamplingParams, Submit
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.sampling import Sampler
from uma_trio.engine.sampling.drawing import Numbers
from uma_trio.models import bundled_model
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.by_name import find_policy
from uma_trio.words import SPECULATIONS, Speculation, chosen

_CELLS = 8192
_ROUNDING = 1e-6  # of a sum of probabilities in float32


class Backend(LlamaBackend):
    """The real one; it keeps a copy of each row of logits, by its position in the only request."""

    seen: dict[int, FloatArray]
    _wanted: list[int]

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute a batch, and note which positions have a row."""
        wanted = np.flatnonzero(self.batch.want[:n_tokens])
        self._wanted = self.batch.pos[wanted].tolist()
        return super().decode(n_tokens, while_computing)

    def logits(self, n_rows: int) -> FloatArray:
        """Return rows, of which copies are kept. Who computes a position again is right."""
        rows = super().logits(n_rows)
        self.seen.update(zip(self._wanted, rows.copy(), strict=False))
        return rows


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and for each the row that it was drawn from."""

    tokens: list[int]
    rows: list[FloatArray]


class Run:
    """An engine on the bundled model, run by hand, as the daemon has it."""

    def __init__(self) -> None:
        self.backend = Backend.load(
            bundled_model(), n_ctx=_CELLS, n_slots=4, threads=1, flash_attention="off"
        )
        self.backend.seen, self._inbox, self._handles = {}, Inbox(64), count(1)
        settings = engine_settings(Config(), self.backend)
        self.engine = Engine(
            *(
                self.backend,
                find_policy("deadline"),
                self._inbox,
                Outlet(lambda deliver: deliver()),
            ),
            Metrics(),
            time.perf_counter,
            settings=evolve(settings, prefix_bytes=64 << 20),
        )

    def ask(self, text: str, params: SamplingParams, most: int, drafts: Speculation) -> Answer:
        """Return the answer to a request that runs alone."""
        tokens = self.backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
        sink, self.backend.seen = Sink(), {}
        self._inbox.submit(
            Submit(
                handle=next(self._handles),
                prompt=tokens,
                max_tokens=most,
                params=params,
                stop=(),
                lane="interactive",
                client=0,
                credit=10_000,
                sink=sink,
                submitted=time.perf_counter(),
                namespace="1",
                speculation=drafts,
            )
        )
        while self.engine.tick() or not sink.ends:
            pass
        first = len(tokens) - 1
        return Answer(sink.tokens, [self.backend.seen[first + n] for n in range(len(sink.tokens))])


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the `u` that both tokens were drawn with, and each one's share of [0, 1)."""

    place: int
    u: float
    tokens: tuple[int, int]
    shares: tuple[tuple[float, float], tuple[float, float]]
    logits: float

    @property
    def explained(self) -> bool:
        """Whether each token is the one whose share holds `u`, and the logits differ."""
        held = [low - _ROUNDING <= self.u < high + _ROUNDING for low, high in self.shares]
        return all(held) and self.logits > 0.0

    def __str__(self) -> str:
        """Say it in a line."""
        (low, high), (other_low, other_high) = self.shares
        return (
            f"token {self.place}: {self.tokens[0]} then {self.tokens[1]}, drawn with {self.u:.6f} from "
            f"[{low:.6f}, {high:.6f}) and [{other_low:.6f}, {other_high:.6f}); logits up to {self.logits:.3f} "
            f"apart; {'a logit that moved the border' if self.explained else 'NOT EXPLAINED'}"
        )


def difference(
    params: SamplingParams, ends: Collection[int], one: Answer, two: Answer
) -> Difference | None:
    """Return where two answers to one request part; None if they do not.

    Raises ValueError if one goes on where the other has ended.
    """
    for place, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)):
        if a != b:
            rows, sampler = (one.rows[place], two.rows[place]), Sampler(params, ends)
            return Difference(
                place,
                Numbers(params.seed)(place),
                (a, b),
                (_share(sampler, rows[0], a), _share(sampler, rows[1], b)),
                float(np.abs(rows[0] - rows[1]).max()),
            )
    if len(one.tokens) != len(two.tokens):
        raise ValueError(f"{len(one.tokens)} tokens, then {len(two.tokens)}")
    return None


def _share(sampler: Sampler, row: FloatArray, token: int) -> tuple[float, float]:
    """Return which numbers of [0, 1) draw `token` from a row."""
    ids, probs = sampler.candidates(row)
    reached = np.cumsum(probs, dtype=np.float64)
    (at,) = np.flatnonzero(ids == token)
    return float((reached[at] - probs[at]) / reached[-1]), float(reached[at] / reached[-1])


def twice(
    n: int, most: int, speculation: Speculation | None, temperature: float = 1.0
) -> Iterator[Difference | None]:
    """Ask `n` questions twice each, `most` tokens; yield where the answers part.

    With a seed, but not at temperature 0, where nothing is drawn.
    """
    questions = [question for _, question, _ in set_questions()]
    texts = random.Random(1).sample(questions, n)
    seeded = temperature > 0.0
    run, drafts = Run(), chosen(speculation, seeded=seeded)
    for seed, text in enumerate(texts):
        params = SamplingParams(temperature, seed=seed, seed_named=seeded, ignore_eos=True)
        one, two = (run.ask(f"{SHARED}{prompt(text)}", params, most, drafts) for _ in range(2))
        yield difference(params, run.backend.vocabulary.end_tokens, one, two)
    run.backend.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare and tell; return the exit status."""
    given = _arguments(argv)
    found = []
    for parted in twice(given.n, given.tokens, given.speculation, given.temperature):
        if parted is not None:
            print(f"  {parted}", flush=True)
        found.append(parted)
    parted_ones = [one for one in found if one is not None]
    print(
        f"{len(found) - len(parted_ones)} of {len(found)} answers of {given.tokens} tokens are equal"
    )
    return int(not all(one.explained for one in parted_ones))


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.seeds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=int, default=40, help="how many answers (default: 40)")
    parser.add_argument("--tokens", type=int, default=150, help="of each answer (default: 150)")
    parser.add_argument(
        "--speculation",
        choices=SPECULATIONS,
        help="what each request says of drafts (default: nothing)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: the likeliest tokens, without a seed"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
