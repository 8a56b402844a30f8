"""What every benchmark that starts servers needs first: seed, threads, peers, model, and facts."""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass
from pathlib import Path

from benches import host, servers
from benches.model import NoVocabulary, bench_model
from benches.peers import NoPeers, programs
from benches.report import note


@dataclass(frozen=True)
class Setting:
    """What the common arguments say. `peers` is None where there are none, or none are wanted."""

    seed: int
    threads: int
    peers: Path | None

    def facts(self, **more: object) -> dict[str, str]:
        """Return what a reader has to know to judge the figures of this run."""
        found = host.facts(self.peers / "llama-server" if self.peers else None)
        spinning = servers.environment()
        return found | {
            "OpenMP": " ".join(f"{k}={v}" for k, v in spinning.items() if k in _SPINNING),
            "noise": noise(),
            "threads": str(self.threads),
            "seed": str(self.seed),
            **{key: str(value) for key, value in more.items()},
        }


_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def setting(given: argparse.Namespace) -> Setting:
    """Return the setting of this run; peers that are not there are said and left out."""
    folder: Path | None = None
    if not given.no_peers and not given.dry_run:
        try:
            folder = programs(given.peers)
        except NoPeers as absence:
            note(f"{absence}\nMeasuring the daemon alone: without a peer it is no result.")
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    return Setting(seed, given.threads or len(os.sched_getaffinity(0)), folder)


def model_or_exit(given: argparse.Namespace) -> Path:
    """Return the model to measure, made if need be; without a vocabulary say so and exit with 1."""
    if given.dry_run:
        return servers.FAKE
    try:
        return bench_model(given.model, given.vocab)
    except NoVocabulary as absence:
        raise SystemExit(str(absence)) from None


def noise() -> str:
    """Return how steady the machine is before anything runs: a fixed piece of work, 20 times."""
    spins = sorted(host.spin_ms() for _ in range(20))
    return f"a fixed piece of work takes {spins[10]:.1f} ms, {spins[-1] / spins[10]:.2f}x at worst"
