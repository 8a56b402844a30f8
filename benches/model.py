"""The model that is measured: random weights in the shape of a 0.5B model, with a real vocabulary.

Speed does not depend on what the weights say, so nothing has to be downloaded; the vocabulary of
151,936 tokens is a real one, as sampling and tokenising cost what it makes them cost.
"""

from __future__ import annotations

import os
from pathlib import Path

from benches import peers
from benches.report import note

PRESET, KIND, SEED = "0.5b", "Q4_0", 0
_OUT = Path(__file__).resolve().parent.parent / "models" / "out"


class NoVocabulary(Exception):
    """There is nothing to take a real vocabulary from; the message says what to do."""


def bench_model(given: Path | None = None, vocabulary: Path | None = None) -> Path:
    """Return the GGUF to measure: `given`, ``UMA_BENCH_MODEL``, or ours, made when it is missing.

    Raises:
        NoVocabulary: it has to be made, and there is no vocabulary to copy.
    """
    if given is not None:
        return given
    if text := os.environ.get("UMA_BENCH_MODEL"):
        return Path(text)
    out = _OUT / f"bench-{PRESET}-{KIND.lower()}.gguf"
    if out.exists():
        return out
    tokens = peers.vocabulary(vocabulary)
    if tokens is None:
        raise NoVocabulary(
            f"the model takes its vocabulary from {peers.VOCABULARY} of llama.cpp's sources, which "
            "`python -m benches.peers --build` brings; or name one by --vocab, or a model by --model"
        )
    return _make(out, PRESET, KIND, tokens)


def tiny_model() -> Path:
    """Return a model so small that computing it costs next to nothing."""
    out = _OUT / "bench-tiny.gguf"
    return out if out.exists() else _make(out, "tiny", None, None)


def _make(out: Path, preset: str, kind: str | None, vocabulary: Path | None) -> Path:
    from dataclasses import replace

    from models.synthetic import PRESETS, write_model  # gguf takes long to import

    note(f"making {out.name}, once (half a minute)")
    out.parent.mkdir(parents=True, exist_ok=True)
    shape = PRESETS[preset] if kind is None else replace(PRESETS[preset], kind=kind)
    unfinished = out.with_suffix(".part")
    write_model(unfinished, shape, vocabulary=vocabulary, seed=SEED, name=f"bench-{preset}")
    unfinished.rename(out)
    return out
