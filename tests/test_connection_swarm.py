"""Many clients that do anything at any moment, by seed: what must hold holds for all of them."""

from __future__ import annotations

import random

import pytest
import trio
from net_kit import TICK_S, Client, House, house, slowly
from trio.testing import MockClock

from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

N_CLIENTS = 12
STEPS = 12


class Actor:
    """A client that follows its own dice."""

    def __init__(self, daemon: House, dice: random.Random) -> None:
        self.daemon = daemon
        self.dice = dice
        self.client: Client = daemon.connect()
        self.asked = 0
        self.left = False  # it closed, broke the rules or will read nothing more

    async def live(self) -> None:
        """Do a few things, then leave in some way."""
        actions = [self.ask, self.ask, self.cancel, self.admin, self.read, self.read, self.wait]
        last_acts = [self.leave, self.half_close, self.garbage, self.vanish_in_frame, self.wait]
        for _ in range(STEPS):
            await self.dice.choice(actions)()
        await self.dice.choice(last_acts)()
        if not self.left:
            await self.read_to_the_end()
            self.check()
        self.client.close()

    async def ask(self) -> None:
        """Send a request, maybe while another runs."""
        long = self.dice.random() < 0.3
        text = "x" * self.dice.choice([1, 50, 400])
        request = (
            f'{{"id":"r{self.asked}","prompt":"{text}","max_tokens":{200 if long else 5},'
            f'"stream":{"true" if self.dice.random() < 0.8 else "false"}}}'
        )
        await self.raw(request.encode())
        self.asked += 1

    async def cancel(self) -> None:
        """Cancel one of the requests so far, whether it runs or not."""
        await self.raw(f'{{"type":"cancel","id":"r{self.dice.randint(0, self.asked)}"}}'.encode())

    async def admin(self) -> None:
        """Ask for something else."""
        choice = self.dice.choice(
            [b'{"type":"sessions"}', b'{"type":"priority","request":1,"priority":"background"}']
        )
        await self.raw(choice)

    async def read(self) -> None:
        """Read a few bytes."""
        with trio.move_on_after(self.dice.random() * 10 * TICK_S):
            data = await self.receive(self.dice.choice([1, 100, 65536]))
            if not data:
                self.left = True

    async def wait(self) -> None:
        """Do nothing for a while."""
        await trio.sleep(self.dice.random() * 20 * TICK_S)

    async def leave(self) -> None:
        """Close."""
        self.left = True

    async def half_close(self) -> None:
        """Say that nothing more comes."""
        try:
            self.client.end_sending()
        except OSError:
            self.left = True

    async def garbage(self) -> None:
        """Break the framing, and read what the daemon says to that."""
        await self.send(b"\0\0\0\0")

    async def vanish_in_frame(self) -> None:
        """Close in the middle of a frame."""
        await self.send(b"\xff\0\0\0{")
        self.left = True

    async def raw(self, payload: bytes) -> None:
        """Write a frame past all checks of the client's own."""
        await self.send(len(payload).to_bytes(4, "little") + payload)

    async def send(self, data: bytes) -> None:
        """Write, unless the daemon is gone or does not read."""
        try:
            with trio.move_on_after(1):
                await self.client.send_bytes(data)
        except trio.BrokenResourceError:
            self.left = True

    async def receive(self, n: int) -> bytes:
        """Read bytes and keep them for the judgement."""
        try:
            data = await self.client.transport.receive_some(n)
        except trio.BrokenResourceError:
            return b""
        self.seen += data
        return data

    seen = b""

    async def read_to_the_end(self) -> None:
        """Read until the daemon closes, or has nothing to say for a long time."""
        with trio.move_on_after(60) as scope:
            while await self.receive(65536):
                scope.deadline = trio.current_time() + 60

    def check(self) -> None:
        """Every request that was accepted has exactly one terminal event."""
        for n in range(self.asked):
            mark = f'"id":"r{n}","event":'.encode()
            tokens, ends = self.seen.count(mark + b'"token"'), self.seen.count(mark + b'"eos"')
            errors = self.seen.count(mark + b'"error"')
            fatal = b'"fatal":true' in self.seen
            if ends > 1 or (tokens and not ends and not fatal):
                raise AssertionError(f"r{n}: {tokens} tokens, {ends} ends, {errors} errors")
            if ends and self.seen.rfind(mark + b'"token"') > self.seen.find(mark + b'"eos"'):
                raise AssertionError(f"r{n}: a token behind the end")


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_clients_do_everything_ends_once(
    seed: int, autojump_clock: MockClock
) -> None:
    """One terminal event a request, no fault of ours, and nothing held at the end."""
    dice = random.Random(seed)
    backend = FakeBackend(
        n_slots=dice.choice([1, 3, 8]),
        n_ctx=dice.choice([700, 2048]),
        n_batch=dice.choice([32, 128]),
        cost=linear_cost(TICK_S, 0.0001),
        faults={dice.randrange(200): InjectedFault(bad_rows=(0,)) for _ in range(2)},
    )
    options = {"run_blocking": slowly(0.1)} if dice.random() < 0.5 else {}
    async with house(backend, max_waiting=dice.choice([1, 256]), **options) as daemon:  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            for _ in range(N_CLIENTS):
                nursery.start_soon(Actor(daemon, random.Random(dice.random())).live)
                await trio.sleep(dice.random() * 5 * TICK_S)
        await trio.sleep(40)
        assert daemon.recorder.opened == daemon.recorder.closed
