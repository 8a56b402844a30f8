"""The generator of random-weight models: shapes, types, vocabularies, and one real load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

gguf = pytest.importorskip("gguf")

from models import synthetic  # noqa: E402  # it needs gguf, which is checked for above

TINY = synthetic.PRESETS["tiny"]


def _tensors(path: Path) -> dict[str, object]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_the_tiny_preset_is_small_and_speaks_chat(tmp_path: Path) -> None:
    """A tiny model stays under a megabyte and carries a template and an end token."""
    path = synthetic.write_model(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(path)
    assert path.stat().st_size < 1_000_000
    assert "<|im_start|>" in reader.fields["tokenizer.chat_template"].contents()
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    assert tokens[end] == "<|im_end|>"


def test_a_seed_fixes_the_file(tmp_path: Path) -> None:
    """The same seed writes the same bytes, another seed writes others."""
    files = [
        synthetic.write_model(tmp_path / f"{n}.gguf", seed=s).read_bytes()
        for n, s in enumerate((1, 1, 2))
    ]
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("kind", synthetic.TYPES)
def test_every_type_has_weights_of_a_sane_spread(tmp_path: Path, kind: str) -> None:
    """Whatever the type, dequantised weights have mean near 0 and the spread aimed at."""
    shape = replace(TINY, width=256, ffn=512, kind=kind)
    tensors = _tensors(synthetic.write_model(tmp_path / "m.gguf", shape))
    tensor = tensors["blk.0.ffn_up.weight"]
    assert tensor.tensor_type.name == kind
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert values.shape == (512, 256)
    assert abs(float(values.mean())) < 0.01
    assert float(values.std()) == pytest.approx(256**-0.5, rel=0.1)
    assert np.isfinite(values).all()


def test_a_row_that_fits_no_large_block_falls_back(tmp_path: Path) -> None:
    """A width that is no multiple of 256 stores Q4_K matrices as Q5_0, like llama.cpp."""
    shape = replace(TINY, kind="Q4_K")
    tensors = _tensors(synthetic.write_model(tmp_path / "m.gguf", shape))
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "Q5_0"


def test_experts_have_their_tensors_and_fields(tmp_path: Path) -> None:
    """A mixture of experts holds a router and stacked matrices in place of the dense ones."""
    path = synthetic.write_model(tmp_path / "m.gguf", synthetic.PRESETS["moe-tiny"])
    tensors = _tensors(path)
    assert "blk.0.ffn_gate_inp.weight" in tensors
    assert "blk.0.ffn_up.weight" not in tensors
    assert list(tensors["blk.1.ffn_up_exps.weight"].shape) == [128, 128, 4]


def test_a_vocabulary_is_copied_with_its_fields(tmp_path: Path) -> None:
    """The tokenizer of another file arrives whole, and sizes the embedding."""
    source = synthetic.write_model(tmp_path / "source.gguf")
    path = synthetic.write_model(tmp_path / "copy.gguf", TINY, vocabulary=source, seed=3)
    ours, theirs = gguf.GGUFReader(path).fields, gguf.GGUFReader(source).fields
    names = [name for name in theirs if name.startswith("tokenizer.")]
    assert names == [name for name in ours if name.startswith("tokenizer.")]
    assert all(ours[name].contents() == theirs[name].contents() for name in names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 3}, "no multiple of 3 heads"),
        ({"kv_heads": 3}, "no multiple of 3 KV heads"),
        ({"head_dim": 31}, "odd"),
        ({"experts": 1, "experts_used": 2}, "experts cannot be used"),
        ({"layers": 0}, "1 or more"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    """A shape llama.cpp could not run is refused before anything is written."""
    with pytest.raises(ValueError, match=words):
        synthetic.write_model(tmp_path / "m.gguf", replace(TINY, **change))
    assert not list(tmp_path.iterdir())


def test_the_command_line_overrides_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dimension given on the command line wins over the preset's."""
    out = tmp_path / "m.gguf"
    assert synthetic.main(["--layers", "3", "--type", "q4_0", "--out", str(out)]) == 0
    assert "layers=3" in capsys.readouterr().out
    assert "blk.2.attn_q.weight" in _tensors(out)
    assert synthetic.main(["--heads", "5", "--out", str(out)]) == 2


@pytest.mark.real
def test_llama_cpp_runs_the_tiny_models(tmp_path: Path) -> None:
    """llama.cpp loads dense and mixed models and its tokenizer turns bytes around."""
    llama_cpp = pytest.importorskip("llama_cpp")
    for preset in ("tiny", "moe-tiny"):
        path = synthetic.write_model(tmp_path / f"{preset}.gguf", synthetic.PRESETS[preset])
        model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
        text = "a héron\n".encode()
        tokens = model.tokenize(text, add_bos=False)
        assert len(tokens) == len(text)
        assert model.detokenize(tokens) == text
        model.eval(tokens)
        assert model.n_tokens == len(tokens)
        model.close()
