"""Follows one answer in a process of its own, for grammars with steps that may take any time.

The engine never waits with the GIL: steps are sent as they come, and a mask is requested in advance.
A process over its limits is killed; that ends this request alone, and `problem` says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import numpy as np

from uma_trio.confined.workers import Worker
from uma_trio.text.constraint import NONE, Ids, UnderWay, holds
from uma_trio.text.shape_worker import ACCEPT, ALLOWED, FAILED, RESET, STEP, TAKE_BACK, WORN

# A caller that cannot go on without the answer waits so long: what a step in the daemon may take.
_AT_ONCE_S: Final = 0.020
_WORD_BITS: Final = 8
# Tokens of an answer that has begun before it is followed here: each frame has a time limit of its own.
_FRAME_TOKENS: Final = 256


Started = tuple[Worker, bool]
"""A process that was told what to follow, and whether it has followed another answer."""


class Fate:
    """The latest state of an answer's process, shared with its callbacks: the problem, and whether it is reusable."""

    __slots__ = ("can_go_on", "problem")

    def __init__(self) -> None:
        self.problem: str | None = None
        self.can_go_on = False


class ApartFollower:
    """Follows one answer as :class:`.constrain.Follower` does.

    `start` returns a worker that has its instructions; called for the first mask, it never waits. `finish`
    gets the worker when this object is collected. `explain` says how the worker was ended.
    """

    #: What is allowed is found elsewhere: ask for all of it, rather than for one token.
    elsewhere: Final = True

    def __init__(
        self,
        start: Callable[[], Started | None],
        finish: Callable[[Worker, Fate], None],
        n_vocab: int,
        explain: Callable[[str], str],
    ) -> None:
        self._finish = finish
        self._start = start
        self._n_vocab = n_vocab
        self._explain = explain
        self._fate = Fate()
        self._worker: Worker | None = None
        self._failed = False
        self._steps = bytearray()
        self._mask: UnderWay | None = None

    @property
    def problem(self) -> str | None:
        return self._fate.problem

    def begin(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens of an answer that was followed here before. Never waits."""
        for first in range(0, len(tokens), _FRAME_TOKENS):
            for token in tokens[first : first + _FRAME_TOKENS]:
                self.accept(token)
            self._here()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next. Waits briefly, then returns False."""
        mask = self._here()
        try:
            ids = mask.future.result(_AT_ONCE_S)
        except TimeoutError:
            return False
        return holds(ids, token)

    def allowed(self) -> Ids:
        return self._here()()

    def deferred(self) -> Callable[[], Ids]:
        return self._here()

    def accept(self, token: int) -> None:
        self._step(ACCEPT, token)

    def take_back(self) -> None:
        self._step(TAKE_BACK, 1)

    def _step(self, step: bytes, token: int) -> None:
        self._steps += STEP.pack(step, token)
        self._mask = None

    def _here(self) -> UnderWay:
        if self._mask is None:
            self._mask = self._asked()
        return self._mask

    def _asked(self) -> UnderWay:
        if self._worker is None and not self._failed:
            started = self._start()
            if started is None:
                self._failed = True
            else:
                self._worker, is_used = started
                if is_used:
                    self._steps[:0] = STEP.pack(RESET, 0)
                weakref.finalize(self, self._finish, self._worker, self._fate).atexit = False
        found: Future[Ids] = Future()
        found.set_running_or_notify_cancel()
        if self._worker is None:
            found.set_result(NONE)
            return UnderWay(found)
        answer = self._worker.ask(bytes(self._steps))
        self._steps.clear()
        answer.add_done_callback(partial(_tell, found, self._n_vocab, self._fate, self._explain))
        return UnderWay(found)


def _tell(
    found: Future[Ids],
    n_vocab: int,
    fate: Fate,
    explain: Callable[[str], str],
    answer: Future[bytes],
) -> None:
    if answer.cancelled():
        found.set_result(NONE)
        return
    gone = answer.exception(0)
    said = b"" if gone is not None else answer.result(0)
    fate.can_go_on = said.startswith(ALLOWED)
    if gone is not None:
        fate.problem = explain(str(gone))
    elif said.startswith(FAILED):
        fate.problem = said[1:].decode() or None
    found.set_result(_ids(said, n_vocab))


def _ids(said: bytes, n_vocab: int) -> Ids:
    if not said.startswith((ALLOWED, WORN)) or (len(said) - 1) * _WORD_BITS < n_vocab:
        return NONE
    bits = np.frombuffer(said, np.uint8, offset=1)
    return np.flatnonzero(np.unpackbits(bits, count=n_vocab, bitorder="little"))
