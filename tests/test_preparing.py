"""What a request needs is prepared in one call; only shapes that nobody knows are compiled in a place of their own."""

from __future__ import annotations

import pytest
from attrs import evolve

from uma_trio.text.chat import Message, Tool
from uma_trio.text.frontend import Chat, FrontEnd, Preparation
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.shape import Shape, Unconstrainable, Unknown
from uma_trio_sim.fake import CHATML, FakeVocabulary

SHAPE = Shape("schema", '{"type": "object"}')
HELLO = Chat((Message("user", "hello"),))
TOOL = Tool("look", parameters={"properties": {"where": {"type": "string"}}})


class Counting(FrontEnd):
    """Counts how often it makes tokens of what was asked."""

    def __init__(self) -> None:
        super().__init__(FakeVocabulary(), CHATML)
        self.n = 0

    def tokens_of(self, prompt: object, whose: object = None):  # type: ignore[no-untyped-def, override]
        """Count, and make tokens."""
        self.n += 1
        return super().tokens_of(prompt, whose)  # type: ignore[arg-type]


def test_a_chat_with_a_known_shape_takes_one_call() -> None:
    """Tokens, a constraint for each answer, and what reads it."""
    front_end = Counting()
    front_end.grammarian.follow(SHAPE)
    found = Preparation(front_end, HELLO, shape=SHAPE, n=2).finish()
    assert [each.constraint is not None for each in found] == [True, True]
    assert found[0].constraint is not found[1].constraint
    tokens = front_end.tokens_of(HELLO).tokens
    assert found[0].tokens.tolist() == tokens.tolist()


def test_what_is_unknown_is_compiled_apart_and_nothing_is_done_twice() -> None:
    """First the tools, then the grammar of their calls; the text was tokenised once."""
    front_end = Counting()
    preparation = Preparation(front_end, evolve(HELLO, tools=(TOOL,)))
    compiled = 0
    while True:
        try:
            (found,) = preparation.finish()
            break
        except Unknown:
            compiled += 1
            preparation.compile()
    assert (front_end.n, compiled) == (1, 2)
    assert found.constraint is not None
    assert found.parser is not None


@pytest.mark.parametrize("prompt", ["hello", HELLO], ids=["text", "chat"])
def test_who_asks_for_no_shape_has_no_compiler_made(prompt: str | Chat) -> None:
    """It takes megabytes, and a second to import."""
    front_end = Counting()
    (found,) = Preparation(front_end, prompt).finish()
    assert found.constraint is None
    assert front_end._grammarian is None


def test_a_shape_that_cannot_be_enforced_is_named_as_the_request_calls_it() -> None:
    """So that the refusal says which field is wrong."""
    shape = Shape("schema", '{"type": "array", "uniqueItems": true}', "response_format")
    preparation = Preparation(Counting(), "hello", shape=shape)
    with pytest.raises(Unknown):
        preparation.finish()
    with pytest.raises(Unconstrainable):
        preparation.compile()
    assert preparation.field == "response_format"


def test_a_model_without_a_template_renders_no_chat() -> None:
    """Its reason is in the exception."""
    with pytest.raises(Unrenderable, match="no chat template"):
        Preparation(FrontEnd(FakeVocabulary(), None), HELLO).finish()
