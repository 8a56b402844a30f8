"""Machines in virtual time: fluid nodes, the edge with the file of `uma-trio cluster`, and full knowledge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles

import pytest
from attrs import evolve

pytest.importorskip("uma_trio_sim", reason="uma-trio[sim] is not installed")

from uma_trio.policy.deadline import deadline
from uma_trio_cluster.commands.cluster import cluster
from uma_trio_cluster.simulation.edge import Edge, Rules, full_knowledge
from uma_trio_cluster.simulation.fitting import fitted
from uma_trio_cluster.simulation.node import FluidNode, Job, Rates
from uma_trio_cluster.simulation.report import FLAT, rows, scaled
from uma_trio_cluster.simulation.requests import BadTrace, TraceRequest, copies, made_up, read
from uma_trio_cluster.simulation.run import Machines, simulate
from uma_trio_sim.machine import Profile, built_in, gaussian
from uma_trio_sim.simulation import LIMITS, Simulation
from uma_trio_sim.world import SimulatedRequest

RATES = Rates((0, 1, 3), (100.0, 50.0, 25.0), (0.1, 0.1, 0.2), (0.1, 0.2, 0.4))


def asked(at: float, prompt: int, answer: int = 10, chat: int = 1, *blocks: int) -> TraceRequest:
    """Return a request."""
    return TraceRequest(at, prompt, answer, blocks or (chat,), chat)


def test_a_node_computes_prompts_in_turn_at_its_rate() -> None:
    """A prompt waits for those before it, and a stream beside it slows it down."""
    found = simulate(
        [asked(0, 100, 1), asked(0, 100, 1, 2)], Machines(n=1, rates=RATES), full_knowledge
    )
    first, second = found.ttft_s
    assert first == pytest.approx(1.0)
    # The first answer's token takes 0.2 s beside the prompt, which has half of its rate meanwhile.
    assert second == pytest.approx(1.0 + 0.2 + (100 - 10) / 100)


def test_rates_lie_between_those_that_were_measured() -> None:
    """Straight lines, and nothing new beyond the last one."""
    assert RATES.of(RATES.prompt_per_s, 2) == pytest.approx(37.5)
    assert RATES.of(RATES.prompt_per_s, 99) == 25.0


def test_a_cached_beginning_is_not_computed_again() -> None:
    """Whole blocks from the start, until the least recently used ones are dropped."""
    node = FluidNode(0, RATES, slots=4, blocks=2, block=10)
    job = Job(asked(0, 20, 1, 1, 1, 2), 0.0)
    node.take(job, 0.0)
    while (at := node.next_at()) < 1e9:
        node.end_what_is_due(at)
    assert node.common(asked(1, 30, 1, 1, 1, 2, 3)) == 20
    assert node.common(asked(1, 30, 1, 1, 9, 2, 3)) == 0
    again = Job(asked(1, 30, 1, 1, 1, 2, 3), 1.0)
    node.take(again, 10.0)
    assert (again.cached, again.left) == (20, 10.0)
    while (at := node.next_at()) < 1e9:
        node.end_what_is_due(at)
    assert node.common(asked(1, 30, 1, 1, 1, 2, 3)) == 0, "there was room for two"


def test_every_request_gets_its_first_token_whatever_dies() -> None:
    """Those without a token are sent again; a machine comes back with nothing cached."""
    requests = made_up(300.0, 1.0)
    found = simulate(requests, Machines(n=3, rates=FLAT, death_every_s=50.0), Edge())
    assert len(found.ttft_s) == len(requests)
    assert all(job.first_at >= job.at for job in found.jobs)
    assert found.sent_again > 0


def test_pins_keep_the_cache_and_moves_keep_the_tail() -> None:
    """By the file more is cached than by connections; without moves the tail is longer under a crowd."""
    requests = scaled(made_up(600.0, 6.0), 6 * 6500 * 1.4)
    machines = Machines(n=6, rates=FLAT)
    by = {
        name: simulate(requests, machines, place)
        for name, place in (
            ("full", full_knowledge),
            ("file", Edge()),
            ("blind", Edge(Rules(pins=False, weights=False))),
        )
    }
    assert by["file"].cached > by["blind"].cached
    assert by["full"].quantile(0.95) <= by["file"].quantile(0.95) < by["blind"].quantile(0.95)
    assert by["file"].quantile(0.95) < 1.3 * by["full"].quantile(0.95)


def test_headroom_that_is_old_is_worse() -> None:
    """Agents are asked at moments of their own, twice a second unless it is said otherwise."""
    requests = scaled(made_up(600.0, 6.0), 6 * 6500 * 1.4)
    machines = Machines(n=6, rates=FLAT)
    fresh, old = (
        simulate(requests, machines, Edge(Rules(stale_s=s))).quantile(0.95) for s in (0.0, 60.0)
    )
    assert fresh < old


def ttft_of_engine(profile: Profile, jobs: Sequence[Job], slots: int) -> list[float]:
    """Return the times to first tokens of one node's requests on the whole engine, in their order.

    Each has the prompt that was left to compute there. None waits for room, as on a fluid node.
    """
    limits = evolve(LIMITS, n_slots=slots + 1, n_ctx=1 << 20, n_ctx_seq=1 << 20, n_rows=slots + 1)
    simulation = Simulation(deadline, profile=profile, limits=limits)
    sent: list[SimulatedRequest] = []

    def send(client: int, job: Job) -> None:
        tokens = max(1, job.asked.prompt - job.cached)
        sent.append(simulation.submit(tokens, job.asked.answer, client=client))

    for client, job in enumerate(jobs, 1):
        simulation.at(job.at, partial(send, client, job))
    while len(sent) < len(jobs) or not all(request.token_times for request in sent):
        simulation.run(10.0)
    return [request.ttft_s for request in sent]


def test_a_fluid_node_is_like_the_engine() -> None:
    """Its rates are measured on the simulated engine; prompts in an idle machine take the same time."""
    profile = built_in("h200", gaussian(0.0))
    rates = fitted(profile, (0, 1))
    assert rates.prompt_per_s[0] > 2 * rates.prompt_per_s[1]
    requests = [asked(8.0 * i, 2000 + 500 * i, 20, i) for i in range(6)]
    found = simulate(requests, Machines(n=1, rates=rates), full_knowledge)
    whole = ttft_of_engine(profile, found.jobs, 16)
    fluid = [job.first_at - job.at for job in found.jobs]
    assert quantiles(fluid, n=20)[-1] == pytest.approx(quantiles(whole, n=20)[-1], rel=0.1)


def test_a_trace_is_read_and_copied(tmp_path: Path) -> None:
    """A conversation is known by its first block that few others have."""
    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 900,
            "output_length": 5,
            "hash_ids": [0, 1 + i // 2],
        }
        for i in range(400)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read(path)
    assert [one.chat for one in found[:4]] == [1, 1, 2, 2]
    twice = copies(found, 2)
    assert len(twice) == 800
    assert len({one.chat for one in twice}) == 400
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(BadTrace, match="line 1"):
        read(path)


def test_full_knowledge_is_what_others_are_measured_by() -> None:
    """Each number of machines gets its own share of load, and its own rows."""
    found = list(rows(made_up(120.0, 2.0), (1, 2), moves=(2.0,), stale=(1.0,)))
    assert [row.nodes for row in found] == [1] * 6 + [2] * 6
    assert found[0].regret == 1.0
    assert all(row.regret > 0.5 for row in found)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a bar for each regret; what is wrong is told."""
    assert cluster("simulate", ("2",), stale=(5.0,)) == 0
    said = capsys.readouterr().out
    assert "the file of uma-trio cluster" in said
    assert "█" in said
    assert cluster("simulate", ("0",)) == 1
    assert cluster("simulate", ("2",), trace=tmp_path / "none") == 2
    assert cluster("simulate", ("2",), machine="none") == 2
