"""Answers as rows of blocks: what Responses and Messages write of them, in parts and whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, cast

from http_kit import events_of
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.api.anthropic import events as messages_events
from uma_trio.api.blocks import blocks_of
from uma_trio.api.responses import events as responses_events
from uma_trio.api.responses.items import Form, Items
from uma_trio.api.responses.messages import Tools, unseal
from uma_trio.api.streams import WholeAnswer
from uma_trio.engine.messages import Finished, FinishReason, TokenOut
from uma_trio.service.reading import Reading
from uma_trio.service.service import Service
from uma_trio.text.replies import Arguments, CallEnd, CallStart, Content, Event, Reasoning

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
CALL = '{"a": 1}'


class Script(Reading):
    """Says what it is told to say, a list of events with each token."""

    def __init__(self, script: Sequence[Sequence[Event]], last: Sequence[Event] = ()) -> None:
        super().__init__()
        self._script = iter(script)
        self._last = list(last)

    def token(self, item: TokenOut) -> list[Event]:
        """Return what is said with the next token."""
        return list(next(self._script))

    def end(self, finished: Finished) -> list[Event]:
        """Return what is said at the end."""
        return self._last


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Event]]:
    """Draw events as a parser may give them, spread over tokens in any way."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("rtc"), max_size=5)):
        if kind == "c":
            pieces = draw(st.lists(st.integers(1, len(CALL)), max_size=3))
            cuts = sorted({0, *pieces, len(CALL)})
            events.append(CallStart(calls, f"call_{calls}", "look"))
            events += [Arguments(calls, CALL[a:b]) for a, b in itertools.pairwise(cuts)]
            events.append(CallEnd(calls))
            calls += 1
        else:
            made = Reasoning if kind == "r" else Content
            events += [made(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=3))]
    sizes = draw(st.lists(st.integers(0, 3), max_size=len(events)))
    script: list[list[Event]] = []
    for size in sizes:
        script.append(events[:size])
        events = events[size:]
    return [*script, events]


def finished(reason: FinishReason = "stop") -> Finished:
    """Return the end of an answer."""
    return Finished(reason, "", 5, 9, 2, 0.0, 0.1, 0.2)


def form(*, summarises: bool = False, seals: bool = False) -> Form:
    """Return what writes a response."""
    service = cast("Service", None)  # asked for nothing but probabilities
    return Form({"id": "r"}, Items("r", service, Tools(), summarises=summarises, seals=seals))


def response(script: list[list[Event]], reason: FinishReason = "stop", **how: bool) -> list[Any]:
    """Return the events of a response whose answer says this."""
    writer = responses_events.Events(form(**how), Script(script[:-1], script[-1]))
    parts = [writer.opening(), *(writer.token(0, TokenOut(1, "x")) for _ in script[:-1])]
    return events_of(b"".join([*parts, writer.end(0, finished(reason))]))


def whole(script: list[list[Event]], reason: FinishReason = "stop") -> WholeAnswer:
    """Return the items of that answer."""
    return WholeAnswer([TokenOut(1, "x") for _ in script[:-1]], finished(reason))


def grown(events: list[Any]) -> list[Any]:
    """Return the items that a client puts together of the growth alone."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        at = event.get("output_index", 0)
        if kind == "output_item.added":
            assert at == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[at]["content"].insert(event["content_index"], event["part"])
        elif kind == "reasoning_summary_part.added":
            items[at]["summary"].insert(event["summary_index"], event["part"])
        elif kind == "function_call_arguments.delta":
            items[at]["arguments"] += event["delta"]
        elif kind == "reasoning_summary_text.delta":
            items[at]["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind.endswith(".delta"):
            assert items[at]["id"] == event["item_id"]
            items[at]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "output_item.done":
            items[at]["status"] = event["item"]["status"]
            assert items[at] == event["item"]
    return items


@given(scripts(), st.booleans())
def test_the_growth_of_a_response_is_the_whole_of_it(
    script: list[list[Event]], summarises: bool
) -> None:
    """However the answer is cut into tokens; each item and each event has its number."""
    events = response(script, summarises=summarises)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert grown(events) == last["output"]
    done = blocks_of(whole(script), Script(script[:-1], script[-1]))
    assert [form(summarises=summarises).items.whole(block) for block in done] == last["output"]


@given(scripts())
def test_the_growth_of_a_message_is_the_whole_of_it(script: list[list[Event]]) -> None:
    """However the answer is cut into tokens."""
    reading = Script(script[:-1], script[-1])
    made = messages_events.Form("m", "any", 5)
    writer = messages_events.Events(made, reading)
    parts = [writer.opening(), *(writer.token(0, TokenOut(1, "x")) for _ in script[:-1])]
    content: list[Any] = []
    for event in events_of(b"".join([*parts, writer.end(0, finished())])):
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            into = "json" if name == "partial_json" else name
            block = content[event["index"]]
            block[into] = block.get(into, "") + event["delta"][name]
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json"))
    again = Script(script[:-1], script[-1])
    done = blocks_of(whole(script), again)
    assert made.whole(done, finished(), again)["content"] == content


def test_what_is_cut_off_says_so() -> None:
    """A text, and a call whose arguments are no JSON then; what was whole before stays whole."""
    call: list[Event] = [CallStart(0, "c", "look"), Arguments(0, '{"a'), CallEnd(0, cut=True)]
    events = response([[Content("so "), *call[:2]], call[2:]], "length")
    text, cut = events[-1]["response"]["output"]
    assert (text["status"], cut["status"]) == ("completed", "incomplete")
    assert cut["arguments"] == '{"a'
    assert events[-1]["type"] == "response.incomplete"
    reading = Script([[*call[:2]]], call[2:])
    answer = whole([[], []], "length")
    made = messages_events.Form("m", "any", 5)
    found = made.whole(blocks_of(answer, reading), answer.end, reading)
    assert found["content"][0]["input"] == {"arguments": '{"a'}
    assert found["stop_reason"] == "max_tokens"


def test_a_thought_is_sealed_where_that_is_asked_for() -> None:
    """The client carries it to the next request."""
    script: list[list[Event]] = [[Reasoning("hm")], [Content("so")]]
    (thought, _) = response(script, seals=True)[-1]["response"]["output"]
    assert unseal(thought["encrypted_content"]) == "hm"
    assert response(script)[-1]["response"]["output"][0]["encrypted_content"] is None


def test_a_thought_is_its_own_summary_where_one_is_asked_for() -> None:
    """By the events that clients look for then."""
    events = response([[Reasoning("hm")], []], summarises=True)
    assert "response.reasoning_summary_text.delta" in {event["type"] for event in events}
    assert events[-1]["response"]["output"][0]["summary"] == [
        {"type": "summary_text", "text": "hm"}
    ]
