"""`GET /explain`: how requests spent their time, for whom they belong to."""

from __future__ import annotations

import os

import pytest
import trio
from http_kit import http_house
from trio.testing import MockClock

from uma_trio.sockets.principal import Principal

ASKED = {"prompt": "a secret prompt", "max_tokens": 400}
THEIR = {"X_UMA_App": "their app"}


async def test_a_request_is_told_in_figures_and_sentences(autojump_clock: MockClock) -> None:
    """While it lasts and afterwards; without a number the latest ones are listed."""
    async with http_house() as daemon:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.ask, "POST", "/completion", ASKED)
            await trio.sleep(0.2)
            told = (await daemon.ask("GET", "/explain?request=1&ticks=3")).json
            assert told["requests"][0]["state"] == "decode"
            assert len(told["ticks"]) == 3
            assert "decode" in told["told"][0]
        told = (await daemon.ask("GET", "/explain?request=1")).json
        assert told["requests"][0]["reason"] == "length"
        assert "ended (length)" in told["told"][0]
        listed = (await daemon.ask("GET", "/explain")).json
        assert [one["request"] for one in listed["requests"]] == [1]
        assert "told" not in listed
        assert "secret" not in str([told, listed])


@pytest.mark.parametrize("query", ["request=x", "request=-1", "request=" + "9" * 19, "ticks=257"])
async def test_a_wrong_number_is_refused(autojump_clock: MockClock, query: str) -> None:
    """Before the engine is asked."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", f"/explain?{query}")
        assert answer.status == 400
        assert answer.error["message"].startswith(query.partition("=")[0])


async def test_an_unknown_request_is_not_found(autojump_clock: MockClock) -> None:
    """As one of somebody else."""
    async with http_house() as daemon:
        assert (await daemon.ask("GET", "/explain?request=77")).status == 404


@pytest.mark.parametrize("operator", [True, False])
async def test_a_request_of_another_is_told_to_operators(
    autojump_clock: MockClock, operator: bool
) -> None:
    """Nobody else learns of it: neither its app nor its tokens, in no list and in no tick."""
    async with http_house() as daemon:
        daemon.peer = Principal(connection=0, uid=4001)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: daemon.ask("POST", "/completion", ASKED, **THEIR))
            await trio.sleep(0.2)
            daemon.peer = Principal(connection=0, uid=os.geteuid(), is_operator=operator)
            one = await daemon.ask("GET", "/explain?request=1")
            listed = (await daemon.ask("GET", "/explain?ticks=5")).json
            nursery.cancel_scope.cancel()
        assert one.status == (200 if operator else 404)
        assert len(listed["requests"]) == int(operator)
        assert [len(tick.get("items", ())) for tick in listed["ticks"]] == [int(operator)] * 5
        assert all(tick.get("others", False) is not operator for tick in listed["ticks"])
        assert ("their app" in str(listed)) is operator
