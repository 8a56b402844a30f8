"""The two lanes of requests: those a person waits for, and those nobody does.

And how a stream is shown: `smooth` holds tokens back that came early, so that they come evenly while
others use the machine; `asap` passes each on when it is there.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Lane = Literal["interactive", "background"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

Pace = Literal["smooth", "asap"]
PACES: Final[tuple[Pace, ...]] = get_args(Pace)
