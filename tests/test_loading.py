"""A request whose model is loaded first: what it is told, how it is listed, and how it ends. Over HTTP and the socket."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from engine_kit import Bench
from http_kit import HttpHouse, http_house
from inline_kit import Wakeup, run_inline
from net_kit import TICK_S, at_once
from trio.testing import MockClock

from uma_protocol import (
    Cancel,
    Connection,
    Embed,
    Eos,
    Error,
    Explain,
    Explanation,
    Generate,
    GetMetrics,
    ListSessions,
    Loading,
    LoadModel,
    LoraScale,
    Ok,
    Prefix,
    Prefixes,
    Role,
    Sessions,
    SetPriority,
    Token,
    UnloadModel,
)
from uma_trio.api.bodies import Duration, seconds_of
from uma_trio.api.loading import EVENTS, model_for
from uma_trio.backend.base import ModelError
from uma_trio.config.options import Config
from uma_trio.engine.inbox import QueueFull
from uma_trio.models.loaded import Bounds, LoadedModel, TextModel
from uma_trio.models.manager import ModelManager
from uma_trio.models.model import Model
from uma_trio.service.ask import Door, Origin
from uma_trio.sockets.principal import Principal
from uma_trio.text.frontend import FrontEnd
from uma_trio_sim.fake import FakeBackend, linear_cost

STEPS, STEP_S = 10, 0.45
ASKED = {"prompt": "hello", "max_tokens": 4, "temperature": 0}


@define(eq=False)
class LoadingHouse:
    """A daemon with the model `fake`, and `code`, which takes 4.5 seconds to load; `error` is how that ends then."""

    house: HttpHouse
    manager: ModelManager
    nursery: trio.Nursery
    backend: FakeBackend
    bench: Bench = field(init=False)
    wakeup: Wakeup = field(factory=Wakeup)
    error: Exception | None = None
    parts: int = 0

    @property
    def code(self) -> Model:
        """The model that is not loaded at first."""
        return self.manager.models[1]

    async def build(self, model: Model, held: ExitStack, _neighbour: object) -> TextModel:
        """Load a model in steps, and run its engine."""
        backend, wakeup, inner = self.backend, self.wakeup, self.house.inner
        for part in range(STEPS):
            self.parts = part
            model.report_progress("is loading", part / STEPS)
            await trio.sleep(STEP_S)
        if self.error is not None:
            raise self.error
        bench = self.bench = Bench(backend, clock=trio.current_time, wake=wakeup.set)

        cost = lambda: backend.last_cost_s  # noqa: E731 - shorter than its name
        self.nursery.start_soon(run_inline, bench.engine, bench.inbox, wakeup, cost)
        return TextModel(
            facts=backend.model,
            slots=4,
            bounds=Bounds(model=model.names[0], n_ctx_seq=512, n_vocab=backend.model.n_vocab),
            front_end=FrontEnd(backend.vocabulary, backend.model.chat_template),
            inbox=bench.inbox,
            telemetry=inner.recorder,
            run_blocking=at_once,
            defaults=model.config.defaults,
            engine=bench.engine,
            history=lambda: bench.engine._recorder.explain(trio.current_time(), None, 64),
        )


@asynccontextmanager
async def loading_house(
    http: Mapping[str, Any] | None = None, **changes: Any
) -> AsyncIterator[LoadingHouse]:
    """Run it in virtual time; `changes` are of the configuration of `code`, `http` are settings of that side."""
    async with http_house(**(http or {})) as house, trio.open_nursery() as nursery:
        manager = house.inner.models
        backend = FakeBackend(key=2, n_ctx=512, cost=linear_cost(TICK_S, 0.0))
        made = LoadingHouse(house, manager, nursery, backend)
        manager.models[0].config = evolve(manager.models[0].config, model_pin=True)
        config = Config(alias=("code",), load="on-demand")
        manager.models.append(Model(evolve(config, **changes)))  # type: ignore[attr-defined]
        house.inner.build = made.build
        await nursery.start(manager.run)
        yield made
        await house.inner.until_idle()
        nursery.cancel_scope.cancel()


async def test_a_stream_is_told_how_far_the_loading_is(
    autojump_clock: MockClock,
) -> None:
    """In comments, with a header; then the answer comes as ever."""
    async with loading_house() as daemon:
        answer = await daemon.house.ask(
            "POST", "/v1/completions", {**ASKED, "model": "code", "stream": True}
        )
        assert answer.status == 200
        assert answer.headers["x-uma-model-state"] == "loading"
        comments = [line for line in answer.body.decode().split("\n") if line.startswith(": ")]
        assert comments[0] == ": model code is loading, 20%"
        assert comments[-1] == ": model code is loading, 80%"
        assert answer.events[-1] == "[DONE]"
        backend = daemon.bench.backend
        assert isinstance(backend, FakeBackend)
        text = "".join(event["choices"][0]["text"] for event in answer.events[:-1])
        assert text == backend.text_of(daemon.bench.expected("hello", 4))


async def test_who_asks_for_progress_gets_events(
    autojump_clock: MockClock,
) -> None:
    """Ollama's clients always do: they have no comments."""
    async with loading_house() as daemon:
        body = {**ASKED, "model": "code", "stream": True, "return_progress": True}
        answer = await daemon.house.ask("POST", "/v1/completions", body)
        told = [event["load_progress"] for event in answer.events[:-1] if "load_progress" in event]
        assert [each["progress"] for each in told] == [0.2, 0.4, 0.6, 0.8]
        await daemon.house.ask("POST", "/unload", {"model": "code"})
        answer = await daemon.house.ask("POST", "/api/generate", {"prompt": "x", "model": "code"})
        assert answer.lines[0]["load_progress"]["state"] == "model code is loading, 20%"
        assert (answer.lines[0]["response"], answer.lines[0]["done"]) == ("", False)
        assert answer.lines[-1]["done"]


async def test_a_whole_answer_waits_without_a_word(
    autojump_clock: MockClock,
) -> None:
    """So does a stream that asked for a late head: both have a status of their own."""
    async with loading_house() as daemon:
        daemon.error = ModelError("the file is damaged.")
        for more, head in (({}, {}), ({"stream": True}, {"X_UMA_Head": "first-token"})):
            daemon.code.set_state("unloaded")
            body = {**ASKED, "model": "code", **more}
            answer = await daemon.house.ask("POST", "/v1/completions", body, **head)
            assert answer.status == 503
            assert "the file is damaged" in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", ASKED, b'data: {"error":{"message":"code cannot be loaded'),
        ("/v1/messages", {"max_tokens": 1}, b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", {"input": "x"}, b'event: error\ndata: {"type":"error"'),
        ("/api/generate", {"prompt": "x"}, b'\n{"error":"code cannot be loaded'),
        ("/generate", {"prompt": "x"}, b'data: {"error":{"message":"code cannot be loaded'),
    ],
)
async def test_a_stream_that_was_opened_is_told_the_failure(
    autojump_clock: MockClock,
    path: str,
    body: dict[str, Any],
    said: bytes,
) -> None:
    """As each API tells errors in its streams; the connection goes on."""
    async with loading_house() as daemon:
        daemon.error = ModelError("the file is damaged.")
        client = daemon.house.connect()
        messages = {"messages": [{"role": "user", "content": "x"}]} if "messages" in path else {}
        body = {**body, **messages, "model": "code", "stream": True}
        answer = await client.ask("POST", path, body)
        assert answer.status == 200
        assert said in answer.body
        assert (await client.ask("GET", "/v1/models")).status == 200


async def test_a_client_that_leaves_ends_the_loading(
    autojump_clock: MockClock,
) -> None:
    """Where nobody else waits for it: what was read so far is freed."""
    async with loading_house() as daemon:
        clients = [daemon.house.connect() for _ in range(2)]
        for client in clients:
            await client.send("POST", "/v1/completions", {**ASKED, "model": "code"})
        await trio.sleep(1.2)
        clients[0].close()
        await trio.sleep(1)
        assert daemon.code.state == "loading"
        clients[1].close()
        await trio.sleep(1)
        assert daemon.code.state == "unloaded"
        assert daemon.parts < STEPS - 1


async def test_a_client_that_leaves_as_its_model_is_loaded_does_not_use_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The model can be unloaded afterwards."""
    async with loading_house() as daemon:
        service, left = daemon.house.inner.service, trio.CancelScope()
        ready = service.ready

        async def ready_too_late(*arguments: Any, **options: Any) -> LoadedModel:
            served = await ready(*arguments, **options)
            left.cancel()
            return served

        monkeypatch.setattr(service, "ready", ready_too_late)
        exchange: Any = SimpleNamespace(is_late=False, opened=False, open=lambda *_told: None)
        shared: Any = SimpleNamespace(service=service)
        origin = Origin(
            principal=Principal(connection=1), door=Door(max_prompt_bytes=1000), name="r1"
        )
        with left:
            async with model_for(exchange, shared, "code", origin, "interactive", EVENTS):
                pass
        assert left.cancelled_caught
        assert daemon.code.state == "loaded"
        assert await daemon.manager.unload(daemon.code)


async def test_a_request_that_waits_is_listed_and_explained(
    autojump_clock: MockClock,
) -> None:
    """On both front ends, and can be ended by its handle."""
    async with loading_house() as daemon:
        inner = daemon.house.inner
        over_http, client = daemon.house.connect(), inner.connect()
        await over_http.send("POST", "/v1/completions", {**ASKED, "model": "code"})
        await client.ask(**{**ASKED, "model": "code"})
        await trio.sleep(1.2)
        listed = (await inner.service.observer.state()).requests
        waits = [one.record.wait for one in listed]
        assert [each and each.reason for each in waits] == ["model code is loading, 20%"] * 2
        assert {one.record.state for one in listed} == {"queued"}
        explained = await inner.service.observer.explain(listed[0].record.handle, 0)
        assert explained.requests[0].wait == waits[0]
        for one in listed:
            assert inner.service.cancel(one.record.handle, one.named.principal)
        assert (await over_http.answer()).error["code"] == "cancelled"
        assert (await client.until(Eos)).reason == "cancelled"
        await trio.sleep(1)
        assert daemon.code.state == "unloaded"


async def test_models_are_listed_with_their_states(
    autojump_clock: MockClock,
) -> None:
    """In llama-server's words, with how far a loading is; Ollama's list has them, too."""
    async with loading_house() as daemon:

        async def states() -> list[Any]:
            listed = (await daemon.house.ask("GET", "/v1/models")).json["data"]
            return [one["status"]["value"] for one in listed]

        assert await states() == ["loaded", "unloaded"]
        client = daemon.house.connect()
        await client.send("POST", "/v1/completions", {**ASKED, "model": "code"})
        await trio.sleep(1.2)
        assert await states() == ["loaded", "loading"]
        listed = (await daemon.house.ask("GET", "/v1/models")).json["data"]
        assert listed[1]["status"]["progress"] == 0.2
        tags = (await daemon.house.ask("GET", "/api/tags")).json["models"]
        assert [one["name"] for one in tags] == ["fake:latest", "code:latest"]
        await client.answer()
        assert await states() == ["loaded", "loaded"]


async def test_a_hidden_model_answers_and_is_not_listed(
    autojump_clock: MockClock,
) -> None:
    """Neither before nor after it is loaded, nor in the message about an unknown name."""
    async with loading_house(model_hidden=True) as daemon:
        for _ in range(2):
            listed = (await daemon.house.ask("GET", "/v1/models")).json["data"]
            assert [one["id"] for one in listed] == ["fake"]
            answer = await daemon.house.ask("POST", "/v1/completions", {**ASKED, "model": "code"})
            assert answer.json["model"] == "code"
        wrong = await daemon.house.ask("POST", "/v1/completions", {**ASKED, "model": "cod"})
        assert wrong.error["message"].endswith("this daemon serves fake")


async def test_a_model_has_defaults_of_its_own(
    autojump_clock: MockClock,
) -> None:
    """On both front ends; what a request says comes before them."""
    async with loading_house(defaults={"temperature": 0.25, "top_k": 7}) as daemon:
        found: list[tuple[float, int]] = []
        service = daemon.house.inner.service

        async def look() -> None:
            while len(found) < 3:
                await trio.sleep(TICK_S / 4)
                for generation in service.directory:
                    if generation.model == "code":
                        params = generation.ask.sampling  # type: ignore[attr-defined]
                        if (params.temperature, params.top_k) not in found:
                            found.append((params.temperature, params.top_k))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            ask = {"prompt": "hello", "max_tokens": 4, "model": "code"}
            await daemon.house.ask("POST", "/v1/completions", ask)
            await daemon.house.ask("POST", "/v1/completions", {**ask, "temperature": 0.5})
            client = daemon.house.inner.connect()
            await client.ask(**ask, top_k=3)
            await client.until(Eos)
        assert found == [(0.25, 7), (0.5, 7), (0.25, 3)]
        props = (await daemon.house.ask("GET", "/props?model=code")).json
        assert props["default_generation_settings"]["params"]["temperature"] == 0.25


async def test_keep_alive_is_for_operators(
    autojump_clock: MockClock,
) -> None:
    """Others are told that it changes nothing."""
    async with loading_house(model_ttl_s=60.0) as daemon:
        ask = {"prompt": "x", "model": "code", "stream": False, "keep_alive": "5m"}
        answer = await daemon.house.ask("POST", "/api/generate", ask)
        assert "x-uma-ignored" not in answer.headers
        assert daemon.code.ttl_s == 300.0
        listed = (await daemon.house.ask("GET", "/api/ps")).json["models"]
        assert [one["expires_at"][:4] == "9999" for one in listed] == [True, False]
        daemon.house.peer = Principal(connection=0, host="127.0.0.1", uid=54321)
        answer = await daemon.house.ask("POST", "/api/generate", {**ask, "keep_alive": -1})
        assert answer.headers["x-uma-ignored"] == "keep_alive"
        assert daemon.code.ttl_s == 300.0


async def test_who_asks_nothing_and_keeps_it_for_no_time_unloads(
    autojump_clock: MockClock,
) -> None:
    """As Ollama's `stop` does; without keep_alive the same request loads."""
    async with loading_house() as daemon:
        ask = {"model": "code"}
        answer = await daemon.house.ask("POST", "/api/generate", {**ask, "stream": False})
        assert answer.json["done_reason"] == "load"
        assert daemon.code.state == "loaded"
        answer = await daemon.house.ask("POST", "/api/generate", {**ask, "keep_alive": 0})
        assert answer.json["done_reason"] == "unload"
        await trio.sleep(0.5)
        assert daemon.code.state == "unloaded"
        await daemon.house.ask("POST", "/api/chat", {**ask, "keep_alive": 0})
        assert daemon.code.state == "unloaded"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (300, 300.0),
        (0, 0.0),
        (-1, float("inf")),
        ("-1", float("inf")),
        ("-1m", float("inf")),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("1500ms", 1.5),
        ("42", 42.0),
        ("soon", None),
        ("10m!", None),
        (True, None),
        ([], None),
    ],
)
def test_keep_alive_takes_what_ollama_takes(value: Any, seconds: float | None) -> None:
    """A number of seconds, or a duration of Go; anything else is refused."""
    assert (Duration().check("keep_alive", value) is None) == (seconds is not None)
    assert seconds_of(value) == seconds


async def test_the_socket_tells_how_far_the_loading_is(
    autojump_clock: MockClock,
) -> None:
    """Who asked for it, until the model is loaded; others get their answer as before."""
    async with loading_house() as daemon:
        told, plain = daemon.house.inner.connect(), daemon.house.inner.connect()
        await told.ask(model="code", max_tokens=4, progress=True)
        await plain.ask(model="code", max_tokens=4)
        await told.until(Eos)
        await plain.until(Eos)
        seen = [event for event in told.events if isinstance(event, Loading)]
        assert [event.model for event in seen] == ["code"] * len(seen)
        assert seen[-1].state == "model code is loading, 90%"
        shares = [event.progress for event in seen]
        assert shares == sorted(shares)
        assert len(shares) >= 8
        assert told.events[: len(seen)] == seen
        assert (told.n_tokens, plain.n_tokens) == (4, 4)
        assert not any(isinstance(event, Loading) for event in plain.events)
        await told.ask(id="r2", model="code", max_tokens=4, progress=True)
        await told.until(Eos)
        assert sum(isinstance(event, Loading) for event in told.events) == len(seen)


async def test_who_is_told_and_cancels_hears_nothing_more(
    autojump_clock: MockClock,
) -> None:
    """Behind the end; the connection takes the next request."""
    async with loading_house() as daemon:
        client = daemon.house.inner.connect()
        await client.ask(model="code", progress=True)
        await trio.sleep(1.1)
        await client.send(Cancel("r"))
        assert (await client.until(Eos)).reason == "cancelled"
        n = len(client.events)
        await trio.sleep(2)
        await client.ask(id="r2", model="fake", max_tokens=2)
        await client.until(Eos)
        assert {event.id for event in client.events[n:]} == {"r2"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "model"),
    [([{"name": "x"}], "code:x"), ([{"id": 1, "scale": 0.5}], "code:y=0.5"), ([], "code")],
)
async def test_adapters_are_chosen_by_a_list_on_the_socket(
    autojump_clock: MockClock, asked: Any, model: str
) -> None:
    """By name or number; those of the model's name are not used beside a list."""
    async with loading_house(lora=("x=x.gguf", "y=y.gguf")) as daemon:
        client = daemon.house.inner.connect()
        lora = tuple(LoraScale(**each) for each in asked)
        await client.ask(model="code:x", lora=lora, max_tokens=4, progress=True)
        assert (await client.until(Loading)).model == model
        await client.send(Cancel("r"))
        await client.until(Eos)


_SAYS = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": _SAYS}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/completion", {"prompt": "hello"}),
        ("/v1/messages", {"messages": _SAYS, "max_tokens": 4}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"messages": _SAYS}),
        ("/api/generate", {"prompt": "hello"}),
        ("/generate", {"id": "r", "prompt": "hello"}),
    ],
)
async def test_adapters_are_chosen_by_a_list_in_each_api(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    """As on the socket: one that is not there is refused with the names that are."""
    async with loading_house(lora=("x=x.gguf",)) as daemon:
        asked = {**body, "model": "code", "lora": [{"name": "y"}]}
        answer = await daemon.house.ask("POST", path, asked)
        assert (answer.status, "there are x" in answer.body.decode()) == (400, True)
        daemon.error = ModelError("the end of the test.")
        await daemon.house.ask("POST", path, {**asked, "lora": [{"name": "x"}]})
        variant = daemon.manager.find("code:x")
        assert variant is not None
        assert "the end of the test" in variant.error


async def test_an_adapter_that_is_not_there_is_refused_on_the_socket(
    autojump_clock: MockClock,
) -> None:
    """With the names that are; before anything is loaded."""
    async with loading_house(lora=("x=x.gguf",)) as daemon:
        for lora in (LoraScale("y"), LoraScale(id=3), LoraScale(scale=0.5)):
            client = daemon.house.inner.connect()
            await client.ask(model="code", lora=(lora,))
            error = await client.until(Error)
            assert error.code in ("E_MODEL_002", "E_PROTO_003")
            assert "adapter" in error.message
        assert daemon.code.state == "unloaded"


async def test_the_socket_loads_and_unloads(
    autojump_clock: MockClock,
) -> None:
    """Both are answered when it is done; a model in use stays, and an unknown one is refused with the nearest."""
    async with loading_house() as daemon:
        client, other = daemon.house.inner.connect(), daemon.house.inner.connect()
        await client.send(LoadModel("code"))
        await client.until(Ok)
        assert daemon.code.state == "loaded"
        await other.ask(prompt="hello", model="code", max_tokens=100)
        await trio.sleep(3 * TICK_S)
        await client.send(UnloadModel("code"))
        assert (await client.until(Error)).code == "E_MODEL_003"
        await other.until(Eos)
        await client.send(UnloadModel("code"))
        await client.until(Ok)
        assert daemon.code.state == "unloaded"
        await client.send(LoadModel("cod"))
        error = await client.until(Error)
        assert (error.code, "did you mean code?" in error.message) == ("E_MODEL_002", True)


async def test_a_request_with_a_wrong_name_on_the_socket_loads_nothing(
    autojump_clock: MockClock,
) -> None:
    """Also if there is only one model that writes: there a name has to be right."""
    async with loading_house() as daemon:
        daemon.manager.models[0].kind = "vectors"
        client = daemon.house.inner.connect()
        await client.ask(prompt="hello", model="typo")
        assert (await client.until(Error)).code == "E_MODEL_002"
        assert daemon.code.state == "unloaded"


@pytest.mark.parametrize("verb", [LoadModel, UnloadModel])
async def test_a_wrong_name_loads_and_unloads_nothing(autojump_clock: MockClock, verb: Any) -> None:
    """Though a request with that name is answered by the only model that writes."""
    async with loading_house() as daemon:
        daemon.code.kind = "vectors"
        client = daemon.house.inner.connect()
        await client.send(verb("typo"))
        assert (await client.until(Error)).code == "E_MODEL_002"
        assert daemon.manager.models[0].state == "loaded"


async def test_who_asked_to_load_and_leaves_ends_it(
    autojump_clock: MockClock,
) -> None:
    """As Ctrl-C in `uma-trio load` does."""
    async with loading_house() as daemon:
        client = daemon.house.inner.connect()
        await client.send(LoadModel("code"))
        await trio.sleep(1.2)
        client.close()
        await trio.sleep(1)
        assert daemon.code.state == "unloaded"


async def test_requests_of_an_unloaded_model_are_explained(
    autojump_clock: MockClock,
) -> None:
    """Among the latest ones, and by their handle."""
    async with loading_house() as daemon:
        service = daemon.house.inner.service
        asked = {**ASKED, "model": "code"}
        assert (await daemon.house.ask("POST", "/v1/completions", asked)).status == 200
        assert await daemon.manager.unload(daemon.code)
        (one,) = (await service.observer.explain(None, 4)).requests
        assert one.reason == "length"
        alone = await service.observer.explain(one.handle, 4)
        assert alone.requests == (one,)
        assert {item.key for tick in alone.ticks for item in tick.items} == {one.handle}


async def test_a_daemon_without_a_loaded_model_is_well(
    autojump_clock: MockClock,
) -> None:
    """It lists what waits, is alive for routers, and loads the first model for a request that names none."""
    async with loading_house() as daemon:
        service = daemon.house.inner.service
        first = daemon.manager.models[0]
        assert await daemon.manager.unload(first)
        daemon.house.inner.wakeup.set()
        assert (await service.observer.state()).requests == ()
        assert (await daemon.house.ask("GET", "/health")).status == 200
        assert (await service.observer.explain(None, 0)).requests == ()
        assert (await daemon.house.ask("GET", "/v1/models")).json["data"][0]["status"] == {
            "value": "unloaded"
        }
        answer = await daemon.house.ask("POST", "/v1/completions", ASKED)
        assert answer.status == 200
        assert first.state == "loaded"


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (LoadModel("nope"), "E_MODEL_002"),
        (LoadModel("code"), "E_MODEL_001"),
        (UnloadModel("nope"), "E_MODEL_002"),
        (UnloadModel("fake"), "E_MODEL_003"),
        (UnloadModel("code"), None),
        (Prefix(action="pin"), "E_PROTO_003"),
        (Prefix(action="pin", session="none"), None),
        (Prefix(action="list"), None),
        (Prefix(action="clear"), None),
        (Cancel(request=99_999), "E_PROTO_005"),
        (SetPriority(request=99_999, priority="background"), "E_PROTO_005"),
        (SetPriority(id="r", priority="background"), None),
        (Explain(request=99_999), "E_PROTO_005"),
        (Explain(), None),
        (ListSessions(), None),
        (ListSessions(ticks=5), None),
        (GetMetrics(), None),
        (GetMetrics(interval_ms=500), "E_PROTO_007"),
        (Generate(id="second", prompt="x"), "E_PROTO_004"),
        (Generate(id="second", prompt="x", model="nope"), "E_PROTO_004"),
        (Embed(id="second", input=("x",)), "E_PROTO_004"),
    ],
    ids=str,
)
async def test_a_question_beside_a_request_does_not_end_it(
    autojump_clock: MockClock,
    question: Any,
    code: str | None,
) -> None:
    """Whether it is answered or refused: fatal is a fault of what runs, or of the connection itself."""
    async with loading_house() as daemon:
        daemon.error = ModelError("the file is damaged.")
        inner = daemon.house.inner
        client = inner.connect()
        await client.ask(prompt="hello", max_tokens=400, ignore_eos=True, pace="asap")
        await client.until(Token)
        if isinstance(question, Generate | Embed):  # which no client of ours would send
            await client.send_bytes(Connection(Role.CLIENT).send(question))
        else:
            await client.send(question)
        eos = await client.until(Eos)
        assert (eos.reason, eos.usage.completion_tokens) == ("length", 400)
        errors = [event for event in client.events if isinstance(event, Error)]
        assert [(one.code, one.fatal) for one in errors] == (
            [] if code is None else [(code, False)]
        )
        assert inner.log.faults == []


@pytest.mark.parametrize("question", [LoadModel("nope"), Prefix(action="pin")], ids=str)
async def test_a_refused_question_alone_ends_the_connection(
    autojump_clock: MockClock, question: Any
) -> None:
    """A client that waits for the end of an answer would wait for ever."""
    async with loading_house() as daemon:
        client = daemon.house.inner.connect()
        await client.send(question)
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert error.fatal


@pytest.mark.parametrize("path", ["/events", "/events?model=fake", "/events?ticks=1&model=code"])
async def test_watchers_and_lists_outlive_an_unloading(
    autojump_clock: MockClock, path: str
) -> None:
    """Of whatever model they are: what ends is one engine among several."""
    async with loading_house() as daemon, trio.open_nursery() as nursery:
        house, ends = daemon.house, list[object]()
        await house.ask("POST", "/v1/completions", {**ASKED, "model": "code"})

        async def watch() -> None:
            client = house.connect()
            await client.send("GET", path)
            ends.append((await client.head()).status)
            try:
                while await client.piece():
                    pass
                ends.append("clean")
            except Exception as error:
                ends.append(error)

        async def look() -> None:
            client = house.inner.connect()
            while True:
                for asked in ("/slots", "/metrics", "/metrics/router", "/health?ready", "/explain"):
                    answer = await house.ask("GET", asked)
                    assert answer.status == 200, (asked, answer.body)
                for question, kind in (
                    (ListSessions(ticks=8), Sessions),
                    (Explain(), Explanation),
                    (Prefix(action="list"), Prefixes),
                ):
                    await client.send(question)
                    await client.until(kind)

        nursery.start_soon(watch)
        nursery.start_soon(look)
        for n in range(8):
            await house.ask("POST", "/v1/completions", {**ASKED, "model": "code"})
            nursery.start_soon(
                house.ask, "POST", "/v1/completions", {**ASKED, "model": "fake", "max_tokens": 90}
            )
            await trio.sleep(0.3 + 0.017 * n)
            assert (await house.ask("POST", "/unload", {"model": "code"})).status == 200
        assert ends == [200]
        nursery.cancel_scope.cancel()


async def test_ticks_of_a_model_that_was_loaded_again_are_told(
    autojump_clock: MockClock,
) -> None:
    """They are counted from the first one again."""
    async with loading_house() as daemon, trio.open_nursery() as nursery:
        house, told = daemon.house, list[int]()
        answer = {**ASKED, "model": "code", "max_tokens": 60}
        await house.ask("POST", "/v1/completions", answer)

        async def watch() -> None:
            client = house.connect()
            await client.send("GET", "/events?ticks=1&model=code")
            await client.head()
            while piece := await client.piece():
                for line in piece.decode().splitlines():
                    if line.startswith("data: "):
                        told.extend(tick[0] for tick in json.loads(line[6:]).get("ticks", ()))

        nursery.start_soon(watch)
        await trio.sleep(2)
        await house.ask("POST", "/v1/completions", answer)
        await trio.sleep(2)
        assert told[-1] > 60
        await house.ask("POST", "/v1/completions", {**answer, "max_tokens": 20, "model": "fake"})
        await house.ask("POST", "/unload", {"model": "code"})
        await trio.sleep(6)
        told.clear()
        await house.ask("POST", "/v1/completions", answer)
        await trio.sleep(2)
        assert told == [*range(told[0], told[0] + len(told))]
        assert told[0] <= 1
        nursery.cancel_scope.cancel()


async def test_a_request_that_the_queue_refuses_pays_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """What its user owes is charged to the next one; of several choices only once."""
    async with loading_house() as daemon:
        inner = daemon.house.inner
        inbox, user = inner.models.default.inbox, f"uid {os.getuid()}"
        sent: list[float] = []
        real = inbox.submit

        def full(*_messages: object) -> None:
            raise QueueFull(9, 1.0)

        def taken(*messages: Any) -> None:
            sent.extend(one.owes_s for one in messages)
            real(*messages)

        inner.models.charge(user, 7.5)
        monkeypatch.setattr(inbox, "submit", full)
        assert (await daemon.house.ask("POST", "/v1/completions", ASKED)).status == 429
        assert inner.models.debts == {user: 7.5}
        monkeypatch.setattr(inbox, "submit", taken)
        answer = await daemon.house.ask("POST", "/v1/completions", {**ASKED, "n": 2})
        assert (answer.status, sent, inner.models.debts) == (200, [7.5, 0.0], {})
