"""What is found by looking at the files of models, which a process of its own does. For helper threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from uma_trio.app.wiring import estimate, try_adapters, try_computing, variant_estimate
from uma_trio.backend.base import ModelError, ModelFacts
from uma_trio.backend.gguf_header import mark_of
from uma_trio.backend.llama_probe import probing
from uma_trio.backend.needs import Estimate, Needs
from uma_trio.models.entry import Entry

Found = TypeVar("Found")


def recalled(look: Callable[[Entry], Found], entry: Entry) -> Found:
    """Return what is known already. Raises :class:`.llama_probe.Untried`, or what `look` raises."""
    with probing(starts=False):
        return look(entry)


def probed(look: Callable[[Entry], Found], entry: Entry) -> Found:
    """Return what a process finds, which is ended when this thread's task is cancelled. Raises what `look` raises."""
    with probing(poll=trio.from_thread.check_cancelled):
        return look(entry)


def tried(entry: Entry) -> Estimate:
    """Try the files of a model, and return what it takes. Raises :class:`ModelError`."""
    if entry.base is None:
        return estimate(entry.config)
    try_adapters(entry.config, entry.adapters)
    files: tuple[object, ...] = ()
    with suppress(ModelError):  # it is loaded next, and that says so
        files = tuple((each.path, mark_of(each.path)) for each in entry.adapters)
    if files != entry.files:
        entry.files, entry.prefixes = files, None  # they are those of other adapters
    return variant_estimate(entry.config)


def computed(entry: Entry) -> None:
    """Have two tokens of a model computed: llama.cpp ends the process at what it finds only then. Raises :class:`ModelError`."""
    try_computing(entry.config)


def held_by(entry: Entry, model: ModelFacts) -> Estimate:
    """Return what memory a loaded model has; of a variant only its context.

    Where its file was removed since, that is what is known of it without: weights and KV cache.
    """
    try:
        return estimate(entry.config) if entry.base is None else variant_estimate(entry.config)
    except ModelError:
        n_ctx = entry.n_ctx
        weights = model.weight_bytes if entry.base is None else 0
        needs = Needs(n_ctx, int(weights), 0, int(model.cell_bytes * n_ctx), 0)
        return Estimate(needs)
