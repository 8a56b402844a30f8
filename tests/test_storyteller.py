"""The storyteller: the corpus keeps its rules, and the bundled model does what it was made for."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest

from models.storyteller import copying, corpus, exchanges, requests
from models.storyteller.stories import Asked, UnluckyError, make_story, mentions
from models.storyteller.words import Noun, article, held_out, world
from uma_trio.models import bundled_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from models.storyteller.runtime import Model


def test_no_story_of_the_corpus_joins_a_held_out_pair() -> None:
    """What the evaluation asks for is never asked for in training."""
    assert corpus.leaks(seed=7, count=300) == 0


def test_a_held_out_request_is_refused_by_the_corpus() -> None:
    """Asking the corpus itself for a held-out pair gives no story."""
    asked = requests.draw_held_out(random.Random(1), "h o")
    assert held_out(*asked.words)
    with pytest.raises(UnluckyError):
        make_story(random.Random(1), asked)


def test_stories_name_what_was_asked_and_stay_short() -> None:
    """Every story says each requested word twice and has 62 to 190 words."""
    rng = random.Random(2)
    for _ in range(60):
        pieces = corpus.document(rng, "story")
        text = next(piece.text for piece in pieces if piece.learnt).removesuffix(corpus.END)
        assert 62 <= len(text.split()) <= 190
        assert not re.search(r"[{}@]", text)
        assert text[-1] in '.!?"'


def test_made_up_words_are_told_about_too() -> None:
    """A noun nobody knows is copied into the story."""
    asked = Asked({"h": Noun("blimber", "blimbers", "animal"), "o": Noun("sorp", "sorps", "odd")})
    story = make_story(random.Random(3), asked)
    assert mentions(story.text, "blimber") >= 2
    assert mentions(story.text, "sorp") >= 2


def test_a_seed_fixes_the_corpus() -> None:
    """The same seed draws the same documents, so the corpus need not be moved."""
    assert corpus.texts(5, 20) == corpus.texts(5, 20)
    assert corpus.texts(5, 20) != corpus.texts(6, 20)


def test_sums_and_quotes_are_right() -> None:
    """The answers the corpus teaches are true."""
    rng = random.Random(4)
    for _ in range(200):
        a, sign, b, result = re.fullmatch(
            r"(\d+) ([-+x]) (\d+) = (\d+)\.", exchanges.small_sum(rng)[1]
        ).groups()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[sign] == int(
            result
        )
    story = make_story(rng, Asked())
    for _ in range(40):
        question, answer = copying.quote(rng, story)
        assert answer in question


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("owl", "an owl"),
        ("unicorn", "a unicorn"),
        ("honest fox", "an honest fox"),
        ("fox", "a fox"),
    ],
)
def test_articles_follow_the_sound(word: str, whole: str) -> None:
    """A and an are chosen by how the word sounds."""
    assert article(word) == whole


def test_every_noun_of_the_world_is_named_once() -> None:
    """No noun is in two lists, or the corpus could not tell a hero from a place."""
    words = [noun.word for noun in world().characters + world().objects + world().places]
    assert len(words) == len(set(words))


def test_the_bundled_file_keeps_to_its_size() -> None:
    """The model that travels with the package stays small."""
    assert bundled_model().stat().st_size <= 10_000_000


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The storyteller in llama.cpp."""
    pytest.importorskip("llama_cpp")
    from models.storyteller.runtime import Model

    loaded = Model(bundled_model())
    yield loaded
    loaded.close()


def _answer(model: Model, request: str) -> tuple[str, bool]:
    prompt = corpus.chat([(request, "")])[0].text
    said = model.greedy(model.tokens(prompt), 300)
    return model.text(said), model.ends(said[-1])


@pytest.mark.real
def test_held_out_stories_contain_what_was_asked_and_end(model: Model) -> None:
    """Stories about pairs never trained on name both things and end by themselves."""
    rng = random.Random("a test")
    for _ in range(3):
        asked = requests.draw_held_out(rng, "h o")
        text, ended = _answer(
            model, f"Tell me a story about {article(asked.words[0])} and {article(asked.words[1])}."
        )
        assert ended
        assert all(mentions(text, word) for word in asked.words), text


@pytest.mark.real
def test_set_questions_are_answered(model: Model) -> None:
    """A sum, a day, a list, a repetition and a request from outside its world."""
    assert _answer(model, "What is 7 + 5?") == ("7 + 5 = 12.", True)
    assert _answer(model, "What day comes after Wednesday?")[0] == "Thursday comes after Wednesday."
    assert len(_answer(model, "Make a list of three animals.")[0].split("\n")) == 3
    assert _answer(model, "Repeat after me: a blue spoon")[0] == "a blue spoon"
    assert "tiny demonstration model" in _answer(model, "What is the capital of France?")[0]


@pytest.mark.real
def test_the_template_is_in_the_file_and_control_tokens_are_single(model: Model) -> None:
    """The file carries a chat template, and its marks are one token each."""
    assert corpus.START in model.template()
    for mark in (corpus.START, corpus.END, corpus.TEXT_END):
        assert len(model.tokens(mark)) == 1
    assert model.ends(model.tokens(corpus.END)[0])
    assert model.ends(model.tokens(corpus.TEXT_END)[0])
