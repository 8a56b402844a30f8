"""Memory of the daemon beside llama-server: the same model, context and number of slots.

    python -m benches.memory                half a minute

Proportional set size (PSS), from ``smaps_rollup``, after the model was loaded and one request was
answered. Each server is alone when it is measured: pages of a mapped model count for every process
that maps it only by its share. What a process gave back counts for nobody, also while the kernel
still has it in its page cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from benches import chart, clients, contest, host, report, servers
from benches.setting import model_or_exit, setting

TARGET_MIB = 150.0
_SLOTS = 8


def measure(running: servers.Running, k: int, seed: int) -> host.Memory:
    """Return what a server takes once `k` requests of 64 + 32 tokens were answered.

    Raises:
        clients.NotServed: one of them was not.
    """
    clients.checked(clients.drive(running.wire, clients.jobs(k, 64, 32, str(seed))))
    return host.memory(running.pid)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both, print the table and the verdict, write the CSV."""
    parser = report.parser("memory", __doc__)
    report.common_arguments(parser)
    given = parser.parse_args(argv)
    here, model = setting(given), model_or_exit(given)
    setup = servers.Setup(model, here.threads, slots=_SLOTS)
    started: dict[str, contest.Start] = {"uma-trio": partial(servers.ours, setup)}
    if here.peers is not None:
        for variant in ("stock", "np-kvu"):
            flags = servers.server_flags(variant, _SLOTS)
            name = " ".join(["llama-server", *flags])
            started[name] = partial(servers.llama_server, here.peers, setup, flags)
    facts = here.facts(model=model.name, context=setup.n_ctx)
    report.print_facts(facts)
    rows = []
    for name, start in started.items():
        with start() as running:
            rows.append({"system": name, **vars(measure(running, _SLOTS, here.seed))})
    columns = ("system", "pss", "anonymous", "file")
    print("MiB:\n")
    print(report.table(columns, [[found[column] for column in columns] for found in rows]))
    if len(rows) > 1:
        above = rows[0]["pss"] - min(found["pss"] for found in rows[1:])
        met = "met" if above <= TARGET_MIB else "MISSED"
        print(f"\n{above:+.0f} MiB against the smaller server (target +{TARGET_MIB:.0f}: {met})")
    print(f"\n{report.write_csv('memory', rows, facts)}")
    pss = {found["system"]: found["pss"] for found in rows}
    for file in chart.bars(
        "memory", {"PSS in MiB (less is better)": pss}, {}, chart.caption(facts)
    ):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
