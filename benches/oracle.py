"""The daemon with an oracle for drafts: run by the benchmarks, never by hand.

    python -m benches.oracle 0.7 serve --model … --socket …

The oracle knows every answer that was given before to the same prompt. It guesses what follows there,
each token spoilt with the same chance, so that a benchmark decides how often guesses are right: what
drafts are worth then depends on the policy and the machine, and not on a text. Prompts that were
never answered are looked up as without it. What the daemon learns of guesses, and whether it
computes them, is left to the daemon.
"""

from __future__ import annotations

import sys

import numpy as np

from uma_trio.backend.base import IntArray
from uma_trio.engine.chunk import NO_DRAFT, OWN_TEXT, Draft, DraftOrigin
from uma_trio.engine.drafts import Drafter, drafter
from uma_trio.engine.sequences import Sequence

_MATCH = 8  # how long a match the oracle claims: one kind of guess, whose chances are learnt


class Oracle(Drafter):
    """Guesses by earlier answers to the same prompt; each guess is right with `acceptance`."""

    def __init__(self, acceptance: float, seed: int = 0) -> None:
        super().__init__()
        self._acceptance = acceptance
        self._random = np.random.default_rng(seed)
        self._answers: dict[bytes, IntArray] = {}

    def keep(self, sequence: Sequence) -> None:
        """Keep the answer to a prompt that is new, spoilt."""
        super().keep(sequence)
        prompt = sequence.tokens[: sequence.n_prompt].tobytes()
        if prompt not in self._answers:
            answer = sequence.tokens[sequence.n_prompt : sequence.known]
            spoilt = self._random.random(len(answer)) >= self._acceptance
            self._answers[prompt] = np.where(spoilt, answer ^ 1, answer).astype(np.int32)

    def _guess(
        self, guessed: drafter._Guessed, sequence: Sequence, known: int, credit: int
    ) -> Draft:
        answer = self._answers.get(sequence.tokens[: sequence.n_prompt].tobytes())
        if answer is None:
            return super()._guess(guessed, sequence, known, credit)
        most = min(drafter.MOST_DRAFTS, credit - 1, len(sequence.tokens) - known - 1)
        place = known - sequence.n_prompt
        guesses = tuple(answer[place : place + max(0, most)].tolist())
        return Draft(guesses, origin=DraftOrigin(OWN_TEXT, _MATCH)) if guesses else NO_DRAFT


def main() -> None:
    """Run the daemon as the rest of the command line says."""
    from uma_trio.config.hardware import limit_spinning

    limit_spinning()  # as the daemon does, which would be too late once the library is loaded
    from uma_trio.cli.main import main as cli

    acceptance, *arguments = sys.argv[1:]
    drafter.Drafter = lambda: Oracle(float(acceptance))  # type: ignore[assignment,misc]
    sys.argv = ["uma-trio", *arguments]
    cli()


if __name__ == "__main__":
    main()
