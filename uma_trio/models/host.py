"""This computer, as the manager of models uses it: its free memory, and checks of model files in a process of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import trio
from attrs import evolve

from uma_trio.backend.base import Adapter, ModelError
from uma_trio.backend.gguf_header import mark_of
from uma_trio.backend.kv_memory import available_memory
from uma_trio.backend.llama_probe import probing
from uma_trio.backend.needs import Estimate, Needs
from uma_trio.config.hardware import give_memory_back
from uma_trio.config.options import Config
from uma_trio.models import files
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.model import Model

Result = TypeVar("Result")


class Host:
    """The real one; tests have one with virtual memory and time.

    Methods that look at files raise :class:`uma_trio.backend.llama_probe.Untried` in :meth:`recall` if a probe process is needed.
    """

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run a slow function in a helper thread; cancelled, it is waited for."""
        return await trio.to_thread.run_sync(function, *arguments)

    async def recall(self, look: Callable[[Model], Result], model: Model) -> Result:
        """Return what `look` finds without a probe process."""

        def recall() -> Result:
            with probing(starts=False):
                return look(model)

        return await self.run(recall)

    async def probe(self, look: Callable[[Model], Result], model: Model) -> Result:
        """Return what `look` finds, with a probe process that ends when this is cancelled."""

        def probe() -> Result:
            with probing(poll=trio.from_thread.check_cancelled):
                return look(model)

        return await self.run(probe)

    def free_memory(self) -> int | None:
        """Bytes that are free for a process; None if unknown."""
        return available_memory()

    def free_device_memory(self) -> int | None:
        """Bytes that are free on the GPUs; None if unknown. For a helper thread."""
        from uma_trio.backend import _llama_lib  # slow to import

        return _llama_lib.free_device_memory()

    def collect(self) -> None:
        """Free what is unreachable, and return it to the system. For a helper thread."""
        gc.collect()
        give_memory_back()

    def fit(self, model: Model, peers: Sequence[Model]) -> files.Fitted:
        """Choose the context of a model by the memory that is free.

        Raises:
            ModelError: its file cannot be read.
        """
        if model.base is not None:  # in a context like that of its base
            base = model.base.config
            config = evolve(model.config, n_ctx=base.n_ctx, parallel=base.parallel)
            return files.Fitted(evolve(config, n_cpu_moe=base.n_cpu_moe))
        others = [each for each in peers if each is not model]
        loaded = [(each, each.loaded) for each in others]  # trio's thread may unload one meanwhile
        held = [_held(each, its) for each, its in loaded if its is not None]
        return files.fit_to_memory(model.configured, [each.configured for each in others], held)

    def estimate(self, config: Config) -> Estimate:
        """Return what memory a model takes. Raises :class:`ModelError`."""
        return files.estimate(config)

    def variant_estimate(self, config: Config) -> Estimate:
        """Return what memory a further context of a loaded model takes. Raises :class:`ModelError`."""
        return files.variant_estimate(config)

    def try_adapters(self, config: Config, adapters: Sequence[Adapter]) -> None:
        """Load adapters with their model in a process of its own. Raises :class:`ModelError`."""
        files.try_adapters(config, adapters)

    def try_computing(self, config: Config) -> None:
        """Have two tokens computed in a process of its own. Raises :class:`ModelError`."""
        files.try_computing(config)

    def check(self, model: Model) -> Estimate:
        """Check that the files of a model can be loaded, and return what memory that takes.

        Saved prefixes are dropped if an adapter's file was replaced.

        Raises:
            ModelError: they cannot be loaded.
        """
        if model.base is None:
            return self.estimate(model.config)
        self.try_adapters(model.config, model.adapters)
        files: tuple[object, ...] = ()
        with suppress(ModelError):  # it is loaded next, which reports the fault
            files = tuple((each.path, mark_of(each.path)) for each in model.adapters)
        if files != model.adapter_files:
            model.adapter_files, model.prefixes = files, None
        return self.variant_estimate(model.config)

    def check_computing(self, model: Model) -> None:
        """Have two tokens of a model computed: only then does llama.cpp find some faults, and abort the process.

        Raises:
            ModelError: it did.
        """
        self.try_computing(model.config)

    def measure(self, model: Model) -> Estimate:
        """Return what memory a loaded model has; of a variant only its context.

        If its file was removed meanwhile, weights and KV cache are counted.
        """
        try:
            if model.base is None:
                return self.estimate(model.config)
            return self.variant_estimate(model.config)
        except ModelError:
            if model.loaded is None:
                raise
            facts, n_ctx = model.loaded.facts, model.n_ctx
            weights = facts.weight_bytes if model.base is None else 0
            needs = Needs(n_ctx, int(weights), 0, int(facts.cell_bytes * n_ctx), 0)
            return Estimate(needs)


def _held(model: Model, loaded: LoadedModel) -> Needs:
    """Return what a loaded model has; if it was not estimated, its weights and its KV cache, wherever they are."""
    if model.estimate is not None:
        return model.estimate.needs
    size, kv = loaded.facts.size_bytes, int(loaded.facts.cell_bytes * model.n_ctx)
    on_device = size + kv if loaded.kind == "text" else 0
    return Needs(model.n_ctx, own=0, mapped=size, kv=kv, compute=0, device=on_device)
