"""Calls in threads that yield the cores to others."""

from __future__ import annotations

import os
import sys

import pytest

from uma_trio.backend.polite import POLITE, politely


def niceness() -> int:
    """Return that of the thread that calls."""
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
def test_a_polite_call_yields_and_its_caller_does_not() -> None:
    """On Linux each thread has a niceness of its own, up to 19."""
    before = niceness()
    assert politely(niceness) == min(before + POLITE, 19)
    assert niceness() == before


def test_what_a_polite_call_raises_comes_out_where_it_was_made() -> None:
    """As if it had been made there."""
    with pytest.raises(ZeroDivisionError):
        politely(lambda: 1 / 0)
