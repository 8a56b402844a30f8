"""Every batch job gets its floor in tokens, also where interactive requests want every place."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.policy.deadline import deadline
from uma_trio.policy.floor import BUCKET_S, bucket_after, is_spared
from uma_trio.policy.state import Contract, Holder
from uma_trio_sim.latency import percentile
from uma_trio_sim.machine import built_in, gaussian
from uma_trio_sim.simulation import LIMITS, Simulation
from uma_trio_sim.world import SimulatedRequest

PROMPT, ANSWER = 661, 200
FLOOR = Contract().background_floor


def world_of(slots: int) -> Simulation:
    """Return a machine with so many places."""
    limits = evolve(LIMITS, n_slots=slots + 1, n_ctx=8192, n_ctx_seq=8192)
    return Simulation(deadline, profile=built_in("q4_0", gaussian(0.02)), limits=limits)


def asks_again(world: Simulation, client: int, prompt: int, answer: int) -> None:
    """Have a client ask again as soon as it is answered."""

    def again() -> None:
        world.at(world.clock.now, lambda: asks_again(world, client, prompt, answer))

    world.submit(prompt, answer, client=client, on_end=again)


def jobs_beside(
    world: Simulation,
    readers: int,
    jobs: int,
    *,
    prompt: int = 60,
    answer: int = 60,
    length: int = ANSWER,
) -> list[SimulatedRequest]:
    """Return jobs, each of a client of its own, that came five seconds after the readers."""
    for client in range(1, readers + 1):
        asks_again(world, client, prompt, answer)
    world.run(5.0)
    return [world.submit(PROMPT, length, client=100 + n, lane="background") for n in range(jobs)]


def ended_within(world: Simulation, jobs: list[SimulatedRequest], seconds: float) -> bool:
    """Whether all jobs end in that time. What happens after the last of them is not simulated."""
    until = world.clock.now + seconds
    while any(job.end is None for job in jobs) and world.clock.now < until:
        world.run(min(0.5, until - world.clock.now))
    return all(job.end is not None for job in jobs)


def alone_s(length: int = ANSWER) -> float:
    """Return what a job takes with nobody else."""
    world = world_of(1)
    (job,) = jobs_beside(world, 0, 1, length=length)
    assert ended_within(world, [job], 60.0)
    return job.token_times[-1] - job.arrived


@pytest.mark.parametrize(
    ("slots", "readers", "prompt", "answer"),
    [
        (8, 8, 60, 60),
        (8, 8, 20, 300),
        (8, 8, 300, 20),
        (4, 4, 60, 60),
        (4, 8, 60, 60),
        (1, 1, 60, 60),
    ],
)
def test_a_job_is_done_in_its_time_alone_over_the_floor(
    slots: int, readers: int, prompt: int, answer: int
) -> None:
    """Beside as many clients that ask again at once as there are places, and more."""
    world = world_of(slots)
    (job,) = jobs_beside(world, readers, 1, prompt=prompt, answer=answer)
    assert ended_within(world, [job], alone_s() / FLOOR)
    assert job.end is not None
    assert job.end.reason == "length"


def test_jobs_that_wait_for_one_place_are_done_one_after_the_other() -> None:
    """Eight of them, beside four readers on four places, in the floor's time of all together."""
    world = world_of(4)
    jobs = jobs_beside(world, 4, 8, length=40)
    assert ended_within(world, jobs, 8 * alone_s(40) / FLOOR)
    metrics = world.metrics.snapshot()
    assert metrics["preemptions_total"] <= len(jobs)


def test_readers_keep_their_pace_beside_a_job_that_keeps_its_place() -> None:
    """It has the time that they leave, with a place or without: p95 is what they had without it."""
    p95 = []
    for jobs in (0, 1):
        world = world_of(8)
        jobs_beside(world, 8, jobs, prompt=20, answer=300)
        world.run(15.0)
        shown = [
            gap for request in world.requests[:40] for gap in request.itl if request.client < 9
        ]
        p95.append(percentile(shown, 0.95))
    assert p95[1] <= 1.2 * p95[0]


@settings(max_examples=4, deadline=None)
@given(
    slots=st.integers(1, 4),
    readers=st.integers(1, 5),
    prompt=st.integers(1, 400),
    answer=st.integers(1, 80),
    jobs=st.integers(1, 2),
)
def test_no_job_starves(slots: int, readers: int, prompt: int, answer: int, jobs: int) -> None:
    """Whatever persons ask: each job ends, and little of it is computed again."""
    world = world_of(slots)
    sent = jobs_beside(world, readers, jobs, prompt=prompt, answer=answer, length=20)
    assert ended_within(world, sent, 4.0 * jobs * alone_s(20) / FLOOR)
    if slots > 1:  # the one place is empty for a moment whenever nobody asks
        computed = sum(n for client, n in world.machine.tokens.items() if client >= 100)
        assert computed <= 3 * jobs * (PROMPT + 20)


@given(
    st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0.0, 1.0), st.booleans()), max_size=200),
    st.floats(0.0, 0.5),
)
def test_the_bucket_counts_what_is_owed(
    ticks: list[tuple[float, float, bool]], floor: float
) -> None:
    """No more than its size, no debt for time that nobody waited for, no time owed that was had."""
    bucket_s = BUCKET_S
    for tick_s, part, contended in ticks:
        before_s = bucket_s
        bucket_s = bucket_after(before_s, floor, tick_s, part * tick_s, contended=contended)
        assert bucket_s <= BUCKET_S
        assert bucket_s <= before_s + floor * tick_s
        if not contended:
            assert bucket_s >= min(before_s, 0.0)
        else:
            assert bucket_s == pytest.approx(
                min(BUCKET_S, before_s + floor * tick_s - part * tick_s)
            )


def test_who_has_no_tenure_keeps_nothing() -> None:
    """However much the lane is owed."""
    held = Holder(1, "background", 1, 10, 10, 0, unearned_s=1.0)
    assert not is_spared(held, BUCKET_S)
    assert is_spared(evolve(held, tenured=True), BUCKET_S)
