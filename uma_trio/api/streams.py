"""The answers to one request, passed to whoever writes them: all of a tick at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, assert_never

from attrs import evolve, frozen

from uma_protocol.errors import Code
from uma_trio.api.context import Context
from uma_trio.engine.messages import Finished, PromptDone, PromptProgress, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault, fault_of
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers
from uma_trio.http.writing import Part
from uma_trio.service.answers import Answers, Burst
from uma_trio.service.reading import Reading
from uma_trio.text.replies import ParsedReply, collect

MUCH: Final = 64
"""Tokens with their probabilities; an answer of more is written in a helper thread."""
_FAULT, _OURS = Code.E_RUNTIME_006.value, "a fault of the daemon's; its log says more"


@frozen
class WholeAnswer:
    """An answer that is whole. `prompt` is what was said of its prompt, if that was computed."""

    tokens: Sequence[TokenOut]
    end: Finished
    prompt: PromptDone | None = None

    @property
    def text(self) -> str:
        """Everything the model said."""
        return "".join([*(token.text for token in self.tokens), self.end.text])

    @property
    def weight(self) -> int:
        """The number of tokens that are written, where a quarter of one is spent on one without more."""
        scored = self.prompt is not None and self.prompt.logprobs is not None
        prompt = len(self.prompt.logprobs or ()) if self.prompt is not None and scored else 0
        rich = bool(self.tokens) and self.tokens[0].logprobs is not None
        return prompt + (len(self.tokens) if rich else len(self.tokens) // 4)


class Encoder(ABC):
    """How an API writes a stream, of type `content_type`. Each method returns whole events.

    What takes long to write is returned as a function that writes it, which is called in a helper
    thread. Then other methods are called only after it, but for :meth:`keep_alive`.
    """

    content_type: ClassVar[str] = sse.CONTENT_TYPE

    def opening(self) -> Part:
        """Return what goes out once the requests are accepted."""
        return b""

    def prompt(self, index: int, item: PromptDone) -> Part:
        """Return what goes out once the prompt of answer `index` is computed."""
        return b""

    def progress(self, index: int, item: PromptProgress) -> bytes:
        """Return what says how much of the prompt of answer `index` is computed, if that is wanted."""
        return b""

    @abstractmethod
    def token(self, index: int, item: TokenOut) -> Part:
        """Return what says a token of answer `index`."""

    @abstractmethod
    def end(self, index: int, finished: Finished) -> Part:
        """Return what says that answer `index` is whole."""

    def closing(self, every: Sequence[Finished]) -> bytes:
        """Return what goes out behind the last answer."""
        return b""

    @abstractmethod
    def failure(self, index: int, fault: Fault, finished: Finished) -> Part:
        """Return what says that there will be no answer `index`, and how it ended instead."""

    def keep_alive(self) -> bytes:
        """Return what breaks a long silence, so that nobody takes the stream for dead."""
        return sse.KEEP_ALIVE


async def stream(
    exchange: Exchange, context: Context, answers: Answers, encoder: Encoder, headers: Headers
) -> None:
    """Send the answers as events, to the end. The requests are accepted, so the head goes first.

    If the head is late, and all answers fail before a part of one is out, the failure is raised instead, so that
    it has a status of its own. If it raises otherwise, a fault of ours, the stream has ended with an error event as far as that can be told.
    """
    (opening,) = await _all([encoder.opening()], context)
    kind = ("Content-Type", encoder.content_type)
    exchange.open((kind, *headers), encoder.keep_alive, opening)
    ends: dict[int, Finished] = {}
    try:
        last = await _told(exchange, context, answers, encoder, ends)
    except Exception:
        if not exchange.opened:
            raise
        await exchange.close(b"".join(await _all(_broken_off(answers, encoder, ends), context)))
        raise
    if not exchange.opened and (fault := failure_of_all(list(ends.values()))) is not None:
        raise fault
    await exchange.close(last)


async def _told(
    exchange: Exchange,
    context: Context,
    answers: Answers,
    encoder: Encoder,
    ends: dict[int, Finished],
) -> bytes:
    """Send all but the last part of the stream, and return that; fill `ends`."""
    write_token = encoder.token
    parts: list[Part] = []

    def write(bursts: list[Burst]) -> bool:
        parts.clear()
        for index, items in bursts:
            for item in items:
                if isinstance(item, TokenOut):
                    parts.append(write_token(index, item))
                elif isinstance(item, Finished):
                    ends[index] = item
                    parts.append(_last_words(encoder, index, item, context))
                elif isinstance(item, PromptDone):
                    parts.append(encoder.prompt(index, item))
                elif isinstance(item, PromptProgress):
                    parts.append(encoder.progress(index, item))
                else:
                    assert_never(item)
        if answers.finished:
            return False
        data = _ready(parts)
        if data is None:
            return False
        parts.clear()
        return _put(exchange, data)

    while True:
        await answers.read(write)
        last = await _all(parts, context)
        parts.clear()
        if answers.finished:
            break
        _put(exchange, b"".join(last))
        await exchange.sent()
        answers.skip_next_gap()
    every = [ends[index] for index in range(len(ends))]
    return b"".join([*last, encoder.closing(every)])


def _put(exchange: Exchange, data: bytes) -> bool:
    return not data or exchange.send(data)


def _ready(parts: Sequence[Part]) -> bytes | None:
    """Return the parts of a burst in one; None if one of them is to be written in a helper thread."""
    if len(parts) == 1:
        return parts[0] if isinstance(parts[0], bytes) else None
    ready = [part for part in parts if isinstance(part, bytes)]
    return b"".join(ready) if len(ready) == len(parts) else None


async def _all(parts: Sequence[Part], context: Context) -> list[bytes]:
    return [part if isinstance(part, bytes) else await context.run_blocking(part) for part in parts]


def _broken_off(answers: Answers, encoder: Encoder, ends: dict[int, Finished]) -> list[Part]:
    """Return the events that end a stream that we cannot continue; none if they fail, too."""
    parts: list[Part] = []
    try:
        for index, generation in enumerate(answers.generations):
            end = ends.get(index)
            if end is None or end.code is None:
                end = evolve(generation.so_far(0), reason="error", code=_FAULT, message=_OURS)
                parts.append(encoder.failure(index, fault_of(_FAULT, _OURS), end))
            ends[index] = end
        parts.append(encoder.closing([ends[index] for index in range(len(ends))]))
    except Exception:  # the fault that is told is the first one
        return parts
    return parts


async def whole(context: Context, answers: Answers) -> list[WholeAnswer]:
    """Return each answer, once all of them are at their end. Some of several may have failed.

    Raises:
        Fault: all of them failed.
    """
    tokens: list[list[TokenOut]] = [[] for _ in answers.generations]
    prompts: dict[int, PromptDone] = {}
    ends: dict[int, Finished] = {}
    while not answers.finished:
        for index, items in await answers.burst():
            for item in items:
                if isinstance(item, TokenOut):
                    tokens[index].append(item)
                elif isinstance(item, Finished):
                    ends[index] = item
                elif isinstance(item, PromptDone):
                    prompts[index] = item
                elif not isinstance(item, PromptProgress):  # a whole answer does not tell it
                    assert_never(item)
    for end in ends.values():
        _count(end, context)
    if (fault := failure_of_all([ends[i] for i in range(len(tokens))])) is not None:
        raise fault
    return [WholeAnswer(tokens[i], ends[i], prompts.get(i)) for i in range(len(tokens))]


def read(tokens: Sequence[TokenOut], end: Finished, reading: Reading) -> ParsedReply:
    """Return what one answer says, of which `whole` returned the items."""
    events = [event for token in tokens for event in reading.token(token)]
    return collect([*events, *reading.end(end)])


def _last_words(encoder: Encoder, index: int, finished: Finished, context: Context) -> Part:
    _count(finished, context)
    fault = failure_of(finished)
    return (
        encoder.end(index, finished) if fault is None else encoder.failure(index, fault, finished)
    )


def _count(finished: Finished, context: Context) -> None:
    if finished.code is not None:
        context.service.telemetry.error_sent(finished.code)


def without_answer(end: Finished) -> Finished:
    """Return the end of a request of which only the prompt was wanted: its one token is nobody's."""
    if end.reason in ("cancelled", "error"):
        return end
    return evolve(end, reason="length", text="", completion_tokens=0, stop=None)


def failure_of_all(every: Sequence[Finished]) -> Fault | None:
    """Return what to say of a request that no answer is whole of; None if there is one."""
    failures = [fault for end in every if (fault := failure_of(end)) is not None]
    return failures[0] if len(failures) == len(every) else None


def failure_of(finished: Finished) -> Fault | None:
    """Return what to say of an answer that failed or was cancelled; None of any other."""
    if finished.reason == "cancelled":
        return Fault(499, "the request was cancelled", code="cancelled", kind="server_error")
    if finished.code is None:
        return None
    return fault_of(finished.code, finished.message or "the request failed")
