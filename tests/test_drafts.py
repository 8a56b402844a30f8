"""Drafts: what is guessed, what the policy takes of it, and that no answer changes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import structlog
from attrs import evolve
from drafts_kit import FLAT, STAIRS, STEEP, speaking
from engine_kit import KINDS, Balking, Bench, BrokenText
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import decoder

from uma_protocol import Generate
from uma_trio.api.openai.completions import Completions
from uma_trio.app import build
from uma_trio.app.build import allowed_speculation
from uma_trio.backend.base import IntArray, Traits
from uma_trio.config.options import Config
from uma_trio.engine.chunk import EARLIER_ANSWERS, OWN_TEXT, DraftOrigin
from uma_trio.engine.drafts import Drafter
from uma_trio.engine.drafts.lookup import (
    INDEXED_A_TICK,
    MOST_NAMESPACES,
    MOST_PROMPT_TOKENS,
    MOST_PROMPTS,
    EarlierAnswers,
    Lookup,
    Pool,
    Prompts,
    Runs,
    Survival,
    part_of,
)
from uma_trio.engine.messages import Prefix
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.accounting import planned_work
from uma_trio.policy.check import check_plan
from uma_trio.policy.cost import CostModel
from uma_trio.policy.costing.calibrate import Measured
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.drafts import add_drafts
from uma_trio.policy.deadline.shape import MOST_BALLAST, ballast_for
from uma_trio.policy.decode import one_token_each
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import Contract, Memory, SchedulerState, SequenceView
from uma_trio.policy.tuning import TUNING
from uma_trio.service.ask import speculation_of
from uma_trio.uds.wire import ask_of
from uma_trio.words import Lane, Speculation
from uma_trio_sim.fake import FakeBackend


def guess(text: str, most: int = 6) -> tuple[str, int]:
    """Return what is guessed behind a text of one-byte tokens, and the length of the match."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    lookup = Lookup()
    while not lookup.index(tokens, len(tokens), most=3):
        pass
    drafts, match = lookup.propose(tokens, len(tokens), most)
    return bytes(drafts).decode(), match


def test_a_text_that_was_there_before_goes_on_as_it_did() -> None:
    """The guess follows the latest place of the longest known run that the text ends with."""
    assert guess("the quick brown fox; the quick br") == ("own fo", 12)


def test_of_two_places_the_latest_counts() -> None:
    """An edit is more likely to be repeated than what it replaced."""
    assert guess("ab1 ab2 ab")[0][0] == "2"


def test_a_copy_goes_on_where_it_was_although_another_place_is_later() -> None:
    """The text that was followed so far matches further back than the latest place does."""
    old = "one: pass the salt. two: pass the salad. "
    text = old + "one: pass the sal"
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    lookup = Lookup()
    for known in range(len(old) + 4, len(text) + 1):
        lookup.index(tokens, known)
        drafts, match = lookup.propose(tokens, known, 3)
    assert (bytes(drafts).decode(), match) == ("t. ", 17)


def test_what_never_stood_there_gives_no_guess() -> None:
    """Two tokens must match at the least."""
    assert guess("abcdefgh") == ("", 0)


def test_a_loop_is_guessed_to_go_on() -> None:
    """Where the copy reaches the end of the text it begins again."""
    assert guess("xyxyxyxy", 5)[0] == "xyxyx"


@settings(deadline=None)
@given(st.text("ab", min_size=3, max_size=40), st.integers(1, 12))
def test_a_guess_follows_a_run_that_the_text_ends_with(text: str, most: int) -> None:
    """In any text, for any length: the guess is what stood behind the same tokens."""
    drafts, match = guess(text, most)
    if match:
        assert len(drafts) == most
        tail = text[-match:]
        places = [i + match for i in range(len(text) - match) if text.startswith(tail, i)]
        assert any((text[p:] + drafts)[:most] == drafts for p in places)


# --- turns ---


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=60),
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
)
def test_a_turn_that_goes_on_from_an_earlier_prompt_guesses_as_if_it_did_not(
    prompt: list[int], answer: list[int], new: list[int]
) -> None:
    """Whatever was answered to that: only its prompt is gone on from."""
    prompts, first = Prompts(), Lookup(len(prompt))
    before, text = np.array(prompt + answer, np.int32), np.array(prompt + new, np.int32)
    first.index(before, len(before))
    runs = first.prompt_runs()
    assert runs is not None
    prompts.add("a", before[: len(prompt)], runs)
    anew, gone_on = Lookup(), Lookup(len(text), prompts.take("a", text))
    for known in range(len(prompt) + 1, len(text) + 1):
        assert anew.index(text, known)
        assert gone_on.index(text, known, most=len(new))
        assert gone_on.propose(text, known, 5) == anew.propose(text, known, 5)


def test_prompts_are_kept_by_namespace_for_one_that_goes_on_and_within_bounds() -> None:
    """Who takes one has it alone; whoever asks is forgotten; the oldest go."""
    prompts, text = Prompts(), tokens_of("the quick brown fox")
    longer = tokens_of("the quick brown fox jumps")
    for namespace in ("a", "b"):
        prompts.add(namespace, text, Runs(len(text), ({}, {}, {})))
    assert prompts.take("c", longer) is None
    assert prompts.take(None, longer) is None
    assert prompts.take("a", text[:5]) is None
    assert prompts.take("a", longer) is not None
    assert prompts.take("a", longer) is None
    prompts.forget(lambda name: name == "b")
    assert prompts.take("b", longer) is None
    assert prompts.n_tokens == 0
    for n in range(3 * MOST_PROMPTS):
        prompts.add("a", np.full(5000, n, np.int32), Runs(5000, ({}, {}, {})))
        assert prompts.n_tokens <= MOST_PROMPT_TOKENS
    assert prompts.take("a", np.full(5000, 0, np.int32)) is None
    assert prompts.take("a", np.full(5001, n, np.int32)) is not None


def test_a_turn_is_indexed_from_where_it_is_new() -> None:
    """A long conversation has guesses from the first token of an answer on."""
    drafter = Drafter()
    backend = FakeBackend(n_slots=5, n_ctx=8192, n_rows=24)
    given_settings = EngineSettings(cost=FLAT)
    bench = Bench(
        *(backend, deadline),
        settings=given_settings,
        drafter=drafter,
        clock=lambda: 0.02 * backend.decodes,
    )
    prompt = list(range(200)) * 15
    bench.submit(prompt, namespace="a", max_tokens=40)
    bench.run()
    bench.submit([*prompt, 7, 8, 9], namespace="a", max_tokens=40)
    bench.engine.tick()
    running = bench.engine.registry.running
    assert drafter.unread(running) == []
    assert [part.n_tokens for part in Drafter().unread(running)] == [INDEXED_A_TICK]


# --- earlier answers ---


def tokens_of(text: str) -> IntArray:
    """Return a token for each byte."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_a_pool_forgets_the_answers_of_whoever_asks() -> None:
    """Those that wait to be indexed, too; others keep theirs."""
    pool = Pool()
    for namespace in ("uid 1", "uid 2"):
        pool.add(namespace, tokens_of("the quick brown fox"))
    pool.index()
    pool.add("uid 1", tokens_of("jumps over the lazy dog"))
    pool.forget(lambda name: name == "uid 1")
    pool.index()
    assert from_pool(pool, "uid 1", "the quick bro") == ("", 0)
    assert from_pool(pool, "uid 1", "jumps over th") == ("", 0)
    assert from_pool(pool, "uid 2", "the quick bro")[0] == "wn fox"


def from_pool(pool: Pool, namespace: str | None, text: str, most: int = 6) -> tuple[str, int]:
    """Return what a pool guesses behind a text, and the length of the match."""
    tokens = tokens_of(text)
    drafts, match = pool.propose(namespace, tokens, len(tokens), most)
    return bytes(drafts).decode(), match


def test_an_answer_is_guessed_from_an_earlier_one() -> None:
    """Of the same namespace, up to its end."""
    pool = Pool()
    pool.add("uid 1", tokens_of("the quick brown fox"))
    pool.add("uid 1", tokens_of("something else"))
    pool.index()
    assert from_pool(pool, "uid 1", "a quick bro") == ("wn fox", 10)
    assert from_pool(pool, "uid 1", "a quick brown f") == ("ox", 14)
    assert from_pool(pool, "uid 1", "a quick brown fox") == ("", 0)


def test_no_answer_is_guessed_from_that_of_another_namespace() -> None:
    """Whatever was asked there; who shares nothing gets nothing."""
    pool = Pool()
    pool.add("uid 1", tokens_of("the quick brown fox"))
    pool.index()
    for other in ("uid 2", "uid 1/client 7", "uid 1/salt x", None):
        assert from_pool(pool, other, "the quick bro") == ("", 0)


def test_answers_are_taken_in_little_by_little() -> None:
    """A long one takes no tick long."""
    pool = Pool()
    pool.add("uid 1", tokens_of("abcdefgh" * 4))
    pool.index(20)
    assert from_pool(pool, "uid 1", "cdefgh")[0] == "abc"
    pool.index(20)
    assert from_pool(pool, "uid 1", "cdefgh")[0] == ""
    assert from_pool(pool, "uid 1", "abcdef")[0] == "gh"


def test_namespaces_are_bounded_and_the_one_unused_for_longest_goes() -> None:
    """A daemon with many users keeps the latest."""
    pool = Pool()
    for n in range(MOST_NAMESPACES + 1):
        pool.add(f"uid {n}", tokens_of("the quick brown fox"))
        pool.index()
    assert from_pool(pool, "uid 0", "quick bro") == ("", 0)
    assert from_pool(pool, "uid 1", "quick bro")[0] == "wn fox"


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=12), max_size=20), st.integers(16, 40))
def test_the_ring_knows_what_is_in_it_and_nothing_else(texts: list[str], room: int) -> None:
    """A guess stood behind the same tokens in the latest `room` tokens."""
    answers = EarlierAnswers(room)
    said = ""
    for text in texts:
        answers.add(np.concatenate([np.full(1, -1, np.int32), tokens_of(text)]))
        said += "|" + text
    left = said[-room:]
    assert len(answers) <= 2 * room
    for n in range(len(said) - 4):
        tail = said[n : n + 4]
        drafts, match = answers.propose(tokens_of(tail), 4, 5)
        if match:
            assert tail + bytes(drafts).decode() in left
        place = left.rfind(tail)
        if place >= 0 and "|" not in tail and not left.endswith(tail):
            behind = left[place + 4]
            assert bytes(drafts).decode()[:1] == behind.replace("|", "")


# --- what a guess is worth ---


def chance(survival: Survival, match: int, source: str = OWN_TEXT, distance: int = 0) -> float:
    """Return the chance of a guess, believed to be a half at first."""
    return survival.chances(DraftOrigin(source, match), (0.5,) * 5, 5.0)[part_of(distance)]


def test_what_is_wrong_again_and_again_is_believed_less() -> None:
    """And what is right more; a short match tells nothing of a long one, nor one source of another."""
    survival = Survival()
    for _ in range(20):
        survival.learn(DraftOrigin(OWN_TEXT, 4), right=0, tried=5, fade=0.9)
        survival.learn(DraftOrigin(OWN_TEXT, 16), right=5, tried=5, fade=0.9)
    assert chance(survival, 4) < 0.25
    assert chance(survival, 16) > 0.75
    assert chance(survival, 4, EARLIER_ANSWERS) == 0.5


def test_a_distance_is_judged_only_where_it_was_reached() -> None:
    """Of five guesses two were right and the third was wrong. Of the rest nobody knows more than that."""
    survival = Survival()
    for _ in range(20):
        survival.learn(DraftOrigin(OWN_TEXT, 8), right=2, tried=5, fade=0.9)
    assert chance(survival, 8, distance=1) > 0.75
    assert chance(survival, 8, distance=2) < 0.35
    assert chance(survival, 8, distance=4) == pytest.approx(chance(survival, 8, distance=2))


def test_what_was_never_reached_is_believed_as_what_lies_nearer() -> None:
    """Or nobody would find out that a long copy goes on."""
    copied, quoted, origin = Survival(), Survival(), DraftOrigin(OWN_TEXT, 8)
    for _ in range(30):
        copied.learn(origin, right=3, tried=3, fade=1.0)
        quoted.learn(origin, right=0, tried=3, fade=1.0)
    beliefs = [0.75] * 5
    assert all(chance > 0.9 for chance in copied.chances(origin, beliefs, weight=6.0))
    assert all(chance < 0.2 for chance in quoted.chances(origin, beliefs, weight=6.0))
    assert Survival().chances(origin, beliefs, weight=6.0) == pytest.approx(beliefs)


def test_what_was_wrong_is_tried_again() -> None:
    """Counts fade with guesses that are not computed, too."""
    survival, origin = Survival(), DraftOrigin(OWN_TEXT, 4)
    for _ in range(50):
        survival.learn(origin, right=0, tried=1, fade=0.995)
    before = chance(survival, 4)
    for _ in range(2000):
        survival.forget(origin, 0.998)
    assert before < 0.1
    assert chance(survival, 4) > 0.4


# --- the policy ---


def drafting(key: int, *survival: float, lane: Lane = "interactive") -> SequenceView:
    """Return a decoding sequence with guesses of these chances."""
    n = len(survival)
    return decoder(key, lane=lane, pending=1 + n, drafted=n, survival=survival, computed=10)


def planned(
    cost: CostModel,
    *views: SequenceView,
    paid: bool = True,
    most_s: float = math.inf,
    **changes: object,
) -> Plan:
    """Return a tick of one token each, with the drafts that the stage adds."""
    state = evolve(scene(cost, *views, paid=paid), most_s=most_s)
    limit = Limit(1.2 * 0.02, "within 1.2x", 0.02)
    plan = Plan(items=one_token_each(views), memory=state.memory, limit=limit)
    found = add_drafts(state, evolve(plan, **changes))
    check_plan(state, found)
    return found


def scene(cost: CostModel, *views: SequenceView, paid: bool = True) -> SchedulerState:
    """Return a state of nothing but these."""
    return SchedulerState(
        now=10.0,
        tick=1,
        sequences=views,
        n_batch=512,
        free_cells=4000,
        n_rows=24,
        spare_rows=20,
        contract=Contract(paid_drafts=paid),
        memory=Memory(cost=cost),
    )


def drafts_of(plan: Plan) -> list[int]:
    """Return how many drafts each item has."""
    return [item.n_drafts for item in plan.items]


def test_rows_that_cost_nothing_are_always_taken() -> None:
    """Unlikely guesses, too, but not if they give next to nothing."""
    assert drafts_of(planned(FLAT, drafting(1, 0.2, 0.1), paid=False)) == [2]
    assert drafts_of(planned(FLAT, drafting(1, 0.02, 0.01), paid=False)) == [0]


def test_rows_that_cost_are_taken_where_tokens_come_quicker_by_them() -> None:
    """Three likely guesses are worth a tick of four; three unlikely ones are not."""
    assert drafts_of(planned(STAIRS, drafting(1, 0.9, 0.8, 0.7))) == [3]
    assert drafts_of(planned(STAIRS, drafting(1, 0.1, 0.01, 0.001))) == [0]


def test_drafts_end_before_readers_of_other_models_are_due() -> None:
    """A tick of four takes 28 ms; free rows are taken however little time there is."""
    assert drafts_of(planned(STAIRS, drafting(1, 0.9, 0.8, 0.7), most_s=0.030)) == [3]
    assert drafts_of(planned(STAIRS, drafting(1, 0.9, 0.8, 0.7), most_s=0.022)) == [0]
    assert drafts_of(planned(FLAT, drafting(1, 0.9, 0.8, 0.7), most_s=-1.0)) == [3]


def test_free_means_that_no_tick_gets_longer() -> None:
    """Where paid drafts are not wanted."""
    assert drafts_of(planned(STAIRS, drafting(1, 0.9, 0.8, 0.7), paid=False)) == [0]


def test_a_request_may_ask_for_free_rows_only() -> None:
    """Rows that cost go to others' guesses, however likely its own are."""
    modest = evolve(drafting(1, 0.9, 0.8, 0.7), pays_for_drafts=False)
    assert drafts_of(planned(STAIRS, modest)) == [0]
    assert drafts_of(planned(FLAT, modest)) == [3]
    both = planned(STAIRS, modest, drafting(2, *[0.95] * 6), limit=NO_LIMIT)
    assert both.items[0].n_drafts == 0


def test_where_each_row_costs_as_much_as_a_token_there_is_no_draft() -> None:
    """Not even a certain one."""
    assert drafts_of(planned(STEEP, drafting(1, 0.99, 0.98))) == [0]


def test_rows_go_to_the_likeliest_guesses_of_all_streams() -> None:
    """A free row is the better stream's."""
    views = drafting(1, 0.2, 0.1), drafting(2, 0.9, 0.8), drafting(3, 0.1)
    assert drafts_of(planned(STAIRS, *views, paid=False)) == [0, 1, 0]


def test_a_reader_is_not_slowed_down_for_the_drafts_of_somebody_else() -> None:
    """With work of the background in the tick it stays within its limit."""
    reader, job = drafting(1), drafting(2, *[0.99] * 8, lane="background")
    plan = planned(STAIRS, evolve(reader, drafted=0, pending=1), job)
    assert plan.items[1].n_drafts < 3


def test_a_tick_that_measures_the_streams_alone_has_free_drafts_only() -> None:
    """Or it would measure another tick."""
    limit = Limit(0.02, "alone", 0.02, isolated=True)
    assert drafts_of(planned(STAIRS, drafting(1, 0.9, 0.8, 0.7), limit=limit)) == [0]


chances = st.lists(st.floats(0.0, 1.0), max_size=15).map(lambda c: tuple(sorted(c, reverse=True)))


@settings(deadline=None)
@given(
    survivals=st.lists(chances, min_size=1, max_size=8),
    lanes=st.lists(st.sampled_from(["interactive", "background"]), min_size=8, max_size=8),
    paid=st.booleans(),
    cost=st.sampled_from([STAIRS, FLAT, STEEP]),
)
def test_drafts_keep_every_rule_of_a_plan(
    survivals: list[tuple[float, ...]], lanes: list[Lane], paid: bool, cost: CostModel
) -> None:
    """And a tick that must not grow does not: it takes what it would take with ballast."""
    views = [
        drafting(key, *chances, lane=lane)
        for key, (chances, lane) in enumerate(zip(survivals, lanes, strict=False))
    ]
    plan = planned(cost, *views, paid=paid)
    if not paid:
        state = scene(cost, *views, paid=False)
        without = Plan(items=one_token_each(views))
        takes_s, took_s = (
            ballast_for(cost, planned_work(state, one), MOST_BALLAST)[1] for one in (plan, without)
        )
        assert takes_s <= TUNING.free_rows * took_s


def test_what_a_request_says_of_speculation_reaches_the_engine() -> None:
    """By the socket's words; without a word it is what the daemon allows, and nothing with a seed."""
    assert ask_of(Generate("a", speculation="off", prompt="Hi")).speculation == "off"
    assert ask_of(Generate("a", prompt="Hi")).speculation == "auto"
    assert ask_of(Generate("a", seed=3, prompt="Hi")).speculation == "off"
    assert ask_of(Generate("a", seed=3, speculation="auto", prompt="Hi")).speculation == "auto"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "auto"),
        ({"seed": None}, "auto"),
        ({"seed": -1}, "auto"),
        ({"seed": 0}, "off"),
        ({"seed": 0, "speculation": "free"}, "free"),
        ({"speculation": "off"}, "off"),
    ],
)
def test_what_a_body_says_of_speculation_is_taken(said: dict[str, object], expected: str) -> None:
    """A seed below 0 stands for a random one, so it asks for no repetition."""
    body = Completions.decode({"prompt": "Hi", **said}, strict=False).body
    assert speculation_of(body) == expected


# --- the engine ---


@settings(max_examples=30, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
    words=st.sampled_from(["aaaa aaaa", "to be or not to be or", "hello"]),
)
def test_a_seed_gives_the_same_text_with_drafts_and_without(
    temperature: float, top_k: int, seed: int, words: str
) -> None:
    """One random number a token in order, also behind guesses that were wrong."""
    told = []
    for drafts in (False, True):
        bench = speaking(drafts=drafts)
        sinks = [
            bench.submit(words + str(n), 60, temperature=temperature, top_k=top_k, seed=seed + n)[1]
            for n in range(3)
        ]
        bench.run()
        told.append([(sink.text, sink.tokens) for sink in sinks])
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_repeats_itself_takes_fewer_decodes(kind: type[FakeBackend]) -> None:
    """Each decode but the first few gives several tokens.

    Where decodes overlap a prepared tick has no drafts; where a likely one follows, it is planned anew.
    """
    n = {}
    for drafts in (False, True):
        bench = speaking(drafts=drafts, kind=kind)
        looping = bench.backend.vocabulary.tokenize(
            "ab" * 20, add_special=True, parse_special=False
        )
        bench.backend._choice = lambda history: 97 + history % 2  # type: ignore[method-assign]
        bench.submit(list(looping), 64)
        bench.run()
        n[drafts] = bench.backend.decodes
    assert n[True] < n[False]


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_that_are_not_computed_are_judged_by_what_comes_in_their_place(
    kind: type[FakeBackend],
) -> None:
    """So a text at which they are often wrong is known, where a row costs as much as a token."""
    backend, drafter = kind(n_slots=5, n_ctx=4000, n_rows=24), Drafter()
    backend._choice = lambda history: 97 + history % 4  # type: ignore[method-assign]
    given_settings = EngineSettings(cost=STEEP, scratch_slots=1)
    bench = Bench(backend, deadline, settings=given_settings, drafter=drafter)
    handle, _ = bench.submit("hello", 400, speculation="free")
    bench.ticks(300)
    believed: list[float] = []
    while not believed:
        bench.ticks(1)
        bench.engine.publish()
        drafter.propose(bench.engine.registry.running)
        believed += bench.engine.registry.running[handle].view.survival[:1]
    assert bench.metrics.snapshot()["draft_tokens_total"] == {}
    assert believed[0] < 0.3


def test_who_has_room_for_one_token_gets_no_drafts() -> None:
    """A draft that is right needs a place in its stream."""
    bench = speaking(drafts=True)
    _, sink = bench.submit("to be or not to be or not", 30, credit=1)
    bench.ticks(4)
    assert len(sink.tokens) == 1


@pytest.mark.parametrize(("asked", "drafted"), [("off", False), ("free", False), ("auto", True)])
def test_a_request_narrows_what_is_drafted_for_it(asked: Speculation, drafted: bool) -> None:
    """Its answer is the same; here no row is free."""
    rows, texts = [], []
    for speculation in (asked, "off"):
        bench = speaking(drafts=True, cost=STAIRS)
        _, sink = bench.submit("to be or not to be or not to be", 60, speculation=speculation)
        bench.run()
        rows.append(bench.metrics.totals().drafts)
        texts.append(sink.text)
    assert (rows[0] > 0, rows[1]) == (drafted, 0)
    assert texts[0] == texts[1]


def test_an_answer_of_another_user_is_never_drafted_from() -> None:
    """Nor is one that was asked for in private; the own user's is."""
    accepted = {}
    for namespace in ("uid 1", "uid 2", "uid 1/client 3", None):
        bench = speaking(drafts=True)
        bench.submit("please say it", 80, namespace="uid 1")
        bench.run()
        before = bench.metrics.totals().drafts
        bench.submit("please say it", 80, namespace=namespace)
        bench.run()
        accepted[namespace] = bench.metrics.totals().drafts - before
    assert accepted["uid 1"] > 40
    assert len({accepted[other] for other in accepted if other != "uid 1"}) == 1
    assert accepted["uid 2"] < 20


def test_an_answer_that_is_asked_for_again_takes_few_decodes() -> None:
    """Its tokens are those of the first time."""
    bench = speaking(drafts=True)
    _, first = bench.submit("please say it", 80, namespace="uid 1")
    bench.run()
    before = bench.backend.decodes
    _, again = bench.submit("please say it", 80, namespace="uid 1")
    bench.run()
    assert again.tokens == first.tokens
    assert bench.backend.decodes - before < 40


def rows_of(bench: Bench, prompt: str = "please say it") -> float:
    """Return how many guesses were computed for a request of the user with the id 1."""
    before = bench.metrics.totals().drafts
    bench.submit(prompt, 80, namespace="uid 1")
    bench.run()
    return bench.metrics.totals().drafts - before


@pytest.mark.parametrize("last", [False, True], ids=["at a token", "at its last text"])
def test_an_answer_that_the_engine_failed_at_is_not_drafted_from(last: bool) -> None:
    """Neither one that a token broke, nor one that was whole but for its text."""
    bench, untouched = speaking(drafts=True), speaking(drafts=True)
    if last:
        handle, sink = bench.submit("please say it", 80, namespace="uid 1")
        while len(sink.tokens) < 70:
            bench.ticks(1)
        bench.engine.registry.running[handle].text = BrokenText()
    else:
        _, sink = bench.submit("please say it", 80, namespace="uid 1", constraint=Balking(70))
    bench.run()
    assert sink.end.code == "E_RUNTIME_006"
    assert len(sink.tokens) >= 60
    assert rows_of(bench) <= rows_of(untouched)  # of a known answer nearly all is guessed


def test_what_ended_right_before_all_was_cleared_is_not_drafted_from() -> None:
    """Its end was not published yet when the message came."""
    bench, untouched = speaking(drafts=True), speaking(drafts=True)
    _, sink = bench.submit("please say it", 80, namespace="uid 1")
    while not sink.ends:
        bench.inbox.put(Prefix(lambda _: None, lambda _: True, clear=True))
        bench.engine.tick()
    assert rows_of(bench) <= rows_of(untouched)  # of a known answer nearly all is guessed


# --- where nothing is drafted ---


class Capturing(FakeBackend):
    """A fake on which another shape of the batch costs."""

    @property
    def traits(self) -> Traits:
        """As on a GPU."""
        return evolve(super().traits, shape_costs=True)


def test_guesses_are_the_default_only_where_shapes_cost_nothing() -> None:
    """What is asked for counts on both."""
    asked = Config(speculation="free")
    for backend, default in ((FakeBackend(), "auto"), (Capturing(), "off")):
        assert allowed_speculation(Config(), backend) == default
        assert allowed_speculation(asked, backend) == "free"


def test_nothing_is_drafted_where_graphs_are_captured() -> None:
    """The same text is drafted where they are not."""
    rows = []
    for recapture_s in (0.0, 0.004):
        bench = speaking(drafts=True, cost=evolve(FLAT, recapture_s=recapture_s))
        _, sink = bench.submit("aaaa bbbb " * 6, 40)
        bench.run()
        assert sink.tokens == bench.expected("aaaa bbbb " * 6, 40)
        rows.append(bench.metrics.totals().drafts)
    assert rows[0] > 0
    assert rows[1] == 0


def test_whoever_asks_for_drafts_where_graphs_are_captured_reads_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon starts, and names the option and the reason."""
    measured = Measured(evolve(FLAT, recapture_s=0.004), recalled=True, file=Path())
    monkeypatch.setattr(build, "measured_cost", lambda *_, **__: measured)
    with structlog.testing.capture_logs() as said:
        found = build.engine_settings(Config(speculation="auto"), Capturing())
    assert not found.drafts
    assert "--speculation auto drafts nothing here: graphs are captured" in said[0]["event"]
