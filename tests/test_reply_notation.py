"""Calls that are written as literals of a language: their arguments are JSON all the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_kit import FORMATS

from uma_trio.text.chat import Call, Tool
from uma_trio.text.replies import CallEnd, ReplyFormat, ReplyParser, collect

GEMMA = FORMATS["<|tool_call>call:"]
PYTHON = FORMATS["<|tool_call_start|>"]
BARE = FORMATS["[func_name1(params_name1="]
TOOLS = (
    Tool("look", "", {"properties": {"what": {"type": "string"}, "n": {"type": "integer"}}}),
    Tool("stop"),
)


def called(format_: ReplyFormat, text: str, cuts: list[int] | None = None) -> tuple[Call, ...]:
    """Return the calls in a reply, which has no text beside them."""
    parser = ReplyParser(format_, tools=TOOLS, ids=lambda: "id")
    places = sorted({0, len(text), *(cut for cut in cuts or () if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    said = collect([e for piece in pieces for e in parser.feed(piece)] + parser.finish())
    assert said.content == ""
    return said.calls


def gemma(value: Any) -> str:
    """Write a value as Gemma's template does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def python(arguments: dict[str, Any]) -> str:
    """Write arguments as those of a call in Python."""
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


_KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
_PLAIN = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6)
_TEXTS = st.text(max_size=12).filter(lambda text: not text.endswith(("<", "<|", '<|"', '<|"|')))


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Return JSON values, nested."""
    return st.recursive(
        _PLAIN | _TEXTS.filter(lambda text: '<|"|>' not in text),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    )


_CUTS = st.lists(st.integers(0, 300), max_size=10)


@given(arguments=st.dictionaries(_KEYS, values(_TEXTS), max_size=4), cuts=_CUTS)
def test_what_python_writes_is_read_as_it_is_meant(
    arguments: dict[str, Any], cuts: list[int]
) -> None:
    """Any JSON value, as its literal; however it is cut into pieces."""
    arguments.pop("what", None), arguments.pop("n", None)
    text = f"<|tool_call_start|>[look({python(arguments)}), stop()]<|tool_call_end|>"
    first, second = called(PYTHON, text, cuts)
    assert (first.name, json.loads(first.arguments)) == ("look", arguments)
    assert (second.name, second.arguments) == ("stop", "{}")


@given(arguments=st.dictionaries(_KEYS, values(_KEYS), max_size=4), cuts=_CUTS)
def test_what_gemma_writes_is_read_as_it_is_meant(
    arguments: dict[str, Any], cuts: list[int]
) -> None:
    """Texts need no escapes there."""
    arguments.pop("what", None), arguments.pop("n", None)
    (call,) = called(GEMMA, f"<|tool_call>call:look{gemma(arguments)}<tool_call|>", cuts)
    assert (call.name, json.loads(call.arguments)) == ("look", arguments)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("what=None, n=True", {"what": None, "n": True}),
        ("what=null, n=true", {"what": None, "n": True}),
        (r"a='it\'s', b=\"\", c='\n'".replace('\\"', '"'), {"a": "it's", "b": "", "c": "\n"}),
        (r"a='\x41\u00e9\U0001F600\ud83d\ude00\d\/'", {"a": "Aé😀😀\\d/"}),
        ("a=(1, [2, {'b': ()}]), c={}", {"a": [1, [2, {"b": []}]], "c": {}}),
        ("what=3", {"what": "3"}),
        ("n=-1.5e3, m=nan, k=inf,", {"n": -1500.0, "m": "nan", "k": "inf"}),
        ("a = 1 ,\n b = 'x'\n", {"a": 1, "b": "x"}),
    ],
)
def test_pythons_words_and_escapes(written: str, meant: dict[str, Any]) -> None:
    """As Python reads them, where that is JSON; a text stays one by its tool's schema."""
    text = f"[look({written})]"
    for cuts in ([], list(range(len(text)))):
        (call,) = called(BARE, text, cuts)
        assert json.loads(call.arguments) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('what:<|"|>a "b" {c}<|"|>,n:3', {"what": 'a "b" {c}', "n": 3}),
        ('what:"a", x:b c', {"what": "a", "x": "b c"}),
        ('a:{<|"|>b<|"|>:[true,null,False]}', {"a": {"b": [True, None, False]}}),
    ],
)
def test_gemmas_quotes(written: str, meant: dict[str, Any]) -> None:
    """Its own, the usual ones, and none."""
    (call,) = called(GEMMA, f"<|tool_call>call:look{{{written}}}<tool_call|>")
    assert json.loads(call.arguments) == meant


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[look]", "[looks(a=1)]", "[see](http://a)", "So [look(what='x')]"]
)
def test_a_list_is_no_call(text: str) -> None:
    """Nor is anything else that does not begin with the name of a tool."""
    parser = ReplyParser(BARE, tools=TOOLS)
    assert collect([*parser.feed(text), *parser.finish()]).content == text


@pytest.mark.parametrize(
    "written", ["'x'", "what='x', 'y'", "what=[1}", "what={1, 2}", "what=" + "[" * 100 + "]" * 100]
)
def test_what_is_no_literal_leaves_the_call_open(written: str) -> None:
    """No name is invented for an argument that has none, and depth has a bound."""
    parser = ReplyParser(PYTHON, tools=TOOLS)
    events = [
        *parser.feed(f"<|tool_call_start|>[look({written})]<|tool_call_end|>"),
        *parser.finish(),
    ]
    (call,) = collect(events).calls
    assert [event.cut for event in events if isinstance(event, CallEnd)] == [True]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)
