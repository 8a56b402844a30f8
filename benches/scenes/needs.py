"""The memory that a model is said to take before it is loaded, beside what its process then has. Two minutes.

    python -m benches needs
    python -m benches needs --model chat.gguf --seconds 60     until the KV cache is full
    python -m benches needs --flash off --seconds 240          the settings without flash attention

*estimate* is the sum that a request to load the model is judged by: weights, KV cache, buffers, vocabulary. *took* is what a
process with the model has more than before: anonymous memory and mapped pages. Prompts fill the KV cache for
`--seconds`, since memory is taken when it is used first. *allocated* are weights, KV cache and buffers of the loaded
model as llama.cpp has them, beside the same parts of the estimate. Target: within 3 % once the KV cache is full: the scores
of attention are taken as it fills, and a machine that has no room for them then kills the process.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict

from benches.driver import tool
from benches.model import bench_model
from benches.report import table

_CHILD: Final = "from benches.scenes.needs import take; take()"
_RESIDENT: Final = re.compile(r"^Rss(?:Anon|File):\s+(\d+) kB", re.MULTILINE)
_MIB: Final = 1 << 20
_WORDS: Final = 2000  # a text has so many different tokens; the embeddings of others are not read
#: n_ctx, KV type, slots, flash attention, whether the file is mapped.
SETTINGS: Final = (
    (4096, "f16", 8, "on", True),
    (16384, "f16", 8, "on", True),
    (4096, "q8_0", 1, "on", True),
    (4096, "f16", 16, "on", True),
    (4096, "f16", 8, "off", True),
    (4096, "f16", 8, "on", False),
)


def take() -> None:
    """Load the model as the arguments say, fill its KV cache, and print what that took, in bytes."""
    from uma_trio.backend._llama_breakdown import breakdown
    from uma_trio.backend.llama import LlamaBackend, system_info

    options = json.loads(sys.argv[2])
    seconds = options.pop("seconds")
    system_info()  # the libraries
    before = _resident()
    backend = LlamaBackend.load(Path(sys.argv[1]), threads=2, **options)
    _fill(backend, time.monotonic() + seconds)
    took = _resident() - before
    parts = breakdown(backend._context or 0) or []  # noqa: SLF001 - what is measured
    # A row for each sequence; drafts may want more later.
    logits = 4 * (backend.limits.n_slots + 1) * backend.model.n_vocab
    allocated = sum(part.context + part.compute for part in parts) + logits
    print(json.dumps({"took": took, "allocated": allocated}))


def _resident() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(kib) << 10 for kib in _RESIDENT.findall(text))


def _fill(backend: Any, until: float) -> None:
    """Compute prompts until the cache is full, or the time is over."""
    limits, batch = backend.limits, backend.batch
    each = limits.n_ctx // limits.n_slots
    n = min(limits.n_batch, each)
    rng = np.random.default_rng(1)
    for slot in range(limits.n_slots):
        for begin in range(0, each - n + 1, n):
            if time.monotonic() > until:
                return
            batch.token[:n] = rng.integers(0, min(_WORDS, backend.model.n_vocab), n)
            batch.pos[:n], batch.slot[:n] = np.arange(begin, begin + n), slot
            batch.want[:n] = 0
            batch.want[n - 1] = 1
            backend.decode(n)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--flash", choices=("on", "off"), help="only the settings with it, or without"
    )


@tool(_arguments)
def needs(given: argparse.Namespace) -> int:
    """Compare estimates with what loading takes, and print the table."""
    from uma_trio.backend.llama_probe import estimate
    from uma_trio.backend.needs import Question

    path = bench_model(given.model)
    rows: list[list[object]] = []
    chosen = [each for each in SETTINGS if given.flash in (None, each[3])]
    for n_ctx, kv_type, slots, flash, mmap in chosen:
        asked = Question(n_ctx, slots, kv_type, flash, None, 0, mmap)
        found = estimate(path, asked).needs
        options = {name: value for name, value in asdict(asked).items() if name not in _OURS}
        settings = json.dumps({**options, "seconds": given.seconds})
        command = [sys.executable, "-c", _CHILD, str(path), settings]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        child = json.loads(done.stdout)
        error = f"{found.total / child['took'] - 1:+.1%}"
        parts = f"{(found.kv + found.compute) / max(1, child['allocated']) - 1:+.1%}"
        setting = f"{n_ctx} {kv_type}, {slots} slots, flash {flash}{'' if mmap else ', no mmap'}"
        mib = [found.total / _MIB, child["took"] / _MIB]
        rows.append([setting, *mib, error, parts])
    print(table(["settings", "estimate MiB", "took MiB", "error", "KV and buffers"], rows))
    return 0


_OURS: Final = ("faster", "others")
