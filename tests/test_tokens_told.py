"""Whatever becomes of a request: the tokens that its reader is told are those that were sampled.

Simulated days: many clients, paced and not, over the socket and inside the daemon, that read, pause,
cancel, close a half or vanish, on an engine that guesses ahead and runs out of cells. Some days end
in the middle, as by a signal. `UMA_TOLD_REQUESTS=100000` plays so many requests (13 minutes; with
`-o faulthandler_timeout=0`, or pytest shows a traceback after the first of them).
"""

from __future__ import annotations

import math
import os
import random

import trio
from attrs import Factory, define
from drafts_kit import FLAT, Babbler
from net_kit import TICK_S, Client, House, house, items_of
from test_playout import origin, pacing
from trio.testing import MockClock

from uma_protocol import Cancel, Code, Eos, Error, SetPriority, Token
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.policy.deadline import deadline
from uma_trio.service.answers import Answers
from uma_trio.service.ask import Ask, Refusal
from uma_trio.words import LANES
from uma_trio_sim.fake import FakeBackend

A_DAY = 50
DAYS = math.ceil(int(os.environ.get("UMA_TOLD_REQUESTS", "300")) / A_DAY)
SAMPLED_MOST = 48
STREAMED_OF = 0.8
PROMPTS = ("hello", "a", "the same as before, and longer than a chunk")


@define
class Books:
    """What was told and what was sampled, of all requests that came to their end."""

    told: int = 0
    sampled: int = 0
    n_requests: int = 0
    ends: dict[str, int] = Factory(dict)

    def close(self, reason: str, told: int, sampled: int) -> None:
        """Write one request down."""
        assert told == sampled, reason
        self.n_requests += 1
        self.told += told
        self.sampled += sampled
        self.ends[reason] = self.ends.get(reason, 0) + 1


class Reader:
    """One request and what becomes of it, by dice."""

    def __init__(self, daemon: House, books: Books, dice: random.Random) -> None:
        self.daemon = daemon
        self.books = books
        self.dice = dice
        self.prompt = dice.choice(PROMPTS)
        self.kinds = {
            "max_tokens": dice.randint(1, SAMPLED_MOST),
            "pace": dice.choice(["smooth", "smooth", "asap"]),
        }
        self.lane = dice.choice(LANES)
        self.at = dice.randint(1, SAMPLED_MOST)  # the token behind which something happens

    async def live(self) -> None:
        """Ask, after a while, and read to the end or to where it leaves."""
        await trio.sleep(self.dice.random() * A_DAY * TICK_S * 4)
        await self.dice.choice([self.over_the_socket, self.inside])()

    async def over_the_socket(self) -> None:
        """As a program does."""
        client, streamed = self.daemon.connect(), self.dice.random() < STREAMED_OF
        await client.ask("r", self.prompt, priority=self.lane, stream=streamed, **self.kinds)
        act = self.dice.choice([self.nothing, self.pause, self.cancel, self.close_half, self.move])
        vanishes = self.dice.random() < 0.1
        while not isinstance(event := await client.next(), Eos):
            if isinstance(event, Error) and event.fatal:
                self.books.close(f"refused: {event.code}", client.n_tokens, 0)
                client.close()
                return
            if isinstance(event, Token) and client.n_tokens == self.at:
                if vanishes:
                    client.close()
                    return
                await act(client)
            assert event is not None
        client.close()
        told = client.n_tokens if streamed else event.usage.completion_tokens
        self.close(event.reason, client.text, told, event.usage.completion_tokens)

    async def inside(self) -> None:
        """As a front does: tokens that it leaves there keep their places."""
        ask = Ask(prompt=self.prompt, lane=self.lane, **self.kinds)  # type: ignore[arg-type]
        text, told = "", 0
        try:
            async with Answers(self.daemon.service, [ask], origin()) as stream:
                async for item in items_of(stream):
                    told += isinstance(item, TokenOut)
                    text += item.text if isinstance(item, TokenOut | Finished) else ""
                    if told == self.at and isinstance(item, TokenOut):
                        await trio.sleep(self.dice.random() * 2)
                        if self.dice.random() < 0.3:
                            stream.end()
        except Refusal as refusal:
            self.books.close(f"refused: {refusal.code.value}", told, 0)
        else:
            assert isinstance(item, Finished)
            self.close(item.reason, text, told, item.completion_tokens)

    def close(self, reason: str, text: str, told: int, sampled: int) -> None:
        """Look at all that one request was told."""
        assert text == self.daemon.expected(self.prompt, sampled)
        self.books.close(reason, told, sampled)

    async def nothing(self, client: Client) -> None:
        """Read on."""

    async def pause(self, client: Client) -> None:
        """Read nothing for a while."""
        await trio.sleep(self.dice.random())

    async def cancel(self, client: Client) -> None:
        """End it; what is on its way is still told."""
        await client.send(Cancel("r"))

    async def close_half(self, client: Client) -> None:
        """Say that nothing more will be asked."""
        client.end_sending()

    async def move(self, client: Client) -> None:
        """Have it wait in the other lane."""
        (other,) = set(LANES) - {self.lane}
        await client.send(SetPriority(id="r", priority=other))


async def day(seed: int, books: Books) -> House:
    """Play one day and return the daemon, which is idle."""
    dice = random.Random(seed)
    backend = dice.choice([FakeBackend, Babbler])(
        n_ctx=dice.choice([200, 400, 1000]),
        n_slots=dice.choice([4, 8]),
        n_rows=24,
        cost=lambda *_: TICK_S * dice.uniform(0.5, 1.5),
    )
    paced = pacing(dice.uniform(0.0, 3 * TICK_S), until=dice.choice([1.0, math.inf]))
    places = dice.choice([8, 16])
    policy = dice.choice([paced, deadline])
    async with house(backend, policy=policy, cost=FLAT, credit=places) as daemon:
        async with trio.open_nursery() as nursery:
            for _ in range(A_DAY):
                nursery.start_soon(Reader(daemon, books, random.Random(dice.random())).live)
            if dice.random() < 0.3:
                nursery.start_soon(sigterm, daemon, dice.uniform(0.5, 4))
        await daemon.until_idle()
        assert daemon.service.playout.held == 0
    return daemon


async def sigterm(daemon: House, after_s: float) -> None:
    """Stop as a daemon does that has no patience left."""
    await trio.sleep(after_s)
    daemon.service.stop_taking()
    daemon.service.end_all(Code.E_LIFECYCLE_001, "stopping")


def test_the_tokens_told_are_the_tokens_sampled() -> None:
    """Of every request, and so of all; and each reads as the model would have said it undisturbed."""
    books, preempted = Books(), 0
    for seed in range(DAYS):
        daemon = trio.run(day, seed, books, clock=MockClock(autojump_threshold=0))
        preempted += daemon.bench.metrics.snapshot()["preemptions_total"]  # type: ignore[operator]
    print(books, f"preempted {preempted}")
    assert books.told == books.sampled > 0
    assert books.n_requests > 0.8 * DAYS * A_DAY
    assert books.ends.keys() == {"length", "cancelled", "error", "refused: E_LIFECYCLE_001"}
    assert preempted > 0
