"""How fast one stream decodes deep in its context: the daemon and llama-server.

    python -m benches long_ctx                  1k to 32k, medians of 3 (1 to 2 hours: long prompts)
    python -m benches long_ctx --depths 1024 4096 16384 --repetitions 1
    python -m benches long_ctx --quick          1k and 4k, once (about 2 minutes)

A stream with a unique prompt as long as the depth generates 64 tokens, alone on the server; *tps* is
their rate from the first to the last, *prefill* that of its prompt. The CSV has a line for each
depth (``ctx``, ``tps``). Depths that are beyond what the model was trained for are left out, and said.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from benches import clients, contest, report, servers
from benches.contest import Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from benches.model import trained_context
from benches.rates import steady

_DEPTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
_SLACK = 32  # begin of sequence, a word of two tokens
_MOST_S = 1800.0  # a prompt of 32k tokens may take long
_COLUMNS = (("decode t/s", "tps", 1), ("prompt t/s", "prefill", 0), ("prompt", "prompt", 0))


def play(depths: Sequence[int], gen_tokens: int, running: servers.Running, seed: str) -> list[Row]:
    """Stream once at each depth; return a row for each."""
    clients.checked(drive(running.wire, clients.jobs(1, 64, 2, f"{seed}/warm")))
    rows: list[Row] = []
    for depth in depths:
        work = clients.jobs(1, depth - gen_tokens - _SLACK, gen_tokens, f"{seed}/{depth}")
        (answer,) = clients.checked(drive(running.wire, work, timeout_s=_MOST_S))
        window, length, ttft_s = steady([answer.times]), answer.prompt_tokens, answer.ttft_s
        rows.append(
            {
                "case": f"ctx={depth}",
                "ctx": depth,
                "tps": window.rate if window else None,
                "prompt": length,
                "prefill": length / ttft_s if length and ttft_s else None,
            }
        )
    return rows


def within(depths: Sequence[int], most: int | None) -> list[int]:
    """Return the depths that the model was trained for; what is left out is said."""
    kept = [depth for depth in depths if most is None or depth <= most]
    if left := [str(depth) for depth in depths if depth not in kept]:
        report.note(f"left out, as the model was trained for {most} tokens: {', '.join(left)}")
    return kept


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--depths", type=int, nargs="+", metavar="N", help="tokens, answer included (1k to 32k)")
    add("--gen-tokens", type=int, default=64, metavar="N", help="how many are timed at each")


@scene(arguments, policies=["deadline"])
def long_ctx(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server with and without flash attention."""
    depths = given.depths or list(_DEPTHS[:3:2] if given.quick or given.dry_run else _DEPTHS)
    least = given.gen_tokens + _SLACK + 1
    if given.gen_tokens < 2 or min(depths) < least:
        raise SystemExit(f"--gen-tokens must be 2 or more, and each of --depths at least {least}")
    depths = within(depths, None if given.dry_run else trained_context(here.model))
    if not depths:
        raise SystemExit("no depth is left")
    # llama-server keeps a prompt of an earlier depth unless there is one slot, which is then reused.
    setup = servers.Setup(here.model, here.threads, max(depths), 1)
    once = partial(play, depths, given.gen_tokens)
    flags = servers.server_flags("np-kvu", 1)
    compared = contest.daemons(setup, given.policies, once)
    # As it comes, and as the daemon has it on a CPU (uma_trio/backend/llama.py).
    compared += contest.llama_servers(here.peers, setup, [flags, (*flags, "-fa", "off")], once)
    return Comparison(
        compared,
        seconds=5 + sum(depths) / 150,  # by a machine that computes 150 prompt tokens/s
        minutes=240,
        tables=[Table("", _COLUMNS)],
        facts={"gen_tokens": given.gen_tokens},
        progress=lambda row: f"{row['ctx']}: {report.cell(row['tps'], 1)} t/s",
        curves=("one stream", "tps", ("tokens of context", "tokens/s (more is better)")),
    )
