"""The bundled model gives one seed one answer, and what drafts change is rounding."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from fuzz.answers import BUDGET, Run
from fuzz.seeds import twice

pytestmark = pytest.mark.real

PARAGRAPH = "The fox ran through the wood and looked for the old red house by the river."
MORE = ("Then a bear came.", "The sun was warm.", "What did they do next?", "A bird sang.")


def test_a_seed_alone_has_one_answer() -> None:
    """To a request that says nothing of drafts, as docs/explained/memory.md has it."""
    assert list(twice(6, 60, None)) == [None] * 6


def test_each_difference_under_a_seed_with_drafts_is_a_logit_that_moved_the_border() -> None:
    """Both tokens were drawn with the number of their place."""
    assert all(one is None or one.explained for one in twice(4, 40, "auto"))


def test_each_difference_of_likeliest_tokens_with_drafts_is_a_logit_that_moved() -> None:
    """Each is the likeliest of its own row, also where drafts made the batch another one."""
    assert all(one is None or one.explained for one in twice(6, 100, None, 0.0))


def conversations(budget: int, *, with_answers: bool) -> list[list[int]]:
    """Hold four conversations of six turns, one after another; return the answers."""
    run, answers = Run(budget), []
    pieces = run.backend.vocabulary.pieces()
    for n in range(4):
        text = " ".join([f"Story {n}.", *[PARAGRAPH] * 18])
        for turn in range(6):
            text = f"{text} {MORE[(n + turn) % len(MORE)]}"
            (answer,) = run.ask([text])
            answers.append(answer)
            if with_answers:
                text += b"".join(pieces[token] for token in answer).decode(errors="replace")
    run.close()
    return answers


@pytest.mark.parametrize(("with_answers", "at_least"), [(False, 23), (True, 20)])
def test_cached_turns_of_conversations_equal_those_without_the_cache(
    with_answers: bool, at_least: int
) -> None:
    """Of four conversations of six repetitive turns, as many as docs/explained/memory.md says, but two."""
    without = conversations(0, with_answers=with_answers)
    cached = conversations(BUDGET, with_answers=with_answers)
    equal = sum(one == two for one, two in zip(without, cached, strict=True))
    print(f"{equal} of {len(cached)} equal")
    assert equal >= at_least


def test_a_prompt_that_grows_is_answered_alike_with_and_without_the_cache() -> None:
    """Repetitive text, one request after another: cells lie in the same places, in the same order."""
    found = []
    for budget in (0, BUDGET):
        run, text = Run(budget), " ".join([PARAGRAPH] * 18)
        answers = []
        for more in MORE:
            text = f"{text} {more}"
            answers += run.ask([text])
        run.close()
        assert (run.happened["tokens that were there"] > 0) is (budget > 0)
        found.append(answers)
    assert found[0] == found[1]
