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

from fuzz.answers import BUDGET, SHARED, TIGHT, answers, differences
from models.storyteller.evaluate import prompt
from models.storyteller.questions import set_questions
from models.synthetic import PRESETS, Shape, write_model
from uma_trio.backend.base import DecodeStatus, Overlap, nothing
from uma_trio.backend.gguf_header import read_header
from uma_trio.backend.kv_memory import attention_only
from uma_trio.backend.llama import LlamaBackend
from uma_trio.engine.kv import leaves
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.cost import CostModel, Staircase

pytestmark = pytest.mark.real


def conversation(path: Path, budget: int, *, streams: bool = False) -> list[list[int]]:
    """Run three turns of a conversation, each twice, and two that part from it; return the answers."""
    backend = LlamaBackend.load(
        path,
        n_ctx=1536,
        n_slots=3,
        n_batch=64,
        threads=1,
        kv_layout="streams" if streams else "unified",
        flash_attention="on" if streams else "off",  # across cells V is not saved from a stream
    )
    made = Bench(backend, settings=EngineSettings(prefix_bytes=budget))  # type: ignore[arg-type]
    prefix, answers = made.engine.cells.prefix, []
    past = letters(1, 150)
    for turn in range(3):
        for asked in (past, past, [*past[:97], *letters(9, 40)]):
            _, sink = made.submit(asked, 8, namespace="1")
            made.run()
            answers.append(sink.tokens)
            while turn and prefix.saving.one():
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
        PRESETS["hybrid-tiny"],
    ],
)
def test_every_kind_of_memory_answers_the_same_with_the_cache(shape: Shape, tmp_path: Path) -> None:
    """Attention, windows, recurrent and hybrid states; whole and partial hits, resident and saved."""
    path = write_model(tmp_path / "model.gguf", shape)
    assert conversation(path, 16 << 20) == conversation(path, 0)


def test_streams_answer_the_same_with_the_cache(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    without = conversation(path, 0, streams=True)
    assert conversation(path, 16 << 20, streams=True) == without


def crowd(path: Path, budget: int) -> list[list[int]]:
    """Run 40 requests that share beginnings, three at once; return their answers. No decode fails."""

    class Checked(LlamaBackend):
        def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
            status = super().decode(n_tokens, while_computing)
            assert status == DecodeStatus.OK
            return status

    backend = Checked.load(
        path, n_ctx=1536, n_slots=3, n_batch=64, threads=1,
        kv_layout="streams", flash_attention="on",
    )  # fmt: skip
    made = Bench(backend, settings=EngineSettings(prefix_bytes=budget))  # type: ignore[arg-type]
    draw, sinks, past = random.Random(7), [], [letters(1, 300)]
    for number in range(40):
        tokens = draw.choice(past)
        tokens = [
            *tokens[: draw.randrange(20, len(tokens))],
            *letters(number, draw.randrange(2, 60)),
        ]
        past.append(tokens[:400])
        _, sink = made.submit(past[-1], 6, namespace="1")
        sinks.append(sink)
        made.ticks(draw.randrange(0, 6))
    made.run()
    assert (made.engine.cells.prefix.tokens_saved > 0) is (budget > 0)
    backend.close()
    return [sink.tokens for sink in sinks]


def test_a_crowd_in_streams_finds_room_and_answers_as_without_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves give way to requests, also where these compute in the streams of leaves."""
    monkeypatch.setattr(leaves, "SHORT_END", 0)
    monkeypatch.setattr(leaves, "SHORT_PART", 1 << 20)  # all ends of leaves stay
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    with_cache, without = crowd(path, 16 << 20), crowd(path, 0)
    same = sum(one == two for one, two in zip(with_cache, without, strict=True))
    assert same >= 38  # logits of other batches differ in their last bits


@pytest.mark.parametrize("idle", [False, True])
def test_a_conversation_too_large_to_be_saved_stays_in_its_stream(
    idle: bool, tmp_path: Path
) -> None:
    """Neither ticks of others nor an idle machine drop it: no decode spans it, and there is no other copy."""
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    backend = LlamaBackend.load(
        path, n_ctx=1536, n_slots=3, n_batch=64, threads=1,
        kv_layout="streams", flash_attention="on",
    )  # fmt: skip
    # Dear cells, as on a GPU: in one cache the conversation would leave after a few ticks.
    cost = CostModel(Staircase((1, 64), (0.001, 0.010)), spanned_cell_s=1e-3)
    settings = EngineSettings(prefix_bytes=20_000, cost=cost)
    made = Bench(backend, settings=settings)  # type: ignore[arg-type]
    asked = letters(1, 300)
    made.submit(asked, 4, namespace="1")
    made.run()
    if idle:
        assert not made.engine.cells.empty()
    else:
        made.submit(letters(2, 20), 100, namespace="2")
        made.run()
    _, sink = made.submit([*asked, *letters(3, 10)], 4, namespace="1")
    made.run()
    assert sink.end.cached_tokens == 300
    backend.close()


@pytest.mark.parametrize("preset", ["tiny", "window-tiny", "recurrent-tiny", "hybrid-tiny"])
def test_the_file_says_what_the_memory_itself_says(preset: str, tmp_path: Path) -> None:
    """Whether the backend can go back to an earlier token is known before it is loaded."""
    path = write_model(tmp_path / "model.gguf", PRESETS[preset])
    backend = LlamaBackend.load(path, n_ctx=512, n_slots=2, n_batch=64, threads=1)
    assert attention_only(read_header(path)) is backend.limits.can_go_back
    backend.close()


@pytest.mark.parametrize("preset", ["recurrent-tiny", "hybrid-tiny"])
def test_a_memory_with_a_state_is_found_out_and_keeps_nothing(preset: str, tmp_path: Path) -> None:
    """It cannot go back, so that nothing is shared, saved or left behind."""
    path = write_model(tmp_path / "model.gguf", PRESETS[preset])
    backend = LlamaBackend.load(path, n_ctx=512, n_slots=2, n_batch=64, threads=1)
    assert not backend.limits.can_go_back
    assert not backend.limits.leaf_ids
    assert backend.arm() is None
    backend.close()


def test_set_questions_are_answered_the_same() -> None:
    """Off, on, and with leaves, pages and places taken away and verbs failing at random: each token."""
    questions = [question for _, question, _ in set_questions()][::60]
    texts = [f"{SHARED}{prompt(question)}" for question in questions]
    without, _ = answers(texts, 0)
    for budget, seed in ((BUDGET, None), (TIGHT, 1)):
        found, happened = answers(texts, budget, seed)
        assert found == without
        assert happened["tokens that were there"] > 50 * len(texts)


def test_a_difference_is_held_against_placement() -> None:
    """Two tokens that are far apart are in no order by where cells lie."""
    texts = [f"{SHARED}{prompt('What is 2 + 2?')}"]
    ((answer,), _) = answers(texts, 0)
    wrong = [*answer[:1], answer[1] + 1, *answer[2:]]
    (found,) = differences(texts, [answer], [wrong])
    assert (found.place, found.without, found.answered) == (1, answer[1], answer[1] + 1)
    assert found.apart > 1.0
    assert not found.by_placement
    assert not list(differences(texts, [answer], [answer]))
