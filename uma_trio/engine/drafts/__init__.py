"""Guesses at the next tokens of a sequence, looked up in texts, and how often they are right.

An answer that repeats, quotes or edits a text contains what was there before. `lookup` finds that in the
sequence's own text, `pool` in earlier answers of the same namespace, `survival` learns what a guess is
worth, and :class:`Drafter` puts these together for an engine.
"""

from uma_trio.engine.drafts.drafter import Drafter, drafter_for
from uma_trio.engine.drafts.drafting import Drafting, Feeding

__all__ = ["Drafter", "Drafting", "Feeding", "drafter_for"]
