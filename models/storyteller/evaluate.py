"""The evaluation: held-out requests, set questions, perplexity, speed.

    python -m models.storyteller evaluate

Every request is drawn from a fixed seed, and every pair of nouns asked for is one that
the corpus never puts together.
"""

from __future__ import annotations

import random
import re
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from models.storyteller import corpus, requests
from models.storyteller.questions import set_questions
from models.storyteller.runtime import Model
from models.storyteller.stories import make_story, mentions
from models.storyteller.words import world

if TYPE_CHECKING:
    from pathlib import Path

    from models.storyteller.stories import Asked

#: The two things a held-out request names: hero and thing, two characters, and so on.
SHAPES = ("h o", "h o", "h f", "o q", "h p", "o p")
MOST_TOKENS = 300


def prompt(request: str) -> str:
    """One request as the template renders it."""
    return corpus.chat([(request, "")])[0].text


def held_out_requests(count: int, seed: str = "evaluation") -> list[tuple[str, Asked]]:
    """Requests for pairs that never occur in training."""
    rng = random.Random(seed)
    drawn = []
    for index in range(count):
        asked = requests.draw_held_out(rng, SHAPES[index % len(SHAPES)])
        drawn.append((requests.phrase(rng, asked), asked))
    return drawn


@cache
def lexicon() -> frozenset[str]:
    """Every word the stories are made of."""
    text = " ".join(corpus.texts(12345, 6000)).lower()
    lists = world()
    nouns = lists.characters + lists.objects + lists.places
    names = [name for group in lists.names.values() for name in group]
    known = " ".join([noun.word for noun in nouns] + [noun.plural for noun in nouns] + names)
    counts: dict[str, int] = {}
    for word in re.findall(r"[a-z']+", text):
        counts[word] = counts.get(word, 0) + 1
    common = {word for word, times in counts.items() if times > 3}
    return frozenset(common | set(re.findall(r"[a-z']+", known.lower())))


def names_used(text: str) -> set[str]:
    """The names a story uses: what has a capital without opening a sentence."""
    inside = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text)
    named = re.findall(r"(?:named|called) ([A-Z][a-z]+)", text)
    return set(inside) | set(named)


@dataclass
class Tally:
    """What became of the held-out requests."""

    asked: int = 0
    contains: int = 0
    ends: int = 0
    both: int = 0
    names: int = 0
    unbroken: int = 0
    words: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, request: str, asked: Asked, text: str, *, ended: bool) -> None:
        """Judge one story."""
        contains = all(mentions(text, word) for word in asked.words)
        broken = {
            word
            for word in re.findall(r"[a-z']+", text.lower())
            if word.removesuffix("'s") not in lexicon() and word not in lexicon()
        } - set(re.findall(r"[a-z']+", request.lower()))
        known = {name for group in world().names.values() for name in group}
        names = names_used(text)
        self.asked += 1
        self.contains += contains
        self.ends += ended
        self.both += contains and ended
        self.names += len(names) <= 2 and names <= known
        self.unbroken += not broken
        self.words.append(len(text.split()))
        if not (contains and ended):
            self.failures.append(f"{request} -> {text[:160]}")

    def lines(self, name: str) -> list[str]:
        """The figures, a line each."""
        share = {
            "contain both things and end within 300 tokens": self.both,
            "contain both things": self.contains,
            "end by themselves": self.ends,
            "keep to two names": self.names,
            "free of broken words": self.unbroken,
        }
        return [
            *(
                f"{name}: {label}: {n / self.asked:.1%} of {self.asked}"
                for label, n in share.items()
            ),
            f"{name}: words per story: {np.percentile(self.words, (0, 50, 100)).astype(int)}",
        ]


def tell_all(model: Model, count: int) -> Tally:
    """Answer every held-out request greedily."""
    tally = Tally()
    for request, asked in held_out_requests(count):
        ids = model.tokens(prompt(request))
        answer = model.greedy(ids, MOST_TOKENS)
        tally.add(request, asked, model.text(answer), ended=model.ends(answer[-1]))
    return tally


def answer_all(model: Model) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Right answers and questions of each kind, and what went wrong."""
    found: dict[str, tuple[int, int]] = {}
    wrong = []
    for kind, question, judge in set_questions():
        answer = model.text(model.greedy(model.tokens(prompt(question)), MOST_TOKENS))
        right, asked = found.get(kind, (0, 0))
        good = judge(answer)
        found[kind] = (right + good, asked + 1)
        if not good:
            wrong.append(f"[{kind}] {question!r} -> {answer[:120]!r}")
    return found, wrong


def perplexity(model: Model, count: int = 200) -> float:
    """Perplexity of what a model says in held-out story chats."""
    rng = random.Random("perplexity")
    total, tokens = 0.0, 0
    for request, asked in held_out_requests(count, "perplexity"):
        ids = model.tokens(prompt(request))
        story = make_story(rng, asked, evaluation=True, tries=2000).text
        answer = model.tokens(story + corpus.END)
        model.forget()
        logits = model.read([*ids, *answer[:-1]], every=True)[len(ids) - 1 :].astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(answer)), answer]
        total, tokens = total + losses.sum(), tokens + len(answer)
    return float(np.exp(total / tokens))


def speed(model: Model, count: int = 12) -> float:
    """Tokens per second of greedy decoding."""
    prompts = [model.tokens(prompt(text)) for text, _ in held_out_requests(count, "speed")]
    spent, tokens = 0.0, 0
    for ids in prompts:
        model.resume(ids)
        began = time.perf_counter()
        tokens += len(model.greedy(ids, MOST_TOKENS))
        spent += time.perf_counter() - began
    return tokens / spent


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report(folder: Path, count: int, threads: int) -> None:
    """Measure the model and print every figure."""
    large = Model(folder / "storyteller.gguf", threads)
    tally = tell_all(large, count)
    for line in [*tally.lines("storyteller"), *tally.failures[:20]]:
        _say(line)
    found, wrong = answer_all(large)
    for kind, (right, asked) in found.items():
        _say(f"questions: {kind}: {right} of {asked}")
    right, asked = map(sum, zip(*found.values(), strict=True))
    _say(f"questions: {right / asked:.1%} of {asked} right")
    for line in wrong[:40]:
        _say(line)
    _say(f"storyteller: perplexity {perplexity(large):.3f}")
    _say(f"storyteller: {speed(large):.0f} tokens/s, {threads} thread(s)")
