"""What one user of the HTTP side can see and do of another: nothing, whatever it sends."""

from __future__ import annotations

from typing import Any

import trio
from http_kit import Answer, Client, HttpHouse, http_house
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from uma_trio.sockets.principal import Principal

PROMPT = "the same long beginning of everybody's prompt, word for word " * 3
COMPLETIONS = "/v1/completions"
ALICE = Principal(connection=100, host="127.0.0.1", uid=1001)
BOB = Principal(connection=200, host="127.0.0.1", uid=1002)
UNKNOWN = Principal(connection=300, host="127.0.0.1")
BUDGET = 1 << 20


def cached(answer: Answer) -> int:
    """Return how many tokens of the prompt were cached."""
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


async def told(daemon: HttpHouse, who: Principal | None, **more: Any) -> int:
    """Return what of the prompt was cached for somebody; `None` is this process's own user."""
    headers = more.pop("headers", {})
    daemon.peer = who
    client = daemon.connect()
    body = {"prompt": PROMPT, "max_tokens": 2, **more}
    found = cached(await client.ask("POST", COMPLETIONS, body, headers))
    client.close()
    return found


async def stream(daemon: HttpHouse, who: Principal | None, **headers: str) -> Client:
    """Begin a long answer for somebody."""
    daemon.peer = who
    client = daemon.connect()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"prompt": "hello", "stream": True, "max_tokens": 300, "model": "m"}
    await client.send("POST", COMPLETIONS, body, named)
    await client.head()
    await client.piece()
    return client


async def test_another_user_of_the_port_finds_nothing(autojump_clock: MockClock) -> None:
    """Under the same name and without one; its own second request finds its first."""
    async with http_house(prefix_bytes=BUDGET) as daemon:
        app = {"X-UMA-App": "editor", "User-Agent": "python/1"}
        assert await told(daemon, ALICE, headers=app) == 0
        assert await told(daemon, BOB, headers=app) == 0
        assert await told(daemon, ALICE, headers={"User-Agent": "other"}) > 100
        assert await told(daemon, BOB) > 100


async def test_where_nobody_is_named_each_connection_is_alone(autojump_clock: MockClock) -> None:
    """And finds what it sent itself."""
    async with http_house(prefix_bytes=BUDGET) as daemon:
        assert await told(daemon, UNKNOWN) == 0
        assert await told(daemon, UNKNOWN) == 0
        client = daemon.connect()
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert cached(await client.ask("POST", COMPLETIONS, body)) == 0
        assert cached(await client.ask("POST", COMPLETIONS, body)) > 100


async def test_the_same_user_shares_over_every_transport(autojump_clock: MockClock) -> None:
    """What came by the Unix socket is there on the port."""
    async with http_house(prefix_bytes=BUDGET) as daemon:
        body = {"prompt": PROMPT, "max_tokens": 2}
        by_socket = daemon.connect(by_socket=True)
        assert cached(await by_socket.ask("POST", COMPLETIONS, body)) == 0
        assert await told(daemon, None) > 100


async def test_two_keys_of_one_user_are_two(autojump_clock: MockClock) -> None:
    """And a key is the same on every connection and from every user."""
    async with http_house(prefix_bytes=BUDGET, keys=(b"one", b"two")) as daemon:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert await told(daemon, None, headers=one) == 0
        assert await told(daemon, None, headers=two) == 0
        assert await told(daemon, ALICE, headers=one) > 100


TEXTS = st.sampled_from(["private", "user", "x", "uid 1001", "uid 1001/salt x", "key 0", "a/b"])
HEADERS = st.dictionaries(
    st.sampled_from(["X-UMA-App", "User-Agent", "X-Request-Id", "X-UMA-Priority-Of"]), TEXTS
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": TEXTS,
        "cache_prompt": st.booleans(),
        "prompt_cache_key": TEXTS,
        "session": TEXTS,
        "user": TEXTS,
        "speculation": st.sampled_from(["auto", "free", "off"]),
    },
)
SENT = st.tuples(st.sampled_from([COMPLETIONS, "/completion"]), HEADERS, FIELDS)


Anybody = list[tuple[Principal | None, dict[str, str]]]
# By the kernel's word for the connection (None: this process's own user), or by the key that is shown.
USERS: Anybody = [(who, {}) for who in (ALICE, BOB, UNKNOWN, None)]
KEYS: Anybody = [(ALICE, {"Authorization": f"Bearer {key}"}) for key in ("one", "two", "root")]
PLAIN: tuple[str, dict[str, str], dict[str, Any]] = (COMPLETIONS, {}, {})


@example([PLAIN], PLAIN, USERS)
@example([PLAIN], PLAIN, KEYS)
@given(st.lists(SENT, min_size=1, max_size=3), SENT, st.permutations(USERS) | st.permutations(KEYS))
@settings(max_examples=25, deadline=None)
def test_no_headers_or_fields_reach_anothers_prompt(
    first: list[Any], second: Any, anybody: Anybody
) -> None:
    """Of any two principals, whatever they send: nothing is cached at the second's first request."""
    keys = {"keys": (b"one", b"two"), "admin_keys": (b"root",)} if anybody[0][1] else {}

    async def talk() -> None:
        async with http_house(prefix_bytes=BUDGET, **keys) as daemon:
            for (who, key), requests in zip(anybody, (first, [second]), strict=False):
                for path, headers, fields in requests:
                    daemon.peer = who
                    client = daemon.connect()
                    body = {"prompt": PROMPT, "max_tokens": 2, "n_predict": 2, **fields}
                    answer = await client.ask("POST", path, body, headers | key)
                    client.close()
                    assert answer.status == 200, answer.body
            last = answer.json
            n = last["timings"]["cache_n"] if "timings" in last else cached(answer)
            assert n == 0

    trio.run(talk, clock=MockClock(autojump_threshold=0))


async def test_cache_prompt_false_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    """No leaf, no page and no cell: nobody could use them."""
    async with http_house(prefix_bytes=BUDGET) as daemon:
        for _ in range(3):
            assert await told(daemon, ALICE, cache_prompt=False) == 0
        assert await told(daemon, ALICE) == 0
        prefix = daemon.inner.bench.engine.cells.prefix
        assert len(prefix.leaves) == 1
        assert prefix.usage.namespaces == ("uid 1001",)


# --- what runs ---


async def test_only_ones_own_request_can_be_moved(autojump_clock: MockClock) -> None:
    """By its handle or its id; a stranger is not told that it is there."""
    async with http_house() as daemon:
        busy = await stream(daemon, ALICE)
        (running,) = (await daemon.inner.service.observer.state()).requests
        for named in ({"request": running.record.handle}, {"id": running.named.name}):
            asked = {**named, "priority": "background"}
            for who in (BOB, UNKNOWN):
                daemon.peer = who
                refused = await daemon.ask("POST", "/priority", asked)
                assert (refused.status, refused.error["code"]) == (404, "request_not_found")
            assert (await daemon.inner.service.observer.state()).requests[
                0
            ].record.lane == "interactive"
        daemon.peer = ALICE
        assert (await daemon.ask("POST", "/priority", asked)).status == 200
        assert (await daemon.inner.service.observer.state()).requests[0].record.lane == "background"
        busy.close()


async def test_the_user_who_runs_the_daemon_can_move_any(autojump_clock: MockClock) -> None:
    """Over the port and over the Unix socket."""
    async with http_house() as daemon:
        busy = await stream(daemon, ALICE)
        (running,) = (await daemon.inner.service.observer.state()).requests
        asked = {"request": running.record.handle, "priority": "background"}
        daemon.peer = None
        assert (await daemon.ask("POST", "/priority", asked)).status == 200
        by_socket = daemon.connect(by_socket=True)
        assert (await by_socket.ask("POST", "/priority", asked)).status == 200
        busy.close()


async def test_an_admin_key_can_move_any_and_another_key_its_own(autojump_clock: MockClock) -> None:
    """Where there are keys the user behind a connection counts for nothing: it may be a proxy."""
    async with http_house(keys=(b"one", b"two"), admin_keys=(b"root",)) as daemon:
        busy = await stream(daemon, None, Authorization="Bearer one")
        (running,) = (await daemon.inner.service.observer.state()).requests
        asked = {"request": running.record.handle, "priority": "background"}
        found = {
            key: (await daemon.ask("POST", "/priority", asked, x_api_key=key)).status
            for key in ("two", "one", "root", "none")
        }
        assert found == {"two": 404, "one": 200, "root": 200, "none": 401}
        assert (await daemon.ask("POST", "/load", {}, x_api_key="one")).status == 403
        assert (await daemon.ask("POST", "/load", {}, x_api_key="root")).status == 400
        busy.close()


async def test_a_page_may_move_nothing(autojump_clock: MockClock) -> None:
    """Not even one that is listed, whoever's browser it is in."""
    async with http_house(origins=frozenset({"http://page.example"})) as daemon:
        asked = {"request": 1, "priority": "background"}
        answer = await daemon.ask("POST", "/priority", asked, Origin="http://page.example")
        assert (answer.status, answer.error["code"]) == (403, "forbidden")


async def test_slots_tell_of_anothers_request_only_that_it_is_there(
    autojump_clock: MockClock,
) -> None:
    """Its own user and the operator see its program and counts."""
    async with http_house() as daemon:
        busy = await stream(daemon, ALICE, X_UMA_App="secret-app")
        (running,) = (await daemon.inner.service.observer.state()).requests
        seen = {}
        for name, who in (("alice", ALICE), ("bob", BOB), ("operator", None)):
            daemon.peer = who
            seen[name] = (await daemon.ask("GET", "/slots")).json[0]
        assert seen["alice"]["app"] == seen["operator"]["app"] == "secret-app"
        assert seen["operator"]["id_task"] == running.record.handle
        assert (seen["bob"]["is_processing"], seen["bob"]["app"]) == (True, "another user")
        hidden = (seen["bob"]["id_task"], seen["bob"]["n_prompt_tokens"], seen["bob"]["next_token"])
        assert hidden == (0, 0, [{"n_decoded": 0}])
        busy.close()


async def test_no_key_is_written_down(autojump_clock: MockClock) -> None:
    """Neither in an answer nor in the log, the metrics or what is known of a request."""
    async with http_house(keys=(b"right-key-1234",), admin_keys=(b"root-key-1234",)) as daemon:
        shown = ""
        for key, status in (
            ("wrong-key-1234", 401),
            ("right-key-1234", 200),
            ("root-key-1234", 200),
        ):
            body = {"prompt": "hello", "max_tokens": 2}
            answer = await daemon.ask("POST", COMPLETIONS, body, x_api_key=key)
            assert answer.status == status
            shown += f"{answer.body!r} {answer.headers}"
        busy = await stream(daemon, None, Authorization="Bearer right-key-1234")
        shown += f"{(await daemon.inner.service.observer.state()).requests} {daemon.inner.service.metrics()}"
        shown += f"{daemon.inner.log} {daemon.server._context.settings}"
        assert "key 0" in shown or "key=0" in shown
        assert "key-1234" not in shown
        busy.close()
