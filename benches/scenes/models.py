"""Readers of two models in one daemon, and a reader of one beside a long prompt of the other. Three minutes.

    python -m benches models --model bench-0.5b-q4_0.gguf
    python -m benches models --other larger.gguf

Three parts on one daemon, after a short answer of each model: *alone*, a reader of the first model; *each*, a reader
of each model at once; *beside*, a reader of the first while the other computes a prompt of 2,000 tokens that nobody
has sent before, with the seconds that its first token took, and what it takes without a reader (*prompt alone s*).
Gaps are between tokens as they are read, in ms; the second model is the same file unless ``--other`` names one.
``--flags`` are those of the daemon: without drafts each tick gives a token, and a gap is between two ticks. Target: p95 of at
most a step (40 ms) and a little. A prompt that is not computed within two minutes has no time.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from benches import clients, contest, host, servers
from benches.clients import Answer, Job
from benches.contest import OURS, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import Live, drive
from uma_trio_sim.latency import median, percentile

_FIRST, _OTHER = "first", "other"
_STEP_MS = 40.0  # of a reader by default
_TABLE = Table("", (
    ("alone p50", "alone_p50", 1), ("p95", "alone_p95", 1), ("worst", "alone_worst", 0),
    ("each: first p50", "each_first_p50", 1), ("p95", "each_first_p95", 1), ("worst", "each_first_worst", 0),
    ("other p50", "each_other_p50", 1), ("p95", "each_other_p95", 1), ("worst", "each_other_worst", 0),
    ("beside p50", "beside_p50", 1), ("p95", "beside_p95", 1), ("worst", "beside_worst", 0),
    ("prompt s", "prompt_s", 1), ("prompt alone s", "prompt_alone_s", 1), ("others %", "others_pct", 0),
))  # fmt: skip


def gaps_ms(answer: Answer, begin: float = 0.0, end: float = float("inf")) -> list[float]:
    """Return the milliseconds between two tokens of an answer, where both came between `begin` and `end`."""
    times = [at for at in answer.times if begin <= at <= end]
    return [1e3 * (b - a) for a, b in pairwise(times)]


def told(name: str, gaps: Sequence[float]) -> Row:
    """Return the figures of some gaps."""
    if not gaps:
        raise clients.NotServed(f"{name}: no two tokens came")
    return {
        f"{name}_p50": median(gaps),
        f"{name}_p95": percentile(gaps, 95),
        f"{name}_worst": max(gaps),
    }


def job(model: str, n_prompt: int, n_tokens: int, seed: str) -> Job:
    """Return a request to one of the models, with a prompt that nobody has sent before."""
    (made,) = clients.jobs(1, n_prompt, n_tokens, seed)
    lane = "interactive" if n_tokens > 8 else "background"
    return Job(f"{model}-{seed}", made.prompt, n_tokens, lane, model=model)


def play(running: servers.Running, given: argparse.Namespace, seed: str) -> Row:
    """Go through the three parts."""
    wire, n = running.wire, given.gen_tokens
    for model in (_FIRST, _OTHER):
        clients.checked(drive(wire, [job(model, 16, 16, f"{seed}/warm/{model}")]))
    foreign = host.Foreign(running.pid)
    (alone,) = clients.checked(drive(wire, [job(_FIRST, 16, n, f"{seed}/alone")]))
    row = told("alone", gaps_ms(alone))
    both = [job(model, 16, n, f"{seed}/each/{model}") for model in (_FIRST, _OTHER)]
    answers = clients.checked(drive(wire, both))
    begin, end = max(a.times[0] for a in answers), min(a.times[-1] for a in answers)
    for model, answer in zip((_FIRST, _OTHER), answers, strict=True):
        row |= told(f"each_{model}", gaps_ms(answer, begin, end))
    prompt = job(_OTHER, given.prompt_tokens, 2, f"{seed}/lone")
    row["prompt_alone_s"] = clients.checked(drive(wire, [prompt]))[0].ttft_s
    row |= _beside(wire, given, seed)
    return row | {"others_pct": foreign.percent()}


def _beside(wire: clients.Wire, given: argparse.Namespace, seed: str) -> Row:
    """Read a stream of one model while the other computes a prompt."""
    with Live(wire) as live:
        reader = live.start(job(_FIRST, 16, 4000, f"{seed}/reader"))
        live.run(20.0, lambda: len(reader.reads) > 20 or reader.over)
        prompt = live.start(job(_OTHER, given.prompt_tokens, 2, f"{seed}/beside"))
        live.run(120.0, lambda: prompt.over or reader.over)
    read, computed = live.answers([reader, prompt])
    if computed.error:
        raise clients.NotServed(f"the prompt was not computed: {computed.error}")
    until = computed.times[0] if computed.times else math.inf
    found = told("beside", gaps_ms(read, computed.sent, until))
    return found | ({"prompt_s": computed.ttft_s} if computed.times else {})


def measure(
    setup: servers.Setup, other: Path, flags: Sequence[str], given: argparse.Namespace, seed: str
) -> Row:
    """Start a daemon with both models and play."""
    settings = {"models": {_OTHER: {"model": str(other)}}}
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")  # which is YAML, too
        extra = ("--alias", _FIRST, "--config", str(file), *flags)
        with servers.daemon(setup, extra=extra) as running:
            return play(running, given, seed)


def _verdicts(medians: Medians) -> Iterable[str]:
    for figure in ("each_first_p95", "each_other_p95", "beside_p95"):
        found = [value for s in medians.systems if (value := medians(s, figure)) is not None]
        yield contest.verdict(figure, max(found, default=None), 1.05 * _STEP_MS, at_most=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--other", type=Path, metavar="GGUF", help="the second model")
    add("--gen-tokens", type=int, default=300, metavar="N", help="of each reader")
    add("--prompt-tokens", type=int, default=2000, metavar="N")
    add("--flags", default="--speculation off", help="flags of the daemon")


@scene(arguments)
def models(given: argparse.Namespace, here: Here) -> Comparison:
    """Read of two models at once."""
    if given.dry_run:
        raise SystemExit("there is no dry run: two fake models take turns in tests/test_turn.py")
    other = given.other or here.model
    setup = servers.Setup(here.model, here.threads, 16_384, 4)  # the reader outlasts the prompt
    once = partial(measure, setup, other, given.flags.split(), given)
    return Comparison(
        [System(OURS, given.flags, once)],
        seconds=180,
        tables=[_TABLE],
        verdicts=_verdicts,
        facts={"other model": other.name},
        progress=lambda row: (
            f"each p95 {row['each_first_p95']:.1f} and {row['each_other_p95']:.1f} ms"
        ),
    )
