"""`/events`: what watchers are told, as whom, how often, and that watching costs others nothing."""

from __future__ import annotations

import io
import json
import os
from typing import Any

import h11
import pytest
import trio
from http_kit import Client, HttpHouse, http_house
from net_kit import TICK_S, Recorder
from rich.console import Console
from trio.testing import MockClock

from uma_protocol import Sessions
from uma_trio.cli.top import document
from uma_trio.cli.top_view import Shown, render
from uma_trio.engine.messages import Inspect
from uma_trio.sockets.principal import Principal

CHAT = {"prompt": "a secret prompt", "max_tokens": 60, "stream": True}


async def watch(
    daemon: HttpHouse, path: str = "/events?ticks=1", *, by_socket: bool = False, **headers: str
) -> Client:
    """Return a client that watches, behind the head of the answer."""
    client = daemon.connect(by_socket=by_socket)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await client.send("GET", path, headers=named)
    answer = await client.head()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    return client


async def messages(client: Client, seconds: float) -> list[dict[str, Any]]:
    """Return the messages of the next seconds, each with its id."""
    data = b""
    with trio.move_on_after(seconds):
        while piece := await client.piece():
            data += piece
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in lines:
            found.append({**json.loads(lines["data"]), "sse_id": lines.get("id")})
    return found


async def run(daemon: HttpHouse, app: str = "mine", **fields: Any) -> Client:
    """Return a client whose request runs."""
    client = daemon.connect()
    await client.send("POST", "/completion", {**CHAT, **fields}, {"X-UMA-App": app})
    return client


async def test_a_watcher_sees_requests_and_every_tick_once(autojump_clock: MockClock) -> None:
    """Requests with their counts, and ticks numbered without a gap, each in figures."""
    async with http_house() as daemon:
        client = await watch(daemon)
        await run(daemon)
        seen = await messages(client, 2)
        assert seen[0]["type"] == "hello"
        assert seen[0]["operator"] is True
        (one,) = next(m["requests"] for m in seen if m.get("requests"))
        assert (one["app"], one["lane"]) == ("mine", "interactive")
        ticks = [tick for message in seen for tick in message.get("ticks", ())]
        numbers = [tick[0] for tick in ticks]
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        assert sum(part[1] for tick in ticks for part in tick[7]) >= 60
        assert seen[-1]["requests"] == [] or any(m.get("requests") == [] for m in seen)


async def test_no_text_of_a_request_is_in_a_message(autojump_clock: MockClock) -> None:
    """Neither of the prompt nor of the answer, not even for an operator."""
    async with http_house() as daemon:
        client = await watch(daemon)
        await run(daemon, prompt="xylophone", max_tokens=30)
        text = json.dumps(await messages(client, 2))
        assert "xylophone" not in text
        assert daemon.inner.expected("xylophone", 8) not in text


async def test_a_watcher_gets_ten_messages_a_second_at_most(autojump_clock: MockClock) -> None:
    """However fast the ticks are."""
    async with http_house() as daemon:
        client = await watch(daemon)
        await run(daemon, max_tokens=2000)
        await messages(client, 1)
        seen = await messages(client, 1.0 - TICK_S)
        assert 5 <= len(seen) <= 10


async def test_nothing_is_asked_while_nobody_looks_or_nothing_runs(
    autojump_clock: MockClock,
) -> None:
    """No snapshot without a watcher; with one and an idle engine, one in five seconds."""
    async with http_house() as daemon:
        asked: list[float] = []
        put = daemon.inner.bench.inbox.put

        def spy(message: Any) -> None:
            if isinstance(message, Inspect):
                asked.append(trio.current_time())
            put(message)

        daemon.inner.bench.inbox.put = spy  # type: ignore[method-assign]
        running = await run(daemon, max_tokens=20)
        await trio.sleep(3)
        assert asked == []
        client = await watch(daemon)
        await messages(client, 11)
        assert 1 <= len(asked) <= 4
        client.close()
        running.close()
        await trio.sleep(1)
        n = len(asked)
        await run(daemon, max_tokens=20)
        await trio.sleep(20)
        assert len(asked) == n


@pytest.mark.parametrize("operator", [True, False])
async def test_others_requests_are_another_user(autojump_clock: MockClock, operator: bool) -> None:
    """No app, id or count of them: neither in the list, nor in a tick, unless to an operator."""
    async with http_house() as daemon:
        daemon.peer = Principal(connection=0, uid=4001)
        await run(daemon, "their app", max_tokens=300)
        daemon.peer = Principal(connection=0, uid=os.geteuid(), is_operator=operator)
        client = await watch(daemon)
        seen = [m for m in await messages(client, 1) if m["type"] == "picture"]
        listed = [one for message in seen for one in message.get("requests", ())]
        parts = [tick[7] for message in seen for tick in message.get("ticks", ())]
        assert parts
        if operator:
            assert {one["app"] for one in listed} == {"their app"}
            assert all(parts)
            return
        bare = {"app": "another user", "lane": "interactive"}
        assert all(one == bare | {"state": one["state"]} for one in listed)
        assert not any(parts)
        assert "their app" not in json.dumps(seen)
        assert all(tick[6] == 1 for message in seen for tick in message.get("ticks", ()))


async def test_a_watcher_goes_on_where_it_was(autojump_clock: MockClock) -> None:
    """With Last-Event-ID nothing is told twice; an id of another life begins anew."""
    async with http_house() as daemon:
        first, keeps = await watch(daemon), await watch(daemon)
        await run(daemon, max_tokens=2000)
        seen = await messages(first, 1)
        first.close()
        last = seen[-1]["sse_id"]
        await messages(keeps, 0.5)
        again = await watch(daemon, Last_Event_ID=last)
        told = [tick[0] for m in await messages(again, 0.5) for tick in m.get("ticks", ())]
        assert told[0] == int(last.rpartition("-")[2]) + 1
        for wrong in ("other-3", "test-", "test-99x", "x" * 300):
            other = await watch(daemon, Last_Event_ID=wrong)
            assert [m for m in await messages(other, 0.5) if m.get("ticks")]
            other.close()


async def test_who_does_not_read_loses_messages_and_holds_nothing(
    autojump_clock: MockClock,
) -> None:
    """What it did not take is not kept: the backlog is one message, and the engine goes on."""
    async with http_house(send_buffer_bytes=2048, stall_timeout_s=1e6) as daemon:
        client = await watch(daemon, by_socket=True)
        for _ in range(3):
            await run(daemon, max_tokens=3000, stream=False)
        await trio.sleep(30)
        (connection,) = [c for c in daemon.server._placed if c._watches]
        assert connection._writer.waiting_bytes < 100_000
        late = await messages(client, 20)
        numbers = [tick[0] for m in late for tick in m.get("ticks", ())]
        assert numbers == sorted(set(numbers))
        assert len(numbers) < numbers[-1], "some are lost"


async def test_a_watcher_keeps_no_daemon_from_ending(autojump_clock: MockClock) -> None:
    """Its connection ends when the daemon hands over, and when it takes no more requests."""
    async with http_house() as daemon:
        client = await watch(daemon)
        await messages(client, 1)
        daemon.server.drain_connections()
        with trio.fail_after(2), pytest.raises(h11.RemoteProtocolError, match="closed"):
            await messages(client, 5)


async def test_a_head_request_has_no_stream(autojump_clock: MockClock) -> None:
    """It is over with the head."""
    async with http_house() as daemon:
        answer = await daemon.ask("HEAD", "/events")
        assert answer.status == 200
        assert answer.body == b""


async def test_without_a_key_nothing_is_told(autojump_clock: MockClock) -> None:
    """As for every path with data."""
    async with http_house(keys=(b"sesame",)) as daemon:
        assert (await daemon.ask("GET", "/events")).status == 401
        client = await watch(daemon, Authorization="Bearer sesame")
        (hello, *_) = await messages(client, 1)
        assert hello["operator"] is False


async def test_the_gauge_is_the_metric(autojump_clock: MockClock) -> None:
    """Figures are those of /metrics, not rounded."""
    async with http_house() as daemon:
        client = await watch(daemon)
        await run(daemon, max_tokens=50)
        seen = await messages(client, 16)
        figures = [m["figures"] for m in seen if "figures" in m][-1]
        metrics = daemon.inner.service.metrics()
        for name, value in figures.items():
            if name in metrics:
                assert value == metrics[name], name


async def test_every_place_shows_the_same_figures(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gauge of the page, /metrics, `top` and its picture for programs, to the last digit."""
    card = {"interactive_p95_ms": 31.2614, "tokens_per_s": 81.93, "tokens_generated_per_s": 50.07}
    known = {"scorecard": card, "step_ms": 40.0, "interactive_shown_ms": {"count": 7}}
    monkeypatch.setattr(Recorder, "snapshot", lambda _: known)
    async with http_house() as daemon:
        answer = await daemon.ask("GET", "/metrics", Accept="application/json")
        metrics = json.loads(answer.body)
        assert metrics["scorecard"] == card
        watcher = await watch(daemon)
        (figures,) = [m["figures"] for m in await messages(watcher, 1) if "figures" in m]
    shown = Shown(found=Sessions(()), figures=metrics)
    for_programs = document(shown)["figures"]
    for name, value in {**card, "step_ms": 40.0}.items():
        assert figures[name] == for_programs[name] == value, name
    window = Console(width=100, file=io.StringIO())
    with window.capture() as printed:
        window.print(render(shown))
    head = printed.get()
    assert "p95 31.3 of 40.0 ms" in head
    assert "50.1 generated, 81.9 with prompts" in head
