"""Decodes of llama.cpp that are computed in parts: another model is computed in between, and no bit changes."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kit import feed, text

from models.synthetic import write_model
from uma_trio.backend import _llama_parts
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_load import load_model
from uma_trio.backend.base import DecodeStatus, FloatArray
from uma_trio.backend.llama import LlamaBackend

pytestmark = pytest.mark.real

LONG = 1000 * _llama_parts.DECODE_GRAIN_S
"""Predicted to take so long, a decode can stop behind nearly every node."""
TEXT = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model."""
    return write_model(tmp_path_factory.mktemp("parts") / "tiny.gguf")


def loaded(path: Path, *, parts: bool = True, threads: int = 1) -> LlamaBackend:
    """Load the model."""
    return LlamaBackend.load(path, n_ctx=256, n_slots=2, n_batch=64, threads=threads, parts=parts)


@pytest.fixture
def stopping(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaBackend]:
    """Return a backend whose decodes are computed in parts, however short they are."""
    monkeypatch.setattr(_llama_parts, "LONG_S", 0.0)
    made = loaded(tiny, threads=2)
    yield made
    made.close()


def logits(backend: LlamaBackend) -> FloatArray:
    """Return the logits behind a text, which is dropped again."""
    found = feed(backend, 0, text(1, TEXT))
    assert backend.kv_remove(0)
    return found


def begin(backend: LlamaBackend, predicted_s: float) -> None:
    """Begin to decode the text."""
    tokens = text(1, TEXT)
    n, batch = len(tokens), backend.batch
    batch.token[:n], batch.pos[:n], batch.slot[:n], batch.want[:n] = tokens, np.arange(n), 0, 0
    batch.want[n - 1] = 1
    backend.begin_decode(n, predicted_s=predicted_s)


def in_parts(
    backend: LlamaBackend, between: Callable[[], object], predicted_s: float = LONG
) -> int:
    """Decode the text with as many stops as there may be; return the status."""
    begin(backend, predicted_s)
    while (status := backend.advance_decode(0.0)) is None:
        between()
    return status


def test_another_model_is_computed_between_two_parts_and_both_have_the_same_bits(
    stopping: LlamaBackend, tiny: Path
) -> None:
    """With two threads of ggml."""
    other = loaded(tiny, parts=False, threads=2)
    expected, expected_other = logits(stopping), logits(other)
    found: list[FloatArray] = []
    assert in_parts(stopping, lambda: found.append(logits(other))) == DecodeStatus.OK
    assert np.array_equal(stopping.logits(1)[0], expected)
    assert len(found) > 5
    assert all(np.array_equal(each, expected_other) for each in found)
    other.close()


def test_a_decode_that_should_be_short_has_one_part(stopping: LlamaBackend) -> None:
    """A stop costs, and nothing waits for so short a time."""
    stops: list[int] = []
    in_parts(stopping, lambda: stops.append(1), _llama_parts.DECODE_GRAIN_S / 2)
    assert len(stops) <= 1


def test_parts_are_as_many_as_the_predicted_time_has_grains(stopping: LlamaBackend) -> None:
    """The last one is what is left."""
    assert stopping._parts is not None
    share = stopping._parts.share
    share[:] = 1 / len(share)
    stops: list[int] = []
    in_parts(stopping, lambda: stops.append(1), 5.5 * _llama_parts.DECODE_GRAIN_S)
    assert len(stops) in (5, 6)


def test_a_decode_stops_where_something_else_is_wanted(stopping: LlamaBackend) -> None:
    """However much time it was given."""
    begin(stopping, LONG)
    assert stopping.advance_decode(math.inf, lambda: True) is None
    assert stopping.advance_decode(math.inf) == DecodeStatus.OK


def test_a_decode_is_interrupted_between_two_parts(stopping: LlamaBackend) -> None:
    """It ends there, and the cache is as before."""
    expected = logits(stopping)
    interrupt = stopping.arm()
    assert interrupt is not None
    assert in_parts(stopping, interrupt) == DecodeStatus.ABORTED
    assert stopping.kv_length(0) == 0
    assert np.array_equal(logits(stopping), expected)


def test_a_backend_is_closed_within_a_decode(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may be told to stop at once."""
    monkeypatch.setattr(_llama_parts, "LONG_S", 0.0)
    backend = loaded(tiny)
    begin(backend, LONG)
    assert backend.advance_decode(0.0) is None
    backend.close()


def test_a_call_that_cannot_be_aborted_is_computed_to_its_end_where_others_want_to_stop_it(
    tiny: Path,
) -> None:
    """Of ggml's backends only some ask whether to go on. Nobody waits in the last part for what is wanted."""
    parts, nodes = _llama_parts.GraphParts("test"), list[int]()

    def call() -> int:
        for node in range(5):
            if parts.callback(None, True, None):
                nodes.append(node)
                parts.callback(None, False, None)
        return 0

    model = load_model(tiny, gpu_layers=0)
    context = llama.llama_init_from_model(model.pointer, llama.llama_context_default_params())
    parts.begin(call, np.full(5, 1.0), 0.5)
    assert parts.advance(0.0, lambda: True) is None
    closing = threading.Thread(target=parts.close, args=(context,), daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert nodes == [0, 1, 2, 3, 4]
    llama.llama_free(context)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness")
def test_a_model_that_was_loaded_politely_computes_as_any_other(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the load leaves the cores to readers of other models; a thread inherits the niceness of the one that starts it."""
    monkeypatch.setattr(_llama_parts, "LONG_S", 0.0)
    before = set(threading.enumerate())
    backend = LlamaBackend.load(
        tiny, n_ctx=256, n_slots=2, n_batch=64, threads=1, parts=True, polite=True
    )
    begin(backend, LONG)
    assert backend.advance_decode(0.0) is None
    (thread,) = set(threading.enumerate()) - before
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == mine
    backend.close()


def test_short_decodes_have_no_callback(tiny: Path) -> None:
    """Neither where several models are loaded, nor where one is."""
    for parts in (True, False):
        backend = loaded(tiny, parts=parts)
        assert backend.traits.longest_part == 1
        backend.close()


def test_a_single_model_has_no_callback_however_long_its_decodes(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else could be computed between its parts."""
    monkeypatch.setattr(_llama_parts, "LONG_S", 0.0)
    backend = loaded(tiny, parts=False)
    assert backend.traits.longest_part == 1
    backend.close()
