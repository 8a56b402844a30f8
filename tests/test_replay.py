"""A trace holds all that a plan depends on: every tick can be planned again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog.testing
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import decoder, prompt, state

from uma_trio.engine.recorder import Recorder
from uma_trio.observe.records import TickRecord
from uma_trio.observe.trace import TraceFile
from uma_trio.policy.baseline import baseline
from uma_trio.policy.by_name import BUILT_IN
from uma_trio.policy.cost import CostModel, Staircase, Traffic
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan, PlanItem
from uma_trio.policy.portable import (
    FORMAT,
    Footer,
    Header,
    Line,
    TracedTick,
    TraceError,
    decode,
    encode,
)
from uma_trio.policy.state import Contract, GuardMemory, MeasuredTick, Memory, SchedulerState
from uma_trio.policy.tuning import TUNING, Tuning
from uma_trio_sim.commands.replay import replay as replay_verb
from uma_trio_sim.replay import Replayed, replay
from uma_trio_sim.simulation import Simulation

DATA = Path(__file__).parent / "data"
HEADER = Header("0.1.0", "story.gguf", "baseline", Contract(latency_cap=1.5))


def traced(state_: SchedulerState, plan: Plan | None = None) -> TracedTick:
    """Return what a trace holds of a tick."""
    return TracedTick(state_, plan or baseline(state_), 0.01, 0.001, 0)


def simulated(policy: Policy, seconds: float = 20.0) -> list[TracedTick]:
    """Run people, pastes and batch jobs against each other, and return every tick."""
    ticks: list[TracedTick] = []

    def keep(seen: SchedulerState, plan: Plan, record: TickRecord) -> None:
        ticks.append(TracedTick(seen, plan, record.decode_s, record.host_s, record.status))

    simulation = Simulation(policy, seed=7, recorder=Recorder(keep))
    for client in range(3):
        simulation.storm(100 + client)
    simulation.submit(300, 400, client=4, lane="background")
    simulation.submit(20, 300, client=1)
    simulation.at(2.0, lambda: simulation.submit(1500, 50, client=2) and None)
    simulation.at(3.0, lambda: simulation.submit(30, 50, client=3) and None)
    simulation.run(seconds)
    return ticks


# --- there and back ---

finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.floats(allow_nan=False)
keys = st.integers(0, 2**53)
staircases = st.lists(numbers, max_size=4).map(
    lambda s: Staircase(tuple(range(1, len(s) + 1)), tuple(s))
)
values: dict[Any, st.SearchStrategy[Any]] = {
    Staircase: staircases,
    float: numbers,
    float | None: st.none() | numbers,
    int: st.integers(-(2**53), 2**53),
}


def attrs_of(kind: type, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy of a value with any numbers in its fields."""
    attrs.resolve_types(kind)
    for field in attrs.fields(kind):
        if field.name in known:
            continue
        if field.type in values:
            known[field.name] = values[field.type]
        elif attrs.has(field.type):
            known[field.name] = attrs_of(field.type)
    return st.builds(kind, **known)


costs = attrs_of(CostModel, tuning=st.just(TUNING))  # the header has it
guards = attrs_of(GuardMemory, mixed=st.booleans())
memories = attrs_of(
    Memory,
    cost=st.none() | costs,
    guard=guards,
    used_s=st.dictionaries(keys, numbers, max_size=3),
)
views = st.builds(
    decoder,
    keys,
    pending=st.integers(1, 300),
    started=st.booleans(),
    credit=st.integers(-5, 100),
    first_token_at=st.none() | finite,
    lane=st.sampled_from(["interactive", "background"]),
)
states = attrs_of(
    SchedulerState,
    measured=st.lists(
        attrs_of(
            MeasuredTick,
            itl=st.dictionaries(keys, numbers, max_size=3),
            mixed=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    sequences=st.lists(views, max_size=4).map(tuple),
    memory=memories,
    traffic=st.none() | attrs_of(Traffic),
    contract=attrs_of(Contract, bmt_budget=st.none() | numbers),
)
plans = attrs_of(
    Plan,
    items=st.lists(
        st.builds(PlanItem, keys, keys, st.sampled_from(["decode", "prefill"]), st.text()),
        max_size=4,
    ).map(tuple),
    memory=memories,
    limit=attrs_of(Limit, reason=st.text()),
)
lines = st.one_of(
    st.builds(TracedTick, states, plans, numbers, numbers, st.integers(-5, 5)),
    st.builds(Header, st.text(), st.text(), st.text(), attrs_of(Contract), tuning=attrs_of(Tuning)),
    st.builds(Footer, keys, keys),
)


def bits(value: object) -> str:
    """Write a value so that two floats look the same only if they are."""
    return repr(value)


@given(lines)
def test_a_line_comes_back_as_it_was(line: Line) -> None:
    """Every number to the last bit, also infinities and negative zero."""
    text = encode(line)
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    again = decode(text)
    assert again == line
    assert bits(again) == bits(line)


def test_what_is_no_number_comes_back_as_none() -> None:
    """NaN is not equal to itself, so it is looked at alone."""
    line = decode(encode(traced(state(decoder(1)), Plan(predicted_s=math.nan))))
    assert isinstance(line, TracedTick)
    assert math.isnan(line.plan.predicted_s)


def test_every_class_of_a_state_is_tried() -> None:
    """A field that somebody adds is written and read without further ado."""
    text = encode(traced(state(decoder(1))))
    for field in attrs.fields(SchedulerState):
        assert f'"{field.name}"'.encode() in text
    for field in attrs.fields(Plan):
        assert f'"{field.name}"'.encode() in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "no"),
        (b'{"hello": 1}', "header, tick, footer"),
        (b'{"header": {"format": 99}}', f"99, this version reads {FORMAT}"),
        (b'{"footer": {"written": "many", "dropped": 0}}', "written"),
        (b'{"footer": {"written": 1, "dropped": 0, "burnt": 1}}', "burnt"),
        (b'{"footer": {"written": 1}}', "dropped"),
        (b'{"tick": 7}', "does not fit"),
        (b'{"header": null}', "does not fit"),
    ],
)
def test_what_is_no_trace_is_refused(text: bytes, said: str) -> None:
    """Half a state would be planned, but not to the same plan."""
    with pytest.raises(TraceError, match=said):
        decode(text)


def test_a_trace_of_another_format_is_refused() -> None:
    """Its states lack what this version plans from."""
    text = encode(Header("0", "m", "deadline")).replace(
        f'"format":{FORMAT}'.encode(), b'"format":5'
    )
    with pytest.raises(TraceError, match=f"its format is 5, this version reads {FORMAT}"):
        decode(text)


# --- replay ---


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_simulated_run_is_planned_again_to_the_same_plans(name: str) -> None:
    """Through the file's format and back, thousands of ticks, each exactly."""
    policy = BUILT_IN[name]
    ticks = simulated(policy)
    assert len(ticks) > 300
    again = [line for tick in ticks if isinstance(line := decode(encode(tick)), TracedTick)]
    found = replay(policy, again)
    assert (found.ticks, found.missing, found.first) == (len(ticks), 0, None)


def changed(where: Callable[[Plan], Plan]) -> Policy:
    """Return a policy that differs from the baseline in tick 3."""
    return lambda seen: where(baseline(seen)) if seen.tick == 3 else baseline(seen)


@pytest.mark.parametrize(
    ("change", "where", "recorded", "replayed"),
    [
        (lambda p: evolve(p, ballast=2), "plan.ballast", "0", "2"),
        (
            lambda p: evolve(p, items=(*p.items, p.items[0])),
            "plan.items, how many",
            "1",
            "2",
        ),
        (
            lambda p: evolve(p, items=(evolve(p.items[0], reason="so"),)),
            "plan.items[0].reason",
            "'decode: one token each'",
            "'so'",
        ),
        (
            lambda p: evolve(p, memory=evolve(p.memory, used_s={5: 1.0})),
            "plan.memory.used_s.5",
            "nothing",
            "1.0",
        ),
        (
            lambda p: evolve(p, limit=evolve(NO_LIMIT, seconds=1.0)),
            "plan.limit.seconds",
            "'inf'",
            "1.0",
        ),
        (lambda p: evolve(p, predicted_s=math.ulp(0.0)), "plan.predicted_s", "0.0", "5e-324"),
    ],
)
def test_the_first_difference_is_named(
    change: Callable[[Plan], Plan], where: str, recorded: str, replayed: str
) -> None:
    """The tick, the place in the plan, and both values; however small it is."""
    ticks = [traced(evolve(state(decoder(1)), tick=n)) for n in range(6)]
    found = replay(changed(change), ticks)
    assert found.ticks == 4
    assert found.first is not None
    assert found.first.tick == 3
    assert (found.first.where, found.first.recorded, found.first.replayed) == (
        where,
        recorded,
        replayed,
    )


def test_the_row_that_the_engine_adds_to_a_lone_one_is_no_difference() -> None:
    """The last token of a prompt, alone in its tick; an answer's token gets none."""
    last, answer = state(prompt(1, 1)), state(decoder(1))
    for now, differs in ((last, False), (answer, True)):
        recorded = evolve(baseline(now), ballast=1)
        found = replay(baseline, [traced(now, recorded)])
        assert (found != Replayed(1, 0, None)) is differs


def test_another_policy_differs_where_it_computes_something_else() -> None:
    """Its reasons and limits are its own; tokens are what a machine computes."""

    def other(seen: SchedulerState) -> Plan:
        plan = baseline(seen)
        items = tuple(evolve(item, reason="so") for item in plan.items)
        more = 1 if seen.tick == 4 else 0
        return evolve(plan, items=items, ballast=more, limit=NO_LIMIT, predicted_s=1.0)

    ticks = [traced(evolve(state(decoder(1)), tick=n)) for n in range(6)]
    found = replay(other, ticks, work_only=True)
    assert found.first is not None
    assert (found.first.tick, found.first.where) == (4, "plan.ballast")


def test_missing_ticks_are_counted_and_hurt_nobody() -> None:
    """Each line holds its whole state."""
    ticks = [traced(evolve(state(decoder(1)), tick=n)) for n in (0, 1, 4, 5, 9)]
    found = replay(baseline, ticks)
    assert (found.ticks, found.missing, found.first) == (5, 5, None)


# --- the file ---


def write(path: Path, ticks: list[TracedTick]) -> Path:
    """Write a trace by the way it really goes."""
    trace = TraceFile(path, HEADER)
    for tick in ticks:
        record = TickRecord(
            tick.state.tick, 0.0, (), (), 0, NO_LIMIT, 0.0, 0.0, tick.decode_s, tick.host_s, 0
        )
        trace(tick.state, tick.plan, record)
    trace.close()
    trace.close()
    return path


def test_a_trace_is_a_header_the_ticks_and_a_footer(tmp_path: Path) -> None:
    """Nobody else may read it: it shows who works when."""
    ticks = [traced(evolve(state(prompt(1)), tick=n)) for n in range(20)]
    path = write(tmp_path / "trace", ticks)
    found = [decode(line) for line in path.read_bytes().splitlines(keepends=True)]
    assert found == [HEADER, *ticks, Footer(20, 0)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_slow_disk_drops_ticks_and_counts_them(tmp_path: Path) -> None:
    """The engine never waits; the last line says how many are missing."""
    writing, go_on = threading.Event(), threading.Event()

    def slow(tick: TracedTick) -> bytes:
        writing.set()
        go_on.wait(10)
        return encode(tick)

    path = tmp_path / "trace"
    trace = TraceFile(path, HEADER, encode_tick=slow, most_waiting=4)

    def put(n: int) -> None:
        record = TickRecord(n, 0.0, (), (), 0, NO_LIMIT, 0.0, 0.0, 0.0, 0.0, 0)
        trace(evolve(state(decoder(1)), tick=n), Plan(), record)

    put(0)
    assert writing.wait(10)  # it is out of the queue now
    for n in range(1, 10):
        put(n)
    go_on.set()
    trace.close()
    header, *ticks, footer = (decode(line) for line in path.read_bytes().splitlines(keepends=True))
    assert [tick.state.tick for tick in ticks] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    assert (header, footer) == (HEADER, Footer(5, 5))


def test_a_tick_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    """A policy that puts an object into its plan costs its own line and nothing else."""
    odd = evolve(Plan(), memory=object())  # type: ignore[arg-type]
    path = write(tmp_path / "trace", [traced(state(), odd), traced(state(decoder(1)))])
    assert [type(decode(line)) for line in path.read_bytes().splitlines(keepends=True)] == [
        Header,
        TracedTick,
        Footer,
    ]
    assert decode(path.read_bytes().splitlines()[-1]) == Footer(1, 1)


def test_a_full_disk_ends_the_trace_and_not_the_daemon() -> None:
    """It is said once, and the rest is dropped."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with structlog.testing.capture_logs() as said:
        trace = TraceFile(full, HEADER)
        for _ in range(1000):
            trace(state(decoder(1)), Plan(), TickRecord(0, 0, (), (), 0, NO_LIMIT, 0, 0, 0, 0, 0))
        trace.close()
    first, *_ = said
    assert (first["file"], first["why"]) == ("/dev/full", "No space left on device")


# --- the verb ---


def test_a_trace_that_is_reproduced_exits_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what made it, and how much of it there is."""
    ticks = [traced(evolve(state(decoder(1)), tick=n)) for n in range(5)]
    assert replay_verb(write(tmp_path / "trace", ticks)) == 0
    said = capsys.readouterr().out
    assert "story.gguf, policy baseline, uma-trio 0.1.0" in said
    assert "All 5 plans are reproduced." in said
    assert "not in it" not in said


def test_a_trace_that_is_not_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shows where the first difference is."""
    good, bad = (evolve(state(decoder(1)), tick=n) for n in (7, 8))
    wrong = evolve(baseline(bad), ballast=1)
    path = write(tmp_path / "trace", [traced(good), traced(bad, wrong)])
    assert replay_verb(path) == 1
    said = capsys.readouterr().out
    assert "Tick 8" in said
    assert "plan.ballast: 1 was recorded, 0 comes out" in said
    assert replay_verb(path, json=True) == 1
    assert '"where": "plan.ballast"' in capsys.readouterr().out


@pytest.mark.parametrize("whole", [True, False])
def test_a_difference_says_nothing_about_the_end_of_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    """Comparing stops there, and yet a trace is called cut off only if it is."""
    ticks = [traced(evolve(state(decoder(1)), tick=n)) for n in range(5)]
    wrong = evolve(ticks[1], plan=evolve(ticks[1].plan, ballast=1))
    path = write(tmp_path / "trace", [ticks[0], wrong, *ticks[2:]])
    if not whole:
        path.write_bytes(path.read_bytes()[:-40])
    assert replay_verb(path) == 1
    assert ("Its end is missing" in capsys.readouterr().out) is not whole
    replay_verb(path, json=True)
    assert f'"complete": {str(whole).lower()}' in capsys.readouterr().out


def test_another_policy_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would it have done in the same tick?"""
    path = write(tmp_path / "trace", [traced(state(prompt(1, 500)))])
    assert replay_verb(path, policy="deadline") == 1
    assert "plan." in capsys.readouterr().out


def test_a_trace_that_was_cut_off_is_replayed_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon that was killed leaves half a line; it also leaves what led there."""
    ticks = [traced(evolve(state(decoder(1)), tick=n)) for n in range(5)]
    path = write(tmp_path / "trace", ticks)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1])[:-10])
    assert replay_verb(path) == 0
    said = capsys.readouterr().out
    assert "Its end is missing" in said
    assert "All 4 plans" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "this is not a trace; name a file that `uma-trio serve --trace` wrote"),
        (b"t,interval_s\n1,5\n", "this is not a trace"),
        (encode(Footer(0, 0)), "this is not a trace"),
        (encode(evolve(HEADER, format=99)), "line 1: its format is 99"),
        (encode(HEADER) + b"{}\n", "line 2: it is not a line of a trace"),
        (encode(evolve(HEADER, policy="luck")), "no policy is called 'luck'; there are: "),
    ],
)
def test_a_file_that_is_no_trace_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    """In one sentence, with the line."""
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    assert replay_verb(path) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors
