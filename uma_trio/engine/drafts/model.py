"""Guesses of a small model, in a context of its own.

What it keeps of a sequence can be dropped at any time and computed again from the sequence's tokens, so
nothing depends on it. Where it fails there are wrong guesses, which are dropped like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

import numpy as np
from attrs import define, field

from uma_trio.backend.base import Backend, DecodeStatus, IntArray
from uma_trio.engine.drafts.failures import Failures
from uma_trio.engine.sequences import Sequence as Running
from uma_trio.policy.cost import Staircase
from uma_trio.policy.fairness import Path
from uma_trio.telemetry import log

MOST_UNSEEN = 16  # tokens that are computed with the first guess, in its decode
# What its decodes take follows the latest twenty or so, in steps of a tenth.
SCALE_RATE, SCALE_BOUNDS, NOTICED = 0.05, (0.5, 10.0), 0.1
NO_GUESS = 0  # a token that stands where no guess could be made: any will do

_Part = tuple["_Seen", Running, IntArray]


@define
class _Seen:
    """What the cache has of a sequence: `cells`, the first `held` with its tokens, the others `guessed`."""

    slot: int
    cells: int = 0
    held: int = 0
    guessed: list[int] = field(factory=list)


@define
class _Spending:
    """Seconds by client (:attr:`Submit.program`) since they were taken."""

    by_client: dict[Path, float] = field(factory=dict)

    def add(self, clients: Sequence[Path], seconds: float) -> None:
        """Charge `clients` in equal parts."""
        for client in clients:
            self.by_client[client] = self.by_client.get(client, 0.0) + seconds / len(clients)

    def take(self) -> dict[Path, float]:
        """Return what was spent, and begin anew."""
        spent, self.by_client = self.by_client, {}
        return spent


class DraftModel:
    """Guesses greedily by another model's `backend`, whose decodes took what `measured` says.

    Between decodes of the served model they take longer than one after another, since both need the
    same caches: `took` follows what is seen. Tokens below `n_vocab` are the same in both models.
    Every method is called on the engine's thread and raises nothing.
    """

    def __init__(
        self,
        backend: Backend,
        measured: Staircase,
        n_vocab: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.took = self._measured = measured
        self._scale = self._told_scale = 1.0
        self._backend = backend
        self._n_vocab = min(n_vocab, backend.model.n_vocab)
        self._ends = backend.vocabulary.end_tokens
        self._clock = clock
        self._seen: dict[int, _Seen] = {}
        self._free = list(range(backend.limits.n_slots))
        self._failures = Failures()
        self._spending = _Spending()

    @property
    def works(self) -> bool:
        """Whether it is asked at all: it has not failed too often of late."""
        return self._clock() >= self._failures.rests_until

    @property
    def failures(self) -> int:
        """How often it failed."""
        return self._failures.total

    def take_spent(self) -> dict[Path, float]:
        """Return the seconds that it computed for each client since this was asked last."""
        return self._spending.take()

    def keep_only(self, running: Mapping[int, Running]) -> None:
        """Drop what is kept of sequences that are gone."""
        for key in [key for key in self._seen if key not in running]:
            seen = self._seen.pop(key)
            self._remove(seen, 0)
            self._free.append(seen.slot)

    def feed(self, sequences: Iterable[Running], most: int) -> None:
        """Compute up to `most` of the tokens that it has not seen, of the first of these that lack many.

        Those that come first go before others where not all fit into its context.
        """
        parts: list[_Part] = []
        places = [(sequence, self._of(sequence)) for sequence in sequences]
        most, free = min(most, self._backend.limits.n_batch), self._free_cells
        for sequence, seen in places:
            if seen is None or (needed := _cells_needed(seen, sequence)) > free:
                continue
            free -= needed
            unseen = sequence.known - 1 - seen.held
            if unseen > MOST_UNSEEN and most > 0:
                last = seen.held + min(unseen, most)
                parts.append((seen, sequence, sequence.tokens[seen.held : last]))
                most -= last - seen.held
        if parts and self._compute(parts, want=False):
            for seen, *_ in parts:
                seen.held = seen.cells

    def ready(self, sequence: Running) -> bool:
        """Whether it has seen nearly all of a sequence, and has room for guesses.

        Changes nothing that it has seen: before a commit nobody knows yet which guesses were right.
        """
        seen = self._place(sequence)
        if seen is None or sequence.known - 1 - seen.held > MOST_UNSEEN:
            return False
        return _cells_needed(seen, sequence) <= self._free_cells

    def guess(self, wanted: Mapping[int, tuple[Running, int]]) -> dict[int, tuple[int, ...]]:
        """Return for each sequence as many guesses as are wanted, those of all made together.

        Behind an end, and where it failed, tokens stand that are no guesses.
        """
        made: dict[int, list[int]] = {key: [] for key in wanted}
        parts = self._unseen(sequence for sequence, _ in wanted.values())
        began = self._clock()
        while parts and self._compute(parts, want=True):
            likeliest = self._likeliest(len(parts))
            if likeliest is None:
                break
            going: list[_Part] = []
            for (seen, sequence, _), token in zip(parts, likeliest, strict=True):
                seen.held = sequence.known
                if token in self._ends:
                    continue
                guesses = seen.guessed = made[sequence.handle]
                guesses.append(token)
                if len(guesses) < wanted[sequence.handle][1]:
                    going.append((seen, sequence, np.array([token], np.int32)))
            n_tokens = sum(len(tokens) for *_, tokens in parts)
            parts, ended = going, self._clock()
            self._follow(ended - began, n_tokens)
            began = ended
        return {
            key: (*made[key], *[NO_GUESS] * (n - len(made[key]))) for key, (_, n) in wanted.items()
        }

    def _follow(self, seconds: float, n_tokens: int) -> None:
        """Correct what decodes take by one that took so long."""
        ratio = seconds / self._measured(n_tokens)
        self._scale += SCALE_RATE * (min(ratio, SCALE_BOUNDS[1]) - self._scale)
        if abs(self._scale - self._told_scale) > NOTICED * self._told_scale:
            scale = self._told_scale = max(self._scale, SCALE_BOUNDS[0])
            seconds_of = tuple(scale * one for one in self._measured.seconds)
            self.took = Staircase(self._measured.at, seconds_of)

    def _unseen(self, sequences: Iterable[Running]) -> list[_Part]:
        """Return what is to be computed before the next token of each can be guessed, if it fits."""
        parts: list[_Part] = []
        places = [(sequence, self._of(sequence)) for sequence in sequences]
        room, free = self._backend.limits.n_batch, self._free_cells
        for sequence, seen in places:
            if seen is None:
                continue
            unseen, needed = sequence.known - seen.held, _cells_needed(seen, sequence)
            if unseen <= room and needed <= free:
                parts.append((seen, sequence, sequence.tokens[seen.held : sequence.known]))
                room -= unseen
                free -= needed
        return parts

    @property
    def _free_cells(self) -> int:
        """How many tokens fit: sequences share no cells here, as they may in the served model."""
        return self._backend.limits.n_ctx - sum(seen.cells for seen in self._seen.values())

    def _of(self, sequence: Running) -> _Seen | None:
        """Return what is there of a sequence, without guesses that were wrong; None if it cannot be."""
        seen = self._place(sequence)
        if seen is not None:
            self._go_back(seen, sequence)
        return seen

    def _place(self, sequence: Running) -> _Seen | None:
        """Return what is there of a sequence; None if there is no place for it."""
        seen = self._seen.get(sequence.handle)
        if seen is None and self._free and self.works:
            seen = self._seen[sequence.handle] = _Seen(self._free.pop())
        return seen

    def _go_back(self, seen: _Seen, sequence: Running) -> None:
        """Keep of what is there what the sequence has, too, but for its last token."""
        most = sequence.known - 1
        for token in seen.guessed[: seen.cells - seen.held]:
            if seen.held >= most or token != sequence.tokens[seen.held]:
                break
            seen.held += 1
        seen.guessed = []
        seen.held = min(seen.held, most)
        if seen.held < seen.cells:
            self._remove(seen, seen.held)

    def _compute(self, parts: Sequence[_Part], *, want: bool) -> bool:
        """Compute these tokens, each behind what is there of its sequence; drop everything if that fails.

        With `want` there is a row of logits for the last of each.
        """
        began = self._clock()
        try:
            n = self._fill(parts, want=want)
            status = self._backend.decode(n)
            why: object = None if status == DecodeStatus.OK else f"status {status}"
        except Exception as error:
            why = error
        self._spending.add(
            [sequence.submit.program for _, sequence, _ in parts], self._clock() - began
        )
        if why is None:
            for seen, _, tokens in parts:
                seen.cells += len(tokens)
            return True
        self._failed(why)
        return False

    def _likeliest(self, n_rows: int) -> list[int] | None:
        """Return the likeliest token of each row; None if the logits cannot be read."""
        try:
            logits = self._backend.logits(n_rows)[:, : self._n_vocab]
            tokens: list[int] = logits.argmax(axis=1).tolist()
        except Exception as error:
            self._failed(error)
            return None
        return tokens

    def _fill(self, parts: Sequence[_Part], *, want: bool) -> int:
        """Write the batch; return how many rows it has."""
        batch, at = self._backend.batch, 0
        for seen, _, tokens in parts:
            end = at + len(tokens)
            batch.token[at:end] = tokens
            batch.pos[at:end] = np.arange(seen.cells, seen.cells + len(tokens))
            batch.slot[at:end] = seen.slot
            batch.want[at:end] = 0
            batch.want[end - 1] = want
            at = end
        return at

    def _failed(self, why: object) -> None:
        rest_s = self._failures.note(self._clock())
        log.get("drafts").warning(
            "the draft model failed; nothing is lost", why=str(why), asked_again_in_s=rest_s
        )
        for seen in self._seen.values():
            self._remove(seen, 0)

    def _remove(self, seen: _Seen, first: int) -> None:
        """Drop the cells of a sequence from `first` on, or all of them if that cannot be."""
        try:
            if not self._backend.kv_remove(seen.slot, first):
                self._backend.kv_remove(seen.slot)
                first = 0
        except Exception:  # it is closed, or worse
            self._failures.note(self._clock())
        seen.held = seen.cells = first
        seen.guessed = []


def _cells_needed(seen: _Seen, sequence: Running) -> int:
    """Return how many cells more it takes to see all of a sequence and to guess what follows."""
    return sequence.known + MOST_UNSEEN - seen.cells
