"""A request for vectors or scores on its way over the socket: from its frame to its terminal event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from uma_protocol import (
    CODES,
    Code,
    Embed,
    Eos,
    Fatality,
    Rerank,
    Score,
    Scores,
    Timings,
    Usage,
    Vectors,
)
from uma_trio.service.ask import Origin, Refusal
from uma_trio.service.embedding import normalised
from uma_trio.service.encode_request import EncodeRequest, RequestEnded

if TYPE_CHECKING:
    import uma_protocol
    from uma_trio.service.embedding import Embedder
    from uma_trio.service.service import Service
    from uma_trio.sockets.writer import Writer
    from uma_trio.words import Gives, Lane

#: Of vectors in one event, before base64: writing it holds the GIL for about 0.1 ms.
EVENT_BYTES: Final = 1 << 16

Result = Vectors | Scores


class EncodedRequest:
    """A request for vectors or scores while it runs."""

    def __init__(self, asked: Embed | Rerank, origin: Origin, service: Service) -> None:
        self._asked, self._service = asked, service
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
        asked = self._asked
        gives: Gives = "vectors" if isinstance(asked, Embed) else "scores"
        try:
            async with self.request.encoder(gives, asked.model, exact=True) as encoder:
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
        asked, request = self._asked, self.request
        if isinstance(asked, Embed):
            width = encoder.width(asked.dimensions)
            found = await encoder.vectors(asked.input, request, truncate=asked.truncate)
            self._n_tokens = found.n_tokens
            values = await encoder.run_blocking(lambda: normalised(found.values[:, :width]))
            return _vectors(asked.id, values.astype("<f4", copy=False))
        found = await encoder.scores(asked.query, asked.documents, request, truncate=asked.truncate)
        self._n_tokens = found.n_tokens
        best = await encoder.run_blocking(lambda: found.best(asked.top_n))
        return iter([Scores(asked.id, tuple(Score(at, score) for at, score in best))])

    def _failed(self, code: Code, why: str) -> Eos:
        self._service.telemetry.error_sent(code.value)
        return self._last("error", code, why)

    def _last(self, reason: uma_protocol.Reason, code: Code | None = None, why: str = "") -> Eos:
        took_ms = round((self._service.clock() - self.request.arrived) * 1e3, 3)
        return Eos(
            id=self._asked.id,
            reason=reason,
            usage=Usage(self._n_tokens, 0),
            timings=Timings(queue_ms=0.0, total_ms=took_ms, tokens_per_s=0.0),
            request=self.request.handle,
            code=None if code is None else code.value,
            message=why or None,
        )


def _vectors(request: str, values: np.ndarray) -> Iterator[Vectors]:
    """Yield the events of vectors, each of about `EVENT_BYTES`."""
    at_once = max(1, EVENT_BYTES // values[0].nbytes)
    for first in range(0, len(values), at_once):
        part = values[first : first + at_once]
        yield Vectors(request, first, tuple(row.tobytes() for row in part))
