"""The storyteller's workshop: `python -m models.storyteller COMMAND`.

make      everything: tokenizer, corpus, training, conversion (one GPU)
sample    print documents of the corpus
check     count held-out pairs in the corpus (there must be none)
evaluate  measure the model, see README.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from models.storyteller import corpus

ROOT = Path(__file__).parents[2]
OUT = ROOT / "models" / "out"
BUNDLED = ROOT / "uma_trio" / "models"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _corpus(given: argparse.Namespace, words: Path) -> tuple[np.ndarray, np.ndarray]:
    """The packed corpus; kept in the output folder, so that a stopped run can resume."""
    kept = given.out / "corpus.npz"
    if given.resume and kept.exists():
        saved = np.load(kept)
        return saved["tokens"], saved["weights"]
    tokens, weights = corpus.build(words, given.rows, given.workers)
    np.savez(kept, tokens=tokens, weights=weights)
    return tokens, weights


def _make(given: argparse.Namespace) -> None:
    """Tokenizer, corpus and network, into the output folder."""
    from models.storyteller import network, train, vocabulary

    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    words = given.out / "tokenizer.json"
    if given.start:
        shutil.copy(given.start / "tokenizer.json", words)
    elif not (given.resume and words.exists()):
        vocabulary.train(words, given.tokenizer_documents, given.workers)
    tokens, weights = _corpus(given, words)
    share = weights.mean()
    _say(f"{tokens.size / 1e6:.0f} M tokens, {share:.2f} learnt, {time.monotonic() - began:.0f} s")
    rows = train.Rows.of(tokens[given.held :], weights[given.held :], train.device())
    held = train.Rows.of(tokens[: given.held], weights[: given.held], train.device())
    large = given.out / "storyteller.pt"
    if not (given.resume and large.exists()):
        plan = train.Plan(given.steps, given.batch, given.rate, given.minutes)
        teacher = train.train_storyteller(
            network.STORYTELLER, rows, plan, given.start and given.start / "storyteller.pt"
        )
        train.save(teacher, large)
    teacher = train.restore(large)
    _say(f"storyteller {teacher.parameters_in_all}: {train.perplexity(teacher, held):.3f}")
    _say(f"{time.monotonic() - began:.0f} s in all")


def _convert(given: argparse.Namespace) -> None:
    """The network to GGUF."""
    from models.storyteller import convert

    out = given.out / "storyteller.gguf"
    weights = given.out / "storyteller.pt"
    convert.convert(weights, given.out / "tokenizer.json", out, "storyteller")
    _say(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    if given.install:
        shutil.copy(out, BUNDLED / out.name)


def _evaluate(given: argparse.Namespace) -> None:
    from models.storyteller import evaluate

    evaluate.report(given.models, given.requests, given.threads)


def _sample(given: argparse.Namespace) -> None:
    for text in corpus.texts(given.seed, given.count):
        _say(text + "\n")


def _check(given: argparse.Namespace) -> None:
    _say(f"held-out pairs in {given.count} stories: {corpus.leaks(given.seed, given.count)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.storyteller", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("make")
    make.add_argument("--out", type=Path, default=OUT)
    make.add_argument("--rows", type=int, default=100_000, help="rows of 2048 tokens")
    make.add_argument("--held", type=int, default=64, help="rows kept for perplexity")
    make.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    make.add_argument("--tokenizer-documents", type=int, default=60_000)
    make.add_argument("--steps", type=int, default=6000)
    make.add_argument("--batch", type=int, default=96)
    make.add_argument("--rate", type=float, default=3e-3)
    make.add_argument("--minutes", type=float, default=8.0)
    make.add_argument("--resume", action="store_true", help="keep what is there already")
    make.add_argument("--start", type=Path, help="go on from the weights in this folder")
    make.set_defaults(run=_make)
    turn = commands.add_parser("convert")
    turn.add_argument("--out", type=Path, default=OUT)
    turn.add_argument("--install", action="store_true", help="copy into the package")
    turn.set_defaults(run=_convert)
    evaluate = commands.add_parser("evaluate")
    evaluate.add_argument("--models", type=Path, default=BUNDLED)
    evaluate.add_argument("--requests", type=int, default=500)
    evaluate.add_argument("--threads", type=int, default=1)
    evaluate.set_defaults(run=_evaluate)
    for name, run in (("sample", _sample), ("check", _check)):
        command = commands.add_parser(name)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--count", type=int, default=10 if name == "sample" else 20_000)
        command.set_defaults(run=run)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    arguments.run(arguments)
