"""The queue of one encoder: requests whose texts become vectors or scores, and the batch that is under way.

Users take turns by the time that their texts take: a batch takes inputs of the user that had least of it, as long as its
longest part is short (:data:`PART_S`). Larger batches are no faster on a CPU, and a batch cannot be left for another
before its end. A long input makes long parts, which readers wait for: they come the more rarely.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
from attrs import define, field

from uma_trio.backend.base import FloatArray
from uma_trio.backend.encoder import EncodeFailed, EncoderModel
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import (
    Encode,
    Encoded,
    Explain,
    InboxMessage,
    Inspect,
    Prefix,
    StopEncoding,
)
from uma_trio.machine.background import Background
from uma_trio.machine.work import Claim, Grant, Work
from uma_trio.observe.figures import EncodingFigures
from uma_trio.observe.records import (
    Phase,
    PrefixReport,
    Recorded,
    RequestRecord,
    Snapshot,
    Wait,
)

BATCH_TOKENS: Final = 256
"""Most tokens of a batch with more than one input."""
PART_S: Final = 0.005
"""Aimed at for the longest part of a batch: so long a reader's tick waits for it at most."""
_REMEMBERED: Final = 256  # requests that ended, and users that have nothing to be computed
_NAMED: Final = 8  # of those that are computed first
_FIRST_TOKEN_S: Final = 1e-4  # taken for the time of a token until one was computed
_LEARNING: Final = 0.2  # the weight of the latest batch

Post = Callable[[Callable[[], None]], None]


@define(eq=False)
class _Job:
    """A request whose inputs are encoded. `order` has the numbers of those not yet begun, next last.

    So many `tokens` are computed, in so many `batches`, in `computing_s`.
    """

    asked: Encode
    order: list[int]
    vectors: FloatArray
    left: int
    n_tokens: int
    tokens: int = 0
    batches: int = 0
    computing_s: float = 0.0
    began: float | None = None

    @property
    def next_tokens(self) -> int:
        """The length of the input that is next."""
        return len(self.asked.inputs[self.order[-1]])


@define(eq=False)
class Encodings:
    """The queue of one encoder, and the batch that is under way. For the engine's thread.

    `post` has a function called on trio's thread with the next results. The machine sets `delayed_by`.
    """

    model: EncoderModel
    post: Post
    clock: Callable[[], float]
    figures: EncodingFigures = field(factory=EncodingFigures)
    delayed_by: Work | None = field(default=None, init=False)
    awaits_masks: bool = field(default=False, init=False)
    _users: OrderedDict[str, deque[_Job]] = field(factory=OrderedDict, init=False)
    _used_s: OrderedDict[str, float] = field(factory=OrderedDict, init=False)
    _token_s: float = field(default=_FIRST_TOKEN_S, init=False)
    _jobs: dict[int, _Job] = field(factory=dict, init=False)
    _past: deque[RequestRecord] = field(factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    _batch: list[tuple[_Job, int]] = field(factory=list, init=False)
    _batch_s: float = field(default=0.0, init=False)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._jobs)

    @property
    def running(self) -> Mapping[int, object]:
        """The requests of which something is to be computed, by their handles."""
        return self._jobs

    def submit(self, asked: Encode) -> None:
        """Take in a request."""
        n, user = len(asked.inputs), asked.user
        vectors = np.empty((n, self.model.info.width), np.float32)
        job = self._jobs[asked.handle] = _Job(
            asked, asked.order, vectors, n, sum(map(len, asked.inputs))
        )
        if user not in self._users:
            # A user that returns has no claim to what others used meanwhile.
            least = min((self._used_s[each] for each in self._users), default=0.0)
            self._used_s[user] = max(self._used_s.pop(user, 0.0), least)
            self._users[user] = deque()
        self._used_s[user] += asked.owes_s
        self._users[user].append(job)

    def cancel(self, handle: int) -> None:
        """Forget a request. Unknown handles are ignored."""
        job = self._jobs.get(handle)
        if job is None:
            return
        self._gone(job, "cancelled")
        if self._batch and all(each.asked.handle not in self._jobs for each, _ in self._batch):
            self._batch.clear()
            self.model.drop()

    def next_s(self) -> float:
        """Return the predicted seconds of the next part; 0 if there is nothing to compute, or if it is unknown."""
        if self._jobs and not self._batch:
            self._begin()
        return self.model.next_s() if self._batch else 0.0

    def advance(self, most_s: float) -> float:
        """Compute parts of a batch for about `most_s`, by prediction, and one at least; return what that took.

        It ends with the batch.
        """
        if not self._jobs:
            return 0.0
        began = self.clock()
        try:
            if not self._batch:
                self._begin()
            vectors = self.model.advance(most_s)
        except EncodeFailed as error:
            self._failed("E_RUNTIME_001", f"{error}; send the request again")
            vectors = None
        spent = self.clock() - began
        self._batch_s += spent
        if vectors is not None:
            self._ended(vectors)
        return spent

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error. The model is not touched."""
        for job in list(self._jobs.values()):
            self._end(job, Encoded(None, code, message))
        self._batch.clear()

    # --- reports of requests ---

    def reports(self, most: int) -> tuple[list[RequestRecord], list[RequestRecord]]:
        """Return the records of requests that were begun, and of others, `most` of each."""
        jobs = self._jobs.values()
        begun = [job for job in jobs if job.began is not None][:most]
        queued = [job for job in jobs if job.began is None][:most]
        return [self._record(job) for job in begun], [self._record(job) for job in queued]

    def records(self, handle: int | None) -> tuple[RequestRecord, ...]:
        """Return the records of the latest requests, or of one of them."""
        live = (self._record(job) for job in self._jobs.values())
        every = [*self._past, *islice(live, _REMEMBERED)]
        return tuple(each for each in every if handle is None or each.handle == handle)

    def _record(self, job: _Job, reason: str = "", code: str | None = None) -> RequestRecord:
        asked = job.asked
        return RequestRecord(
            handle=asked.handle,
            lane="background",
            state=reason or _state(job),
            prompt_tokens=job.n_tokens,
            computed_tokens=job.tokens,
            submitted=asked.submitted,
            admitted=job.began,
            ended=self.clock() if reason else None,
            wait=None if reason else self._wait(job),
            prefill=Phase(job.tokens, job.batches, job.computing_s),
            reason=reason,
            code=code,
            awaits="nothing",
        )

    def _wait(self, job: _Job) -> Wait | None:
        if self.delayed_by is not None and self.delayed_by.running:
            return Wait("another model is computed", tuple(self.delayed_by.running)[:_NAMED])
        others = {each.asked.handle: None for each, _ in self._batch if each is not job}
        if not others or any(each is job for each, _ in self._batch):
            return None
        return Wait("texts of others are computed", tuple(others)[:_NAMED])

    # --- batches ---

    def _begin(self) -> None:
        most = min(BATCH_TOKENS, self.model.rows_within(PART_S))
        batch, n_tokens, now = self._batch, 0, self.clock()
        while self._users and len(batch) < self.model.info.max_inputs:
            user = min(self._users, key=self._used_s.__getitem__)
            job = self._users[user][0]
            n_tokens += job.next_tokens
            if batch and n_tokens > most:
                break
            self._used_s[user] += job.next_tokens * self._token_s
            batch.append((job, job.order.pop()))
            job.began = now if job.began is None else job.began
            if not job.order:
                self._leave(job)
        self._batch_s = 0.0
        self.model.begin(
            [job.asked.inputs[index] for job, index in batch], [job.asked.user for job, _ in batch]
        )

    def _ended(self, vectors: FloatArray) -> None:
        batch, self._batch = self._batch, []
        n_tokens = sum(len(job.asked.inputs[index]) for job, index in batch)
        self.figures.tokens += n_tokens
        token_s = self._batch_s / n_tokens
        if self._token_s == _FIRST_TOKEN_S:
            self._token_s = token_s or _FIRST_TOKEN_S
        else:
            self._token_s += _LEARNING * (token_s - self._token_s)
        for job in dict.fromkeys(job for job, _ in batch):
            job.batches += 1
        for (job, index), vector in zip(batch, vectors, strict=True):
            n = len(job.asked.inputs[index])
            job.tokens, job.computing_s = job.tokens + n, job.computing_s + n * token_s
            if job.asked.handle not in self._jobs:
                continue  # cancelled meanwhile
            job.vectors[index] = vector
            job.left -= 1
            if not job.left:
                self._end(job, Encoded(job.vectors))

    def _failed(self, code: str, message: str) -> None:
        batch, self._batch = self._batch, []
        for job, _ in batch:
            if job.asked.handle in self._jobs:
                self._end(job, Encoded(None, code, message))

    def _end(self, job: _Job, result: Encoded) -> None:
        self._gone(job, "error" if result.code else "stop", result.code or None)
        reply = job.asked.reply
        self.post(lambda: reply(result))

    def _gone(self, job: _Job, reason: str, code: str | None = None) -> None:
        self._jobs.pop(job.asked.handle, None)
        self._leave(job)
        self._past.append(self._record(job, reason, code))

    def _leave(self, job: _Job) -> None:
        user = job.asked.user
        jobs = self._users.get(user)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del self._users[user]
            self._used_s.move_to_end(user)
            while len(self._used_s) > len(self._users) + _REMEMBERED:
                self._used_s.pop(next(each for each in self._used_s if each not in self._users))


def _state(job: _Job) -> str:
    return "queued" if job.began is None else "prefill"


LOOK_S: Final = 0.005
"""Within a turn the encoder looks after so long whether a message came for any engine."""
LOOKS: Final = 10
"""So many times, where none came: then the turn ends. A turn costs 0.3 ms, a look 0.05."""
_MOST: Final = 256  # requests that a snapshot describes of each kind


class EncoderEngine:
    """The :class:`uma_trio.machine.work.Work` of one encoder."""

    #: Nothing that it waits for only needs time.
    rest_s = math.inf
    can_stop = False
    background = Background()

    def __init__(
        self,
        queue: Encodings,
        inbox: Inbox,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self.queue, self.inbox = queue, inbox
        self._post, self._clock = post, clock

    @property
    def running(self) -> Mapping[int, object]:
        return self.queue.running

    @property
    def delayed_by(self) -> Work | None:
        return self.queue.delayed_by

    @delayed_by.setter
    def delayed_by(self, work: Work | None) -> None:
        self.queue.delayed_by = work

    @property
    def is_called(self) -> bool:
        return self.inbox.is_rung

    def claim(self, now: float) -> Claim:
        self._take_in()
        if not self.queue.has_work:
            return Claim()
        return Claim(has_work=True, least_s=self.queue.next_s(), kind="background")

    def advance(self, grant: Grant) -> bool:
        self._take_in()
        left_s = min(grant.most_s, LOOKS * LOOK_S)
        queue, began = self.queue, self._clock()
        if not queue.has_work:
            return False
        while queue.has_work:
            queue.advance(min(left_s, LOOK_S))
            left_s -= self._clock() - began
            began = self._clock()
            if self.inbox.bell.rang or queue.next_s() > left_s or left_s <= 0:
                break
        return True

    def interrupt(self) -> None:
        """Do nothing: the time of each part is measured by itself."""

    def publish(self) -> None:
        """Do nothing: results are posted at once, and only `claim` and `advance` may take in what comes."""

    def close(self) -> None:
        self.inbox.close()

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error, also those that were not taken in."""
        self._take_in()
        self.queue.fail_all(code, message)

    def _take_in(self) -> None:
        self.inbox.is_rung = False
        for message in self.inbox.drain():
            self._handle(message)

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case Encode():
                self.queue.submit(message)
            case StopEncoding(handle):
                self.queue.cancel(handle)
            case Inspect(tell):
                self._post(partial(tell, self._snapshot()))
            case Explain(explain, handle):
                recorded = Recorded(self._clock(), self.queue.records(handle), ())
                self._post(partial(explain, recorded))
            case Prefix(report):
                self._post(partial(report, PrefixReport(0, 0, ())))

    def _snapshot(self) -> Snapshot:
        running, queued = self.queue.reports(_MOST)
        return Snapshot(
            at=self._clock(),
            tick=-1,
            running=tuple(running),
            queue=tuple(queued),
            waiting=len(queued),
        )
