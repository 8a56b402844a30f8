"""scripts/mutations.py: each seeded fault still is one of this code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
assert _SPEC is not None
assert _SPEC.loader is not None
mutations = importlib.util.module_from_spec(_SPEC)
sys.modules["mutations"] = mutations
_SPEC.loader.exec_module(mutations)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_seeded_fault_fits_the_code(mutation: mutations.Mutation) -> None:  # type: ignore[name-defined]
    """What it replaces occurs once, and the tests that should notice exist."""
    assert (ROOT / mutation.path).read_text(encoding="utf-8").count(mutation.old) == 1
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests.split())
