"""Shapes that would hold everybody up: compiled and followed where they can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from confined_kit import host_of
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from uma_trio.confined.post import WorkerGone
from uma_trio.confined.workers import Worker
from uma_trio.text import confinement as confinement_module
from uma_trio.text import grammars
from uma_trio.text.confinement import ApartFollower, Confinement, Fate, ShapeLimits
from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.shape import Kind, NotChecked, Patience, Shape, Unconstrainable, Unknown, patient
from uma_trio.text.shape_worker import Verdict, is_plain
from uma_trio_sim.fake import EOS, IM_END, FakeVocabulary

ENDS = {EOS, IM_END}
# Enough for an ordinary shape on a crowded machine, and little enough for a test.
LIMITS = ShapeLimits(cpu_s=0.5, wall_s=60.0, memory_bytes=48 << 20)
AMBIGUOUS = 'root ::= s\ns ::= s s s s | s s s | s s | "a"'


@pytest.fixture(scope="module")
def confinement() -> Iterator[Confinement]:
    """Return where shapes are checked, its host prepared once."""
    found = Confinement(FakeVocabulary(), LIMITS)
    yield found
    found.close()


@pytest.fixture
def grammarian(confinement: Confinement) -> Grammarian:
    """Return one that knows nothing yet."""
    return Grammarian(FakeVocabulary(), confinement=confinement)


def checks(confinement: Confinement) -> int:
    """Return the number of shapes that were checked in a process."""
    return sum(confinement.events[name] for name in ("plain", "apart", "refused", "ended"))


class Told:
    """Stands for a confinement: it says what it was told, and counts."""

    def __init__(self, *verdicts: Verdict | Unconstrainable) -> None:
        self.verdicts = list(verdicts)
        self.events = Counter[str]()

    def note(self, event: str) -> None:
        """Count it."""
        self.events[event] += 1

    def check(self, shape: Shape) -> Verdict:
        """Return the next verdict."""
        found = self.verdicts.pop(0)
        if isinstance(found, Unconstrainable):
            raise found
        return found


def told(*verdicts: Verdict | Unconstrainable) -> Any:
    """Return a confinement that says this."""
    return Told(*verdicts)


HOSTILE: dict[str, tuple[Kind, str, str]] = {
    "multiples": ("schema", '{"allOf":[{"multipleOf":9973},{"multipleOf":9967}]}', "takes more"),
    "repeats": ("regex", "a{4000000000}", "takes more"),
    "nested repeats": ("regex", "((a{1000}){1000}){1000}", "takes more"),
    "line ends": ("grammar", "root ::= a" + "\n" * 16_000, "white space in a row"),
    "parentheses": ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_shape_is_refused_and_remembered(
    grammarian: Grammarian, confinement: Confinement, name: str
) -> None:
    """It is compiled nowhere but in its process, and the second time nowhere."""
    kind, text, words = HOSTILE[name]
    again = confinement.events["refused again"]
    for _ in range(2):
        checked = checks(confinement)
        with pytest.raises(Unconstrainable, match=words) as caught:
            grammarian.follow(Shape(kind, text))
        assert len(str(caught.value).splitlines()) == 1
    assert checks(confinement) == checked
    assert confinement.events["refused again"] == again + 1
    assert grammarian._made is None
    assert grammarian.kept_bytes == 0


def test_no_text_of_a_client_is_read_as_a_grammar_here(
    grammarian: Grammarian, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Translating GBNF takes time by the square of its length, with the interpreter's lock."""

    def never(text: str) -> str:
        raise AssertionError("translated in the daemon")

    monkeypatch.setattr(grammars, "any_to_lark", never)
    monkeypatch.setitem(grammars._SOURCES, "grammar", never)
    assert isinstance(grammarian.follow(Shape("grammar", 'root ::= "a" [0-9]+')), ApartFollower)


def test_a_hundred_refusals_leave_nothing_in_the_daemon() -> None:
    """Only the reasons of the latest thousand."""
    reasons = [Unconstrainable(f"takes too much: {number}") for number in range(1500)]
    grammarian = Grammarian(FakeVocabulary(), confinement=told(*reasons))
    for number in range(1500):
        with pytest.raises(Unconstrainable):
            grammarian.follow(Shape("regex", f"x{number}"))
    assert grammarian.kept_bytes == 0
    assert len(grammarian._verdicts) == 1024


def test_what_was_not_looked_at_is_looked_at_again() -> None:
    """A daemon that was short of something a moment ago says so only then."""
    passed = Verdict(source='{"grammars":[{"lark_grammar":"start: /a/"}]}', plain=True)
    grammarian = Grammarian(FakeVocabulary(), confinement=told(NotChecked("is busy"), passed))
    with pytest.raises(Unconstrainable, match="is busy"):
        grammarian.follow(Shape("regex", "a"))
    assert isinstance(grammarian.follow(Shape("regex", "a")), Follower)


@pytest.mark.parametrize(
    ("why", "of_the_shape"),
    [
        ("out of CPU time", True),
        ("out of memory", True),
        ("out of time", False),
        ("signal 9", False),
        ("it has ended", False),
        ("its host has ended", False),
    ],
)
def test_only_a_limit_of_its_own_is_held_against_a_shape(
    grammarian: Grammarian,
    confinement: Confinement,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    of_the_shape: bool,
) -> None:
    """What ends a process by chance says nothing about its shape, which is looked at again."""
    shape = Shape("regex", "by chance")
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "ask", lambda _worker, _payload: gone(why))
        with pytest.raises(Unconstrainable) as caught:
            grammarian.follow(shape)
    assert isinstance(caught.value, NotChecked) is not of_the_shape
    assert ("try again" in str(caught.value)) is not of_the_shape
    with pytest.raises(Unconstrainable) if of_the_shape else contextlib.nullcontext():
        grammarian.follow(shape)


def gone(why: str) -> Future[bytes]:
    """Return the answer of a process that has ended."""
    answer: Future[bytes] = Future()
    answer.set_exception(WorkerGone(why))
    return answer


def test_an_answer_whose_process_was_killed_is_told_to_try_again(confinement: Confinement) -> None:
    """It was none of the limits, and is counted as none."""
    stopped = confinement.events["stopped"]
    follower = confinement.follow(Shape("grammar", 'root ::= "killed" "a"+', "grammar"))
    follower.allowed()
    assert follower._worker is not None
    follower._worker.ask = lambda _payload: gone("signal 9")  # type: ignore[method-assign]
    follower.accept(ord("k"))
    assert not len(follower.allowed())
    assert follower.problem is not None
    assert "none of its limits (signal 9); try again" in follower.problem
    assert confinement.events["stopped"] == stopped


def test_the_engines_thread_starts_no_host() -> None:
    """An answer that moves while there is none has no way on; a helper thread starts one for the next."""
    confinement = Confinement(FakeVocabulary(), LIMITS)
    try:
        shape = Shape("grammar", 'root ::= "a"')
        assert not len(confinement.follow(shape, revive=False).allowed())
        assert not confinement.is_warm
        follower = confinement.follow(shape)
        assert confinement.is_warm
        assert len(follower.allowed())
    finally:
        confinement.close()


def test_an_answer_may_be_collected_while_a_process_is_looked_for(
    confinement: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in the middle of it, on the same thread: what it leaves is kept afterwards."""
    fate = Fate()
    fate.can_go_on = True
    late = confinement._workers.start(LIMITS.of_worker)
    collected = iter([late])

    class Seen(bytes):
        """A key at the comparison of which the collector runs."""

        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            for worker in collected:
                confinement._finish(b"late", worker, fate)
            return super().__eq__(other)

    confinement._finish(b"early", confinement._workers.start(LIMITS.of_worker), fate)
    assert confinement._taken(Seen(b"none")) is None
    assert confinement._taken(b"late") is late


def test_what_is_known_is_compiled_nowhere(
    grammarian: Grammarian, confinement: Confinement
) -> None:
    """Whoever asks for it learns at once, and what is not known is said to be so."""
    plain, apart, bad = Shape("regex", "kn+"), Shape("grammar", AMBIGUOUS), Shape("regex", "a{")
    tool = Shape("schema", '{"type": "object"}')
    for shape in (plain, apart, bad):
        with pytest.raises(Unknown):
            grammarian.known.follow(shape)
    with pytest.raises(Unknown):
        grammarian.known.check(tool)
    assert isinstance(grammarian.follow(plain), Follower)
    assert isinstance(grammarian.follow(apart), ApartFollower)
    with pytest.raises(Unconstrainable):
        grammarian.follow(bad)
    grammarian.check(tool)
    checked = checks(confinement)
    assert isinstance(grammarian.known.follow(plain), Follower)
    assert isinstance(grammarian.known.follow(apart), ApartFollower)
    with pytest.raises(Unconstrainable):
        grammarian.known.follow(bad)
    grammarian.known.check(tool)
    assert checks(confinement) == checked


def test_what_needs_a_process_is_not_known_before_any_can_be_started(
    grammarian: Grammarian, confinement: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes a second, which is waited for among those who compile."""
    shape = Shape("grammar", 'root ::= "cold"')
    grammarian.follow(shape)
    monkeypatch.setattr(confinement._workers, "_host", None)
    with pytest.raises(Unknown):
        grammarian.known.follow(shape)


def test_the_cache_counts_what_a_matcher_was_seen_to_hold() -> None:
    """Not how long it is written: a short one may hold most of what all may."""
    source = '{"grammars":[{"lark_grammar":"start: /a/"}]}'
    heavy = Verdict(source=source, plain=True, kept_bytes=7 << 20)
    grammarian = Grammarian(FakeVocabulary(), 16 << 20, told(*[heavy] * 5))
    for number in range(5):
        grammarian.follow(Shape("regex", f"a{number}"))
        assert grammarian.kept_bytes <= 16 << 20
    assert len(grammarian._compiled) == 2


@pytest.mark.parametrize(
    "dear",
    [
        Verdict(source="start: /a/", plain=False),
        Verdict(source="start: /a/", plain=True, kept_bytes=1 << 30),
        Verdict(source="start: /a/", plain=True, compile_s=1.0),
        Verdict(source="start: /a/", plain=True, step_s=0.1),
    ],
)
def test_what_is_dear_in_any_way_is_not_compiled_in_the_daemon(dear: Verdict) -> None:
    """Whether its memory, its compilation or its steps."""
    assert not confinement_module.fits_in_daemon(dear)
    assert confinement_module.fits_in_daemon(Verdict(source="start: /a/", plain=True))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("grammar", 'root ::= "ab" [0-9]+ "c"?', b"ab77c"),
        ("grammar", 'start: "a" /[0-9]/+', b"a77"),
        ("grammar", AMBIGUOUS, b"aaaaaaaa"),
        ("schema", '{"anyOf": [' + ",".join(['{"type":"array"}'] * 12) + "]}", b'[1,"a",[]]'),
    ],
)
def test_an_answer_followed_apart_may_say_the_same(
    grammarian: Grammarian, kind: Kind, text: str, said: bytes
) -> None:
    """At each of its places, and behind steps that were taken back."""
    here = Grammarian(FakeVocabulary()).follow(Shape(kind, text))
    apart = grammarian.follow(Shape(kind, text))
    assert isinstance(apart, ApartFollower)
    # A text that is forced here is one token there: any of its beginnings.
    for token in said:
        ids = apart.allowed().tolist()
        assert {t for t in range(FakeVocabulary().n_vocab) if here.allows(t)} == set(ids)
        assert apart.allows(token)
        apart.accept(token)
        apart.take_back()
        assert apart.allowed().tolist() == ids
        apart.accept(token)
        here.accept(token)
    assert apart.allows(EOS) == here.allows(EOS)


def test_two_answers_to_one_grammar_do_not_share_their_way(grammarian: Grammarian) -> None:
    """Each has a process, from its first step on."""
    shape = Shape("grammar", 'root ::= "a" "b" | "c" "d"')
    one, other = grammarian.follow(shape), grammarian.follow(shape)
    one.accept(ord("a"))
    assert one.allowed().tolist() == [ord("b")]
    assert ord("c") in other.allowed().tolist()


def test_a_process_that_ends_leaves_no_way_on(confinement: Confinement) -> None:
    """The answer fails, whatever it was killed by; so does one whose host cannot be started."""
    follower = confinement.follow(Shape("grammar", AMBIGUOUS))
    assert len(follower.allowed())
    worker = follower._worker
    assert worker is not None
    worker.close()
    follower.accept(ord("a"))
    assert not len(follower.allowed())
    assert not follower.allows(ord("a"))


def test_an_answer_that_takes_too_long_altogether_has_no_way_on(confinement: Confinement) -> None:
    """A grammar that is ambiguous everywhere ends before the thousandth token, and says which limit it was."""
    stopped = confinement.events["stopped"]
    follower = confinement.follow(Shape("grammar", AMBIGUOUS, "grammar"))
    for _ in range(1000):
        if not len(follower.allowed()):
            break
        assert follower.problem is None
        follower.accept(ord("a"))
    else:
        raise AssertionError("it goes on for ever")
    assert follower.problem is not None
    assert re.fullmatch(r"The grammar (takes more|can be read in too many).*", follower.problem)
    assert confinement.events["stopped"] - stopped in (0, 1)


def test_a_grammar_with_no_way_on_of_its_own_names_no_limit(confinement: Confinement) -> None:
    """That the model's next token does not fit is no matter of time."""
    follower = confinement.follow(Shape("grammar", 'root ::= "a"'))
    follower.accept(ord("b"))
    assert not len(follower.allowed())
    assert follower.problem is None


def followed(confinement: Confinement, text: str, said: bytes = b"") -> Worker:
    """Follow an answer to its end; return the process that it had."""
    follower = confinement.follow(Shape("grammar", text))
    follower.begin(said)
    follower.allowed()
    assert follower._worker is not None
    return follower._worker


def test_the_next_answer_has_the_process_of_the_last_one(confinement: Confinement) -> None:
    """Which has compiled the shape; it begins anew, and has its own time."""
    text = 'root ::= "kept" "a"+'
    worker = followed(confinement, text, b"keptaaa")
    follower = confinement.follow(Shape("grammar", text))
    assert follower.allowed().tolist() == [ord("k")]
    assert follower._worker is worker
    follower.accept(ord("k"))
    assert follower.allowed().tolist() == [ord("e")]
    other = confinement.follow(Shape("grammar", text))
    assert other.allowed().tolist() == [ord("k")]
    assert other._worker is not worker


def test_a_process_follows_another_answer_after_a_whole_one(confinement: Confinement) -> None:
    """At the end of which its matcher had stopped."""
    text = 'root ::= "whole"'
    worker = followed(confinement, text, b"whole")
    for _ in range(3):
        assert followed(confinement, text, b"who") is worker
        assert followed(confinement, text, b"whole") is worker
    follower = confinement.follow(Shape("grammar", text))
    follower.begin(b"who")
    assert follower.allowed().tolist() == [ord("l")]


def test_few_processes_wait_for_another_answer(confinement: Confinement) -> None:
    """The oldest of too many ends."""
    first, *others = [followed(confinement, f'root ::= "few {n}"') for n in range(5)]
    assert first._line is not None
    assert first._line.asked_to_close
    assert all(worker.is_idle for worker in others)


def test_a_process_that_was_left_in_the_middle_ends(confinement: Confinement) -> None:
    """Whatever it does: nobody waits for it, and nobody else gets it."""
    follower: ApartFollower | None = confinement.follow(Shape("grammar", AMBIGUOUS))
    assert follower is not None
    follower.begin(b"a" * 30)
    worker = follower._worker
    assert worker is not None
    del follower
    assert worker._line is not None
    assert worker._line.asked_to_close


def test_an_answer_with_no_way_on_ends_its_process(confinement: Confinement) -> None:
    """A matcher that has failed follows nothing else."""
    worker = followed(confinement, 'root ::= "a"', b"b")
    assert worker._line is not None
    assert worker._line.asked_to_close


def test_a_killed_host_costs_those_who_wait_and_nobody_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next shape has a new one."""
    monkeypatch.setattr("uma_trio.confined.workers._RESTART_S", 0.0)
    confinement = Confinement(FakeVocabulary(), LIMITS)
    try:
        confinement.check(Shape("regex", "a"))
        host = host_of(confinement._workers)
        assert host is not None
        os.kill(host, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the thread that waits for it was first
            os.waitid(os.P_PID, host, os.WEXITED | os.WNOWAIT)
        follower = confinement.follow(Shape("grammar", AMBIGUOUS))
        while host_of(confinement._workers) == host:
            follower = confinement.follow(Shape("grammar", AMBIGUOUS))
            follower.allowed()
        assert len(confinement.follow(Shape("grammar", AMBIGUOUS)).allowed())
    finally:
        confinement.close()


def test_a_large_vocabulary_is_prepared_before_the_daemon_serves_or_not_at_all(
    grammarian: Grammarian, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain shape is followed apart unless the vocabulary was prepared: that holds everybody up."""
    monkeypatch.setattr("uma_trio.text.constrain._SMALL_VOCABULARY", 0)
    assert isinstance(grammarian.follow(Shape("regex", "ab+")), ApartFollower)
    assert grammarian._made is None
    grammarian.prepare()
    assert isinstance(grammarian.follow(Shape("regex", "ac+")), Follower)


def test_a_step_that_takes_too_long_moves_its_answer_to_a_process(
    grammarian: Grammarian, confinement: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where it was, and may be taken back beyond that; the next answer begins there."""
    shape, moved = Shape("regex", "(ab)+"), confinement.events["moved"]
    follower = grammarian.follow(shape)
    assert isinstance(follower, Follower)
    follower.accept(ord("a"))
    assert not follower.elsewhere
    monkeypatch.setattr("uma_trio.text.constrain._STEP_S", -1.0)
    follower.accept(ord("b"))
    assert follower.elsewhere
    assert EOS in follower.allowed()
    follower.take_back()
    assert follower.allowed().tolist() == [ord("b")]
    follower.take_back()
    assert follower.deferred()().tolist() == [ord("a")]
    assert follower.problem is None
    assert confinement.events["moved"] == moved + 1
    assert isinstance(grammarian.follow(shape), ApartFollower)
    assert grammarian.kept_bytes == 0


def test_an_answer_of_any_length_can_be_moved(confinement: Confinement) -> None:
    """Its tokens go in several frames, each with a time limit of its own."""
    follower = confinement.follow(Shape("grammar", 'root ::= "a"+ "b"'))
    follower.begin([ord("a")] * 1000)
    assert ord("b") in follower.allowed()
    follower.accept(ord("b"))
    assert EOS in follower.allowed()


def test_an_answer_that_can_be_read_in_many_ways_is_not_followed_in_the_daemon(
    confinement: Confinement,
) -> None:
    """Whatever a shape was taken for: llguidance ends it here at so many items, and a process goes on."""
    source = LLMatcher.grammar_from_lark(any_to_lark(AMBIGUOUS))
    taken = told(Verdict(source=source, plain=True))
    taken.follow = confinement.follow
    follower = Grammarian(FakeVocabulary(), confinement=taken).follow(Shape("grammar", AMBIGUOUS))
    assert isinstance(follower, Follower)
    n_here = 0
    while not follower.elsewhere:
        follower.accept(ord("a"))
        n_here += 1
    assert 3 < n_here < 40
    assert ord("a") in follower.allowed()


def test_an_answer_without_another_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else can follow it, it has no way on, and takes no further step."""
    follower = Grammarian(FakeVocabulary()).follow(Shape("regex", "a+"))
    assert follower.allows(ord("a"))
    monkeypatch.setattr("uma_trio.text.constrain._STEP_S", -1.0)
    follower.accept(ord("a"))
    assert not follower.allows(ord("a"))
    assert not len(follower.allowed())


def test_nobody_waits_for_shapes_of_a_request_that_was_given_up(confinement: Confinement) -> None:
    """Of 128 tools, those that are left are not begun."""
    checked = checks(confinement)
    grammarian = Grammarian(FakeVocabulary(), confinement=confinement)
    with patient(Patience(0.0)), pytest.raises(NotChecked):
        grammarian.check(Shape("regex", "new"))
    assert checks(confinement) == checked
    with patient(Patience(time.monotonic() + 60)):
        grammarian.check(Shape("regex", "new"))


@pytest.mark.parametrize(
    ("kind", "text", "plain"),
    [
        ("regex", "a+", True),
        ("choice", '["a"]', True),
        ("grammar", 'root ::= "a"', False),
        ("schema", '{"type": "object", "properties": {"a": {"type": "string"}}}', True),
        ("schema", '{"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "$defs": {"n": {}}}', True),
        ("schema", json.dumps({"anyOf": [{"const": n} for n in range(500)]}), True),
        ("schema", json.dumps({"anyOf": [{"type": "array", "minItems": n} for n in range(30)]}), False),
        ("schema", json.dumps({"properties": {f"p{n}": {} for n in range(1000)}}), False),
        ("schema", json.dumps([[0] * 200] * 200), False),
        ("schema", "[" * 100_000, False),
        ("reply", 'start: %json {"type": "object"} "x"\na: %json {"const": "%json {"}', True),
        ("reply", f'start: %json {json.dumps({"anyOf": [{}] * 30})}', False),
        ("reply", "start: %json nonsense", False),
    ],
)  # fmt: skip
def test_only_what_can_be_read_in_few_ways_is_plain(kind: Kind, text: str, plain: bool) -> None:
    """JSON is, unless a schema has many alternatives that begin alike."""
    assert is_plain(kind, text) is plain
