"""The two lanes of requests: those a person waits for, and those nobody does."""

from __future__ import annotations

from typing import Final, Literal, get_args

Lane = Literal["interactive", "background"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)
