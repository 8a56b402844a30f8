"""Recorded texts, told again by the engine on a modelled machine: what drafts are worth.

The shipped drafter and policy run over a measured staircase; only the model is replaced, by one that
says what was recorded. So tokens a second with and without drafts can be compared for any text and
any machine in a few seconds. The time of the host is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve, frozen

from uma_trio.backend.base import ContextLimits
from uma_trio.policy.by_name import find_policy
from uma_trio_sim.machine import Profile
from uma_trio_sim.simulation import DRAFT_ROWS, Simulation, Told, settings_for
from uma_trio_sim.world import SimulatedRequest


@frozen
class Retold:
    """What came of it: tokens of answers a second while they stream, and what was drafted."""

    tokens_s: float
    drafted: int
    accepted: int
    deliveries: int


def retell(
    texts: Sequence[Told], profile: Profile, *, readers: int = 1, drafts: bool = True
) -> Retold:
    """Let `readers` ask for `texts` in turns, each for the next as it has one, until all are told."""
    n_vocab = 1 + max(int(max(told.prompt.max(), told.answer.max())) for told in texts)
    longest = max(len(told.prompt) + len(told.answer) for told in texts)
    n_slots, n_ctx = readers + 1, (readers + 1) * longest
    world = Simulation(
        find_policy("deadline"),
        profile=profile,
        settings=evolve(settings_for(profile), drafts=drafts),
        limits=ContextLimits(n_ctx, n_ctx, n_slots, 512, n_rows=n_slots + DRAFT_ROWS),
        n_vocab=max(n_vocab, 260),
    )
    left = iter(texts)

    def ask(reader: int) -> None:
        told = next(left, None)
        if told is not None:
            world.tell(
                told, client=reader, on_end=lambda: world.at(world.clock.now, lambda: ask(reader))
            )

    for reader in range(readers):
        ask(reader)
    # Between an end and what its reader asks next nobody waits for anything.
    while len(world.requests) < len(texts) or any(one.end is None for one in world.requests):
        world.run(1.0)
    return _counted(world.requests, world.metrics.snapshot())


def _counted(requests: Sequence[SimulatedRequest], metrics: dict[str, object]) -> Retold:
    streams = [request.token_times for request in requests if len(request.token_times) > 1]
    seconds = sum(times[-1] - times[0] for times in streams)
    return Retold(
        sum(len(times) - 1 for times in streams) / seconds,
        int(str(metrics["draft_rows_total"])),
        int(str(metrics["draft_accepted_total"])),
        sum(one < other for times in streams for one, other in pairwise(times)),
    )
