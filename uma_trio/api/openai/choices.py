"""What OpenAI's two older text endpoints have in common: what every object repeats, how a stream ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from uma_protocol.requests import MAX_N, about, limits
from uma_trio import __version__
from uma_trio.api.accounts import progress, timings, timings_until, usage
from uma_trio.api.api import Api
from uma_trio.api.bodies import Decoded, KeepAlive, ShapedBody, free
from uma_trio.api.context import Context
from uma_trio.api.streams import Encoder, WholeAnswer, failure_of, failure_of_all
from uma_trio.engine.messages import Finished, PromptProgress
from uma_trio.http import sse
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.message import Head
from uma_trio.http.writing import Part
from uma_trio.service.ask import Origin
from uma_trio.service.generation import Generation
from uma_trio.service.reading import Reading

FINGERPRINT = f"uma-trio-{__version__}"


class ChoicesBody(ShapedBody, frozen=True, kw_only=True):
    """Fields of both endpoints."""

    verbose: Annotated[
        bool, about("adds `__verbose` with the rendered prompt and the settings")
    ] = False
    stream_options: Annotated[
        Any, free("`include_usage` adds a last chunk with the usage; only with stream", "an object")
    ] = None
    n: Annotated[
        int,
        limits(
            "number of answers, up to the number of slots; the prompt is computed once", 1, MAX_N
        ),
    ] = 1
    keep_alive: KeepAlive = None


B = TypeVar("B", bound=ChoicesBody)


class ChoicesApi(Api[B]):
    """An API whose answers are `choices`, `n` of them to a prompt.

    `kind` is what it calls an answer, `chunk` what it calls a part of one.
    """

    tells_loading = True
    kind: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, decoded: Decoded[B], head: Head, context: Context, origin: Origin) -> None:
        super().__init__(decoded, head, context, origin)
        self.n = self.body.n
        self.includes_usage = _includes_usage(self.body)

    def max_tokens(self, requested: int | None) -> int | None:
        """Return the longest answer; None for the daemon's default."""
        if requested == -1:
            return self.context.served.bounds.n_ctx_seq
        if requested == 0:
            raise invalid("max_tokens", "must be 1 or more, or -1 for the free room in the context")
        return requested

    def part(self, choices: Sequence[Any]) -> dict[str, Any]:
        """Return a chunk with these choices."""
        return self._around(self.chunk, choices)

    @abstractmethod
    def choice(self, index: int, generation: Generation, answer: WholeAnswer) -> dict[str, Any]:
        """Return a whole answer as a choice."""

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return all answers, what they took, and where the time of the first one went."""
        choices = [
            failed(self.choice(index, generation, answer), answer.end)
            for index, (generation, answer) in enumerate(zip(generations, answers, strict=True))
        ]
        every = [answer.end for answer in answers]
        readings = [generation.reading for generation in generations]
        account = self.account(every, readings) | self.understood(generations[0])
        return self._around(self.kind, choices) | account

    def account(
        self, every: Sequence[Finished], readings: Sequence[Reading] = ()
    ) -> dict[str, Any]:
        """Return what the answers took, of which the tokens of reasoning were counted in reading."""
        counted = [reading.reasoning_tokens for reading in readings if not reading.plain]
        reasoning = sum(counted) if counted else None
        spent = usage(every, len(every) // self.n, reasoning)
        return {"usage": spent, "timings": timings(every[0])}

    def _around(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
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

    The last one before ``[DONE]`` has the timings; with `each_timed` every one with a token has those
    of its answer.
    """

    def __init__(self, api: ChoicesApi[Any], generations: Sequence[Generation]) -> None:
        self.api = api
        self.each_timed = api.body.timings_per_token
        self._generations = generations
        self._n = [0] * len(generations)
        self._timed = len(generations) == 1 and not api.includes_usage

    @property
    def readings(self) -> Sequence[Reading]:
        """What has read the answers, where they say more than text."""
        return ()

    def counted(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk of a token with the timings of its answer up to here."""
        return chunk | {"timings": timings(self._generations[index].so_far(self._n[index]))}

    def progress(self, index: int, item: PromptProgress) -> bytes:
        """Return a chunk without any text that says how much of a prompt is computed."""
        more: dict[str, Any] = {"timings": timings_until(item)} if self.each_timed else {}
        return sse.event(self.empty(index) | {"prompt_progress": progress(item)} | more)

    @abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """Return a chunk that adds nothing to answer `index`."""

    def last(self, chunk: dict[str, Any], finished: Finished) -> dict[str, Any]:
        """Return the last chunk of one answer, with its timings where no other has them."""
        chunk["choices"] = [failed(choice, finished) for choice in chunk["choices"]]
        more = {"timings": timings(finished)} if self._timed else {}
        return chunk | more | self.api.understood(self._generations[0])

    def written(self, chunk: dict[str, Any]) -> Part:
        """Return a chunk that may repeat a prompt as an event."""
        if not self.api.is_long:
            return sse.event(chunk)
        return lambda: sse.long_event(chunk)

    def closing(self, every: Sequence[Finished]) -> bytes:
        """Return the usage, if it was asked for, and ``[DONE]``; the error if every answer failed."""
        if (fault := failure_of_all(every)) is not None:
            return sse.event(fault.member())  # the last that the client reads
        if not self.api.includes_usage:
            return sse.DONE
        return sse.event(self.api.part([]) | self.api.account(every, self.readings)) + sse.DONE

    def failure(self, index: int, fault: Fault, finished: Finished) -> Part:
        """Return the end of one of several answers, with its error.

        The SDKs raise an error that is an event of its own, and read no further. So that goes out
        only if no answer is whole, when the stream closes.
        """
        return self.end(index, finished) if len(self._generations) > 1 else b""


def failed(choice: dict[str, Any], end: Finished) -> dict[str, Any]:
    """Return a choice with its error, if it ended with one.

    OpenRouter's API tells it so, too: https://openrouter.ai/docs/api-reference/overview
    """
    fault = failure_of(end)
    return choice if fault is None else {**choice, "finish_reason": "error", **fault.member()}


def _includes_usage(body: ChoicesBody) -> bool:
    """Return whether a stream ends with the usage. Raises :class:`Fault`."""
    options = body.stream_options
    if options is None:
        return False
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise invalid("stream_options", 'must be an object such as {"include_usage": true}')
    if not body.stream:
        raise invalid("stream_options", "needs stream true")
    return options.get("include_usage", False) is True
