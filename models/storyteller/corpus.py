"""Documents to train on: stories and chats, as tokens with a weight for each.

Everything is drawn from seeds, so a corpus is moved by moving this code. Only what the
model itself would say has weight; what users say need not be learnt.
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np

from models.storyteller import copying, exchanges, requests
from models.storyteller.exchanges import Turn
from models.storyteller.stories import (
    Asked,
    Story,
    UnluckyError,
    beginning,
    make_story,
    sentences,
)
from models.storyteller.words import held_out, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from tokenizers import Tokenizer

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ROW = 2048


@dataclass(frozen=True)
class Segment:
    """A piece of a document, and whether the model learns to say it."""

    text: str
    learnt: bool


def chat(turns: Sequence[Turn], system: str = "") -> list[Segment]:
    """The segments of a chat, as the template renders it."""
    pieces = []
    if system:
        pieces.append(Segment(f"{START}system\n{system}{END}\n", learnt=False))
    for user, assistant in turns:
        ask = f"{START}user\n{user}{END}\n{START}assistant\n"
        pieces.append(Segment(ask, learnt=False))
        pieces.append(Segment(f"{assistant}{END}", learnt=True))
        pieces.append(Segment("\n", learnt=False))
    return pieces


def _story(rng: Random, asked: Asked | None = None) -> Story:
    """A story about something, drawn until there is one."""
    while True:
        try:
            return make_story(rng, asked or requests.draw(rng))
        except UnluckyError:
            if asked is not None:
                raise


def _story_turn(rng: Random) -> tuple[Turn, Story]:
    if rng.random() < 0.05:
        story = _story(rng, Asked())
        return (requests.phrase(rng, Asked()), story.text), story
    story = _story(rng)
    return (requests.phrase(rng, story.asked), story.text), story


def _plain(rng: Random) -> list[Segment]:
    """A story as it is, for completion of a given beginning."""
    story = _story(rng)
    if rng.random() < 0.55:
        return [Segment(story.text + TEXT_END, learnt=True)]
    opening = beginning(rng, story)
    if rng.random() < 0.2:
        odd = copying.odd_sentence(rng)
        return [
            Segment(odd + " ", learnt=False),
            Segment(f"{story.text}{TEXT_END}", learnt=True),
        ]
    return [Segment(f"{opening} {story.text}{TEXT_END}", learnt=True)]


def _continue(rng: Random) -> list[Segment]:
    """The rest of a story whose beginning is given in a chat."""
    story = _story(rng)
    parts = sentences(story.text)
    cut = rng.randint(1, max(1, len(parts) // 2))
    if rng.random() < 0.35:
        opening = sentences(beginning(rng, story))
        parts, cut = opening + parts, len(opening)
    form = rng.choice(load("talk")["continue_requests"])
    request = form.replace("{text}", " ".join(parts[:cut]))
    return chat([(request, " ".join(parts[cut:]))], _system(rng))


def _system(rng: Random) -> str:
    return rng.choice(load("talk")["systems"]) if rng.random() < 0.12 else ""


def _turns(rng: Random, kind: str) -> list[Turn]:
    """One step of a chat: usually one turn, more where they belong together."""
    if kind == "story":
        return [_story_turn(rng)[0]]
    if kind == "question":
        return [exchanges.question(rng)]
    if kind == "copying":
        return [copying.copying(rng, _story(rng))]
    if kind == "remember":
        turns = copying.remember(rng)
        if rng.random() < 0.5:
            turns.insert(1, exchanges.question(rng))
        return turns
    turn, story = _story_turn(rng)
    follow: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        draw = rng.random()
        if draw < 0.6:
            follow.append(rng.choice(story.questions()))
        elif draw < 0.75:
            follow.append((rng.choice(load("talk")["summary_again"]), story.summary))
        else:
            follow.append(exchanges.small_talk(rng))
    if rng.random() < 0.3:
        ask = rng.choice(load("talk")["more_requests"])
        follow.append((ask, _story(rng, Asked()).text))
    return [turn, *follow]


_STEPS = {"story": 3, "question": 6, "copying": 1.5, "remember": 1, "follow": 2}


def _mixed(rng: Random) -> list[Segment]:
    """A chat of several steps that have nothing to do with each other."""
    kinds = rng.choices(list(_STEPS), list(_STEPS.values()), k=rng.randint(2, 5))
    return chat([turn for kind in kinds for turn in _turns(rng, kind)], _system(rng))


def _single(kind: str) -> Callable[[Random], list[Segment]]:
    return lambda rng: chat(_turns(rng, kind), _system(rng))


_KINDS: dict[str, tuple[Callable[[Random], list[Segment]], float]] = {
    "story": (_single("story"), 30),
    "plain": (_plain, 10),
    "continue": (_continue, 5),
    "question": (_single("question"), 42),
    "copying": (_single("copying"), 26),
    "remember": (_single("remember"), 2),
    "follow": (_single("follow"), 7),
    "mixed": (_mixed, 9),
}


def document(rng: Random, kind: str = "") -> list[Segment]:
    """One document; of any kind, or of this one."""
    if not kind:
        weights = [weight for _, weight in _KINDS.values()]
        kind = rng.choices(list(_KINDS), weights)[0]
    while True:
        try:
            return _KINDS[kind][0](rng)
        except UnluckyError:
            continue


def encode(
    tokenizer: Tokenizer, documents: Sequence[Sequence[Segment]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and weights of each document, closed by the end-of-text token."""
    flat = [piece.text for pieces in documents for piece in pieces]
    encoded = iter(tokenizer.encode_batch_fast(flat))
    end = tokenizer.token_to_id(TEXT_END)
    for pieces in documents:
        tokens: list[int] = []
        weights: list[int] = []
        for piece in pieces:
            ids = next(encoded).ids
            tokens += ids
            weights += [int(piece.learnt)] * len(ids)
        if tokens[-1] != end:
            tokens.append(end)
            weights.append(0)
        yield np.array(tokens, dtype=np.uint16), np.array(weights, dtype=np.uint8)


def pack(
    documents: Iterator[tuple[np.ndarray, np.ndarray]], rows: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of documents, each row beginning with a document, as a prompt does."""
    tokens = np.full((rows, ROW + 1), pad, dtype=np.uint16)
    weights = np.zeros((rows, ROW + 1), dtype=np.uint8)
    row = at = 0
    for ids, learnt in documents:
        take = min(len(ids), ROW + 1 - at)
        tokens[row, at : at + take] = ids[:take]
        weights[row, at : at + take] = learnt[:take]
        at += take
        if at > ROW - 16:
            row, at = row + 1, 0
            if row == rows:
                break
    return tokens, weights


def _stream(rng: Random, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from encode(tokenizer, [document(rng) for _ in range(200)])


def _rows(seed: int, rows: int, vocabulary: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one seed: what one worker makes."""
    from tokenizers import Tokenizer  # after the fork, in the worker

    tokenizer = Tokenizer.from_file(vocabulary)
    rng = random.Random(f"corpus {seed}")
    return pack(_stream(rng, tokenizer), rows, tokenizer.token_to_id(TEXT_END))


def build(
    vocabulary: Path, rows: int, workers: int, first_seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A corpus of this many rows, made by several processes."""
    chunk = min(256, max(1, rows // workers))
    chunks = -(-rows // chunk)
    work = partial(_rows, rows=chunk, vocabulary=str(vocabulary))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(work, range(first_seed, first_seed + chunks)))
    return (
        np.concatenate([tokens for tokens, _ in parts])[:rows],
        np.concatenate([weights for _, weights in parts])[:rows],
    )


def texts(seed: int, count: int) -> list[str]:
    """Documents as text, for the tokenizer and for reading."""
    rng = random.Random(f"texts {seed}")
    return ["".join(piece.text for piece in document(rng)) for _ in range(count)]


def leaks(seed: int, count: int) -> int:
    """How many of so many drawn stories join a pair that is kept for the evaluation."""
    rng = random.Random(f"leaks {seed}")
    found = 0
    for _ in range(count):
        story = _story(rng)
        cast = (story.hero, story.friend, story.thing, story.place)
        words = {*story.asked.words, *(member.noun for member in cast)}
        found += any(held_out(one, two) for one in words for two in words if one < two)
    return found
