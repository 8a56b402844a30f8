"""The bundled model answers the same with the prefix cache on, off, and disturbed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kit import text as letters
from engine_kit import Bench

from models.storyteller.evaluate import prompt
from models.storyteller.questions import set_questions
from models.storyteller.stories import Asked, make_story
from models.synthetic import PRESETS, Shape, write_model
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
    """Save, evict, preempt, move cells, or take leaves out of the cache, now and then."""
    prefix, running = made.engine.prefix, made.engine.registry.running
    match rng.randrange(40):
        case 0:
            prefix.room.drop_all()
        case 1 | 2 | 3:
            prefix.idle()
        case 4:
            prefix.store.clear(["1"])
        case 5 | 6 | 7 if (part := made.backend.kv_highest(64)) is not None:
            assert made.backend.kv_move(*part)
        case 8 if running:
            made.engine.publish()  # commits; a request that ended is no longer there
            if running:
                made.engine.registry.preempt(rng.choice(sorted(running)), "a test")


def conversation(path: Path, budget: int) -> list[list[int]]:
    """Run three turns of a conversation, each twice, and two that part from it; return the answers."""
    backend = LlamaBackend.load(
        path, n_ctx=1024, n_slots=3, n_batch=64, threads=1, flash_attention="off"
    )
    made = Bench(backend, settings=EngineSettings(prefix_bytes=budget))  # type: ignore[arg-type]
    prefix, answers = made.engine.prefix, []
    past = letters(1, 150)
    for turn in range(3):
        for asked in (past, past, [*past[:97], *letters(9, 40)]):
            _, sink = made.submit(asked, 8, namespace="1")
            made.run()
            answers.append(sink.tokens)
            while turn and prefix.idle():
                pass
            if turn == 2:
                prefix.room.drop_all()
        past = [*past, *answers[-3], *letters(turn + 2, 30)]
    assert (prefix.tokens_saved > 0) is (budget > 0 and backend.limits.can_go_back)
    backend.close()
    return answers


@pytest.mark.parametrize(
    "shape",
    [
        PRESETS["tiny"],
        PRESETS["window-tiny"],
        replace(PRESETS["window-tiny"], window=96),  # more than a page, so that it is saved, too
        PRESETS["recurrent-tiny"],
    ],
)
def test_every_kind_of_memory_answers_the_same_with_the_cache(shape: Shape, tmp_path: Path) -> None:
    """Attention, sliding windows and recurrent states; whole and partial hits, resident and saved."""
    path = write_model(tmp_path / "model.gguf", shape)
    assert conversation(path, 16 << 20) == conversation(path, 0)


def test_a_recurrent_memory_is_found_out_and_keeps_nothing(tmp_path: Path) -> None:
    """It cannot go back, so that nothing is shared, saved or left behind."""
    path = write_model(tmp_path / "model.gguf", PRESETS["recurrent-tiny"])
    backend = LlamaBackend.load(path, n_ctx=512, n_slots=2, n_batch=64, threads=1)
    assert not backend.limits.can_go_back
    assert not backend.limits.leaf_ids
    assert backend.arm() is None
    backend.close()


def test_set_questions_are_answered_the_same() -> None:
    """Off, on, and with leaves, pages and places taken away at random: token for token."""
    texts = [f"{SHARED}{prompt(question)}" for _, question, _ in set_questions()][::60]
    without = ask_all(texts, 0)
    assert ask_all(texts, 64 << 20) == without
    assert ask_all(texts, 200_000, random.Random(1)) == without
