"""The way out: what the outside is to hear of the engine waits in one queue for `publish`.

Between two decodes the machine computes nothing, so a commit only puts what happened into this
queue. Text is decoded, streams are woken, metrics and the trace are written by
:meth:`Publisher.publish`, which runs while the next tick is computed, or right before on a CPU. An
entry refers to its sequence for what does not change any more, and for the text decoder, which is the
publisher's alone unless the stream has stop strings.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from uma_trio.engine.messages import Finished, PromptDone, Sink, StreamItem, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.sequences import Delivery, Sequence
from uma_trio.telemetry.metrics import Metrics

FIRST_FEW = 5


@frozen(eq=False)
class Ending:
    """The end of a request: its terminal item, but for the text that is still held back."""

    sequence: Sequence
    finished: Finished


@frozen(eq=False)
class Answer:
    """`call` passes an answer on, on trio's thread."""

    call: Callable[[], None]


@frozen(eq=False)
class Figures:
    """`write` writes metrics or the trace, once the streams have been woken."""

    write: Callable[[], None]


Publication = Delivery | Ending | Answer | Figures


class Publisher:
    """The one queue between what happens and who hears of it. For the engine's thread only.

    `startup_s` is how long a stream is in its start-up window; the longest time between two tokens
    that were shown in that window is counted apart.
    """

    def __init__(self, outlet: Outlet, metrics: Metrics, startup_s: float) -> None:
        self._outlet = outlet
        self._metrics = metrics
        self._startup_s = startup_s
        self._queue: list[Publication] = []
        self._worst: dict[int, float] = {}  # gap of streams in their start-up window

    def add(self, publication: Publication) -> None:
        """Publish this with the next :meth:`publish`."""
        self._queue.append(publication)

    def publish(self) -> None:
        """Publish everything, in order: all streams with one wake of trio, then the figures."""
        queue, self._queue = self._queue, []
        items: list[tuple[Sink, StreamItem]] = []
        calls: list[Callable[[], None]] = []
        for publication in queue:
            match publication:
                case Delivery():
                    _add_items(publication, items)
                case Ending(sequence, finished):
                    text = sequence.text.finish()
                    last = evolve(finished, text=text, stop=sequence.text.stopped)
                    items.append((sequence.submit.sink, last))
                case Answer(call):
                    calls.append(call)
        self._outlet.deliver(items, calls)
        for publication in queue:
            match publication:
                case Delivery():
                    self._measure(publication)
                case Ending(sequence):
                    self._end_startup(sequence.handle)
                case Figures(write):
                    write()

    def _measure(self, delivery: Delivery) -> None:
        """Write the latencies of one stream's tokens into the metrics."""
        metrics, itl_s = self._metrics, delivery.itl_s
        submit, targets = delivery.sequence.submit, delivery.sequence.submit.targets
        waited = delivery.at - submit.submitted
        if delivery.first:
            metrics.first_token(waited)
            metrics.promise.compare("ttft", waited, targets.ttft_s)
            if delivery.tokens:
                self._worst[submit.handle] = 0.0
        gap_s = delivery.gap_s
        if itl_s is None or gap_s is None:
            return
        n = len(delivery.tokens) or 1  # none where it was sampled that nothing follows
        metrics.inter_token(itl_s, delivery.lane, n)
        metrics.promise.compare("tbt", gap_s, targets.itl_s)
        if delivery.lane == "interactive":
            if delivery.nth - len(delivery.tokens) < FIRST_FEW <= delivery.nth:
                metrics.promise.first_five(waited + delivery.held_s)
            self._note_startup(delivery, gap_s)

    def _note_startup(self, delivery: Delivery, gap_s: float) -> None:
        """Note how long a token let wait if its wait began in the start-up window of its stream."""
        handle, first = delivery.sequence.handle, delivery.sequence.first_token
        worst = self._worst.get(handle)
        if worst is None or first is None:
            return
        if delivery.at + delivery.held_s - gap_s - first <= self._startup_s:
            self._worst[handle] = max(worst, gap_s)
        else:
            self._end_startup(handle)

    def _end_startup(self, handle: int) -> None:
        worst = self._worst.pop(handle, None)
        if worst is not None:
            self._metrics.promise.startup_itl(worst)


def _add_items(delivery: Delivery, items: list[tuple[Sink, StreamItem]]) -> None:
    """Add what a stream is sent; decode the text of its tokens if that is still to be done."""
    sink, push = delivery.sequence.submit.sink, delivery.sequence.text.push
    if delivery.first:
        items.append((sink, PromptDone(delivery.at)))
    texts, shows = delivery.texts, delivery.shows
    for n, drawn in enumerate(delivery.tokens):
        text = push(drawn.token) if texts is None else texts[n]
        show_at = 0.0 if shows is None else shows[n]
        items.append((sink, TokenOut(drawn.token, text, drawn.logprobs, show_at)))
