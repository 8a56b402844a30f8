"""Recorded traces that the policies and the engine must reproduce.

    python tests/trace_fixtures.py                    list them, and what each of them shows
    python tests/trace_fixtures.py --record NAME ...  run these scenes again and write their traces
    python tests/trace_fixtures.py --record all

The scenes of :data:`SCENES` run in virtual time (:mod:`scene_kit`). Those of :data:`REAL` run
llama.cpp on the bundled model: a policy reproduces their plans, but the times in them cannot be
recorded twice. A fixture is a trace as `uma-trio serve --trace` writes it, compressed by xz.
"""

from __future__ import annotations

import argparse
import lzma
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from engine_kit import Bench
from scene_kit import CPU, GPU, Noted, Scene, play

from uma_trio import __version__
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.cost import Traffic
from uma_trio.policy.deadline.fill import SAVING
from uma_trio.policy.deadline.slack import PROMPTS_FIRST
from uma_trio.policy.portable import Footer, Header, Line, TracedTick, decode, encode
from uma_trio.policy.state import Contract
from uma_trio.words import Lane
from uma_trio_sim.ablation import ablated
from uma_trio_sim.fake import InjectedFault

FOLDER = Path(__file__).parent / "fixtures" / "traces"
TRAFFIC = Traffic(weight_bytes=2e8, cell_bytes=2e4, expert_bytes=4e6, experts=8, experts_used=2)
FAULTS = {
    12: InjectedFault(status=1),  # NO_KV_ROOM
    30: InjectedFault(status=-3, keep=40),  # COMPUTE_FAILED, in the middle of a batch
    31: InjectedFault(status=-3),
    32: InjectedFault(status=-3),
    55: InjectedFault(bad_rows=(0,)),
    80: InjectedFault(status=2, keep=20),  # ABORTED, though nobody interrupted it
    110: InjectedFault(status=1),
    111: InjectedFault(status=1),
    112: InjectedFault(status=1),
    150: InjectedFault(status=-1),  # INVALID
    190: InjectedFault(status=-3, keep=3, lose=2),
    191: InjectedFault(status=-3),
    240: InjectedFault(bad_rows=(1, 2)),
}


SCENES: dict[str, Scene] = {
    "baseline": Scene(policy="baseline", seed=1),
    "baseline-faults": Scene(policy="baseline", seed=2, faults=FAULTS, n_ctx=1600),
    "baseline-device": Scene(policy="baseline", seed=3, device=True, truth=GPU),
    "deadline": Scene(policy="deadline", seed=4, ticks=700, believes=CPU),
    "deadline-faults": Scene(
        policy="deadline", seed=5, believes=CPU, faults=FAULTS, can_remove_part=False
    ),
    "deadline-calm": Scene(
        policy="deadline",
        seed=15,
        ticks=500,
        believes=CPU,
        people=2,
        jobs=2,
        longest=300,
        noise=0.02,
    ),
    "deadline-tight": Scene(
        policy="deadline", seed=6, believes=CPU, n_ctx=1300, n_slots=5, people=6, jobs=5
    ),
    "deadline-many": Scene(
        policy="deadline", seed=7, believes=CPU.times(1.4), n_slots=17, people=14, n_ctx=8000
    ),
    "deadline-bandwidth": Scene(
        policy="deadline",
        seed=23,
        believes=CPU,
        traffic=TRAFFIC,
        contract=Contract(latency_cap=2.0, bmt_budget=1.2e10),
    ),
    "deadline-device": Scene(
        policy="deadline", seed=9, ticks=700, truth=GPU, believes=GPU, device=True, n_ctx=6000
    ),
    "deadline-device-faults": Scene(
        policy="deadline",
        seed=10,
        truth=GPU,
        believes=GPU,
        device=True,
        faults=FAULTS,
        n_slots=12,
        people=8,
    ),
    "deadline-restless": Scene(
        policy="deadline",
        seed=11,
        believes=CPU,
        noise=0.5,
        contract=Contract(latency_cap=1.1, pause_cap=3.0, background_floor=0.09, playout_s=0.0),
    ),
    "deadline-less-stairs-bandwidth": Scene(
        policy="deadline,-stairs,-bandwidth", seed=12, believes=CPU
    ),
    "deadline-less-guard-lanes": Scene(
        policy="deadline,-guard,-lanes", seed=13, believes=CPU, people=5
    ),
    "deadline-less-learning": Scene(
        policy="deadline,-learning", seed=14, truth=GPU, believes=GPU, device=True
    ),
}
REAL = {
    "real-baseline": "baseline",
    "real-deadline": "deadline",
    "real-less-shape": "deadline,-shape",
}


def play_real(policy: str, most: int = 250) -> list[TracedTick]:
    """Run llama.cpp on the bundled model for up to so many ticks; return them."""
    from uma_trio.backend.llama import LlamaBackend
    from uma_trio.models import bundled_model
    from uma_trio.policy.costing.calibrate import Calibration

    backend = LlamaBackend.load(bundled_model(), n_ctx=2048, n_slots=5, threads=2)
    plain = policy == "baseline"
    cost = None if plain else Calibration(backend, time.perf_counter).measure()
    recorder = Noted()
    settings = EngineSettings(scratch_slots=0 if plain else 1, cost=cost)
    bench = Bench(
        backend,  # type: ignore[arg-type]
        ablated(policy),
        clock=time.perf_counter,
        recorder=recorder,
        settings=settings,
    )
    draw = random.Random(7)
    handles: list[int] = []
    try:
        for tick in range(most):
            if tick % 8 == 0:
                prompt = [draw.randrange(300, 900) for _ in range(draw.choice((8, 40, 300)))]
                lane: Lane = "background" if tick % 16 else "interactive"
                credit = 5 if tick % 24 == 0 else 10_000
                handles.append(
                    bench.submit(prompt, draw.randint(1, 40), lane=lane, credit=credit)[0]
                )
            if tick % 60 == 59:
                bench.credit(handles[-1], 10)
                bench.cancel(handles[-2])
            bench.engine.tick()
        bench.engine.publish()
    finally:
        backend.close()
    return recorder.ticks


def fixtures() -> tuple[str, ...]:
    """Return the names of all fixtures."""
    return (*SCENES, *REAL)


def read(name: str) -> tuple[Header, list[TracedTick]]:
    """Return what a fixture holds."""
    with lzma.open(FOLDER / f"{name}.trace.xz") as file:
        header, *ticks, _ = [decode(line) for line in file]
    if not isinstance(header, Header):
        raise TypeError
    return header, [header.tuned(tick) for tick in ticks if isinstance(tick, TracedTick)]


def record(name: str) -> None:
    """Run a scene and write its fixture."""
    if name in REAL:
        policy, contract = REAL[name], Contract()
        ticks = play_real(policy)
    else:
        policy, contract = SCENES[name].policy, SCENES[name].contract
        ticks = play(SCENES[name])
    lines: list[Line] = [Header(__version__, name, policy, contract), *ticks]
    lines.append(Footer(len(ticks), 0))
    with lzma.open(FOLDER / f"{name}.trace.xz", "wb", preset=9 | lzma.PRESET_EXTREME) as file:
        file.writelines(encode(line) for line in lines)


def shown(ticks: Iterable[TracedTick]) -> Counter[str]:
    """Count what a trace shows: how often each kind of state, plan and outcome is in it."""
    found: Counter[str] = Counter()
    for tick in ticks:
        state, plan, limit = tick.state, tick.plan, tick.plan.limit
        found["ticks"] += 1
        found["prepared beside another"] += state.prepared
        found["computed again"] += any(
            view.started and view.pending > 1 for view in state.sequences
        )
        found["parked"] += any(view.credit <= 0 for view in state.sequences)
        found["ballast"] += plan.ballast > 0
        found["extra rows"] += plan.extra_rows > 0
        found["isolated"] += limit.isolated
        found["granted"] += limit.grant
        found["paced"] += bool(plan.paces)
        found["a reader is ahead"] += limit.solo_s < limit.seconds < math.inf
        found["begins together"] += limit.reason == PROMPTS_FIRST
        found["newcomer"] += any(item.reason.startswith("newcomer") for item in plan.items)
        found["trimmed for bandwidth"] += any("bandwidth" in item.reason for item in plan.items)
        found["saving"] += any(skip.reason == SAVING for skip in plan.skipped)
        found["left out"] += any(skip.reason.startswith("does not") for skip in plan.skipped)
        found["smaller batch"] += state.n_batch < 128
        found[f"status {tick.status}"] += 1
    return +found


def main() -> int:
    """List the fixtures, or record some."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", nargs="+", metavar="NAME", choices=[*fixtures(), "all"])
    asked = parser.parse_args().record or []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in fixtures() if "all" in asked else asked:
        record(name)
    for name in fixtures():
        found = ", ".join(f"{n} {kind}" for kind, n in shown(read(name)[1]).items())
        size = (FOLDER / f"{name}.trace.xz").stat().st_size
        print(f"{name} ({size} bytes): {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
