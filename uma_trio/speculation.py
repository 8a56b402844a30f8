"""How far guesses at the next tokens of an answer may go: none, free ones, or those that pay."""

from __future__ import annotations

from typing import Final, Literal, get_args

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
