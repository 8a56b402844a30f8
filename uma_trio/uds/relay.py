"""One request on its way over the socket: what the service yields, as frames.

:class:`_Frames` is the hot path of the socket side. A tick's items of one request cost one call, one
`send` and a credit message for each answer; no task is run for them, and nothing waits, locks or is
looked up per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, assert_never

import numpy as np
import trio
from attrs import evolve

import uma_protocol
from uma_protocol import (
    CODES,
    Code,
    Embed,
    Eos,
    Event,
    Fatality,
    Generate,
    Loading,
    LocalProtocolError,
    Rerank,
    Score,
    Scores,
    Timings,
    Usage,
    Vectors,
)
from uma_trio.engine.messages import Finished, PromptDone, PromptProgress, TokenOut
from uma_trio.service.answers import Answers, Burst, combined_end
from uma_trio.service.ask import Origin, Refusal
from uma_trio.service.embedding import Embedder, EncodeRequest, RequestEnded, normalised
from uma_trio.service.service import Service
from uma_trio.sockets.writer import Writer
from uma_trio.uds.wire import AnswerEvents, eos_event
from uma_trio.words import Gives, Lane

#: Of vectors in one event, before base64: writing it holds the GIL for about 0.1 ms.
EVENT_BYTES: Final = 1 << 16

Result = Vectors | Scores


class EncodedRequest:
    """A request for vectors or scores while it runs."""

    def __init__(self, work: Embed | Rerank, origin: Origin, service: Service) -> None:
        self._work, self._service = work, service
        self.request = EncodeRequest(service, origin)
        self._n_tokens = 0

    def end(self) -> None:
        """End it with `eos`, reason `cancelled`. Idempotent."""
        self.request.end()

    close = end

    def move_to(self, lane: Lane) -> None:
        """Do nothing: vectors are computed in the time that streams leave, in any lane."""

    async def relay(self, protocol: uma_protocol.Connection, writer: Writer) -> None:
        """Take it from its frame to its terminal event, wholly written.

        Raises:
            Refusal: it was not accepted, and nothing was sent.
        """
        work = self._work
        kind: Gives = "vectors" if isinstance(work, Embed) else "scores"
        try:
            async with self.request.encoder(kind, work.model, exact=True) as encoder:
                for result in await self._results(encoder):
                    writer.write(protocol.send(result))
                    await writer.flushed()
                last = self._last("stop")
        except Refusal as refusal:
            if CODES[refusal.code].fatality is not Fatality.TERMINAL:
                raise
            last = self._failed(refusal.code, refusal.message)
        except RequestEnded as ended:
            if ended.code is None:
                last = self._last("cancelled")
            else:
                last = self._failed(Code(ended.code), ended.message or "")
        writer.write(protocol.send(last))
        await writer.flushed()
        protocol.flushed()

    async def _results(self, encoder: Embedder) -> Iterator[Result]:
        work, request = self._work, self.request
        if isinstance(work, Embed):
            width = encoder.width(work.dimensions)
            found = await encoder.vectors(work.input, request, truncate=work.truncate)
            self._n_tokens = found.n_tokens
            values = await encoder.model.run_blocking(lambda: normalised(found.values[:, :width]))
            return _vectors(work.id, values.astype("<f4", copy=False))
        found = await encoder.scores(work.query, work.documents, request, truncate=work.truncate)
        self._n_tokens = found.n_tokens
        best = await encoder.model.run_blocking(lambda: found.best(work.top_n))
        return iter([Scores(work.id, tuple(Score(at, score) for at, score in best))])

    def _failed(self, code: Code, why: str) -> Eos:
        self._service.telemetry.error_sent(code.value)
        return self._last("error", code, why)

    def _last(self, reason: uma_protocol.Reason, code: Code | None = None, why: str = "") -> Eos:
        took_ms = round((self._service.clock() - self.request.arrived) * 1e3, 3)
        return Eos(
            id=self._work.id,
            reason=reason,
            usage=Usage(self._n_tokens, 0),
            timings=Timings(queue_ms=0.0, total_ms=took_ms, tokens_per_s=0.0),
            request=self.request.handle,
            code=None if code is None else code.value,
            message=why or None,
        )


def _vectors(request: str, values: np.ndarray) -> Iterator[Vectors]:
    at_once = max(1, EVENT_BYTES // values[0].nbytes)
    for first in range(0, len(values), at_once):
        part = values[first : first + at_once]
        yield Vectors(request, first, tuple(row.tobytes() for row in part))


LOADING_AGAIN_S = 0.5
"""Minimum seconds between two progress events of a request that waits for its model."""
_TOO_LONG = 'ask with "stream": true, or for fewer max_tokens'


async def relay(
    generate: Generate,
    answers: Answers,
    protocol: uma_protocol.Connection,
    writer: Writer,
    service: Service,
) -> None:
    """Take a request from its frame to its terminal event, wholly written.

    Cancelled, it has ended the request.

    Raises:
        Refusal: it was not accepted, and nothing was sent.
    """
    async with answers:
        frames = _Frames(generate, answers, protocol, writer, service)
        while not answers.finished:
            await answers.read(frames.write)
            # It also returns when every item was written; then the rest does nothing.
            await writer.flushed()
            answers.skip_next_gap()
            protocol.flushed()


async def report_loading(
    request: str, waiting: Answers | EncodeRequest, say: Callable[[Event], None]
) -> None:
    """Say what a request waits for that waits for its model, each time that this has changed, until the wait is over."""
    reported = None
    while (awaited := waiting.awaited) is not None:
        found = Loading(request, awaited.names[0], awaited.wait_reason, round(awaited.progress, 3))
        if found != reported and found.state:
            reported = found
            say(found)
        await trio.sleep(LOADING_AGAIN_S)


class _Frames:
    """Writes the items of a request's answers as frames, all that come at once together."""

    def __init__(
        self,
        generate: Generate,
        answers: Answers,
        protocol: uma_protocol.Connection,
        writer: Writer,
        service: Service,
    ) -> None:
        self._generate = generate
        self._handle = answers.handle
        self._protocol = protocol
        self._writer = writer
        self._answers = answers
        self._telemetry = service.telemetry
        self._encoders = [AnswerEvents(generate, generation) for generation in answers.generations]
        self._ends: dict[int, Finished] = {}
        self._prompt_done = False

    def _text_of(self, token: int) -> str:
        return self._answers.served.text_of(token)  # a request that was ended early has none

    def write(self, bursts: list[Burst]) -> bool:
        """Write the events of the items; False unless the kernel has all of their bytes."""
        generate, protocol = self._generate, self._protocol
        frames: list[bytes] = []
        for index, items in bursts:
            encoder = self._encoders[index]
            for item in items:
                if isinstance(item, TokenOut):
                    if generate.stream:
                        frames.append(protocol.send(encoder.token(item, self._text_of)))
                    else:
                        encoder.keep(item)
                elif isinstance(item, PromptDone):
                    if not self._prompt_done:
                        protocol.prompt_done()
                        self._prompt_done = True
                elif isinstance(item, Finished):
                    self._ends[index], frame = _last_frame(encoder, item, protocol)
                    frames.append(frame)
                elif not isinstance(item, PromptProgress):  # the protocol has no such event
                    assert_never(item)
        if len(self._ends) == generate.n:
            self._end(frames)
        if frames and not self._writer.write(frames[0] if len(frames) == 1 else b"".join(frames)):
            return False
        protocol.flushed()
        return True

    def _end(self, frames: list[bytes]) -> None:
        generate = self._generate
        whole = combined_end([self._ends[index] for index in range(generate.n)])
        if generate.n > 1:
            frames.append(self._protocol.send(eos_event(generate, self._handle, whole, None)))
        if whole.code is not None:
            self._telemetry.error_sent(whole.code)


def _last_frame(
    encoder: AnswerEvents, finished: Finished, protocol: uma_protocol.Connection
) -> tuple[Finished, bytes]:
    """Return the terminal event and its frame, without the text if that exceeds a frame."""
    try:
        return finished, protocol.send(encoder.last(finished, encoder.end(finished)))
    except LocalProtocolError as fault:
        if fault.code is not Code.E_PROTO_002:
            raise
        why = f"the answer is too long to be sent at once: {fault.message}; {_TOO_LONG}"
    finished = evolve(finished, reason="error", code=Code.E_LIMIT_005.value, message=why)
    return finished, protocol.send(encoder.last(finished, None))
