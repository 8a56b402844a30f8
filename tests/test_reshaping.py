"""Conversations that a chat template refuses, in other shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from uma_trio.text.chat import Call, Message
from uma_trio.text.prompt import Unrenderable as Refused
from uma_trio.text.reshaping import Cures, Kind, Kinds, render_accepted, reshaped

USER = Message("user", "Hello")
SYSTEM = Message("system", "Be brief.")
ANSWER = Message("assistant", "Hi.")
OBJECT = '{"city": "Oslo"}'
ONE, TWO = Call("1", "weather", OBJECT), Call("2", "weather", '{"city": "Bergen"}')


def called(*calls: Call, text: str = "", reasoning: str = "") -> Message:
    return Message("assistant", text, calls, reasoning=reasoning)


def result(id_: str | None, text: str = "cold") -> Message:
    return Message("tool", text, call_id=id_)


Check = Callable[[Sequence[Message]], None]


def rendered(
    check: Check, messages: Sequence[Message], cures: Cures | None = None
) -> tuple[Kinds, Sequence[Message], int]:
    """Return the kinds of changes, the accepted messages and the number of attempts."""
    attempts: list[Kinds] = []

    def render(shape: Sequence[Message], kinds: Kinds) -> Sequence[Message]:
        attempts.append(kinds)
        check(shape)
        return shape

    shape, kinds = render_accepted(messages, render, {} if cures is None else cures)
    return kinds, shape, len(attempts)


def alternating(messages: Sequence[Message]) -> None:
    """Refuse what Mistral's and Gemma's templates do."""
    rest = messages[1:] if messages and messages[0].role == "system" else messages
    turns = [each for each in rest if each.role != "tool" and not each.calls]
    for at, message in enumerate(turns):
        if message.role != ("user", "assistant")[at % 2]:
            raise Refused("roles must alternate user/assistant/user/assistant/...")


def systemless(messages: Sequence[Message]) -> None:
    if any(message.role == "system" for message in messages):
        raise Refused("System role not supported")
    alternating(messages)


def one_call(messages: Sequence[Message]) -> None:
    if any(len(message.calls) > 1 for message in messages):
        raise Refused("This model only supports single tool-calls at once!")


def text_or_call(messages: Sequence[Message]) -> None:
    """Refuse what gpt-oss's template does."""
    if any(message.calls and message.content and message.reasoning for message in messages):
        raise Refused("Cannot pass both content and thinking")


def no_orphan(messages: Sequence[Message]) -> None:
    """Refuse what Apertus' and MiniMax' templates do."""
    is_inside = False
    for message in messages:
        if message.role != "tool":
            is_inside = bool(message.calls)
        elif not is_inside:
            raise Refused("Tool message outside of assistant")


def no_empty(messages: Sequence[Message]) -> None:
    if any(not message.content and not message.calls for message in messages):
        raise Refused("Assistant message must have a string or a list of tool calls.")


def object_arguments(messages: Sequence[Message]) -> None:
    for message in messages:
        for call in message.calls:
            if not isinstance(json.loads(call.arguments or "{}"), dict):
                raise Refused("Can only get item pairs from a mapping.")


def anything(messages: Sequence[Message]) -> None:
    pass


# --- each kind ---


def test_an_accepted_conversation_is_unchanged() -> None:
    messages = [SYSTEM, SYSTEM, ANSWER, USER, USER]
    kinds, shape, n = rendered(anything, messages)
    assert (kinds, list(shape), n) == ((), messages, 1)


@pytest.mark.parametrize(
    ("check", "messages", "kinds", "expected"),
    [
        (
            alternating,
            [SYSTEM, USER, ANSWER, USER, ANSWER, SYSTEM],
            (Kind.SYSTEM_TO_USER,),
            [SYSTEM, USER, ANSWER, USER, ANSWER, Message("user", "Be brief.")],
        ),
        (
            alternating,
            [SYSTEM, SYSTEM, USER],
            (Kind.JOIN,),
            [Message("system", "Be brief.\n\nBe brief."), USER],
        ),
        (
            alternating,
            [USER, USER, called(ONE, text="A", reasoning="a"), called(TWO, text="B")],
            (Kind.JOIN,),
            [Message("user", "Hello\n\nHello"), called(ONE, TWO, text="A\n\nB", reasoning="a")],
        ),
        (alternating, [ANSWER, USER], (Kind.EMPTY_USER,), [Message("user"), ANSWER, USER]),
        (
            alternating,
            [USER, called(ONE), result("1"), USER],
            (Kind.EMPTY_ASSISTANT,),
            [USER, called(ONE), result("1"), Message("assistant"), USER],
        ),
        (
            no_orphan,
            [USER, ANSWER, result("1"), called(ONE), result("2"), result("1")],
            (Kind.RESULT_TO_USER,),
            [USER, ANSWER, Message("user", "cold"), called(ONE), result("2"), result("1")],
        ),
        (
            no_empty,
            [Message("user"), Message("assistant", reasoning="a"), called(ONE), result("1")],
            (Kind.FILL_EMPTY,),
            [
                Message("user", " "),
                Message("assistant", " ", reasoning="a"),
                called(ONE),
                result("1"),
            ],
        ),
        (
            systemless,
            [SYSTEM, USER, ANSWER],
            (Kind.SYSTEM_INTO_USER,),
            [Message("user", "Be brief.\n\nHello"), ANSWER],
        ),
        (
            systemless,
            [SYSTEM, ANSWER, USER],
            (Kind.SYSTEM_INTO_USER,),
            [Message("user", "Be brief."), ANSWER, USER],
        ),
        (
            one_call,
            [USER, called(ONE, TWO, text="A", reasoning="a"), result("2"), result("1"), ANSWER],
            (Kind.SPLIT_CALLS,),
            [
                *(USER, called(ONE, text="A", reasoning="a"), result("1")),
                *(called(TWO), result("2"), ANSWER),
            ],
        ),
        (
            one_call,
            [called(ONE, TWO, ONE), result(None, "a"), result("x", "b"), result("1", "c")],
            (Kind.SPLIT_CALLS,),
            [
                *(called(ONE), result("1", "c"), called(TWO), result(None, "a")),
                *(called(ONE), result("x", "b")),
            ],
        ),
        (
            text_or_call,
            [USER, called(ONE, text="Let me look.", reasoning="Hm")],
            (Kind.SPLIT_TEXT,),
            [USER, Message("assistant", "Let me look."), called(ONE, reasoning="Hm")],
        ),
        (
            text_or_call,
            [USER, called(ONE, text="\n\n", reasoning="Hm")],
            (Kind.SPLIT_TEXT,),
            [USER, called(ONE, reasoning="Hm")],
        ),
    ],
)
def test_a_refused_conversation_is_changed_in_one_way(
    check: Check, messages: list[Message], kinds: tuple[Kind, ...], expected: list[Message]
) -> None:
    found, shape, _ = rendered(check, messages)
    assert found == kinds
    assert list(shape) == expected


@pytest.mark.parametrize("arguments", ['{"a":', "[1, 2]", "null", '"x"', "1" * 30_000])
def test_arguments_that_are_no_object_are_wrapped(arguments: str) -> None:
    kinds, (_, call), _ = rendered(_is_wrapped, [USER, called(Call("1", "f", arguments), ONE)])
    assert kinds == (Kind.WRAP_ARGUMENTS,)
    assert json.loads(call.calls[0].arguments) == {"arguments": arguments}
    assert call.calls[1] is ONE


def _is_wrapped(messages: Sequence[Message]) -> None:
    try:
        object_arguments(messages)
    except ValueError as error:
        raise Refused(str(error)) from error


def test_text_is_dropped_if_it_cannot_be_kept_in_front_of_the_call() -> None:
    def check(messages: Sequence[Message]) -> None:
        text_or_call(messages)
        for one, other in pairwise(messages):
            if one.role == other.role == "assistant":
                raise Refused("two assistant messages")

    kinds, shape, _ = rendered(check, [USER, called(ONE, text="Let me look.", reasoning="Hm")])
    assert kinds == (Kind.DROP_TEXT,)
    assert list(shape) == [USER, called(ONE, reasoning="Hm")]


# --- several together ---


def test_changes_that_only_help_together_are_combined() -> None:
    """Each alone leads to the same refusal."""
    kinds, shape, _ = rendered(alternating, [SYSTEM, ANSWER, USER, SYSTEM, USER])
    assert kinds == (Kind.SYSTEM_TO_USER, Kind.JOIN, Kind.EMPTY_USER)
    assert [each.role for each in shape] == ["system", "user", "assistant", "user"]


def test_changes_that_solve_different_refusals_are_combined_and_no_others() -> None:
    def check(messages: Sequence[Message]) -> None:
        one_call(messages)
        text_or_call(messages)
        systemless(messages)

    conversation = [SYSTEM, USER, USER, called(ONE, TWO, text="A", reasoning="a")]
    kinds, _, _ = rendered(check, [*conversation, result("1"), result("2")])
    assert set(kinds) == {Kind.JOIN, Kind.SYSTEM_INTO_USER, Kind.SPLIT_CALLS, Kind.SPLIT_TEXT}
    kinds, _, _ = rendered(check, [SYSTEM, USER, called(ONE, TWO), result("1"), result("2")])
    assert kinds == (Kind.SYSTEM_INTO_USER, Kind.SPLIT_CALLS)


def test_what_cannot_be_rendered_has_the_reason_of_the_unchanged_conversation() -> None:
    def check(messages: Sequence[Message]) -> None:
        raise Refused(f"{len(messages)} messages are not supported")

    with pytest.raises(Refused, match="2 messages"):
        rendered(check, [ANSWER, USER])


def test_what_is_inserted_is_changed_again_if_it_is_refused() -> None:
    """As Ministral's template refuses an empty answer between a result and the user."""

    def check(messages: Sequence[Message]) -> None:
        no_empty(messages)
        alternating(messages)

    kinds, shape, _ = rendered(check, [USER, called(ONE), result("1"), USER])
    assert kinds == (Kind.EMPTY_ASSISTANT, Kind.FILL_EMPTY)
    assert shape[3] == Message("assistant", " ")


# --- what is remembered ---


def test_the_next_conversation_begins_with_what_was_accepted() -> None:
    cures: Cures = {}
    messages = [SYSTEM, ANSWER, USER, SYSTEM, USER]
    first = rendered(alternating, messages, cures)
    again = rendered(alternating, [*messages, ANSWER, USER], cures)
    assert first[2] > again[2] == 2
    assert again[0] == first[0]


def test_an_accepted_conversation_is_unchanged_whatever_was_refused_before() -> None:
    cures: Cures = {}
    rendered(one_call, [USER, called(ONE, TWO)], cures)
    assert rendered(one_call, [USER, USER], cures)[0] == ()


def test_refusals_have_a_cure_each() -> None:
    cures: Cures = {}

    def check(messages: Sequence[Message]) -> None:
        one_call(messages)
        alternating(messages)

    rendered(check, [ANSWER, USER], cures)
    rendered(check, [USER, called(ONE, TWO)], cures)
    assert rendered(check, [ANSWER, USER], cures)[0] == (Kind.EMPTY_USER,)
    assert rendered(check, [USER, called(ONE, TWO)], cures)[2] == 2


def test_what_is_remembered_is_bounded() -> None:
    cures: Cures = {}

    def attempts(reason: str) -> int:
        def check(messages: Sequence[Message]) -> None:
            if messages[0].role == "system":
                raise Refused(reason)

        return rendered(check, [SYSTEM, ANSWER, ANSWER, USER], cures)[2]

    for n in range(1, 150):
        assert attempts("a" * n) > 2
    assert len(cures) == 32
    assert attempts("Message 7 is wrong" + "." * 10_000) > 2
    assert attempts("Message 7 is wrong") > 2
    assert attempts("Message 12 is wrong") == 2
    assert max(map(len, cures)) <= 200


# --- any conversation ---

TEXTS = st.sampled_from(["", "a", "b\n", " c", "\n"])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    for number in range(draw(st.integers(0, 12))):
        role = draw(st.sampled_from(["system", "user", "assistant", "assistant", "tool", "tool"]))
        text = draw(TEXTS) and f"{draw(TEXTS)}t{number}"
        if role == "tool":
            id_ = draw(st.sampled_from(["1", "2", "3", None]))
            messages.append(Message(role, text, call_id=id_))
            continue
        calls: list[Call] = []
        if role == "assistant":
            for ordinal in range(draw(st.integers(0, 3))):
                arguments = draw(st.sampled_from([OBJECT, "", "{", "[]", "null"]))
                calls.append(Call(draw(st.sampled_from("123")), f"f{number}.{ordinal}", arguments))
        reasoning = draw(TEXTS) if role == "assistant" else ""
        messages.append(Message(role, text, tuple(calls), reasoning=reasoning))
    return messages


KINDS = st.sets(st.sampled_from(list(Kind)))


def contents(messages: Sequence[Message]) -> list[str]:
    """Return the texts that are not blank, in order; results of tools apart."""
    found = [each.content for each in messages if each.role != "tool"]
    return "\n\n".join(text for text in found if text.strip()).split("\n\n")


@given(conversations(), KINDS)
def test_no_text_is_lost_and_the_order_kept(messages: Sequence[Message], kinds: set[Kind]) -> None:
    _, shape = reshaped(messages, kinds - {Kind.DROP_TEXT})
    _, messages = reshaped(messages, kinds & {Kind.RESULT_TO_USER})
    assert "".join("".join(contents(shape)).split()) == "".join("".join(contents(messages)).split())
    assert [c.name for each in shape for c in each.calls] == [
        c.name for each in messages for c in each.calls
    ]
    thoughts = ["".join(each.reasoning for each in found).split() for found in (messages, shape)]
    assert "".join(thoughts[0]) == "".join(thoughts[1])


@given(conversations(), KINDS)
def test_only_text_beside_calls_is_dropped(messages: list[Message], kinds: set[Kind]) -> None:
    _, shape = reshaped(messages, kinds | {Kind.DROP_TEXT})
    _, whole = reshaped(messages, kinds - {Kind.DROP_TEXT, Kind.SPLIT_TEXT})
    assert [each.content for each in shape if not each.calls] == [
        each.content for each in whole if not each.calls
    ]


@given(conversations(), KINDS)
def test_results_are_behind_their_calls(messages: Sequence[Message], kinds: set[Kind]) -> None:

    def answered(found: Sequence[Message]) -> list[tuple[str, bool]]:
        """Return each result, and whether its call is in front of it."""
        seen: set[str | None] = set()
        results: list[tuple[str, bool]] = []
        for message in found:
            seen |= {call.id for call in message.calls}
            if message.role == "tool":
                results.append((f"{message.call_id} {message.content}", message.call_id in seen))
        return sorted(results)

    _, shape = reshaped(messages, kinds)
    _, messages = reshaped(messages, kinds & {Kind.RESULT_TO_USER})
    assert answered(shape) == answered(messages)


@example([called(ONE, reasoning="\n"), USER], {Kind.EMPTY_ASSISTANT, Kind.JOIN})
@example([called(ONE, text="a", reasoning="\n")], {Kind.SPLIT_TEXT, Kind.JOIN})
@given(conversations(), KINDS)
def test_changes_are_idempotent(messages: list[Message], kinds: set[Kind]) -> None:
    """Except that calls without results, once split, may be joined with the message behind them."""
    if Kind.SPLIT_CALLS in kinds:
        kinds = kinds - {Kind.JOIN}
    _, once = reshaped(messages, kinds)
    _, twice = reshaped(once, kinds)
    assert list(twice) == list(once)


@given(conversations())
def test_attempts_are_bounded_begin_with_the_original_and_do_not_repeat(
    messages: list[Message],
) -> None:
    for reasons in (lambda n: "no", lambda n: "a" * n):
        seen: list[Kinds] = []

        def render(
            shape: Sequence[Message],
            kinds: Kinds,
            seen: list[Kinds] = seen,
            reasons: Callable[[int], str] = reasons,
        ) -> None:
            seen.append(kinds)
            assert kinds or shape == tuple(messages)
            raise Refused(reasons(len(seen)))

        with pytest.raises(Refused, match=f"^{reasons(1)}$"):
            render_accepted(messages, render, {})
        assert seen[0] == ()
        assert len(seen) == len(set(seen)) <= 32


def test_the_messages_that_a_change_does_not_concern_are_the_same_objects() -> None:
    """So that what is remembered of a long conversation stays of use."""
    history = [USER, ANSWER] * 500
    for kind in Kind:
        _, shape = reshaped([*history, USER, called(ONE, TWO, text="A")], {kind})
        assert all(one is other for one, other in zip(history, shape, strict=False))
