"""The two lanes of requests: those somebody waits for, and those nobody does.

What is waited for (`awaits`): `tokens`, by a person who reads them as they come; the end of the
`answer`, by a program or by a person who sees it whole; `nothing` in the background lane. And how a stream is shown: `smooth` holds tokens back that came early, so that they come evenly while
others use the machine; `asap` passes each on when it is there.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Lane = Literal["interactive", "background"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

Awaits = Literal["tokens", "answer", "nothing"]
AWAITS: Final[tuple[Awaits, ...]] = get_args(Awaits)

Pace = Literal["smooth", "asap"]
PACES: Final[tuple[Pace, ...]] = get_args(Pace)
