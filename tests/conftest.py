"""The order of the tests: quick ones first, then those with a real model, then real daemons."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from uma_trio.config.hardware import limit_spinning

# As the daemon does. Later is too late: modules of tests load llama.cpp while they are collected.
limit_spinning()

# An example takes as long as the machine lets it; no test judges that.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what fails in milliseconds fail before what takes seconds has begun."""

    def weight(item: pytest.Item) -> int:
        if item.get_closest_marker("daemon"):
            return 2
        return 1 if item.get_closest_marker("real") else 0

    items.sort(key=weight)
