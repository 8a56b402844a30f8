"""A budget of reasoning in harmony, whose reasoning is a message among others."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from reply_kit import MarkedVocabulary

from uma_trio.text.chat import ToolChoice
from uma_trio.text.constrain import Grammarian
from uma_trio.text.derivation import Derivation
from uma_trio.text.grammars import JSON
from uma_trio.text.replies import ReplyFormat, ReplyParser, collect
from uma_trio.text.replies.format import CallSyntax
from uma_trio.text.replies.grammar import Offer
from uma_trio.text.replying import Loosened, Replies
from uma_trio.text.shape import Shape
from uma_trio.text.thinking import Bounded

HARMONY = ReplyFormat("harmony", calls=CallSyntax(style="harmony"))
THOUGHT, END = "<|channel|>analysis<|message|>", "<|end|>"
NEXT, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}"
NO_TOOLS = Loosened((), ())


class HarmonyVocabulary(MarkedVocabulary):
    """Its markers are gpt-oss's."""

    markers = (
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
        *("<|constrain|>", "<|call|>", "<|return|>"),
    )


VOCABULARY = HarmonyVocabulary()
REPLIES = Replies(VOCABULARY, Derivation(HARMONY))
GRAMMARIAN = Grammarian(VOCABULARY)


def bounded(budget: int, shape: Shape | None = None, loosened: Loosened = NO_TOOLS) -> Bounded:
    """Return what bounds a reply."""
    made = REPLIES.constraint(GRAMMARIAN, shape, loosened, ToolChoice(), budget, thinking=False)
    assert isinstance(made, Bounded)
    return made


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a reply."""
    found = VOCABULARY.tokenize(text, add_special=False, parse_special=True)
    return [int(token) for token in found]


def said(made: Bounded, wants: str) -> str:
    """Return what a reply becomes whose model wants to say `wants`.

    Where that is refused the only token that is allowed is taken, and what it wants comes behind.
    """
    left, text = tokens_of(wants), ""
    while left:
        if made.allows(left[0]):
            token = left.pop(0)
        else:
            (token,) = made.allowed().tolist()
        assert token in made.allowed()
        made.accept(token)
        text += REPLIES.pieces[token].decode()
    return text


def test_reasoning_within_its_budget_is_left_alone() -> None:
    """All that follows, too."""
    wants = THOUGHT + "why" + END + NEXT + FINAL + "so"
    assert said(bounded(3), wants) == wants


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_ends_the_message_of_reasoning(budget: int) -> None:
    """It is closed, and the next message begun; what the model says then is free."""
    made = bounded(budget)
    for token in tokens_of("<|channel|>"):
        made.accept(token)
    if not budget:  # there is no reasoning at all: the channel has to be another
        assert not made.allows(ord("a"))
        assert made.allows(ord("f"))
        return
    made = bounded(budget)
    text = said(made, THOUGHT + "w" * budget)
    for token in tokens_of(END + NEXT):
        assert made.allowed().tolist() == [token]
        made.accept(token)
    text += END + NEXT + said(made, FINAL + "so")
    parser = ReplyParser(HARMONY)
    found = collect([*parser.feed(text), *parser.finish()])
    assert (found.reasoning, found.content) == ("w" * budget, "so")


def test_messages_of_reasoning_have_one_budget_together() -> None:
    """What the first one left is for the second, and then there is no third."""
    made = bounded(4)
    said(made, THOUGHT + "ab" + END + NEXT + THOUGHT + "cd")
    assert made.allowed().tolist() == tokens_of(END)
    said(made, END + NEXT + "<|channel|>")
    assert not made.allows(ord("a"))
    assert ord("a") not in made.allowed()
    assert ord("c") in made.allowed()


def test_other_channels_have_no_budget() -> None:
    """An answer may be as long as it likes, and so may what is told before a call."""
    wants = "<|channel|>commentary<|message|>" + "x" * 50 + END + NEXT + FINAL + "y" * 50
    assert said(bounded(0), wants) == wants


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("budget", [0, 3])
def test_a_bounded_reply_keeps_to_its_shape_and_its_budget(seed: int, budget: int) -> None:
    """Whatever of all that is allowed is chosen, and taken back in between."""
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    )
    made, chance, said = bounded(budget, Shape("schema", schema)), random.Random(seed), b""
    while not made.allows(min(VOCABULARY.end_tokens)) and len(said) < 500:
        token = chance.choice(made.allowed().tolist())
        made.accept(token)
        made.take_back()
        assert made.allows(token)
        made.accept(token)
        said += REPLIES.pieces[token]
    parser = ReplyParser(HARMONY)
    found = collect([*parser.feed(said.decode()), *parser.finish()])
    assert json.loads(found.content)["a"] in (1, 2)
    assert len(found.reasoning.encode()) <= budget + 3, "a character is not cut"


def test_a_call_follows_reasoning_that_was_cut_off() -> None:
    """Its arguments are held to their schema as without a budget."""
    schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    offers = Loosened((Offer("look", {**schema, "x-guidance": JSON}),), ())
    made = bounded(2, loosened=offers)
    text = said(made, THOUGHT + "ab") + END + NEXT
    said(made, END + NEXT)
    text += said(made, CALL)
    assert made.allows(min(VOCABULARY.end_tokens))
    parser = ReplyParser(HARMONY)
    found = collect([*parser.feed(text), *parser.finish()])
    assert found.reasoning == "ab"
    assert [(call.name, call.arguments) for call in found.calls] == [("look", "{}")]
