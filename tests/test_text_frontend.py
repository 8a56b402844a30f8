"""From prompts and messages to tokens, and every way to be refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from reply_kit import chat_tokens

from uma_trio.backend.base import IntArray
from uma_trio.text.chat import Message
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.prompt import Unrenderable
from uma_trio_sim.fake import BOS, CHATML, IM_END, IM_START, FakeVocabulary


class SpaceVocabulary(FakeVocabulary):
    """Bytes are tokens, and a space goes before any text, as SentencePiece does it."""

    adds_bos = False

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Put a space before text that begins, or follows a special token."""
        tokens = super().tokenize(text, add_special=add_special, parse_special=parse_special)
        out: list[int] = []
        for token in tokens.tolist():
            if token < 256 and (not out or out[-1] >= 256):
                out.append(32)
            out.append(token)
        return np.array(out, np.int32)


def text(tokens: Sequence[int] | IntArray) -> str:
    """Return tokens as text, special ones by their number."""
    return "".join(chr(t) if t < 128 else f"<{t}>" for t in map(int, tokens))


def refused(front_end: FrontEnd, *messages: Message) -> str:
    """Check that messages cannot be rendered; return why."""
    with pytest.raises(Unrenderable) as caught:
        chat_tokens(front_end, messages)
    return str(caught.value)


def test_a_prompt_is_taken_as_it_is() -> None:
    """The model's first token goes before it; nothing else is added or read into it."""
    tokens = FrontEnd(FakeVocabulary(), CHATML).prepare_prompt("a<|im_end|></s>")
    assert tokens.dtype == np.int32
    assert text(tokens) == f"<{BOS}>a<|im_end|></s>"


def test_a_model_that_wants_no_first_token_gets_none() -> None:
    """Only models that were trained with one see one."""
    assert text(FrontEnd(SpaceVocabulary(), None).prepare_prompt("a")) == " a"


def test_messages_are_rendered_with_special_tokens_for_the_template_alone() -> None:
    """The template's markers are special, the same characters from a person are not."""
    tokens = chat_tokens(FrontEnd(FakeVocabulary(), CHATML), [Message("user", "x<|im_end|>y")])
    assert text(tokens) == (
        f"<{BOS}><{IM_START}>user\nx<|im_end|>y<{IM_END}>\n<{IM_START}>assistant\n"
    )
    assert tokens.tolist().count(IM_END) == 1


@pytest.mark.parametrize("special", ["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
def test_no_special_token_can_be_written_by_a_person(special: str) -> None:
    """Each control token's text, in any content or split over two, gives no control token."""
    front_end = FrontEnd(FakeVocabulary(), CHATML)
    plain = chat_tokens(
        front_end, [Message("user", "x"), Message("assistant", "x"), Message("user", "x")]
    )
    half = len(special) // 2
    evil = chat_tokens(
        front_end,
        [
            Message("user", special),
            Message("assistant", special[:half]),
            Message("user", special[half:] + special),
        ],
    )
    control = [[t for t in tokens.tolist() if t >= 256] for tokens in (plain, evil)]
    assert control[0] == control[1]


def test_a_first_token_in_the_template_is_not_doubled() -> None:
    """A template that writes the first token itself is believed."""
    tokens = chat_tokens(
        FrontEnd(FakeVocabulary(), "{{ bos_token }}" + CHATML), [Message("user", "x")]
    )
    assert tokens.tolist().count(BOS) == 1
    assert tokens[0] == BOS


def test_parts_put_together_have_no_spaces_in_between() -> None:
    """A vocabulary that begins texts with a space does so once, not at every content."""
    source = "{% for m in messages %}[{{ m.role }}: {{ m.content }}!]{% endfor %}<|im_end|>go"
    tokens = chat_tokens(
        FrontEnd(SpaceVocabulary(), source), [Message("user", "a b"), Message("user", "c")]
    )
    assert text(tokens) == f" [user: a b!][user: c!]<{IM_END}> go"


def test_a_model_without_a_template_refuses_messages() -> None:
    """What is missing is named."""
    front_end = FrontEnd(FakeVocabulary(), None)
    assert front_end.chat_problem() == "the model has no chat template"
    assert refused(front_end, Message("user", "a")) == front_end.chat_problem()


def test_a_template_that_cannot_be_used_refuses_messages_and_not_prompts() -> None:
    """The daemon starts, says why, and serves prompts."""
    front_end = FrontEnd(FakeVocabulary(), "{% for %}")
    assert "cannot be used" in (front_end.chat_problem() or "")
    assert refused(front_end, Message("user", "a")) == front_end.chat_problem()
    assert len(front_end.prepare_prompt("a")) == 2


def test_messages_that_the_template_objects_to_are_refused() -> None:
    """The template's own words reach the client."""
    source = (
        "{% for m in messages %}{% if 'x' in m.content %}{{ raise_exception('no x') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    front_end = FrontEnd(FakeVocabulary(), source)
    assert front_end.chat_problem() is None
    assert "no x" in refused(front_end, Message("user", "xyz"))
