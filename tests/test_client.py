"""The client library against a whole daemon in virtual time, over a real socket file."""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from client_kit import client_of, served, works
from net_kit import TICK_S, slowly
from reply_kit import THINKING_TEMPLATE
from trio.testing import MockClock

from uma_protocol import Cancel, LocalProtocolError, Message
from uma_trio.client import (
    HELD_BACK,
    ConnectionFailed,
    ServerError,
    connect,
    generate_sync,
)
from uma_trio.client.link import Link
from uma_trio.client.on_trio import TrioLoop
from uma_trio.client.reach import DaemonAddress
from uma_trio.client.request import build_request
from uma_trio.sockets.listener import claim
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost
from uma_trio_sim.scripted import ScriptedBackend


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a short path for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma") as folder:
        yield Path(folder) / "s"


# --- streaming ---


async def test_the_texts_of_all_tokens_are_the_answer(
    autojump_clock: MockClock, path: Path
) -> None:
    """Also what was held back to the end; `last` is the terminal event."""
    async with client_of(path) as (client, daemon):
        generation = client.generate("hello", max_tokens=10)
        tokens = [token async for token in generation]
        assert "".join(token.text for token in tokens) == daemon.expected("hello", 10)
        assert sum(token.token_id != HELD_BACK for token in tokens) == 10
        assert client.last is generation.eos
        assert client.last is not None
        assert client.last.usage.completion_tokens == 10


async def test_a_whole_answer_comes_the_same_way(autojump_clock: MockClock, path: Path) -> None:
    """Without streaming there is one piece of text."""
    async with client_of(path) as (client, daemon):
        (token,) = [t async for t in client.generate("hello", max_tokens=10, stream=False)]
        assert (token.text, token.token_id) == (daemon.expected("hello", 10), HELD_BACK)


async def test_one_generation_after_the_other(autojump_clock: MockClock, path: Path) -> None:
    """On one connection, each with an id of its own."""
    async with client_of(path) as (client, daemon):
        ids = set()
        for n in range(5):
            generation = client.generate(f"prompt {n}", max_tokens=5)
            assert await generation.text() == daemon.expected(f"prompt {n}", 5)
            ids.add(generation.id)
        assert len(ids) == 5
        assert daemon.recorder.opened == 1


async def test_a_finished_generation_stays_finished(autojump_clock: MockClock, path: Path) -> None:
    """Iterating on is an end, not an error, and closing it twice is nothing."""
    async with client_of(path) as (client, _):
        generation = client.generate("hello", max_tokens=2)
        await generation.text()
        assert await generation.text() == ""
        await generation.aclose()
        await generation.aclose()


@pytest.mark.parametrize(
    "chat",
    [[("user", "hi")], [{"role": "user", "content": "hi"}], [Message(role="user", content="hi")]],
    ids=["pairs", "mappings", "messages"],
)
async def test_chats_are_spelled_as_one_likes(
    chat: Any, autojump_clock: MockClock, path: Path
) -> None:
    """Pairs, mappings and messages are the same request."""
    async with client_of(path) as (client, _):
        generation = client.generate(messages=chat, max_tokens=2)
        assert generation._run.request.messages == (Message(role="user", content="hi"),)
        await generation.aclose()


# --- leaving early ---


async def test_leaving_the_block_ends_the_request(autojump_clock: MockClock, path: Path) -> None:
    """The daemon is told and its last word is read."""
    async with client_of(path) as (client, daemon):
        async with client.generate("hello", max_tokens=900) as generation:
            async for _ in generation:
                break
        assert generation.eos is not None
        assert generation.eos.reason == "cancelled"
        assert await works(client, daemon)


async def test_a_loop_that_breaks_without_a_block_ends_it_too(
    autojump_clock: MockClock, path: Path
) -> None:
    """Dropping the generation tells the daemon; nobody has to wait for it."""
    async with client_of(path) as (client, daemon):
        async for _ in client.generate("hello", max_tokens=900):
            break
        assert await works(client, daemon)


async def test_being_cancelled_ends_the_request(autojump_clock: MockClock, path: Path) -> None:
    """While it waits for a token, with a block or without."""
    async with client_of(path) as (client, daemon):
        for _ in range(2):
            with trio.move_on_after(10.5 * TICK_S) as scope:
                await client.generate("hello", max_tokens=900).text()
            assert scope.cancelled_caught
            assert await works(client, daemon)


async def test_being_cancelled_before_the_first_token(
    autojump_clock: MockClock, path: Path
) -> None:
    """While the daemon still tokenises."""
    async with client_of(path, run_blocking=slowly(60)) as (client, daemon):
        with trio.move_on_after(1):
            await client.generate("hello").text()
        assert trio.current_time() < 1.1
        assert not len(daemon.service.directory)


async def test_an_error_in_the_block_leaves_it_as_it_is(
    autojump_clock: MockClock, path: Path
) -> None:
    """Never in a group, and the request is ended."""
    async with client_of(path) as (client, daemon):

        async def fail() -> None:
            async with client.generate("hello", max_tokens=900) as generation:
                async for _ in generation:
                    raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await fail()
        assert await works(client, daemon)


async def test_leaving_after_the_end_is_nothing(autojump_clock: MockClock, path: Path) -> None:
    """No cancel frame for what is over."""
    async with client_of(path) as (client, daemon):
        async with client.generate("hello", max_tokens=3) as generation:
            await generation.text()
        assert await works(client, daemon)
        assert daemon.recorder.errors == []


async def test_a_cancel_that_comes_too_late_is_not_the_next_ones_error(
    autojump_clock: MockClock, path: Path
) -> None:
    """The daemon answers it with E_PROTO_005, which is read and forgotten."""
    async with client_of(path) as (client, daemon):
        generation = client.generate("hello", max_tokens=3)
        await generation.text()
        link = client._link
        assert link is not None
        link._protocol._running.id = generation.id  # as if the terminal event were still under way
        await link.send(Cancel(generation.id))
        link._protocol._running.id = None
        assert await works(client, daemon)
        assert daemon.recorder.errors == ["E_PROTO_005"]


async def test_a_daemon_that_hangs_is_left_after_two_seconds(
    autojump_clock: MockClock, path: Path
) -> None:
    """Shielded does not mean for ever: then the connection is closed."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        async with connect(path) as client:
            with trio.move_on_after(5):
                await client.generate("hello").text()
            assert trio.current_time() == pytest.approx(7)
            with pytest.raises(ConnectionFailed):
                await client.generate("hello").text()


async def test_two_generations_at_once_are_refused(autojump_clock: MockClock, path: Path) -> None:
    """A connection carries one request; the running one does not notice."""
    async with client_of(path) as (client, daemon):
        first = client.generate("hello", max_tokens=20)
        texts = [(await anext(first)).text]
        with pytest.raises(trio.BusyResourceError):
            await client.generate("other").text()
        texts.append(await first.text())
        assert "".join(texts) == daemon.expected("hello", 20)


# --- errors ---


async def test_a_refusal_carries_what_the_daemon_said(
    autojump_clock: MockClock, path: Path
) -> None:
    """Code, message, and when to try again."""
    backend = FakeBackend(n_slots=1, cost=linear_cost(TICK_S, 0))
    async with served(path, backend, max_waiting=1) as daemon:
        async with connect(path) as one, connect(path) as two, connect(path) as three:
            await anext(running := one.generate("hello", max_tokens=900))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(two.generate("hello", max_tokens=1).text)
                await trio.sleep(TICK_S)
                with pytest.raises(ServerError) as caught:
                    await three.generate("hello").text()
                nursery.cancel_scope.cancel()
            await running.aclose()
        error = caught.value
        assert (error.code, error.retryable) == ("E_LIMIT_003", True)
        assert error.retry_after_ms is not None
        assert "E_LIMIT_003" in str(error)
        await daemon.until_idle()


async def test_an_end_with_an_error_is_raised(autojump_clock: MockClock, path: Path) -> None:
    """The connection stays good: only that request failed."""
    backend = FakeBackend(cost=linear_cost(TICK_S, 0), faults={3: InjectedFault(bad_rows=(0,))})
    async with client_of(path, backend) as (client, daemon):
        with pytest.raises(ServerError) as caught:
            await client.generate("hello", max_tokens=50).text()
        assert caught.value.code == "E_RUNTIME_003"
        assert await works(client, daemon)


async def test_a_parameter_that_does_not_exist_shows_at_once(
    autojump_clock: MockClock, path: Path
) -> None:
    """Before anything is sent."""
    async with client_of(path) as (client, daemon):
        with pytest.raises(TypeError, match="temprature"):
            client.generate("hello", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(LocalProtocolError, match="temperature"):
            client.generate("hello", temperature=-1)
        assert await works(client, daemon)


async def test_another_users_socket_is_not_talked_to(
    autojump_clock: MockClock, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt goes to nobody but the user's own daemon."""
    async with served(path):
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(ConnectionFailed, match=f"user {uid}"):
            async with connect(path):
                pass
        monkeypatch.undo()


async def test_a_connection_that_breaks_is_said_to(autojump_clock: MockClock, path: Path) -> None:
    """In the middle of a stream the daemon goes away."""
    async with client_of(path) as (client, daemon):
        generation = client.generate("hello", max_tokens=900)
        await anext(generation)
        daemon.server.end_connections()
        with pytest.raises(ConnectionFailed, match="start it with `uma-trio serve`"):
            await generation.text()


async def test_the_last_word_is_read_when_sending_fails(
    autojump_clock: MockClock, path: Path
) -> None:
    """The daemon had closed the idle connection and said why; that is the error."""
    async with client_of(path) as (client, _):
        await trio.sleep(310)
        with pytest.raises(ServerError) as caught:
            await client.generate("hello").text()
        assert caught.value.code == "E_LIMIT_006"


# --- reconnecting ---


async def test_with_reconnect_an_idle_client_is_not_too_old(
    autojump_clock: MockClock, path: Path
) -> None:
    """The daemon closed the connection meanwhile; the next generation dials again."""
    async with served(path) as daemon, connect(path, reconnect=True) as client:
        for _ in range(3):
            assert await client.generate("again", max_tokens=7).text() == daemon.expected(
                "again", 7
            )
            await trio.sleep(310)


async def test_after_a_fatal_refusal_the_next_step_is_named(
    autojump_clock: MockClock, path: Path
) -> None:
    """The refusal closes the connection; with ``reconnect`` the next generation dials again."""
    async with served(path) as daemon:
        async with connect(path) as client:
            with pytest.raises(ServerError, match="E_LIMIT_004"):
                await client.generate("hello", max_tokens=100_000).text()
            with pytest.raises(ConnectionFailed, match=r"connect\(reconnect=True\)"):
                await client.generate("hello", max_tokens=5).text()
        async with connect(path, reconnect=True) as client:
            with pytest.raises(ServerError, match="E_LIMIT_004"):
                await client.generate("hello", max_tokens=100_000).text()
            text = await client.generate("hello", max_tokens=5).text()
            assert text == daemon.expected("hello", 5)


async def test_with_reconnect_a_client_waits_for_the_daemon(
    autojump_clock: MockClock, path: Path
) -> None:
    """One that is started a little before the daemon finds it."""
    answered = trio.Event()

    async def serve_later() -> None:
        await trio.sleep(1)
        async with served(path):
            await answered.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_later)
        async with connect(path, reconnect=True) as client:
            assert await client.generate("hello", max_tokens=5).text()
        answered.set()
    assert trio.current_time() > 1


async def test_with_reconnect_it_is_given_up_in_the_end(
    autojump_clock: MockClock, path: Path
) -> None:
    """Nobody waits for ever for a daemon that does not come."""
    with pytest.raises(ConnectionFailed):
        async with connect(path, reconnect=True):
            pass
    assert 1 < trio.current_time() < 20


async def test_a_stream_that_has_begun_is_never_repeated(
    autojump_clock: MockClock, path: Path
) -> None:
    """After the first token a lost connection is an error, whatever was asked for."""
    async with served(path) as daemon, connect(path, reconnect=True) as client:
        generation = client.generate("hello", max_tokens=900)
        await anext(generation)
        daemon.server.end_connections()
        with pytest.raises(ConnectionFailed):
            await generation.text()


async def test_later_means_later(autojump_clock: MockClock, path: Path) -> None:
    """A full queue is tried again after the time that the daemon named."""
    backend = FakeBackend(n_slots=1, cost=linear_cost(TICK_S, 0))
    async with (
        served(path, backend, max_waiting=1) as daemon,
        connect(path) as one,
        connect(path) as two,
        connect(path, reconnect=True) as three,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(one.generate("hello", max_tokens=60).text)
        await trio.sleep(2 * TICK_S)
        nursery.start_soon(two.generate("hello", max_tokens=1).text)
        await trio.sleep(TICK_S)
        assert await three.generate("hello", max_tokens=5).text() == daemon.expected("hello", 5)
        assert "E_LIMIT_003" in daemon.recorder.errors


# --- admin ---


async def test_admin_requests_beside_a_generation(autojump_clock: MockClock, path: Path) -> None:
    """They have a connection of their own, and the stream goes on."""
    async with client_of(path) as (client, daemon):
        async with client.generate("hello", max_tokens=100, app="test") as generation:
            first = await anext(generation)
            (info,) = await client.sessions()
            assert (info.id, info.app, info.lane) == (generation.id, "test", "interactive")
            await client.set_priority(info.request, "background")
            (info,) = await client.sessions()
            assert info.lane == "background"
            assert (await client.metrics())["sessions"] == 2
            text = first.text + await generation.text()
        assert text == daemon.expected("hello", 100)


async def test_a_request_is_explained_while_it_runs_and_afterwards(
    autojump_clock: MockClock, path: Path
) -> None:
    """By the handle that the terminal event carries too."""
    async with client_of(path) as (client, _):
        async with client.generate("hello", max_tokens=20, app="test") as generation:
            await anext(generation)
            (story,) = (await client.explain()).requests
            assert (story.app, story.state) == ("test", "decode")
            await generation.text()
        assert client.last is not None
        found = await client.explain(client.last.request, ticks=3)
        (story,) = found.requests
        assert (story.reason, story.completion_tokens) == ("length", 20)
        assert len(found.ticks) == 3


async def test_an_unknown_handle_is_an_error(autojump_clock: MockClock, path: Path) -> None:
    """The request may have ended a moment ago."""
    async with client_of(path) as (client, _):
        with pytest.raises(ServerError, match=r"E_PROTO_005.*uma-trio ps"):
            await client.set_priority(99, "background")
        with pytest.raises(ServerError, match="E_PROTO_005"):
            await client.explain(99)


# --- the rest ---


async def test_a_long_request_is_sent_whole(autojump_clock: MockClock, path: Path) -> None:
    """Longer than any socket buffer, to a daemon that answers it in one sentence."""
    async with client_of(path) as (client, _):
        with pytest.raises(ServerError, match="E_LIMIT_001"):
            await client.generate("x" * 900_000).text()


async def test_a_busy_daemon_is_dialled_again(autojump_clock: MockClock, path: Path) -> None:
    """A full backlog is not an absent daemon."""
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        first = await Link.dial(TrioLoop(), str(path))
        with pytest.raises(ConnectionFailed, match="too busy"):
            await Link.dial(TrioLoop(), str(path))
        first.close()


def test_scripts_learn_that_nobody_serves(path: Path) -> None:
    """The synchronous front raises the same errors."""
    with pytest.raises(ConnectionFailed, match="uma-trio serve"):
        list(generate_sync("hello", path))


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_path_that_is_no_socket_is_said_to(tmp_path: Path, name: str) -> None:
    """A daemon that is started would not mend that."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConnectionFailed, match="not a socket"):
        list(generate_sync("hello", tmp_path / name))


def test_a_socket_that_is_removed_meanwhile_is_a_failed_connection(path: Path) -> None:
    """A daemon that stops refuses first and removes its socket then."""

    class Refused(socket.socket):
        def connect(self, _: object) -> None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    with (
        Refused(socket.AF_UNIX) as sock,
        pytest.raises(ConnectionFailed, match="uma-trio serve --socket"),
    ):
        DaemonAddress(str(path)).connect(sock)


def test_another_socket_is_in_the_command_that_starts_a_daemon(path: Path) -> None:
    """It can be copied; the usual one needs no flag."""
    with pytest.raises(ConnectionFailed, match=f"uma-trio serve --socket {path}`"):
        list(generate_sync("hello", path))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")
def test_a_daemon_that_starts_or_stops_is_named(path: Path) -> None:
    """It has the lock and no socket that accepts; another one could not be started."""
    with claim(path), pytest.raises(ConnectionFailed, match="is starting or stopping") as failed:
        list(generate_sync("hello", path))
    assert failed.value.holder == os.getpid()


# --- tools and reasoning ---

_SAYS = (
    "<think>\nWhy?\n</think>\n\nSo.\n<tool_call>\n"
    '{"name": "look", "arguments": {"what": "x"}}\n</tool_call>'
)
_LOOK = {"name": "look", "parameters": {"type": "object"}}


def _backend() -> ScriptedBackend:
    return ScriptedBackend(
        [list(_SAYS.encode())],
        n_ctx=2048,
        n_batch=512,
        cost=linear_cost(TICK_S, 0.0),
        chat_template=THINKING_TEMPLATE,
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_and_reasoning_come_apart_from_the_text(
    autojump_clock: MockClock, path: Path, stream: bool
) -> None:
    """In pieces with the tokens, and the calls whole at the end; the texts are the content."""
    async with client_of(path, _backend()) as (client, _):
        answer = client.generate(
            messages=[("user", "hi")], tools=[_LOOK], max_tokens=200, stream=stream
        )
        tokens = [token async for token in answer]
        assert "".join(token.text for token in tokens) == "So."
        assert "".join(token.reasoning or "" for token in tokens) == "Why?"
        (call,) = await answer.calls()
        assert (call.name, call.arguments) == ("look", '{"what": "x"}')
        pieces = [piece for token in tokens for piece in token.calls]
        assert "".join(piece.arguments for piece in pieces) == ('{"what": "x"}' if stream else "")
        assert [piece.name for piece in pieces if piece.name] == ["look"] * stream


async def test_a_conversation_goes_on_behind_a_call(autojump_clock: MockClock, path: Path) -> None:
    """With the call and its result as messages."""
    async with client_of(path, _backend()) as (client, _):
        first = client.generate(messages=[("user", "hi")], tools=[_LOOK], max_tokens=200)
        (call,) = await first.calls()
        again = client.generate(
            messages=[
                ("user", "hi"),
                {"role": "assistant", "content": "", "calls": [call]},
                {"role": "tool", "content": "sun", "call_id": call.id},
            ],
            tools=[_LOOK],
            tool_choice="none",
            reasoning_budget=2,
            max_tokens=200,
        )
        text = await again.text()
        assert text.endswith("</tool_call>")


def test_a_request_names_no_temperature_of_its_own() -> None:
    """Also for several answers: what the model's owner has set would not apply."""
    asked = {"n": 3}, {"n": 3, "temperature": 0.0}, {"n": 1}, {}
    found = [build_request("hi", None, each).temperature for each in asked]
    assert found == [None, 0.0, None, None]
