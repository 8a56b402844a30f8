"""The way out of the engine: results wait in one queue for `publish`.

Time between two decodes is lost, so a commit only appends its results to this queue.
:meth:`Publisher.publish` decodes text, wakes streams, and writes metrics and the trace. It runs
while the next tick is computed, or on a CPU immediately before it. An entry refers to its sequence
only for values that do not change, and for the text decoder, which belongs to the publisher unless
the stream has stop strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from attrs import define, evolve, frozen

from uma_trio.engine.chunk import Chunk
from uma_trio.engine.messages import (
    Finished,
    PromptDone,
    PromptProgress,
    Sink,
    StreamItem,
    TokenLogprobs,
    TokenOut,
)
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.sampling import NonFinite
from uma_trio.engine.sequences import Delivery, Sequence
from uma_trio.observe.metrics import Metrics

FIRST_FEW = 5
# How a request ends that the engine itself fails at; the exception is logged.
FAILED_CODE, FAILED_AT = "E_RUNTIME_006", "the engine failed at this request"


@frozen(eq=False)
class Scored:
    """What a `chunk` of a sequence's prompt told of the tokens behind its own, among `scores` by row."""

    sequence: Sequence
    chunk: Chunk
    scores: Mapping[int, TokenLogprobs]


@frozen(eq=False)
class Progress:
    """How much of its prompt is computed, for the stream of a `sequence` that asked."""

    sequence: Sequence
    item: PromptProgress


@frozen(eq=False)
class Ending:
    """The end of a request: its terminal item, but for the text that is still held back."""

    sequence: Sequence
    finished: Finished


@frozen(eq=False)
class Refused:
    """The end of a request that was never in the engine."""

    sink: Sink
    finished: Finished


@frozen(eq=False)
class Answer:
    """`call` delivers an answer, on trio's thread."""

    call: Callable[[], None]


@frozen(eq=False)
class TickFigures:
    """`write` writes metrics or the trace, after the streams have been woken."""

    write: Callable[[], None]


Publication = Delivery | Scored | Progress | Ending | Refused | Answer | TickFigures


@define(eq=False)
class _Start:
    """A stream whose first token was sampled `at`; `over` says that its start-up window is."""

    at: float
    worst_s: float | None = None  # the longest inter-token latency that began in the window
    over: bool = False


class Publisher:
    """The queue of results. For the engine's thread only.

    `startup_s` is the length of the start-up window of a stream; the longest time between two shown
    tokens in that window is counted separately. `failed` is called with a request whose tokens
    cannot be decoded, and the exception; the request must be ended and gets its terminal item only.
    `ended` is called with each request and its terminal item when it is sent.
    """

    def __init__(
        self,
        outlet: Outlet,
        metrics: Metrics,
        startup_s: float,
        failed: Callable[[int, Exception], None],
        ended: Callable[[Sequence, Finished], None],
    ) -> None:
        self._outlet = outlet
        self._metrics = metrics
        self._startup_s = startup_s
        self._failed = failed
        self._ended = ended
        self._broken: set[int] = set()  # streams that failed and have not ended yet
        self._queue: list[Publication] = []
        self._starts: dict[int, _Start] = {}  # streams that are looked at token by token

    def add(self, publication: Publication) -> None:
        """Publish this with the next :meth:`publish`."""
        self._queue.append(publication)

    def publish(self) -> None:
        """Publish in order: all streams with one wake of trio, then metrics and trace.

        What cannot be published of one request ends that request, and no item of another is lost.
        """
        queue, self._queue = self._queue, []
        items: list[tuple[Sink, StreamItem]] = []
        calls: list[Callable[[], None]] = []
        ended: list[tuple[Sequence, Finished]] = []
        for publication in queue:
            match publication:
                case Delivery():
                    self._add_items(publication, items)
                case Scored():
                    self._note(publication)
                case Progress(sequence, item):
                    if sequence.handle not in self._broken:
                        items.append((sequence.submit.sink, item))
                case Ending(sequence, finished):
                    terminal = self._terminal(sequence, finished)
                    items.append((sequence.submit.sink, terminal))
                    ended.append((sequence, terminal))
                case Refused(sink, finished):
                    items.append((sink, finished))
                case Answer(call):
                    calls.append(call)
        self._outlet.deliver(items, calls)
        # From here on an exception ends the engine, and loses no item.
        for sequence, terminal in ended:
            self._ended(sequence, terminal)
        self._measure(queue)

    def _add_items(self, delivery: Delivery, items: list[tuple[Sink, StreamItem]]) -> None:
        sequence, texts, shows = delivery.sequence, delivery.texts, delivery.shows
        if self._broken and sequence.handle in self._broken:
            return
        sink = sequence.submit.sink
        try:
            if delivery.first:
                items.append((sink, _prompt_done(delivery)))
            for n, (token, row, described) in enumerate(delivery.tokens):
                text = sequence.text.push(token) if texts is None else texts[n]
                logprobs = described.get(row) if described else None
                show_at = 0.0 if shows is None else shows[n]
                items.append((sink, TokenOut(token, text, logprobs, show_at)))
        except (
            Exception
        ) as error:  # its vocabulary, stop strings or logprobs: no other request's business
            self._broken.add(sequence.handle)
            self._failed(sequence.handle, error)

    def _note(self, scored: Scored) -> None:
        sequence, chunk, scores = scored.sequence, scored.chunk, scored.scores
        try:
            found = [scores[chunk.first_row + n] for n in range(chunk.n_scored)]
            # What was computed before it was preempted is there already.
            sequence.scores[chunk.start : chunk.start + chunk.n_scored] = found
            if any(math.isnan(one.logprob) for one in found):
                raise NonFinite("the prompt has logits that are not numbers")
        except Exception as error:
            self._broken.add(sequence.handle)
            self._failed(sequence.handle, error)

    def _terminal(self, sequence: Sequence, finished: Finished) -> Finished:
        try:
            text = sequence.text.finish()
        except Exception as error:
            self._broken.add(sequence.handle)
            self._failed(sequence.handle, error)
        else:
            if sequence.handle not in self._broken:
                return evolve(finished, text=text, stop=sequence.text.stopped)
        self._broken.discard(sequence.handle)
        return evolve(finished, reason="error", code=FAILED_CODE, message=FAILED_AT)

    def _measure(self, queue: list[Publication]) -> None:
        streams: dict[float, int] = {}  # those of a tick mostly waited the same time
        for publication in queue:
            match publication:
                case Delivery():
                    itl_s, handle = publication.itl_s, publication.sequence.handle
                    if itl_s is not None:
                        n = len(publication.tokens) or 1  # none: sampled that nothing follows
                        streams[itl_s / n] = streams.get(itl_s / n, 0) + n
                    if publication.first:
                        self._first_token(publication)
                    elif (start := self._starts.get(handle)) is not None:
                        self._measure_start(start, publication)
                case Ending(sequence):
                    start = self._starts.pop(sequence.handle, None)
                    if start is not None:
                        self._end_window(start)
                case TickFigures(write):
                    write()
        for itl_s, n in streams.items():
            self._metrics.inter_token(itl_s, n)

    def _first_token(self, delivery: Delivery) -> None:
        submit = delivery.sequence.submit
        waited = delivery.at - submit.submitted
        self._metrics.first_token(waited, _queued_s(delivery.sequence))
        self._metrics.compare("ttft", waited, submit.targets.ttft_s)
        if delivery.tokens:
            self._starts[submit.handle] = _Start(delivery.at)

    def _measure_start(self, start: _Start, delivery: Delivery) -> None:
        metrics, submit, gap_s = self._metrics, delivery.sequence.submit, delivery.gap_s
        shown_at = delivery.at + delivery.held_s
        if delivery.lane == "interactive":
            if delivery.nth - len(delivery.tokens) < FIRST_FEW <= delivery.nth:
                metrics.observe("ttf5_ms", shown_at - submit.submitted)
            if gap_s is not None and not start.over:
                if shown_at - gap_s - start.at <= self._startup_s:
                    start.worst_s = max(start.worst_s or 0.0, gap_s)
                else:
                    self._end_window(start)
        if submit.targets.itl_s is not None:
            if gap_s is not None:
                metrics.compare("tbt", gap_s, submit.targets.itl_s)
        elif start.over and delivery.nth >= FIRST_FEW:
            del self._starts[submit.handle]

    def _end_window(self, start: _Start) -> None:
        if not start.over and start.worst_s is not None:
            self._metrics.observe("worst_pause_ms", start.worst_s)
        start.over = True


def _prompt_done(delivery: Delivery) -> PromptDone:
    sequence = delivery.sequence
    asked = sequence.submit.params.prompt_logprobs is not None
    scores = tuple(sequence.scores) if asked else None
    return PromptDone(delivery.at, sequence.cached_tokens, _queued_s(sequence), scores)


def _queued_s(sequence: Sequence) -> float:
    return 0.0 if sequence.admitted is None else sequence.admitted - sequence.submit.submitted
