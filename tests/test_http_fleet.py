"""What a proxy or a router in front of several daemons needs of one of them, over HTTP."""

from __future__ import annotations

import ipaddress

import pytest
import trio
from http_kit import events_of, http_house
from net_kit import TICK_S
from trio.testing import MockClock

from uma_protocol.errors import Code
from uma_trio.http.guard import MOST_HOPS, behind, is_listed
from uma_trio.http.message import Head
from uma_trio.service.load import SILENT_S
from uma_trio.sockets.principal import Principal
from uma_trio_sim.fake import FakeBackend, linear_cost

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
LATE = {"X-UMA-Head": "first-token"}
LOCAL = (ipaddress.ip_network("127.0.0.0/8"),)
PROXIES = (ipaddress.ip_network("10.0.0.0/24"), ipaddress.ip_network("fd00::/8"))


def slots(n: int) -> FakeBackend:
    """Return the fake model with so many slots."""
    return FakeBackend(n_slots=n, n_ctx=1 << 17, cost=linear_cost(TICK_S, 0.0))


async def test_a_late_head_goes_with_the_first_token(autojump_clock: MockClock) -> None:
    """Nothing is sent while the prompt is computed, so that a proxy may send it elsewhere."""
    async with http_house() as daemon:
        early, late = daemon.connect(), daemon.connect()
        long = {**HELLO, "messages": [{"role": "user", "content": "x" * 600}]}
        await early.send("POST", CHAT, long)
        await late.send("POST", CHAT, long, LATE)
        began = trio.current_time()
        assert (await early.head()).status == 200
        at_once = trio.current_time() - began
        assert (await late.head()).status == 200
        first = await late.piece()
        assert trio.current_time() - began > at_once
        assert b'"role":"assistant"' in first
        assert b'"content":' in first
        rest = b""
        while data := await late.piece():
            rest += data
        assert events_of(first + rest)[-1] == "[DONE]"


async def test_a_late_head_goes_out_after_long_silence(autojump_clock: MockClock) -> None:
    """Together with the sign of life: a proxy's own timeout would end a longer one."""
    async with http_house(backend=slots(1)) as daemon:
        first = daemon.connect()
        await first.send("POST", CHAT, {**HELLO, "max_tokens": 100_000, "ignore_eos": True})
        await first.head()
        client = daemon.connect()
        await client.send("POST", CHAT, HELLO, LATE)
        began = trio.current_time()
        await client.head()
        assert trio.current_time() - began == pytest.approx(15.0, abs=0.5)
        assert b'"role":"assistant"' in await client.piece()
        assert b": keep-alive" in await client.piece()
        client.close()
        first.close()


async def test_an_answer_that_fails_before_its_late_head_has_a_status(
    autojump_clock: MockClock,
) -> None:
    """503, which a proxy sends to another machine, where the head of 200 would have promised an answer."""
    async with http_house(backend=slots(1)) as daemon:
        first = daemon.connect()
        await first.send("POST", CHAT, {**HELLO, "max_tokens": 100_000, "ignore_eos": True})
        await first.head()
        waiting, late = daemon.connect(), daemon.connect()
        await waiting.send("POST", CHAT, HELLO)
        await late.send("POST", CHAT, HELLO, LATE)
        await waiting.head()
        await trio.sleep(0.1)
        daemon.inner.service.end_all(Code.E_LIFECYCLE_001, "the daemon is stopping")
        answer = await late.answer()
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        assert b"[DONE]" not in await waiting.piece()


async def test_a_whole_answer_is_the_same_with_a_late_head(autojump_clock: MockClock) -> None:
    """Every piece, in order, for each of the streaming APIs."""
    paths = {CHAT: HELLO, "/v1/completions": {"prompt": "hello", "max_tokens": 4, "stream": True}}
    paths["/api/chat"] = {**HELLO, "options": {"num_predict": 4}}
    async with http_house() as daemon:
        for path, body in paths.items():
            seeded = {**body, "seed": 1, "temperature": 0}
            usual = await daemon.ask("POST", path, seeded)
            late = await daemon.ask("POST", path, seeded, **{"X-UMA-Head": "first-token"})
            assert late.status == usual.status == 200
            assert len(late.body) > 50
            assert abs(len(late.body) - len(usual.body)) < 40, "but for ids and times"


def asked(value: str) -> Head:
    """Return the head of a request with X-Forwarded-For."""
    return Head("GET", "/", {}, {"x-forwarded-for": value} if value else {})


@pytest.mark.parametrize(
    ("value", "host", "shares_as"),
    [
        ("192.0.2.7", "192.0.2.7", "address 192.0.2.7"),
        ("6.6.6.6, 192.0.2.7", "192.0.2.7", "address 192.0.2.7"),
        ("192.0.2.7, 10.0.0.9", "192.0.2.7", "address 192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7", "address 192.0.2.7"),
        ("2001:db8::1", "2001:db8::1", "address 2001:db8::1"),
        ("", "10.0.0.5", "connection 3"),
        ("10.0.0.9", "10.0.0.5", "connection 3"),
        ("192.0.2.7, nonsense", "10.0.0.5", "connection 3"),
        (f"192.0.2.7{', 10.0.0.9' * MOST_HOPS}", "10.0.0.5", "connection 3"),
    ],
)
def test_a_listed_proxy_says_who_asks(value: str, host: str, shares_as: str) -> None:
    """The rightmost address that is no proxy's; the proxy's own user gives no rights."""
    peer = Principal(connection=3, host="10.0.0.5", uid=0, pid=1, is_operator=True)
    found = behind(asked(value), peer, PROXIES)
    assert (found.host, found.shares_as) == (host, shares_as)
    assert not found.is_operator
    assert found.uid is None


def test_only_listed_addresses_are_proxies() -> None:
    """By network, of either version."""
    assert is_listed("10.0.0.77", PROXIES)
    assert is_listed("::ffff:10.0.0.77", PROXIES)
    assert is_listed("fd00::1", PROXIES)
    assert not is_listed("10.0.1.1", PROXIES)
    assert not is_listed("", PROXIES)


async def test_clients_of_a_proxy_are_told_apart(autojump_clock: MockClock) -> None:
    """On one connection, which a proxy uses for several clients; with a key the key counts."""
    async with http_house(proxies=LOCAL, keys=(b"k",)) as daemon:
        origins = []
        add = daemon.inner.service.directory.add

        def noted(request):  # type: ignore[no-untyped-def]
            origins.append(request.origin.principal.shares_as)
            add(request)

        daemon.inner.service.directory.add = noted
        client = daemon.connect()
        whole = {**HELLO, "stream": False}
        for address in ("192.0.2.1", "192.0.2.2"):
            headers = {"X-Forwarded-For": address, "Authorization": "Bearer k"}
            assert (await client.ask("POST", CHAT, whole, headers)).status == 200
        assert origins == ["key 0", "key 0"]
    async with http_house(proxies=LOCAL) as daemon:
        origins.clear()
        add = daemon.inner.service.directory.add
        daemon.inner.service.directory.add = noted
        client = daemon.connect()
        for address in ("192.0.2.1", "192.0.2.2"):
            await client.ask("POST", CHAT, whole, {"X-Forwarded-For": address})
        assert origins == ["address 192.0.2.1", "address 192.0.2.2"]


async def test_a_listed_proxy_may_use_any_name_and_is_told_503(autojump_clock: MockClock) -> None:
    """Pickers call a pod by its address, and HAProxy sends elsewhere what is answered with 503."""
    whole = {**HELLO, "stream": False}
    for proxies, host, full in ((LOCAL, 200, 503), ((), 403, 429)):
        async with http_house(proxies=proxies, backend=slots(1), max_waiting=1) as daemon:
            answer = await daemon.ask("GET", "/health", Host="10.1.2.3:8080")
            assert answer.status == host
            busy = [daemon.connect() for _ in range(2)]
            for client in busy:
                await client.send("POST", CHAT, {**HELLO, "max_tokens": 10_000})
                await client.head()
            refused = await daemon.ask("POST", CHAT, whole)
            assert (refused.status, refused.headers["retry-after"]) == (full, "1")
            for client in busy:
                client.close()


async def test_connections_of_a_listed_proxy_are_not_counted_as_one_host(
    autojump_clock: MockClock,
) -> None:
    """They are those of all its clients; the limit of one address is not theirs."""
    far = Principal(connection=1, host="10.0.0.5")
    for proxies, served in ((PROXIES, 3), ((), 2)):
        async with http_house(proxies=proxies, max_per_host=2) as daemon:
            daemon.peer = far
            clients = [daemon.connect() for _ in range(3)]
            for client in clients[:2]:
                await client.send("POST", CHAT, {**HELLO, "max_tokens": 500})
                await client.head()
            found = [200, 200, (await clients[2].ask("GET", "/health")).status]
            assert found.count(200) == served


async def test_routers_read_ten_lines(autojump_clock: MockClock) -> None:
    """Without a key, by the names that llm-d's router looks for, and ours."""
    async with http_house(backend=slots(2), keys=(b"k",)) as daemon:
        client = daemon.connect()
        key = {"Authorization": "Bearer k"}
        await client.send("POST", CHAT, {**HELLO, "max_tokens": 500}, key)
        await client.head()
        answer = await daemon.ask("GET", "/metrics/router")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.body.decode().splitlines()
        assert len(lines) <= 10
        figures = {
            name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)
        }
        assert figures["vllm:num_requests_running"] == 1
        assert figures["vllm:num_requests_waiting"] == 0
        assert 0 < figures["vllm:kv_cache_usage_perc"] < 1
        assert 0 < figures["uma_headroom_ratio"] < 1
        assert figures["uma_backlog_seconds"] >= 0
        assert any(name.startswith('vllm:cache_config_info{block_size="64",') for name in figures)
        whole = (await daemon.ask("GET", "/metrics", **key)).body.decode()
        assert "\nvllm:num_requests_running 1\n" in whole
        client.close()


async def test_a_daemon_is_ready_while_its_engine_answers(autojump_clock: MockClock) -> None:
    """`/health` says whether the process lives; with `?ready` an engine that hangs counts, too."""
    async with http_house() as daemon:
        assert (await daemon.ask("GET", "/health?ready")).status == 200
        assert daemon.inner.service._load is not None
        _, monitor = daemon.inner.service._load

        async def silent() -> None:
            await trio.sleep_forever()

        monitor._fresh = silent
        await trio.sleep(1)
        assert (await daemon.ask("GET", "/health?ready")).status == 200
        await trio.sleep(SILENT_S)
        assert (await daemon.ask("GET", "/health?ready")).status == 503
        assert (await daemon.ask("GET", "/health")).status == 200
        daemon.inner.service.stop_taking()
        assert (await daemon.ask("GET", "/health")).status == 503
        daemon.inner.service.draining = False


@pytest.mark.parametrize(
    ("headers", "targets"),
    [
        ({"X-LLM-D-SLO-TTFT-MS": "200", "X-LLM-D-SLO-TPOT-MS": "40"}, (0.2, 0.04)),
        ({"X-SLO-TTFT-MS": "300", "X-SLO-TPOT-MS": "50"}, (0.3, 0.05)),
        ({"X-UMA-SLO-TTFT-MS": "100", "X-SLO-TTFT-MS": "300"}, (0.1, None)),
    ],
)
async def test_targets_have_the_names_of_llm_d_too(
    autojump_clock: MockClock, headers: dict[str, str], targets: tuple[float | None, float | None]
) -> None:
    """Ours first, then the newer and the older ones of llm-d."""
    async with http_house(backend=FakeBackend()) as daemon:
        asks = []
        add = daemon.inner.service.directory.add

        def noted(request):  # type: ignore[no-untyped-def]
            asks.append(request.ask)
            add(request)

        daemon.inner.service.directory.add = noted
        named = {**headers, "X-Session-Id": "chat 7", "X-LLM-D-Inference-Objective": "background"}
        whole = {**HELLO, "stream": False}
        client = daemon.connect()
        assert (await client.ask("POST", CHAT, whole, named)).status == 200
        (ask,) = asks
        assert (ask.targets.ttft_s, ask.targets.itl_s) == targets
        assert (ask.session, ask.lane) == ("chat 7", "background")
        bad = await client.ask("POST", CHAT, whole, {"X-Session-Id": "s" * 300})
        assert (bad.status, bad.error["param"]) == (400, "X-Session-Id")
