"""Which users of the machine may use the port: the daemon's own, unless its operator says otherwise."""

from __future__ import annotations

import os
from typing import Any

import pytest
from attrs import evolve
from http_kit import http_house
from trio.testing import MockClock

from uma_trio.config.http import networks
from uma_trio.sockets.principal import Principal

OWN = Principal(connection=0, host="127.0.0.1", uid=os.geteuid())
STRANGER = evolve(OWN, uid=54321)
UNKNOWN = evolve(OWN, uid=None)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("peer", "status"),
    [(OWN, 200), (STRANGER, 403), (UNKNOWN, 403)],
    ids=["own", "other", "unknown"],
)
async def test_a_port_is_for_the_user_that_runs_the_daemon(
    peer: Principal, status: int, autojump_clock: MockClock
) -> None:
    async with http_house(own_user=os.geteuid()) as daemon:
        daemon.peer = peer
        answer = await daemon.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.status == status
        if status == 403:
            assert "--http-users all" in answer.json["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/"])
async def test_what_needs_no_key_needs_no_user(path: str, autojump_clock: MockClock) -> None:
    async with http_house(own_user=os.geteuid()) as daemon:
        daemon.peer = STRANGER
        assert (await daemon.ask("GET", path)).status < 400


@pytest.mark.parametrize(
    "options",
    [{}, {"own_user": os.geteuid(), "proxies": networks("127.0.0.1")}],
    ids=["all users", "a listed proxy"],
)
async def test_others_come_in_where_the_operator_says_so(
    options: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with http_house(**options) as daemon:
        daemon.peer = STRANGER
        assert (await daemon.ask("POST", "/v1/chat/completions", CHAT)).status == 200


async def test_a_key_admits_another_user(autojump_clock: MockClock) -> None:
    async with http_house(own_user=os.geteuid(), keys=(b"secret-key",)) as daemon:
        daemon.peer = STRANGER
        answer = await daemon.ask("POST", "/v1/models", authorization="Bearer secret-key")
        assert answer.status == 405
        answer = await daemon.ask("GET", "/v1/models", authorization="Bearer secret-key")
        assert answer.status == 200
