"""What is remembered between starts, and that nothing about it can stop one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from attrs import evolve

from uma_trio.backend._llama_options import Placement
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing import store
from uma_trio.policy.costing.calibrate import Neighbour, measured_cost
from uma_trio.policy.costing.neighbours import CpuTimes
from uma_trio.policy.costing.store import Unusable, cost_file, recall, remember
from uma_trio_sim.fake import FakeBackend

MODEL = CostModel(
    Staircase((1, 4), (0.008, 0.011)),
    output=Staircase((1, 4), (0.0, 0.001)),
    context_cell_s=1e-6,
    wide_context_cell_s=2e-7,
    used_cell_s=1e-7,
)


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    """Seconds survive the way through the file exactly."""
    remember(tmp_path / "deep" / "cost.json", MODEL)
    assert recall(tmp_path / "deep" / "cost.json") == MODEL


def test_what_was_never_stored_is_no_fault(tmp_path: Path) -> None:
    """The first start of a machine finds nothing."""
    assert recall(tmp_path / "cost.json") is None


SPOILT = msgspec.json.encode(
    {
        "computing": {1: 0.008, 4: 0.011},
        "output": {1: 0.0, 4: -0.999 * 0.011},
        "context_cell_s": 0.0,
        "wide_context_cell_s": 0.0,
        "used_cell_s": 0.0,
        "spanned_cell_s": 0.0,
        "recapture_s": 0.0,
        "capture_s": 0.0,
    }
)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"computing":{},"output":{}}', b"\xff", SPOILT]
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: bytes) -> None:
    """Damage, and figures that no machine has."""
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(Unusable, match=r"\w"):
        recall(path)


def test_a_file_that_cannot_be_used_is_measured_again_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller logs the file and what is wrong; the next start finds a good one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = FakeBackend()
    path = cost_file(backend)
    path.parent.mkdir(parents=True)
    path.write_bytes(SPOILT)
    found = measured_cost(backend, read=lambda: CpuTimes(0.0, 0.0))
    assert not found.recalled
    assert found.file == path
    assert "4 logits rows add" in found.unusable


def test_what_cannot_be_true_is_not_stored(tmp_path: Path) -> None:
    """The file of the start before stays."""
    path = tmp_path / "cost.json"
    remember(path, MODEL)
    remember(path, evolve(MODEL, context_cell_s=-1.0))
    assert recall(path) == MODEL


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """The daemon starts without a cache too."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    remember(blocked / "cost.json", MODEL)
    assert recall(blocked / "cost.json") is None


def test_another_batch_size_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changes what a tick costs changes the name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = cost_file(FakeBackend(n_batch=64)), cost_file(FakeBackend(n_batch=128))
    assert first != second
    assert first.is_relative_to(tmp_path)


def test_other_layers_on_the_gpu_and_another_machine_are_other_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A home folder may be shared, and a model served with fewer layers on the GPU."""
    backend, files = FakeBackend(), []
    for machine, gpu_layers in (("a", -1), ("a", 12), ("a", 0), ("b", 0)):
        monkeypatch.setattr(store, "identity", lambda machine=machine: machine)
        backend.description = str(Placement.of(24, ["Big GPU"], gpu_layers))
        files.append(cost_file(backend))
    assert len(set(files)) == 4


def test_beside_another_model_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its costs are concluded from the other's by their sizes, and are to be measured again; nothing is stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small, large = FakeBackend(), FakeBackend()
    small.model = evolve(small.model, weight_bytes=1e9, n_params=1_000)
    large.model = evolve(large.model, weight_bytes=2e9, n_params=3_000)
    found = measured_cost(large, beside=Neighbour(MODEL, small))
    assert found.cost.computing.seconds == pytest.approx((0.024, 0.033))
    assert (found.recalled, found.cost.others) == (False, 1.0)
    assert large.decodes == 1  # so that the first tick finds weights and graphs in memory
    assert not found.file.exists()
