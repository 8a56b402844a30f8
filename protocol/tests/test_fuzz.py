"""The corpus of the fuzz targets, replayed."""

import pytest

targets = pytest.importorskip("fuzz.targets", reason="the fuzz targets are not part of this copy")
runner = pytest.importorskip("fuzz.__main__")

FILES = sorted(path for path in runner.CORPUS.glob("*/*") if path.is_file())


def test_every_file_of_the_corpus_belongs_to_a_target():
    """A file in a folder that nobody reads would be forgotten."""
    assert {path.parent.name for path in FILES} == set(targets.TARGETS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus_holds(path):
    """What was once found, or once thought of, keeps the invariants."""
    targets.TARGETS[path.parent.name].check(path.read_bytes())


@pytest.mark.parametrize("name", list(targets.TARGETS))
def test_a_target_that_breaks_is_reported_with_a_small_input(name, monkeypatch):
    """The runner notices any error, and hands out the smallest input that causes it."""

    def fragile(data):
        if data:
            raise ZeroDivisionError

    inputs = targets.TARGETS[name].inputs
    monkeypatch.setitem(targets.TARGETS, name, targets.Target(fragile, inputs))
    monkeypatch.setattr(runner, "EXAMPLES_PER_ROUND", 50)
    data, exc = runner.run_round(name)
    assert 0 < len(data) < 120
    assert isinstance(exc, ZeroDivisionError)
