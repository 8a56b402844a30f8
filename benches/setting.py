"""What every benchmark that starts servers needs first: seed, threads, peers, model."""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass
from pathlib import Path

from benches.model import NoVocabulary, bench_model
from benches.peers import NoPeers, programs
from benches.report import note


@dataclass(frozen=True)
class Setting:
    """What the common arguments say. `peers` is None where there are none, or none are wanted."""

    seed: int
    threads: int
    peers: Path | None


def setting(given: argparse.Namespace, *, peers: bool = True) -> Setting:
    """Return the setting of this run; peers that are not there are said and left out."""
    folder: Path | None = None
    if peers and not given.no_peers:
        try:
            folder = programs(given.peers)
        except NoPeers as absence:
            note(f"{absence}\nMeasuring the daemon alone: without a peer it is no result.")
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    return Setting(seed, given.threads or len(os.sched_getaffinity(0)), folder)


def model_or_exit(given: argparse.Namespace) -> Path:
    """Return the model to measure, made if need be; without a vocabulary say so and exit with 1."""
    try:
        return bench_model(given.model, given.vocab)
    except NoVocabulary as absence:
        raise SystemExit(str(absence)) from None
