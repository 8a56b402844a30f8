"""Recorded texts told again: with drafts and without, on a modelled machine."""

from __future__ import annotations

import numpy as np
import pytest

from benches.retelling import retell
from benches.scenes import drafts as scene
from uma_trio_sim.machine import built_in
from uma_trio_sim.simulation import Told


def told(prompt: str, answer: str) -> Told:
    """Return a text with a token for each byte."""
    cut = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in (prompt, answer)]
    return Told(*cut)


LINES = [f"line {n}: {(n * 7919) % 9973} apples" for n in range(40)]
COPY = told("\n".join(LINES), "\n".join(LINES).replace("apples", "pears"))
NOISE = told("a", bytes(np.random.default_rng(1).integers(33, 126, 400).astype(np.uint8)).decode())


def test_a_copy_is_told_much_quicker_with_drafts() -> None:
    """Most tokens of it are guessed right, and several come at once."""
    plain = retell([COPY], built_in("q4_0"), drafts=False)
    drafted = retell([COPY], built_in("q4_0"))
    assert plain.drafted == 0
    assert drafted.tokens_s > 2.0 * plain.tokens_s
    assert drafted.accepted > 0.6 * drafted.drafted


def test_what_cannot_be_guessed_is_told_no_slower() -> None:
    """At one stream and at three, where a row is free."""
    for readers in (1, 3):
        texts = [NOISE] * readers
        plain = retell(texts[:1], built_in("q4_0"), readers=readers, drafts=False)
        drafted = retell(texts[:1], built_in("q4_0"), readers=readers)
        assert drafted.tokens_s >= 0.98 * plain.tokens_s


def misleading(n: int, seed: int) -> Told:
    """Return a text of four words in which no two words are followed by what followed them last."""
    draw, last = np.random.default_rng(seed), {}
    said = [0, 1]
    while len(said) < n:
        pair = said[-2], said[-1]
        word = int(draw.choice([w for w in range(4) if w != last.get(pair)]))
        last[pair] = word
        said.append(word)
    tokens = np.array(said, np.int32) + 97
    return Told(tokens[: n // 3], tokens[n // 3 :])


@pytest.mark.parametrize("readers", [1, 4])
def test_a_text_that_is_made_to_be_guessed_wrongly_loses_little(readers: int) -> None:
    """At most two in a hundred, though each of its matches goes on otherwise than the last time."""
    texts = [misleading(1500, seed) for seed in range(2)]
    plain = retell(texts, built_in("q4_0"), readers=readers, drafts=False)
    assert retell(texts, built_in("q4_0"), readers=readers).tokens_s >= 0.98 * plain.tokens_s


def test_an_answer_told_before_is_told_again_from_the_pool() -> None:
    """The second time nearly all of it is guessed."""
    once = retell([NOISE], built_in("q4_0"))
    twice = retell([NOISE, NOISE], built_in("q4_0"))
    assert twice.accepted > once.accepted + 300


def test_a_change_is_told_as_blocks_as_a_whole_and_step_by_step() -> None:
    """Each text ends with what changes the file; tokens are the same wherever they stand."""
    before = "".join(f"line {n}\n" for n in range(30))
    edit = scene.Edit("Say pear", "a.py", before, before.replace("line 7\n", "pear\n"))
    (block,), (file,), (step,) = scene.blocks(edit), scene.whole(edit), scene.agent(edit)
    assert "line 7\nline 8" in block.answer.split("=======")[0]
    assert "pear\nline 8" in block.answer.split("=======")[1]
    assert file.answer == edit.after
    assert "pear" in step.answer
    first, second = scene.as_tokens([file, file])
    assert first.answer.tolist() == second.answer.tolist()
    row = scene.measured("whole", scene.as_tokens([file]), "q4_0", 1)
    assert row["times"] > 1.5
