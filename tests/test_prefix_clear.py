"""`clear` leaves nothing of anybody: no cell, no sequence id, no byte; on every kind of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kit import text as letters
from engine_kit import Bench

from models.synthetic import PRESETS, Shape, write_model
from uma_trio.backend.llama import LlamaBackend
from uma_trio.engine.planner import EngineSettings

pytestmark = pytest.mark.real

BUDGET = 400_000  # less than what is asked for below would take, so that pages are evicted


@pytest.mark.parametrize(
    "shape",
    [
        PRESETS["tiny"],
        replace(PRESETS["window-tiny"], window=96),
        PRESETS["recurrent-tiny"],
    ],
    ids=["attention", "window", "recurrent"],
)
def test_clear_leaves_no_cell_id_or_byte(shape: Shape, tmp_path: Path) -> None:
    """After hits, forks, evictions, a preemption and a cancel, in three namespaces."""
    path = write_model(tmp_path / "model.gguf", shape)
    backend = LlamaBackend.load(
        path, n_ctx=1024, n_slots=4, n_batch=64, threads=1, flash_attention="off"
    )
    made = Bench(backend, settings=EngineSettings(prefix_bytes=BUDGET))  # type: ignore[arg-type]
    prefix, registry = made.engine.cells.prefix, made.engine.registry
    for n in range(24):
        name = ("1", "1/salt x", "2")[n % 3]
        for end in (1, 2):
            prompt = [*letters(n % 5, 180), *letters(10 * n + end, 20)]
            handle, _ = made.submit(prompt, 8, namespace=name, session=f"s{n}")
        made.engine.tick()
        made.engine.publish()
        if n % 6 == 1 and registry.running:
            registry.preempt(min(registry.running), "a test")
        if n % 6 == 3:
            made.cancel(handle)
        made.run()
        while prefix.saving.one():
            pass
    can = backend.limits.can_go_back
    assert (
        (prefix.tokens_saved > 0) is (prefix.store.evicted > 0) is (len(prefix.leaves) > 0) is can
    )
    prefix.clear(lambda _name: True)
    ids = [*range(backend.limits.n_slots), *backend.limits.leaf_ids]
    assert [backend.kv_length(seq) for seq in ids] == [0] * len(ids)
    assert (backend.kv_used(), len(prefix.leaves), prefix.store.n_bytes) == (0, 0, 0)
    assert not prefix.store.namespaces
    assert not prefix.usage.namespaces
    assert not [*prefix.saving._sessions, *prefix.saving._latest], "which hold tokens"
    backend.close()
