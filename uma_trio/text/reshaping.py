"""Conversations rewritten for chat templates that refuse them. Pure.

Many templates only accept what their model was trained on: one system message, alternating roles, one
call per message. Roles and cuts between messages change; texts stay, but for `DROP_TEXT`, the last resort.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, groupby, takewhile
from operator import is_
from typing import Final, TypeVar

from attrs import evolve

from uma_trio.text.chat import Call, Message
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.slices import is_blank, json_text, json_value

_SEPARATOR: Final = "\n\n"
_MAX_ATTEMPTS: Final = 32
_MAX_REMEMBERED: Final = 32
_MAX_REASON: Final = 200
_NUMBER: Final = re.compile(r"\d+")


class Kind(StrEnum):
    """A change of a conversation, in the order in which changes are tried and applied."""

    #: System messages after the first turn become user messages.
    SYSTEM_TO_USER = "system-to-user"
    #: Results that no message with calls precedes become user messages.
    RESULT_TO_USER = "result-to-user"
    #: Consecutive messages of the system, the user or the assistant become one.
    JOIN = "joined"
    #: A user message without text precedes an assistant message that would be the first turn.
    EMPTY_USER = "empty-user"
    #: An assistant message without text separates calls and results from the following user message.
    EMPTY_ASSISTANT = "empty-assistant"
    #: The system message becomes the beginning of the first user message.
    SYSTEM_INTO_USER = "system-into-user"
    #: A message without text and calls has a space as its content.
    FILL_EMPTY = "filled-empty"
    #: Parallel calls become consecutive ones, each followed by its result.
    SPLIT_CALLS = "split-calls"
    #: Arguments that are no JSON object become the value of one.
    WRAP_ARGUMENTS = "wrapped-arguments"
    #: Text of a message with calls becomes a message before it.
    SPLIT_TEXT = "split-text"
    #: Text of a message with calls is left out.
    DROP_TEXT = "dropped-text"
    #: Tools have the members that many templates read without a look.
    COMPLETE_TOOLS = "completed-tools"
    #: Each schema of a tool has one of JSON's types, and nothing that templates follow without an end.
    SIMPLIFY_TOOLS = "simplified-tools"


Kinds = tuple[Kind, ...]
OF_TOOLS: Final = (Kind.COMPLETE_TOOLS, Kind.SIMPLIFY_TOOLS)
"""What is changed not in messages but in tools, by :func:`.documents.tool_of`."""
OF_MESSAGES: Final = tuple(kind for kind in Kind if kind not in OF_TOOLS)
# Of which the second does more than the first.
_INSTEAD: Final = {Kind.DROP_TEXT: Kind.SPLIT_TEXT, Kind.SIMPLIFY_TOOLS: Kind.COMPLETE_TOOLS}


Cures = dict[str, Kinds]
"""The changes that overcame each refusal of one template, the latest last."""
Result = TypeVar("Result")


def render_accepted(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message], Kinds], Result],
    cures: Cures,
    kinds: Collection[Kind] = OF_MESSAGES,
) -> tuple[Result, Kinds]:
    """Return what `render` makes of the first shape that it accepts, and the changes, within 32 attempts.

    Raises:
        Unrenderable: it refuses all of them; the reason is that of the unchanged conversation.
    """
    shapes = _shapes(tuple(messages), cures, tuple(kind for kind in Kind if kind in kinds))
    applied, shape = next(shapes)
    refusals: list[str] = []
    while True:
        try:
            result = render(shape, applied)
        except Unrenderable as error:
            refusals.append(str(error))
            try:
                applied, shape = shapes.send(refusals[-1])
            except StopIteration:
                raise Unrenderable(refusals[0]) from error
        else:
            if refusals:
                cures.pop(_key(refusals[0]), None)
                cures[_key(refusals[0])] = applied
                if len(cures) > _MAX_REMEMBERED:
                    del cures[next(iter(cures))]
            return result, applied


_Attempts = Generator[tuple[Kinds, Sequence[Message]], str, Result]


def _shapes(messages: Sequence[Message], cures: Cures, kinds: Kinds) -> _Attempts[None]:
    """Yield the unchanged conversation, and others; receive why each is refused.

    The second is what was accepted after the same refusal before. A change that leads to another refusal
    has overcome the first one and is kept. Changes that only help together are tried at the end.
    """
    tried: set[Kinds] = set()

    def attempt(wanted: Iterable[Kind]) -> _Attempts[str | None]:
        applied, shape = reshaped(messages, (kind for kind in wanted if kind in kinds))
        if applied in tried:
            return None
        tried.add(applied)
        return (yield applied, shape)

    reason = yield from attempt(())
    yield from attempt(cures.get(_key(reason or ""), ()))
    kept: Kinds = ()
    while reason is not None:
        before, reason = reason, None
        for kind in kinds:
            if kind in kept or len(tried) >= _MAX_ATTEMPTS - len(kinds):
                continue
            found = yield from attempt((*kept, kind))
            if found is not None and _key(found) != _key(before):
                kept, reason = (*kept, kind), found
                break
    for end in range(2, len(kinds) + 1):
        yield from attempt(kinds[:end])


def reshaped(messages: Sequence[Message], kinds: Iterable[Kind]) -> tuple[Kinds, Sequence[Message]]:
    """Return changed messages, and the kinds that changed anything or are of tools."""
    wanted = set(kinds)
    wanted -= {less for more, less in _INSTEAD.items() if more in wanted}
    applied: list[Kind] = []
    for kind in Kind:
        if kind not in wanted:
            continue
        if kind in OF_TOOLS:
            applied.append(kind)
            continue
        changed = tuple(_CHANGES[kind](messages))
        if len(changed) != len(messages) or not all(map(is_, changed, messages)):
            applied.append(kind)
            messages = changed
    return tuple(applied), messages


def _key(reason: str) -> str:
    return _NUMBER.sub("0", reason[:_MAX_REASON])


# --- changes: each returns the very messages that it does not change ---


def _n_leading_systems(messages: Sequence[Message]) -> int:
    return sum(1 for _ in takewhile(lambda message: message.role == "system", messages))


def _system_to_user(messages: Sequence[Message]) -> Iterable[Message]:
    n = _n_leading_systems(messages)
    later = (
        evolve(message, role="user") if message.role == "system" else message
        for message in messages[n:]
    )
    return chain(messages[:n], later)


def _result_to_user(messages: Sequence[Message]) -> Iterator[Message]:
    has_call = False
    for message in messages:
        if message.role != "tool":
            has_call = bool(message.calls)
        yield message if has_call or message.role != "tool" else Message("user", message.content)


def _join(messages: Sequence[Message]) -> Iterator[Message]:
    for role, run in groupby(messages, key=lambda message: message.role):
        same = list(run)
        if role == "tool" or len(same) == 1:
            yield from same
            continue
        yield evolve(
            same[0],
            content=_joined(message.content for message in same),
            reasoning=_joined(message.reasoning for message in same),
            calls=tuple(call for message in same for call in message.calls),
        )


def _joined(texts: Iterable[str]) -> str:
    found = [text for text in texts if text]
    # One text stays as it is, also a blank one: what a later change has split may be joined again.
    return found[0] if len(found) == 1 else _SEPARATOR.join([t for t in found if not is_blank(t)])


def _empty_user(messages: Sequence[Message]) -> Iterable[Message]:
    n = _n_leading_systems(messages)
    if n == len(messages) or messages[n].role == "user":
        return messages
    return chain(messages[:n], [Message("user")], messages[n:])


def _empty_assistant(messages: Sequence[Message]) -> Iterator[Message]:
    is_open = False
    for message in messages:
        if is_open and message.role == "user":
            yield Message("assistant")
        yield message
        is_open = message.role == "tool" or bool(message.calls)


def _system_into_user(messages: Sequence[Message]) -> Iterable[Message]:
    n = _n_leading_systems(messages)
    if not n:
        return messages
    system = _joined(message.content for message in messages[:n])
    if n < len(messages) and messages[n].role == "user":
        first = evolve(messages[n], content=_joined([system, messages[n].content]))
        return chain([first], messages[n + 1 :])
    return chain([Message("user", system)], messages[n:])


def _fill_empty(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        is_empty = message.role != "tool" and not message.content and not message.calls
        yield evolve(message, content=" ") if is_empty else message


def _split_calls(messages: Sequence[Message]) -> Iterator[Message]:
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.calls) < 2:
            yield message
            continue
        rest = (messages[number] for number in range(at, len(messages)))
        results = list(takewhile(lambda each: each.role == "tool", rest))
        at += len(results)
        answers = _by_call(message.calls, results)
        for number, call in enumerate(message.calls):
            if number == 0:
                yield evolve(message, calls=(call,))
            else:
                yield Message(message.role, calls=(call,))
            yield from answers[number]


def _by_call(calls: Sequence[Call], results: Sequence[Message]) -> list[list[Message]]:
    found: list[list[Message]] = [[] for _ in calls]
    places: dict[str | None, deque[int]] = defaultdict(deque)
    for number, call in enumerate(calls):
        places[call.id].append(number)
    unknown: list[Message] = []
    for result in results:
        same = places.get(result.call_id)
        if not same:
            unknown.append(result)
            continue
        found[same[0]].append(result)
        if len(same) > 1:  # ids that are not unique: the next result is the next call's
            same.popleft()
    unanswered = iter([number for number, answers in enumerate(found) if not answers])
    for result in unknown:
        found[next(unanswered, len(calls) - 1)].append(result)
    return found


def _wrap_arguments(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        calls = tuple(map(_wrapped, message.calls))
        is_same = all(map(is_, calls, message.calls))
        yield message if is_same else evolve(message, calls=calls)


def _wrapped(call: Call) -> Call:
    if is_blank(call.arguments) or isinstance(json_value(call.arguments), dict):
        return call
    return evolve(call, arguments=json_text({"arguments": call.arguments}))


def _split_text(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if not (message.calls and message.content):
            yield message
            continue
        if not is_blank(message.content):
            yield Message(message.role, message.content)
        yield evolve(message, content="")  # the reasoning led to the calls, and stays with them


def _drop_text(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        yield evolve(message, content="") if message.calls and message.content else message


_IN_ORDER: Final = (
    *(_system_to_user, _result_to_user, _join, _empty_user, _empty_assistant, _system_into_user),
    *(_fill_empty, _split_calls, _wrap_arguments, _split_text, _drop_text),
)
_CHANGES: Final[Mapping[Kind, Callable[[Sequence[Message]], Iterable[Message]]]] = dict(
    zip(OF_MESSAGES, _IN_ORDER, strict=True)
)
