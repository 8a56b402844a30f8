"""One request on its way: tokenised, submitted, streamed, ended.

:func:`_stream` is the hot path of the socket side. A tick's items of one stream cost one run of
its task, one `send` and one :class:`Credit`; nothing else waits, locks or is looked up per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from attrs import evolve

from uma_protocol import Code, LocalProtocolError, Token
from uma_trio.engine.inbox import EngineStopped, QueueFull
from uma_trio.engine.messages import (
    Credit,
    Finished,
    PromptDone,
    Sink,
    StreamItem,
    Submit,
    TokenOut,
)
from uma_trio.net.requests import (
    Refusal,
    check_untokenised,
    eos_event,
    max_tokens_for,
    never_submitted,
    submit_message,
)

if TYPE_CHECKING:
    import uma_protocol
    from uma_trio.net.directory import Running
    from uma_trio.net.shared import Shared
    from uma_trio.net.writer import Writer

_DRAINING = "the daemon is stopping; connect again once it has restarted"
_TOO_LONG = 'ask with "stream": true, or for fewer max_tokens'
_STOPPED = "the engine has stopped; the daemon is going down"


async def relay(
    running: Running,
    protocol: uma_protocol.Connection,
    writer: Writer,
    shared: Shared,
    number: int,
) -> None:
    """Take a request from its frame to its terminal event, wholly written.

    Cancelled, it has closed the stream, and the request is still to be ended by the caller.

    Raises:
        Refusal: it was not accepted, and nothing was sent.
    """
    if shared.draining:
        raise Refusal(Code.E_LIFECYCLE_001, _DRAINING)
    # Room for all that the credit allows, the end of the prompt and the terminal item.
    sink, stream = trio.open_memory_channel[StreamItem](shared.settings.credit + 2)
    with stream:
        submit = await _prepare(running, sink, shared, number)
        if submit is None:
            finished = never_submitted(running, shared.clock())
            writer.write(protocol.send(eos_event(running, finished, None)))
            await writer.flushed()
            protocol.flushed()
        else:
            _submit(submit, running, shared)
            finished = await _stream(running, stream, protocol, writer, shared)
    if finished.code is not None:
        shared.recorder.error_sent(finished.code)


async def _prepare(running: Running, sink: Sink, shared: Shared, number: int) -> Submit | None:
    """Tokenise and translate; None if the request was ended meanwhile."""
    settings, generate = shared.settings, running.generate
    check_untokenised(generate, settings)
    prompt = None
    with running.preparing:
        prompt = await shared.run_blocking(shared.prepare, generate)
    if prompt is None or running.ended:
        return None
    max_tokens = max_tokens_for(generate, len(prompt), settings)
    return submit_message(
        running,
        prompt,
        max_tokens,
        sink,
        credit=settings.credit,
        # A process is one client, however many connections it opens.
        client=running.peer.pid if running.peer.pid is not None else -number,
    )


def _submit(submit: Submit, running: Running, shared: Shared) -> None:
    try:
        shared.inbox.submit(submit)
    except QueueFull as full:
        raise Refusal(Code.E_LIMIT_003, str(full), retry_after_s=full.retry_after_s) from None
    except EngineStopped:
        raise Refusal(Code.E_RUNTIME_004, _STOPPED) from None
    running.submitted = True


async def _stream(
    running: Running,
    stream: trio.MemoryReceiveChannel[StreamItem],
    protocol: uma_protocol.Connection,
    writer: Writer,
    shared: Shared,
) -> Finished:
    """Pass items on, a burst at a time, until the terminal one is wholly written; return that."""
    generate, handle, inbox = running.generate, running.handle, running.inbox
    request_id, streams = generate.id, generate.stream
    whole: list[str] = []
    logits_at: float | None = None
    behind = False
    while True:
        frames: list[bytes] = []
        n_tokens = 0
        finished: Finished | None = None
        for item in await _burst(stream, behind=behind):
            if isinstance(item, TokenOut):
                n_tokens += 1
                if streams:
                    frames.append(protocol.send(Token(request_id, item.text, item.token_id)))
                else:
                    whole.append(item.text)
            elif isinstance(item, PromptDone):
                protocol.prompt_done()
                logits_at = item.at
            else:
                text = item.text or None if streams else "".join(whole) + item.text
                finished, frame = _last_frame(running, item, text, protocol)
                frames.append(frame)
        behind = not frames  # the end of the prompt comes with its first token
        if frames and not writer.write(frames[0] if len(frames) == 1 else b"".join(frames)):
            await writer.flushed()
            behind = True
        protocol.flushed()
        if logits_at is not None and n_tokens and streams:
            shared.recorder.first_chunk(shared.clock() - logits_at)
            logits_at = None
        if finished is not None:
            return finished
        if n_tokens:
            inbox.put(Credit(handle, n_tokens))


def _last_frame(
    running: Running, finished: Finished, text: str | None, protocol: uma_protocol.Connection
) -> tuple[Finished, bytes]:
    """Return how the request ends and the frame that says so; a text too long for one is left out."""
    try:
        return finished, protocol.send(eos_event(running, finished, text))
    except LocalProtocolError as fault:
        if fault.code is not Code.E_PROTO_002:
            raise
        why = f"the answer is too long to be sent at once: {fault.message}; {_TOO_LONG}"
    finished = evolve(finished, reason="error", code=Code.E_LIMIT_005.value, message=why)
    return finished, protocol.send(eos_event(running, finished, None))


async def _burst(
    stream: trio.MemoryReceiveChannel[StreamItem], *, behind: bool
) -> list[StreamItem]:
    """Wait for an item; return it, with all others that are there when the stream is `behind`.

    A stream that keeps up has one item a tick, and asking for a second costs an exception.
    """
    items = [await stream.receive()]
    try:
        while behind:
            items.append(stream.receive_nowait())
    except trio.WouldBlock:
        return items
    return items
