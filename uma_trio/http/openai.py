"""What OpenAI's two text endpoints have in common: what every object repeats, and how a stream ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import evolve, frozen

from uma_protocol.rules import MAX_INT64
from uma_trio import __version__
from uma_trio.engine.messages import Finished
from uma_trio.http import sse
from uma_trio.http.accounts import timings, usage
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.fields import Body
from uma_trio.http.settings import Shared
from uma_trio.http.streams import Encoder
from uma_trio.service.ask import Ask

FINGERPRINT = f"uma-trio-{__version__}"


def numbered(first: Ask, n: int) -> list[Ask]:
    """Return `n` times the same request, each with a seed of its own."""
    seed = first.sampling.seed
    return [
        evolve(first, sampling=evolve(first.sampling, seed=(seed + i) & MAX_INT64))
        for i in range(n)
    ]


def max_tokens_of(body: Body, shared: Shared) -> int | None:
    """Return how long an answer may be; None for the daemon's default."""
    asked: int | None = body.get("max_completion_tokens", body.get("max_tokens"))
    if asked == -1:
        return shared.service.bounds.n_ctx_seq
    if asked == 0:
        raise invalid("max_tokens", "must be 1 or more")
    return asked


@frozen
class Shown:
    """What every part of an answer repeats."""

    id: str
    created: int
    model: str

    def document(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        """Return an object of the API with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


class Chunks(Encoder):
    """A stream of chunks: the usage if it was asked for, then ``[DONE]``.

    `kind` is what the API calls a chunk. The last one before ``[DONE]`` has the timings.
    """

    kind: ClassVar[str]

    def __init__(self, shown: Shown, n: int, *, includes_usage: bool, n_prompts: int = 1) -> None:
        self.shown = shown
        self._n_prompts = n_prompts
        self._includes_usage = includes_usage
        self._timed = n == 1 and not includes_usage

    def last(self, chunk: dict[str, Any], finished: Finished) -> dict[str, Any]:
        """Return the last chunk of one answer, with its timings where no other has them."""
        return {**chunk, "timings": timings(finished)} if self._timed else chunk

    def closing(self, every: Sequence[Finished]) -> bytes:
        """Return the usage, if it was asked for, and ``[DONE]``; nothing behind an error."""
        if any(end.code is not None or end.reason == "cancelled" for end in every):
            return b""  # an error was the last that the client reads
        if not self._includes_usage:
            return sse.DONE
        chunk = self.shown.document(self.kind, [])
        chunk |= {"usage": usage(every, self._n_prompts), "timings": timings(every[0])}
        return sse.event(chunk) + sse.DONE

    def failure(self, fault: Fault, finished: Finished) -> bytes:
        """Return the error as an event, which the SDKs raise."""
        return b"data: " + fault.body() + b"\n\n"
