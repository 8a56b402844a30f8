"""Round robin without an index: go on behind whoever was served last."""

from __future__ import annotations

from collections.abc import Iterable

from uma_trio.policy.state import SequenceView


def rotate(views: Iterable[SequenceView], cursor: int) -> list[SequenceView]:
    """Return `views` by key, beginning with the first key above `cursor`.

    Keys only grow, so the order is stable when sequences come and go.
    """
    ordered = sorted(views, key=lambda view: view.key)
    behind = [view for view in ordered if view.key > cursor]
    return behind + ordered[: len(ordered) - len(behind)]
