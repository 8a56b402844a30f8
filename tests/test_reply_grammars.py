"""Grammars of calls: what they take is what a parser of the same record reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reply_kit import FORMATS, TYPED, XML, MarkedVocabulary

from uma_trio.text.chat import Tool, ToolChoice
from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.derivation import Derivation
from uma_trio.text.grammars import JSON
from uma_trio.text.replies import ReplyFormat, ReplyParser, collect
from uma_trio.text.replies.format import CallSyntax
from uma_trio.text.replies.framed import CHANNEL_THOUGHT
from uma_trio.text.replies.grammar import Offer, grammar_of
from uma_trio.text.replying import Loosened, Replies
from uma_trio.text.schemas import part_of
from uma_trio.text.shape import Shape
from uma_trio.text.thinking import Thinking
from uma_trio_sim.fake import FakeVocabulary

PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


class HarmonyVocabulary(MarkedVocabulary):
    """Its markers are gpt-oss's."""

    markers = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")


class GemmaVocabulary(MarkedVocabulary):
    """Its markers are Gemma 4's."""

    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')


@pytest.fixture(scope="module")
def grammarian() -> Grammarian:
    """Return one for a vocabulary of bytes."""
    return Grammarian(FakeVocabulary())


def takes(grammarian: Grammarian, syntax: CallSyntax, schema: dict[str, Any], text: str) -> bool:
    """Tell whether a reply of one call may be `text`."""
    offers = [Offer("look", {**schema, "x-guidance": JSON})]
    grammar = grammar_of(syntax, offers, ToolChoice("required", (), False), lambda _: None)
    return accepted(grammarian.follow(Shape("reply", grammar)), list(text.encode()))


def accepted(follower: Follower | Thinking, tokens: list[int]) -> bool:
    """Tell whether an answer may be these tokens."""
    for token in tokens:
        if not follower.allows(token):
            return False
        follower.accept(token)
    return follower.allows(min(FakeVocabulary().end_tokens))


def test_tags_that_tell_texts_from_other_values_do_so_by_the_schema(
    grammarian: Grammarian,
) -> None:
    """A number in tags of a text is not taken, nor the other way round; the parser agrees."""
    schema = {
        "type": "object",
        "properties": {"what": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["what", "n"],
    }
    text = '<f n="look"><p n="what" text="{}">3</p><p n="n" text="{}">3</p></f>'
    right = text.format("true", "false")
    assert takes(grammarian, TYPED, schema, right)
    assert not takes(grammarian, TYPED, schema, text.format("true", "true"))
    assert not takes(grammarian, TYPED, schema, text.format("false", "false"))
    parser = ReplyParser(FORMATS["typed tags"], tools=[Tool("look", "", schema)])
    (call,) = collect([*parser.feed(right), *parser.finish()]).calls
    assert json.loads(call.arguments) == {"what": "3", "n": 3}


@pytest.mark.parametrize(
    "more",
    [
        {"$defs": {"place": PLACE}, "at": "#/$defs/place"},
        {"definitions": {"place": PLACE}, "at": "#/definitions/place"},
        {"components": {"a/b": [PLACE]}, "at": "#/components/a~1b/0"},
        {
            "components": {"a b": {"$ref": "#/$defs/p"}},
            "$defs": {"p": PLACE},
            "at": "#/components/a%20b",
        },
    ],
)
def test_references_from_tagged_values_lead_where_they_do_in_the_whole(
    grammarian: Grammarian, more: dict[str, Any]
) -> None:
    """Wherever in the schema that is."""
    at = more.pop("at")
    schema = {"type": "object", "properties": {"to": {"$ref": at}}, "required": ["to"], **more}
    text = (
        "<tool_call>\n<function=look>\n<parameter=to>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    assert takes(grammarian, XML, schema, text.replace("{}", '{"x": 3}'))
    assert not takes(grammarian, XML, schema, text.replace("{}", '{"x": "3"}'))


def test_a_part_that_refers_to_itself_is_taken_along_once() -> None:
    """By way of others, too; what leads nowhere stays."""
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    part = part_of({"$defs": {"tree": tree}}, {"items": {"$ref": "#/$defs/tree"}})
    assert part == {
        "items": {"$ref": "#/$defs/part0"},
        "$defs": {"part0": {"type": "object", "properties": {"next": {"$ref": "#/$defs/part0"}}}},
    }
    lost = {"$ref": "#/$defs/none", "anyOf": [{"$ref": "https://example.org"}, {"$ref": "#a"}]}
    assert part_of({}, lost) == lost


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        (Shape("schema", json.dumps(PLACE)), '{"x": 3}', '{"x": "3"}'),
        (Shape("choice", '["ab", "c"]'), "ab", "a"),
    ],
)
def test_a_shape_is_that_of_the_final_message_in_harmony(
    shape: Shape, right: str, wrong: str
) -> None:
    """Behind the reasoning, if there is some; an answer out of its channel is not taken."""
    harmony = FORMATS["<|channel|><|message|><|start|>"]
    vocabulary = HarmonyVocabulary()
    replies, grammarian = Replies(vocabulary, Derivation(harmony)), Grammarian(vocabulary)
    thought = "<|channel|>analysis<|message|>w<|end|><|start|>assistant"

    def taken(text: str) -> bool:
        follower = replies.constraint(
            grammarian, shape, Loosened((), ()), ToolChoice(), None, thinking=False
        )
        assert follower is not None
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
        return accepted(follower, tokens.tolist())

    final = "<|channel|>final<|message|>"
    assert taken(final + right)
    assert taken(thought + final + right)
    assert not taken(final + wrong)
    assert not taken(right)
    parser = ReplyParser(harmony)
    said = collect([*parser.feed(thought + final + right), *parser.finish()])
    assert (said.content, said.reasoning) == (right, "w")


MANY = {
    "type": "object",
    "properties": {
        "what": {"type": "string"},
        "n": {"type": ["integer", "null"]},
        "how": {"enum": ["fast", None, 3, True]},
        "where": {"type": "object", "properties": {"x": {"type": "number"}, "y": {}}},
        "all": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["n"],
}
LFM = FORMATS["<|tool_call_start|>"]
GEMMA = FORMATS["<|tool_call>call:"]
_SOME: dict[str, Any] = {"n": 3}
_ALL: dict[str, Any] = {
    "what": "x",
    "n": None,
    "how": "fast",
    "where": {"x": -1.5, "y": [None, {"z": "a"}]},
    "all": [True, False],
}


@pytest.mark.parametrize(
    ("made", "written", "meant"),
    [
        (LFM, "[look(n=3)]", _SOME),
        (
            LFM,
            "[look(what='x', n=None, how=\"fast\", where={'x': -1.5, 'y': [None, {'z': 'a'}]}, all=[True, False])]",
            _ALL,
        ),
        (LFM, "[look(what='x')]", None),
        (LFM, "[look(n='3')]", None),
        (LFM, "[look(n=3, all=[1])]", None),
        (LFM, "[look(n=3, other=1)]", None),
        (LFM, "[look(n=3, how='slow')]", None),
        (LFM, "[look(, n=3)]", None),
        (GEMMA, "{n:3}", _SOME),
        (
            GEMMA,
            '{what:<|"|>x<|"|>,n:null,how:<|"|>fast<|"|>,where:{x:-1.5,y:[null,{z:<|"|>a<|"|>}]},all:[true,false]}',
            _ALL,
        ),
        (GEMMA, '{what:<|"|>x<|"|>}', None),
        (GEMMA, "{n:x}", None),
    ],
)
def test_literals_are_held_to_the_schema(
    grammarian: Grammarian, made: ReplyFormat, written: str, meant: dict[str, Any] | None
) -> None:
    """In the words and quotes of the format, as the parser reads them."""
    text = f"<|tool_call_start|>{written}<|tool_call_end|>"
    if made is GEMMA:
        text = f"<|tool_call>call:look{written}<tool_call|>"
    assert made.calls is not None
    assert takes(grammarian, made.calls, MANY, text) is (meant is not None)
    if meant is not None:
        parser = ReplyParser(made, tools=[Tool("look", "", MANY)])
        (call,) = collect([*parser.feed(text), *parser.finish()]).calls
        assert json.loads(call.arguments) == meant


def test_literals_of_a_tool_that_takes_anything_may_be_anything(grammarian: Grammarian) -> None:
    """As its schema says; one that takes nothing gets nothing."""
    assert LFM.calls is not None
    text = "<|tool_call_start|>[look({})]<|tool_call_end|>"
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    anything = {"type": "object"}
    for schema, arguments, taken in (
        (nothing, "", True),
        (nothing, "a=1", False),
        (anything, "", True),
        (anything, "a=[1, {'b': None}], c='x'", True),
    ):
        assert takes(grammarian, LFM.calls, schema, text.format(arguments)) is taken


class ChannelVocabulary(MarkedVocabulary):
    """Its markers are Kimi K3's."""

    markers = ("<|open|>", "<|close|>", "<|sep|>")


K3 = ReplyFormat("kimi-k3", thought=CHANNEL_THOUGHT, calls=CallSyntax(style="channels"))
_K3_CALL = (
    '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="what" type="string"<|sep|>x<y'
    '<|close|>argument<|sep|><|open|>argument key="n" type="{}"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
_K3_SAID = "<|open|>response<|sep|>So.<|close|>response<|sep|>"


def in_channels(
    shape: Shape | None,
    choice: ToolChoice,
    text: str,
    *,
    thinking: bool = False,
    beside: bool = False,
) -> bool:
    """Tell whether a reply in channels may be `text`."""
    vocabulary = ChannelVocabulary()
    replies, grammarian = Replies(vocabulary, Derivation(K3)), Grammarian(vocabulary)
    tools = [Tool("look", "", MANY)] if shape is None or beside else []
    loosened = replies.loosened(grammarian, tools, choice)
    follower = replies.constraint(grammarian, shape, loosened, choice, None, thinking=thinking)
    assert follower is not None
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    return accepted(follower, tokens.tolist())


def test_calls_in_channels_are_held_to_the_schema() -> None:
    """Behind the reasoning and a response, each argument under its type; the parser reads them."""
    must, may = ToolChoice("required"), ToolChoice()
    call = _K3_CALL.format("number")
    tools = f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"
    for choice in (must, may):
        assert in_channels(None, choice, _K3_SAID + tools)
        assert in_channels(None, choice, f"w<|close|>think<|sep|>{_K3_SAID}{tools}", thinking=True)
        assert in_channels(None, choice, _K3_SAID + tools + "<|close|>message<|sep|>")
        wrong = _K3_SAID + tools.replace("number", "string", 1)
        assert not in_channels(None, choice, wrong.replace('n" type="number', 'n" type="string'))
    assert in_channels(None, may, _K3_SAID)
    assert not in_channels(None, must, _K3_SAID)
    parser = ReplyParser(K3, tools=[Tool("look", "", MANY)])
    said = collect([*parser.feed(_K3_SAID + tools), *parser.finish()])
    assert (said.content, json.loads(said.calls[0].arguments)) == ("So.", {"what": "x<y", "n": 3})


def test_a_shape_is_that_of_the_response_in_channels() -> None:
    """Whether the prompt has opened it or not."""
    shape = Shape("schema", json.dumps(PLACE))
    end = "<|close|>response<|sep|>"
    for opened in ("", "<|open|>response<|sep|>"):
        assert in_channels(shape, ToolChoice(), f'{opened}{{"x": 3}}{end}')
        assert not in_channels(shape, ToolChoice(), f'{opened}{{"x": "3"}}{end}')


def test_beside_tools_a_response_in_channels_has_its_shape_or_is_empty() -> None:
    """Where it is empty, calls follow."""
    shape, end = Shape("schema", json.dumps(PLACE)), "<|close|>response<|sep|>"
    call = f"<|open|>tools<|sep|>{_K3_CALL.format('number')}<|close|>tools<|sep|>"
    may, must = ToolChoice(), ToolChoice("required")
    assert in_channels(shape, may, f'{{"x": 3}}{end}', beside=True)
    assert in_channels(shape, may, f"{end}{call}", beside=True)
    for text in (f"So.{end}", f'{{"x": 3}}{end}{call}', end):
        assert not in_channels(shape, may, text, beside=True)
    assert in_channels(shape, must, f"{end}{call}", beside=True)
    assert not in_channels(shape, must, f'{{"x": 3}}{end}', beside=True)


def test_beside_tools_a_final_message_in_harmony_has_its_shape() -> None:
    """Behind the reasoning, as a call stands there."""
    harmony = FORMATS["<|channel|><|message|><|start|>"]
    vocabulary = HarmonyVocabulary()
    replies, grammarian = Replies(vocabulary, Derivation(harmony)), Grammarian(vocabulary)
    loosened = replies.loosened(grammarian, [Tool("look", "", PLACE)], ToolChoice())

    def taken(text: str) -> bool:
        shape = Shape("schema", json.dumps(PLACE))
        follower = replies.constraint(
            grammarian, shape, loosened, ToolChoice(), None, thinking=False
        )
        assert follower is not None
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
        return accepted(follower, tokens.tolist())

    thought = "<|channel|>analysis<|message|>w<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    for before in ("", thought):
        assert taken(before + '<|channel|>final<|message|>{"x": 3}')
        assert taken(before + call + '{"x": 3}')
        assert not taken(before + "<|channel|>final<|message|>So.")


CALL = {"name": "look", "arguments": {"x": 3}}


UNFRAMED = sorted(
    name for name, made in FORMATS.items() if made.calls is not None and not made.calls.framed
)


@pytest.mark.parametrize("name", UNFRAMED)
def test_beside_tools_a_reply_of_every_format_has_a_shape_or_calls(
    grammarian: Grammarian, name: str
) -> None:
    """And is no other text."""
    made = FORMATS[name]
    replies = Replies(FakeVocabulary(), Derivation(made))
    loosened = replies.loosened(grammarian, [Tool("look", "", PLACE)], ToolChoice())

    def taken(shape: Shape, text: str) -> bool:
        follower = replies.constraint(
            grammarian, shape, loosened, ToolChoice(), None, thinking=False
        )
        assert follower is not None
        return accepted(follower, list(text.encode()))

    for shape, right in (
        (Shape("schema", json.dumps(PLACE)), '{"x": 3}'),
        (Shape("choice", '["ab", "c"]'), "ab"),
    ):
        assert taken(shape, right)
        assert not taken(shape, "So it is.")
        assert not taken(shape, "a")
        if name in ("hermes", "<|python_tag|>"):
            call = {"hermes": CALL, "<|python_tag|>": {"name": "look", "parameters": {"x": 3}}}[
                name
            ]
            text = json.dumps(call)
            text = f"<tool_call>\n{text}\n</tool_call>" if name == "hermes" else text
            assert taken(shape, text)
            assert not taken(shape, text.replace("3", '"3"'))
            assert not taken(shape, text.replace("look", "lock"))


class MuseVocabulary(MarkedVocabulary):
    """Its markers are Muse's."""

    markers = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")


class SolarVocabulary(MarkedVocabulary):
    """Its markers are Solar Open's."""

    markers = (
        *("<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|calls|>"),
        *("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    )


_MUSE_CALL = (
    ' to=look<|message|><atem:function_calls>\n<atem:invoke name="look">\n'
    '<atem:parameter name="what">x<y</atem:parameter>\n<atem:parameter name="n">{}</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
_SOLAR_CALL = (
    "<|tool_call:begin|>a1b2c3d4e<|tool_call:name|>look<|tool_call:args|>"
    '{{"what": "x<y", "n": {}}}<|tool_call:end|>'
)
FRAMES = [
    (
        FORMATS["<|start|>assistant to=self<|message|><atem:invoke"],
        MuseVocabulary(),
        " to=self<|message|>w<|eom|><|start|>assistant",
        " to=user<|message|>So.",
        ("", _MUSE_CALL, "<|eom|><|start|>assistant", "<|eot|>"),
    ),
    (
        FORMATS["<|begin|>assistant<|think|><|tool_call:begin|>"],
        SolarVocabulary(),
        "<|think|>w<|end|><|begin|>assistant",
        "<|content|>So.",
        ("<|tool_calls|>", _SOLAR_CALL, "", "<|calls|>"),
    ),
]


class M3Vocabulary(MarkedVocabulary):
    """Its marker is MiniMax M3's, and stands in front of every tag."""

    markers = ("]<]minimax[>[",)


def test_a_closing_tag_has_the_name_of_its_argument() -> None:
    """Behind a text, too, which may hold any other tag."""
    vocabulary, made = M3Vocabulary(), FORMATS["']<]minimax[>['"]
    replies, grammarian = Replies(vocabulary, Derivation(made)), Grammarian(vocabulary)
    tools = [Tool("look", "", MANY)]
    loosened = replies.loosened(grammarian, tools, ToolChoice("required"))
    text = (
        '#<tool_call>\n#<invoke name="look">#<what>x</what>#</what>#<n>3#</n>'
        '#<where>{"x": 1}#</where>#</invoke>\n#</tool_call>'
    ).replace("#", "]<]minimax[>[")
    for choice in (ToolChoice("required"), ToolChoice()):
        wrong = text.replace("]<]minimax[>[</n>", "]<]minimax[>[</m>")
        for reply, is_taken in ((text, True), (wrong, False)):
            follower = replies.constraint(grammarian, None, loosened, choice, None, thinking=False)
            assert follower is not None
            tokens = vocabulary.tokenize(reply, add_special=False, parse_special=True)
            assert accepted(follower, tokens.tolist()) is is_taken
    said = collect([*(parser := ReplyParser(made, tools=tools)).feed(text), *parser.finish()])
    assert json.loads(said.calls[0].arguments) == {"what": "x</what>", "n": 3, "where": {"x": 1}}


@pytest.mark.parametrize(
    ("made", "vocabulary", "thought", "said", "calls"), FRAMES, ids=["muse", "solar"]
)
def test_calls_in_messages_are_held_to_the_schema(
    made: ReplyFormat,
    vocabulary: MarkedVocabulary,
    thought: str,
    said: str,
    calls: tuple[str, str, str, str],
) -> None:
    """Behind the reasoning, or at once; the parser reads them."""
    replies, grammarian = Replies(vocabulary, Derivation(made)), Grammarian(vocabulary)
    tools = [Tool("look", "", MANY)]

    def takes(choice: ToolChoice, text: str, shape: Shape | None = None) -> bool:
        loosened = replies.loosened(grammarian, [] if shape else tools, choice)
        follower = replies.constraint(grammarian, shape, loosened, choice, None, thinking=False)
        assert follower is not None
        return accepted(
            follower, vocabulary.tokenize(text, add_special=False, parse_special=True).tolist()
        )

    must, may, single = ToolChoice("required"), ToolChoice(), ToolChoice(parallel=False)
    head, call, between, end = calls
    one, two = head + call.format(3), head + call.format(3) + between + call.format(4)
    for choice in (must, may):
        for text in (one, two, one + end, two + end, thought + one + end):
            assert takes(choice, text)
        assert not takes(choice, head + call.format('"3"'))
    assert takes(single, one + end)
    assert not takes(single, two)
    assert takes(may, said)
    assert takes(may, thought + said)
    assert not takes(must, said)
    shape = Shape("schema", json.dumps(PLACE))
    assert takes(may, thought + said.replace("So.", '{"x": 3}'), shape)
    assert not takes(may, thought + said.replace("So.", '{"x": "3"}'), shape)
    parser = ReplyParser(made, tools=tools)
    read = collect([*parser.feed(thought + two + end), *parser.finish()])
    assert (read.content, read.reasoning) == ("", "w")
    assert [json.loads(each.arguments)["n"] for each in read.calls] == [3, 4]


def test_the_quotes_of_literals_may_be_special_tokens() -> None:
    """Then the text between them ends with that token."""
    vocabulary = GemmaVocabulary()
    replies = Replies(vocabulary, Derivation(GEMMA))
    tools = [Tool("look", "", MANY)]
    grammarian = Grammarian(vocabulary)
    loosened = replies.loosened(grammarian, tools, ToolChoice("required"))
    for choice in (ToolChoice("required"), ToolChoice()):
        follower = replies.constraint(grammarian, None, loosened, choice, None, thinking=False)
        assert follower is not None
        text = '<|tool_call>call:look{what:<|"|>a "b"<|"|>,n:3}<tool_call|>'
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
        assert accepted(follower, tokens.tolist())


def test_arguments_that_a_schema_does_not_name_are_not_made_up(grammarian: Grammarian) -> None:
    """In no object of it, unless it says something of others; what it requires is always possible."""
    text = {"type": "string"}
    inner = {"type": "object", "properties": {"b": text}}
    named = {"properties": {"a": text, "in": inner, "all": {"type": "array", "items": inner}}}
    open_ = {"properties": {"a": text}, "additionalProperties": True}
    needs = {"properties": {"a": text}, "required": ["c"]}
    whole = {"properties": {"a": text}, "anyOf": [{"required": ["c"]}, {"required": ["a"]}]}
    replies = Replies(FakeVocabulary(), Derivation(FORMATS["hermes"]))
    syntax = FORMATS["hermes"].calls
    assert syntax is not None
    for schema, taken, refused in (
        (named, {"a": "x", "in": {"b": "y"}, "all": [{"b": "z"}]}, {"c": "x"}),
        (named, {}, {"in": {"c": "y"}}),
        (named, {}, {"all": [{"c": "y"}]}),
        (open_, {"a": "x", "c": "y"}, {"a": 1}),
        (needs, {"a": "x", "c": "y"}, {"a": "x"}),
        (whole, {"c": "x"}, {"a": 1}),
    ):
        tools = [Tool("look", "", schema)]
        (offer,) = replies.loosened(grammarian, tools, ToolChoice("required")).offers
        for arguments, fine in ((taken, True), (refused, False)):
            written = json.dumps({"name": "look", "arguments": arguments})
            call = f"<tool_call>\n{written}\n</tool_call>"
            assert takes(grammarian, syntax, dict(offer.schema), call) is fine, (schema, arguments)


@pytest.mark.parametrize("strict", [False, True])
def test_a_tool_without_parameters_takes_none(grammarian: Grammarian, strict: bool) -> None:
    """As in OpenAI's API; one whose parameters are any object takes that."""
    replies = Replies(FakeVocabulary(), Derivation(FORMATS["hermes"]))
    tools = [Tool("look", strict=strict), Tool("any", "", {"type": "object"}, strict=strict)]
    none, anything = replies.loosened(grammarian, tools, ToolChoice("required")).offers
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    more = text.replace("{}", '{"a": 1}')
    syntax = FORMATS["hermes"].calls
    assert syntax is not None
    assert takes(grammarian, syntax, dict(none.schema), text)
    assert not takes(grammarian, syntax, dict(none.schema), more)
    assert takes(grammarian, syntax, dict(anything.schema), more)


def test_thousands_of_tools_are_remembered_by_their_hashes(grammarian: Grammarian) -> None:
    """What is kept of a schema that was looked at does not depend on how long it is."""
    replies = Replies(FakeVocabulary(), Derivation(FORMATS["hermes"]))
    for n in range(1200):
        text = {"type": "string", "description": "x" * 5000, "maxLength": n + 1}
        tool = Tool("look", "", {"type": "object", "properties": {"a": text}})
        replies.loosened(grammarian, [tool], ToolChoice())
    assert len(replies._problems) == 512
    assert {len(key) for key in replies._problems} == {32}


@pytest.mark.parametrize(
    ("made", "vocabulary", "thought", "said", "calls"), FRAMES, ids=["muse", "solar"]
)
def test_beside_tools_a_message_has_its_shape(
    made: ReplyFormat,
    vocabulary: MarkedVocabulary,
    thought: str,
    said: str,
    calls: tuple[str, str, str, str],
) -> None:
    """Behind the reasoning, as calls stand there."""
    replies, grammarian = Replies(vocabulary, Derivation(made)), Grammarian(vocabulary)
    loosened = replies.loosened(grammarian, [Tool("look", "", MANY)], ToolChoice())
    shape = Shape("schema", json.dumps(PLACE))
    opened, call, _, closed = calls
    right = said.replace("So.", '{"x": 3}')
    for reply, is_taken in (
        *((right, True), (thought + right, True), (said, False)),
        (thought + opened + call.format(3) + closed, True),
    ):
        follower = replies.constraint(
            grammarian, shape, loosened, ToolChoice(), None, thinking=False
        )
        assert follower is not None
        tokens = vocabulary.tokenize(reply, add_special=False, parse_special=True)
        assert accepted(follower, tokens.tolist()) is is_taken
