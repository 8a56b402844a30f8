"""How far guesses at the next tokens of an answer may go: none, free ones, or those that pay."""

from __future__ import annotations

from typing import Final, Literal, get_args

Speculation = Literal["off", "free", "auto"]
SPECULATIONS: Final[tuple[Speculation, ...]] = get_args(Speculation)
BY_BACKEND: Final = "default"  # of the daemon's option: auto, but off on a GPU
