"""One request on its way over the socket: what the service yields, as frames.

:func:`_stream` is the hot path of the socket side. A tick's items of one request cost one run of
its task, one `send` and a credit message for each answer; nothing else waits, locks or is looked up
per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from attrs import evolve

from uma_protocol import Code, Generate, LocalProtocolError
from uma_trio.engine.messages import Finished, PromptDone, PromptProgress, TokenOut
from uma_trio.service.answers import together
from uma_trio.wire import Telling, eos_event

if TYPE_CHECKING:
    from collections.abc import Callable

    import uma_protocol
    from uma_trio.service.answers import Answers
    from uma_trio.service.service import Service
    from uma_trio.sockets.writer import Writer

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
        finished = await _stream(generate, answers, protocol, writer, service.text_of)
    if finished.code is not None:
        service.telemetry.error_sent(finished.code)


async def _stream(
    generate: Generate,
    answers: Answers,
    protocol: uma_protocol.Connection,
    writer: Writer,
    text_of: Callable[[int], str],
) -> Finished:
    """Pass items on, a burst at a time, until the terminal one is wholly written; return that."""
    tellings = [Telling(generate, generation) for generation in answers.generations]
    ends: dict[int, Finished] = {}
    prompt_done = False
    while not answers.finished:
        frames: list[bytes] = []
        for index, items in await answers.burst():
            telling = tellings[index]
            for item in items:
                if isinstance(item, TokenOut):
                    if generate.stream:
                        frames.append(protocol.send(telling.token(item, text_of)))
                    else:
                        telling.keep(item)
                elif isinstance(item, PromptDone):
                    if not prompt_done:
                        protocol.prompt_done()
                        prompt_done = True
                elif isinstance(item, Finished):
                    ends[index], frame = _last_frame(telling, item, protocol)
                    frames.append(frame)
                elif not isinstance(item, PromptProgress):  # the protocol has no word for it
                    assert_never(item)
        if len(ends) == generate.n > 1:
            whole = together([ends[index] for index in range(generate.n)])
            frames.append(protocol.send(eos_event(generate, answers.handle, whole, None)))
        if frames and not writer.write(frames[0] if len(frames) == 1 else b"".join(frames)):
            await writer.flushed()
            answers.reader_was_behind()
        protocol.flushed()
    return together([ends[index] for index in range(generate.n)])


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
