"""The models that make vectors and scores, made from the options. Who uses none never imports them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from uma_trio.backend.base import ModelError
from uma_trio.backend.kv_memory import available_memory
from uma_trio.backend.lazy_encoder import LazyEncoder
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.engine.encoding import Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import EncoderKind
from uma_trio.engine.outlet import Outlet
from uma_trio.machine import physical_cores
from uma_trio.service.embedding import Embedder
from uma_trio.service.fair import HELPERS, in_threads
from uma_trio.telemetry import log
from uma_trio.telemetry.encoding import EncodingFigures
from uma_trio.wiring import named_model

if TYPE_CHECKING:
    from uma_trio.backend.llama_encoder import LlamaEncoder
    from uma_trio.backend.needs import Needs

Encoders = Mapping[EncoderKind, "LlamaEncoder | LazyEncoder"]
_OPTIONS: Final[Mapping[EncoderKind, str]] = {"embed": "embedding_model", "rank": "rerank_model"}
_MIB: Final = 1 << 20


@contextmanager
def encoders_loaded(config: Config) -> Iterator[Encoders]:
    """Load the encoders that are configured, until the block ends.

    Raises:
        ModelError: one cannot be loaded, or there is no memory for it.
        ConfigError: it is of the other kind.
    """
    with ExitStack() as held:
        found: dict[EncoderKind, LlamaEncoder | LazyEncoder] = {}
        for kind, option in _OPTIONS.items():
            asked: Path | None = getattr(config, option)
            if asked is not None:
                encoder = found[kind] = _loaded(config, named_model(config, asked))
                held.callback(encoder.close)
                _check_kind(config, option, kind, encoder)
        yield found


def queues_of(
    encoders: Encoders, outlet: Outlet, clock: Callable[[], float], figures: EncodingFigures
) -> Mapping[EncoderKind, Encodings]:
    """Return the queue of each encoder."""
    post = lambda call: outlet.deliver((), (call,))  # noqa: E731 - shorter than its name
    return {kind: Encodings(encoder, post, clock, figures) for kind, encoder in encoders.items()}


def embedders_of(
    config: Config, encoders: Encoders, inbox: Inbox, draining: Callable[[], bool]
) -> Mapping[str, Embedder]:
    """Return the encoders as front ends see them. They share helper threads of their own."""
    run_blocking = in_threads(HELPERS)
    return {
        kind: Embedder(
            kind,
            encoder.info,
            encoder.vocabulary,
            inbox,
            run_blocking,
            _names(getattr(config, _OPTIONS[kind]), encoder),
            draining,
            *(
                (encoder, config.encoder_ttl_s or math.inf)
                if isinstance(encoder, LazyEncoder)
                else ()
            ),
        )
        for kind, encoder in encoders.items()
    }


def _loaded(config: Config, path: Path) -> LlamaEncoder | LazyEncoder:
    """Return an encoder, with its weights, or what loads them when they are needed."""
    from uma_trio.backend.llama_encoder import LlamaEncoder, known
    from uma_trio.backend.llama_probe import probe

    needs = probe(path)
    report = partial(_report, log.get("llama.cpp"))
    threads = config.threads or physical_cores()

    def make() -> LlamaEncoder:
        _refuse_without_room(path, needs)
        return LlamaEncoder.load(path, threads=threads, log=report)

    return make() if config.encoder_ttl_s is None else LazyEncoder(*known(path), make)


def _refuse_without_room(path: Path, needs: Needs) -> None:
    free = available_memory()
    if free is not None and needs.total > free:
        raise ModelError(
            f"{path} needs {needs.own // _MIB} MiB for weights and {(needs.compute + needs.kv) // _MIB} MiB to compute, "
            f"and {free // _MIB} MiB are free; stop other programs, or choose a smaller quantisation."
        )


def _report(logger: object, level: str, text: str) -> None:
    getattr(logger, level)(text)


def _check_kind(
    config: Config, option: str, kind: EncoderKind, encoder: LlamaEncoder | LazyEncoder
) -> None:
    ranks = kind == "rank"
    if encoder.info.ranks != ranks:
        does, flag = (
            ("makes vectors", "--embedding-model") if ranks else ("ranks", "--rerank-model")
        )
        raise ConfigError(
            f"{config.source(option)} {encoder.info.path}: this model {does}; use {flag}"
        )


def _names(asked: Path, encoder: LlamaEncoder | LazyEncoder) -> tuple[str, ...]:
    """Return what requests may call an encoder: as it was asked for, its file, and what its file says."""
    info = encoder.info
    typed = () if str(asked).endswith(".gguf") else (str(asked),)
    return tuple(dict.fromkeys([*typed, Path(info.path).stem, info.name]))
