"""The simulation: the same seed gives the same run, and a recorded run is predicted."""

from __future__ import annotations

import random
import statistics
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve
from net_kit import House, house
from trio.testing import MockClock

from uma_protocol import Eos, Token
from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.observe.records import TickRecord
from uma_trio.policy.baseline import baseline
from uma_trio.policy.by_name import BUILT_IN, find_policy
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.store import remember
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import PolicyError
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.compare import (
    Case,
    NoWorkload,
    cases,
    itl_alone_s,
    policy_of,
    simulate,
    workload_of,
)
from uma_trio_sim.fake import FakeBackend, linear_cost
from uma_trio_sim.latency import startup_itl
from uma_trio_sim.machine import (
    HOST_S,
    TABLES,
    NoCost,
    Profile,
    built_in,
    from_cost_file,
    gaussian,
    modelled,
)
from uma_trio_sim.outcome import jain, together
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.workload import WORKLOADS, Application, Session, Turn, gamma, play, turns
from uma_trio_sim.workload import sessions as sessions_of
from uma_trio_sim.world import World

NOISY = built_in("q8_0", gaussian(0.02))  # its ticks are long enough to be given up

GPU = built_in("h200", gaussian(0.02))


def world_of(policy: str = "deadline", profile: Profile = NOISY, seed: int = 1) -> Simulation:
    """Return a simulation with one of the policies."""
    return Simulation(find_policy(policy), profile=profile, seed=seed)


# --- applications ---

APP = Application(name="app", lane="interactive", prompt=200, answer=50, think_s=2.0, every_s=5.0)


def drawn(app: Application, n: int, seed: str = "1") -> list[Turn]:
    """Return the first turns of a session."""
    endless = turns(app, seed)
    return [next(endless) for _ in range(n)]


@pytest.mark.parametrize("mix", WORKLOADS)
def test_the_same_seed_gives_the_same_work(mix: str) -> None:
    """Who asks what, and when, is a function of the seed."""

    def work(seed: int) -> list[object]:
        return [
            (s.client, s.lane, s.start, [turn for turn, _ in zip(s.turns, range(20), strict=False)])
            for s in sessions_of(WORKLOADS[mix], seed, 60.0)
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
    world = world_of()
    play(world, [Session(1, "interactive", 0.5, [Turn(0.0, 20, 5), Turn(3.0, 30, 5)])])
    world.run(60.0)
    first, second = world.requests
    assert first.arrived == pytest.approx(0.5)
    assert second.arrived == pytest.approx(first.token_times[-1] + 3.0)


def test_a_request_comes_when_it_comes_though_a_tick_is_being_computed() -> None:
    """What it waits for the end of that tick is part of its time to the first token."""
    world = world_of()
    world.storm(1)
    world.at(0.1003, lambda: world.submit(20, 5, client=2) and None)
    world.run(5.0)
    newcomer = next(s for s in world.requests if s.client == 2)
    assert newcomer.arrived == 0.1003


def test_a_tick_is_interrupted_when_the_newcomer_comes() -> None:
    """Whatever else would have happened while it was computed."""
    ticks, recorder = recorded()
    world = Simulation(deadline, profile=NOISY, recorder=recorder)
    world.storm(1, 900)
    world.at(0.01, lambda: world.submit(20, 5, client=2))
    world.at(0.02, lambda: None)
    world.run(0.1)
    assert ticks[0].status == DecodeStatus.ABORTED
    assert ticks[0].decode_s == pytest.approx(0.01)


def recorded() -> tuple[list[TracedTick], Recorder]:
    """Return a list and a recorder that fills it with ticks, as a trace has them."""
    ticks: list[TracedTick] = []

    def keep(state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        ticks.append(TracedTick(state, plan, record.decode_s, record.host_s, record.status))

    return ticks, Recorder(keep)


# --- machines that overlap ---


def test_where_decodes_overlap_the_next_tick_is_prepared_beside_the_one_that_runs() -> None:
    """Its state says so and has the predicted time, and nearly every tick of a stream is one."""
    ticks, recorder = recorded()
    world = Simulation(deadline, profile=built_in("h200"), recorder=recorder)
    world.submit(20, 50, client=1)
    world.run(5.0)
    assert sum(tick.state.prepared for tick in ticks) > 45
    ticks, recorder = recorded()
    Simulation(deadline, profile=built_in("q4_0"), recorder=recorder).run(1.0)
    assert not any(tick.state.prepared for tick in ticks)


def test_where_decodes_overlap_a_token_is_published_beside_the_next_decode() -> None:
    """A host time after the tick that computed it: when the next decode has been launched."""
    ticks, recorder = recorded()
    world = Simulation(deadline, profile=built_in("h200"), recorder=recorder)
    stream = world.submit(20, 50, client=1)
    world.run(5.0)
    assert stream.ttft_s == pytest.approx(ticks[0].decode_s + HOST_S)
    assert stream.end is not None


def test_where_decodes_overlap_none_is_interrupted() -> None:
    """A newcomer waits for the end of the tick that runs."""
    ticks, recorder = recorded()
    world = Simulation(deadline, profile=GPU, recorder=recorder)
    world.storm(1, 900)
    world.at(0.01, lambda: world.submit(20, 5, client=2))
    world.run(1.0)
    assert {tick.status for tick in ticks} == {DecodeStatus.OK}


# --- the same work gives the same run, and nothing is lost ---


def beside_others(world: World) -> None:
    """People, pastes and a storm at once."""
    for client in range(3):
        world.storm(100 + client)
    world.submit(300, 400, client=4, lane="background")
    world.at(2.0, lambda: world.submit(1500, 50, client=2))
    world.at(3.0, lambda: world.submit(30, 50, client=3))
    world.run(15.0)


FINITE = (
    Application(name="chat", lane="interactive", prompt=80, answer=30, think_s=0.2, turns=3),
    Application(
        name="batch", lane="background", prompt=700, answer=20, open_at_once=3, turns=2,
        watched=False,
    ),
)  # fmt: skip


@pytest.mark.parametrize("machine", [NOISY, GPU], ids=lambda profile: profile.name)
@pytest.mark.parametrize("name", BUILT_IN)
def test_no_token_is_lost_and_none_made_up(name: str, machine: Profile) -> None:
    """What was computed is what the requests had; the last token of an answer is only sampled."""
    world = world_of(name, machine)
    play(world, sessions_of(FINITE, 1, 5.0))
    world.run(300.0)
    assert len(world.requests) == 9
    assert all(len(r.token_times) == r.answer_tokens for r in world.requests)
    lengths = [r.prompt_tokens + r.answer_tokens - 1 for r in world.requests]
    assert sum(world.machine.tokens.values()) == sum(lengths)


@pytest.mark.parametrize("machine", [NOISY, GPU], ids=lambda profile: profile.name)
def test_the_same_seed_gives_the_same_run(machine: Profile) -> None:
    """And another seed another one."""
    runs = []
    for seed in (1, 1, 2):
        world = world_of(profile=machine, seed=seed)
        beside_others(world)
        runs.append([s.token_times for s in world.requests])
    assert runs[0] == runs[1] != runs[2]


def test_the_start_up_window_is_three_seconds_from_the_first_token() -> None:
    """A stall that begins in it counts whole, as in the daemon's worst pause."""
    assert startup_itl([1.0, 3.9, 4.0, 9.0, 10.0]) == pytest.approx([2.9, 0.1, 5.0])


# --- machines ---


@pytest.mark.parametrize("name", TABLES)
def test_a_stream_alone_takes_the_time_of_the_table(name: str) -> None:
    """One token a tick, and the time between two decodes."""
    assert itl_alone_s(built_in(name)) == pytest.approx(TABLES[name][1] / 1e3 + 0.0004)


def test_a_daemons_cost_file_is_a_machine(tmp_path: Path) -> None:
    """It was measured, so it can be simulated."""
    path = tmp_path / "cost.json"
    remember(path, CostModel(Staircase((1, 2, 4), (0.010, 0.018, 0.02))))
    assert itl_alone_s(from_cost_file(path)) == pytest.approx(0.0104)


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


# --- comparing policies ---


def test_runs_of_several_seeds_are_taken_together() -> None:
    """Their latencies are in one list, and what the load got is summed."""
    runs = [
        simulate(Case("deadline", deadline, 1.5), WORKLOADS["storm"], NOISY, 5.0, seed)
        for seed in (1, 2)
    ]
    both = together(runs)
    assert len(both.itl) == sum(len(run.itl) for run in runs)
    assert both.load_tokens == sum(run.load_tokens for run in runs)
    assert both.row(0.01)["load_tokens_s"] == pytest.approx(both.load_tokens / both.seconds)


def test_the_baseline_has_no_cap_and_is_compared_once() -> None:
    """Every other policy is there at each cap, and the watched applications once by themselves."""
    names = [case.name for case in cases(["deadline", "baseline"], [1.2, 2.0])]
    assert names == ["no load", "deadline 1.2", "deadline 2", "baseline"]


def test_a_policy_is_found_by_its_module_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes one need not install it."""
    (tmp_path / "mine_for_a_test.py").write_text("def plan(state):\n    return state\nN = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert policy_of("mine_for_a_test:plan")(7) == 7  # type: ignore[arg-type, comparison-overlap]
    assert policy_of("deadline,-guard") != deadline
    for spec, said in (
        ("mine_for_a_test:N", "not a function"),
        ("mine_for_a_test:other", "no attribute 'other'"),
        ("nowhere_at_all:plan", "No module named"),
        ("luck", "no policy is called 'luck'"),
    ):
        with pytest.raises(PolicyError, match=said):
            policy_of(spec)


def test_a_workload_is_found_by_name_or_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is none is refused with what there is."""
    (tmp_path / "work_for_a_test.py").write_text(
        "from uma_trio_sim.workload import WORKLOADS\nMINE = WORKLOADS['desk'][:1]\nOTHER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert workload_of("work_for_a_test:MINE") == WORKLOADS["desk"][:1]
    for spec, said in (
        ("work_for_a_test:OTHER", "not a sequence of"),
        ("lunch", "there are desk, storm, paste, fairness"),
    ):
        with pytest.raises(NoWorkload, match=said):
            workload_of(spec)


async def test_the_whole_daemon_streams_as_the_simulation_predicts(
    autojump_clock: MockClock,
) -> None:
    """Sockets, protocol and engine in virtual time: each token is read when it was predicted."""
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
    machine = modelled("linear", CostModel(steps))
    world = Simulation(baseline, profile=machine, settings=EngineSettings(), limits=backend.limits)
    for client, (start, prompt, n, lane) in enumerate(requests):
        tokens = 1 + len(prompt)  # one begins them all
        world.at(start, partial(world.submit, tokens, n, client=client, lane=lane))
    world.run(10.0)
    for stream in world.requests:
        assert read[stream.lane] == pytest.approx(stream.token_times, abs=1e-6)
