"""A draft model: another model guesses, and no answer changes, whatever it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drafts_kit import FLAT, STAIRS
from engine_kit import KINDS, Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import (
    Backend,
    DecodeStatus,
    FloatArray,
    IntArray,
    ModelError,
    Overlap,
)
from uma_trio.backend.fake import FakeBackend, FakeVocabulary, Fault
from uma_trio.cli.draft import agreement, show_draft, verdict
from uma_trio.config.options import Config
from uma_trio.engine.drafts import Drafter
from uma_trio.engine.drafts.failures import FIRST_REST_S, LONGEST_REST_S, PATIENCE, Failures
from uma_trio.engine.drafts.model import DraftModel
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.step import Drawn, Outcome, Step
from uma_trio.models import bundled_draft, bundled_model
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.draft_cost import best_of_model, making_s
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import SequenceView
from uma_trio.wiring_drafts import load_draft, refuse_another_vocabulary

CHEAP = Staircase((1, 512), (0.001, 0.004))
FREE = Staircase((1, 512), (1e-6, 1e-6))


class Wavering(FakeBackend):
    """A model that is of the other's opinion but for every `wrong`-th history."""

    wrong = 5

    def _choice(self, history: int) -> int:
        token = super()._choice(history)
        return token ^ 1 if self.wrong and history % self.wrong == 0 else token


def talking(
    draft: FakeBackend | None,
    *,
    kind: type[FakeBackend] = FakeBackend,
    cost: CostModel = FLAT,
    took: Staircase = CHEAP,
    n_ctx: int = 4000,
    end_after: int = 0,
) -> Bench:
    """Return an engine that `draft` guesses for."""
    backend = kind(n_slots=5, n_ctx=n_ctx, n_rows=24, end_after=end_after)
    ticks = iter(range(1 << 40))
    model = None if draft is None else DraftModel(draft, took, 260, lambda: next(ticks) / 1e6)
    given_settings = EngineSettings(cost=cost, scratch_slots=1)
    return Bench(
        backend, deadline, settings=given_settings, drafter=Drafter(model, cost) if model else None
    )


def drafter_of(wrong: int = 5, **changes: object) -> Wavering:
    """Return a small model that is wrong once in so many times; 0: never."""
    made = Wavering(n_slots=4, n_ctx=4000, **changes)  # type: ignore[arg-type]
    made.wrong = wrong
    return made


def drafted(bench: Bench) -> tuple[int, int]:
    """Return how many guesses of the draft model were computed, and how many were right."""
    figures = bench.metrics.snapshot()
    rows, right = figures["draft_rows_by_source_total"], figures["draft_accepted_by_source_total"]
    return rows.get("draft model", 0), right.get("draft model", 0)


# --- what it gives ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_the_same_opinion_makes_answers_in_few_decodes(kind: type[FakeBackend]) -> None:
    """Each tick gives several tokens, of several streams at once."""
    draft = drafter_of(0)
    bench = talking(draft, kind=kind)
    sinks = [bench.submit(f"hello {n}", 100)[1] for n in range(3)]
    bench.run()
    for n, sink in enumerate(sinks):
        assert sink.tokens == bench.expected(f"hello {n}", 100)
    rows, right = drafted(bench)
    assert bench.backend.decodes < 60
    assert right > 0.9 * rows > 100
    assert draft.kv_used() <= 3 * 110


def test_guesses_of_several_streams_are_made_together() -> None:
    """A draft of n tokens is n decodes of the draft model, for however many streams."""
    draft = drafter_of(0)
    bench = talking(draft, took=CHEAP)
    for n in range(4):
        bench.submit(f"hello {n}", 60)
    bench.run()
    rows, _ = drafted(bench)
    assert draft.decodes < 0.6 * rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    wrong=st.sampled_from([0, 1, 2, 5]),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
    credit=st.sampled_from([1, 3, 8, 10_000]),
    stop=st.sampled_from([(), ("e",), ("an", "tt")]),
    end_after=st.sampled_from([0, 20]),
    faults=st.dictionaries(
        st.integers(0, 60),
        st.sampled_from(
            [
                Fault(DecodeStatus.NO_KV_ROOM),
                Fault(DecodeStatus.COMPUTE_FAILED, keep=2),
                Fault(died="gone"),
            ]
        ),
        max_size=4,
    ),
    cells=st.sampled_from([40, 100, 4000]),
    cancel=st.integers(0, 40),
)
def test_no_answer_changes_whatever_the_draft_model_does(
    kind: type[FakeBackend],
    wrong: int,
    temperature: float,
    seed: int,
    credit: int,
    stop: tuple[str, ...],
    end_after: int,
    faults: dict[int, Fault],
    cells: int,
    cancel: int,
) -> None:
    """It is right or wrong, fails or has no room; readers are slow, others leave or are preempted."""
    told = []
    for draft in (None, Wavering(n_slots=4, n_ctx=cells, faults=dict(faults))):
        if draft is not None:
            draft.wrong = wrong
        bench = talking(draft, kind=kind, n_ctx=260, end_after=end_after)
        asked = {"temperature": temperature, "stop": stop, "credit": credit}
        made = [
            bench.submit(f"hello {n}", 50, seed=seed + n, lane=lane, **asked)
            for n, lane in enumerate(("interactive", "background", "interactive"))
        ]
        gone, _ = bench.submit("goodbye", 90)
        for tick in range(400):
            bench.ticks(1)
            if tick == cancel:
                bench.cancel(gone)
            for handle, _ in made:
                bench.credit(handle, 2)
        bench.run()
        told.append([(sink.tokens, sink.text, sink.end.reason) for _, sink in made])
    assert told[0] == told[1]


# --- what it costs ---


def test_a_model_that_is_always_wrong_is_asked_no_more() -> None:
    """But for a few guesses now and then."""
    draft = drafter_of(1)
    bench = talking(draft, cost=STAIRS)
    _, sink = bench.submit("hello", 600)
    bench.run()
    assert sink.tokens == bench.expected("hello", 600)
    rows, right = drafted(bench)
    assert right == 0
    assert 0 < rows < 60


def test_a_model_that_takes_as_long_as_the_other_is_never_asked() -> None:
    """However good its guesses were; it does not even see the texts."""
    draft = drafter_of(0)
    bench = talking(draft, cost=STAIRS, took=Staircase((1, 512), (0.020, 0.5)))
    bench.submit("hello", 100)
    bench.run()
    assert draft.decodes == 0


def test_a_model_that_fails_again_and_again_is_left_alone() -> None:
    """Each time there are wrong guesses, and nothing else."""
    draft = drafter_of(0, faults={n: Fault(DecodeStatus.COMPUTE_FAILED) for n in range(1000)})
    bench = talking(draft)
    _, sink = bench.submit("hello", 60)
    bench.run()
    assert sink.tokens == bench.expected("hello", 60)
    assert draft.decodes == PATIENCE
    assert bench.metrics.snapshot()["draft_failures_total"] == PATIENCE


def test_a_model_that_rests_is_asked_again_and_trusted_as_before_if_it_works() -> None:
    """After a minute; nothing that it knew before it failed is taken to be there."""
    now = [0.0]
    failing = {n: Fault(DecodeStatus.COMPUTE_FAILED) for n in range(2, 2 + PATIENCE)}
    draft = drafter_of(0, faults=failing)
    model = DraftModel(draft, CHEAP, 260, lambda: now[0])
    bench = Bench(
        FakeBackend(n_slots=5, n_ctx=4000, n_rows=24),
        deadline,
        settings=EngineSettings(cost=FLAT, scratch_slots=1),
        drafter=Drafter(model, FLAT),
    )
    _, sink = bench.submit("hello", 400)
    while len(sink.tokens) < 100:
        bench.ticks(1)
    assert model.failures == PATIENCE
    guessed, now[0] = drafted(bench)[1], FIRST_REST_S - 1.0
    bench.ticks(40)
    assert drafted(bench)[1] == guessed
    now[0] = FIRST_REST_S + 1.0
    bench.run()
    assert sink.tokens == bench.expected("hello", 400)
    assert drafted(bench)[1] > guessed + 50
    assert model.failures == PATIENCE


def test_rests_double_up_to_an_hour_until_it_works_for_as_long() -> None:
    """One failure is enough for the next rest; a time without any makes up for all."""
    failures, now = Failures(), 0.0
    assert [failures.note(now) for _ in range(PATIENCE)] == [0.0] * (PATIENCE - 1) + [FIRST_REST_S]
    rests = []
    for _ in range(8):
        now = failures.rests_until
        rests.append(failures.note(now))
    assert rests == [min(FIRST_REST_S * 2.0**n, LONGEST_REST_S) for n in range(1, 9)]
    now = failures.rests_until + LONGEST_REST_S
    assert [failures.note(now) for _ in range(PATIENCE)] == [0.0] * (PATIENCE - 1) + [FIRST_REST_S]
    assert failures.total == 2 * PATIENCE + 8


def test_what_fails_during_a_rest_makes_it_no_longer() -> None:
    """One failure may be followed by one of each sequence that is dropped, all in the same moment."""
    failures = Failures()
    rests = [failures.note(0.0) for _ in range(PATIENCE + 8)]
    assert rests == [0.0] * (PATIENCE - 1) + [FIRST_REST_S] * 9
    assert failures.note(FIRST_REST_S) == 2 * FIRST_REST_S
    assert failures.total == PATIENCE + 9


def test_prepared_ticks_are_not_given_up_for_a_model_that_has_failed() -> None:
    """Nobody asks it, so no guess is to be expected of it."""
    draft = drafter_of(0, faults={n: Fault(DecodeStatus.COMPUTE_FAILED) for n in range(1000)})
    drafter = Drafter(DraftModel(draft, CHEAP, 260, lambda: 0.0), FLAT)
    bench = talking(None)
    handle, _ = bench.submit("hello", 60)
    bench.ticks(2)
    running = bench.engine.registry.running
    sampled = [Outcome(Step(handle, running[handle].computed, 1), 1, (Drawn(97),))]
    plan = Plan(items=(PlanItem(handle, 3, "decode", "", 2),))
    told = []
    for _ in range(PATIENCE + 1):
        drafter.propose(running)
        told.append(drafter.expects(sampled, running))
        drafter.make(plan, running)
    assert told == [True] * PATIENCE + [False]


def test_what_is_found_in_the_text_is_not_asked_of_the_model() -> None:
    """It costs nothing."""
    draft = drafter_of(0)
    bench = talking(draft)
    bench.backend._choice = draft._choice = lambda history: 97  # type: ignore[method-assign]
    bench.submit("a" * 30, 120)
    bench.run()
    sources = bench.metrics.snapshot()["draft_rows_by_source_total"]
    assert sources["own text"] > 60
    assert drafted(bench)[0] == 0


@pytest.mark.parametrize("asked", ["off", "free"])
def test_a_request_that_pays_for_no_guesses_is_not_shown_to_the_model(asked: str) -> None:
    """A draft model costs in any case."""
    draft = drafter_of(0)
    bench = talking(draft)
    bench.submit("hello", 60, speculation=asked)  # type: ignore[arg-type]
    bench.run()
    assert draft.decodes == 0


def test_its_time_is_nobodys_time_between_two_decodes() -> None:
    """So the cost model learns nothing wrong, and the clients pay who are guessed for."""
    now = [0.0]

    class Slow(Wavering):
        def decode(self, n_tokens: int, *rest: object) -> int:
            now[0] += 1.0
            return super().decode(n_tokens)

    draft = Slow(n_slots=4, n_ctx=4000)
    draft.wrong = 0
    backend = FakeBackend(n_slots=5, n_ctx=4000, n_rows=24)
    clock = lambda: now[0]  # noqa: E731
    given_settings = EngineSettings(cost=FLAT, scratch_slots=1)
    bench = Bench(
        backend,
        deadline,
        clock=clock,
        settings=given_settings,
        drafter=Drafter(DraftModel(draft, CHEAP, 260, clock), FLAT),
    )
    bench.submit("hello", 40, client=7)
    bench.run()
    assert draft.decodes > 10
    assert bench.engine.memory.cost is not None
    assert bench.engine.memory.cost.host_s == 0.0
    assert bench.engine.memory.used_s[7] > 10.0


class Counting(Wavering):
    """Counts the tokens that it was given, and the decodes for which there was no room."""

    given = refused = 0

    def decode(self, n_tokens: int, *rest: Overlap) -> int:
        """Compute, and count."""
        status = super().decode(n_tokens, *rest)
        self.given += n_tokens
        self.refused += status == DecodeStatus.NO_KV_ROOM
        return status


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_that_were_right_are_computed_once(kind: type[FakeBackend]) -> None:
    """What they left in the cache is what the model goes on from."""
    draft = Counting(n_slots=4, n_ctx=4000)
    draft.wrong = 0
    bench = talking(draft, kind=kind)
    bench.submit("hello", 200)
    bench.run()
    assert drafted(bench)[1] > 100
    assert draft.given < 1.2 * 205


def test_sequences_that_do_not_fit_into_its_context_are_no_failure() -> None:
    """They may share cells in the served model. The model is there for who comes behind them."""
    draft = Counting(n_slots=4, n_ctx=150)
    draft.wrong = 0
    bench = talking(draft)
    for n in range(3):
        bench.submit(f"{n} " * 30, 60)
    bench.run()
    assert draft.refused == 0
    bench.submit("hello", 60)
    bench.run()
    assert drafted(bench)[1] > 20


# --- the rule ---


def views(*keys: int) -> list[SequenceView]:
    """Return whose each guess is; those of even keys were found."""
    return [
        SequenceView(
            key, "interactive", 2, 5, started=True, credit=9, arrived=0.0, modelled=key % 2 == 1
        )
        for key in keys
    ]


def test_guesses_of_a_round_are_made_in_one_decode_and_found_ones_take_no_time() -> None:
    """The second guess of a stream waits for the first."""
    draft = Staircase((1, 2, 3), (0.010, 0.012, 0.013))
    assert making_s(draft, views(1, 3, 2, 1, 5)) == pytest.approx(
        [0.0, 0.010, 0.012, 0.012, 0.022, 0.023]
    )
    assert making_s(None, views(1, 3)) == [0.0, 0.0, 0.0]


def test_a_draft_model_pays_by_its_time_and_by_what_is_right() -> None:
    """Four rows take 1.4 times as long as one here."""
    cheap, dear = Staircase((1, 4), (0.001, 0.001)), Staircase((1, 4), (0.015, 0.015))
    n, times = best_of_model(STAIRS, cheap, 1, 0.9)
    assert n == 3
    assert times == pytest.approx(0.020 * (1 + 0.9 + 0.81 + 0.729) / 0.031)
    assert best_of_model(STAIRS, dear, 1, 0.9)[1] < times
    assert best_of_model(STAIRS, cheap, 1, 0.1) == (0, 1.0)
    assert best_of_model(STAIRS, Staircase((1,), (0.020,)), 1, 0.6)[0] == 0


# --- its vocabulary ---


class Words(FakeVocabulary):
    """A vocabulary that differs in one thing."""

    def __init__(self, n_vocab: int = 260, **differs: object) -> None:
        super().__init__(n_vocab)
        self._word = differs.pop("word", b"a")
        for name, value in differs.items():
            setattr(self, name, value)

    def pieces(self) -> list[bytes]:
        """Return the others' tokens, but for one."""
        found = list(super().pieces())
        found[97] = self._word  # type: ignore[call-overload]
        return found


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Words(400), "it has 400 tokens instead of 260"),
        (Words(word=b"b"), "token 97 is 'b' instead of 'a'"),
        (Words(word=b"\xff"), "token 97 is '\ufffd' instead of 'a'"),
        (Words(bos_text="<bos>"), "its beginning-of-text token is '<bos>' instead of '<s>'"),
        (Words(eos_text="<end>"), "its end-of-text token is '<end>' instead of '</s>'"),
        (Words(adds_bos=False), "only one of them begins each text"),
    ],
)
def test_a_model_with_another_vocabulary_is_refused(other: Words, said: str) -> None:
    """With the file, the first difference, and what to name in its place."""
    with pytest.raises(ModelError) as refused:
        refuse_another_vocabulary(FakeVocabulary(), other, Path("small.gguf"))
    assert said in str(refused.value)
    assert "small.gguf" in str(refused.value)
    assert "same family" in str(refused.value)


def test_a_table_that_is_filled_up_further_is_the_same_vocabulary() -> None:
    """What is beyond the shorter one is never guessed."""
    refuse_another_vocabulary(FakeVocabulary(), Words(260 + 128), Path("small.gguf"))


# --- the model by itself ---


def test_what_it_knows_of_a_sequence_follows_it_back_and_forth() -> None:
    """Right guesses stay, wrong ones go, and with any token more it is computed from there."""
    draft = drafter_of(0)
    model = DraftModel(draft, CHEAP, 260, lambda: 0.0)
    bench = talking(None)
    handle, _ = bench.submit("hello", 60)
    bench.ticks(2)
    sequence = bench.engine.registry.running[handle]
    (guesses,) = model.guess({handle: (sequence, 5)}).values()
    known: IntArray = sequence.tokens[: sequence.known]
    assert list(guesses) == draft.continuation(known, 5)
    before = draft.decodes
    bench.ticks(3)  # three of them turn out right
    assert sequence.tokens[sequence.known - 3 : sequence.known].tolist() == list(guesses[:3])
    (more,) = model.guess({handle: (sequence, 2)}).values()
    assert list(more) == draft.continuation(sequence.tokens[: sequence.known], 2)
    assert draft.decodes - before == 2
    assert np.array_equal(more, guesses[3:5])
    model.keep_only({})
    assert draft.kv_used() == 0


# --- the bundled pair ---


@pytest.fixture
def pair() -> Iterator[tuple[Backend, Backend]]:
    """Load the storyteller, and its draft as the daemon would."""
    from uma_trio.backend.llama import LlamaBackend

    config = Config(n_ctx=1024, parallel=2, threads=1)
    served = LlamaBackend.load(bundled_model(), n_ctx=1024, n_slots=3, threads=1)
    draft = load_draft(config, bundled_draft(), served)
    yield served, draft
    draft.close()
    served.close()


def test_the_bundled_draft_guesses_the_bundled_models_stories(
    pair: tuple[Backend, Backend],
) -> None:
    """As if its decodes took no time; the story is the one that is told without."""
    served, draft = pair
    prompt = served.vocabulary.tokenize(
        "<|im_start|>user\nTell me a story about a brown bear and a kettle.<|im_end|>\n"
        "<|im_start|>assistant\n",
        add_special=True,
        parse_special=True,
    )
    told = []
    for drafter in (None, Drafter(DraftModel(draft, FREE, served.model.n_vocab), STAIRS)):
        given_settings = EngineSettings(cost=STAIRS, scratch_slots=1, drafts=drafter is not None)
        bench = Bench(served, deadline, settings=given_settings, drafter=drafter)  # type: ignore[arg-type]
        _, sink = bench.submit(prompt.tolist(), 60)
        bench.run()
        told.append(sink.tokens)
    rows, right = drafted(bench)
    assert rows > 30
    assert right > 0.4 * rows
    # A row alone and one beside others may be rounded differently, so that a tie ends otherwise.
    assert told[0][:10] == told[1][:10]


def test_a_doctor_says_whether_a_draft_model_pays(
    pair: tuple[Backend, Backend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By what both take, and by what the small one would have guessed right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    right, tried = agreement(*pair)
    assert 0.3 * tried < right < tried
    status = show_draft(Config(n_ctx=512, parallel=2, threads=1), bundled_draft(), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert status == 0
    assert said["right"] == pytest.approx(right / tried, abs=0.1)
    assert [one["streams"] for one in said["streams"]] == [1, 2, 4]


def test_what_a_doctor_says_follows_from_both_staircases() -> None:
    """A quick model pays early, a slow one late or never."""
    quick, slow = Staircase((1, 8), (0.0005, 0.001)), Staircase((1, 8), (0.012, 0.012))
    early, late = verdict(STAIRS, quick, 1), verdict(STAIRS, slow, 1)
    assert early.pays_from is not None
    assert early.pays_from < 0.5
    assert early.times["0.9"] > 2.0
    assert late.pays_from is None or late.pays_from > 0.8
    assert verdict(STAIRS, Staircase((1,), (0.1,)), 1).times == {
        f"{chance:g}": 1.0 for chance in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    }


def test_what_its_decodes_take_follows_what_is_seen() -> None:
    """Measured one after another they are quicker than between decodes of the other model."""
    draft, now = drafter_of(0), [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    model = DraftModel(draft, CHEAP, 260, clock)
    bench = talking(None)
    handle, _ = bench.submit("hello", 60)
    bench.ticks(2)
    wanted = {handle: (bench.engine.registry.running[handle], 15)}
    for _ in range(8):
        model.guess(wanted)
    # Each decode is read four times by this clock, and more with what surrounds it.
    assert model.took(1) > 2 * CHEAP(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_logits_cannot_be_read_ends_nothing(kind: type[FakeBackend]) -> None:
    """Its answers are whole, and it is left alone as after a decode that failed."""

    class Unreadable(Wavering):
        def logits(self, n_rows: int) -> FloatArray:
            raise OSError("the device is gone")

    draft = Unreadable(n_slots=4, n_ctx=4000)
    bench = talking(draft, kind=kind)
    _, sink = bench.submit("hello", 60)
    bench.run()
    assert sink.tokens == bench.expected("hello", 60)
    assert bench.metrics.snapshot()["draft_failures_total"] == PATIENCE
