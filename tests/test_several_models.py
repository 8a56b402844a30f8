"""Several models behind one service: which one answers, what is listed, what is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen
from engine_kit import Bench
from http_kit import HttpHouse, http_house
from inline_kit import Wakeup, run_inline
from net_kit import TICK_S, at_once, serve_inline
from test_http_events import messages, watch
from trio.testing import MockClock

from uma_protocol import (
    Eos,
    Error,
    Explain,
    Explanation,
    GetMetrics,
    ListSessions,
    Metrics,
    Sessions,
)
from uma_trio.app import daemon
from uma_trio.config.option import ConfigError
from uma_trio.config.settings import load
from uma_trio.models import bundled_model
from uma_trio.models.loaded import Bounds, TextModel
from uma_trio.observe.exposition import prometheus
from uma_trio.text.frontend import FrontEnd
from uma_trio_sim.fake import FakeBackend, linear_cost


@frozen
class Two:
    """A daemon with the models `fake` and `code`, the second of which has also the name `small`."""

    house: HttpHouse
    code: Bench

    def says(self, prompt: str, n: int) -> str:
        """Return what the second model answers."""
        backend = self.code.backend
        assert isinstance(backend, FakeBackend)
        return backend.text_of(self.code.expected(prompt, n))


@asynccontextmanager
async def two_models() -> AsyncIterator[Two]:
    """Run it in virtual time."""
    async with http_house() as house:
        backend, wakeup = FakeBackend(key=2, n_ctx=512, cost=linear_cost(TICK_S, 0.0)), Wakeup()
        bench = Bench(backend, clock=trio.current_time, wake=wakeup.set)
        inner = house.inner
        code = TextModel(
            facts=backend.model,
            slots=4,
            bounds=Bounds(
                model="code",
                n_ctx_seq=512,
                n_vocab=backend.model.n_vocab,
                aliases=("small", "code.file"),
                from_file=("code.file",),
            ),
            front_end=FrontEnd(backend.vocabulary, backend.model.chat_template),
            inbox=bench.inbox,
            telemetry=inner.recorder,
            run_blocking=at_once,
            engine=bench.engine,
        )
        serve_inline(inner.models, code, model_pin=True)
        inner.nursery.start_soon(
            run_inline, bench.engine, bench.inbox, wakeup, lambda: backend.last_cost_s
        )
        yield Two(house, bench)


@pytest.mark.parametrize("name", ["code", "small"])
async def test_the_model_of_a_request_answers(autojump_clock: MockClock, name: str) -> None:
    """Under each of its names; both compute at once."""
    async with two_models() as two:
        asked = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
        answer = await two.house.ask("POST", "/v1/completions", {**asked, "model": name})
        assert answer.json["choices"][0]["text"] == two.says("hello", 8)
        assert answer.json["model"] == name
        default = await two.house.ask("POST", "/v1/completions", asked)
        assert default.json["choices"][0]["text"] == two.house.inner.expected("hello", 8)


async def test_an_unknown_model_is_404_with_the_nearest(autojump_clock: MockClock) -> None:
    """No other model answers in its place."""
    async with two_models() as two:
        answer = await two.house.ask(
            "POST", "/v1/chat/completions", {"model": "cod", "messages": []}
        )
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
        assert "did you mean code?" in answer.error["message"]
        assert "this daemon serves fake, code" in answer.error["message"]


async def test_the_socket_chooses_a_model_too(autojump_clock: MockClock) -> None:
    """An unknown one is refused, and the message lists those that are served."""
    async with two_models() as two:
        client = two.house.inner.connect()
        await client.ask(prompt="hello", model="small", max_tokens=8, temperature=0.0)
        await client.until(Eos)
        assert client.text == two.says("hello", 8)
        other = two.house.inner.connect()
        await other.ask(prompt="hello", model="nothing")
        error = await other.until(Error)
        assert error.code == "E_MODEL_002"
        assert "fake, code" in error.message


async def test_a_request_is_bound_by_its_own_model(autojump_clock: MockClock) -> None:
    """600 tokens fit into the context of one of the two."""
    async with two_models() as two:
        asked = {"prompt": "x" * 600, "max_tokens": 1}
        assert (await two.house.ask("POST", "/v1/completions", asked)).status == 200
        answer = await two.house.ask("POST", "/v1/completions", {**asked, "model": "code"})
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["n_ctx"] == 512


async def test_every_model_is_listed_and_described(autojump_clock: MockClock) -> None:
    """As OpenAI, Ollama and llama-server do."""
    async with two_models() as two:
        listed = (await two.house.ask("GET", "/v1/models")).json["data"]
        assert [one["id"] for one in listed] == ["fake", "code", "small"]
        assert {one["status"]["value"] for one in listed} == {"loaded"}
        assert listed[1]["max_model_len"] == 512
        tags = (await two.house.ask("GET", "/api/tags")).json["models"]
        assert [one["name"] for one in tags] == ["fake:latest", "code:latest", "small:latest"]
        shown = (await two.house.ask("POST", "/api/show", {"model": "small:latest"})).json
        assert 512 in shown["model_info"].values()
        props = (await two.house.ask("GET", "/props?model=code")).json
        assert (props["model_alias"], props["total_slots"]) == ("code", 4)
        assert len((await two.house.ask("GET", "/slots")).json) == 8 + 4
        assert (await two.house.ask("GET", "/v1/models/nothing")).status == 404


async def test_running_requests_of_all_models_are_listed(autojump_clock: MockClock) -> None:
    """With their handles, which are unique among all of them."""
    async with two_models() as two:
        clients = [two.house.inner.connect() for _ in range(2)]
        await clients[0].ask(prompt="hello", max_tokens=50)
        await clients[1].ask(prompt="hello", max_tokens=50, model="code")
        await trio.sleep(10 * TICK_S)
        running = (await two.house.inner.service.observer.state()).requests
        assert len({one.record.handle for one in running}) == 2
        assert {one.named.model for one in running} == {"fake", "code"}
        recorded = await two.house.inner.service.observer.explain(None, 0)
        assert len(recorded.requests) == 2


async def test_whoever_looks_sees_which_model_has_a_request(autojump_clock: MockClock) -> None:
    """In the list of the socket, in stories, in `/events`; the latest ticks are those of both models."""
    async with two_models() as two:
        clients = [two.house.inner.connect() for _ in range(2)]
        for client, model in zip(clients, ("fake", "code"), strict=True):
            await client.ask(prompt="hello", max_tokens=50, model=model)
        await trio.sleep(10 * TICK_S)
        looks = two.house.inner.connect()
        await looks.send(ListSessions(ticks=8))
        listed = await looks.until(Sessions)
        assert [one.model for one in listed.sessions] == ["fake", "code"]
        assert {tick.model for tick in listed.ticks} == {"fake", "code"}
        ages = [tick.age_ms for tick in listed.ticks]
        assert ages == sorted(ages, reverse=True)
        await looks.send(Explain())
        told = await looks.until(Explanation)
        assert sorted(story.model or "" for story in told.requests) == ["code", "fake"]
        watcher = await watch(two.house)
        (picture, *_) = [m for m in await messages(watcher, 1) if m.get("requests")]
        assert [one["model"] for one in picture["requests"]] == ["fake", "code"]
        assert picture["models"] == [["fake", "loaded"], ["code", "loaded"]]


async def test_a_watcher_chooses_whose_ticks_it_is_sent(autojump_clock: MockClock) -> None:
    """With `?model=`, by any of its names; a model that is not there is an error."""
    async with two_models() as two:
        for path, model, slots in (("", "fake", 8), ("&model=small", "code", 4)):
            watcher = await watch(two.house, f"/events?ticks=1{path}")
            client = two.house.inner.connect()
            await client.ask(prompt="hello", max_tokens=5, model="code")
            hello, *rest = await messages(watcher, 1)
            assert (hello["model"], hello["slots"]) == (model, slots)
            assert any(message.get("ticks") for message in rest) is (model == "code")
        assert (await two.house.ask("GET", "/events?model=nothing")).status == 404


async def test_metrics_on_the_socket_have_those_of_each_model(autojump_clock: MockClock) -> None:
    """Beside the daemon's and its default model's, and so has Prometheus' text that the command line makes of them."""
    async with two_models() as two:
        client = two.house.inner.connect()
        await client.send(GetMetrics(interval_ms=1000))
        found = (await client.until(Metrics)).metrics
        assert set(found["models"]) == {"fake", "code"}
        assert found["models"]["code"].keys() == found.keys() - {"models"}
        assert 'model="code"' in prometheus(found, found["models"])


async def test_metrics_are_those_of_each_model(autojump_clock: MockClock) -> None:
    """A scrape says of each that it is there; `?model=` is about one."""
    async with two_models() as two:
        whole = (await two.house.ask("GET", "/metrics")).body.decode()
        one = (await two.house.ask("GET", "/metrics?model=code")).body.decode()
        named = [text.count('uma_info{model="code"') for text in (whole, one)]
        assert (named, whole.count("uma_info{")) == ([1, 0], 2)


# --- the configuration ---


def configured(tmp_path: Path, text: str, **flags: object) -> list[tuple[str, ...]]:
    """Return the names of the models that a settings file gives, each with its file and context."""
    path = tmp_path / "uma.yaml"
    path.write_text(text)
    config = load({"config": str(path), **flags}, {})
    return [(*each.alias, str(each.model), str(each.n_ctx)) for each in config.each()]


def test_models_have_names_and_settings_of_their_own(tmp_path: Path) -> None:
    """What is not said for a model is the daemon's."""
    text = """
n_ctx: 1000
models:
  chat: {model: /a.gguf, aliases: [big, gpt-4o], n_ctx: 2000}
  code: /b.gguf
"""
    assert configured(tmp_path, text) == [
        ("chat", "big", "gpt-4o", "/a.gguf", "2000"),
        ("code", "/b.gguf", "1000"),
    ]


def test_model_may_be_given_several_times(tmp_path: Path) -> None:
    """The first is the default one, also before those of the file."""
    text = "models: {code: /b.gguf}"
    assert configured(tmp_path, text, model=("/a.gguf", "/c.gguf", "qwen2.5:7b")) == [
        ("/a.gguf", "None"),
        ("code", "/b.gguf", "None"),
        ("c", "/c.gguf", "None"),
        ("qwen2.5:7b", "qwen2.5:7b", "None"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {}", "models takes a model or more"),
        ("models: [a]", "models takes a model or more"),
        ("models: {a: {n_ctx: 64}}", "models.a: model is missing"),
        ("models: {a: {model: f, nctx: 64}}", "no such key nctx (did you mean n_ctx?)"),
        ("models: {a: {model: f, n_ctx: 1}}", "models.a.n_ctx: 1 is out of range"),
        ("models: {a: {modle: f}}", "no such key modle (did you mean model?)"),
        ("models: {a: {model: f, socket: s}}", "models.a: no such key socket"),
        ("models: {a: {model: f, aliases: b}, b: g}", "two models are called b"),
        ("models: {a: {model: f, load: later}}", "'later' is not start, on-demand or explicit"),
        ("models: {a: {model: f, load: start, preload: true}}", "load and preload say the same"),
        ("models: {a: {model: f, preload: 1}}", "models.a.preload: 1 is not true or false"),
        ("models: {a: {model: f, hidden: maybe}}", "models.a.hidden: 'maybe' is not true or false"),
        ("models: {a: {model: f, pin: true, ttl: 5m}}", "a model with pin stays loaded"),
        ("models: {a: {model: f, defaults: 3}}", "models.a.defaults: 3 is not a map"),
        (
            "models: {a: {model: f, defaults: {temprature: 1}}}",
            "models.a.defaults: no such key temprature (did you mean temperature?)",
        ),
        (
            "models: {a: {model: f, defaults: {top_k: 0.5}}}",
            "models.a.defaults.top_k: 0.5 is not an integer from -1 to 2147483647",
        ),
        (
            "models: {a: {model: f, defaults: {top_p: 2}}}",
            "models.a.defaults.top_p: 2 is not a number from 0 to 1",
        ),
        ("models: {a: {model: f, ttl: 0}}", "models.a.ttl: 0 is not a time of 1 second or more"),
        ("models: {a: {model: f, aliases: {}}}", "models.a.aliases: {} is not a name"),
    ],
)
def test_a_wrong_list_of_models_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """With where it is, and what to write."""
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, text)
    assert said in str(refused.value)


def test_a_model_says_when_it_is_loaded_and_what_it_is(tmp_path: Path) -> None:
    """Each key of its own, beside the daemon's `--load`."""
    path = tmp_path / "uma.yaml"
    path.write_text(
        "load: explicit\nmodels:\n  a: /a.gguf\n  b: {model: /b.gguf, load: on-demand, ttl: 10m, hidden: true}\n"
        "  c: {model: /c.gguf, preload: true, pin: true, defaults: {temperature: 0.5, top_k: 20}}\n"
        f"  d: {{model: /d.gguf, preload: false, template: {tmp_path}/t}}\n"
    )
    a, b, c, d = load({"config": str(path)}, {}).each()
    assert [each.load for each in (a, b, c, d)] == ["explicit", "on-demand", "start", "on-demand"]
    assert (b.model_ttl_s, b.model_hidden, b.model_pin) == (600.0, True, False)
    assert (c.model_pin, dict(c.defaults)) == (True, {"temperature": 0.5, "top_k": 20})
    assert d.chat_template_file == tmp_path / "t"


def test_each_model_has_a_trace_of_its_own(tmp_path: Path) -> None:
    """The default model's has the name that was given."""
    path = tmp_path / "uma.yaml"
    path.write_text("models: {a: /a.gguf, 'b/c': /b.gguf}\ntrace: /t/ticks.jsonl")
    found = [str(each.trace) for each in load({"config": str(path)}, {}).each()]
    assert found == ["/t/ticks.jsonl", "/t/ticks-b-c.jsonl"]


# --- a real daemon ---


def test_a_daemon_serves_two_models_from_one_file(tmp_path: Path) -> None:
    """Each has its own context; `run --model` chooses, and what is not there is refused."""
    settings, path = tmp_path / "uma.yaml", tmp_path / "s"
    settings.write_text(
        f"models:\n  one: {{model: {bundled_model()}, n_ctx: 256}}\n"
        f"  two: {{model: {bundled_model()}, n_ctx: 512}}\npolicy: baseline\nsocket: {path}\n"
    )
    program = [sys.executable, "-m", "uma_trio"]
    process = subprocess.Popen(
        [*program, "serve", "--config", str(settings)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        block = "".join(iter(process.stdout.readline, "  stop     Ctrl-C\n"))
        assert "models   one, two" in block
        ask = [*program, "run", "--socket", str(path), "Once", "--max-tokens", "4"]
        for name, status in (("one", 0), ("two", 0), ("three", 1)):
            found = subprocess.run(
                [*ask, "--model", name], check=False, capture_output=True, text=True
            )
            assert (found.returncode == 0) == (status == 0), found.stderr
            assert name != "three" or "this daemon serves one, two" in found.stderr
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


async def asked(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Ask a daemon over HTTP; return the status and the document."""

    def ask() -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        with closing(connection):
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    return await trio.to_thread.run_sync(ask)


async def test_models_are_loaded_on_request_and_unloaded_when_idle(tmp_path: Path) -> None:
    """A file that cannot be loaded ends its own requests only; who is in use stays."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "bad.gguf").write_bytes(bundled_model().read_bytes()[:5000])
    settings = tmp_path / "uma.yaml"
    settings.write_text(
        f"models:\n  one: {bundled_model()}\n"
        f"  two: {{model: {bundled_model()}, n_ctx: 512, load: on-demand, ttl: 1s}}\n"
        f"  bad: {{model: {tmp_path / 'bad.gguf'}, load: on-demand}}\n"
    )
    flags = {"config": str(settings), "socket": str(tmp_path / "s"), "policy": "baseline"}
    config = load({**flags, "http": f"127.0.0.1:{port}", "n_ctx": "512"}, {})

    async def states() -> dict[str, str]:
        _, listed = await asked(port, "GET", "/v1/models")
        return {one["id"]: one["status"]["value"] for one in listed["data"]}

    ready = trio.Event()
    asks = {"prompt": "Once", "max_tokens": 4}
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(daemon.serve, config, on_ready=lambda _info: ready.set()))
            await ready.wait()
            assert await states() == {"one": "loaded", "two": "unloaded", "bad": "unloaded"}
            status, answer = await asked(port, "POST", "/v1/completions", {**asks, "model": "two"})
            assert (status, answer.get("model")) == (200, "two"), answer
            assert (await states())["two"] == "loaded"
            status, answer = await asked(port, "POST", "/v1/completions", {**asks, "model": "bad"})
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
            assert (await states())["bad"] == "failed"
            while (await states())["two"] != "unloaded":  # noqa: ASYNC110 - another process would ask, too
                await trio.sleep(0.05)
            assert (await asked(port, "POST", "/models/load", {"model": "two"}))[0] == 200
            assert (await states())["two"] == "loaded"
            assert (await asked(port, "POST", "/models/unload", {"model": "two"}))[0] == 200
            assert (await states())["two"] == "unloaded"
            assert (await asked(port, "POST", "/unload", {"model": "one"}))[0] == 200
            assert (await states())["one"] == "unloaded"
            status, answer = await asked(port, "POST", "/v1/completions", asks)
            assert (status, answer.get("model")) == (200, "one"), answer
            nursery.cancel_scope.cancel()
