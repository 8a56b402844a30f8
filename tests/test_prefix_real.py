"""The bundled model answers the same with the prefix cache on, off, and disturbed."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from engine_kit import Bench

from models.storyteller.evaluate import prompt
from models.storyteller.questions import set_questions
from models.storyteller.stories import Asked, make_story
from uma_trio.backend.llama import LlamaBackend
from uma_trio.engine.planner import EngineSettings
from uma_trio.models import bundled_model

pytestmark = pytest.mark.real

STORY = make_story(random.Random(3), Asked()).text
SHARED = f"{prompt('Tell me a story.')}{STORY}<|im_end|>\n"
MOST = 24


def ask_all(texts: list[str], budget: int, disturb: random.Random | None = None) -> list[list[int]]:
    """Answer the questions, each behind the same beginning, four at a time; return the tokens."""
    backend = LlamaBackend.load(
        bundled_model(), n_ctx=2048, n_slots=4, n_batch=256, threads=1, flash_attention="off"
    )
    made = Bench(backend, settings=EngineSettings(prefix_bytes=budget))  # type: ignore[arg-type]
    prefix, answers = made.engine.prefix, []
    for start in range(0, len(texts), 4):
        sinks = []
        for text in texts[start : start + 4]:
            tokens = backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
            lane = "background" if disturb and disturb.random() < 0.5 else "interactive"
            sinks.append(made.submit(tokens.tolist(), MOST, lane=lane, namespace="1")[1])  # type: ignore[arg-type]
        for _ in range(10_000):
            if disturb is not None:
                disturb_it(made, disturb)
            if not made.engine.tick():
                break
        answers += [sink.tokens for sink in sinks]
        assert all(sink.ends for sink in sinks)
        while disturb is None and prefix.idle():
            pass
    if budget:
        assert prefix.tokens_saved > 50 * len(texts)
    backend.close()
    return answers


def disturb_it(made: Bench, rng: random.Random) -> None:
    """Save, evict, preempt, or take leaves out of the cache, now and then."""
    prefix, running = made.engine.prefix, made.engine.registry.running
    match rng.randrange(40):
        case 0:
            prefix.room.drop_all()
        case 1 | 2 | 3:
            prefix.idle()
        case 4:
            prefix.store.clear(["1"])
        case 5 if running:
            made.engine.publish()  # commits; a request that ended is no longer there
            if running:
                made.engine.registry.preempt(rng.choice(sorted(running)), "a test")


def test_set_questions_are_answered_the_same() -> None:
    """Off, on, and with leaves, pages and places taken away at random: token for token."""
    texts = [f"{SHARED}{prompt(question)}" for _, question, _ in set_questions()][::60]
    without = ask_all(texts, 0)
    assert ask_all(texts, 64 << 20) == without
    assert ask_all(texts, 200_000, random.Random(1)) == without
