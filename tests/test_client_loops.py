"""The client under trio and under asyncio: what one guarantees the other does, against the same daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import net_kit
import pytest
import trio
import trio.testing
from client_kit import Aside, in_thread, served
from encoder_kit import FakeEncoder, info_of
from net_kit import House
from test_tcp import RIGHT, _served

import uma_protocol
from uma_protocol import Error, Role
from uma_trio import client as trio_names
from uma_trio.client import HELD_BACK, ConnectionFailed, Generation, ServerError, aio
from uma_trio.client import streaming as streaming_module
from uma_trio.client.loop import Loop, Stream
from uma_trio.client.on_asyncio import AsyncioLoop, AsyncioStream
from uma_trio.client.on_trio import TrioLoop, TrioStream
from uma_trio.sockets.transport import Transport
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

TICK_S = 0.001
LONG = 20_000  # tokens that no test waits for
Work = Callable[[Callable[[], None]], Awaitable[Any]]


class Trio:
    """The client, and how a test runs and cancels it, under trio."""

    names: ModuleType = trio_names
    loop: type[Loop] = TrioLoop
    busy: type[Exception] = trio.BusyResourceError

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        """Run a test."""
        trio.run(test)

    async def cancel(self, work: Work) -> None:
        """Run `work` until it calls what it is given, cancel it and wait for its end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, nursery.cancel_scope.cancel)

    def stream(self, sock: socket.socket) -> Stream:
        """Return the stream of a socket."""
        return TrioStream(Transport(sock))

    async def turns(self) -> None:
        """Let everything run that can."""
        await trio.testing.wait_all_tasks_blocked()


class Asyncio:
    """The client, and how a test runs and cancels it, under asyncio."""

    names: ModuleType = aio
    loop: type[Loop] = AsyncioLoop
    busy: type[Exception] = RuntimeError

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        """Run a test; what the loop would only log is an error."""
        faults: list[Any] = []

        async def body() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            await test()

        asyncio.run(body())
        assert not faults

    async def cancel(self, work: Work) -> None:
        """Run `work` until it calls what it is given, cancel it and wait for its end."""
        reached = asyncio.Event()

        async def run() -> None:
            await work(reached.set)

        task = asyncio.create_task(run())
        await reached.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    def stream(self, sock: socket.socket) -> Stream:
        """Return the stream of a socket."""
        sock.setblocking(False)
        return AsyncioStream(sock)

    async def turns(self) -> None:
        """Let everything run that can."""
        for _ in range(20):
            await asyncio.sleep(0)


Kit = Trio | Asyncio


@pytest.fixture(name="kit", params=[Trio, Asyncio], ids=["trio", "asyncio"])
def _kit(request: pytest.FixtureRequest) -> Kit:
    return request.param()  # type: ignore[no-any-return]


@pytest.fixture(name="path")
def _path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a short path for a socket; ticks are short too."""
    monkeypatch.setattr(net_kit, "TICK_S", TICK_S)
    with tempfile.TemporaryDirectory(prefix="uma") as folder:
        yield Path(folder) / "s"


@pytest.fixture(name="house")
def _house(path: Path) -> Iterator[tuple[House, Aside]]:
    """Run a daemon at `path`; at the end nothing of a request may be left in it."""
    with in_thread(lambda: served(path, _backend())) as found:
        yield found


def _backend(**options: Any) -> FakeBackend:
    return FakeBackend(n_ctx=1 << 20, cost=linear_cost(TICK_S, 0.0), **options)


async def _works(client: Any, daemon: House) -> bool:
    return bool(await client.generate("again", max_tokens=7).text() == daemon.expected("again", 7))


# --- streaming ---


def test_the_texts_of_all_tokens_are_the_answer(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """One generation after the other on one connection; `last` is the terminal event."""
    daemon, _ = house

    async def test() -> None:
        async with kit.names.connect(path) as client:
            for prompt in ("hello", "other"):
                generation = client.generate(prompt, max_tokens=10)
                tokens = [token async for token in generation]
                assert "".join(token.text for token in tokens) == daemon.expected(prompt, 10)
                assert sum(token.token_id != HELD_BACK for token in tokens) == 10
                assert client.last is generation.eos
            assert await generation.text() == ""
            assert len(await client.generate("hello", n=3, max_tokens=4).texts()) == 3
            (whole,) = [t async for t in client.generate("hello", max_tokens=9, stream=False)]
            assert whole.text == daemon.expected("hello", 9)

    kit.run(test)
    assert daemon.recorder.opened == 1


def test_a_request_longer_than_any_buffer_is_sent_whole(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """To a daemon that answers it in one sentence."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            with pytest.raises(ServerError, match="E_LIMIT_001"):
                await client.generate("x" * 900_000).text()

    kit.run(test)


def test_who_waits_for_a_model_is_told_how_far_it_is(
    kit: Kit, path: Path, house: tuple[House, Aside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call in the task that iterates; then the answer comes as ever."""
    daemon, aside = house
    loaded, ready = trio.Event(), daemon.service.ready
    entry = SimpleNamespace(names=("code",), wait_reason="model code is loading, 40%", progress=0.4)

    async def slowly(name: Any, waits: Any = None, payer: str = "", **more: Any) -> Any:
        waits(entry)
        await loaded.wait()
        return await ready(name, **more)

    monkeypatch.setattr(daemon.service, "ready", slowly)
    told: list[Any] = []

    async def test() -> None:
        async with kit.names.connect(path) as client:

            def tell(found: Any) -> None:
                told.append((found.model, found.state, found.progress))
                aside(loaded.set)

            generation = client.generate("hello", max_tokens=5, on_loading=tell)
            assert await generation.text() == daemon.expected("hello", 5)

    kit.run(test)
    assert told == [("code", entry.wait_reason, 0.4)]


# --- vectors and scores ---


@pytest.fixture(name="encoders")
def _encoders(path: Path) -> Iterator[dict[Any, FakeEncoder]]:
    """Run a daemon at `path` that makes vectors and scores."""
    models: dict[Any, FakeEncoder] = {
        "embed": FakeEncoder(),
        "rank": FakeEncoder(info_of("rank")),
    }
    with in_thread(lambda: served(path, _backend(), encoders=models)):
        yield models


def test_vectors_and_scores_are_the_same_under_each_loop(
    kit: Kit, path: Path, encoders: dict[Any, FakeEncoder]
) -> None:
    """Between two generations of one connection; a refusal is raised with its code."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            found = await client.embed(["a text", "b"])
            lengths = [sum(x * x for x in vector) for vector in found.vectors]
            assert lengths == pytest.approx([1, 1])
            assert found.n_tokens == 9
            assert (await client.embed("b")).vectors == found.vectors[1:]
            ranking = await client.rerank("q", ["b", "dd", "ccc"], top_n=2)
            assert isinstance(ranking, kit.names.Ranking)
            assert len(ranking.scores) == 2
            assert await client.generate("hello", max_tokens=2).text()
            with pytest.raises(ServerError, match="E_MODEL_002"):
                await client.embed("b", model="other")

    kit.run(test)


def test_who_waits_for_an_encoder_is_told_how_far_it_is(
    kit: Kit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As who waits for a model that writes, for vectors and for scores."""
    models: dict[Any, FakeEncoder] = {
        "embed": FakeEncoder(),
        "rank": FakeEncoder(info_of("rank")),
    }
    entry = SimpleNamespace(names=("e5",), wait_reason="model e5 is loading, 40%", progress=0.4)
    told: list[Any] = []
    with in_thread(lambda: served(path, _backend(), encoders=models)) as (daemon, aside):
        ready, loaded = daemon.service.ready, trio.Event()

        async def slowly(name: Any, waits: Any = None, payer: str = "", **more: Any) -> Any:
            waits(entry)
            await loaded.wait()
            return await ready(name, **more)

        monkeypatch.setattr(daemon.service, "ready", slowly)

        def tell(found: Any) -> None:
            told.append((found.model, found.progress))
            aside(loaded.set)

        async def test() -> None:
            nonlocal loaded
            async with kit.names.connect(path) as client:
                assert len((await client.embed(["a text"], on_loading=tell)).vectors) == 1
                loaded = trio.Event()
                assert len((await client.rerank("q", ["b"], on_loading=tell)).scores) == 1

        kit.run(test)
    assert told == [("e5", 0.4)] * 2


def test_cancelled_vectors_are_ended_in_the_daemon(
    kit: Kit, path: Path, encoders: dict[Any, FakeEncoder]
) -> None:
    """Under each loop; the connection is good for another request."""

    async def test() -> None:
        async with kit.names.connect(path) as client:

            async def work(reached: Callable[[], None]) -> None:
                reached()
                await client.embed(["some text"] * 1000)

            await kit.cancel(work)
            assert await client.generate("hello", max_tokens=2).text()

    kit.run(test)
    assert len(encoders["embed"].batches) < 500


# --- leaving early ---


def test_leaving_the_block_ends_the_request(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """The daemon is told, its last word is read, and the connection is good."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            async with client.generate("hello", max_tokens=LONG) as generation:
                async for _ in generation:
                    break
            assert generation.eos.reason == "cancelled"
            assert await _works(client, house[0])

    kit.run(test)


def test_a_loop_that_breaks_without_a_block_ends_it_too(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """Dropping the generation tells the daemon, and the next one works."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            async for _ in client.generate("hello", max_tokens=LONG):
                break
            assert await _works(client, house[0])
            assert client.last.reason == "length"

    kit.run(test)
    assert house[0].recorder.opened == 1


def test_a_cancelled_task_ends_its_request(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """Without a block, while it waits for a token; the connection stays good."""
    seen: list[Generation] = []

    async def test() -> None:
        async with kit.names.connect(path) as client:

            async def read(reached: Callable[[], None]) -> None:
                seen.append(client.generate("hello", max_tokens=LONG))
                async for _ in seen[0]:
                    reached()

            await kit.cancel(read)
            assert seen[0].eos is not None
            assert seen[0].eos.reason == "cancelled"
            assert await _works(client, house[0])

    kit.run(test)


def test_closing_the_connection_cancels_its_request(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """As a program does that is cancelled between two tokens; the daemon is idle then."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            generation = client.generate("hello", max_tokens=LONG)
            await anext(generation)

    kit.run(test)


def test_a_daemon_that_hangs_is_left_after_a_while(
    kit: Kit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shielded does not mean for ever: then the connection is closed."""
    monkeypatch.setattr(streaming_module, "_LEAVE_S", 0.01)

    async def test() -> None:
        async with kit.names.connect(path) as client:

            async def read(reached: Callable[[], None]) -> None:
                client._link._stream = _Told(client._link._stream, reached)
                await client.generate("hello").text()

            await kit.cancel(read)
            with pytest.raises(ConnectionFailed, match="the connection is closed"):
                await client.generate("hello").text()

    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        kit.run(test)


class _Told:
    """A stream that tells when somebody waits for it."""

    def __init__(self, stream: Stream, reached: Callable[[], None]) -> None:
        self._stream, self._reached = stream, reached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive_some(self) -> bytes:
        """Tell, and wait."""
        self._reached()
        return await self._stream.receive_some()


def test_two_generations_at_once_are_refused(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """A connection carries one request; the running one does not notice."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            first = client.generate("hello", max_tokens=20)
            text = (await anext(first)).text
            with pytest.raises(kit.busy, match="open another connection"):
                await client.generate("other").text()
            assert text + await first.text() == house[0].expected("hello", 20)

    kit.run(test)


# --- errors and reconnecting ---


def test_the_same_errors_are_raised(kit: Kit, path: Path, house: tuple[House, Aside]) -> None:
    """A wrong parameter at once, a refusal with its code, and then the next step."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            with pytest.raises(TypeError, match="temprature"):
                client.generate("hello", temprature=1)
            with pytest.raises(ServerError, match="E_LIMIT_004"):
                await client.generate("hello", max_tokens=2_000_000).text()
            with pytest.raises(ConnectionFailed, match=r"connect\(reconnect=True\)"):
                await client.generate("hello", max_tokens=5).text()
        async with kit.names.connect(path, reconnect=True) as client:
            with pytest.raises(ServerError, match="E_LIMIT_004"):
                await client.generate("hello", max_tokens=2_000_000).text()
            assert await _works(client, house[0])

    kit.run(test)


def test_an_end_with_an_error_is_raised(kit: Kit, path: Path) -> None:
    """Only that request failed: the connection stays good."""
    backend = _backend(faults={3: InjectedFault(bad_rows=(0,))})

    async def test() -> None:
        async with kit.names.connect(path) as client:
            with pytest.raises(ServerError, match="E_RUNTIME_003"):
                await client.generate("hello", max_tokens=50).text()
            assert await _works(client, daemon)

    with in_thread(lambda: served(path, backend)) as (daemon, _):
        kit.run(test)


def test_a_stream_that_has_begun_is_never_repeated(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """After the first token a lost connection is an error, also with ``reconnect``; later ones work."""
    daemon, aside = house

    async def test() -> None:
        async with kit.names.connect(path, reconnect=True) as client:
            generation = client.generate("hello", max_tokens=LONG)
            await anext(generation)
            aside(daemon.server.end_connections)
            with pytest.raises(ConnectionFailed, match="start it with `uma-trio serve`"):
                await generation.text()
            assert await _works(client, daemon)

    kit.run(test)


def test_the_last_word_is_read_when_sending_fails(kit: Kit, path: Path) -> None:
    """The daemon had closed the connection and said why; that is the error."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            server, _ = listening.accept()
            with server:
                protocol = uma_protocol.Connection(Role.SERVER)
                server.sendall(
                    protocol.send(Error("E_LIMIT_006", "you were idle", fatal=True, retryable=True))
                )
            with pytest.raises(ServerError, match="E_LIMIT_006"):
                await client.generate("hello").text()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        kit.run(test)


def test_with_reconnect_a_client_waits_for_a_daemon_that_starts(
    kit: Kit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is started a little before the daemon finds it."""
    with ExitStack() as stack:
        found: list[tuple[House, Aside]] = []

        async def sleep(self: Loop, seconds: float) -> None:
            if not found:
                found.append(stack.enter_context(in_thread(lambda: served(path, _backend()))))

        monkeypatch.setattr(kit.loop, "sleep", sleep)

        async def test() -> None:
            async with kit.names.connect(path, reconnect=True) as client:
                assert await _works(client, found[0][0])

        kit.run(test)


def test_with_reconnect_it_is_given_up_in_the_end(
    kit: Kit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for a daemon that does not come; without it nobody waits."""
    pauses: list[float] = []

    async def sleep(self: Loop, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(kit.loop, "sleep", sleep)

    async def test() -> None:
        for reconnect in (False, True):
            with pytest.raises(ConnectionFailed, match=f"uma-trio serve --socket {path}"):
                async with kit.names.connect(path, reconnect=reconnect):
                    pass
            assert bool(pauses) is reconnect
        assert 1 < sum(pauses) < 20

    kit.run(test)


def test_another_users_daemon_is_not_talked_to(
    kit: Kit, path: Path, house: tuple[House, Aside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt goes to nobody but the user's own daemon."""
    monkeypatch.setattr("uma_trio.client.reach.own_uid", lambda: os.geteuid() + 1)

    async def test() -> None:
        with pytest.raises(ConnectionFailed, match="nothing was sent"):
            async with kit.names.connect(path):
                pass

    kit.run(test)


@pytest.mark.parametrize("where", ["absent", "file", "tcp", "far", "busy"])
def test_who_cannot_connect_is_told_the_same(
    where: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, whatever the event loop."""
    (path.parent / "file").touch()
    (path.parent / "token").write_text(RIGHT)
    monkeypatch.setenv("UMA_TOKEN_FILE", str(path.parent / "token"))

    async def sleep(self: Loop, seconds: float) -> None:
        """A full backlog stays full."""

    with socket.socket() as probe, socket.socket(socket.AF_UNIX) as busy:
        probe.bind(("127.0.0.1", 0))  # a port on which nobody listens
        busy.bind(str(path))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            address = {
                "absent": str(path.parent / "absent"),
                "file": str(path.parent / "file"),
                "tcp": f"tcp:127.0.0.1:{probe.getsockname()[1]}",
                "far": "tcp:192.0.2.1:80",
                "busy": str(path),
            }[where]
            said = []
            for kit in (Trio(), Asyncio()):
                monkeypatch.setattr(kit.loop, "sleep", sleep)

                async def test(kit: Kit = kit) -> None:
                    with pytest.raises(ConnectionFailed) as caught:
                        async with kit.names.connect(address):
                            pass
                    said.append(str(caught.value))

                kit.run(test)
    assert said[0] == said[1]


# --- a TCP port ---


def test_a_port_is_reached_with_the_token(
    kit: Kit, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right one streams, a wrong one is refused with its code; another user's daemon does not see it."""
    file = tmp_path / "token"
    monkeypatch.setenv("UMA_TOKEN_FILE", str(file))

    async def test() -> None:
        file.write_text(RIGHT)
        async with kit.names.connect(address) as client:
            assert await _works(client, daemon)
            assert await client.sessions() == ()
        file.write_text("0" * 64)
        async with kit.names.connect(address) as client:
            with pytest.raises(ServerError, match="E_AUTH_003"):
                await client.generate("hi").text()
        monkeypatch.setattr("uma_trio.client.reach.listener_uid", lambda *_: os.geteuid() + 1)
        with pytest.raises(ConnectionFailed, match="nothing was sent"):
            async with kit.names.connect(address):
                pass

    with in_thread(lambda: _served(backend=_backend())) as ((daemon, address), _):
        kit.run(test)


# --- admin ---


def test_admin_requests_beside_a_generation(
    kit: Kit, path: Path, house: tuple[House, Aside]
) -> None:
    """They have a connection of their own; one of them ends the stream."""

    async def test() -> None:
        async with kit.names.connect(path) as client:
            async with client.generate("hello", max_tokens=LONG, app="test") as generation:
                await anext(generation)
                (info,) = await client.sessions()
                assert (info.id, info.app, info.lane) == (generation.id, "test", "interactive")
                await client.set_priority(info.request, "background")
                assert (await client.overview()).sessions[0].lane == "background"
                assert (await client.explain(info.request)).requests[0].app == "test"
                assert "sessions" in await client.metrics()
                assert (await client.prefix()).prefixes == ()
                await client.cancel(info.request)
                await generation.text()
                assert generation.eos.reason == "cancelled"
            with pytest.raises(ServerError, match="E_PROTO_005"):
                await client.explain(99)

    kit.run(test)


# --- streams ---


def _fill(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(65536))


def test_a_consumer_that_does_not_read_stops_the_daemon(kit: Kit) -> None:
    """Nothing is taken from the socket ahead of the consumer, so that the kernel's buffer stays full."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        stream = kit.stream(ours)
        with theirs:
            theirs.setblocking(False)
            theirs.send(b"x")
            assert await stream.receive_some() == b"x"
            _fill(theirs)
            await kit.turns()
            with pytest.raises(BlockingIOError):
                theirs.send(bytes(65536))
            assert await stream.receive_some()
        stream.close()
        stream.close()
        assert await stream.receive_some() == b""

    kit.run(test)


def test_a_stream_whose_peer_is_gone_ends(kit: Kit) -> None:
    """Receiving ends, and sending is an OSError."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        stream = kit.stream(ours)
        theirs.close()
        assert await stream.receive_some() == b""
        with pytest.raises(OSError, match=r"."):
            await stream.send_all(b"x")
        with pytest.raises(OSError, match=r"."):
            stream.send_nowait(b"x")
        stream.close()

    kit.run(test)


def test_a_closed_stream_leaves_its_number_to_the_next_one() -> None:
    """A new socket may get the number at once: the loop has forgotten the old one, and wakes the new one."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        stream = Asyncio().stream(ours)
        waiting = asyncio.create_task(stream.receive_some())
        await Asyncio().turns()
        number = ours.fileno()
        stream.close()
        pair = socket.socketpair()
        assert number in [each.fileno() for each in pair]
        mine, other = sorted(pair, key=lambda each: each.fileno() != number)
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(mine, readable.set)
        assert await waiting == b""
        with theirs, other, mine:
            other.send(b"x")
            await asyncio.wait_for(readable.wait(), 10)
            asyncio.get_running_loop().remove_reader(mine)

    Asyncio().run(test)


def test_bytes_that_came_with_a_cancellation_are_kept() -> None:
    """Asyncio cancels a task also when what it waited for is there; the next call returns it."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        stream = Asyncio().stream(ours)
        with theirs:
            task = asyncio.ensure_future(stream.receive_some())
            await asyncio.sleep(0)
            receiving = stream._receiving  # type: ignore[attr-defined]
            receiving.add_done_callback(lambda _: task.cancel())
            theirs.send(b"token")
            await asyncio.wait({task})
            assert task.cancelled()
            assert await stream.receive_some() == b"token"
        stream.close()

    Asyncio().run(test)


def test_a_second_cancellation_does_not_break_the_shield() -> None:
    """The work ends, and the task is cancelled then; under a timeout of asyncio's, too."""
    ended = []

    async def test() -> None:
        begun, release = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await release.wait()
            ended.append(True)

        task = asyncio.create_task(AsyncioLoop().shielded(60, work))
        await begun.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        release.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert ended
        begun.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await AsyncioLoop().shielded(60, work)

    Asyncio().run(test)


# --- without trio ---


def test_both_have_the_same_names() -> None:
    """What is learned for one is true for the other."""
    assert aio.__all__ == trio_names.__all__
    for name in aio.__all__:
        same = getattr(aio, name) is getattr(trio_names, name)
        assert same is (name not in ("Client", "connect")), name


def test_the_asyncio_client_streams_where_trio_cannot_be_imported(
    path: Path, house: tuple[House, Aside]
) -> None:
    """So does the synchronous one."""
    script = f"""
import sys
sys.modules["trio"] = None
import asyncio
from uma_trio.client.aio import connect, generate_sync

async def main():
    async with connect({str(path)!r}) as client:
        print(await client.generate("hi", max_tokens=5).text(), end="|")

asyncio.run(main())
print("".join(token.text for token in generate_sync("hi", {str(path)!r}, max_tokens=5)), end="")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, timeout=50
    )
    text = house[0].expected("hi", 5)
    assert done.stdout.decode() == f"{text}|{text}"
