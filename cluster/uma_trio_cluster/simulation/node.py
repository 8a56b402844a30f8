"""One machine as a fluid: prompts flow in at a rate, streams flow out at a speed, both by the number of streams."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from uma_trio.service.load import NodeLoad, weight
from uma_trio_cluster.simulation.requests import TraceRequest

_DONE_S: Final = 1e-6  # what is left of a prompt or a stream by rounding, in the time that it takes


@frozen
class Rates:
    """What a machine does with so many `streams`, in rising order: prompt tokens a second, and seconds a token.

    `token_s` is while no prompt is computed, `busy_token_s` beside one. Between two numbers of streams lie
    straight lines; beyond the last one nothing changes.
    """

    streams: tuple[int, ...]
    prompt_per_s: tuple[float, ...]
    token_s: tuple[float, ...]
    busy_token_s: tuple[float, ...]

    def of(self, values: Sequence[float], n: int) -> float:
        """Return a value for `n` streams."""
        at = bisect_right(self.streams, n)
        if at == len(self.streams):
            return values[-1]
        low, high = self.streams[at - 1], self.streams[at]
        return values[at - 1] + (values[at] - values[at - 1]) * (n - low) / (high - low)


@define(eq=False)
class Job:
    """A request on its way: when it came, and what is left of its prompt where it is."""

    asked: TraceRequest
    at: float
    left: float = 0.0
    first_at: float = math.nan
    cached: int = 0
    node: int = -1
    moved: bool = False


@define(eq=False)
class FluidNode:
    """A machine with `slots` places, which computes prompts in turn and remembers `blocks` blocks of them."""

    number: int
    rates: Rates
    slots: int
    blocks: int
    block: int
    up: bool = True
    version: int = 0  # of what comes next; an older event is stale
    prompts: deque[Job] = field(factory=deque)
    waiting: deque[Job] = field(factory=deque)
    streams: list[tuple[float, int, Job]] = field(factory=list)
    cache: OrderedDict[int, None] = field(factory=OrderedDict)
    left: float = 0.0  # tokens of all prompts here that are not computed
    _at: float = 0.0
    _said: float = 0.0  # tokens that each stream has got since the start
    _count: int = 0

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self.prompts) + len(self.streams)

    @property
    def connections(self) -> int:
        """Requests that the edge has here."""
        return self.running + len(self.waiting)

    def common(self, asked: TraceRequest) -> int:
        """Return how many tokens of a prompt are cached here."""
        n = 0
        for name in asked.blocks:
            if name not in self.cache:
                break
            n += 1
        return min(n * self.block, asked.prompt - 1)

    def backlog_s(self) -> float:
        """Return the time to compute what is left of all prompts here, as the daemon tells it."""
        return self.left / self.rates.of(self.rates.prompt_per_s, len(self.streams))

    def wait_s(self, asked: TraceRequest) -> float:
        """Return when the first token of a request would come, if it came here now; exact knowledge."""
        rate = self.rates.of(self.rates.prompt_per_s, len(self.streams))
        return (self.left + asked.prompt - self.common(asked)) / rate

    def percent(self) -> int:
        """Return what the agent says."""
        load = NodeLoad(
            slots=self.slots,
            running=self.running,
            waiting=len(self.waiting),
            backlog_s=self.backlog_s(),
        )
        return max(1, round(100 * weight(load)))

    def take(self, job: Job, now: float) -> None:
        """Accept a request."""
        self.advance(now)
        job.node = self.number
        job.cached = self.common(job.asked)
        job.left = float(job.asked.prompt - job.cached)
        self.left += job.left
        if self.running < self.slots:
            self.prompts.append(job)
        else:
            self.waiting.append(job)

    def advance(self, now: float) -> None:
        """Let the time until `now` pass. No request may end in it."""
        passed, self._at = now - self._at, now
        if passed <= 0:
            return
        n = len(self.streams)
        if self.prompts:
            done = passed * self.rates.of(self.rates.prompt_per_s, n)
            self.prompts[0].left -= done
            self.left = max(0.0, self.left - done)
        if n:
            self._said += passed / self._token_s(n)

    def next_at(self) -> float:
        """Return when a prompt or a stream ends next; infinite if nothing runs."""
        n = len(self.streams)
        times = [math.inf]
        if self.prompts:
            rate = self.rates.of(self.rates.prompt_per_s, n)
            times.append(self._at + max(0.0, self.prompts[0].left) / rate)
        if n:
            times.append(self._at + max(0.0, self.streams[0][0] - self._said) * self._token_s(n))
        return min(times)

    def end_what_is_due(self, now: float) -> list[Job]:
        """End prompts and streams that are through; return those whose first token has come."""
        self.advance(now)
        begun: list[Job] = []
        n = len(self.streams)
        said = self._said + _DONE_S / self._token_s(n)
        while self.streams and self.streams[0][0] <= said:
            heapq.heappop(self.streams)
        rounded = _DONE_S * self.rates.of(self.rates.prompt_per_s, n)
        while self.prompts and self.prompts[0].left <= rounded:
            job = self.prompts.popleft()
            job.first_at = now
            begun.append(job)
            self._remember(job.asked)
            self._count += 1
            heapq.heappush(self.streams, (self._said + job.asked.answer, self._count, job))
        while self.waiting and self.running < self.slots:
            job = self.waiting.popleft()
            more = max(0, self.common(job.asked) - job.cached)
            job.cached += more
            job.left -= more
            self.left = max(0.0, self.left - more)
            self.prompts.append(job)
        return begun

    def die(self) -> tuple[list[Job], int]:
        """Lose everything; return the requests without a token, and the number of streams that ended early."""
        again, lost = [*self.prompts, *self.waiting], len(self.streams)
        self.prompts.clear()
        self.waiting.clear()
        self.streams.clear()
        self.cache.clear()
        self.left = 0.0
        self.up = False
        return again, lost

    def _token_s(self, n: int) -> float:
        rates = self.rates
        return rates.of(rates.busy_token_s if self.prompts else rates.token_s, n)

    def _remember(self, asked: TraceRequest) -> None:
        for name in asked.blocks:
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.blocks:
            self.cache.popitem(last=False)
