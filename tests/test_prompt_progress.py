"""A request that asks is told how much of its prompt is computed, and nobody else is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio
from engine_kit import KINDS, Bench, Sink, first_token_at
from http_kit import http_house
from net_kit import TICK_S, give, take_from
from trio.testing import MockClock

from uma_trio.engine.messages import PromptDone, PromptProgress, TokenOut
from uma_trio.engine.planner import EngineSettings
from uma_trio.service.stream import Pipe, Playout, Reader
from uma_trio_sim.fake import FakeBackend, linear_cost

PROMPT = list(b"Once upon a time there was a fox. ") * 3
CHUNK = 16


def told(sink: Sink) -> list[PromptProgress]:
    """Return what a stream was told of its prompt before that was done."""
    found = [item for item in sink.items if isinstance(item, PromptProgress)]
    assert found == sink.items[: len(found)]
    assert isinstance(sink.items[len(found)], PromptDone)
    return found


def computed(sink: Sink) -> list[int]:
    """Return how much of its prompt was computed each time that it was told."""
    return [item.computed_tokens for item in told(sink)]


# --- the engine ---


@pytest.mark.parametrize("kind", KINDS)
def test_each_chunk_of_a_prompt_is_told_from_nothing_to_all(kind: type[FakeBackend]) -> None:
    """The first says that it has a slot, the last comes right before the prompt is done."""
    bench = Bench(kind(n_batch=CHUNK))
    _, sink = bench.submit(PROMPT, 4, progress=True)
    bench.run()
    assert computed(sink) == [*range(0, len(PROMPT), CHUNK), len(PROMPT)]
    assert {(item.prompt_tokens, item.cached_tokens) for item in told(sink)} == {(len(PROMPT), 0)}
    spent = [item.prompt_s for item in told(sink)]
    assert spent[0] == 0
    assert all(before < after for before, after in pairwise(spent))
    assert sink.end.ttft_s == pytest.approx(spent[-1] + sink.end.queue_s)
    assert sink.tokens == bench.backend.continuation(PROMPT, 4)


def test_a_chunk_is_told_before_the_next_one_is_computed() -> None:
    """Whoever watches sees it move, and not all of it at the end."""
    bench = Bench(FakeBackend(n_batch=CHUNK))
    _, sink = bench.submit(PROMPT, 4, progress=True)
    counts = []
    for _ in range(3):
        bench.engine.tick()
        counts.append(len(sink.items))
    assert counts == [1, 2, 3]
    bench.run()


def test_who_does_not_ask_is_told_nothing() -> None:
    """A neighbour's wish does not reach another stream."""
    bench = Bench(FakeBackend(n_batch=CHUNK))
    _, asks = bench.submit(PROMPT, 4, progress=True)
    _, does_not = bench.submit(PROMPT, 4)
    bench.run()
    assert len(told(asks)) > 2
    assert first_token_at(does_not) == 0
    assert does_not.tokens == asks.tokens


def test_what_was_cached_is_told_first() -> None:
    """Progress begins there, and `cached_tokens` says so each time."""
    bench = Bench(
        FakeBackend(n_ctx=2048, n_batch=CHUNK), settings=EngineSettings(prefix_bytes=1 << 20)
    )
    bench.submit(PROMPT, 1, namespace="mine")
    bench.run()
    _, sink = bench.submit([*PROMPT, *PROMPT[:40]], 4, namespace="mine", progress=True)
    bench.run()
    cached = sink.end.cached_tokens
    assert cached >= len(PROMPT) - 1
    assert computed(sink)[0] == cached
    assert computed(sink)[-1] == len(PROMPT) + 40
    assert {item.cached_tokens for item in told(sink)} == {cached}


def test_who_waits_for_anothers_prompt_begins_with_what_it_shares() -> None:
    """It is told nothing while it waits: what it will find is not known yet."""
    bench = Bench(
        FakeBackend(n_ctx=4096, n_batch=64), settings=EngineSettings(prefix_bytes=1 << 20)
    )
    long = PROMPT * 6
    bench.submit(long, 4, namespace="mine")
    bench.ticks(2)
    _, sink = bench.submit([*long, 1, 2, 3], 2, namespace="mine", progress=True)
    bench.ticks(1)
    assert not sink.items
    bench.run()
    assert bench.engine.cells.prefix.hits["fork"] == 1
    assert computed(sink) == [sink.end.cached_tokens, len(long) + 3]
    assert sink.end.cached_tokens >= len(long) - 1


def test_a_preempted_prompt_never_goes_back() -> None:
    """It is computed again, and tells nothing until it has more than before."""
    bench = Bench(FakeBackend(n_batch=CHUNK))
    handle, sink = bench.submit(PROMPT, 4, lane="background", progress=True)
    bench.ticks(3)
    bench.engine.registry.preempt(handle, "a test")
    bench.run()
    assert computed(sink) == [*range(0, len(PROMPT), CHUNK), len(PROMPT)]


def test_an_answer_that_is_computed_again_tells_no_progress() -> None:
    """Its prompt was done long ago."""
    bench = Bench(FakeBackend(n_batch=CHUNK))
    handle, sink = bench.submit(PROMPT, 12, lane="background", progress=True)
    bench.ticks(12)
    n_told = len(told(sink))
    assert sink.tokens
    bench.engine.registry.preempt(handle, "a test")
    bench.run()
    assert len(told(sink)) == n_told
    assert sum(isinstance(item, PromptProgress) for item in sink.items) == n_told
    assert sink.tokens == bench.backend.continuation(PROMPT, 12)


# --- the pipe ---


def at(n: int) -> PromptProgress:
    """Return that `n` tokens of a prompt are computed."""
    return PromptProgress(1000, 0, n)


async def test_a_reader_that_is_behind_finds_the_first_and_the_latest(
    autojump_clock: MockClock,
) -> None:
    """However many there were: progress has no credit, and must not fill memory."""
    pipe = Pipe(Playout(trio.current_time), Reader())
    for n in range(500):
        give(pipe, at(n))
    assert await take_from(pipe) == [at(0), at(499)]
    give(pipe, at(600))
    give(pipe, at(1000))
    rest = [PromptDone(), TokenOut(1, "a")]
    give(pipe, *rest)
    assert await take_from(pipe) == [at(600), at(1000), *rest]


# --- HTTP ---

TEXT = "Once upon a time there was a fox. " * 3
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
PLAIN: dict[str, Any] = {"prompt": TEXT, "max_tokens": 4}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": PLAIN, "/completion": PLAIN}


def backend() -> FakeBackend:
    """Return a backend that needs several ticks for a prompt."""
    return FakeBackend(n_batch=CHUNK, cost=linear_cost(TICK_S, 0.0))


def without(chunks: list[Any], *names: str) -> list[Any]:
    """Return chunks without some of their members, of which each request has its own."""
    return [
        chunk
        if chunk == "[DONE]"
        else {k: v for k, v in chunk.items() if k not in ("id", "created", *names)}
        for chunk in chunks
    ]


@pytest.mark.parametrize("path", PATHS)
async def test_chunks_tell_llama_servers_progress(autojump_clock: MockClock, path: str) -> None:
    """All numbers are llama-server's, the text of the answer is what it is without, no field is ignored."""
    async with http_house(backend=backend()) as daemon:
        asked = {**PATHS[path], "stream": True, "temperature": 0}
        plain = (await daemon.ask("POST", path, asked)).events
        answer = await daemon.ask("POST", path, {**asked, "return_progress": True})
        assert "x-uma-ignored" not in answer.headers
        chunks = answer.events
        progress = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
        done = [one["processed"] for one in progress]
        total = progress[0]["total"]
        assert done == [*range(0, total, CHUNK), total]
        assert all(one.keys() == {"total", "cache", "processed", "time_ms"} for one in progress)
        assert {(one["total"], one["cache"]) for one in progress} == {(total, 0)}
        times = [one["time_ms"] for one in progress]
        assert times == [round(n * TICK_S * 1e3) for n in range(len(times))]
        others = [c for c in chunks if c == "[DONE]" or "prompt_progress" not in c]
        own = ("timings", "generation_settings")
        assert without(others, *own) == without(plain, *own)


async def test_a_response_tells_progress_in_an_event_that_its_clients_know(
    autojump_clock: MockClock,
) -> None:
    """`response.in_progress`, numbered like all others; the rest of the stream is what it is without."""
    async with http_house(backend=backend()) as daemon:
        asked = {"input": TEXT, "max_output_tokens": 4, "stream": True, "temperature": 0}
        plain = (await daemon.ask("POST", "/v1/responses", asked)).events
        answer = await daemon.ask("POST", "/v1/responses", {**asked, "return_progress": True})
        assert "x-uma-ignored" not in answer.headers
        events = answer.events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        told_of = [event for event in events if "prompt_progress" in event]
        assert {event["type"] for event in told_of} == {"response.in_progress"}
        assert {event["response"]["status"] for event in told_of} == {"in_progress"}
        done = [event["prompt_progress"]["processed"] for event in told_of]
        total = told_of[0]["prompt_progress"]["total"]
        assert done == [*range(0, total, CHUNK), total]
        others = [event["type"] for event in events if "prompt_progress" not in event]
        assert others == [event["type"] for event in plain]


@pytest.mark.parametrize("path", PATHS)
async def test_progress_changes_nothing_in_a_chunk_of_text(
    autojump_clock: MockClock, path: str
) -> None:
    """A client that joins the texts of all chunks has the answer: those of progress add none."""
    async with http_house(backend=backend()) as daemon:
        asked = {**PATHS[path], "stream": True, "return_progress": True}
        for chunk in (await daemon.ask("POST", path, asked)).events:
            if "prompt_progress" not in chunk:
                continue
            if path == "/completion":
                assert (chunk["content"], chunk["tokens"], chunk["stop"]) == ("", [], False)
                assert chunk["tokens_predicted"] == 0
                assert chunk["tokens_evaluated"] == chunk["prompt_progress"]["total"]
            else:
                (choice,) = chunk["choices"]
                assert choice["finish_reason"] is None
                assert choice["delta" if path.endswith("chat/completions") else "text"] in ({}, "")


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_is_not_streamed_has_no_progress(
    autojump_clock: MockClock, path: str
) -> None:
    """The field is taken and changes nothing, as in llama-server."""
    async with http_house(backend=backend()) as daemon:
        answer = await daemon.ask("POST", path, {**PATHS[path], "return_progress": True})
        assert answer.status == 200
        assert "prompt_progress" not in answer.json
        assert "x-uma-ignored" not in answer.headers


async def test_progress_has_timings_where_each_chunk_has_them(autojump_clock: MockClock) -> None:
    """Of the prompt so far: the first chunk has none computed in no time."""
    async with http_house(backend=backend()) as daemon:
        for path, body in PATHS.items():
            asked = {**body, "stream": True, "return_progress": True, "timings_per_token": True}
            chunks = (await daemon.ask("POST", path, asked)).events
            found = [c for c in chunks if "prompt_progress" in c]
            first, last = found[0]["timings"], found[-1]["timings"]
            assert [first[k] for k in ("prompt_n", "prompt_ms", "predicted_n")] == [0, 0, 0]
            assert last["prompt_n"] == found[-1]["prompt_progress"]["total"]
            assert last["prompt_ms"] == found[-1]["prompt_progress"]["time_ms"] > 0
            assert last["predicted_ms"] == 0


async def test_each_choice_has_its_own_progress(autojump_clock: MockClock) -> None:
    """The chunk says whose it is, and every one gets to the end of its prompt."""
    async with http_house(backend=backend()) as daemon:
        asked = {**CHAT, "stream": True, "return_progress": True, "n": 2}
        chunks = (await daemon.ask("POST", "/v1/chat/completions", asked)).events
        latest: dict[int, Any] = {}
        for chunk in chunks:
            if "prompt_progress" in chunk:
                latest[chunk["choices"][0]["index"]] = chunk["prompt_progress"]
        assert sorted(latest) == [0, 1]
        assert all(one["processed"] == one["total"] for one in latest.values())
