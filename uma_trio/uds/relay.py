"""One request on its way over the socket: what the service yields, as frames.

:class:`_Frames` is the hot path of the socket side. A tick's items of one request cost one call, one
`send` and a credit message for each answer; no task is run for them, and nothing waits, locks or is
looked up per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import trio
from attrs import evolve

from uma_protocol import Code, Event, Generate, Loading, LocalProtocolError
from uma_trio.engine.messages import Finished, PromptDone, PromptProgress, TokenOut
from uma_trio.service.answers import together
from uma_trio.uds.wire import Telling, eos_event

if TYPE_CHECKING:
    from collections.abc import Callable

    import uma_protocol
    from uma_trio.service.answers import Answers, Burst
    from uma_trio.service.encode_request import EncodeRequest
    from uma_trio.service.service import Service
    from uma_trio.sockets.writer import Writer

LOADING_AGAIN_S = 0.5
"""How often who waits for a model is told how far its loading is, at the most."""
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
            # It returns when all is told, too, and then none of this does anything.
            await writer.flushed()
            answers.reader_was_behind()
            protocol.flushed()


async def tell_loading(
    request: str, waiting: Answers | EncodeRequest, say: Callable[[Event], None]
) -> None:
    """Say what a request waits for that waits for its model, each time that this has changed, until the wait is over."""
    told = None
    while (awaited := waiting.awaited) is not None:
        found = Loading(request, awaited.names[0], awaited.wait, round(awaited.progress, 3))
        if found != told and found.state:
            told = found
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
        self._tellings = [Telling(generate, generation) for generation in answers.generations]
        self._ends: dict[int, Finished] = {}
        self._prompt_done = False

    def _text_of(self, token: int) -> str:
        return self._answers.served.text_of(token)  # a request that was ended early has none

    def write(self, bursts: list[Burst]) -> bool:
        """Write what is told of the answers; False unless the kernel has all of it."""
        generate, protocol = self._generate, self._protocol
        frames: list[bytes] = []
        for index, items in bursts:
            telling = self._tellings[index]
            for item in items:
                if isinstance(item, TokenOut):
                    if generate.stream:
                        frames.append(protocol.send(telling.token(item, self._text_of)))
                    else:
                        telling.keep(item)
                elif isinstance(item, PromptDone):
                    if not self._prompt_done:
                        protocol.prompt_done()
                        self._prompt_done = True
                elif isinstance(item, Finished):
                    self._ends[index], frame = _last_frame(telling, item, protocol)
                    frames.append(frame)
                elif not isinstance(item, PromptProgress):  # the protocol has no word for it
                    assert_never(item)
        if len(self._ends) == generate.n:
            self._end(frames)
        if frames and not self._writer.write(frames[0] if len(frames) == 1 else b"".join(frames)):
            return False
        protocol.flushed()
        return True

    def _end(self, frames: list[bytes]) -> None:
        """Add what ends the request behind the ends of its answers, where there are several."""
        generate = self._generate
        whole = together([self._ends[index] for index in range(generate.n)])
        if generate.n > 1:
            frames.append(self._protocol.send(eos_event(generate, self._handle, whole, None)))
        if whole.code is not None:
            self._telemetry.error_sent(whole.code)


def _last_frame(
    telling: Telling, finished: Finished, protocol: uma_protocol.Connection
) -> tuple[Finished, bytes]:
    """Return how an answer ends and the frame that says so; a text too long for one is left out."""
    try:
        return finished, protocol.send(telling.last(finished, telling.end(finished)))
    except LocalProtocolError as fault:
        if fault.code is not Code.E_PROTO_002:
            raise
        why = f"the answer is too long to be sent at once: {fault.message}; {_TOO_LONG}"
    finished = evolve(finished, reason="error", code=Code.E_LIMIT_005.value, message=why)
    return finished, protocol.send(telling.last(finished, None))
