"""Decodes of llama.cpp that pause: another model is computed within them, and no bit changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kit import decode, feed, prompt, text

from models.synthetic import write_model
from uma_trio.backend import _llama_pauses
from uma_trio.backend.base import DecodeStatus, FloatArray
from uma_trio.backend.llama import LlamaBackend

pytestmark = pytest.mark.real

LONG = 1000 * _llama_pauses.GRAIN_S
"""Predicted to take so long, a decode pauses behind nearly every node."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model."""
    return write_model(tmp_path_factory.mktemp("pauses") / "tiny.gguf")


def loaded(path: Path, *, pauses: bool = True, threads: int = 1) -> LlamaBackend:
    """Load the model."""
    return LlamaBackend.load(path, n_ctx=256, n_slots=2, n_batch=64, threads=threads, pauses=pauses)


@pytest.fixture
def pausing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaBackend]:
    """Return a backend whose decodes pause, however short they are."""
    monkeypatch.setattr(_llama_pauses, "LONG_S", 0.0)
    made = loaded(tiny, threads=2)
    yield made
    made.close()


def logits(backend: LlamaBackend) -> FloatArray:
    """Return the logits behind a prompt, which is dropped again."""
    found = feed(backend, 0, text(1, 40))
    assert backend.kv_remove(0)
    return found


def test_another_model_is_computed_in_the_pauses_and_both_have_the_same_bits(
    pausing: LlamaBackend, tiny: Path
) -> None:
    """On one thread, with two threads of ggml."""
    other = loaded(tiny, pauses=False, threads=2)
    expected, expected_other = logits(pausing), logits(other)
    found: list[FloatArray] = []
    pausing.let_pause(lambda: found.append(logits(other)), LONG)
    assert np.array_equal(logits(pausing), expected)
    assert len(found) > 5  # fewer where other programs took single nodes the core
    assert all(np.array_equal(each, expected_other) for each in found)
    other.close()


def test_only_the_next_decode_pauses(pausing: LlamaBackend) -> None:
    """As an interrupt is for one decode."""
    calls: list[int] = []
    pausing.let_pause(lambda: calls.append(1), LONG)
    logits(pausing)
    before = len(calls)
    logits(pausing)
    assert before > 0
    assert len(calls) == before


def test_a_decode_that_should_be_short_does_not_pause(pausing: LlamaBackend) -> None:
    """A pause costs, and nobody waits for so short a time."""
    calls: list[int] = []
    pausing.let_pause(lambda: calls.append(1), _llama_pauses.GRAIN_S / 2)
    logits(pausing)
    assert not calls


def test_pauses_are_as_many_as_the_predicted_time_has_grains(pausing: LlamaBackend) -> None:
    """None comes behind the last node."""
    assert pausing._pauses is not None
    pausing._pauses._share[:] = 1 / len(pausing._pauses._share)
    calls: list[int] = []
    pausing.let_pause(lambda: calls.append(1), 5.5 * _llama_pauses.GRAIN_S)
    logits(pausing)
    assert len(calls) == 5


def test_what_is_raised_in_a_pause_comes_out_of_the_decode(pausing: LlamaBackend) -> None:
    """It was computed to its end, and the context is as good as before."""
    expected = logits(pausing)

    def fail() -> None:
        raise RuntimeError("in a pause")

    pausing.let_pause(fail, LONG)
    with pytest.raises(RuntimeError, match="in a pause"):
        decode(pausing, prompt(0, text(1, 40)))
    assert pausing.kv_remove(0)
    assert np.array_equal(logits(pausing), expected)


def test_a_decode_is_interrupted_in_a_pause(pausing: LlamaBackend) -> None:
    """It ends there, and the cache is as before."""
    expected = logits(pausing)
    interrupt = pausing.arm()
    assert interrupt is not None
    pausing.let_pause(interrupt, LONG)
    assert decode(pausing, prompt(0, text(1, 40))) == DecodeStatus.ABORTED
    assert pausing.kv_length(0) == 0
    assert np.array_equal(logits(pausing), expected)


def test_short_decodes_have_no_callback(tiny: Path) -> None:
    """Neither where several models are loaded, nor where one is."""
    for pauses in (True, False):
        backend = loaded(tiny, pauses=pauses)
        assert backend.traits.longest_part == 1
        backend.let_pause(lambda: pytest.fail("it paused"), LONG)
        logits(backend)
        backend.close()


def test_a_single_model_has_no_callback_however_long_its_decodes(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else could be computed in a pause."""
    monkeypatch.setattr(_llama_pauses, "LONG_S", 0.0)
    backend = loaded(tiny, pauses=False)
    assert backend.traits.longest_part == 1
    backend.close()
