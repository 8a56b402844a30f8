"""What the daemon itself costs: microseconds of its CPU for each streamed token, ggml left out.

    python -m benches overhead            medians of 3 (about 10 minutes)
    python -m benches overhead --quick    a short look (about 2 minutes)
    python -m benches overhead --no-peers --skip-real   without a model

Four ways to look, as none of them alone is the whole truth:

* *paced fake*: a backend that computes nothing and takes as long as a real tick. Everything but
  llama.cpp and the vocabulary's width: planning, batching, doors, JSON, sockets. Its caches are
  warmer than a real daemon's, whose model runs through them in every tick.
* *real*: the 0.5B model. CPU of the trio thread, plus that of the engine's thread less its time
  inside ``llama_decode``, plus helper threads; OpenMP's threads are ggml's. Includes `choosing`,
  finding the likeliest of 151,936 logits, which is shown apart because it is the memory's speed
  more than ours. *outside* is the sum, the figure that has the target.
* *path*: a model so tiny that computing it hardly counts, one compute thread, flat out. All CPU of
  the process, ours (UDS, framed JSON) and llama-server's (HTTP, SSE), by the same client.
* *path, paced*: the same beside a background stream, so that the readers' tokens are held until they
  are due. Its tokens count, too. Ours only, and without drafts: a held token has a wake of its own.

CPU is measured from the first request sent to the last token read, so requests, prompts and
connections are in it; longer streams spread them thinner. The scene `micro` has the parts by
themselves. For a profile of the daemon: ``python -m cProfile -o FILE -m uma_trio.cli.main serve``
sees the trio thread, ``perf record -g -p PID`` with ``PYTHONPERFSUPPORT=1`` (Python 3.12) all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benches import clients, contest, host, servers
from benches.contest import OURS, PEER, Medians, Row, System, serving
from benches.driver import Comparison, Here, Table, scene
from benches.live import Endless, Live, drive
from benches.metered import Reading
from benches.model import tiny_model
from benches.rates import end_to_end
from uma_trio_sim.latency import median

TARGET_US, TARGET_K = 60.0, 8
_TITLE = "us of CPU a token outside ggml"
_PROMPT_TOKENS, _WARM_UP_TOKENS = 16, 16
_PACED = "path, paced"
_BESIDE_FIRST_S, _MOST_S = 0.2, 300.0
_TICK_MS = {1: 8.0, 8: 20.0}  # what the real model takes on the machine of docs/BENCHMARKS.md
_PARTS = ("outside", "trio", "engine", "choosing", "helpers", "ggml")
_TABLE = Table("Microseconds of CPU per streamed token, by thread; and the path as a client sees it", (
    *((part, f"{part}_us", 1) for part in _PARTS),
    ("process us", "cpu_us_per_token", 1), ("CPU %", "cpu_pct", 0), ("TTFT ms", "ttft_ms", 0),
    ("t/s", "tokens_per_s", 1), ("others %", "others_pct", 0),
))  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the threads of a process, and its meter, at one moment."""

    threads: dict[int, float]
    reading: Reading

    @classmethod
    def of(cls, pid: int, meter: Path) -> Usage:
        """Look at a metered daemon."""
        return cls(host.thread_cpu_s(pid), Reading.of(meter))


def cost(pid: int, before: Usage, after: Usage, tokens: int) -> dict[str, float]:
    """Return the microseconds of CPU per token between two looks at a daemon, by where."""
    reading = after.reading
    spent = {t: seconds - before.threads.get(t, 0.0) for t, seconds in after.threads.items()}
    inside = reading.cpu_s - before.reading.cpu_s
    choosing = reading.choosing_s - before.reading.choosing_s
    python = {thread for thread in spent if thread in reading.threads} | {pid}
    seconds = {
        "trio": spent[pid],
        "engine": spent[reading.engine] - inside - choosing,  # without choosing tokens
        "choosing": choosing,
        "helpers": sum(spent[thread] for thread in python - {pid, reading.engine}),
    }
    seconds["outside"] = sum(seconds.values())
    seconds["ggml"] = inside + sum(s for thread, s in spent.items() if thread not in python)
    return {part: 1e6 * value / tokens for part, value in seconds.items()}


def play(
    k: int,
    gen_tokens: int,
    path: str,
    running: servers.Running,
    seed: str,
    meter: Path | None = None,
    *,
    paced: bool = False,
) -> Row:
    """Warm a server up, stream `k` times `gen_tokens` from it, and account for the CPU.

    If the tokens are to be `paced`, somebody else generates meanwhile, in the background.
    """
    warm = clients.jobs(k, _PROMPT_TOKENS, _WARM_UP_TOKENS, f"{seed}/warm")
    clients.checked(drive(running.wire, warm))
    time.sleep(0.05)  # the server may still be closing connections
    work = clients.jobs(k, _PROMPT_TOKENS, gen_tokens, f"{seed}/load")
    with Live(running.wire) as others:
        beside = Endless(others, lambda: _beside(gen_tokens))
        if paced:
            beside.send()
            others.run(_BESIDE_FIRST_S)
        usage = Usage.of(running.pid, meter) if meter else None
        before, began = host.thread_cpu_s(running.pid), time.perf_counter()
        streams = [others.start(job) for job in work]
        others.run(_MOST_S, lambda: all(stream.over for stream in streams))
        seconds = time.perf_counter() - began
        for stream in streams:
            stream.whole = True  # what is missing is an error
        answers = clients.checked(others.answers(streams))
        time.sleep(0.0 if paced else 0.05)  # closing the connections belongs to the load
        after = host.thread_cpu_s(running.pid)
        last = Usage.of(running.pid, meter) if meter else None
        theirs = [at for answer in others.answers(beside.streams) for at in answer.times]
    cpu_s = sum(after[thread] - before.get(thread, 0.0) for thread in after)
    tokens = k * gen_tokens + sum(at >= began for at in theirs)
    row: Row = {
        "path": path,
        "ttft_ms": 1e3 * median([answer.ttft_s or 0.0 for answer in answers]),
        "cpu_pct": 100 * cpu_s / seconds,
        "cpu_us_per_token": cpu_s * 1e6 / tokens,
        "tokens_per_s": end_to_end([a.sent for a in answers], [a.times for a in answers]),
    }
    if usage is not None and last is not None:
        found = cost(running.pid, usage, last, tokens)
        row |= {f"{part}_us": value for part, value in found.items()}
    return row


def _beside(gen_tokens: int) -> clients.Job:
    """Return what somebody asks in the background."""
    return clients.Job("beside", " ".join(clients.WORDS[:16]), gen_tokens, priority="background")


def metered(look: str, setup: servers.Setup, k: int, gen_tokens: int, *options: str) -> System:
    """Return our daemon with a meter, seen in one of the ways."""
    paced = look == _PACED
    extra = ("--speculation", "off") if paced else ()

    def measure(seed: str) -> Row | list[Row]:
        with tempfile.TemporaryDirectory(prefix="meter-") as folder:
            meter = Path(folder) / "meter"
            start = partial(servers.daemon, setup, servers.metered(meter, *options), extra)
            once = partial(play, k, gen_tokens, "uds-json", meter=meter, paced=paced)
            return serving(OURS, look, start, once).measure(seed)

    return System(OURS, look, measure, f"k={k}")


def systems(given: argparse.Namespace, here: Here) -> Iterator[System]:
    """Yield everything that is compared."""
    slots, n = max(given.k), given.gen_tokens
    for k in given.k:
        fake = servers.Setup(servers.FAKE, here.threads, slots=slots)
        yield metered("paced fake", fake, k, n, "--tick-ms", str(_TICK_MS.get(k, 20.0)))
        looks = (
            {}
            if given.skip_real
            else {"real": servers.Setup(here.model, here.threads, slots=slots)}
        )
        if here.peers is not None:
            looks["path"] = servers.Setup(tiny_model(), 1, slots=slots)
        if not given.dry_run:
            yield metered(_PACED, servers.Setup(tiny_model(), 1, slots=slots + 1), k, n)
        for look, setup in looks.items():
            yield metered(look, setup, k, n)
            if here.peers is not None:
                flags = servers.server_flags("np-kvu", k)
                start = partial(servers.llama_server, here.peers, setup, flags)
                yield serving(PEER, look, start, partial(play, k, n, "http-sse"), f"k={k}")


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield whether the target is met."""
    for system in medians.systems:
        if (system.family, system.knob, system.case) == (OURS, "real", f"k={TARGET_K}"):
            text = f"{system.case}, real: us of CPU a token outside ggml"
            yield contest.verdict(text, medians(system, "outside_us"), TARGET_US)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--k", type=int, nargs="+", default=[1, 8], metavar="K")
    add("--gen-tokens", type=int, metavar="N")
    add("--skip-real", action="store_true", help="leave the 0.5B model out")


@scene(arguments)
def overhead(given: argparse.Namespace, here: Here) -> Comparison:
    """Account for the daemon's CPU, and compare its path with llama-server's."""
    given.skip_real = given.skip_real or given.dry_run
    given.gen_tokens = given.gen_tokens or (64 if given.quick or given.dry_run else 256)
    return Comparison(
        list(systems(given, here)),
        seconds=20,
        tables=[_TABLE],
        facts={"gen_tokens": given.gen_tokens},
        progress=lambda row: f"{row['cpu_us_per_token']:.0f} us a token",
        verdicts=verdicts,
        bars={_TITLE: "outside_us", "us of CPU a token, all of it": "cpu_us_per_token"},
        targets={_TITLE: TARGET_US},
    )
