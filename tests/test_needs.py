"""What a model takes: found before it is loaded, compared with what loading took, refused with the sum."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from models.synthetic import PRESETS, write_model
from uma_trio.app import build
from uma_trio.backend import llama_probe
from uma_trio.backend.base import ModelError
from uma_trio.backend.llama import LlamaBackend
from uma_trio.backend.llama_needs import breakdown
from uma_trio.backend.llama_probe import estimate
from uma_trio.backend.needs import OURS, PROCESS, Estimate, Needs, Question
from uma_trio.cli.doctor import check_memory
from uma_trio.config.models import ModelSpec
from uma_trio.config.options import Config
from uma_trio.models import files

MIB = 1 << 20


def needs(n_ctx: int, kv: int) -> Needs:
    """Return the sum of a model of 100 MiB and so many MiB of KV cache."""
    return Needs(n_ctx, own=100 * MIB - OURS, mapped=0, kv=kv * MIB, compute=0)


def line() -> Estimate:
    """Return an estimate where 1,024 cells take 10 MiB, up to 8,192."""
    curve = (needs(256, 2), needs(4096, 40), needs(8192, 80))
    return Estimate(curve[1], curve)


@pytest.mark.parametrize(
    ("room", "cells"), [(101, 0), (102, 256), (140, 4096), (160, 6144), (180, 8192), (900, 8192)]
)
def test_the_largest_context_is_told_by_what_is_free(room: int, cells: int) -> None:
    """Between two sums on the line between them; never more than was tried."""
    assert line().largest_context(room * MIB) == cells


def test_no_context_is_named_that_the_model_was_not_trained_for() -> None:
    """Also where a larger one is asked for, and would fit."""
    found = evolve(line(), trained=2048)
    assert found.largest_context(900 * MIB) == found.largest_context(160 * MIB) == 2048
    assert found.largest_context(102 * MIB) == 256
    assert "set n_ctx to 2048 at most" in found.refusal(139 * MIB)


def test_a_refusal_names_cells_for_all_slots() -> None:
    """--n-ctx is what they share, so the model's length is not its bound."""
    found = evolve(line(), trained=2048, slots=2)
    assert "set n_ctx to 3840 at most" in found.refusal(138 * MIB)
    assert "set n_ctx to 4096 at most" in found.refusal(160 * MIB)


def test_a_file_is_tried_once_until_it_or_its_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that holds nonsense is written anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tries: list[int] = []
    real = llama_probe.estimate

    def counted(path: Path, question: Question) -> Estimate:
        tries.append(question.n_ctx)
        return real(path, question)

    monkeypatch.setattr(llama_probe, "estimate", counted)
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    config = Config(model=path, n_ctx=1024)
    first = files.estimate(config)
    assert files.estimate(config) == first
    assert first.trained > 0
    assert tries == [1024]
    files.estimate(evolve(config, n_ctx=512))
    path.write_bytes(path.read_bytes())
    files.estimate(config)
    assert tries == [1024, 512, 1024]
    for kept in (tmp_path / "cache" / "uma-trio" / "cost").glob("needs-*"):
        kept.write_text('{"needs": {"n_ctx": "x"}}')
    assert files.estimate(config).needs.kv == first.needs.kv
    assert len(tries) == 4


def test_what_a_gpu_lacks_is_told_with_both_sums() -> None:
    """And what takes less of it."""
    much = evolve(needs(4096, 40), device=900 * MIB)
    said = Estimate(much).refusal_of_devices(700 * MIB)
    assert "900 MiB on the GPU, and 700 MiB are free there" in said
    assert "gpu_layers" in said


def test_a_refusal_has_the_sum_what_is_free_and_what_to_do() -> None:
    """The size of the context that would fit, or where none does a smaller file."""
    said = line().refusal(120 * MIB)
    assert "it needs 140 MiB" in said
    assert "40 MiB of KV cache for n_ctx 4096" in said
    assert "120 MiB are free" in said
    assert "set n_ctx to 2048 at most" in said
    assert "choose a smaller quantisation" in line().refusal(50 * MIB)


def test_a_second_daemon_needs_room_for_what_it_does_not_share() -> None:
    """Weights that are mapped count once for both; the refusal has the sum."""
    read = evolve(needs(4096, 40), mapped=0)
    mapped = evolve(read, own=0, mapped=read.own)
    room = PROCESS + OURS + 40 * MIB
    Estimate(mapped).refuse_beside(room)
    with pytest.raises(
        ModelError, match=r"--replace needs 290 MiB .*40 MiB of KV cache.* service restart"
    ):
        Estimate(read).refuse_beside(room)


@pytest.mark.parametrize(
    ("preset", "n_ctx", "kv_type", "slots", "flash", "mmap"),
    [
        ("tiny", 4096, "f16", 8, "off", True),
        ("tiny", 1024, "q8_0", 1, "on", True),
        ("tiny", 4096, "f16", 16, "on", False),
        ("moe-tiny", 2048, "f16", 8, "off", False),
        ("window-tiny", 2048, "f16", 4, "on", True),
        ("hybrid-tiny", 2048, "f16", 4, "on", False),
        ("recurrent-tiny", 1024, "f16", 4, "on", False),
    ],
)
def test_the_estimate_is_what_loading_takes(
    tmp_path: Path, preset: str, n_ctx: int, kv_type: str, slots: int, flash: str, mmap: bool
) -> None:
    """Weights, cells and buffers of each kind of model, within 3 % of what llama.cpp has once it is loaded."""
    path = write_model(tmp_path / "model.gguf", PRESETS[preset])
    asked = Question(n_ctx, slots, kv_type, flash, 0, mmap)
    expected = estimate(path, asked).needs
    backend = LlamaBackend.load(
        path,
        n_ctx=n_ctx,
        n_slots=slots,
        threads=1,
        kv_type=kv_type,
        flash_attention=flash,
        gpu_layers=0,
        mmap=mmap,
    )
    parts = breakdown(backend._context or 0)
    backend.close()
    if parts is None:
        pytest.skip("only GNU's C++ library on Linux lays the sums out as they are read")
    took = {
        name: sum(getattr(part, name) for part in parts) for name in ("model", "context", "compute")
    }
    assert expected.kv == pytest.approx(took["context"], rel=0.03)
    rows = 4 * 260 * (slots + 1)  # of the vocabulary's floats, for each sequence
    assert expected.compute == pytest.approx(took["compute"] + rows, rel=0.03)
    if not mmap:
        assert expected.own == pytest.approx(took["model"], rel=0.03)
    assert (expected.mapped > 0) is mmap


def test_the_scores_of_attention_are_counted_where_it_has_them(tmp_path: Path) -> None:
    """Without flash attention, and their copy in half precision with them; at each size of the context."""
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    plain, flash = (
        estimate(path, Question(32768, 8, "f16", how, 0, True, others=(512, 65536)))
        for how in ("off", "auto")
    )
    assert plain.needs.compute > 2 * flash.needs.compute
    heads = PRESETS["tiny"].heads
    assert (plain.needs.work, flash.needs.work) == (2 * heads * 32768 * 512, 0)
    assert [each.n_ctx for each in flash.curve] == [512, 32768, 65536]
    assert flash.curve[1] == flash.needs


def test_a_damaged_file_is_an_error_with_its_reason(tmp_path: Path) -> None:
    """Cut, or with a tensor too few."""
    whole = write_model(tmp_path / "model.gguf", PRESETS["tiny"]).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    question = Question(1024, 8, "f16", "auto", 0, True)
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="truncated"):
        estimate(damaged, question)
    damaged.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", 1))
    with pytest.raises(ModelError, match=r"tensor 'blk\.1\.attn_q\.weight' not found"):
        estimate(damaged, question)


def test_what_cannot_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, and beside a daemon that is to be replaced; nothing is tried where there is plenty."""
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    config = Config(model=path, n_ctx=4096)
    monkeypatch.setattr(files, "available_memory", lambda: MIB)
    with pytest.raises(ModelError, match=r"does not fit: it needs .* MiB are free"):
        build.load_backend(config, None)
    with pytest.raises(ModelError, match="--replace needs"):
        build.load_backend(config, None, replaces=True)
    monkeypatch.setattr(files, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(files, "estimate", None)
    build.load_backend(config, None).close()


def test_doctor_tells_the_sum_and_the_context_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short; otherwise nothing."""
    monkeypatch.setattr(files, "estimate", lambda _config: line())
    available = "uma_trio.backend.kv_memory.available_memory"
    monkeypatch.setattr(available, lambda: 900 * MIB)
    assert [*check_memory([Config()])] == []
    monkeypatch.setattr(available, lambda: 120 * MIB)
    (found,) = check_memory([Config()])
    assert found.weight == "blocks"
    assert "147 MB needed" in found.what
    assert "only 126 MB available" in found.what
    assert "use --n-ctx 2048" in found.fix


def test_doctor_judges_each_model_and_those_that_are_loaded_at_start_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of 140 MiB fit each by itself; one that is loaded on request is not counted."""
    monkeypatch.setattr(files, "estimate", lambda _config: line())
    monkeypatch.setattr("uma_trio.backend.kv_memory.available_memory", lambda: 200 * MIB)
    for load, expected in ((None, ["memory of all"]), ("on-demand", [])):
        specs = (ModelSpec("a"), ModelSpec("b", load=load))
        found = check_memory(Config(models=specs).each())
        assert [each.about for each in found] == expected
