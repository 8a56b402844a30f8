"""The simulation: the same seed gives the same world, and a recorded run is foretold."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve
from net_kit import House, house
from trio.testing import MockClock

from benches import simulate, speed, validate
from benches.machine import (
    TABLES,
    Machine,
    NoCost,
    Profile,
    built_in,
    from_cost_file,
    gaussian,
    modelled,
    staircase,
)
from benches.outcome import jain, together
from benches.quick import Quick
from benches.recording import Load, Recording, asked, figures, fit, profile, read, sessions
from benches.simulation import LIMITS, Simulation, settings_for
from benches.virtual import World
from benches.workload import ENDLESS, MIXES, Application, Session, Turn, gamma, play, turns
from benches.workload import sessions as sessions_of
from uma_protocol import Eos, Token
from uma_trio.backend.base import DecodeStatus
from uma_trio.backend.fake import FakeBackend, linear_cost
from uma_trio.cost_store import remember
from uma_trio.engine.messages import Targets
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.records import TickRecord
from uma_trio.policy.baseline import baseline
from uma_trio.policy.contract import contract
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.find import BUILT_IN, find_policy
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.portable import Footer, Header, TracedTick, TraceError, encode
from uma_trio.policy.state import SchedulerState, SequenceView

NOISY = built_in("q8_0", gaussian(0.02))  # its ticks are long enough to be given up

# Here many come after a tick was planned and before its decode begins.
SLOW_BETWEEN = modelled("slow between decodes", CostModel(staircase(TABLES["q8_0"]), host_s=0.2))


def quick(policy: str = "contract", profile: Profile = NOISY, seed: int = 1) -> Quick:
    """Return a world of the policy alone."""
    return Quick(find_policy(policy), Machine.of(profile, seed), settings_for(profile), LIMITS)


# --- applications ---

APP = Application(name="app", lane="interactive", prompt=200, answer=50, think_s=2.0, every_s=5.0)


def drawn(app: Application, n: int, seed: str = "1") -> list[Turn]:
    """Return the first turns of a session."""
    endless = turns(app, seed)
    return [next(endless) for _ in range(n)]


@pytest.mark.parametrize("mix", MIXES)
def test_the_same_seed_gives_the_same_work(mix: str) -> None:
    """Who asks what, and when, is a function of the seed."""

    def work(seed: int) -> list[object]:
        return [
            (s.client, s.lane, s.start, [turn for turn, _ in zip(s.turns, range(20), strict=False)])
            for s in sessions_of(MIXES[mix], seed, 60.0)
        ]

    assert work(1) == work(1)
    assert work(1) != work(2)


def test_lengths_and_thinking_times_are_log_normal_around_their_medians() -> None:
    """Half of them are below the median that was asked for, and their logarithms scatter evenly."""
    found = drawn(evolve(APP, most_answer=100_000), 2000)
    assert statistics.median(t.prompt for t in found) == pytest.approx(200, rel=0.08)
    assert statistics.median(t.answer for t in found) == pytest.approx(50, rel=0.08)
    assert statistics.median(t.think_s for t in found[1:]) == pytest.approx(2.0, rel=0.08)
    below, above = statistics.quantiles([t.prompt for t in found], n=20)[::18]
    assert 200 / below == pytest.approx(above / 200, rel=0.15)


def test_sessions_come_in_bursts() -> None:
    """The times between them have the mean that was asked for, and scatter twice as much."""
    draw = random.Random(1)
    times = [gamma(draw, 5.0) for _ in range(20_000)]
    assert statistics.mean(times) == pytest.approx(5.0, rel=0.05)
    assert statistics.stdev(times) / statistics.mean(times) == pytest.approx(2.0, rel=0.05)


def test_a_conversation_grows_by_what_was_said_and_begins_anew_when_it_is_full() -> None:
    """Each prompt holds all that came before, which is what it shares with earlier ones."""
    app = evolve(APP, conversation=True, shared=30, most_prompt=1500)
    said = 0
    for turn in drawn(app, 200):
        assert turn.shared == min(30 + said, turn.prompt - 1)
        assert turn.prompt <= 1500
        said = 0 if turn.prompt == 1500 else turn.prompt - 30 + turn.answer
    assert any(turn.prompt == 1500 for turn in drawn(app, 200))


def test_a_session_asks_again_a_while_after_the_answer() -> None:
    """Nobody asks the second question before having read the answer to the first."""
    world = quick()
    play(world, [Session(1, "interactive", 0.5, [Turn(0.0, 20, 5), Turn(3.0, 30, 5)])])
    world.run(60.0)
    first, second = world.streams
    assert first.arrived == pytest.approx(0.5)
    assert second.arrived == pytest.approx(first.token_times[-1] + 3.0)


def test_a_request_comes_when_it_comes_though_a_tick_is_being_computed() -> None:
    """What it waits for the end of that tick is part of its time to the first token."""
    world = quick()
    world.storm(1)
    world.at(0.1003, lambda: world.submit(20, 5, client=2) and None)
    world.run(5.0)
    newcomer = next(s for s in world.streams if s.client == 2)
    assert newcomer.arrived == 0.1003


def test_a_tick_that_is_given_up_ends_when_the_newcomer_comes() -> None:
    """Whatever else would have happened while it was computed."""
    ticks: list[TracedTick] = []
    settings = settings_for(NOISY)
    world = Quick(find_policy("contract"), Machine.of(NOISY), settings, LIMITS, ticks.append)
    world.storm(1, 900)
    world.at(0.01, lambda: world.submit(20, 5, client=2) and None)
    world.at(0.02, lambda: None)
    world.run(0.1)
    assert ticks[0].status == DecodeStatus.ABORTED
    assert ticks[0].decode_s == pytest.approx(0.01)


# --- the policy alone is the engine, only faster ---


def crowded(world: World) -> None:  # type: ignore[type-arg]
    """People, pastes and a storm at once."""
    for client in range(3):
        world.storm(100 + client)
    world.submit(300, 400, client=4, lane="background")
    world.at(2.0, lambda: world.submit(1500, 50, client=2))
    world.at(3.0, lambda: world.submit(30, 50, client=3))
    world.run(15.0)


def interrupted(world: World) -> None:  # type: ignore[type-arg]
    """Now and then a person comes while background prompts are computed."""
    for client in range(3):
        world.storm(100 + client, 900)
    for n in range(60):
        world.at(0.37 * n + 0.1, lambda n=n: world.submit(40 + n, 3, client=n))
    world.run(30.0)


def choosy(world: World) -> None:  # type: ignore[type-arg]
    """Streams that ask for less than they could bear, beside background answers."""
    for client in range(4):
        world.submit(400, 300, client=client, lane="background")
    world.submit(50, 200, client=8, targets=Targets(gap_s=0.04))
    world.at(1.0, lambda: world.submit(600, 50, client=9, targets=Targets(ttft_s=0.3)))
    world.run(15.0)


def without_room(world: World) -> None:  # type: ignore[type-arg]
    """More background answers than the cache has cells for, in the end."""
    for client in range(16):
        world.submit(2000, 1000, client=client, lane="background")
    world.run(500.0)


@pytest.mark.parametrize("machine", [NOISY, SLOW_BETWEEN], ids=lambda profile: profile.name)
@pytest.mark.parametrize("scene", [crowded, interrupted, choosy, without_room])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_policy_alone_gives_the_same_tokens_at_the_same_times(
    name: str,
    scene: Callable[[World], None],  # type: ignore[type-arg]
    machine: Profile,
) -> None:
    """Also where ticks are given up for a newcomer, and where requests are preempted."""
    whole, alone = Simulation(BUILT_IN[name], profile=machine, seed=1), quick(name, machine)
    scene(whole)
    scene(alone)
    assert [s.token_times for s in whole.streams] == [s.token_times for s in alone.streams]
    assert whole.ticks == alone.ticks
    assert whole.books.used_s == pytest.approx(alone.machine.used_s)
    figures = whole.metrics.snapshot()
    if scene is interrupted and name == "contract":
        assert figures["aborted_ticks_total"] > 0
    if scene is without_room:
        assert figures["preemptions_total"] > 0


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("mix", MIXES)
def test_no_token_is_lost_and_none_made_up(mix: str, name: str) -> None:
    """What was computed is what ended requests had, and what the others have so far."""
    world = quick(name, built_in("h200"))
    play(world, sessions_of(MIXES[mix], 1, 10.0))
    world.run(10.0)
    assert sum(world.machine.tokens.values()) == sum(s.computed for s in world.streams)
    assert any(s.ended for s in world.streams)
    for stream in world.streams:
        # The last token of an answer is sampled and never computed.
        assert stream.computed <= stream.prompt_tokens + stream.answer_tokens - 1
        assert len(stream.token_times) <= stream.answer_tokens
        if stream.ended:
            assert stream.computed == stream.prompt_tokens + stream.answer_tokens - 1
            assert len(stream.token_times) == stream.answer_tokens


def test_the_same_seed_gives_the_same_run() -> None:
    """And another seed another one."""
    runs = []
    for seed in (1, 1, 2):
        world = quick(seed=seed)
        crowded(world)
        runs.append([s.token_times for s in world.streams])
    assert runs[0] == runs[1] != runs[2]


# --- machines ---


@pytest.mark.parametrize("name", TABLES)
def test_a_stream_alone_takes_the_time_of_the_table(name: str) -> None:
    """One token a tick, and what passes between two decodes."""
    assert simulate.lone_gap_s(built_in(name)) == pytest.approx(TABLES[name][1] / 1e3 + 0.0004)


def test_a_daemons_cost_file_is_a_machine(tmp_path: Path) -> None:
    """It was measured, so it can be simulated."""
    path = tmp_path / "cost.json"
    remember(path, CostModel(Staircase((1, 2, 4), (0.010, 0.018, 0.02))))
    assert simulate.lone_gap_s(from_cost_file(path)) == pytest.approx(0.0104)


def test_a_file_without_costs_is_refused(tmp_path: Path) -> None:
    """With a word on where to find one."""
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(NoCost, match="doctor --cost"):
        from_cost_file(tmp_path / "cost.json")


def test_jains_index_is_1_for_equals_and_1_by_n_for_one_who_has_all() -> None:
    """Of nobody, or of one, there is nothing to compare."""
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0]) is None
    assert jain([0.0, 0.0]) is None


# --- what a trace shows ---


def traced(
    policy: str, noise: float, work: tuple[Session, ...], seconds: float
) -> tuple[Simulation, Recording]:
    """Record the whole engine on a machine whose costs are known."""
    ticks: list[TracedTick] = []

    def keep(state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        ticks.append(TracedTick(state, plan, record.decode_s, record.host_s, record.status))

    machine = built_in("q4_0", gaussian(noise))
    world = Simulation(find_policy(policy), profile=machine, seed=7, recorder=Recorder(keep))
    play(world, work)
    world.run(seconds)
    return world, Recording(Header("0.1.0", "fake", policy), tuple(ticks), 0)


def test_a_first_token_came_when_its_tick_had_ended_and_not_when_that_was_foreseen() -> None:
    """The last view of an answer of two tokens is one of a tick that was planned ahead."""
    view = SequenceView(1, "interactive", 5, 0, started=False, credit=9, arrived=0.0)
    began = SchedulerState(0.0, 0, (view,), 512, 1000)
    then = evolve(view, pending=1, computed=5, started=True, first_token_at=0.01)
    behind = SchedulerState(0.01, 1, (then,), 512, 1000, ahead=True)
    ticks = [
        TracedTick(began, Plan((PlanItem(1, 5, "prefill", ""),)), 0.5, 0.0, 0),
        TracedTick(behind, Plan((PlanItem(1, 1, "decode", ""),)), 0.1, 0.001, 0),
    ]
    (request,) = asked(ticks)
    assert request.first_token == pytest.approx(0.5)


def test_a_trace_shows_every_request_as_it_was() -> None:
    """When it came, how long it was, when its first token came, and all its gaps."""
    work = (
        Session(1, "interactive", 0.5, [Turn(0.0, 30, 20), Turn(1.5, 40, 1), Turn(1.0, 8, 9)]),
        Session(2, "background", 0.0, [Turn(0.0, 300, 30)]),
    )
    world, recording = traced("contract", 0.02, work, 20.0)
    for stream, request in zip(
        sorted(world.streams, key=lambda s: s.arrived), asked(recording.ticks), strict=True
    ):
        assert (request.prompt, request.answer) == (stream.prompt_tokens, stream.answer_tokens)
        assert (request.client, request.lane) == (stream.client, stream.lane)
        assert request.arrived == stream.arrived
        assert request.first_token == pytest.approx(stream.token_times[0], abs=1e-6)
        assert request.ended == pytest.approx(stream.token_times[-1], abs=1e-6) or (
            request.ended is None and stream is world.streams[-1]
        )
        # What the last tick gave nobody looks at again.
        told = stream.gaps[:-1] if request.ended is None else stream.gaps
        assert request.gaps == pytest.approx(told, abs=1e-9)


def test_a_question_after_an_answer_belongs_to_it_and_any_other_to_its_own_time() -> None:
    """Thinking times and first arrivals come out as they went in."""
    work = (
        Session(1, "interactive", 0.5, [Turn(0.0, 30, 20), Turn(1.5, 40, 5), Turn(1.0, 8, 9)]),
        Session(1, "interactive", 0.6, [Turn(0.0, 31, 20)]),
        Session(2, "background", 0.0, [Turn(0.0, 300, ENDLESS // 100)]),
    )
    _, recording = traced("baseline", 0.0, work, 20.0)
    requests = asked(recording.ticks)
    found = sorted(sessions(requests), key=lambda s: s.start)
    assert [(s.client, round(s.start, 6)) for s in found] == [(2, 0.0), (1, 0.5), (1, 0.6)]
    thoughts = [round(t.think_s, 4) for s in found for t in s.turns if t.think_s]
    # The second question follows the answer that came last, whoever asked for it.
    assert sorted(thoughts) == pytest.approx([1.0, 1.5], abs=0.1)
    assert list(found[0].turns) == [Turn(0.0, 300, ENDLESS)]
    at_their_times = sessions(requests, closed=False)
    assert len(at_their_times) == len(requests)


def test_the_machine_of_a_trace_is_the_one_that_made_it() -> None:
    """Steps, what looking back costs, and the pauses between decodes."""
    kinds = [(1, 1), (1, 1), (4, 4), (4, 4), (64, 1), (64, 1)]
    loads = [
        Load(kind, own_cells=100.0 * n * i, all_cells=(i * i) % 7 * 50.0)
        for i, kind in enumerate(kinds * 10)
        for n in (kind[0],)
    ]
    steps = {1: 0.008, 4: 0.011, 64: 0.09}
    took = [steps[x.kind[0]] + 2e-8 * x.own_cells + 3e-6 * x.all_cells for x in loads]
    found = fit(loads, took)
    assert found.per_cell == pytest.approx((2e-8, 3e-6), rel=1e-6)
    for load, seconds in zip(loads, took, strict=True):
        assert found(load) == pytest.approx(seconds)
    assert found(Load((34, 1), 0, 0)) == pytest.approx(0.0505)  # never seen: half way


def test_a_slow_hour_is_taken_as_it_was() -> None:
    """Where other programs slowed the machine, the simulated one is slow at the same time."""
    _, recording = traced("baseline", 0.0, (Session(1, "interactive", 0.0, [Turn(0, 4, 900)]),), 20)
    slowed = [
        evolve(tick, decode_s=tick.decode_s * (2.0 if 3.0 < tick.state.now < 5.0 else 1.0))
        for tick in recording.ticks
    ]
    noise = profile(slowed).noise
    draw = random.Random(1)
    factors = [statistics.median(noise(draw, 1, t) for _ in range(50)) for t in (1.0, 4.0, 7.0)]
    assert factors == pytest.approx([1.0, 2.0, 1.0], rel=0.1)


@pytest.mark.parametrize(
    ("mix", "policy", "figures"),
    [
        ("storm", "baseline", ("gap_p95", "ttft_p50", "tokens_s")),
        ("storm", "contract", ("gap_p95", "ttft_p50", "tokens_s")),
        ("desk", "baseline", ("gap_p95", "ttft_p50", "tokens_s")),
        # With company that comes and goes, gaps and first tokens are of two kinds (with and without
        # a load beside them), and a percentile that lies between the two jumps with any tick.
        ("desk", "contract", ("tokens_s",)),
    ],
)
def test_a_recorded_run_is_foretold(mix: str, policy: str, figures: tuple[str, ...]) -> None:
    """p95 gap and TTFT within 10 %, throughput within 5 %: the gate of every change."""
    _, recording = traced(policy, 0.05, sessions_of(MIXES[mix], 5, 40.0), 40.0)
    found = {one.name: one for one in validate.compare(recording, seeds=range(1))}
    for name in figures:
        assert found[name].within, f"{name} is off by {100 * found[name].off:.1f} %"


def test_a_prediction_that_is_off_is_not_within() -> None:
    """A tenth too much is, a ninth is not."""
    assert validate.Compared("gap_p95", 1.0, 1.1, 0.1000001).within
    assert not validate.Compared("gap_p95", 1.0, 1.11, 0.10).within
    assert not validate.Compared("gap_p95", 1.0, 0.89, 0.10).within
    assert validate.Compared("gaps", 100, 300, None).within is None


# --- the commands ---


def written(path: Path, recording: Recording) -> Path:
    """Write a trace as a daemon does."""
    footer = Footer(len(recording.ticks), 0)
    path.write_bytes(b"".join(map(encode, (recording.header, *recording.ticks, footer))))
    return path


def test_validate_prints_measured_beside_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file, with how far each is off; 0 if all are within their bounds."""
    _, recording = traced("contract", 0.02, sessions_of(MIXES["storm"], 1, 10.0), 10.0)
    path = written(tmp_path / "run.trace", recording)
    assert read(path) == recording
    assert validate.main([str(path), "--seeds", "1"]) == 0
    said = capsys.readouterr().out
    assert "policy contract" in said
    assert "gap p95, ms" in said
    assert "NO" not in said
    assert figures(recording.ticks).requests == len(asked(recording.ticks))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"hello\n", "line 1: it is not JSON"), (b"", "does not begin")],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    """In one sentence, with the file."""
    path = tmp_path / "run.trace"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=said):
        validate.main([str(path)])


def test_a_trace_without_a_second_token_has_no_gap_to_foretell() -> None:
    """It says so and predicts nothing."""
    _, recording = traced("baseline", 0.0, (Session(1, "background", 0.0, [Turn(0, 9, 1)]),), 5.0)
    with pytest.raises(TraceError, match="no gap"):
        figures(recording.ticks)


def test_simulate_compares_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each case and a CSV; the contract reads better than the baseline."""
    monkeypatch.setattr("benches.report.OUT", tmp_path)
    words = "--mixes storm --caps 1.2 --seconds 5 --seeds 1 --no-chart --machine h200"
    assert simulate.main(words.split()) == 0
    said = capsys.readouterr().out
    assert "seeds from 0" in said
    lines = [line.split("|") for line in said.splitlines() if line.startswith("| ")]
    p95 = {line[1].strip(): float(line[3]) for line in lines[1:] if not line[1].startswith(" -")}
    assert p95["contract 1.2"] < p95["baseline"]
    assert len(list(tmp_path.glob("simulate-*.csv"))) == 1


def test_simulate_can_run_the_whole_engine() -> None:
    """With the same outcome."""
    case = simulate.Case("contract", 1.5)
    alone, whole = (
        simulate.simulate(case, MIXES["storm"], NOISY, 5.0, 1, whole_engine=engine)
        for engine in (False, True)
    )
    assert alone.gaps == whole.gaps
    assert alone.load == whole.load
    assert together([alone, whole]).load == 2 * alone.load


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--policies luck --mixes storm --seconds 1 --no-chart", "no policy is called 'luck'"),
        ("--noise trace", "--trace FILE"),
        ("--noise loud", "not loud"),
        ("--cost nowhere.json", "no cost model"),
        ("--trace nowhere.trace", "No such file"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(words: str, said: str) -> None:
    """And says what would."""
    with pytest.raises(SystemExit, match=said):
        simulate.main(words.split())


def test_the_crowd_whose_ticks_are_timed_is_as_large_as_it_says() -> None:
    """Planning costs by the sequences, so there must be that many."""
    for policy in (baseline, contract):
        world = speed.crowd(policy, built_in("q4_0"), 16)
        assert sum(not stream.ended for stream in world.streams) == 16


async def test_the_whole_daemon_streams_as_the_policy_alone_foretells(
    autojump_clock: MockClock,
) -> None:
    """Sockets, protocol and engine in virtual time: each token is read when it was foretold."""
    base_s, token_s = 0.008, 0.0015
    backend = FakeBackend(n_ctx=4096, cost=linear_cost(base_s, token_s))
    requests = [(0.0, "x" * 30, 60, "interactive"), (0.1, "y" * 900, 20, "background")]
    read: dict[str, list[float]] = {lane: [] for *_, lane in requests}

    async def ask(daemon: House, start: float, prompt: str, n: int, lane: str) -> None:
        await trio.sleep_until(began + start)
        client = daemon.connect()
        await client.ask(prompt=prompt, max_tokens=n, priority=lane, ignore_eos=True, temperature=0)
        while not isinstance(event := await client.next(), Eos):
            if isinstance(event, Token):
                read[lane].append(trio.current_time() - began)

    async with house(backend) as daemon, trio.open_nursery() as nursery:
        began = trio.current_time()
        for request in requests:
            nursery.start_soon(ask, daemon, *request)

    steps = Staircase((1, 2), (base_s + token_s, base_s + 2 * token_s))
    machine = Machine.of(modelled("linear", CostModel(steps)))
    world = Quick(baseline, machine, EngineSettings(), backend.limits)
    for client, (start, prompt, n, lane) in enumerate(requests):
        tokens = 1 + len(prompt)  # one begins them all
        world.at(start, partial(world.submit, tokens, n, client=client, lane=lane))
    world.run(10.0)
    for stream in world.streams:
        assert read[stream.lane] == pytest.approx(stream.token_times, abs=1e-6)
