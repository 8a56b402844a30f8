"""How fast one stream decodes deep in its context: the daemon and llama-server.

    python -m benches.long_ctx                  1k to 32k, medians of 3 (1 to 2 hours: long prompts)
    python -m benches.long_ctx --depths 1024 4096 16384 --repetitions 1
    python -m benches.long_ctx --quick          1k and 4k, once (about 2 minutes)
    python -m benches.long_ctx --dry-run        the whole path without a model or peers, in seconds

A stream with a unique prompt as long as the depth generates 64 tokens, alone on the server; *tps* is
their rate from the first to the last. The CSV has a line for each of them, ``ctx,tps`` first. Depths
that are beyond what the model was trained for are left out, and said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benches import chart, clients, contest, report, servers
from benches.contest import Medians, Row
from benches.model import trained_context
from benches.rates import steady
from benches.setting import model_or_exit, setting

_DEPTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
_SLACK = 32  # begin of sequence, a word of two tokens
_MOST_S = 1800.0  # a prompt of 32k tokens may take long


def play(depths: Sequence[int], gen_tokens: int, running: servers.Running, seed: str) -> Row:
    """Stream once at each depth; return each rate as ``tps@depth``, the prompt's as ``prefill@``."""
    found: Row = {}
    clients.checked(clients.drive(running.wire, clients.jobs(1, 64, 2, f"{seed}/warm")))
    for depth in depths:
        work = clients.jobs(1, depth - gen_tokens - _SLACK, gen_tokens, f"{seed}/{depth}")
        (answer,) = clients.checked(clients.drive(running.wire, work, timeout_s=_MOST_S))
        window = steady([answer.times])
        found[f"tps@{depth}"] = window.rate if window else None
        found[f"prompt@{depth}"] = answer.prompt_tokens
        if answer.prompt_tokens and answer.ttft_s:
            found[f"prefill@{depth}"] = answer.prompt_tokens / answer.ttft_s
    return found


def by_depth(rows: Sequence[Row], depths: Sequence[int]) -> list[Row]:
    """Return a row for each stream: ``ctx`` and ``tps``, then whose it is."""
    return [
        {
            "ctx": depth,
            "tps": row.get(f"tps@{depth}"),
            "system": f"{row['family']} {row['knob']}".strip(),
            "prompt_tokens": row.get(f"prompt@{depth}"),
            "prefill_tps": row.get(f"prefill@{depth}"),
            **{key: row.get(key) for key in ("repetition", "others_pct", "spin_ms", "error")},
        }
        for row in rows
        for depth in depths
    ]


def within(depths: Sequence[int], most: int | None) -> list[int]:
    """Return the depths that the model was trained for; what is left out is said."""
    kept = [depth for depth in depths if most is None or depth <= most]
    if left := [str(depth) for depth in depths if depth not in kept]:
        report.note(f"left out, as the model was trained for {most} tokens: {', '.join(left)}")
    return kept


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--quick`` only changes defaults."""
    parser = contest.parser("long_ctx", __doc__, policies=["contract"])
    add = parser.add_argument
    add("--depths", type=int, nargs="+", metavar="N", help="tokens, answer included (1k to 32k)")
    add("--gen-tokens", type=int, default=64, metavar="N", help="how many are timed at each")
    given = parser.parse_args(argv)
    given.depths = given.depths or list(_DEPTHS[:3:2] if given.quick or given.dry_run else _DEPTHS)
    least = given.gen_tokens + _SLACK + 1
    if given.gen_tokens < 2 or min(given.depths) < least:
        parser.error(f"--gen-tokens must be 2 or more, and each of --depths at least {least}")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the CSV and the chart."""
    given = arguments(argv)
    here, model = setting(given), model_or_exit(given)
    depths = within(given.depths, None if given.dry_run else trained_context(model))
    if not depths:
        return 1
    # llama-server keeps a prompt of an earlier depth unless there is one slot, which is then reused.
    setup = servers.Setup(model, here.threads, max(depths), 1)
    once = partial(play, depths, given.gen_tokens)
    compared = contest.daemons(setup, given.policies, once)
    flags = servers.server_flags("np-kvu", 1)
    # As it comes, and as the daemon has it on a CPU (uma_trio/backend/llama.py).
    variants = [flags, (*flags, "-fa", "off")]
    compared += contest.llama_servers(here.peers, setup, variants, once)
    facts = here.facts(model=model.name, depths=depths, gen_tokens=given.gen_tokens)
    report.print_facts(facts)
    seconds = 5 + sum(depths) / 150  # by a machine that computes 150 prompt tokens/s
    rows = contest.run(
        compared, contest.effort(given, seconds, minutes=240), here.seed, _progress(depths)
    )
    medians = Medians(compared, rows)
    columns = [(f"{depth} t/s", f"tps@{depth}", 1) for depth in depths]
    prompts = [(f"{depth} t/s", f"prefill@{depth}", 0) for depth in depths]
    series = {
        s.name: [(d, v) for d in depths if (v := medians(s, f"tps@{d}")) is not None]
        for s in compared
    }
    draw = partial(
        chart.lines,
        "long_ctx", {"one stream": series}, ("tokens of context", "tokens/s (more is better)"),
        chart.caption(facts), doubling=True,
    )  # fmt: skip
    said = ("Decode rate by depth:", medians.table(columns), "Prompt rate:", medians.table(prompts))
    return contest.conclude("long_ctx", said, by_depth(rows, depths), facts, draw)


def _progress(depths: Sequence[int]) -> Callable[[Row], str]:
    return lambda row: ", ".join(f"{d}: {report.cell(row[f'tps@{d}'], 1)} t/s" for d in depths)


if __name__ == "__main__":
    sys.exit(main())
