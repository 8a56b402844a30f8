"""Loading one model and wiring its engine: what the manager of models gets from the daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Protocol, TypeVar

import trio
from attrs import define, evolve, field

from uma_trio import __version__
from uma_trio.app.outputs import unwritable
from uma_trio.app.shapes import confinement
from uma_trio.backend.base import Backend, ContextLimits, ModelError, ModelFacts
from uma_trio.backend.encoder import EncoderInfo
from uma_trio.backend.encoder import EncoderModel as EncoderBackend
from uma_trio.backend.kv_memory import available_memory
from uma_trio.config.errors import ConfigError
from uma_trio.config.hardware import physical_cores, total_memory
from uma_trio.config.options import Config
from uma_trio.engine.cells import PrefixDisk
from uma_trio.engine.encoder import EncoderEngine, Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sampling import MaskThreads
from uma_trio.machine.background import BackgroundScheduler
from uma_trio.machine.bell import Bell
from uma_trio.models.files import (
    chat_template,
    encoder_names,
    estimate,
    file_names,
    import_backend,
    known_kind,
    may_be_too_large,
    model_path,
    refuse_without_room,
    scratch_slots,
    text_names,
    try_computing,
)
from uma_trio.models.loaded import (
    Bounds,
    EncoderModel,
    LoadedModel,
    RunBlocking,
    TextModel,
    identity_of,
    store_cost,
)
from uma_trio.models.model import Model
from uma_trio.observe import log
from uma_trio.observe.figures import EncodingFigures
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import Recorded
from uma_trio.observe.view import MOST_TICKS
from uma_trio.policy.cost import CostModel, Traffic, Work
from uma_trio.policy.costing.calibrate import Neighbour, assume_looking_back, measured_cost
from uma_trio.policy.costing.copying import known_copies
from uma_trio.policy.costing.neighbours import in_words
from uma_trio.policy.pipeline import Policy, keeps_latency_cap
from uma_trio.policy.state import Contract
from uma_trio.policy.tuning import TUNING
from uma_trio.service.fair import HELPERS, in_threads
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.replies import ReplyFormat
from uma_trio.text.replies.format import format_from
from uma_trio.words import BY_BACKEND

Progress = Callable[[float], None]
#: Default bytes of saved prefixes, where models compute in the same memory, and where they compute on a GPU: there a
#: conversation of 30,000 tokens is 4 GB (8B, f16), and the host's memory has little else to do.
_MAX_PREFIX_BYTES, _MAX_BESIDE_GPU = 2 << 30, 16 << 30


class _Closable(Protocol):
    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=_Closable)


@define(eq=False)
class Builder:
    """Builds models with what all of them share.

    Attributes:
        readers_s: counts the seconds in which clients could be heard.
        scheduler: gives background work of all models its time.
        encoding: figures of all encoders together.
        given: a backend that is loaded already, for the first model.
        has_several: other models may be loaded beside each.
        replaces: a daemon with the same model serves until this one takes its place.
        on_loading, on_measuring: get the part of a model that is loaded, and of the machine's measuring, while the daemon
            starts; afterwards the model itself does.
    """

    policy: Policy
    bell: Bell
    outlet: Outlet
    readers_s: Callable[[], float]
    scheduler: BackgroundScheduler
    encoding: EncodingFigures
    disk: PrefixDisk | None = None
    given: Backend | None = None
    has_several: bool = False
    replaces: bool = False
    on_loading: Progress | None = None
    on_measuring: Progress | None = None
    run_blocking: RunBlocking = field(factory=partial(in_threads, HELPERS))
    run_encoding: RunBlocking = field(factory=partial(in_threads, HELPERS))

    def started(self) -> None:
        """Note that the daemon serves: from now on models are loaded beside the streams of others."""
        self.on_loading = self.on_measuring = None
        self.has_several, self.replaces = True, False

    async def build(
        self, model: Model, held: ExitStack, neighbour: Neighbour | None
    ) -> LoadedModel:
        """Load a model in helper threads. Beside a `neighbour`, which clients use, nothing is measured.

        What was opened is closed with `held`. Cancelled, it waits for a measurement, and leaves a file that is being read to
        its thread.

        Raises:
            ModelError: it cannot be used, or there is no memory for it.
            ConfigError: the trace cannot be written, or a file of the configuration cannot be used.
            Unwanted: no request waits for it any more.
        """
        if model.kind == "text":
            return await self._build_text(model, held, neighbour)
        return await self._build_encoder(model, held)

    async def _build_text(
        self, model: Model, held: ExitStack, neighbour: Neighbour | None
    ) -> TextModel:
        run, metrics = trio.to_thread.run_sync, model.metrics
        config = evolve(model.config, trace=model.trace)
        backend, self.given = self.given, None
        if backend is None:
            backend = await _read(partial(self._read_text, model, neighbour))
        held.callback(backend.close)
        on_measuring = self.on_measuring or partial(model.report_progress, "is measured")
        settings = await run(engine_settings, config, backend, on_measuring, neighbour)
        facts, front_end = await run(_front_end, config, backend, metrics)
        held.callback(front_end.close)
        cells = await run(backend.kv_identity) if config.prefix_disk else ""
        recorder = held.enter_context(_recorder(config, backend, settings))
        describe(metrics, config, backend, self.policy)
        inbox = Inbox(config.max_queue, bell=self.bell)
        disk = self.disk.of(cells, inbox.wake) if self.disk and cells else None
        if disk is not None:
            _warn_of_short_prefixes(backend, settings)
        kept = model.prefixes
        engine = Engine(
            backend,
            self.policy,
            inbox,
            self.outlet,
            metrics,
            time.monotonic,
            settings=settings,
            recorder=recorder,
            masks=MaskThreads(),
            readers_s=self.readers_s,
            store=kept.store if kept is not None and kept.file == identity_of(backend) else None,
            scheduler=self.scheduler,
            disk=disk,
        )
        engine.refining.keep = partial(store_cost, backend)
        # The name in the file is that of the model without adapters.
        names = () if config.is_variant else text_names(model_path(config), backend.model.name)
        bounds = _bounds(model, names, backend.limits.n_ctx_seq, backend.model.n_vocab)
        return TextModel(
            facts=facts,
            bounds=evolve(
                bounds,
                longer=how_longer(
                    backend.limits, config.slots, backend.model.n_ctx_train, model.largest_n_ctx
                ),
            ),
            inbox=inbox,
            telemetry=metrics,
            run_blocking=self.run_blocking,
            slots=config.slots,
            engine=engine,
            front_end=front_end,
            history=lambda: recorder.explain(time.monotonic(), None, MOST_TICKS),
            backend=backend,
            defaults=config.defaults,
        )

    def _read_text(self, model: Model, neighbour: Neighbour | None) -> Backend:
        """Read a model's file, or make a variant's context on the weights of its base."""
        if model.base is not None:
            base = model.base.text
            if base is None or base.backend is None:  # its engine has died meanwhile
                raise ModelError(f"{model.base.names[0]}, which it is a variant of, has stopped.")
            return base.backend.variant(model.adapters)
        return load_backend(
            model.config,
            self.on_loading or partial(model.report_progress, "is loading"),
            replaces=self.replaces,
            polite=neighbour is not None,
            has_several=self.has_several,
        )

    async def _build_encoder(self, model: Model, held: ExitStack) -> EncoderModel:
        config, starts = model.config, self.on_loading is not None
        if starts:  # otherwise the manager has checked it and made room
            await trio.to_thread.run_sync(
                refuse_encoder_without_room, config, abandon_on_cancel=True
            )
        encoder = await _read(partial(self._read_encoder, model))
        held.callback(encoder.close)
        info, vocabulary = encoder.info, encoder.vocabulary
        front_end = await trio.to_thread.run_sync(FrontEnd, vocabulary, None)
        model.metrics.describe(
            model=info.name,
            backend="llama.cpp, an encoder on the CPU",
            policy=config.policy,
            version=__version__,
            n_ctx=info.n_ctx,
            n_slots=1,
            latency_cap=None,
        )
        inbox = Inbox(config.max_queue, bell=self.bell)

        def post(call: Callable[[], None]) -> None:
            self.outlet.deliver((), (call,))

        queue = Encodings(encoder, post, time.monotonic, self.encoding)
        names = encoder_names(Path(info.path), info.name)
        return EncoderModel(
            facts=_facts_of_encoder(info, vocabulary.n_vocab),
            bounds=_bounds(model, names, info.n_ctx, vocabulary.n_vocab),
            inbox=inbox,
            telemetry=model.metrics,
            run_blocking=self.run_encoding,
            front_end=front_end,
            engine=EncoderEngine(queue, inbox, post, time.monotonic),
            history=lambda: Recorded(time.monotonic(), queue.records(None), ()),
            info=info,
            vocabulary=vocabulary,
        )

    def _read_encoder(self, model: Model) -> EncoderBackend:
        from uma_trio.backend.llama_encoder import LlamaEncoder  # slow to import

        report = log.get("llama.cpp")
        return LlamaEncoder.load(
            model_path(model.config),
            threads=model.config.threads or physical_cores(),
            log=lambda level, text: getattr(report, level)(text),
            progress=self.on_loading or partial(model.report_progress, "is loading"),
        )


async def _read(read: Callable[[], Opened]) -> Opened:
    """Read a file in a helper thread. Cancelled, it leaves the thread, which closes what it has opened."""
    first, opened = [True], list[Opened]()

    def is_second() -> bool:
        try:
            first.pop()  # atomic
        except IndexError:
            return True
        return False

    def work() -> Opened:
        opened.append(read())
        if is_second():
            opened[0].close()
        return opened[0]

    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    except trio.Cancelled:
        if is_second() and opened:
            opened[0].close()
        raise


def load_backend(
    config: Config,
    on_progress: Progress | None,
    *,
    replaces: bool = False,
    polite: bool = False,
    has_several: bool = False,
) -> Backend:
    """Read the file of a model that writes text, which takes as long as the disk does.

    If it `replaces` another daemon's, its memory is estimated first. If it is `polite`, reading yields
    the cores to readers of other models.

    Raises:
        ModelError: it cannot be used, or there is no memory for it.
    """
    import_backend(config)
    if replaces or may_be_too_large(config):
        refuse_without_room(config, beside_another=replaces)
    from uma_trio.backend.llama import LlamaBackend  # slow to import

    report = log.get("llama.cpp")
    return LlamaBackend.load(
        model_path(config),
        n_ctx=config.cells,
        n_slots=config.slots,
        scratch_slots=scratch_slots(config),
        threads=config.threads or physical_cores(),
        kv_type=config.kv_type,
        kv_layout=config.kv_layout,
        flash_attention=config.flash_attention,
        mlock=config.mlock,
        mmap=config.mmap,
        gpu_layers=config.gpu_layers,
        n_cpu_moe=config.n_cpu_moe or 0,
        progress=on_progress,
        log=lambda level, text: getattr(report, level)(text),
        parts=has_several,
        polite=polite,
    )


def _warn_of_short_prefixes(backend: Backend, settings: EngineSettings) -> None:
    """Warn if the prefix of a whole context does not fit into memory, by way of which it goes to the disk."""
    cell_bytes, ram = backend.model.cell_bytes, settings.prefix_bytes
    if backend.limits.n_ctx_seq * cell_bytes > ram:
        log.get("prefix").warning(
            "longer prefixes do not fit into --prefix-ram and are not on disk as a whole",
            model=backend.model.name,
            tokens=int(ram / cell_bytes),
        )


def _bounds(model: Model, names: Sequence[str], n_ctx_seq: int, n_vocab: int) -> Bounds:
    """Return names and limits of a model whose file, as it was loaded, has these `names`."""
    config = model.config
    from_file = file_names(config, names, model.reserved_names)
    every = (*model.configured_names, *from_file)
    return Bounds(
        model=every[0],
        aliases=every[1:],
        from_file=from_file,
        n_ctx_seq=n_ctx_seq,
        n_vocab=n_vocab,
        max_tokens=config.max_tokens,
        max_tokens_cap=config.max_tokens_cap,
    )


def engine_settings(
    config: Config,
    backend: Backend,
    on_measuring: Progress | None = None,
    beside: Neighbour | None = None,
) -> EngineSettings:
    """Put the options into the engine's words, and measure the machine for policies that ask, unless `beside` another model.

    Called before the engine's thread exists, which owns the backend from then on.
    """
    contract = Contract(
        latency_cap=config.latency_cap,
        reading_pace_s=config.reading_pace / 1e3,
        pause_cap=config.pause_cap,
        playout_s=config.playout_ms / 1e3,
        background_floor=config.background_floor,
        newcomer_tokens=config.interactive_prompt,
        interactive_weight=config.interactive_priority,
    )
    plain = EngineSettings(
        tick_budget_s=config.tick_budget_ms / 1e3,
        contract=contract,
        prefix_bytes=prefix_bytes(config, on_gpu=backend.traits.shape_costs),
        session_ttl_s=config.session_ttl_s,
    )
    if not scratch_slots(config):
        return plain
    cost = _cost(backend, on_measuring, beside)
    traffic = _traffic(backend.model)
    probed = traffic.bandwidth({n: cost.seconds(Work(n)) for n in cost.sizes})
    if probed:
        cell_s = traffic.cell_bytes / probed
        cost = assume_looking_back(cost, cell_s, whole_cache=backend.limits.whole_cache)
    given = None if config.bmt_budget is None else config.bmt_budget * 1e9
    speculation = allowed_speculation(config, backend)
    if speculation != "off" and cost.recapture_s:
        speculation = "off"
        log.get("cost").warning(
            f"--speculation {config.speculation} drafts nothing here: graphs are captured, and a change "
            "of the batch's shape costs more than guesses give"
        )
    return evolve(
        plain,
        contract=evolve(
            contract,
            bmt_budget=given or probed or None,
            paid_drafts=speculation == "auto",
        ),
        scratch_slots=int(backend.limits.n_streams == 1),
        drafts=speculation != "off",
        cost=cost,
        traffic=traffic,
        copying=known_copies(backend, perf_counter) if plain.prefix_bytes else None,
    )


def _cost(backend: Backend, on_measuring: Progress | None, beside: Neighbour | None) -> CostModel:
    measured = measured_cost(backend, beside=beside, on_progress=on_measuring)
    cost = measured.cost
    if measured.unusable:
        log.get("cost").warning(
            "the stored cost table cannot be used and is measured again",
            file=str(measured.file),
            why=measured.unusable,
        )
    if cost.others and beside is None:
        _warn_once(in_words(cost.others))
    return cost


@cache
def _warn_once(text: str) -> None:
    log.get("cost").warning(text)


def allowed_speculation(config: Config, backend: Backend) -> str:
    """Return how far guesses may go; if the user does not say, by where it computes."""
    if config.speculation != BY_BACKEND:
        return config.speculation
    return "off" if backend.traits.shape_costs else "auto"


def prefix_bytes(config: Config, *, on_gpu: bool = False) -> int:
    """Return how much saved prompts of a model may take: what was asked for, or its part of a tenth of the memory."""
    if config.prefix_ram is not None:
        return config.prefix_ram
    writers = sum(known_kind(each) == "text" for each in config.each())
    most = _MAX_BESIDE_GPU if on_gpu else _MAX_PREFIX_BYTES
    return min(total_memory() // 10, most) // max(1, writers)


def _traffic(model: ModelFacts) -> Traffic:
    return Traffic(
        weight_bytes=model.weight_bytes,
        cell_bytes=model.cell_bytes,
        expert_bytes=model.expert_bytes,
        experts=model.experts,
        experts_used=model.experts_used,
    )


@contextmanager
def _recorder(config: Config, backend: Backend, settings: EngineSettings) -> Iterator[Recorder]:
    """Give the engine its memory, and a trace if one is wanted; the trace ends with the block."""
    if config.trace is None:
        yield Recorder()
        return
    from uma_trio.observe.trace import TraceFile  # slow to import, as what it writes
    from uma_trio.policy.portable import Header

    header = Header(
        __version__,
        backend.model.name,
        config.policy,
        settings.contract,
        slots=backend.limits.n_slots,
        tuning=TUNING if settings.cost is None else settings.cost.tuning,
    )
    try:
        trace = TraceFile(config.trace, header)
    except OSError as error:
        raise unwritable(config, "trace", error.strerror or str(error)) from error
    with closing(trace):
        yield Recorder(trace)


def reply_format(config: Config) -> ReplyFormat | None:
    """Return the format of replies that is given. Raises :class:`ConfigError`."""
    path = config.reply_format
    if path is None:
        return None
    try:
        return format_from(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{config.source('reply_format')} {path}: {why}") from error


def how_longer(limits: ContextLimits, slots: int, trained: int, largest_n_ctx: int) -> str:
    """Return how requests can be longer, for the refusal of one that is too long.

    `slots` are those of requests; `trained` and `largest_n_ctx` are tokens, 0 if unknown.
    """
    if 0 < trained <= limits.n_ctx_seq:
        return f"The model was trained for {trained}, so that a larger --n-ctx does not help"
    now = f"the daemon has --n-ctx {limits.n_ctx} for --parallel {slots}"
    each = largest_n_ctx // slots if limits.n_streams > 1 else largest_n_ctx
    each = min(each, trained or each)
    if each > limits.n_ctx_seq:
        return f"A larger --n-ctx allows more: {now}; {largest_n_ctx} fits this machine, {each} tokens for each request"
    return f"A larger --n-ctx, fewer slots or --kv-type q8_0 make more room: {now}"


def describe(metrics: Metrics, config: Config, backend: Backend, policy: Policy) -> None:
    """Set the labels of a model's metrics, and the latency cap if the policy keeps one."""
    contract = Contract(config.latency_cap, background_floor=config.background_floor)
    metrics.describe(
        model=backend.model.name,
        backend=backend.description,
        policy=config.policy,
        version=__version__,
        n_ctx=backend.limits.n_ctx,
        n_slots=config.slots,
        latency_cap=contract.promised_cap if keeps_latency_cap(policy) else None,
    )


def _front_end(config: Config, backend: Backend, metrics: Metrics) -> tuple[ModelFacts, FrontEnd]:
    """Return the model's facts, and its text. For a helper thread: a large vocabulary takes 20 ms."""
    template = chat_template(config)
    facts = backend.model if template is None else evolve(backend.model, chat_template=template)
    front_end = FrontEnd(
        backend.vocabulary,
        facts.chat_template,
        reply_format(config),
        confinement(config, metrics.shape_events),
        reasons={"on": True, "off": False}.get(config.reasoning),
    )
    return facts, front_end


def refuse_encoder_without_room(config: Config) -> None:
    needed, free = estimate(config), available_memory()
    if free is not None and needed.needs.total > free:
        raise ModelError(f"{model_path(config)} does not fit: {needed.refusal(free)}.")
    try_computing(config)


def _facts_of_encoder(info: EncoderInfo, n_vocab: int) -> ModelFacts:
    return ModelFacts(
        name=info.name,
        description=info.description,
        n_vocab=n_vocab,
        n_ctx_train=info.n_ctx,
        n_params=info.n_params,
        size_bytes=info.size_bytes,
        n_embd=info.width,
        weight_bytes=info.size_bytes,
        chat_template=None,
        path=info.path,
        metadata={"general.architecture": info.architecture} if info.architecture else {},
    )
