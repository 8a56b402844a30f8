"""The manager of models in virtual time, on a computer with virtual memory, where models are nothing but numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import trio
from attrs import define, evolve, field

from uma_trio.backend.base import Adapter, ModelError, ModelFacts
from uma_trio.backend.llama_probe import Untried
from uma_trio.backend.needs import OURS, Estimate, Needs
from uma_trio.config.options import Config
from uma_trio.engine.inbox import Inbox
from uma_trio.models.files import Fitted
from uma_trio.models.host import Host
from uma_trio.models.loaded import Bounds, LoadedModel, SavedPrefixes
from uma_trio.models.manager import ModelManager
from uma_trio.models.model import Model
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import Recorded
from uma_trio.text.frontend import FrontEnd
from uma_trio.words import Gives
from uma_trio_sim.fake import FakeVocabulary

GIB = 1 << 30
LOAD_S = 1.0
PROBE_S = 0.8
Result = TypeVar("Result")


def facts_of(name: str) -> ModelFacts:
    """Return facts of a model that weighs 2 GiB."""
    return ModelFacts(
        name=name,
        description="fake",
        n_vocab=260,
        n_ctx_train=4096,
        n_params=0,
        size_bytes=2 * GIB,
        n_embd=0,
        chat_template=None,
        weight_bytes=2 * GIB,
    )


async def at_once(function: Callable[[], Result], /) -> Result:
    """Call a function without a thread and without taking time."""
    await trio.lowlevel.checkpoint()
    return function()


@define
class FakeHost(Host):
    """A computer with `free` bytes and `free_on_gpu`, where a model needs 2 GiB unless `needs` has its name.

    Attributes:
        untried: names of models that a probe process has to look at first; `probes` are those that it looked at.
        damaged: names of models that llama.cpp aborts at.
        removed: names of models whose file was removed.
        bad_adapters: names of adapters that cannot be loaded.
    """

    free: int
    free_on_gpu: Callable[[], int] | None = None
    needs: dict[str, int] = field(factory=dict)
    untried: set[str] = field(factory=set)
    probes: list[str] = field(factory=list)
    damaged: set[str] = field(factory=set)
    removed: set[str] = field(factory=set)
    bad_adapters: tuple[str, ...] = ()
    on_device: int = 0

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call it without a thread, which the clock cannot see."""
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    async def recall(self, look: Callable[[Model], Result], model: Model) -> Result:
        """Return what is known: nothing of a model that is untried."""
        await trio.lowlevel.checkpoint()
        if model.names[0] in self.untried:
            raise Untried
        return look(model)

    async def probe(self, look: Callable[[Model], Result], model: Model) -> Result:
        """Look at a model for a while."""
        self.probes.append(model.names[0])
        await trio.sleep(PROBE_S)
        self.untried.discard(model.names[0])
        return look(model)

    def fit(self, model: Model, peers: Sequence[Model]) -> Fitted:
        """Leave the context as it is configured."""
        return Fitted(model.config)

    def free_memory(self) -> int | None:
        """Return the bytes that are free."""
        return self.free

    def free_device_memory(self) -> int | None:
        """Return those of the GPU."""
        return None if self.free_on_gpu is None else self.free_on_gpu()

    def collect(self) -> None:
        """Do nothing: a real one looks at all objects of all tests."""

    def estimate(self, config: Config) -> Estimate:
        """Return what a model takes."""
        name = config.alias[0]
        if name in self.removed:
            raise ModelError(f"there is no file {name}.gguf.")
        own = self.needs.get(name, 2) * GIB - OURS
        needs = Needs(4096, own=own, mapped=0, kv=0, compute=0, device=self.on_device)
        return Estimate(needs, (needs,))

    def variant_estimate(self, config: Config) -> Estimate:
        """Return what a context takes: as much."""
        return self.estimate(config)

    def try_adapters(self, config: Config, adapters: Sequence[Adapter]) -> None:
        """Load adapters, unless they are bad."""
        for each in adapters:
            if each.name in self.bad_adapters:
                raise ModelError(f"llama.cpp cannot load the adapter {each.path}.")

    def try_computing(self, config: Config) -> None:
        """Compute two tokens, which fails for a damaged model."""
        if config.alias[0] in self.damaged:
            raise ModelError("GGML_ASSERT(eps >= 0.0f) failed")


@define(eq=False, kw_only=True)
class StubModel(LoadedModel):
    """A loaded model that computes nothing."""

    kept: SavedPrefixes | None = None

    @property
    def kind(self) -> Gives:
        """Return that it writes text."""
        return "text"

    @property
    def max_tokens_at_once(self) -> int:
        """Return nothing."""
        return 0

    @property
    def needs_cores(self) -> bool:
        """Return that its readers compute on the cores that a load needs."""
        return True

    async def explain(self, handle: int | None, ticks: int) -> Recorded:
        """Return that there was no request."""
        await trio.lowlevel.checkpoint()
        return Recorded(trio.current_time(), (), ())

    def saved_prefixes(self) -> SavedPrefixes | None:
        """Return what the test gave it."""
        return self.kept


@define(eq=False)
class StubEngine:
    """An engine that computes nothing."""

    name: str
    inbox: Inbox

    def fail_all(self, code: str, message: str) -> None:
        """End no request."""


@define(eq=False)
class StubMachine:
    """Stands for the compute thread: an engine has ended `end_s` after it is removed. `on_remove` is called then.

    `times` are when a load began and ended to need cores.
    """

    end_s: float = 0.0
    times: list[float] = field(factory=list)
    added: dict[Any, Callable[[Exception], None]] = field(factory=dict)
    on_remove: Callable[[], object] = lambda: None

    def add(self, engine: Any, died: Callable[[Exception], None]) -> None:
        """Compute an engine."""
        self.added[engine] = died

    async def remove(self, engine: Any) -> None:
        """End it, unless it has died."""
        engine.inbox.close()
        if engine in self.added:
            self.on_remove()
            await trio.sleep(self.end_s)
            self.added.pop(engine, None)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note the time."""
        self.times.append(trio.current_time())
        yield
        self.times.append(trio.current_time())


@define(eq=False)
class Models:
    """A manager of three models; `loads` are those that were loaded, and `broken` what loads raise."""

    manager: ModelManager
    host: FakeHost
    machine: StubMachine
    loads: list[str] = field(factory=list)
    broken: dict[str, Exception] = field(factory=dict)
    traces: list[Any] = field(factory=list)
    given: list[SavedPrefixes | None] = field(factory=list)
    after_progress: dict[str, Callable[[], object]] = field(factory=dict)
    before_free: dict[str, int] = field(factory=dict)
    kept: SavedPrefixes | None = None

    @property
    def free(self) -> int:
        """The free bytes of the computer."""
        return self.host.free

    def model(self, name: str) -> Model:
        """Return a model."""
        return self.manager.resolve(name)

    async def ask(self, name: str, seconds: float = 0.0, payer: str = "") -> str:
        """Use a model for so long; return its name."""
        loaded = await self.manager.ready(self.model(name), payer)
        end = loaded.uses.begin()
        try:
            if seconds:
                await trio.sleep(seconds)
        finally:
            end()
        return loaded.bounds.model

    def die(self, name: str) -> None:
        """Have the engine of a model raise."""
        engine = next(one for one in self.machine.added if one.name == name)
        self.machine.added.pop(engine)(RuntimeError("it broke"))

    @property
    def loaded(self) -> list[str]:
        """The names of the models in memory."""
        return [model.names[0] for model in self.manager.models if model.state == "loaded"]

    async def build(self, model: Model, held: ExitStack, _neighbour: object) -> StubModel:
        """Load a model in a second."""
        name = model.names[0]
        self.traces.append(model.trace)
        for part in range(10):
            await trio.sleep(LOAD_S / 10)
            model.report_progress("is loading", (part + 1) / 10)
        if name in self.broken:
            raise self.broken[name]
        self.after_progress.get(name, lambda: None)()
        self.host.free += self.before_free.pop(name, 0)
        self.loads.append(name)
        self.given.append(model.prefixes)
        self.host.free -= 2 * GIB

        def free() -> None:
            self.host.free += 2 * GIB

        held.callback(free)
        inbox = Inbox(99)
        engine: Any = StubEngine(name, inbox)
        return StubModel(
            facts=facts_of(name),
            bounds=Bounds(model=name, n_ctx_seq=4096, n_vocab=260),
            inbox=inbox,
            telemetry=Metrics(),
            run_blocking=at_once,
            front_end=FrontEnd(FakeVocabulary(), None),
            engine=engine,
            kept=self.kept,
        )


@asynccontextmanager
async def managed(
    free: int, ttl_s: float | None = 1000.0, names: Sequence[str] = ("a", "b", "c"), **changes: Any
) -> AsyncIterator[Models]:
    """Run a manager of these models, all of which are loaded on request; `changes` are of their configurations."""
    base = evolve(Config(load="on-demand", model_ttl_s=ttl_s), **changes)
    host, machine = FakeHost(free), StubMachine()
    made: Models

    async def build(model: Model, held: ExitStack, neighbour: object) -> LoadedModel:
        return await made.build(model, held, neighbour)

    manager = ModelManager(
        [Model(evolve(base, alias=(name,))) for name in names],
        build,
        machine,  # type: ignore[arg-type]
        host,
    )
    made = Models(manager, host, machine)
    async with trio.open_nursery() as nursery:
        await nursery.start(manager.run)
        yield made
        nursery.cancel_scope.cancel()
