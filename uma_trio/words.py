"""The words of a request that are one of a few, and what they mean.

Its lane: requests that somebody waits for, and those that nobody does. What is waited for (`awaits`):
`tokens`, by a person who reads them as they come; the end of the `answer`, by a program or by a person who
sees it whole; `nothing` in the background lane. How a stream is shown (`pace`): `smooth` holds tokens back
that came early, so that they come evenly while others use the machine; `asap` passes each on when it is
there. How far guesses at the next tokens of an answer may go (`speculation`): none, free ones, or those
that pay.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Lane = Literal["interactive", "background"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

Gives = Literal["text", "vectors", "scores"]
"""What a model makes of a text."""

Awaits = Literal["tokens", "answer", "nothing"]
AWAITS: Final[tuple[Awaits, ...]] = get_args(Awaits)

Pace = Literal["smooth", "asap"]
PACES: Final[tuple[Pace, ...]] = get_args(Pace)

Speculation = Literal["off", "free", "auto"]
SPECULATIONS: Final[tuple[Speculation, ...]] = get_args(Speculation)
BY_BACKEND: Final = "default"  # of the daemon's option: auto, but off on a GPU


def chosen(asked: Speculation | None, *, seeded: bool) -> Speculation:
    """Return what drafts a request may have that asks for `asked`, or says nothing (None).

    Who names a seed wants the same answer again. Drafts change the sizes of batches, and llama.cpp rounds
    a row differently in a batch of another size (docs/REPRODUCIBILITY.md): without a word there are none.
    """
    if asked is None:
        return "off" if seeded else "auto"
    return asked
