"""Public JSON Schemas: how many are taken, what compiling and each token cost, and who gets through.

    python -m benches schemas --data DIR       files with {"schema": ..., "tests": [{"valid", "data"}]}

DIR holds such files, as the folder `maskbench/data` of the public repository guidance-ai/jsonschemabench has
them. Each instance is written without white space and walked token by token with the vocabulary of the model:
a token is first asked about, as for every draw, then all that is allowed is computed, as for a refused one. An
invalid instance that is taken is a fault: the exit status is 1. Times are of this thread's CPU.
What structure costs the decode rate is told by `python -m benches structure`. Half a minute for 500 schemas.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import host
from benches.driver import tool
from benches.model import bench_model
from uma_trio.backend.base import Vocabulary
from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.shape import Shape, Unconstrainable
from uma_trio_sim.latency import percentile


@dataclass
class _Found:
    """Times in ms; counts of schemas and of instances."""

    taken: int = 0
    refused: list[str] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    ask_ms: list[float] = field(default_factory=list)
    mask_ms: list[float] = field(default_factory=list)
    valid: int = 0
    valid_taken: int = 0
    invalid: int = 0
    invalid_taken: list[str] = field(default_factory=list)


def _examples(folder: Path, n: int, seed: int) -> Iterator[tuple[str, Any]]:
    files = sorted(folder.glob("*.json"))
    for file in random.Random(seed).sample(files, min(n, len(files))):
        yield file.name, json.loads(file.read_text())


def _walk(follower: Follower, tokens: list[int], end: int, found: _Found) -> bool:
    """Return whether an answer may be these tokens and end there."""
    for token in [*tokens, end]:
        began = time.thread_time()
        allows = follower.allows(token)
        asked = time.thread_time()
        follower.allowed()
        found.mask_ms.append(1e3 * (time.thread_time() - asked))
        found.ask_ms.append(1e3 * (asked - began))
        if not allows:
            return False
        if token != end:
            follower.accept(token)
    return True


def _try(
    name: str, example: Any, grammarian: Grammarian, vocabulary: Vocabulary, found: _Found
) -> None:
    shape = Shape("schema", json.dumps(example["schema"]))
    began = time.thread_time()
    try:
        grammarian.follow(shape)
    except Unconstrainable as refusal:
        found.refused.append(str(refusal))
        return
    finally:
        found.compile_ms.append(1e3 * (time.thread_time() - began))
    found.taken += 1
    end = min(vocabulary.end_tokens)
    for test in example["tests"]:
        text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=False).tolist()
        passes = _walk(grammarian.follow(shape), tokens, end, found)
        if test["valid"]:
            found.valid += 1
            found.valid_taken += passes
        else:
            found.invalid += 1
            if passes:
                found.invalid_taken.append(name)


def _vocabulary(model: Path) -> Vocabulary:
    from uma_trio.backend._llama_vocab import LlamaVocabulary  # loads llama.cpp

    return LlamaVocabulary.load(model)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)


@tool(_arguments)
def schemas(given: argparse.Namespace) -> int:
    """Try every schema with its instances, and say what came of it."""
    vocabulary = _vocabulary(bench_model(given.model))
    grammarian = Grammarian(vocabulary)
    grammarian.follow(Shape("regex", "a"))  # prepares the vocabulary
    found, before = _Found(), host.memory(os.getpid()).anonymous
    for name, example in _examples(given.data, given.schemas, given.seed):
        _try(name, example, grammarian, vocabulary, found)
    n = found.taken + len(found.refused)
    print(f"{found.taken} of {n} schemas taken ({found.taken / n:.1%})")
    print(f"valid instances accepted: {found.valid_taken} of {found.valid}; "
          f"invalid ones: {len(found.invalid_taken)} of {found.invalid}")  # fmt: skip
    for what, values in {
        "compile": found.compile_ms, "ask about one token": found.ask_ms, "all allowed": found.mask_ms,
    }.items():  # fmt: skip
        p50, p95, p99 = (percentile(values, q) for q in (50, 95, 99))
        print(f"{what:<20} ms: p50 {p50:.3f}, p95 {p95:.3f}, p99 {p99:.3f}, worst {max(values):.1f} "
              f"({len(values)})")  # fmt: skip
    print(f"private memory: {host.memory(os.getpid()).anonymous - before:+.0f} MiB")
    for name in found.invalid_taken[:10]:
        print(f"  an invalid instance was taken: {name}")
    return 1 if found.invalid_taken else 0
