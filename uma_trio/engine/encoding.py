"""Vectors of whole texts, made by the engine's thread in the time that readers leave it.

Who asks takes turns by user. A step takes a few inputs: of whose turn it is first, and then of whoever is next, as
long as its longest part is short (:data:`PART_S`). Larger steps are no faster on a CPU, and a step cannot be left
for another before its end. A long input makes long parts, which readers wait for: they come the more rarely.

While there is work the engine shows what is read a step apart (:meth:`uma_trio.engine.planner.Planner.steps`), so that
the time that parts leave of a step is not lost.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from attrs import define, field

from uma_trio.backend.base import FloatArray
from uma_trio.backend.encoder import EncodeFailed, EncoderModel
from uma_trio.engine.messages import Encode, Encoded
from uma_trio.engine.sequences import Sequence as Running
from uma_trio.engine.side import Yields
from uma_trio.telemetry.encoding import EncodingFigures

STEP_TOKENS: Final = 256
"""Most tokens of a step with more than one input."""
PART_S: Final = 0.005
"""Aimed at for the longest part of a step: so long a reader's tick waits for it at most."""

ENCODE_S: Final = 0.005
"""While nothing else is to be computed, encoders look after so long whether a message came."""
IDLE_TURNS: Final = 10
"""So many times, where none came: then the engine has a turn. A turn costs 0.3 ms, a look 0.05."""

Post = Callable[[Callable[[], None]], None]


@define(eq=False)
class _Job:
    """A request whose inputs are encoded. `order` has the numbers of those not yet begun, next last."""

    asked: Encode
    order: list[int]
    vectors: FloatArray
    left: int

    @property
    def next_tokens(self) -> int:
        """The length of the input that is next."""
        return len(self.asked.inputs[self.order[-1]])


@define(eq=False)
class Encodings:
    """The queue of one encoder, and the step that is under way. For the engine's thread.

    `post` has a function called on trio's thread with the next results.
    """

    model: EncoderModel
    post: Post
    clock: Callable[[], float]
    figures: EncodingFigures = field(factory=EncodingFigures)
    _users: OrderedDict[str, deque[_Job]] = field(factory=OrderedDict, init=False)
    _jobs: dict[int, _Job] = field(factory=dict, init=False)
    _step: list[tuple[_Job, int]] = field(factory=list, init=False)
    _left_s: float = field(default=0.0, init=False)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._jobs)

    @property
    def is_in_step(self) -> bool:
        """Whether a step is under way."""
        return bool(self._step)

    def submit(self, asked: Encode) -> None:
        """Take in a request."""
        n = len(asked.inputs)
        vectors = np.empty((n, self.model.info.width), np.float32)
        job = self._jobs[asked.handle] = _Job(asked, asked.order, vectors, n)
        self._users.setdefault(asked.user, deque()).append(job)

    def cancel(self, handle: int) -> None:
        """Forget a request. Unknown handles are ignored."""
        job = self._jobs.pop(handle, None)
        if job is None:
            return
        self._leave(job)
        if self._step and all(each.asked.handle not in self._jobs for each, _ in self._step):
            self._step.clear()
            self.model.drop()

    def next_s(self) -> float:
        """Return the predicted seconds of the next part; 0 if no step is under way."""
        return self.model.next_s() if self._step else 0.0

    def advance(self, most_s: float) -> float:
        """Compute parts for about `most_s`, by prediction; return the seconds that were spent.

        A part that takes longer, of a long input, is begun when what earlier calls left is enough for it.
        """
        if not self._jobs:
            return 0.0
        allowed_s, self._left_s = most_s + self._left_s, 0.0
        began = self.clock()
        try:
            if not self._step:
                self._begin()
            if self.next_s() > allowed_s:
                self._left_s = allowed_s
                return 0.0
            vectors = self.model.advance(allowed_s)
            if vectors is not None:
                self._ended(vectors)
        except EncodeFailed as error:
            self._failed("E_RUNTIME_001", f"{error}; send the request again")
        spent = self.clock() - began
        self.figures.spent(spent)
        return spent

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error. The model is not touched."""
        for job in list(self._jobs.values()):
            self._end(job, Encoded(None, code, message))
        self._step.clear()

    def _begin(self) -> None:
        """Choose the inputs of a step and begin it."""
        most = min(STEP_TOKENS, self.model.rows_within(PART_S))
        step, n_tokens = self._step, 0
        while self._users and len(step) < self.model.info.max_inputs:
            user, jobs = next(iter(self._users.items()))
            job = jobs[0]
            n_tokens += job.next_tokens
            if step and n_tokens > most:
                break
            step.append((job, job.order.pop()))
            self._users.move_to_end(user)
            if not job.order:
                self._leave(job)
        self.model.begin(
            [job.asked.inputs[index] for job, index in step], [job.asked.user for job, _ in step]
        )

    def _ended(self, vectors: FloatArray) -> None:
        """Hand the results of a step to those whose they are."""
        step, self._step = self._step, []
        n_tokens = sum(len(job.asked.inputs[index]) for job, index in step)
        self.figures.encoded(len(step), n_tokens)
        for (job, index), vector in zip(step, vectors, strict=True):
            if job.asked.handle not in self._jobs:
                continue  # cancelled meanwhile
            job.vectors[index] = vector
            job.left -= 1
            if not job.left:
                self._end(job, Encoded(job.vectors))

    def _failed(self, code: str, message: str) -> None:
        """End those who have an input in the step that failed."""
        step, self._step = self._step, []
        for job, _ in step:
            if job.asked.handle in self._jobs:
                self._end(job, Encoded(None, code, message))

    def _end(self, job: _Job, result: Encoded) -> None:
        self._jobs.pop(job.asked.handle, None)
        self._leave(job)
        reply = job.asked.reply
        self.post(lambda: reply(result))

    def _leave(self, job: _Job) -> None:
        """Begin no further input of a request."""
        jobs = self._users.get(job.asked.user)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del self._users[job.asked.user]


@define(eq=False)
class Encoding:
    """The side work of all encoders together (:class:`uma_trio.engine.side.SideWork`)."""

    encodings: Sequence[Encodings]
    #: Whether a message came for any engine since this one had a turn.
    called: Callable[[], bool] = lambda: False
    #: While no tick of this engine is computed, readers of other models are not delayed by more.
    idle_s: float = math.inf
    yields_to: Yields = "ticks"
    makes_room: bool = False

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return any(each.has_work for each in self.encodings)

    def look(self, running: Mapping[int, Running], *, alone: bool) -> bool:
        """Whether there is anything to compute."""
        return self.has_work

    def do(self, most_s: float) -> float:
        """Let encoders compute for at most `most_s` together; return the seconds that were spent."""
        spent = 0.0
        for each in self.encodings:
            while each.has_work and spent < most_s:
                spent += each.advance(most_s - spent)
                if each.is_in_step:
                    break  # what is left is too little for its next part
        return spent

    def falls_short(self, left_s: float) -> bool:
        """What is too little for a part is put by in the queue of its encoder."""
        return False

    def do_idle(self, most_s: float) -> float | None:
        """Compute until a message comes, or for a moment."""
        if not self.has_work:
            return None
        for _ in range(max(1, int(min(IDLE_TURNS, self.idle_s / ENCODE_S)))):
            self.do(ENCODE_S)
            if not self.has_work or self.called():
                break
        return 0.0
