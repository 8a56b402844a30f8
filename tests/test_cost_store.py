"""What is remembered between starts, and that nothing about it can stop one."""

from __future__ import annotations

from pathlib import Path

import pytest

from uma_trio.backend.fake import FakeBackend
from uma_trio.cost_store import cost_file, recall, remember
from uma_trio.policy.cost import CostModel, Staircase

MODEL = CostModel(
    Staircase((1, 4), (0.008, 0.011)),
    output=Staircase((1, 4), (0.0, 0.001)),
    depth_s=1e-6,
    wide_depth_s=2e-7,
    crowd_s=1e-7,
)


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    """Seconds survive the way through the file exactly."""
    remember(tmp_path / "deep" / "cost.json", MODEL)
    assert recall(tmp_path / "deep" / "cost.json") == MODEL


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"computing":{},"output":{}}', b"\xff"])
def test_a_file_that_cannot_be_used_is_measured_again(tmp_path: Path, content: bytes) -> None:
    """Damage is no error, only a miss."""
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    assert recall(path) is None


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
