"""Memory of the daemon beside llama-server: the same model, context and number of slots.

    python -m benches memory                half a minute

Proportional set size (PSS) in MiB, from ``smaps_rollup``, after the model was loaded and 8 requests
were answered. Each server is alone when it is measured: pages of a mapped model count for every
process that maps it only by its share. What a process gave back counts for nobody, also while the
kernel still has it in its page cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benches import clients, contest, host, servers
from benches.contest import OURS, PEER, Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive

TARGET_MIB = 150.0
_SLOTS = 8
_COLUMNS = (("PSS", "pss", 0), ("anonymous", "anonymous", 0), ("file", "file", 0))


def play(running: servers.Running, seed: str) -> Row:
    """Return what a server takes once 8 requests of 64 + 32 tokens were answered."""
    clients.checked(drive(running.wire, clients.jobs(_SLOTS, 64, 32, seed)))
    return dict(vars(host.memory(running.pid)))


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how far the daemon is above the smaller llama-server."""
    pss = {s: v for s in medians.systems if (v := medians(s, "pss")) is not None}
    peers = [v for s, v in pss.items() if s.family == PEER]
    for system, value in pss.items():
        if system.family == OURS and peers:
            text = f"{system.name}: MiB above the smaller {PEER}"
            yield contest.verdict(text, value - min(peers), TARGET_MIB)


@scene(policies=["deadline"])
def memory(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server as it comes, and with a slot for each client."""
    setup = servers.Setup(here.model, here.threads, slots=_SLOTS)
    flags = [servers.server_flags(variant, _SLOTS) for variant in ("stock", "np-kvu")]
    compared = contest.daemons(setup, given.policies, play)
    compared += contest.llama_servers(here.peers, setup, flags, play)
    return Comparison(
        compared,
        seconds=10,
        repetitions=1,
        tables=[Table("MiB:", _COLUMNS)],
        facts={"context": setup.n_ctx},
        progress=lambda row: f"{row['pss']:.0f} MiB",
        verdicts=verdicts,
        bars={"PSS in MiB (less is better)": "pss"},
    )
