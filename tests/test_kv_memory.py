"""What a KV cache costs and what memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from uma_trio.backend.gguf_header import GgufHeader, Value
from uma_trio.backend.kv_memory import attention_only, available_memory, kv_bytes, score_bytes
from uma_trio.backend.kv_types import kv_type_name


def header(**keys: Value) -> GgufHeader:
    """Return the header of a model of 24 layers, 14 heads of 64, 2 of them for KV."""
    values: dict[str, Value] = {
        "block_count": 24,
        "embedding_length": 896,
        "attention.head_count": 14,
        "attention.head_count_kv": 2,
        **keys,
    }
    metadata: dict[str, Value] = {f"llama.{key}": value for key, value in values.items()}
    return GgufHeader(
        Path("m"), (Path("m"),), 3, {"general.architecture": "llama", **metadata}, (), 1
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("f16", 48 << 20), ("f32", 96 << 20), ("q8_0", (24 << 20) * 34 // 32)],
)
def test_kv_bytes_are_those_that_llama_cpp_allocates(kind: str, expected: int) -> None:
    """The 0.5B shape with 4096 cells takes 48 MiB in f16, as llama.cpp's log says."""
    assert kv_bytes(header(), 4096, kind) == expected


def test_the_scores_of_attention_are_a_float_for_each_head_token_and_cell() -> None:
    """The 0.5B shape reserves 900 MiB more for 32,768 cells without flash attention than with it."""
    assert score_bytes(header(), 32768, 512) == 896 << 20


def test_layers_may_have_different_kv_heads() -> None:
    """Per-layer arrays are added up; layers with none cost nothing."""
    heads = (2, 0) * 12
    assert kv_bytes(header(**{"attention.head_count_kv": heads}), 4096, "f16") == 24 << 20


def test_head_sizes_of_their_own_count() -> None:
    """Key and value lengths replace width over heads."""
    sizes: dict[str, Value] = {"attention.key_length": 128, "attention.value_length": 64}
    assert kv_bytes(header(**sizes), 4096, "f16") == 72 << 20


def test_a_header_that_does_not_tell_costs_nothing() -> None:
    """Unknown is 0, so that nothing is refused on a guess."""
    assert kv_bytes(header(block_count=0), 4096, "f16") == 0


def test_models_with_recurrent_layers_are_known() -> None:
    """Their cache is not what the formula says."""
    assert attention_only(header())
    for key in ("ssm.state_size", "wkv.head_size", "shortconv.l_cache"):
        assert not attention_only(header(**{key: 16}))


@pytest.mark.parametrize(("name", "full"), [("q8", "q8_0"), ("F16", "f16"), ("iq4_nl", "iq4_nl")])
def test_kv_types_have_short_names(name: str, full: str) -> None:
    """`q8` is `q8_0`, and case does not matter."""
    assert kv_type_name(name) == full


@pytest.mark.parametrize(
    ("name", "full"),
    [("k=q8,v=f16", "k=q8_0,v=f16"), ("v=f16, k=q8_0", "k=q8_0,v=f16"), ("k=q8,v=q8_0", "q8_0")],
)
def test_k_and_v_may_have_types_of_their_own(name: str, full: str) -> None:
    """In either order; twice the same is that one."""
    assert kv_type_name(name) == full


def test_each_of_k_and_v_takes_what_its_type_takes() -> None:
    """Half of a pair's bytes are K's and half V's, where their rows are as long."""
    pair, k, v = (kv_bytes(header(), 1024, name) for name in ("k=q8_0,v=f16", "q8_0", "f16"))
    assert pair == (k + v) // 2


@pytest.mark.parametrize("name", ["k=q8_0", "k=q8_0,v=f16,x=1", "k=f17,v=f16", "k=,v=f16"])
def test_half_a_pair_is_refused(name: str) -> None:
    """With what a whole one looks like, or what there is."""
    with pytest.raises(ValueError, match=r"k=q8_0,v=f16|there is no KV type"):
        kv_type_name(name)


@pytest.mark.parametrize("name", ["q6", "q6_0", "int8", ""])
def test_an_unknown_kv_type_lists_those_there_are(name: str) -> None:
    """The refusal is enough to choose another."""
    with pytest.raises(ValueError, match=r"llama\.cpp has f16, f32, bf16, q8_0"):
        kv_type_name(name)


def write(root: Path, **files: str) -> Path:
    """Write files of a pretended ``/proc`` and ``/sys``; ``__`` in a name is ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    """Without a limit it is MemAvailable."""
    root = write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    1024 kB\n")
    assert available_memory(root) == 1 << 20


def test_the_lowest_cgroup_limit_counts(tmp_path: Path) -> None:
    """A limit further up binds too."""
    root = write(
        tmp_path,
        proc__meminfo="MemAvailable: 9999999 kB\n",
        proc__self__cgroup="0::/a/b\n",
    )
    top = root / "sys/fs/cgroup"
    (top / "a/b").mkdir(parents=True)
    for group, limit, used in (("a", "1000", "400"), ("a/b", "max", "300")):
        (top / group / "memory.max").write_text(limit)
        (top / group / "memory.current").write_text(used)
    assert available_memory(root) == 600


def test_a_cgroup_of_the_first_kind_counts(tmp_path: Path) -> None:
    """Version 1 hierarchies have their limit elsewhere."""
    root = write(tmp_path, proc__meminfo="MemAvailable: 9999999 kB\n")
    group = root / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("5000")
    (group / "memory.usage_in_bytes").write_text("6000")
    assert available_memory(root) == 0


def test_an_unknown_system_says_so(tmp_path: Path) -> None:
    """Without any of these files the answer is None."""
    assert available_memory(tmp_path) is None
