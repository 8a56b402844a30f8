"""A request for vectors or scores on its way over the socket: from its frame to its terminal event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import trio

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
from uma_trio.service.ask import Refusal
from uma_trio.service.embedding import normalised

if TYPE_CHECKING:
    import uma_protocol
    from uma_trio.service.embedding import Embedder
    from uma_trio.service.embedding import VectorRows as Found
    from uma_trio.service.service import Service
    from uma_trio.sockets.principal import Principal
    from uma_trio.sockets.writer import Writer
    from uma_trio.words import Lane

#: Of vectors in one event, before base64: writing it holds the GIL for about 0.1 ms.
EVENT_BYTES: Final = 1 << 16

Result = Vectors | Scores


class EncodedRequest:
    """A request for vectors or scores while it runs."""

    def __init__(self, asked: Embed | Rerank, principal: Principal, service: Service) -> None:
        self._asked, self._principal, self._service = asked, principal, service
        self._handle = service.new_handle()
        self._began = service.clock()
        self._scope = trio.CancelScope()
        self._n_tokens = 0

    def end(self) -> None:
        """End it with `eos`, reason `cancelled`. Idempotent."""
        self._scope.cancel()

    close = end

    def move_to(self, lane: Lane) -> None:
        """Do nothing: vectors are computed in the time that streams leave, in any lane."""

    async def relay(self, protocol: uma_protocol.Connection, writer: Writer) -> None:
        """Take it from its frame to its terminal event, wholly written.

        Raises:
            Refusal: it was not accepted, and nothing was sent.
        """
        last: Eos | None = None
        with self._scope:
            try:
                results = await self._results()
            except Refusal as refusal:
                if CODES[refusal.code].fatality is not Fatality.TERMINAL:
                    raise
                last = self._last("error", refusal.code, refusal.message)
                self._service.telemetry.error_sent(refusal.code.value)
            else:
                for result in results:
                    writer.write(protocol.send(result))
                    await writer.flushed()
                last = self._last("stop")
        writer.write(protocol.send(last or self._last("cancelled")))
        await writer.flushed()
        protocol.flushed()

    async def _results(self) -> Iterator[Result]:
        asked = self._asked
        if isinstance(asked, Embed):
            embedder = self._service.encoder("embed", asked.model)
            width = _width(asked, embedder)
            found = await embedder.vectors(asked.input, self._principal, truncate=asked.truncate)
            self._n_tokens = found.n_tokens
            values = await embedder.run_blocking(lambda: normalised(found.values[:, :width]))
            return _vectors(asked.id, values.astype("<f4", copy=False))
        ranker = self._service.encoder("rank", asked.model)
        found = await ranker.scores(
            asked.query, asked.documents, self._principal, truncate=asked.truncate
        )
        self._n_tokens = found.n_tokens
        return iter([await ranker.run_blocking(lambda: _scores(asked, found))])

    def _last(self, reason: uma_protocol.Reason, code: Code | None = None, why: str = "") -> Eos:
        took_ms = round((self._service.clock() - self._began) * 1e3, 3)
        return Eos(
            id=self._asked.id,
            reason=reason,
            usage=Usage(self._n_tokens, 0),
            timings=Timings(queue_ms=0.0, total_ms=took_ms, tokens_per_s=0.0),
            request=self._handle,
            code=None if code is None else code.value,
            message=why or None,
        )


def _width(asked: Embed, embedder: Embedder) -> int:
    """Return how many numbers of a vector are asked for. Raises :class:`Refusal`."""
    most = embedder.info.width
    width = asked.dimensions or most
    if width > most:
        why = f"dimensions must be at most {most}, what {embedder.names[0]} makes"
        raise Refusal(Code.E_PROTO_003, why, field="dimensions")
    return width


def _vectors(request: str, values: np.ndarray) -> Iterator[Vectors]:
    """Yield the events of vectors, each of about `EVENT_BYTES`."""
    at_once = max(1, EVENT_BYTES // values[0].nbytes)
    for first in range(0, len(values), at_once):
        part = values[first : first + at_once]
        yield Vectors(request, first, tuple(row.tobytes() for row in part))


def _scores(asked: Rerank, found: Found) -> Scores:
    """Return the event of scores, the best document first. There are at most 4,000."""
    scores = found.values[:, 0]
    best = np.argsort(-scores, kind="stable")[: asked.top_n]
    return Scores(asked.id, tuple(Score(int(at), float(scores[at])) for at in best))
