"""LoRA adapters on llama.cpp: variants of a model on the same weights, and files that are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf
from backend_kit import decode, feed, prompt, text

from models.adapters import write_adapter
from models.synthetic import PRESETS, write_model
from uma_trio.backend.base import Adapter, FloatArray, ModelError
from uma_trio.backend.llama import LlamaBackend
from uma_trio.backend.llama_probe import probe_adapter

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and two adapters for it."""
    path = tmp_path_factory.mktemp("adapters")
    write_model(path / "tiny.gguf")
    for seed, name in enumerate(("one", "two"), start=1):
        write_adapter(path / f"{name}.gguf", seed=seed)
    return path


@pytest.fixture
def base(folder: Path) -> Iterator[LlamaBackend]:
    """Return the model without adapters."""
    made = LlamaBackend.load(folder / "tiny.gguf", n_ctx=256, n_slots=2, n_batch=64, threads=1)
    yield made
    made.close()


def logits(backend: LlamaBackend, n: int = 12) -> FloatArray:
    """Return the logits behind a prompt, which is dropped again."""
    found = feed(backend, 0, text(1, n)).copy()
    assert backend.kv_remove(0)
    return found


def adapters(folder: Path, *named: tuple[str, float]) -> list[Adapter]:
    """Return adapters of the folder by name and scale."""
    return [Adapter(name, folder / f"{name}.gguf", scale) for name, scale in named]


def test_a_variant_computes_with_its_adapter_and_the_model_without(
    base: LlamaBackend, folder: Path
) -> None:
    """Both at the same time, in contexts of their own."""
    before = logits(base)
    variant = base.variant(adapters(folder, ("one", 1.0)))
    found = logits(variant)
    assert not np.allclose(found, before, atol=0.1)
    assert np.array_equal(logits(base), before)
    assert np.array_equal(logits(variant), found)
    variant.close()


def test_a_scale_of_0_is_the_model_itself(base: LlamaBackend, folder: Path) -> None:
    """And another scale is another variant."""
    scales = [base.variant(adapters(folder, ("one", scale))) for scale in (0.0, 0.5, 1.0)]
    nothing, half, whole = map(logits, scales)
    assert np.allclose(nothing, logits(base), atol=1e-4)
    assert not np.allclose(half, whole, atol=0.05)
    for each in scales:
        each.close()


def test_adapters_add_up(base: LlamaBackend, folder: Path) -> None:
    """Two at once are neither of the two."""
    both = base.variant(adapters(folder, ("one", 1.0), ("two", 0.5)))
    one = base.variant(adapters(folder, ("one", 1.0)))
    assert not np.allclose(logits(both), logits(one), atol=0.05)
    both.close()
    one.close()


def test_a_variant_outlives_the_model_that_it_was_made_from(folder: Path) -> None:
    """The weights stay for as long as somebody has them."""
    base = LlamaBackend.load(folder / "tiny.gguf", n_ctx=256, n_slots=2, n_batch=64, threads=1)
    variant = base.variant(adapters(folder, ("one", 1.0)))
    expected = logits(variant)
    base.close()
    del base
    assert np.array_equal(logits(variant), expected)
    assert decode(variant, prompt(1, text(2, 5))) == 0
    variant.close()


def test_a_file_that_was_replaced_is_another_adapter(
    base: LlamaBackend, folder: Path, tmp_path: Path
) -> None:
    """Contexts that have the earlier one compute with that one on."""
    file = tmp_path / "x.gguf"
    file.write_bytes((folder / "one.gguf").read_bytes())
    earlier = base.variant([Adapter("x", file, 1.0)])
    one = logits(earlier)
    write_adapter(tmp_path / "new.gguf", seed=2).replace(file)
    later = base.variant([Adapter("x", file, 1.0)])
    two = base.variant(adapters(folder, ("two", 1.0)))
    assert np.array_equal(logits(later), logits(two))
    assert np.array_equal(logits(earlier), one)
    for each in (earlier, later, two):
        each.close()


def broken(folder: Path, **changed: object) -> Path:
    """Write an adapter that is wrong in one way."""
    path = folder / "broken.gguf"
    writer = gguf.GGUFWriter(path, str(changed.get("arch", "llama")))
    writer.add_type(str(changed.get("type", "adapter")))
    writer.add_string("adapter.type", "lora")
    if "alpha" in changed:
        writer.add_string("adapter.lora.alpha", str(changed["alpha"]))
    else:
        writer.add_float32("adapter.lora.alpha", 8.0)
    name = str(changed.get("tensor", "blk.0.attn_q.weight"))
    shapes: Sequence[tuple[int, int]] = changed.get("shapes", ((4, 128), (128, 4)))  # type: ignore[assignment]
    for part, shape in zip("ab", shapes, strict=False):
        writer.add_tensor(f"{name}.lora_{part}", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shapes": ((4, 64), (64, 4))}, "incorrect shape"),
        ({"tensor": "blk.9.attn_q.weight"}, "does not exist in base model"),
        ({"shapes": ((4, 128),)}, "missing one component"),
        ({"arch": "qwen2"}, "mismatch"),
        ({"type": "model"}, "adapter"),
        ({"alpha": "much"}, "ended its process"),
    ],
    ids=str,
)
def test_an_adapter_that_does_not_fit_is_told_by_its_trial(
    folder: Path, tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    """Also one at which llama.cpp ends the process."""
    with pytest.raises(ModelError, match=said):
        probe_adapter(folder / "tiny.gguf", broken(tmp_path, **changed))


def test_an_adapter_that_fits_passes_its_trial(folder: Path) -> None:
    """It is computed with, too."""
    probe_adapter(folder / "tiny.gguf", folder / "one.gguf")


def test_a_model_of_another_shape_refuses_the_adapter(folder: Path, tmp_path: Path) -> None:
    """What was loaded stays as it is."""
    write_adapter(tmp_path / "wide.gguf", replace(PRESETS["tiny"], width=256))
    base = LlamaBackend.load(folder / "tiny.gguf", n_ctx=256, n_slots=2, n_batch=64, threads=1)
    expected = logits(base)
    with pytest.raises(ModelError, match="incorrect shape"):
        base.variant([Adapter("wide", tmp_path / "wide.gguf")])
    assert np.array_equal(logits(base), expected)
    base.close()
