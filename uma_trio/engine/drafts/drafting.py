"""What an engine asks of whoever guesses ahead for its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from attrs import frozen

from uma_trio.engine.chunk import Outcome
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.fairness import Path


@frozen(eq=False)
class Unread:
    """A part of a text that is to be taken in: `n_tokens` of a `sequence`, or of an earlier answer.

    `program` is whose text it is, to be charged.
    """

    program: Path
    n_tokens: int
    sequence: Sequence | None = None


class Drafting(Protocol):
    """Proposes drafts, and is told what became of them. Every method is called on the engine's thread.

    `running` are the sequences that have a slot, by key.
    """

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Draft for each sequence that decodes and whose request allows it."""

    def unread(self, running: Mapping[int, Sequence]) -> list[Unread]:
        """Return what is to be taken in before there are guesses, at most a part of each text."""

    def take_in(self, part: Unread) -> None:
        """Take in a part, which is one of :meth:`unread`, or the beginning of one."""

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        """Whether a likely draft follows what was just sampled, so that a tick is to be planned anew.

        The commit of these outcomes is still to come.
        """

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        """Note what became of a chunk of `sequence`."""

    def keep(self, sequence: Sequence) -> None:
        """Take note of a sequence whose answer is whole, and has ended."""

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop what was kept of answers of the namespaces that are `mine`."""


class NoDrafts:
    """Guesses nothing."""

    failures = 0

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Propose nothing."""

    def unread(self, running: Mapping[int, Sequence]) -> list[Unread]:
        """Return nothing."""
        return []

    def take_in(self, part: Unread) -> None:
        """Take in nothing."""

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        """Say that no draft follows."""
        return False

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        """Learn nothing."""

    def keep(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Have nothing to forget."""
