"""The latency contract, kept in virtual time on a measured staircase.

What a stream feels is compared with the same stream alone on the same machine. The real
machine's figures are in docs/BENCHMARKS.md; these tests hold the policy to its word.
"""

from __future__ import annotations

import numpy as np
import pytest

from uma_trio.engine.messages import Targets
from uma_trio.policy.cost import CostModel, Staircase, Traffic
from uma_trio.policy.deadline import deadline
from uma_trio.policy.state import Contract
from uma_trio_sim.ablation import ablated
from uma_trio_sim.machine import HOST_S, TABLES, Profile, built_in, gaussian, modelled, staircase
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.world import SimulatedRequest

SOLO_S = 0.008 + HOST_S
NOISE = 0.02
P95_ALONE = 1.0 + 1.645 * NOISE  # times solo: 1.645 deviations are the p95 of a normal distribution


def machine(steps: Staircase, believed: CostModel | None = None) -> Profile:
    """Return a machine with a noise of 2 %, of which a policy may have `believed` something else."""
    truth = CostModel(steps, host_s=HOST_S)
    return modelled("steps", truth, gaussian(NOISE), believed=believed)


def p95(stream: SimulatedRequest, solo_s: float = SOLO_S) -> float:
    """Return the p95 gap of a stream over that of the same stream alone."""
    return float(np.percentile(stream.itl, 95)) / (P95_ALONE * solo_s)


def background_prompts(simulation: Simulation) -> int:
    """Return how many background prompts were answered."""
    return sum(s.lane == "background" and s.end is not None for s in simulation.requests)


def background_share(simulation: Simulation) -> float:
    """Return which part of machine time background work had in the last seconds."""
    return simulation.metrics.background_share


def storm(
    cap: float = 1.2, seconds: float = 30.0, clients: int = 3
) -> tuple[Simulation, SimulatedRequest]:
    """Run one interactive stream against endless prompts; return both."""
    simulation = Simulation(deadline, Contract(latency_cap=cap))
    for client in range(clients):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(seconds)
    return simulation, stream


def test_a_prefill_storm_is_not_felt() -> None:
    """At the default cap the p95 gap stays within 1.2 of solo."""
    _, stream = storm()
    assert p95(stream) <= 1.2


def test_no_pause_of_the_first_three_seconds_exceeds_twice_solo() -> None:
    """A reader who has just begun sees no hitch."""
    _, stream = storm()
    assert max(stream.startup_itl) <= 2.0 * SOLO_S * 1.08  # the noise of one tick


def test_later_pauses_stay_within_the_pause_cap() -> None:
    """The worst gap of all is bounded too."""
    _, stream = storm()
    assert max(stream.itl) <= 4.0 * SOLO_S * 1.08


def test_the_background_gets_its_floor_all_the_same() -> None:
    """Protection does not starve: at the default cap it has 5 % of the time, and moves on."""
    simulation, _ = storm(seconds=60.0)
    assert background_share(simulation) >= 0.045
    assert background_prompts(simulation) >= 2


@pytest.mark.parametrize(("cap", "prompts_per_s"), [(1.5, 0.42), (3.0, 0.50), (5.0, 0.67)])
def test_a_looser_cap_buys_more_than_the_best_peer_gives(cap: float, prompts_per_s: float) -> None:
    """At each cap the background does at least what llama-server does at that p95."""
    simulation, stream = storm(cap)
    assert p95(stream) <= cap
    assert background_prompts(simulation) / 30.0 >= prompts_per_s


def test_background_decoders_are_not_felt_either() -> None:
    """Streams of a batch job ride along only where there is room."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.submit(20, 8000, client=100 + client, lane="background")
    simulation.run(2.0)
    stream = simulation.submit(20, 4000, client=1)
    simulation.run(20.0)
    assert p95(stream) <= 1.2
    assert all(len(s.token_times) > 20 for s in simulation.requests)


def test_three_streams_are_measured_against_the_three_alone() -> None:
    """The company of other people is not charged to the background."""
    simulation = Simulation(deadline)
    for client in range(2):
        simulation.storm(100 + client)
    streams = [simulation.submit(20, 4000, client=1 + i) for i in range(3)]
    simulation.run(20.0)
    for stream in streams:
        assert p95(stream, 0.0162 + HOST_S) <= 1.2


def test_three_streams_run_at_the_speed_of_four() -> None:
    """Where four rows cost less than three, a row is thrown in."""
    simulation = Simulation(deadline, profile=built_in("q4_0"))
    streams = [simulation.submit(4, 500, client=1 + i) for i in range(3)]
    simulation.run(6.0)
    assert float(np.median(streams[0].itl)) == pytest.approx(0.0111 + HOST_S, rel=0.01)


def test_a_newcomer_is_answered_soon_in_a_storm() -> None:
    """An interactive prompt goes before any background prefill."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.storm(100 + client)
    simulation.run(3.0)
    newcomer = simulation.submit(30, 10, client=1)
    simulation.run(3.0)
    solo = Simulation(deadline)
    alone = solo.submit(30, 10, client=1)
    solo.run(3.0)
    # It may have to wait for the tick that was running when it came: the smallest chunk that
    # prefills at full speed, 64 tokens here.
    assert newcomer.ttft_s <= alone.ttft_s + 0.0935 * 1.1


@pytest.mark.parametrize("prompt_tokens", [30, 200, 500])
def test_a_newcomer_beside_a_stream_waits_half_as_long_again_at_the_most(
    prompt_tokens: int,
) -> None:
    """And the stream that it comes beside keeps its p95 for all but the longest of prompts."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(5.0)
    newcomer = simulation.submit(prompt_tokens, 1, client=2)
    simulation.run(8.0)
    solo = Simulation(deadline)
    alone = solo.submit(prompt_tokens, 1, client=1)
    solo.run(3.0)
    assert newcomer.ttft_s <= 1.5 * alone.ttft_s
    assert p95(stream) <= (1.2 if prompt_tokens <= 200 else 2.0)


def test_prompts_that_nobody_labelled_slow_a_stream_to_half_its_speed_and_no_more() -> None:
    """Newcomers without end are no newcomers."""
    simulation = Simulation(deadline)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(5.0)
    for client in range(3):
        simulation.storm(100 + client, lane="interactive")
    simulation.run(30.0)
    assert p95(stream) <= 2.0


def test_with_nobody_to_protect_prefill_runs_at_full_speed() -> None:
    """Alone, prompts are computed at 95 % of the best rate there is or better."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.storm(100 + client)
    simulation.run(20.0)
    rate = sum(simulation.backend.computed.values()) / 20.0
    assert rate >= 0.95 * 64 / 0.0935


def test_an_unlabelled_paste_does_not_break_the_contract_for_long() -> None:
    """Beyond its first 512 tokens a person's paste shares the background's room."""
    simulation = Simulation(deadline)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(4.0)
    simulation.submit(4000, 1, client=2)
    simulation.run(60.0)
    assert p95(stream) <= 1.2


@pytest.mark.parametrize(
    ("cap", "target", "floor"), [(1.2, 0.001, 0.05), (1.01, None, 0.05), (1.2, None, 0.4)]
)
def test_readers_leave_the_floor_whatever_they_asked_for(
    cap: float, target: float | None, floor: float
) -> None:
    """Where a cap or a wish leaves less, all tokens come a little later, and none comes late."""
    rules = Contract(latency_cap=cap, background_floor=floor)
    simulation = Simulation(deadline, rules, profile=machine(staircase(TABLES["q4_0"])))
    simulation.storm(100)
    stream = simulation.submit(20, 8000, client=1, targets=Targets(itl_s=target))
    simulation.run(30.0)
    assert background_share(simulation) >= 0.9 * floor
    assert max(stream.itl) <= 1.1 * SOLO_S / (1 - floor)


def slowed(factor: float) -> Profile:
    """Return a machine on which each row costs nearly as much as the first, so many times slower."""
    return machine(staircase({n: ms * factor for n, ms in TABLES["q4_0-slow"].items()}))


@pytest.mark.parametrize(
    ("factor", "playout_s", "newcomers"),
    [(1.0, 0.0, 0), (60.0, 0.3, 0), (1.0, 0.3, 3)],
    ids=["nothing is held", "one token a second", "newcomers without end"],
)
def test_where_slack_never_suffices_background_work_is_granted_half_its_floor(
    factor: float, playout_s: float, newcomers: int
) -> None:
    """Without a floor it has nothing; with one a token in sixteen at the most is late."""
    solo_s, shares, late = 0.015 * factor + HOST_S, [], []
    for floor in (0.0, 0.05):
        rules = Contract(background_floor=floor, playout_s=playout_s)
        simulation = Simulation(deadline, rules, profile=slowed(factor))
        stream = simulation.submit(20, 8000, client=1)
        simulation.run(5.0 * factor)
        for client in range(newcomers):
            simulation.storm(200 + client, 100, lane="interactive")
        simulation.storm(100)
        simulation.run(30.0 * factor)
        shares.append(simulation.machine.used_s.get(100, 0.0) / simulation.clock.now)
        late.append(sum(itl > 2.0 * solo_s for itl in stream.itl) / len(stream.itl))
        assert max(stream.itl) <= 4.0 * solo_s * 1.08
    assert shares[0] == 0
    assert shares[1] > 0.019
    assert late[1] <= late[0] + (0.06 if newcomers else 0.025)


def test_without_its_guard_the_contract_is_felt() -> None:
    """What the guard is for: without it a storm has the machine, and its reader waits."""
    simulation = Simulation(ablated("deadline,-guard"))
    for client in range(3):
        simulation.storm(100 + client)
    simulation.run(1.0)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(30.0)
    assert p95(stream) > 3.0
    assert background_prompts(simulation) / 30.0 > 1.0


def test_a_long_prompt_of_a_person_is_computed_beside_background_decoders() -> None:
    """Lanes share by their weights, also with nobody to protect: decoders do not take a row each tick."""
    steps = staircase({1: 15.0, 2: 25.0, 4: 38.0, 8: 70.0, 16: 114.0, 32: 237.0})
    rows = staircase({1: 0.0, 2: 6.0, 4: 9.0, 8: 22.0})
    dear = modelled("dear rows", CostModel(steps, output=rows, host_s=HOST_S))
    ttft = []
    for decoders in (0, 8):
        simulation = Simulation(deadline, profile=dear)
        for _ in range(decoders):
            simulation.submit(64, 4000, client=2, lane="background")
        simulation.run(5.0)
        asked = simulation.submit(1400, 1, client=1)
        simulation.run(60.0)
        ttft.append(asked.token_times[0] - asked.arrived)
    assert ttft[1] < 1.2 * ttft[0]


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    """Machine time is shared: a client's 30 tokens pass another's 32,000."""
    simulation = Simulation(deadline)
    long = simulation.submit(32_000, 1, client=1, lane="background")
    simulation.run(1.0)
    short = simulation.submit(30, 1, client=2, lane="background")
    simulation.run(60.0)
    assert short.ttft_s < 0.5
    assert long.end is not None


def test_on_a_machine_without_stairs_the_contract_holds_too() -> None:
    """A GPU's gentle slope gives the background more, within the same promise."""
    gpu = {1: 3.82, 2: 4.06, 3: 4.28, 4: 4.6, 8: 6.28, 16: 7.79, 64: 11.8, 256: 28.2, 512: 45.7}
    simulation = Simulation(deadline, profile=machine(staircase(gpu)))
    for client in range(3):
        simulation.storm(100 + client, 1500)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(15.0)
    assert p95(stream, 0.00382 + HOST_S) <= 1.2
    assert background_prompts(simulation) >= 3


def mixture(experts: int, used: int) -> Staircase:
    """Return a machine that takes 20 ms a tick, and 2.5 ms for each expert that it reaches."""
    traffic = Traffic(experts=experts, experts_used=used)
    steps = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
    return staircase({n: 20 + 2.5 * traffic.distinct_experts(n) + 0.3 * n for n in steps})


@pytest.mark.parametrize(
    ("experts", "used", "least", "most"),
    [(128, 8, 1, 3), (8, 8, 7, 9)],  # eight of eight are a dense model that takes as long for one
)
def test_served_decoders_follow_from_the_experts_that_they_reach(
    experts: int, used: int, least: float, most: float
) -> None:
    """Where each row reaches other experts few ride along, where all share the weights all do."""
    steps = mixture(experts, used)
    simulation = Simulation(deadline, Contract(latency_cap=2.0), profile=machine(steps))
    batch = [simulation.submit(20, 8000, client=100, lane="background") for _ in range(8)]
    simulation.run(3.0)
    assert len(batch[-1].token_times) > 10
    stream = simulation.submit(20, 8000, client=1)
    before = sum(len(s.token_times) for s in batch)
    simulation.run(20.0)
    rode = sum(len(s.token_times) for s in batch) - before
    assert p95(stream, steps(1) + HOST_S) <= 2.0
    assert least < rode / len(stream.token_times) < most


def test_on_a_mixture_of_experts_the_contract_holds() -> None:
    """A second row costs half as much again there: a storm waits for ticks that may be long."""
    steps = mixture(128, 8)
    simulation = Simulation(deadline, profile=machine(steps))
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(60.0)
    assert p95(stream, steps(1) + HOST_S) <= 1.2
    assert max(stream.itl) <= 4.0 * steps(1) * 1.1
    assert sum(simulation.backend.computed.values()) > 0


@pytest.mark.parametrize("wrong", [0.5, 0.7, 1.5])
def test_a_badly_measured_step_does_not_move_the_measure(wrong: float) -> None:
    """What the streams cost alone is known from ticks of theirs alone, whatever larger ones take."""
    table = TABLES["q4_0"]
    believed = staircase({n: ms * (wrong if n > 4 else 1) for n, ms in table.items()})
    mistaken = machine(staircase(table), believed=CostModel(believed, host_s=HOST_S))
    simulation = Simulation(deadline, Contract(latency_cap=2.0), profile=mistaken)
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(15.0)
    assert simulation.metrics.promise.solo_s == pytest.approx(SOLO_S, rel=0.08)
    assert p95(stream) <= 2.1


def test_infeasible_promises_are_counted() -> None:
    """When the streams alone are too slow, the metrics say so instead of hiding it."""
    simulation = Simulation(deadline, profile=built_in("q4_0", gaussian(0.35)))
    stream = simulation.submit(20, 2000, client=1)
    simulation.run(10.0)
    assert p95(stream) > 1.2
    assert simulation.metrics.snapshot()["guard_infeasible_total"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(("floor", "infeasible"), [(0.1, True), (0.4, False)])
def test_the_cap_of_infeasible_ticks_is_the_one_that_is_promised(
    floor: float, infeasible: bool
) -> None:
    """With a floor of 0.4 a reader has its tokens 1.67 times solo apart, whatever the cap."""
    contract = Contract(background_floor=floor)
    simulation = Simulation(deadline, contract, profile=built_in("q4_0", gaussian(0.12)))
    simulation.submit(20, 2000, client=1)
    simulation.run(10.0)
    counted = simulation.metrics.snapshot()["guard_infeasible_total"]
    assert (counted > 0) is infeasible  # type: ignore[operator]


def test_a_request_that_asks_for_shorter_gaps_gets_them_where_possible() -> None:
    """An application's own target tightens the limit of every tick it is part of."""
    simulation = Simulation(deadline, Contract(latency_cap=5.0))
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 4000, client=1, targets=Targets(itl_s=0.0125))
    simulation.run(10.0)
    assert p95(stream) <= 0.0125 / SOLO_S


def test_targets_that_were_missed_are_counted() -> None:
    """Nobody has to take our word for it."""
    simulation = Simulation(deadline)
    simulation.submit(500, 20, client=1, targets=Targets(ttft_s=0.001, itl_s=0.001))
    simulation.run(5.0)
    assert simulation.metrics.snapshot()["slo_violations_total"] == {"ttft": 1, "tbt": 19}
