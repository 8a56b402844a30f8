"""`explain`, from what the engine recorded to what a person reads."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import trio
from attrs import evolve
from engine_kit import told_to_people
from net_kit import TICK_S, house
from trio.testing import MockClock

from uma_protocol import (
    DEFAULT_MAX_FRAME_BYTES,
    BeginningInfo,
    Eos,
    Error,
    Explain,
    Explanation,
    GapInfo,
    ItemInfo,
    PhaseInfo,
    SkipInfo,
    StoryInfo,
    TickInfo,
    Token,
    decode_event,
    encode_event,
)
from uma_trio.cli import explain as explain_verb
from uma_trio.cli.explain import aligned, tick_table
from uma_trio.engine.messages import Explain as AskEngine
from uma_trio.observe import explain
from uma_trio.observe.records import Phase, Recorded, RequestRecord, TickRecord
from uma_trio.observe.sentences import sentences, shares
from uma_trio.policy.deadline import deadline
from uma_trio.policy.plan import NO_LIMIT, Limit, PlanItem, Skip
from uma_trio.sockets.principal import Principal
from uma_trio_sim.simulation import Simulation

STORY = StoryInfo(
    request=17,
    id="a-1",
    app="editor",
    state="length",
    lane="interactive",
    age_ms=9000.0,
    total_ms=4000.0,
    prompt_tokens=700,
    completion_tokens=90,
    queue_ms=1200.0,
    queue_reason="all 8 slots were busy",
    passed_over=1,
    ttft_ms=2500.0,
    parked_ms=400.0,
    preemptions=2,
    preempted_ms=100.0,
    prefill=PhaseInfo(
        tokens=700,
        ticks=12,
        computing_ms=900.0,
        waiting_ms=400.0,
        skipped={"does not fit into this tick (within 1.2x)": 40},
    ),
    decode=PhaseInfo(
        tokens=89, ticks=89, computing_ms=900.0, waiting_ms=100.0, skipped={"full": 2, "later": 7}
    ),
    worst_gap=GapInfo(gap_ms=33.5, tick=812, reason="long tick: every stream can bear 4x"),
    reason="length",
)


def record(handle: int = 1, **more: Any) -> RequestRecord:
    """Return what the engine knows of a request."""
    return RequestRecord(
        handle=handle,
        lane="interactive",
        state="decode",
        prompt_tokens=5,
        completion_tokens=2,
        submitted=1.0,
        **more,
    )


def tick(number: int = 0, items: int = 1, reason: str = "because", **more: Any) -> TickRecord:
    """Return a tick with so many items."""
    shares = tuple(PlanItem(key, 1, "decode", reason) for key in range(items))
    whole = TickRecord(number, 2.0, shares, (), 0, NO_LIMIT, 0.0, 0.0, 0.008, 0.001, 0)
    return evolve(whole, **more)


def answered(request: Explain, recorded: Recorded) -> Explanation:
    """Return what is sent, as the client gets it."""
    event = told_to_people(request, recorded)
    payload = encode_event(event)
    assert len(payload) <= DEFAULT_MAX_FRAME_BYTES
    got = decode_event(payload)
    assert got == event
    assert isinstance(got, Explanation)
    return got


# --- the answer ---


def test_an_explanation_stays_within_a_frame() -> None:
    """What does not fit is left out, the least interesting first, and counted."""
    ticks = tuple(tick(n, items=64, reason=f"{n} " + "x" * 100) for n in range(1000))
    got = answered(Explain(ticks=1000), Recorded(3.0, (record(),), ticks))
    assert len(got.requests) == 1
    assert got.ticks_left_out == 1000 - len(got.ticks) > 0
    assert [t.tick for t in got.ticks] == list(range(1000 - len(got.ticks), 1000))


def test_requests_stay_within_a_frame_too() -> None:
    """However much a policy has to say; the latest are kept."""
    skipped = {chr(0x1F600 + n) * 200: n for n in range(13)}
    phase = Phase(skipped=skipped)
    records = tuple(record(n, prefill=phase, decode=phase) for n in range(1, 129))
    got = answered(Explain(), Recorded(3.0, records, (tick(),) * 10))
    assert [timeline.request for timeline in got.requests][-1] == 128
    assert len(got.requests) < 128
    assert got.ticks_left_out + len(got.ticks) == 10


def test_one_request_is_explained_with_the_ticks_around_its_worst_gap() -> None:
    """By default a few, with what was predicted and what was measured."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(20.0)
    answers: list[Recorded] = []
    request = Explain(request=stream.handle)
    ticks = explain.ticks_for(request)
    simulation.inbox.put(AskEngine(answers.append, request.request, ticks))
    simulation.tick()
    got = answered(request, answers[0])
    (timeline,) = got.requests
    assert timeline.worst_gap is not None
    assert timeline.worst_gap.gap_ms == pytest.approx(max(stream.itl) * 1e3, rel=0.15)
    assert len(got.ticks) == explain.TICKS_OF_ONE_REQUEST
    (worst,) = (t for t in got.ticks if t.tick == timeline.worst_gap.tick)
    assert worst.predicted_ms == pytest.approx(worst.measured_ms, rel=0.2)
    assert worst.limit_ms is not None


def test_the_ticks_nearest_to_the_worst_gap_are_kept() -> None:
    """Where not all fit, the gap is in the middle of those that do."""
    ticks = tuple(tick(n, items=64, reason="x" * 100) for n in range(1000))
    simulation = Simulation(deadline)
    stream = simulation.submit(20, 100, client=1)
    simulation.run(1.0)
    answers: list[Recorded] = []
    simulation.inbox.put(AskEngine(answers.append, stream.handle))
    simulation.tick()
    (whole,) = answers[0].requests
    assert whole.worst_gap is not None
    gap = evolve(whole.worst_gap, tick=ticks[300])
    got = answered(
        Explain(request=1, ticks=1000), Recorded(3.0, (evolve(whole, worst_gap=gap),), ticks)
    )
    shown = [t.tick for t in got.ticks]
    assert shown[0] > 0
    assert abs((300 - shown[0]) - (shown[-1] - 300)) <= 1


def test_without_a_handle_no_ticks_come_unasked() -> None:
    """The list of requests is short enough to be looked at often."""
    assert explain.ticks_for(Explain()) == 0


def test_what_is_infinite_or_unknown_is_left_out() -> None:
    """JSON has no infinity, and 0 would be a lie."""
    got = answered(Explain(ticks=1), Recorded(3.0, (), (tick(moved_bytes=math.inf),)))
    assert got.ticks[0].limit_ms is None
    assert got.ticks[0].predicted_ms is None
    assert got.ticks[0].moved_bytes == 0.0


def test_a_reason_that_is_no_text_cannot_stop_the_daemon() -> None:
    """Half a character from somebody's policy is replaced, a novel is clipped."""
    skips = (Skip(1, "\ud800"), Skip(2, "x" * 10_000))
    got = answered(Explain(ticks=1), Recorded(3.0, (), (tick(skipped=skips),)))
    short, long = got.ticks[0].skipped
    assert short.reason == "?"
    assert len(long.reason) < 200


# --- over a connection ---


async def test_explain_is_answered_between_tokens(autojump_clock: MockClock) -> None:
    """On the same connection, in order, without hurting the stream."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask("mine", max_tokens=20, app="editor")
        await client.until(Token)
        await client.send(Explain())
        got = await client.until(Explanation)
        (timeline,) = got.requests
        assert (timeline.request, timeline.id, timeline.app) == (1, "mine", "editor")
        assert (timeline.state, timeline.reason) == ("decode", None)
        assert got.ticks == ()
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 20)


async def test_a_request_that_ended_is_explained_by_name(autojump_clock: MockClock) -> None:
    """Its handle came with its terminal event; anybody may ask, also when nothing runs."""
    async with house() as daemon:
        client, admin = daemon.connect(), daemon.connect()
        await client.ask("mine", max_tokens=4, app="editor")
        eos = await client.until(Eos)
        await trio.sleep(1.0)
        await admin.send(Explain(request=eos.request, ticks=2))
        got = await admin.until(Explanation)
        (timeline,) = got.requests
        assert (timeline.id, timeline.app, timeline.reason) == ("mine", "editor", "length")
        assert timeline.total_ms == pytest.approx(eos.timings.total_ms, abs=0.01)
        assert timeline.ttft_ms == pytest.approx(eos.timings.ttft_ms, abs=0.01)
        assert timeline.age_ms == pytest.approx(1000 + timeline.total_ms, abs=3e3 * TICK_S)
        assert len(got.ticks) == 2
        assert got.ticks[0].measured_ms == pytest.approx(TICK_S * 1e3)


async def test_an_unknown_handle_is_not_fatal_to_explain(autojump_clock: MockClock) -> None:
    """It may have ended long ago."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send(Explain(request=99))
        error = await client.until(Error)
        assert (error.code, error.fatal) == ("E_PROTO_005", False)
        await client.send(Explain())
        assert (await client.until(Explanation)).requests == ()


# --- what a person reads ---


def test_the_story_of_a_request_in_sentences() -> None:
    """Each part of its time has one, with its reason."""
    assert sentences(STORY) == [
        (
            "Request 17 (editor, a-1), interactive: ended (length) after 4.0 s; "
            "700 tokens of prompt, 90 of answer."
        ),
        "queued 1.2 s: all 8 slots were busy; later requests were admitted before it once",
        (
            "prefill 700 tokens in 12 ticks over 900 ms, left out of 40 ticks over 400 ms: "
            "does not fit into this tick (within 1.2x)"
        ),
        "first token after 2.5 s",
        (
            "decode 89 tokens in 89 ticks over 900 ms, left out of 9 ticks over 100 ms: "
            "7 x later, 2 x full"
        ),
        "parked 400 ms: its reader was behind",
        (
            "preempted 2 times, 100 ms without a slot: the KV cache was full, or an interactive request "
            "needed the slot; tokens that were not cached were computed again"
        ),
        "worst gap 33.5 ms in tick 812 (plan: long tick: every stream can bear 4x)",
    ]


def test_a_worst_gap_tells_the_plan_and_what_came_of_it() -> None:
    """A reason alone, "within 1.2x", would read as a verdict on the gap."""
    gap = GapInfo(gap_ms=33.5, tick=812, reason="within 1.2x")
    timeline = msgspec.structs.replace(STORY, worst_gap=gap)
    assert sentences(timeline, [TICK])[-1] == (
        "worst gap 33.5 ms in tick 812 (plan: within 1.2x): limit 10.0 ms, predicted 9.5 ms, "
        "took 9.8 ms"
    )


def test_a_stream_that_was_computed_ahead_says_by_how_much() -> None:
    """Its tokens were there before they were shown."""
    found = sentences(msgspec.structs.replace(STORY, held_ms=210.0))
    assert "computed up to 210 ms ahead of its reader: tokens were held to be shown evenly" in found
    assert len(found) == len(sentences(STORY)) + 1


def test_what_did_not_happen_has_no_sentence() -> None:
    """A request that waits has a head and a reason."""
    timeline = StoryInfo(
        request=3,
        state="queued",
        lane="background",
        age_ms=5.5,
        total_ms=5.5,
        prompt_tokens=1,
        completion_tokens=0,
        queue_ms=5.5,
        queue_reason="the slot was busy",
    )
    assert sentences(timeline) == [
        "Request 3, background: queued, 5.5 ms old; 1 token of prompt, 0 of answer.",
        "queued 5.5 ms: the slot was busy",
    ]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            BeginningInfo(tokens=640, source="saved", saved_ms=812.4, apart=640),
            "640 of 700 prompt tokens were cached, restored from memory: 812 ms saved",
        ),
        (
            BeginningInfo(
                tokens=312, source="leaf", saved_ms=90.0, apart=312, mine=" Today", other=" Now"
            ),
            (
                "312 of 700 prompt tokens were cached, still in the KV cache: 90.0 ms saved; token 312 is "
                "' Today' where the most similar one has ' Now'"
            ),
        ),
        (
            BeginningInfo(tokens=0, source="running", saved_ms=0.0, apart=3, mine="x"),
            (
                "nothing of the prompt was cached; the most similar one has the same first 3 tokens; token 3 is 'x' where "
                "the most similar one ends"
            ),
        ),
    ],
)
def test_what_was_cached_has_a_sentence(found: BeginningInfo, sentence: str) -> None:
    """How much, from where, what it saved, and where the nearest prompt was another."""
    assert sentence in sentences(msgspec.structs.replace(STORY, beginning=found))


@pytest.mark.parametrize(
    ("uid", "of", "shown"),
    [(1000, "uid 1000", True), (1000, "uid 1000/salt x", True), (100, "uid 1000", False)],
)
def test_where_prompts_part_is_shown_to_their_user_alone(uid: int, of: str, shown: bool) -> None:
    """Another user sees how much was cached in `explain`, and no token of it."""
    assert Principal(connection=1, uid=uid).owns(of) is shown


def test_a_gap_of_skipped_ticks_says_so() -> None:
    """The tick that ended it is not to blame."""
    gap = GapInfo(gap_ms=120.0, tick=9, reason="full", skipped=11)
    said = sentences(msgspec.structs.replace(STORY, worst_gap=gap))[-1]
    assert said == "worst gap 120 ms until tick 9, left out of 11 ticks before it: full"


def test_a_machine_that_was_slower_than_predicted_is_named() -> None:
    """By the ticks of the request itself; a tick of others says nothing about it."""
    mine = ItemInfo(request=17, phase="decode", tokens=1, reason="")
    slow = [
        TickInfo(tick=n, age_ms=0.0, items=(mine,), predicted_ms=10.0, measured_ms=46.0)
        for n in range(3)
    ]
    other = TickInfo(tick=9, age_ms=0.0, predicted_ms=10.0, measured_ms=10.0)
    said = sentences(STORY, [*slow, other])[-1]
    assert said.startswith("the machine took 4.6 x its prediction in the 3 ticks below")
    as_planned = [msgspec.structs.replace(tick, measured_ms=12.0) for tick in slow]
    assert not any("x its prediction" in line for line in sentences(STORY, as_planned))


def test_time_that_is_in_no_part_is_told() -> None:
    """So that what is shown adds up to the total."""
    assert "in none of these parts" not in " ".join(sentences(STORY))
    longer = msgspec.structs.replace(STORY, total_ms=4060.0)
    assert "60.0 ms in none of these parts" in sentences(longer)


@pytest.mark.parametrize(
    ("last", "handles"), [(None, [3, 3, 2, 9]), (1, [9]), (2, [3, 3, 9]), (7, [3, 3, 2, 9])]
)
def test_the_last_requests_are_those_of_the_highest_handles(
    last: int | None, handles: list[int]
) -> None:
    """All answers of a request are one request."""
    stories = [msgspec.structs.replace(STORY, request=handle) for handle in (3, 3, 2, 9)]
    assert [one.request for one in explain_verb.latest(stories, last)] == handles


def test_shares_are_of_the_whole_time() -> None:
    """They add up to one if everything is known."""
    assert shares(STORY) == pytest.approx(
        {
            "queued": 0.3,
            "prefix": 0.0,
            "prefill": 0.325,
            "decode": 0.25,
            "mask": 0.0,
            "aside": 0.0,
            "parked": 0.1,
            "preempted": 0.025,
        }
    )


TICK = TickInfo(
    tick=812,
    age_ms=5000.0,
    items=(
        ItemInfo(17, "decode", 1, "one token each"),
        ItemInfo(18, "prefill", 64, "the rest, within 1.2x"),
    ),
    skipped=(SkipInfo(19, "no room"),),
    ballast=1,
    limit_ms=10.0,
    limit_reason="within 1.2x",
    predicted_ms=9.5,
    measured_ms=9.75,
)


def why(tick_: TickInfo, request: int | None = 17) -> str:
    """Return the reason that is shown with a tick."""
    (row,) = tick_table([tick_], request)
    return row["WHY"]


@pytest.mark.parametrize(
    ("request_", "got", "why"),
    [
        (17, "1 decode", "within 1.2x"),
        (18, "64 prefill", "the rest, within 1.2x"),
        (19, "-", "no room"),
        (None, "-", "within 1.2x"),
    ],
)
def test_a_tick_is_a_line(request_: int | None, got: str, why: str) -> None:
    """What the request got of it, what it was in all, and why."""
    (row,) = tick_table([TICK], request_)
    assert row.pop("GOT", "-") == got
    tokens = {"DECODE": "1", "PREFILL": "64", "BALLAST": "1"}
    times = {"LIMIT": "10.0 ms", "PREDICTED": "9.5 ms", "TOOK": "9.8 ms"}
    assert row == {"TICK": "812", "AGO": "5.0 s", **tokens, **times, "WHY": why}


def test_columns_that_say_nothing_are_left_out() -> None:
    """Nobody asked what a request got, and no tick has ballast."""
    (row,) = tick_table([msgspec.structs.replace(TICK, ballast=0)], None)
    assert not {"GOT", "BALLAST"} & set(row)


def test_without_a_limit_the_reason_is_that_of_the_item() -> None:
    """Nothing else decided what it got."""
    free = msgspec.structs.replace(TICK, limit_ms=None)
    assert why(free) == "one token each"


def test_a_table_is_aligned_and_whole() -> None:
    """What does not fit stands below, once for lines in a row; a pipe has room for everything."""
    so = "so so so so so so so so so"
    rows = [{"N": n, "NAME": "x", "WHY": why} for n, why in (("7", so), ("8", so), ("123", ""))]
    assert aligned(rows, {"NAME", "WHY"}, 10_000) == [
        "  N  NAME  WHY",
        f"  7  x     {so}",
        f"  8  x     {so}",
        "123  x",
    ]
    assert aligned(rows, {"NAME", "WHY"}, 24) == [
        "  N  NAME",
        "  7  x",
        "      why: so so so so",
        "        so so so so so",
        "  8  x",
        "123  x",
        "      why:",
    ]


def test_explanations_fit_into_80_columns() -> None:
    """Long labels, reasons and times, in a table of ticks and in one of requests."""
    slow = msgspec.structs.replace(
        TICK, tick=123_456, age_ms=119_000.0, measured_ms=412.0, limit_reason="word " * 30
    )
    timeline = msgspec.structs.replace(STORY, app="a label of some length")
    for table in (tick_table([slow], 18), explain_verb._requests((timeline,))):
        assert all(len(line) <= 80 for line in aligned(table, explain_verb._LEFT, 80))


def test_a_failed_tick_says_what_was_done() -> None:
    """The reason to have been planned is of no interest then."""
    failed = msgspec.structs.replace(TICK, status=1, recovery="no room: request 18 was preempted")
    assert why(failed) == "the decode failed (1): no room: request 18 was preempted"


def test_a_tick_that_was_given_up_has_not_failed() -> None:
    """It says for whom."""
    ended = msgspec.structs.replace(TICK, status=2, recovery="given up for an interactive request")
    assert why(ended) == "given up for an interactive request"


def test_reasons_cannot_steer_the_terminal() -> None:
    """Labels come from clients, and reasons from policies of anybody."""
    timeline = msgspec.structs.replace(STORY, app="\x1b[2J", queue_reason="\x1b]0;x\x07")
    assert not any("\x1b" in line for line in sentences(timeline))
    assert "\x1b" not in why(msgspec.structs.replace(TICK, limit_reason="\x1b"), None)


def test_limits_are_of_the_plan() -> None:
    """A limit of the guard arrives with its reason."""
    limited = tick(limit=Limit(0.0105, "within 1.2x", 0.008))
    (got,) = answered(Explain(ticks=1), Recorded(3.0, (), (limited,))).ticks
    assert (got.limit_ms, got.limit_reason) == (10.5, "within 1.2x")
