"""Replies that something ended before the model did: what is not whole never passes for whole."""

from __future__ import annotations

import json

import pytest
from cut_kit import REPLIES, Reply
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.text.chat import Call, Tool
from uma_trio.text.replies import CallEnd, Event, ParsedReply, ReplyFormat, ReplyParser, collect

TOOLS = (
    Tool(
        "bash",
        "",
        {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            "required": ["command"],
        },
    ),
    Tool("stop"),
)


def events_of(reply: Reply, pieces: list[str], *, cut: bool) -> list[Event]:
    """Return the events of pieces of a reply."""
    parser = ReplyParser(reply.format, thinking=reply.thinking, tools=TOOLS, ids=lambda: "id")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish(cut=cut)]


def whole(call: Call) -> bool:
    """Whether a client could decode the arguments of a call."""
    try:
        json.loads(call.arguments)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_of_the_catalogue_says_what_it_means(name: str) -> None:
    """So that the tests below cut real replies."""
    reply = REPLIES[name]
    said = collect(events_of(reply, [reply.text], cut=False))
    calls = tuple((call.name, call.arguments) for call in said.calls)
    assert (said.content.strip(), said.reasoning, calls) == (
        reply.content,
        reply.reasoning,
        reply.calls,
    )


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_is_cut_says_nothing_that_it_did_not_mean(name: str) -> None:
    """Cut behind any character: no marker, key or name is text, and no call is whole before its end."""
    reply = REPLIES[name]
    for at in range(len(reply.text)):
        events = events_of(reply, [reply.text[:at]], cut=True)
        said = collect(events)
        where = f"behind {reply.text[max(0, at - 30) : at]!r}: {said}"
        assert reply.content.startswith(said.content.rstrip()), where
        assert reply.reasoning.startswith(said.reasoning.rstrip()), where
        for call, (called, arguments) in zip(said.calls, reply.calls, strict=False):
            assert call.name == called, where
            assert not whole(call) or json.loads(call.arguments) == json.loads(arguments), where
        ends = [event.cut for event in events if isinstance(event, CallEnd)]
        assert ends == [not whole(call) for call in said.calls], where


@given(name=st.sampled_from(sorted(REPLIES)), at=st.integers(0, 600), cut=st.booleans())
def test_how_a_reply_came_does_not_matter_where_it_ends(name: str, at: int, cut: bool) -> None:
    """As a whole, and a character at a time, it says the same."""
    reply = REPLIES[name]
    text = reply.text[:at]
    assert collect(events_of(reply, list(text), cut=cut)) == collect(
        events_of(reply, [text], cut=cut)
    )


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_the_model_ends_early_has_no_whole_calls_but_those_it_wrote(name: str) -> None:
    """The arguments that it wrote are whole or left out; no value is cut short."""
    reply = REPLIES[name]
    for at in range(len(reply.text)):
        said = collect(events_of(reply, [reply.text[:at]], cut=False))
        for call, (_, arguments) in zip(said.calls, reply.calls, strict=False):
            if whole(call):
                made = json.loads(arguments)
                assert json.loads(call.arguments).items() <= made.items(), reply.text[:at]


XML = REPLIES["qwen-xml"]


def test_a_cut_text_keeps_its_white_space_and_what_cannot_be_a_marker() -> None:
    """Whoever continues it needs them; only the beginning of a marker is dropped."""
    for text, said in (("a ", "a "), ("a <b", "a <b"), ("a <too", "a"), ("a <tool", "a")):
        assert collect(events_of(XML, [text], cut=True)) == ParsedReply(said, "", ())
        assert collect(events_of(XML, [text], cut=False)) == ParsedReply(text, "", ())


@pytest.mark.parametrize(
    "text", ['<html lang="en">', "to be", '{"name": "Bob", "parameters": "x', "[1, 2"]
)
def test_text_that_only_looks_like_a_call_is_not_lost_with_a_cut(text: str) -> None:
    """It is told apart as soon as it differs."""
    for name in ("harmony", "llama", "mistral, an array", "hermes"):
        assert collect(events_of(REPLIES[name], [text], cut=True)).content == text


def test_a_model_that_leaves_out_the_last_markers_has_called() -> None:
    """Its own end is one, too, once the value is closed; and so is the marker of an outer level."""
    text = XML.text.partition("\n</function>")[0]
    (call,) = collect(events_of(XML, [text], cut=False)).calls
    assert call.arguments == XML.calls[0][1]
    outer = text + "\n</tool_call>"
    assert collect(events_of(XML, [outer], cut=True)).calls == (call,)


def tagged(value: str, schema: object) -> str:
    """Return the JSON that a tagged value becomes under a schema."""
    tool = Tool("look", "", {"type": "object", "properties": {"what": schema}})
    format_: ReplyFormat = XML.format
    parser = ReplyParser(format_, tools=(tool,))
    text = f"<tool_call>\n<function=look>\n<parameter=what>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = collect([*parser.feed(text), *parser.finish()]).calls
    return call.arguments.removeprefix('{"what": ').removesuffix("}")


@pytest.mark.parametrize(
    ("value", "schema", "written"),
    [
        ("True", {"type": "boolean"}, "true"),
        ("None", {}, "null"),
        ("None", {"type": ["string", "null"]}, "null"),
        ("['a', True, None]", {"type": "array"}, '["a", true, null]'),
        ("{'a': 1}", {"type": "object"}, '{"a": 1}'),
        ("True", {"type": "string"}, '"True"'),
        ("True", {"enum": ["True", "False"]}, '"True"'),
        ("123", {"type": ["string", "null"]}, '"123"'),
        ("123", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"123"'),
        ("3", {"type": "number"}, "3"),
        ("a b", {"type": "integer"}, '"a b"'),
        ("[1, __import__('os')]", {"type": "array"}, "\"[1, __import__('os')]\""),
        ("{1, 2}", {"type": "array"}, '"{1, 2}"'),
    ],
)
def test_a_value_in_pythons_words_is_json(value: str, schema: object, written: str) -> None:
    """Templates write values so, and models after them; a text stays one."""
    assert tagged(value, schema) == written
