"""What a reply says, piece by piece: text, reasoning, and calls of tools. All frozen values."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from uma_trio.text.chat import Call


@frozen
class Content:
    """Text for the client."""

    text: str


@frozen
class Reasoning:
    """Text that precedes the answer."""

    text: str


@frozen
class CallStart:
    """A call begins. `index` counts the calls of one reply from 0, `id` is unique in it."""

    index: int
    id: str
    name: str


@frozen
class Arguments:
    """The next piece of a call's arguments. Joined they are JSON, if the model wrote JSON."""

    index: int
    text: str


@frozen
class CallEnd:
    """The arguments of a call are whole, or with `cut` the reply ended inside them."""

    index: int
    cut: bool = False


Event = Content | Reasoning | CallStart | Arguments | CallEnd


@frozen
class Said:
    """A whole reply."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def collect(events: Iterable[Event]) -> Said:
    """Join the events of one reply."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            calls.append((event, []))
        elif isinstance(event, Arguments):
            calls[event.index][1].append(event.text)
    made = tuple(Call(start.id, start.name, "".join(parts)) for start, parts in calls)
    return Said("".join(content), "".join(reasoning), made)
