"""One client's connection: every state, every way to leave it, one terminal event.

The whole daemon but for the listener runs in virtual time (see :mod:`net_kit`); a tick of the
fake model takes 20 ms of it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable

import pytest
import trio
from net_kit import TICK_S, Client, House, house, slowly
from trio.testing import MockClock

import uma_protocol
from uma_protocol import (
    Cancel,
    Code,
    Eos,
    Error,
    Explanation,
    GetMetrics,
    ListSessions,
    Metrics,
    Ok,
    Role,
    ServerState,
    Sessions,
    SetPriority,
    Token,
)
from uma_trio.engine.messages import Credit, Inspect
from uma_trio.models.loaded import SNAPSHOT_INTERVAL_S as INTERVAL_S
from uma_trio.sockets.principal import Principal
from uma_trio_sim.fake import EOS, FakeBackend, InjectedFault, linear_cost

LONG = "x" * 600
"""A prompt of several ticks."""


def server_state(daemon: House) -> ServerState | None:
    """Return the state of the only connection, None if there is none."""
    for connection in daemon.server._sessions:
        return connection._protocol.state  # type: ignore[return-value]
    return None


# --- a request ---


async def test_a_stream_is_the_models_text(autojump_clock: MockClock) -> None:
    """Tokens in order, then one terminal event with the usage and the times."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=10, metadata={"k": [1]})
        eos = await client.until(Eos)
        assert client.text == daemon.expected("hello", 10)
        assert (client.n_tokens, eos.reason, eos.metadata) == (10, "length", {"k": [1]})
        assert (eos.usage.prompt_tokens, eos.usage.completion_tokens) == (6, 10)
        assert eos.timings.ttft_ms == pytest.approx(20)
        assert eos.timings.total_ms == pytest.approx(200)
        assert eos.timings.tokens_per_s == pytest.approx(50)


async def test_without_streaming_the_text_comes_at_the_end(autojump_clock: MockClock) -> None:
    """One event, with all the text; credit is returned without anybody reading."""
    async with house(credit=4) as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=50, stream=False)
        await client.until(Eos)
        assert client.n_tokens == 0
        assert client.text == daemon.expected("hello", 50)


async def test_a_connection_serves_one_request_after_the_other(autojump_clock: MockClock) -> None:
    """The next cycle begins once the terminal event is written; handles are never reused."""
    async with house() as daemon:
        client = daemon.connect()
        handles = []
        for n in range(5):
            await client.ask(f"r{n}", max_tokens=3)
            handles.append((await client.until(Eos)).request)
        assert handles == [1, 2, 3, 4, 5]


async def test_a_request_sent_ahead_is_refused_while_one_runs(autojump_clock: MockClock) -> None:
    """Busy is an answer, not a fault: the running stream is untouched."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask("a", max_tokens=6)
        await client.until(Token)
        await client.send_bytes(_frame(b'{"id":"b","prompt":"p"}'))
        error = await client.until(Error)
        assert (error.code, error.fatal, error.id) == ("E_PROTO_004", False, "b")
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 6)


async def test_what_was_sent_ahead_is_answered_to_the_last_frame(
    autojump_clock: MockClock,
) -> None:
    """Frames that wait for the end of a request are all read then, though answers take a tick."""
    async with house() as daemon:
        client = daemon.connect()
        await _end_unread(client)
        assert server_state(daemon) is ServerState.DONE
        ahead = [b'{"type":"sessions"}', b'{"type":"explain"}', b'{"id":"b","prompt":"p"}']
        await client.send_bytes(b"".join(map(_frame, ahead)))
        await client.until(Eos)
        assert (await client.until(Sessions)).sessions == ()
        await client.until(Explanation)
        data = await _raw_until(client, b'"eos"')
        assert b'"id":"b"' in data


async def test_after_what_was_sent_ahead_a_client_idles_as_long_as_any(
    autojump_clock: MockClock,
) -> None:
    """The clock of idleness is wound again when the last of it is answered."""
    async with house() as daemon:
        client = daemon.connect()
        await _end_unread(client)
        await client.send_bytes(2 * _frame(b'{"type":"sessions"}'))
        await client.until(Eos)
        ended = trio.current_time()
        assert isinstance((await client.rest())[-1], Error)
        assert trio.current_time() - ended == pytest.approx(300, abs=2)


async def test_an_answer_longer_than_a_frame_ends_with_a_code(autojump_clock: MockClock) -> None:
    """Unstreamed text that no frame can hold: the client learns that, and what to do."""
    async with house() as daemon:
        client = daemon.connect()
        (connection,) = daemon.server._sessions
        connection._protocol = uma_protocol.Connection(Role.SERVER, max_frame_bytes=600)
        await client.ask(max_tokens=900, stream=False)
        eos = await client.until(Eos)
        assert (eos.reason, eos.code, eos.text) == ("error", "E_LIMIT_005", None)
        assert '"stream": true' in eos.message
        assert "600" in eos.message
        assert eos.usage.completion_tokens == 900
        assert daemon.recorder.errors == ["E_LIMIT_005"]
        await client.ask("again", max_tokens=3, stream=False)
        assert (await client.until(Eos)).reason == "length"


async def test_a_first_token_is_out_when_its_reader_has_made_room(
    autojump_clock: MockClock,
) -> None:
    """What is measured from the logits to the first chunk ends when the kernel has the chunk."""
    async with house() as daemon:
        client = daemon.connect()
        await _stop_reading(client)
        await client.ask(max_tokens=3)
        await trio.sleep(5)
        assert daemon.recorder.first_chunks == []
        await client.until(Eos)
        assert daemon.recorder.first_chunks == [pytest.approx(5, abs=0.1)]


@pytest.mark.parametrize(("max_tokens", "stream", "n"), [(1, True, 1), (9, True, 1), (9, False, 0)])
async def test_only_a_stream_has_a_first_chunk(
    autojump_clock: MockClock, max_tokens: int, stream: bool, n: int
) -> None:
    """One for each stream, however short; none where all text comes with the end."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=max_tokens, stream=stream)
        await client.until(Eos)
        assert len(daemon.recorder.first_chunks) == n


async def test_four_clients_do_not_mix(autojump_clock: MockClock) -> None:
    """Each gets its own text, though they share every batch."""
    async with house() as daemon:
        prompts = ["one", "two two", "three three three", LONG]
        clients = [daemon.connect() for _ in prompts]

        async def run(client: Client, prompt: str) -> None:
            await client.ask(prompt=prompt, max_tokens=20)
            await client.until(Eos)

        async with trio.open_nursery() as nursery:
            for client, prompt in zip(clients, prompts, strict=True):
                nursery.start_soon(run, client, prompt)
        for client, prompt in zip(clients, prompts, strict=True):
            assert client.text == daemon.expected(prompt, 20)
            client.close()


async def test_more_connections_than_slots_queue_up(autojump_clock: MockClock) -> None:
    """Forty requests over two slots: forty terminal events, no slot lost."""
    backend = FakeBackend(n_slots=2, cost=linear_cost(TICK_S, 0))
    async with house(backend, max_sessions=64) as daemon:
        clients = [daemon.connect() for _ in range(40)]

        async def run(client: Client) -> None:
            await client.ask(max_tokens=3)
            await client.until(Eos)
            client.close()

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(run, client)
        assert [len(client.ends) for client in clients] == [1] * 40
    assert daemon.recorder.closed == 40


class FullListener:
    """A listener whose process is out of descriptors for two minutes; then it calls `over`."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over

    async def accept_forever(
        self, handle: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        """Fail as often as the real one would."""
        for _ in range(1200):
            failed(OSError(errno.EMFILE, "Too many open files"))
            await trio.sleep(0.1)
        self._over()
        await trio.sleep_forever()

    def stop(self) -> None:
        """Hold nothing."""


async def test_running_out_of_descriptors_is_told_once_a_minute(autojump_clock: MockClock) -> None:
    """Every failure is counted; the log is not flooded with them."""
    async with house() as daemon:
        await daemon.server.serve(FullListener(daemon.server.stop_accepting))  # type: ignore[arg-type]
        assert daemon.recorder.failed_accepts == 1200
        assert daemon.log.lines == ["cannot accept clients"] * 2


# --- refusals ---


@pytest.mark.parametrize(
    ("request_fields", "settings", "code"),
    [
        ({"model": "other"}, {}, "E_MODEL_002"),
        ({"prompt": "x" * 101}, {"max_prompt_bytes": 100}, "E_LIMIT_001"),
        ({"prompt": "é" * 51}, {"max_prompt_bytes": 100}, "E_LIMIT_001"),
        ({"max_tokens": 1020}, {}, "E_LIMIT_004"),
        ({"prompt": "x" * 2000}, {}, "E_LIMIT_004"),
        ({"max_tokens": 11}, {"max_tokens_cap": 10}, "E_PROTO_003"),
    ],
)
async def test_a_refused_request_gets_one_error_and_the_end(
    autojump_clock: MockClock,
    request_fields: dict[str, object],
    settings: dict[str, object],
    code: str,
) -> None:
    """A client that waits for `eos` or end of file only, ends."""
    async with house(**settings) as daemon:
        client = daemon.connect()
        await client.ask(**{"prompt": "hello", **request_fields})  # type: ignore[arg-type]
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal, error.id) == (code, True, "r")
    assert daemon.recorder.errors == [code]


async def test_a_context_error_names_the_numbers(autojump_clock: MockClock) -> None:
    """Who is refused learns how many tokens would have fitted."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=1020)
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert all(number in error.message for number in ("6", "1020", "1024", "1018"))


async def test_a_prompt_that_is_too_long_is_told_how_long_it_may_be(
    autojump_clock: MockClock,
) -> None:
    """In bytes and in tokens, each with its bound and the way out."""
    async with house(max_prompt_bytes=3000) as daemon:
        client, other = daemon.connect(), daemon.connect()
        await client.ask(prompt="x" * 2000)
        await other.ask(prompt="x" * 3001)
        ((tokens,), (size,)) = (await client.rest(), await other.rest())
        assert isinstance(tokens, Error)
        assert isinstance(size, Error)
        assert "shorten it to 1023 or fewer" in tokens.message
        assert "--max-prompt-bytes" in size.message


async def test_without_max_tokens_the_answer_is_trimmed_to_the_room(
    autojump_clock: MockClock,
) -> None:
    """A default never makes a request impossible."""
    async with house(max_tokens=512) as daemon:
        client = daemon.connect()
        await client.ask(prompt="x" * 1000)
        eos = await client.until(Eos)
        assert eos.usage.completion_tokens == 1024 - 1001


async def test_a_full_queue_says_when_to_come_back(autojump_clock: MockClock) -> None:
    """Beyond the bound, a request is refused at once, as retryable."""
    backend = FakeBackend(n_slots=1, cost=linear_cost(TICK_S, 0))
    async with house(backend, max_waiting=1) as daemon:
        first, second, third = (daemon.connect() for _ in range(3))
        await first.ask(max_tokens=100)
        await first.until(Token)
        await second.ask()
        await trio.sleep(TICK_S)
        await third.ask()
        (error,) = await third.rest()
        assert isinstance(error, Error)
        assert (error.code, error.retryable) == ("E_LIMIT_003", True)
        assert error.retry_after_ms is not None


async def test_a_stopped_engine_refuses_requests(autojump_clock: MockClock) -> None:
    """After the inbox is closed nothing is accepted that nobody would answer."""
    async with house() as daemon:
        client = daemon.connect()
        daemon.bench.inbox.close()
        await client.ask()
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("E_RUNTIME_004", True)


async def test_while_draining_requests_are_refused_and_running_ones_finish(
    autojump_clock: MockClock,
) -> None:
    """A drain lets the one go on and sends the other away."""
    async with house() as daemon:
        busy, late = daemon.connect(), daemon.connect()
        await busy.ask(max_tokens=20)
        await busy.until(Token)
        daemon.service.stop_taking()
        daemon.server.stop_accepting()
        await late.ask()
        (error,) = await late.rest()
        assert isinstance(error, Error)
        assert (error.code, error.retryable) == ("E_LIFECYCLE_001", True)
        assert (await busy.until(Eos)).reason == "length"


async def test_the_end_of_a_drain_is_a_terminal_event_with_its_code(
    autojump_clock: MockClock,
) -> None:
    """What still runs when patience is over ends as an error, and the connection after it."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=500)
        await client.until(Token)
        daemon.service.stop_taking()
        daemon.server.stop_accepting()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.rest)
            with trio.move_on_after(1):
                await daemon.service.directory.wait_until_empty()
            daemon.service.end_all(Code.E_LIFECYCLE_001, "stopping")
            await daemon.service.directory.wait_until_empty()
            daemon.server.end_connections()
        eos = client.events[-1]
        assert isinstance(eos, Eos)
        assert (eos.reason, eos.code) == ("error", "E_LIFECYCLE_001")


# --- who is let in ---


async def test_one_connection_too_many_is_told_and_closed(autojump_clock: MockClock) -> None:
    """The others do not notice."""
    async with house(max_sessions=2) as daemon:
        clients = [daemon.connect() for _ in range(3)]
        (error,) = await clients[2].rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal, error.retryable) == ("E_LIMIT_002", True, True)
        await clients[0].ask(max_tokens=2)
        await clients[0].until(Eos)
        for client in clients:
            client.close()
        await daemon.until_idle()
        assert daemon.server.n_connections == 0
        again = daemon.connect()
        await again.ask(max_tokens=2)
        await again.until(Eos)


async def test_another_users_process_is_told_and_closed(autojump_clock: MockClock) -> None:
    """The uid is the kernel's word, not the client's."""
    async with house() as daemon:
        daemon.server._allowed = frozenset()
        client = daemon.connect()
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("E_AUTH_001", True)


async def test_another_users_request_is_not_shown_moved_or_ended(autojump_clock: MockClock) -> None:
    """Where two users are let in: one is told that there is a request, the daemon's own user everything."""
    async with house() as daemon:
        busy = daemon.connect()
        await busy.ask(max_tokens=300, app="mine")
        await busy.until(Token)
        observer, stranger = daemon.service.observer, Principal(connection=9, uid=os.geteuid() + 1)
        state = await observer.state()
        (running,), (seen,) = state.requests, observer.viewer(stranger).requests(state)
        assert seen.is_hidden
        assert (seen.named.app, seen.record.prompt_tokens) == ("another user", 0)
        assert not daemon.service.move(running.record.handle, "background", stranger)
        assert not daemon.service.cancel(running.record.handle, stranger)
        await busy.until(Token)
        admin = daemon.connect()
        await admin.send(SetPriority(request=running.record.handle, priority="background"))
        await admin.until(Ok)
        busy.close()


# --- cancel, in every state ---


async def test_cancel_while_tokenising(autojump_clock: MockClock) -> None:
    """The engine never hears of it, and the client gets its terminal event at once."""
    async with house(run_blocking=slowly(5)) as daemon:
        client = daemon.connect()
        await client.ask()
        await trio.sleep(1)
        await client.send(Cancel("r"))
        eos = await client.until(Eos)
        assert (eos.reason, eos.usage.prompt_tokens) == ("cancelled", 0)
        assert trio.current_time() < 2
        assert daemon.backend.decodes == 0


async def test_cancel_right_behind_the_request(autojump_clock: MockClock) -> None:
    """Both frames in one read: the request still gets its terminal event."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send_bytes(
            _frame(b'{"id":"r","prompt":"p"}') + _frame(b'{"type":"cancel","id":"r"}')
        )
        assert b'"reason":"cancelled"' in await _raw_until(client, b'"eos"')
        assert daemon.recorder.ended == ["cancelled"]


async def test_what_ends_before_it_is_submitted_is_counted_once(autojump_clock: MockClock) -> None:
    """Cancelled, or left by its client; what is refused is an error and no end."""
    async with house(run_blocking=slowly(5)) as daemon:
        for _ in range(2):
            client = daemon.connect()
            await client.ask(n=2)
            await trio.sleep(1)
            client.close()
            await trio.sleep(1)
        assert daemon.recorder.ended == ["cancelled"] * 4
        client = daemon.connect()
        await client.ask(prompt="x" * 100_000)
        assert isinstance(await client.next(), Error)
        assert len(daemon.recorder.ended) == 4


async def test_cancel_while_queued(autojump_clock: MockClock) -> None:
    """A request that never had a slot ends without one."""
    backend = FakeBackend(n_slots=1, cost=linear_cost(TICK_S, 0))
    async with house(backend) as daemon:
        first, second = daemon.connect(), daemon.connect()
        await first.ask(max_tokens=50)
        await first.until(Token)
        await second.ask()
        await trio.sleep(TICK_S)
        await second.send(Cancel("r"))
        assert (await second.until(Eos)).reason == "cancelled"
        assert not [event for event in first.events if isinstance(event, Eos)]


async def test_cancel_during_the_prompt(autojump_clock: MockClock) -> None:
    """Prefill stops at the end of the running chunk."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(prompt=LONG)
        await trio.sleep(1.5 * TICK_S)
        await client.send(Cancel("r"))
        eos = await client.until(Eos)
        assert (eos.reason, eos.usage.completion_tokens) == ("cancelled", 0)
        assert sum(daemon.backend.computed.values()) < 600


async def test_cancel_while_streaming_keeps_the_connection(autojump_clock: MockClock) -> None:
    """What was generated is counted, and the next request runs."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=500)
        for _ in range(3):
            await client.until(Token)
        await client.send(Cancel("r"))
        eos = await client.until(Eos)
        assert eos.reason == "cancelled"
        assert eos.usage.completion_tokens == client.n_tokens
        await client.ask("next", max_tokens=2)
        assert (await client.until(Eos)).reason == "length"


@pytest.mark.parametrize("before", [(), (ListSessions(),)], ids=["alone", "behind a question"])
async def test_cancel_while_parked(
    autojump_clock: MockClock, before: tuple[ListSessions, ...]
) -> None:
    """A stream whose reader has stopped is ended, also if another answer waits for the reader."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=500)
        await trio.sleep(5)
        for event in (*before, Cancel("r")):
            await client.send(event)
        await trio.sleep(1)
        daemon.check_idle_engine()
        assert (await client.until(Eos)).reason == "cancelled"


async def test_a_late_cancel_hits_nothing(autojump_clock: MockClock) -> None:
    """Neither the request that is over nor the next one."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask("a", max_tokens=2)
        await client.until(Eos)
        await client.send_bytes(_frame(b'{"type":"cancel","id":"zz"}'))
        error = await client.until(Error)
        assert (error.code, error.fatal) == ("E_PROTO_005", False)
        await client.ask("b", max_tokens=2)
        assert (await client.until(Eos)).reason == "length"


async def test_cancel_twice_is_one_end(autojump_clock: MockClock) -> None:
    """The second hits nothing, whichever side of the terminal event it lands on."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=500)
        await client.until(Token)
        cancel = _frame(b'{"type":"cancel","id":"r"}')
        await client.send_bytes(cancel + cancel)
        await client.until(Eos)
        assert len(client.ends) == 1


# --- leaving, in every state ---


async def _idle(client: Client) -> None:
    await trio.sleep(TICK_S)


async def _tokenising(client: Client) -> None:
    await client.ask(prompt=LONG)
    await trio.sleep(0.5)


async def _queued(client: Client) -> None:
    await client.ask("a", max_tokens=900)
    await trio.sleep(3 * TICK_S)


async def _prefill(client: Client) -> None:
    await client.ask(prompt=LONG)
    await trio.sleep(1.5 * TICK_S)


async def _streaming(client: Client) -> None:
    await client.ask(max_tokens=500)
    await client.until(Token)


async def _parked(client: Client) -> None:
    await client.ask(max_tokens=900)
    await trio.sleep(5)


async def _mid_frame(client: Client) -> None:
    await client.send_bytes(b"\x10\x00\x00\x00{")
    await trio.sleep(TICK_S)


STATES: dict[str, Callable[[Client], Awaitable[None]]] = {
    "idle": _idle,
    "tokenising": _tokenising,
    "queued": _queued,
    "prefill": _prefill,
    "streaming": _streaming,
    "parked": _parked,
    "mid-frame": _mid_frame,
}


def _house_for(state: str) -> object:
    if state == "tokenising":
        return house(run_blocking=slowly(60))
    if state == "queued":
        return house(FakeBackend(n_slots=1, cost=linear_cost(TICK_S, 0)))
    return house()


@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_is_gone_holds_nothing(autojump_clock: MockClock, state: str) -> None:
    """Whatever it was doing: two ticks later its request, slot, cells and socket are free."""
    async with _house_for(state) as daemon:  # type: ignore[attr-defined]
        other = daemon.connect()
        if state == "queued":
            await other.ask(max_tokens=900, stream=False)
            await trio.sleep(TICK_S)
        client = daemon.connect()
        await STATES[state](client)
        client.close()
        await trio.sleep(2.5 * TICK_S)
        assert daemon.server.n_connections == 1
        assert len(daemon.service.directory) == (state == "queued")
        assert not daemon.bench.engine.registry.waiting
        assert len(daemon.bench.engine.registry.running) == (state == "queued")


@pytest.mark.parametrize("state", ["tokenising", "prefill", "streaming", "parked"])
async def test_a_half_closed_client_gets_its_answer(autojump_clock: MockClock, state: str) -> None:
    """Who only ended its sending side still reads: the request finishes, then it is closed."""
    run = {"run_blocking": slowly(2)} if state == "tokenising" else {}
    async with house(**run) as daemon:  # type: ignore[arg-type]
        client = daemon.connect()
        prompt = LONG if state in {"tokenising", "prefill"} else "hello"
        await client.ask(prompt=prompt, max_tokens=60)
        await trio.sleep({"tokenising": 1, "prefill": 1.5 * TICK_S}.get(state, 5 * TICK_S))
        if state == "parked":
            await trio.sleep(10)
        client.end_sending()
        events = await client.rest()
        eos = events[-1]
        assert isinstance(eos, Eos)
        assert eos.reason == "length"
        assert client.text == daemon.expected(prompt, 60)


async def test_half_closed_and_then_gone(autojump_clock: MockClock) -> None:
    """The rest of a long prompt is not computed for somebody who left in two steps."""
    async with house(FakeBackend(n_batch=16, cost=linear_cost(TICK_S, 0))) as daemon:
        client = daemon.connect()
        await client.ask(prompt=LONG, max_tokens=60)
        await trio.sleep(1.5 * TICK_S)
        client.end_sending()
        await trio.sleep(2 * TICK_S)
        assert daemon.server.n_connections == 1
        client.close()
        await trio.sleep(2 * TICK_S)
        assert daemon.server.n_connections == 0
        assert sum(daemon.backend.computed.values()) < 200


async def test_an_idle_half_close_is_the_end(autojump_clock: MockClock) -> None:
    """Nothing runs and nothing can come: closed at once."""
    async with house() as daemon:
        client = daemon.connect()
        client.end_sending()
        assert await client.rest() == []
        assert trio.current_time() < 0.1


async def test_requests_piped_in_and_half_closed_are_served(autojump_clock: MockClock) -> None:
    """A script that writes one request and ends its input gets the whole answer."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=5)
        client.end_sending()
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 5)
        assert await client.rest() == []


# --- slow clients ---


async def test_a_stopped_reader_parks_after_tens_of_tokens(autojump_clock: MockClock) -> None:
    """It gets its credit and what a small kernel buffer holds; the others go on."""
    async with house() as daemon:
        slow, quick = daemon.connect(), daemon.connect()
        await slow.ask(max_tokens=900)
        await quick.ask(max_tokens=100)
        await quick.until(Eos)
        (running,) = daemon.bench.engine.registry.running.values()
        assert 20 <= running.n_generated <= 80
        assert running.credit == 0
        assert trio.current_time() < 101 * TICK_S + 0.1


async def test_a_parked_stream_goes_on_where_it_was(autojump_clock: MockClock) -> None:
    """Nothing is lost and nothing computed twice when the reader comes back."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=200)
        await trio.sleep(20)
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 200)
        assert sum(daemon.backend.computed.values()) == 6 + 199


async def test_a_reader_that_reads_nothing_is_dropped(autojump_clock: MockClock) -> None:
    """Thirty seconds without a byte read: the request ends, the connection too."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=900)
        await trio.sleep(29)
        assert daemon.server.n_connections == 1
        await trio.sleep(4)
        assert daemon.server.n_connections == 0
        assert daemon.recorder.errors == ["E_IO_001"]
        await client.rest()


async def test_a_slow_reader_is_not_a_stalled_one(autojump_clock: MockClock) -> None:
    """A hundred bytes every three seconds for three minutes: behind, but reading."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=900)
        for _ in range(60):
            await client.transport.receive_some(100)
            await trio.sleep(3)
        assert daemon.server.n_connections == 1
        assert daemon.recorder.errors == []


# --- leaving for another daemon ---


async def test_a_connection_that_leaves_ends_behind_its_answer(autojump_clock: MockClock) -> None:
    """The answer is whole, no word follows it, and the next request fails before it is sent."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=20)
        await client.until(Token)
        daemon.server.drain_connections()
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 20)
        assert await client.rest() == []
        with pytest.raises(trio.BrokenResourceError):
            client.transport.send_nowait(b"x")


@pytest.mark.skipif(sys.platform != "linux", reason="others drop what is unread")
async def test_what_was_sent_before_a_quiet_connection_left_is_answered(
    autojump_clock: MockClock,
) -> None:
    """The client and the daemon may decide in the same moment."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=2)
        await client.until(Eos)
        await trio.sleep(2)
        daemon.server.drain_connections()
        assert await client.rest() == []
        other = daemon.connect()
        await trio.sleep(2)
        await other.ask(max_tokens=5)
        daemon.server.drain_connections()
        await other.until(Eos)
        assert other.text == daemon.expected("hello", 5)
        assert await other.rest() == []


async def test_who_watches_the_metrics_keeps_no_daemon_from_ending(
    autojump_clock: MockClock,
) -> None:
    """There is always a next figure."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send(GetMetrics(interval_ms=100))
        await client.until(Metrics)
        daemon.server.drain_connections()
        assert all(isinstance(event, Metrics) for event in await client.rest())


async def test_a_client_that_asks_questions_without_a_pause_leaves_too(
    autojump_clock: MockClock,
) -> None:
    """It is never idle for a second."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send(ListSessions())
        daemon.server.drain_connections()
        assert [event.sessions for event in await client.rest()] == [()]


async def test_a_frame_has_ten_seconds(autojump_clock: MockClock) -> None:
    """A byte a second is not progress: the deadline is the whole frame's."""
    async with house() as daemon:
        client = daemon.connect()
        frame = _frame(b'{"id":"r","prompt":"hello"}')
        with trio.move_on_after(60):
            for byte in frame:
                await client.send_bytes(bytes([byte]))
                await trio.sleep(1)
                if daemon.recorder.errors:
                    break
        assert trio.current_time() == pytest.approx(10, abs=1.1)
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("E_PROTO_006", True)


async def test_the_deadline_is_each_frames_own(autojump_clock: MockClock) -> None:
    """Frames that follow each other slowly but arrive whole are never late."""
    async with house() as daemon:
        client = daemon.connect()
        for n in range(4):
            frame = _frame(b'{"type":"sessions"}')
            await client.send_bytes(frame[:5])
            await trio.sleep(8)
            await client.send_bytes(frame[5:])
            await client.until(Sessions)
            assert len(client.events) == n + 1


async def test_time_in_which_nothing_is_read_is_not_the_frames(autojump_clock: MockClock) -> None:
    """Behind answers that take long to drain, the rest of a frame may lie in the socket."""
    async with house() as daemon:
        client = daemon.connect()
        frame = _frame(b'{"type":"metrics","interval_ms":1000000}')
        half = len(frame) // 2
        await client.send_bytes(frame[:half])
        (connection,) = daemon.server._sessions
        asked = 0
        while not connection._congested:
            await client.send_bytes(frame[half:] + frame[:half])
            asked += 1
            await trio.sleep(0.001)
        await trio.sleep(daemon.settings.frame_timeout_s + 5)
        await client.send_bytes(frame[half:])
        for _ in range(asked + 1):
            await client.until(Metrics)
        assert daemon.recorder.errors == []


async def test_an_idle_client_is_closed(autojump_clock: MockClock) -> None:
    """After five minutes without a word, with a code that says so."""
    async with house() as daemon:
        client = daemon.connect()
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("E_LIMIT_006", True)
        assert trio.current_time() == pytest.approx(300, abs=2)


async def test_a_client_whose_request_runs_is_not_idle(autojump_clock: MockClock) -> None:
    """The clock of idleness begins at the terminal event."""
    async with house(run_blocking=slowly(400)) as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=2)
        await client.until(Eos)
        ended = trio.current_time()
        assert ended > 400
        await client.rest()
        assert trio.current_time() - ended == pytest.approx(300, abs=2)


# --- broken clients ---


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "E_PROTO_002"),
        (b"\0\0\0\0", "E_PROTO_002"),
        (struct.pack("<I", 1 << 30), "E_PROTO_002"),
        (struct.pack("<I", 4) + b"nope", "E_PROTO_001"),
        (struct.pack("<I", 2) + b"{}", "E_PROTO_003"),
    ],
)
async def test_garbage_gets_one_error_and_the_end(
    autojump_clock: MockClock, data: bytes, code: str
) -> None:
    """Whatever is piped into the socket, the answer is one frame."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send_bytes(data)
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == (code, True)


async def test_the_last_word_survives_bytes_that_nobody_read(autojump_clock: MockClock) -> None:
    """The daemon reads on a little after its error, so that the client gets to see it."""
    async with house() as daemon:
        client = daemon.connect()

        async def flood() -> None:
            with trio.move_on_after(30):
                try:
                    await client.send_bytes(b"GET " * (1 << 17))
                except trio.BrokenResourceError:
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            (error,) = await client.rest()
            assert isinstance(error, Error)
            nursery.cancel_scope.cancel()


async def test_a_broken_frame_ends_what_runs(autojump_clock: MockClock) -> None:
    """A fatal error is the last word, also for the running request."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=500)
        await client.until(Token)
        await client.send_bytes(b"\0\0\0\0")
        events = await client.rest()
        assert isinstance(events[-1], Error)
        assert len(client.ends) == 1
        await trio.sleep(2 * TICK_S)
        daemon.check_idle_engine()


async def test_bad_documents_beside_a_running_request_leave_it_alone(
    autojump_clock: MockClock,
) -> None:
    """A document that cannot be read is answered; the stream goes on."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=20)
        await client.until(Token)
        await client.send_bytes(_frame(b"nope"))
        error = await client.until(Error)
        assert (error.code, error.fatal) == ("E_PROTO_001", False)
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 20)


# --- admin requests ---


async def test_sessions_join_what_engine_and_connection_know(autojump_clock: MockClock) -> None:
    """Handle and progress from the one, app, id and process from the other."""
    async with house() as daemon:
        client, admin = daemon.connect(), daemon.connect()
        await client.ask("mine", max_tokens=500, app="editor", priority="background")
        await client.until(Token)
        await admin.send(ListSessions())
        (info,) = (await admin.until(Sessions)).sessions
        assert (info.request, info.id, info.app) == (1, "mine", "editor")
        assert (info.lane, info.state) == ("background", "decode")
        assert info.pid is not None
        assert info.uid is not None
        assert info.prompt_tokens == 6


async def test_admin_requests_are_answered_between_tokens(autojump_clock: MockClock) -> None:
    """On the same connection, in order, without hurting the stream."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=20)
        await client.until(Token)
        await client.send(ListSessions())
        await client.send(GetMetrics())
        assert (await client.until(Sessions)).sessions[0].id == "r"
        assert (await client.until(Metrics)).metrics["sessions"] == 1
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 20)


async def test_metrics_once_and_closed(autojump_clock: MockClock) -> None:
    """A one-shot client needs to wait for nothing but the end."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send(GetMetrics())
        (event,) = await client.rest()
        assert isinstance(event, Metrics)
        assert trio.current_time() < 0.1


async def test_metrics_with_an_interval_go_on_until_the_client_leaves(
    autojump_clock: MockClock,
) -> None:
    """One at once, then one each interval; watching is not idling."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send(GetMetrics(interval_ms=60_000))
        for n in range(10):
            await client.until(Metrics)
            assert trio.current_time() == pytest.approx(60 * n)
        client.close()
        await trio.sleep(TICK_S)
        assert daemon.server.n_connections == 0


async def test_a_request_can_be_moved_to_the_other_lane_by_anybody(
    autojump_clock: MockClock,
) -> None:
    """By its handle, from another connection; by its id, from its own."""
    async with house() as daemon:
        client, admin = daemon.connect(), daemon.connect()
        await client.ask(max_tokens=500)
        await client.until(Token)
        await admin.send(SetPriority(request=1, priority="background"))
        assert await admin.until(Ok) == Ok(id=None)
        await admin.send(ListSessions())
        assert (await admin.until(Sessions)).sessions[0].lane == "background"
        await client.send(SetPriority(id="r", priority="interactive"))
        assert await client.until(Ok) == Ok(id="r")


async def test_an_unknown_handle_is_not_fatal(autojump_clock: MockClock) -> None:
    """The request may just have ended."""
    async with house() as daemon:
        admin = daemon.connect()
        await admin.send(SetPriority(request=77, priority="background"))
        error = await admin.until(Error)
        assert (error.code, error.fatal) == ("E_PROTO_005", False)
        await admin.send(ListSessions())
        await admin.until(Sessions)


async def test_a_flood_of_admin_requests_does_not_pile_up_answers(
    autojump_clock: MockClock,
) -> None:
    """Who does not read its answers is not read from either."""
    async with house() as daemon:
        client = daemon.connect()
        flood = _frame(b'{"type":"metrics","interval_ms":1000000}') * 50_000
        (connection,) = daemon.server._sessions
        most = 0
        with trio.move_on_after(20):
            while flood:
                sent = client.transport.send_nowait(flood[:65536])
                flood = flood[sent:]
                await trio.sleep(0.01)
                most = max(most, connection._writer.waiting_bytes)
        assert flood
        assert most < 2 * daemon.settings.backlog_bytes


# --- faults of the engine ---


async def test_a_fault_of_one_stream_is_its_terminal_event(autojump_clock: MockClock) -> None:
    """Non-finite logits: an `eos` with a code, and the connection is as good as before."""
    backend = FakeBackend(cost=linear_cost(TICK_S, 0), faults={3: InjectedFault(bad_rows=(0,))})
    async with house(backend) as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=50)
        eos = await client.until(Eos)
        assert (eos.reason, eos.code) == ("error", "E_RUNTIME_003")
        assert daemon.recorder.errors == ["E_RUNTIME_003"]
        await client.ask("again", max_tokens=3)
        assert (await client.until(Eos)).reason == "length"


async def test_the_models_own_end_is_a_stop(autojump_clock: MockClock) -> None:
    """An end-of-generation token is not sent."""
    backend = FakeBackend(cost=linear_cost(TICK_S, 0), end_after=6)
    async with house(backend) as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=500)
        eos = await client.until(Eos)
        assert eos.reason == "stop"
        assert all(e.token_id != EOS for e in client.events if isinstance(e, Token))


async def test_credit_is_given_back_only_for_what_was_flushed(autojump_clock: MockClock) -> None:
    """The sum of all credit is the number of tokens that the kernel took."""
    async with house() as daemon:
        given: list[int] = []
        put = daemon.bench.inbox.put

        def spy(message: object) -> None:
            if isinstance(message, Credit):
                given.append(message.n)
            put(message)  # type: ignore[arg-type]

        daemon.bench.inbox.put = spy  # type: ignore[method-assign]
        client = daemon.connect()
        await client.ask(max_tokens=900)
        await trio.sleep(10)
        in_kernel = sum(given)
        (running,) = daemon.bench.engine.registry.running.values()
        assert running.n_generated == in_kernel + daemon.served.bounds.credit


async def test_an_answer_for_a_connection_that_is_over_is_dropped(
    autojump_clock: MockClock,
) -> None:
    """The engine's picture may come after the client has left."""
    async with house() as daemon:
        replies: list[object] = []
        daemon.bench.inbox.put(Inspect(replies.append))
        client = daemon.connect()
        await client.ask(max_tokens=50)
        await client.until(Token)
        await client.send(ListSessions())
        client.close()
        await trio.sleep(3 * TICK_S)
        assert daemon.log.faults == []


async def _stop_reading(client: Client) -> None:
    """Fill what the kernel holds for the client with answers that it leaves there."""
    await client.send_bytes(60 * _frame(b'{"type":"sessions"}'))
    await trio.sleep(60 * INTERVAL_S)


async def _end_unread(client: Client) -> None:
    """Let a request end whose terminal event has to wait for the client."""
    await _stop_reading(client)
    await client.ask("a", max_tokens=3, stream=False)
    await trio.sleep(10 * TICK_S)


def _frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


async def _raw_until(client: Client, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = await client.transport.receive_some()
        if not more:
            raise AssertionError(f"closed before {mark!r}: {data!r}")
        data += more
    return data
