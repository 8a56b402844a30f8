"""A cache hit never changes a token: the bundled model's set questions, answered in three ways.

    python -m fuzz.answers                  all 967 questions, about ten minutes on one core
    python -m fuzz.answers --every 60       each 60th

Each question comes behind the same story, four at a time: with the prefix cache *off*, *on*, and
*disturbed*. Disturbed means that at random, between two ticks, leaves are taken out of the KV cache, pages
are saved, evicted or dropped, requests are preempted, and that some copies, saves and restores
fail. What a seed makes happen it makes happen again.

Where an answer differs from the one without a cache, the two tokens at which they part are looked at in
an empty context without a cache: how far apart their logits are, and whether it is enough to let cells of
somebody else lie before and between the prompt's own for the order of the two to change. Then it is by
placement (docs/explained/memory.md, "Reproducibility"), and not by the cache. The exit status is 1 if a difference is not by
placement, or if something that should have happened never did.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from models.storyteller.evaluate import prompt
from models.storyteller.questions import set_questions
from models.storyteller.stories import Asked, make_story
from uma_trio.backend.base import DecodeStatus, FloatArray, Saved
from uma_trio.backend.llama import LlamaBackend
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Finished, SamplingParams, StreamItem, Submit, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.models import bundled_model
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.baseline import baseline
from uma_trio.words import Lane

STORY = make_story(random.Random(3), Asked()).text
SHARED = f"{prompt('Tell me a story.')}{STORY}<|im_end|>\n"
MOST = 24
AT_ONCE = 4
NAMESPACE = "1"
BUDGET = 64 << 20
TIGHT = 2_200_000  # eight pages of the bundled model, so that some are always evicted
FAIL = 0.05  # of all copies, saves and restores, where they are disturbed
_SCATTERED = (0, 1, 3)  # cells of somebody else's behind each 8 of the prompt's own
_BEFORE = range(32)  # sums are made in groups of up to 32 cells


class Backend(LlamaBackend):
    """The real one, of which a verb fails when `fails` says so; each failure is counted."""

    fails: Callable[[], bool] = staticmethod(lambda: False)
    failed: Counter[str]

    def _broken(self, verb: str) -> bool:
        broken = self.fails()
        self.failed[verb] += broken
        return broken

    def kv_copy(self, src: int, dst: int, first: int, last: int) -> bool:
        """Share cells, or fail."""
        return not self._broken("copy") and super().kv_copy(src, dst, first, last)

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Save cells, or fail."""
        return None if self._broken("save") else super().kv_save(slot, first, last, page)

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        """Restore cells, or fail."""
        return not self._broken("restore") and super().kv_restore(slot, saved)


def load() -> Backend:
    """Load the bundled model without flash attention, where sums do not depend on a batch."""
    backend = Backend.load(
        bundled_model(), n_ctx=2048, n_slots=AT_ONCE, n_batch=256, threads=1, flash_attention="off"
    )
    backend.failed = Counter()
    return backend


@dataclass
class Sink:
    """Keeps the tokens of an answer, and whether it has ended."""

    tokens: list[int] = field(default_factory=list)
    ends: int = 0

    def send_nowait(self, item: StreamItem) -> None:
        """Take what the engine sends."""
        if isinstance(item, TokenOut):
            self.tokens.append(item.token_id)
        self.ends += isinstance(item, Finished)

    def flush(self) -> None:
        """All was taken as it came."""


class Run:
    """An engine on the bundled model, run by hand; its clock moves a millisecond at each look."""

    def __init__(self, budget: int, seed: int | None = None) -> None:
        self.backend, self.inbox, ticks = load(), Inbox(64), count()
        self.rng = None if seed is None else random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._handles = count(1)
        self._clock = lambda: next(ticks) / 1000
        self.engine = Engine(
            self.backend,
            baseline,
            self.inbox,
            Outlet(lambda deliver: deliver()),
            Metrics(),
            self._clock,
            settings=EngineSettings(prefix_bytes=budget),
        )
        if self.rng is not None:
            rng = self.rng
            self.backend.fails = lambda: rng.random() < FAIL

    def ask(self, texts: Sequence[str]) -> list[list[int]]:
        """Answer these at once; return the tokens of each. A request that never ends is an error."""
        if self.rng is not None and self.rng.random() < 0.5:
            self._leave_pages_alone(self.rng)
        sinks = [self._submit(text) for text in texts]
        while self.engine.tick():
            if self.rng is not None:
                self._disturb(self.rng)
        if any(sink.ends != 1 for sink in sinks):
            raise AssertionError(f"not every request ended once: {[s.ends for s in sinks]}")
        while self.rng is None and self.engine.cells.prefix.saving.one():
            pass
        return [sink.tokens for sink in sinks]

    def close(self) -> None:
        """Note what happened, and free the model."""
        prefix = self.engine.cells.prefix
        self.happened.update({f"hits, {source}": n for source, n in prefix.hits.items()})
        self.happened.update({f"failures, {v}": n for v, n in self.backend.failed.items() if n})
        self.happened["tokens that were there"] = prefix.tokens_saved
        self.happened["pages evicted"] = prefix.store.evicted
        self.backend.close()

    def _submit(self, text: str) -> Sink:
        tokens = self.backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
        sink, background = Sink(), self.rng is not None and self.rng.random() < 0.5
        lane: Lane = "background" if background else "interactive"
        self.inbox.submit(
            Submit(
                handle=next(self._handles),
                prompt=tokens,
                max_tokens=MOST,
                params=SamplingParams(),
                stop=(),
                lane=lane,
                client=0,
                credit=10_000,
                sink=sink,
                submitted=self._clock(),
                namespace=NAMESPACE,
            )
        )
        return sink

    def _leave_pages_alone(self, rng: random.Random) -> None:
        """Save some pages and take all leaves out of the KV cache, so that the next ones are restored."""
        for _ in range(rng.randrange(12)):
            self.engine.cells.prefix.saving.one()
        self.happened["times all leaves went"] += self.engine.cells.prefix.room.drop_all()

    def _disturb(self, rng: random.Random) -> None:
        """Do something between two ticks, now and then."""
        engine, running = self.engine, self.engine.registry.running
        match rng.randrange(24):
            case 0:
                self.happened["times all leaves went"] += engine.cells.prefix.room.drop_all()
            case 1 | 2 | 3 | 4 | 5 | 6:
                self.happened["times a page was saved"] += engine.cells.prefix.saving.one()
            case 7 if rng.random() < 0.2:
                self.happened["pages cleared"] += engine.cells.prefix.store.clear([NAMESPACE])
            case 11:
                engine.publish()  # commits: who has ended is not there any more
                if running:
                    engine.registry.preempt(rng.choice(sorted(running)), "at random")
                    self.happened["preemptions"] += 1


#: What has to happen in a run of all questions, or it shows nothing.
WANTED = {
    "on": ("hits, saved", "hits, fork"),
    "disturbed": (
        "hits, leaf", "hits, running", "hits, saved", "hits, fork", "preemptions", "pages evicted",
        "times all leaves went", "pages cleared",
        "failures, copy", "failures, save", "failures, restore",
    ),
}  # fmt: skip


def answers(
    texts: Sequence[str], budget: int, seed: int | None = None
) -> tuple[list[list[int]], Counter[str]]:
    """Return the answers to all of `texts`, four at a time, and what happened meanwhile."""
    run, found = Run(budget, seed), []
    for start in range(0, len(texts), AT_ONCE):
        found += run.ask(texts[start : start + AT_ONCE])
    run.close()
    return found, run.happened


@dataclass(frozen=True)
class Difference:
    """Where the answer to question `at` parts from the one without a cache, and how near they are."""

    at: int
    place: int
    without: int | None
    answered: int | None
    apart: float
    by_placement: bool

    def __str__(self) -> str:
        """Say it in a line."""
        why = "by placement alone" if self.by_placement else "NOT by placement"
        return (
            f"question {self.at}, token {self.place}: {self.without} without a cache, {self.answered} "
            f"with, {self.apart:.3f} of a logit apart; {why}"
        )


def differences(
    texts: Sequence[str], without: Sequence[list[int]], answered: Sequence[list[int]]
) -> Iterator[Difference]:
    """Yield each difference, once it has been looked at in an empty context."""
    for at, (one, two) in enumerate(zip(without, answered, strict=True)):
        if one != two:
            place = next(
                (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None
            )
            if place is None:  # one of them goes on where the other has ended
                yield Difference(at, min(len(one), len(two)), None, None, float("nan"), False)
                continue
            near, moves = _looked_at(texts[at], one[:place], one[place], two[place])
            yield Difference(at, place, one[place], two[place], near, moves)


def _looked_at(text: str, answered: list[int], one: int, two: int) -> tuple[float, bool]:
    """Return how far apart two tokens are, and whether placement alone changes their order."""
    backend = load()
    prompt_tokens = backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
    tokens = [*prompt_tokens.tolist(), *answered]
    gaps = []
    for before in _BEFORE:
        for between in _SCATTERED:
            row = _logits(backend, tokens, before, between)
            gaps.append(float(row[one] - row[two]))
            backend.kv_remove(0)
            backend.kv_remove(1)
    backend.close()
    return abs(gaps[0]), min(gaps) <= 0.0 <= max(gaps)


def _logits(backend: Backend, tokens: list[int], before: int, between: int) -> FloatArray:
    """Return the logits behind `tokens` with cells of another sequence before and between theirs."""
    filler, at = 97, 0
    rows: list[tuple[int, int, int]] = [(1, i, filler) for i in range(before)]
    other = before
    for position, token in enumerate(tokens):
        rows.append((0, position, token))
        if position % 8 == 7:
            rows += [(1, other + i, filler) for i in range(between)]
            other += between
    last = max(i for i, row in enumerate(rows) if row[0] == 0)
    rows = rows[: last + 1]
    batch = backend.batch
    while at < len(rows):
        part = rows[at : at + backend.limits.n_batch]
        for i, (slot, position, token) in enumerate(part):
            batch.slot[i], batch.pos[i], batch.token[i] = slot, position, token
            batch.want[i] = at + i == last
        if backend.decode(len(part)) != DecodeStatus.OK:
            raise AssertionError("an empty context has no room")
        at += len(part)
    return np.array(backend.logits(1)[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare and tell; return the exit status."""
    given = _arguments(argv)
    questions = [question for _, question, _ in set_questions()][:: given.every]
    texts = [f"{SHARED}{prompt(question)}" for question in questions]
    print(f"{len(texts)} questions, seed {given.seed}", flush=True)
    began = time.monotonic()
    without, _ = answers(texts, 0)
    print(f"off: {time.monotonic() - began:.0f} s", flush=True)
    bad = False
    for name, budget, seed in (("on", BUDGET, None), ("disturbed", TIGHT, given.seed)):
        began = time.monotonic()
        found, happened = answers(texts, budget, seed)
        same = sum(a == b for a, b in zip(without, found, strict=True))
        print(f"{name}: {same} of {len(texts)} the same, {time.monotonic() - began:.0f} s")
        print("  " + "; ".join(f"{what} {n:,}" for what, n in sorted(happened.items())))
        for difference in differences(texts, without, found):
            print(f"  {difference}", flush=True)
            bad = bad or not difference.by_placement
        missing = [what for what in WANTED[name] if not happened[what]]
        if missing and given.every == 1:
            print(f"  never happened: {', '.join(missing)}")
            bad = True
    return int(bad)


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth question only")
    parser.add_argument("--seed", type=int, default=1, help="what is disturbed (default: 1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
