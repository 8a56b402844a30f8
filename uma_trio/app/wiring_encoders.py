"""The models that make vectors and scores: loaded, and wired as others are. Who uses none never imports llama.cpp for them."""

from __future__ import annotations

import time
from collections.abc import Container
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from uma_trio import __version__
from uma_trio.app.deployment import SharedParts
from uma_trio.app.wiring import (
    Progress,
    bounds_of,
    encoder_names,
    estimate,
    file_names,
    model_path,
    try_computing,
)
from uma_trio.backend.base import ModelError, ModelFacts
from uma_trio.backend.encoder import EncoderInfo, EncoderModel
from uma_trio.backend.kv_memory import available_memory
from uma_trio.config.hardware import physical_cores
from uma_trio.config.options import Config
from uma_trio.engine.encoder import EncoderEngine, Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.observe import log
from uma_trio.observe.figures import EncodingFigures
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import Recorded
from uma_trio.service.embedding import Embedder
from uma_trio.service.served import ServedModel
from uma_trio.text.frontend import FrontEnd


@frozen(eq=False)
class LoadedEncoder:
    """An encoder in memory."""

    config: Config
    encoder: EncoderModel
    texts: FrontEnd


@frozen(eq=False)
class EncoderDeployment:
    """One loaded encoder: its memory, its engine, and how front ends see it."""

    config: Config
    encoder: EncoderModel
    engine: EncoderEngine
    served: ServedModel
    metrics: Metrics

    @property
    def saves(self) -> bool:
        """Whether something is to be saved before it is unloaded."""
        return False

    def as_neighbour(self) -> None:
        """Return that it tells nothing of how models compute which write."""

    def prefixes(self) -> None:
        """Return that nothing of it is kept."""

    def remember(self) -> None:
        """Do nothing: what its parts take is measured when it is loaded."""


async def load_encoder(
    config: Config, opened: ExitStack, on_loading: Progress | None, *, tried: bool = False
) -> LoadedEncoder:
    """Load an encoder in a thread; one that was not `tried` is first, in a process of its own.

    It is closed with `opened`. Cancelled, it leaves a file that is being loaded to its thread.

    Raises:
        ModelError: it cannot be used, or there is no memory for it.
    """
    run = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
    if not tried:
        await run(_refuse_without_room, config)
    encoder = await run(_loaded, config, on_loading)
    opened.callback(encoder.close)
    texts = await run(FrontEnd, encoder.vocabulary, None)
    return LoadedEncoder(config, encoder, texts)


def encoder_deployed(
    loaded: LoadedEncoder,
    machine: SharedParts,
    metrics: Metrics,
    figures: EncodingFigures,
    reserved: Container[str] = (),
) -> EncoderDeployment:
    """Wire a loaded encoder; `figures` count for all encoders together, and `reserved` names are other models'."""
    config, encoder = loaded.config, loaded.encoder
    info, vocabulary = encoder.info, encoder.vocabulary
    metrics.describe(
        model=info.name,
        backend="llama.cpp, an encoder on the CPU",
        policy=config.policy,
        version=__version__,
        n_ctx=info.n_ctx,
        n_slots=1,
        latency_cap=None,
    )
    inbox = Inbox(config.max_queue, bell=machine.bell)
    names = file_names(config, encoder_names(Path(info.path), info.name), reserved)
    bounds = bounds_of(config, names, info.n_ctx, vocabulary.n_vocab)
    post = lambda call: machine.outlet.deliver((), (call,))  # noqa: E731 - shorter than its name
    queue = Encodings(encoder, post, time.monotonic, figures)
    served = ServedModel(
        model=_described(info, vocabulary.n_vocab),
        slots=1,
        bounds=bounds,
        front_end=loaded.texts,
        inbox=inbox,
        telemetry=metrics,
        run_blocking=machine.run_blocking,
        embedder=Embedder(
            info, vocabulary, inbox, machine.run_encoding, bounds.model, machine.debts
        ),
        history=lambda: Recorded(time.monotonic(), queue.records(None), ()),
    )
    engine = EncoderEngine(queue, inbox, post, time.monotonic)
    return EncoderDeployment(config, encoder, engine, served, metrics)


def _refuse_without_room(config: Config) -> None:
    needed, free = estimate(config), available_memory()
    if free is not None and needed.needs.total > free:
        raise ModelError(f"{model_path(config)} does not fit: {needed.refusal(free)}.")
    try_computing(config)


def _loaded(config: Config, on_loading: Progress | None) -> EncoderModel:
    from uma_trio.backend.llama_encoder import LlamaEncoder

    report = log.get("llama.cpp")
    return LlamaEncoder.load(
        model_path(config),
        threads=config.threads or physical_cores(),
        log=lambda level, text: getattr(report, level)(text),
        progress=on_loading,
    )


def _described(info: EncoderInfo, n_vocab: int) -> ModelFacts:
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
