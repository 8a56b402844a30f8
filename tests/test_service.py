"""The service alone: what a front gets without a socket or a wire format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from net_kit import TICK_S, House, at_once, give, house, items_of, slowly, take_from
from trio.testing import MockClock

from uma_protocol import Code
from uma_trio.backend.fake import N_VOCAB, FakeBackend, linear_cost
from uma_trio.engine.messages import Credit, Finished, PromptDone, StreamItem, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.service.ask import Ask, Chat, Door, Message, Origin, Refusal
from uma_trio.service.checks import Bounds, check_fits
from uma_trio.service.playout import Playout
from uma_trio.service.stream import Pipe, Reader
from uma_trio.sockets.principal import Principal

SOMEBODY = Principal(connection=7, uid=1000, pid=7)
DOOR = Door(max_prompt_bytes=100, option="--door-bytes")


def origin(**fields: Any) -> Origin:
    """Return somebody."""
    return Origin(**{"principal": SOMEBODY, "door": DOOR, "name": "r", **fields})


async def answer(daemon: House, ask: Ask) -> tuple[str, Finished]:
    """Return the text of a request and how it ended."""
    text = ""
    async with daemon.service.generate([ask], origin()) as stream:
        async for item in items_of(stream):
            if not isinstance(item, PromptDone):
                text += item.text
    assert isinstance(item, Finished)
    return text, item


async def refused(daemon: House, **fields: Any) -> Refusal:
    """Return why a request is not accepted; nothing of it stays."""
    with pytest.raises(Refusal) as caught:
        await answer(daemon, Ask(**fields))
    assert not len(daemon.service.directory)
    return caught.value


async def test_a_stream_yields_the_end_of_the_prompt_the_tokens_and_the_end(
    autojump_clock: MockClock,
) -> None:
    """In this order, and then nothing; leaving the block leaves the directory."""
    async with house() as daemon:
        async with daemon.service.generate([Ask(prompt="hello", max_tokens=5)], origin()) as stream:
            items = [item async for item in items_of(stream)]
            assert len(daemon.service.directory) == 1
        assert [type(item) for item in items] == [PromptDone, *[TokenOut] * 5, Finished]
        assert not len(daemon.service.directory)


async def test_text_tokens_and_chats_are_asked_the_same_way(autojump_clock: MockClock) -> None:
    """Tokens are taken as they are."""
    async with house() as daemon:
        text, _ = await answer(daemon, Ask(prompt="hello", max_tokens=6))
        assert text == daemon.expected("hello", 6)
        tokens = daemon.backend.vocabulary.tokenize("hello", add_special=True, parse_special=False)
        assert (await answer(daemon, Ask(prompt=tokens, max_tokens=6)))[0] == text
        _, end = await answer(daemon, Ask(prompt=Chat((Message("user", "hi"),)), max_tokens=6))
        assert end.reason == "length"


async def test_a_chat_is_refused_where_the_model_has_no_template(
    autojump_clock: MockClock,
) -> None:
    """The message says what to send instead."""
    async with house(FakeBackend(chat_template=None)) as daemon:
        refusal = await refused(daemon, prompt=Chat((Message("user", "hi"),)))
        assert (refusal.code, refusal.field) == (Code.E_MODEL_002, "messages")
        assert "`prompt`" in refusal.message


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": "x", "model": "other"}, Code.E_MODEL_002, "model"),
        ({"prompt": ""}, Code.E_PROTO_003, "prompt"),
        ({"prompt": Chat(())}, Code.E_PROTO_003, "messages"),
        ({"prompt": np.array([], np.int32)}, Code.E_PROTO_003, "prompt"),
        ({"prompt": np.array([3, N_VOCAB], np.int32)}, Code.E_PROTO_003, "prompt"),
        ({"prompt": np.array([-1, 3], np.int32)}, Code.E_PROTO_003, "prompt"),
        ({"prompt": "é" * 51}, Code.E_LIMIT_001, "prompt"),
        (
            {"prompt": Chat((Message("user", "x" * 60), Message("user", "x" * 41)))},
            Code.E_LIMIT_001,
            "messages",
        ),
        ({"prompt": "x", "max_tokens": 11}, Code.E_PROTO_003, "max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_field(
    autojump_clock: MockClock, fields: dict[str, Any], code: Code, field: str
) -> None:
    """Each rule is checked here, for every front."""
    async with house(max_tokens_cap=10) as daemon:
        refusal = await refused(daemon, **fields)
        assert (refusal.code, refusal.field) == (code, field)


async def test_the_option_of_the_door_is_named_where_a_prompt_is_too_long(
    autojump_clock: MockClock,
) -> None:
    """Every front has a bound of its own."""
    async with house() as daemon:
        refusal = await refused(daemon, prompt="x" * 101)
        assert "--door-bytes" in refusal.message


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    autojump_clock: MockClock,
) -> None:
    """A front can tell its client how much too long it is."""
    async with house(FakeBackend(n_ctx=64, cost=linear_cost(TICK_S, 0))) as daemon:
        refusal = await refused(daemon, prompt="x" * 90)
        assert (refusal.code, refusal.prompt_tokens, refusal.context) == (
            Code.E_LIMIT_004,
            91,
            64,
        )
        refusal = await refused(daemon, prompt="x" * 9, max_tokens=60)
        assert (refusal.field, refusal.prompt_tokens, refusal.context) == ("max_tokens", 10, 64)


async def test_a_wish_that_may_be_trimmed_is_trimmed(autojump_clock: MockClock) -> None:
    """To the room in the context, and to the daemon's cap."""
    backend = FakeBackend(n_ctx=64, cost=linear_cost(TICK_S, 0))
    async with house(backend, max_tokens_cap=40) as daemon:
        _, end = await answer(daemon, Ask(prompt="x" * 49, max_tokens=999, clamp=True))
        assert (end.reason, end.completion_tokens) == ("length", 14)
        _, end = await answer(daemon, Ask(prompt="x", max_tokens=999, clamp=True))
        assert end.completion_tokens == 40


async def test_credit_goes_back_once_a_burst(autojump_clock: MockClock) -> None:
    """However many tokens were there, one message says that they are dealt with."""
    async with house(credit=4) as daemon:
        given: list[int] = []
        put = daemon.bench.inbox.put

        def spy(message: Any) -> None:
            if isinstance(message, Credit):
                given.append(message.n)
            put(message)

        daemon.bench.inbox.put = spy  # type: ignore[method-assign]
        async with daemon.service.generate(
            [Ask(prompt="hello", max_tokens=12)], origin()
        ) as stream:
            sizes = []
            while sum(sizes) < 12:
                await trio.sleep(20 * TICK_S)
                ((_, items),) = await stream.burst()
                sizes.append(sum(isinstance(item, TokenOut) for item in items))
        assert max(sizes) > 1
        assert given == sizes[: len(given)]
        assert len(given) == len(sizes) - 1


async def test_leaving_the_block_ends_the_request(autojump_clock: MockClock) -> None:
    """By the next tick its slot is free."""
    async with house() as daemon:
        async with daemon.service.generate(
            [Ask(prompt="hello", max_tokens=900)], origin()
        ) as stream:
            await stream.burst()
        await daemon.until_idle()
        daemon.check_idle_engine()


async def test_cancelling_while_it_is_tokenised_submits_nothing(
    autojump_clock: MockClock,
) -> None:
    """The engine never hears of it, and it ends as any request does."""
    async with house(run_blocking=slowly(5)) as daemon:
        generation = daemon.service.generate([Ask(prompt="hello")], origin())
        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    await trio.sleep(1)
                    assert daemon.service.cancel(generation.handle, SOMEBODY)

                nursery.start_soon(cancel)
                async with generation as stream:
                    ((_, (end,)),) = await stream.burst()
        assert isinstance(end, Finished)
        assert (end.reason, end.total_s) == ("cancelled", pytest.approx(1))


async def test_a_request_is_moved_and_cancelled_by_its_handle(autojump_clock: MockClock) -> None:
    """Whoever asks; an unknown handle is no fault."""
    async with house() as daemon:
        service = daemon.service
        async with service.generate([Ask(prompt="hello", max_tokens=500)], origin()) as stream:
            await stream.burst()
            assert service.move(stream.handle, "background", SOMEBODY)
            (running,) = await service.running()
            assert (running.handle, running.report.lane) == (stream.handle, "background")
            assert running.origin.name == "r"
            service.cancel(stream.handle, SOMEBODY)
            items = [item async for item in items_of(stream)]
        assert isinstance(items[-1], Finished)
        assert items[-1].reason == "cancelled"
        assert not service.move(stream.handle, "interactive", SOMEBODY)
        assert not service.cancel(stream.handle, SOMEBODY)


async def test_texts_are_looked_at_without_a_request(autojump_clock: MockClock) -> None:
    """Tokens of a text, bytes of tokens, a chat as the template writes it."""
    async with house(run_blocking=at_once) as daemon:
        service = daemon.service
        tokens = await service.tokenize("héllo", add_special=False, parse_special=False)
        assert service.detokenize(tokens).decode() == "héllo"
        assert "hi" in await service.render(Chat((Message("user", "hi"),)))
        with pytest.raises(Refusal) as caught:
            service.detokenize([N_VOCAB])
        assert caught.value.field == "tokens"


# --- the pipe ---


async def test_a_pipe_gives_all_that_is_there(autojump_clock: MockClock) -> None:
    """In order; a reader that waits gets those that came together in one piece."""
    pipe = Pipe(Playout(trio.current_time), Reader())
    got: list[list[StreamItem]] = []

    async def read() -> None:
        got.append(await take_from(pipe))
        got.append(await take_from(pipe))

    items: list[StreamItem] = [PromptDone(), TokenOut(1, "a"), TokenOut(2, "b")]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        give(pipe, items[0], items[1])
        await trio.testing.wait_all_tasks_blocked()
        give(pipe, items[2])
    assert got == [items[:2], items[2:]]


async def test_a_reader_that_is_cancelled_loses_nothing(autojump_clock: MockClock) -> None:
    """The next one to ask gets what came meanwhile."""
    pipe = Pipe(Playout(trio.current_time), Reader())
    with trio.move_on_after(1):
        await take_from(pipe)
    give(pipe, PromptDone())
    with trio.CancelScope() as scope:
        scope.cancel()
        await take_from(pipe)
    assert await take_from(pipe) == [PromptDone()]


async def test_a_closed_pipe_drops_what_comes(autojump_clock: MockClock) -> None:
    """The engine may still be on its way with a token."""
    pipe = Pipe(Playout(trio.current_time), Reader())
    pipe.close()
    give(pipe, PromptDone())
    with trio.move_on_after(1) as scope:
        await take_from(pipe)
    assert scope.cancelled_caught


async def test_what_one_reader_fails_at_reaches_nobody_else(autojump_clock: MockClock) -> None:
    """Its own task has the exception; who shows the items, and other readers, do not."""
    good, bad = (Pipe(Playout(trio.current_time), Reader()) for _ in range(2))
    got: list[StreamItem] = []

    def failing() -> bool:
        raise LookupError("no such word")

    async def fail() -> None:
        with pytest.raises(LookupError):
            await bad.reader.read(failing)
        assert await take_from(bad) == [TokenOut(1, "a")]

    async def read() -> None:
        got.extend(await take_from(good))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        outlet = Outlet(lambda deliver: deliver())
        outlet.deliver([(bad, PromptDone()), (good, PromptDone())])
        await trio.testing.wait_all_tasks_blocked()
        assert got == [PromptDone()]
        bad.take()
        give(bad, TokenOut(1, "a"))


async def test_a_reader_that_ends_itself_is_called_no_more(autojump_clock: MockClock) -> None:
    """As where its connection breaks while it writes: what comes then waits for the next reader."""
    pipe = Pipe(Playout(trio.current_time), Reader())
    calls: list[int] = []

    async def read() -> None:
        with trio.CancelScope() as scope:

            def take() -> bool:
                calls.append(len(pipe.take()))
                scope.cancel()
                return True

            await pipe.reader.read(take)
        assert scope.cancelled_caught

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        give(pipe, PromptDone())
        give(pipe, TokenOut(1, "a"))
    assert calls == [1]
    assert await take_from(pipe) == [TokenOut(1, "a")]


@pytest.mark.parametrize(
    ("prompt", "at_least"),
    [
        ("x" * 10_000, 10_000),
        (Chat(tuple(Message("user", "hi") for _ in range(5000))), 10_000),
        (Chat(tuple(Message("user", " ") for _ in range(5000))), None),
        ("x" * 600, None),
    ],
)
def test_a_prompt_far_beyond_the_context_is_not_tokenised(
    prompt: str | Chat, at_least: int | None
) -> None:
    """Its length says that it has four times the tokens of the context; what is near is counted."""
    bounds = Bounds(model="m", n_ctx_seq=512, n_vocab=256)
    ask = Ask(prompt=prompt)
    if at_least is None:
        check_fits(ask, bounds, longest_piece=1)
        return
    with pytest.raises(Refusal, match=f"at least {at_least} tokens"):
        check_fits(ask, bounds, longest_piece=1)
