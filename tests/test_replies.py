"""Replies: what a model wrote becomes reasoning, content and calls, however it is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_kit import FORMATS, HERMES, parsed

from uma_trio.text.chat import Call
from uma_trio.text.replies import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    ParsedReply,
    Reasoning,
    ReplyFormat,
    collect,
)
from uma_trio.text.replies.format import CallSyntax

ANY = ReplyFormat(
    "mistral", calls=CallSyntax(style="named", open="[TOOL_CALLS]", after_name="[ARGS]")
)
ONE = Call("id0", "look", '{"what": "x"}')
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: RUF001

MUSE = "<|start|>assistant to=self<|message|><atem:invoke"
SOLAR = "<|begin|>assistant<|think|><|tool_call:begin|>"
M3 = "']<]minimax[>['"
_M = "]<]minimax[>["
REPLIES = [
    ("hermes", "Hi", ParsedReply("Hi", "", ())),
    ("hermes", "<think>\nWhy <b>?\n</think>\n\nSo.", ParsedReply("So.", "Why <b>?", ())),
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"what": "</tool_call> \\"}"}}\n</tool_call>',
        ParsedReply("I look.", "", (Call("id0", "look", '{"what": "</tool_call> \\"}"}'),)),
    ),
    (
        "hermes",
        (
            '<tool_call>{"arguments":{"what": "x"},"name":"look"}</tool_call>\n'
            '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>'
        ),
        ParsedReply("", "", (ONE, Call("id1", "stop", '{"a": 1}'))),
    ),
    (
        "xml",
        (
            '<tool_call>\n<function=look>\n<parameter=what>\na </parameter> "b"\nc\n</parameter>\n'
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
        ),
        ParsedReply(
            "", "", (Call("id0", "look", '{"what": "a </parameter> \\"b\\"\\nc", "n": 3}'),)
        ),
    ),
    (
        "[TOOL_CALLS]",
        (
            '[TOOL_CALLS] [{"name": "look", "arguments": {"what": "x"}, "id": "123456789"}, '
            '{"name": "stop", "arguments": {}}]'
        ),
        ParsedReply("", "", (ONE, Call("id1", "stop", "{}"))),
    ),
    (
        "[TOOL_CALLS][ARGS]",
        'So[TOOL_CALLS]look[ARGS]{"what": "x"}[TOOL_CALLS]stop[ARGS]{}',
        ParsedReply("So", "", (ONE, Call("id1", "stop", "{}"))),
    ),
    (
        "[TOOL_CALLS][CALL_ID]",
        '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"what": "x"}',
        ParsedReply("", "", (Call("abcdefghi", "look", '{"what": "x"}'),)),
    ),
    (
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        "<think>w</think>So<｜tool▁calls▁begin｜>"  # noqa: RUF001
        + DEEPSEEK_CALL.replace("{}", "look", 1).replace("{}", '{"what": "x"}')
        + "\n"
        + DEEPSEEK_CALL.replace("{}", "stop", 1)
        + "<｜tool▁calls▁end｜>",  # noqa: RUF001
        ParsedReply("So", "w", (ONE, Call("id1", "stop", "{}"))),
    ),
    (
        "<|tool_calls_section_begin|>",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>"
            '{"what": "x"}<|tool_call_end|><|tool_calls_section_end|>'
        ),
        ParsedReply("", "", (Call("functions.look:3", "look", '{"what": "x"}'),)),
    ),
    (
        "<|python_tag|>",
        '{"name": "look", "parameters": {"what": "x"}}',
        ParsedReply("", "", (ONE,)),
    ),
    (
        "<|channel|><|message|><|start|>",
        (
            "<|channel|>analysis<|message|>w<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.look <|constrain|>json<|message|>{"what": "x"}<|call|>'
        ),
        ParsedReply("", "w", (ONE,)),
    ),
    (
        "<|channel|><|message|><|start|>",
        "<|channel|>analysis<|message|>w<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>",
        ParsedReply("Hi <b>", "w", ()),
    ),
    # Models that leave out the first markers of a call.
    (
        "xml",
        "So\n<function=look>\n<parameter=what>\nx\n</parameter>\n</function>\n</tool_call>",
        ParsedReply("So", "", (ONE,)),
    ),
    (
        "<|tool_calls_section_begin|>",
        '<|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>{"what": "x"}',
        ParsedReply("", "", (Call("functions.look:3", "look", '{"what": "x"}'),)),
    ),
    # A call ends reasoning that nobody closed; talk about calls, in the middle of a line, does not.
    (
        "hermes",
        '<think>I look.\n<tool_call>\n{"name": "look", "arguments": {"what": "x"}}\n</tool_call>\nSo.',
        ParsedReply("So.", "I look.", (ONE,)),
    ),
    (
        "hermes",
        '<think><tool_call>{"name": "look", "arguments": {"what": "x"}}</tool_call>',
        ParsedReply("", "", (ONE,)),
    ),
    (
        "hermes",
        '<think>As <tool_call>{"name": "look", "arguments": {}}</tool_call> says\n</think>So',
        ParsedReply("So", 'As <tool_call>{"name": "look", "arguments": {}}</tool_call> says', ()),
    ),
    (
        "hermes",
        '<think>w\n<tool_call>{"name": "what", "arguments": {}}</think>So',
        ParsedReply("So", 'w\n<tool_call>{"name": "what", "arguments": {}}', ()),
    ),
    (
        "<|tool_calls_section_begin|>",
        (
            "<think>w<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
            '<|tool_call_argument_begin|>{"what": "x"}<|tool_call_end|><|tool_calls_section_end|>'
        ),
        ParsedReply("", "w", (Call("functions.look:0", "look", '{"what": "x"}'),)),
    ),
    ("hermes", "</think>\n\nSo", ParsedReply("So", "", ())),  # of an empty thought
    # A header in harmony that is begun twice.
    (
        "<|channel|><|message|><|start|>",
        (
            "<|channel|>commentary to=assistant<|channel|>analysis<|message|>w<|end|>"
            "<|start|>assistant<|channel|>final<|message|>So"
        ),
        ParsedReply("So", "w", ()),
    ),
    # Tags that say which values are texts, and have no line ends beside them.
    (
        "typed tags",
        '<f n="look"><p n="what" text="true">\n3\n</p><p n="n" text="false">3</p></f>',
        ParsedReply("", "", (Call("id0", "look", '{"what": "\\n3\\n", "n": 3}'),)),
    ),
    (
        "typed tags",
        '<f n="look"><p n="what" text="false">[3]</p><p n="n" text="true">3</p></f>',
        ParsedReply("", "", (Call("id0", "look", '{"what": [3], "n": "3"}'),)),
    ),
    (
        MUSE,
        (
            " to=self<|message|>Hm.<|eom|><|start|>assistant to=look<|message|><atem:function_calls>\n"
            '<atem:invoke name="look">\n<atem:parameter name="what">a\n<b></atem:parameter>\n'
            '<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
            '<|start|>assistant to=stop<|message|><atem:function_calls>\n<atem:invoke name="stop">\n'
            "</atem:invoke>\n</atem:function_calls><|eot|>"
        ),
        ParsedReply(
            "",
            "Hm.",
            (Call("id0", "look", '{"what": "a\\n<b>", "n": 3}'), Call("id1", "stop", "{}")),
        ),
    ),
    (MUSE, " to=user<|message|>Hello<|eot|>", ParsedReply("Hello", "", ())),
    (
        MUSE,
        (
            " to=self<|message|>A<|eom|><|start|>assistant to=self<|message|>B<|eom|>"
            "<|start|>assistant to=user<|message|>Hello"
        ),
        ParsedReply("Hello", "AB", ()),
    ),
    (
        SOLAR,
        (
            "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5"
            '<|tool_call:name|>look<|tool_call:args|>{"what": "x"}<|tool_call:end|><|tool_call:begin|>0'
            "<|tool_call:name|>stop<|tool_call:args|>{}<|tool_call:end|><|calls|>"
        ),
        ParsedReply(
            "", "Hm.", (Call("a1b2c3d4e5", "look", '{"what": "x"}'), Call("0", "stop", "{}"))
        ),
    ),
    (SOLAR, "<|content|>Hello<|end|>", ParsedReply("Hello", "", ())),
    (SOLAR, "<|think|><|end|><|begin|>assistant<|content|>Hello", ParsedReply("Hello", "", ())),
    (
        M3,
        (
            f'So{_M}<tool_call>\n{_M}<invoke name="look">{_M}<what>a\n<b>{_M}</what>{_M}<n>3{_M}</n>'
            f"{_M}<where>{_M}<lat>1.5{_M}</lat>{_M}<tags>{_M}<item>a{_M}</item>{_M}<item>{_M}<k>{_M}</k>"
            f"{_M}</item>{_M}</tags>{_M}</where>{_M}</invoke>\n"
            f'{_M}<invoke name="stop">{_M}</invoke>\n{_M}</tool_call>'
        ),
        ParsedReply(
            "So",
            "",
            (
                Call(
                    "id0",
                    "look",
                    '{"what": "a\\n<b>", "n": 3, "where": {"lat": 1.5, "tags": ["a", {"k": ""}]}}',
                ),
                Call("id1", "stop", "{}"),
            ),
        ),
    ),
]
MALFORMED = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>\n{"name": "look"'),
    ("hermes", "a <tool_call> b"),
    ("hermes", '<tool_call>{"what": 1}</tool_call>'),
    ("hermes", "<tool_call>[1]</tool_call> b"),
    ("hermes", "a  <too"),
    ("hermes", "a </think> b"),
    ("hermes", "  a \n"),
    ("<|python_tag|>", ' {"name": "unknown", "parameters": {}}'),
    ("<|python_tag|>", '{"a": 1} and more'),
    ("[TOOL_CALLS][ARGS]", "[TOOL_CALLS] look"),
    ("xml", "the tag <function=look> begins a call"),
    ("xml", "<function=other>\n<parameter=what>\nx\n</parameter>\n</function>\n</tool_call>"),
    ("<|channel|><|message|><|start|>", "plain <b>"),
    ("<|channel|><|message|><|start|>", "<|channel|>final"),
    (MUSE, "to=them and more"),
    (MUSE, "a <|start|> b"),
    (SOLAR, "plain <b>"),
]


@pytest.mark.parametrize(("name", "text", "said"), REPLIES)
def test_a_reply_says_what_its_family_means(name: str, text: str, said: ParsedReply) -> None:
    """As a whole, and a character at a time."""
    assert collect(parsed(FORMATS[name], [text])) == said
    assert collect(parsed(FORMATS[name], list(text))) == said


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_no_call_comes_back_as_content(name: str, text: str) -> None:
    """All of it, as it was written."""
    assert collect(parsed(FORMATS[name], [text])) == ParsedReply(text, "", ())
    assert collect(parsed(FORMATS[name], list(text))) == ParsedReply(text, "", ())


_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "look", "arguments": ']
_WORDS = st.one_of(
    st.sampled_from(
        [*_MARKS, '{"what": "x"}', "}", '"', "\\", "\n", " ", "[TOOL_CALLS]", "[ARGS]"]
    ),
    st.sampled_from(["look", "<function=", "<parameter=what>", "</parameter>", "<|channel|>", "{"]),
    st.text(max_size=5),
)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    words=st.lists(_WORDS, max_size=25),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    thinking=st.booleans(),
)
def test_how_a_reply_is_cut_changes_nothing(
    name: str, words: list[str], cuts: list[int], thinking: bool
) -> None:
    """Whatever it says, in any family; and nothing is raised."""
    text = "".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = collect(parsed(FORMATS[name], [text], thinking=thinking))
    assert collect(parsed(FORMATS[name], pieces, thinking=thinking)) == whole


@given(words=st.lists(_WORDS, max_size=20))
def test_text_without_calls_is_content_to_the_letter(words: list[str]) -> None:
    """Markers of calls are text where no tools were given."""
    text = "".join(words)
    events = parsed(ReplyFormat("x", calls=HERMES.calls), [text], calls=False)
    assert collect(events) == ParsedReply(text, "", ())


def test_arguments_come_as_they_are_written() -> None:
    """A call is announced when its name is known, and ends with its last brace."""
    pieces = ['<tool_call>{"name": "look", "arg', 'uments": {"what":', ' "x', '"}', "}</tool_call>"]
    assert parsed(HERMES, pieces) == [
        CallStart(0, "id0", "look"),
        Arguments(0, '{"what":'),
        Arguments(0, ' "x'),
        Arguments(0, '"}'),
        CallEnd(0),
    ]


def test_a_reply_that_ends_in_its_arguments_keeps_them() -> None:
    """A call that was cut off has what there is of its arguments."""
    said = collect(parsed(HERMES, ['<tool_call>{"name": "look", "arguments": {"what": "a']))
    assert said.calls == (Call("id0", "look", '{"what": "a'),)


HARMONY = next(made for made in FORMATS.values() if made.name == "harmony")


def test_harmony_has_no_calls_where_none_are_read() -> None:
    """What a message to a recipient says is text then."""
    text = "<|channel|>commentary to=python<|message|>print()<|call|>"
    assert collect(parsed(HARMONY, [text], calls=False)) == ParsedReply("print()", "", ())


def test_a_call_in_harmony_without_arguments_has_an_empty_object() -> None:
    """Clients decode arguments, and nothing is no JSON."""
    text = "<|channel|>commentary to=functions.stop<|message|><|call|>"
    assert collect(parsed(HARMONY, [text])).calls == (Call("id0", "stop", "{}"),)


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    """And may be opened once more by the model, or never end."""
    assert parsed(HERMES, ["a</think>b"], thinking=True) == [Reasoning("a"), Content("b")]
    assert parsed(HERMES, ["<think>a</think>b"], thinking=True) == [Reasoning("a"), Content("b")]
    assert parsed(HERMES, ["a"], thinking=True) == [Reasoning("a")]


def test_text_is_passed_on_at_once() -> None:
    """Only what may become a marker is held back, and white space before it."""
    assert parsed(HERMES, ["Hello", " a<", "b", " \n", "<tool", "x"]) == [
        Content("Hello"),
        Content(" a"),
        Content("<b"),
        Content(" \n<toolx"),
    ]
