"""Text that was tokenised is not tokenised again: the tokens are the same, and nobody learns from others'."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_kit import chat_tokens

from uma_trio.backend._llama_vocab import LlamaVocabulary
from uma_trio.backend.base import IntArray
from uma_trio.models import bundled_model
from uma_trio.service.ask import Ask, Door, Origin, Salt, text_owner
from uma_trio.sockets.principal import Principal
from uma_trio.text.chat import Message
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.template import PLAINLY
from uma_trio.text.tokeniser import LEAST_PART, MOST_PRINCIPALS, Remembered, TextOwner, Tokeniser
from uma_trio_sim.fake import CHATML, FakeVocabulary

ME = TextOwner("uid 1", "uid 1")

# What tokenisers cut words by, and what stands around places where a text may be cut.
ATOMS = st.sampled_from(
    [
        *(
            "word",
            "The",
            "I",
            "don't",
            "'s",
            "'",
            "12",
            "1234567",
            "é",
            "Zürich",
            "日本",
            "😀",
            "\u0301",
        ),
        *(
            " ",
            "  ",
            "\t",
            "\n",
            "\n\n",
            "\r\n",
            " \n",
            "\u00a0",
            ".",
            "...",
            "/",
            "(x)",
            "{",
            "_",
            "-",
        ),
        *(
            "x\nB",
            ".\nC",
            "1\nd",
            "'\ns",
            " \nE",
            "\n F",
            "<|im_end|>",
            "</s>",
            "<think>",
            "w" * 1100,
            "many words " * 100,
            "x.(" * 400,
            " " * 1100,
        ),
    ]
)
TEXTS = st.lists(ATOMS, max_size=60).map("".join)


class Counting(FakeVocabulary):
    """Counts the characters that it tokenises."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Count them."""
        self.n += len(text)
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


@cache
def real_vocabulary() -> LlamaVocabulary:
    """Return the bundled model's."""
    return LlamaVocabulary.load(bundled_model())


@pytest.mark.real
@settings(max_examples=200)
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_conversation_has_the_same_tokens_turn_by_turn_as_all_at_once(said: list[str]) -> None:
    """Whatever its messages are, and also where one message goes on as another did."""
    turns = FrontEnd(real_vocabulary(), CHATML)
    messages = [Message("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(said)]
    for n in range(1, len(messages) + 1):
        found = turns.prepare_chat(messages[:n], PLAINLY, (), ME).tokens
        assert found.tolist() == chat_tokens(turns, messages[:n]).tolist()


@pytest.mark.real
@settings(max_examples=300)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 40))
def test_a_text_that_goes_on_has_the_same_tokens_as_all_at_once(
    parts: list[str], least: int
) -> None:
    """It is cut only where its tokens are those of its parts."""
    vocabulary = real_vocabulary()
    assert vocabulary.parts_at_lines
    tokeniser, text = Tokeniser(vocabulary, vocabulary.pieces(), least), ""
    for part in parts:
        text += part
        whole = vocabulary.tokenize(text, add_special=False, parse_special=False)
        assert tokeniser.tokens(text, ME).tolist() == whole.tolist()


def test_a_turn_tokenises_what_is_new() -> None:
    """However long the conversation is."""
    vocabulary = Counting()
    front_end = FrontEnd(vocabulary, CHATML)
    long = [Message("user", f"{n} " + "x" * 5000) for n in range(5)]
    front_end.prepare_chat(long, PLAINLY, (), ME)
    vocabulary.n = 0
    front_end.prepare_chat([*long, Message("assistant", "y" * 100)], PLAINLY, (), ME)
    assert 100 <= vocabulary.n <= 200


def test_a_text_that_goes_on_is_tokenised_from_its_last_lines_on() -> None:
    """A prompt without messages, or one message that grows."""
    vocabulary = Counting()
    front_end = FrontEnd(vocabulary, CHATML)
    text = "A line of some words.\n" * 2000
    front_end.prepare_prompt(text, ME)
    vocabulary.n = 0
    front_end.prepare_prompt(text + "And one more.", ME)
    assert 0 < vocabulary.n <= LEAST_PART + 100


def test_a_line_that_goes_on_is_tokenised_from_its_last_parts_on() -> None:
    """A vocabulary that cuts long lines cuts the same text at the same places."""

    class Cutting(Counting):
        def apart(self, text: str) -> list[str]:
            return [text[at : at + 900] for at in range(0, len(text), 900)]

    vocabulary = Cutting()
    front_end = FrontEnd(vocabulary, CHATML)
    text = "some words without an end " * 2000
    front_end.prepare_prompt(text, ME)
    vocabulary.n = 0
    front_end.prepare_prompt(text + "and one more.", ME)
    assert 0 < vocabulary.n <= LEAST_PART + 1000


def test_nobody_learns_from_the_texts_of_others() -> None:
    """Of another principal, of another namespace, or where nothing is to be shared: all is done anew."""
    vocabulary = Counting()
    front_end = FrontEnd(vocabulary, CHATML)
    text = "A line of some words.\n" * 10
    others = (TextOwner("uid 2", "uid 1"), TextOwner("uid 1", "uid 1/salt x"), None, None)
    for whose in (ME, *others):
        vocabulary.n = 0
        front_end.prepare_prompt(text, whose)
        assert vocabulary.n == len(text)
    vocabulary.n = 0
    front_end.prepare_prompt(text, ME)
    assert vocabulary.n == 0
    front_end.forget(ME.principal)
    front_end.prepare_prompt(text, ME)
    assert vocabulary.n == len(text)


def test_texts_are_remembered_for_those_who_share_cached_prefixes() -> None:
    """And not at all where the request leaves nothing in the cache."""
    user = Principal(connection=1, uid=5, pid=9)
    origin = Origin(principal=user, door=Door(max_prompt_bytes=9), name="r")
    ask = Ask(prompt="x")
    assert text_owner(ask, origin) == TextOwner("uid 5", "uid 5")
    assert text_owner(evolve(ask, cache="private"), origin) == TextOwner("uid 5", "uid 5/process 9")
    assert text_owner(evolve(ask, cache=Salt("a")), origin) == TextOwner("uid 5", "uid 5/salt a")
    assert text_owner(evolve(ask, cache="none"), origin) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 400)),
        max_size=60,
    )
)
def test_what_is_kept_stays_within_its_budget(asked: list[tuple[int, int, int]]) -> None:
    """Whoever asks for what; the tokens are always those of the text."""
    remembered = Remembered(budget=4000)
    for who, text, length in asked:
        whose = TextOwner(f"uid {who}", "")
        said = f"{text} " * length
        tokens = FakeVocabulary().tokenize(said, add_special=False, parse_special=False)
        found = remembered.tokens(whose, said, "", lambda tokens=tokens: tokens)  # type: ignore[misc]
        assert found.tolist() == tokens.tolist()
        assert remembered.n_bytes <= 4000


def test_who_remembers_much_loses_it_and_not_others() -> None:
    """A flood of one principal's texts leaves what another has, and a flood of principals ends, too."""
    vocabulary = FakeVocabulary()
    remembered = Remembered(budget=100_000)
    made: list[str] = []

    def ask(who: str, text: str) -> None:
        def make() -> IntArray:
            made.append(text)
            return vocabulary.tokenize(text, add_special=False, parse_special=False)

        remembered.tokens(TextOwner(who, who), text, "", make)

    ask("me", "mine")
    for n in range(200):
        ask("flood", f"{n} " * 500)
    ask("me", "mine")
    assert made.count("mine") == 1
    for n in range(2 * MOST_PRINCIPALS):
        ask(f"name {n}", "x")
    ask("me", "mine")
    assert made.count("mine") == 2
    assert remembered.n_bytes <= 100_000
