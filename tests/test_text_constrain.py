"""Grammars for answers: what is enforced, what is refused with its reason, and what it may cost."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.shape import MAX_BYTES, Kind, Shape, Unconstrainable
from uma_trio.text.thinking import Markers, Thinking
from uma_trio_sim.fake import EOS, IM_END, FakeVocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENDS = {EOS, IM_END}


@pytest.fixture(scope="module")
def grammarian() -> Grammarian:
    """Return one that has compiled nothing yet when the first test asks."""
    return Grammarian(FakeVocabulary())


def accepts(follower: Follower, text: str) -> bool:
    """Whether an answer may be `text` and end there."""
    for byte in text.encode():
        if not follower.allows(byte):
            return False
        follower.accept(byte)
    return follower.allows(EOS) and follower.allows(IM_END)


@pytest.mark.parametrize(
    ("kind", "shape", "good", "bad"),
    [
        ("schema", json.dumps(PERSON), '{"name": "é", "age": 3}', '{"name": "é"}'),
        ("schema", json.dumps(PERSON), '{"name":"x","age":3}', '{"age":3,"name":"x"}'),
        (
            "schema",
            json.dumps(PERSON),
            '{\n  "name": "x",\n  "age": 3\n}',
            '{"name":"x","age":3.5}',
        ),
        ("schema", '{"type": "object"}', '{"a": [1, {"b": null}]}', "[1]"),
        ("schema", '{"enum": ["x", 1, null]}', "null", '"y"'),
        ("regex", "[0-9]{3}-[a-f]+", "123-ab", "12-ab"),
        ("choice", '["yes", "no", "not | quite\\n"]', "not | quite\n", "maybe"),
        ("choice", '["a", "ab"]', "a", "b"),
        ("grammar", 'root ::= "a" [0-9]+', "a77", "a"),
        ("grammar", 'start: "a" /[0-9]+/', "a77", "7"),
    ],
)
def test_what_fits_is_accepted_and_nothing_else(
    grammarian: Grammarian, kind: Kind, shape: str, good: str, bad: str
) -> None:
    """Each kind of shape, told by texts that it does and does not hold."""
    assert accepts(grammarian.follow(Shape(kind, shape)), good)
    assert not accepts(grammarian.follow(Shape(kind, shape)), bad)


def test_an_end_is_allowed_where_the_answer_is_whole_and_only_there(
    grammarian: Grammarian,
) -> None:
    """In the middle it is not, behind the last character nothing else is."""
    follower = grammarian.follow(Shape("choice", '["ab"]'))
    assert not follower.allows(EOS)
    follower.accept(ord("a"))
    assert set(follower.allowed().tolist()) == {ord("b")}
    follower.accept(ord("b"))
    assert set(follower.allowed().tolist()) == ENDS


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_over_allowed_tokens_give_valid_json(
    grammarian: Grammarian, seed: int
) -> None:
    """Whoever only ever takes what is allowed ends with an instance of the schema."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "note": {"type": "string", "maxLength": 5},
        },
        "required": ["kind", "ages"],
        "additionalProperties": False,
    }
    chance = random.Random(seed)
    follower = grammarian.follow(Shape("schema", json.dumps(schema)))
    answer = bytearray()
    while len(answer) < 2000:
        token = chance.choice(follower.allowed().tolist())
        assert follower.allows(token)
        if token in ENDS:
            break
        answer.append(token)
        follower.accept(token)
    found = json.loads(answer)
    assert found["kind"] in ("cat", "dog")
    assert len(found["ages"]) <= 3
    assert all(type(age) is int for age in found["ages"])
    assert set(found) <= {"kind", "ages", "note"}


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("schema", {"not": {"type": "string"}}, '"not"'),
        ("schema", {"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ("schema", {"x-guidance": {"lenient": True}, "not": {}}, '"not"'),
        ("schema", {"$ref": "http://elsewhere/schema"}, "http://elsewhere/schema"),
        ("schema", {"type": "string", "format": "nope"}, "nope"),
        ("schema", {"type": "string", "pattern": "(?=a)"}, "look-around"),
        ("schema", {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ("schema", {"$ref": "#"}, "allows no answer at all"),
        ("schema", [1], "object"),
        ("regex", "(a|b", "unclosed group"),
        ("choice", [], "at least one string"),
        ("choice", [1], "at least one string"),
        ("grammar", "root ::= (", "Expected"),
        ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
        ("regex", "a" * (MAX_BYTES["regex"] + 1), "65536 bytes"),
        ("grammar", "#" * (MAX_BYTES["grammar"] + 1), "16384 bytes"),
        ("schema", "\ud800", "is not usable"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_reason(
    grammarian: Grammarian, kind: Kind, shape: object, words: str
) -> None:
    """By the keyword, or by what is wrong; never loosened in silence."""
    text = shape if isinstance(shape, str) else json.dumps(shape)
    with pytest.raises(Unconstrainable) as caught:
        grammarian.follow(Shape(kind, text))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def hostile(name: str) -> dict[str, Any]:
    """Return a schema that a careless compiler would choke on."""
    if name == "deep":
        deep: dict[str, Any] = {"type": "string"}
        for _ in range(100):
            deep = {"type": "array", "items": deep}
        return deep
    wide = {f"p{i}": {"type": "string", "pattern": "(a|b){1,50}c{1,50}"} for i in range(300)}
    parts = [
        {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(6)]}
        for i in range(6)
    ]
    schemas: dict[str, dict[str, Any]] = {
        "wide": {"type": "object", "properties": wide},
        "product": {"type": "object", "allOf": parts},
        "repeats": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
        "backtracking": {"type": "string", "pattern": "(a|a)*(a|a)*(a|a)*b|.*x.{20}"},
        "many": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    }
    return schemas[name]


@pytest.mark.parametrize("name", ["deep", "wide", "product", "repeats", "backtracking", "many"])
def test_a_hostile_schema_is_followed_or_refused(grammarian: Grammarian, name: str) -> None:
    """Within its limits; one that fails on the way says that there is no way on."""
    try:
        follower = grammarian.follow(Shape("schema", json.dumps(hostile(name))))
    except Unconstrainable:
        return
    for _ in range(50):
        tokens = follower.allowed()
        if not len(tokens) or int(tokens[-1]) in ENDS:
            break
        follower.accept(int(tokens[-1]))


def test_answers_do_not_share_their_way(grammarian: Grammarian) -> None:
    """Two requests with one schema are each where their own answer is."""
    one = grammarian.follow(Shape("choice", '["ab", "cd"]'))
    other = grammarian.follow(Shape("choice", '["ab", "cd"]'))
    one.accept(ord("a"))
    assert one.allows(ord("b"))
    assert not other.allows(ord("b"))
    assert other.allows(ord("c"))


def test_thousands_of_shapes_keep_the_cache_at_its_size() -> None:
    """The oldest leaves, and is compiled again when it is asked for; a long one takes more room."""
    grammarian = Grammarian(FakeVocabulary(), cache_bytes=1 << 20)
    for number in range(2000):
        grammarian.follow(Shape("regex", f"x{number}"))
        assert grammarian.kept_bytes <= 1 << 20
    known = len(grammarian._compiled)
    assert known > 8
    assert accepts(grammarian.follow(Shape("regex", "x0")), "x0")
    long = json.dumps([str(number) for number in range(1000)])
    assert accepts(grammarian.follow(Shape("choice", long)), "999")
    assert len(grammarian._compiled) < known / 2
    assert grammarian.kept_bytes <= 1 << 20


def test_one_shape_that_is_larger_than_the_cache_is_kept_until_the_next() -> None:
    """Answers to it that come together share what was compiled."""
    grammarian = Grammarian(FakeVocabulary(), cache_bytes=1)
    grammarian.follow(Shape("regex", "a"))
    assert len(grammarian._compiled) == 1
    grammarian.follow(Shape("regex", "b"))
    assert len(grammarian._compiled) == 1


def test_any_number_of_threads_may_compile() -> None:
    """The vocabulary is prepared once, whoever comes first."""
    grammarian = Grammarian(FakeVocabulary())
    with ThreadPoolExecutor(4) as pool:
        shapes = [Shape("regex", f"y{number % 5}") for number in range(40)]
        followers = list(pool.map(grammarian.follow, shapes))
    assert all(accepts(f, f"y{n % 5}") for n, f in enumerate(followers))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("schema", json.dumps(PERSON)),
        ("choice", '["abc", "abd"]'),
        ("grammar", 'root ::= "a" [0-9]{3}'),
    ],
)
def test_what_was_accepted_can_be_taken_back(
    grammarian: Grammarian, kind: Kind, shape: str
) -> None:
    """From anywhere, also from the end of a whole answer: it is as if it had not been accepted."""
    chance = random.Random(7)
    for _ in range(30):
        follower, other = (grammarian.follow(Shape(kind, shape)) for _ in range(2))
        kept = chance.randrange(12)
        for n in range(kept + chance.randrange(1, 9)):
            ways = [token for token in follower.allowed().tolist() if token not in ENDS]
            if not ways:
                break
            token = chance.choice(ways)
            follower.accept(token)
            if n < kept:
                other.accept(token)
        for _ in range(max(0, n - kept + bool(ways))):
            follower.take_back()
        assert follower.allowed().tolist() == other.allowed().tolist()
        assert follower.allows(EOS) == other.allows(EOS)


def test_a_deferred_mask_is_that_of_its_place(grammarian: Grammarian) -> None:
    """Wherever the answer has gone meanwhile, and in whatever thread it is found."""
    follower = grammarian.follow(Shape("regex", "[ab][cd][ef]"))
    with ThreadPoolExecutor(1) as pool:
        for token in b"ace":
            here, deferred = follower.allowed().tolist(), follower.deferred()
            follower.accept(token)
            assert pool.submit(deferred).result().tolist() == here


@pytest.mark.parametrize("thought", [b"", b"<think>", b"<think>hm", b"<think>hm</think>", b"<th"])
@pytest.mark.parametrize("shape", [None, Shape("regex", "[ab][cd]")])
@pytest.mark.parametrize("budget", [None, 1, 9])
def test_a_deferred_mask_behind_reasoning_is_that_of_its_place(
    grammarian: Grammarian, thought: bytes, shape: Shape | None, budget: int | None
) -> None:
    """Inside the thought, in its markers and behind them."""
    pieces = FakeVocabulary().pieces()
    markers = Markers(list, pieces, b"<think>", b"</think>", tuple(b"</think>"), ENDS)
    inner = None if shape is None else grammarian.follow(shape)
    thinking = Thinking(markers, inner, budget, thinking=False)
    for token in thought:
        thinking.accept(token)
    here, deferred = thinking.allowed().tolist(), thinking.deferred()
    thinking.accept(here[0])
    assert deferred().tolist() == here


@pytest.mark.parametrize("regex", ["[0-9]", "(?s:.)", "[a-z ]+", "x", "[^a]"])
def test_all_that_is_allowed_is_what_each_token_is_told(grammarian: Grammarian, regex: str) -> None:
    """Whether it is one token, some, or nearly all of them."""
    follower = grammarian.follow(Shape("regex", regex))
    every = range(FakeVocabulary().n_vocab)
    assert follower.allowed().tolist() == [t for t in every if follower.allows(t)]
