"""One configured model: configuration, state, memory estimate, adapters, and what is loaded of it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import trio
from attrs import define, evolve, field

from uma_protocol.errors import Code
from uma_trio.backend.base import Adapter, ModelError, ModelFacts
from uma_trio.backend.gguf_header import facts_of_file
from uma_trio.backend.needs import Estimate
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.models.files import adapters_of, chat_template, configured_names, model_path
from uma_trio.models.loaded import EncoderModel, LoadedModel, SavedPrefixes, TextModel
from uma_trio.models.refusal import Refusal
from uma_trio.observe.metrics import Metrics
from uma_trio.words import Gives

State = Literal["unloaded", "loading", "loaded", "draining", "failed"]


class Unwanted(Exception):
    """No request waits for the model any more, or the daemon stops."""


@define(eq=False)
class Model:
    """One configured model, or a variant of one: the model `base` with `adapters`, in a context of its own on the same weights.

    Attributes:
        configured: its configuration; in `config` what that leaves open has been chosen for its latest load.
        chosen: what was chosen, and why, in a sentence; "" if nothing was left open.
        largest_n_ctx: tokens of the largest context that had room when it was chosen, 0 if unknown.
        is_temporary: a variant that a request named; it is removed from the list when it is not loaded.
        adapter_files: identities of the adapters' files at the last check.
        reserved_names: names that the configuration gives to other models; its `file_names` are without them.
        state: `draining` takes no further requests; its memory is being freed once `loaded` is None.
        held: closes what was opened for it, until its memory is free.
        is_checked: the file was checked by a probe, and is about to be loaded.
        waiting: number of requests that wait until it is loaded.
        payer: the user who is charged for the load.
        used_at, loaded_at, failed_at: on trio's clock.
        keep_s: how long a request asked to keep it loaded.
        prefixes: saved prefixes from before it was unloaded.
        before_thread: scope of a load that can still be cancelled, because no thread reads the file yet.
    """

    config: Config
    kind: Gives = "text"
    base: Model | None = None
    adapters: tuple[Adapter, ...] = ()
    is_temporary: bool = False
    reserved_names: frozenset[str] = frozenset()
    file_names: tuple[str, ...] = ()
    chosen: str = ""
    largest_n_ctx: int = 0
    metrics: Metrics = field(factory=Metrics)
    adapter_files: tuple[Hashable, ...] = ()
    state: State = "unloaded"
    loaded: LoadedModel | None = None
    held: ExitStack | None = None
    estimate: Estimate | None = None
    prefixes: SavedPrefixes | None = None
    error: str = ""
    phase: str = ""
    progress: float = 0.0
    is_checked: bool = False
    waiting: int = 0
    payer: str = ""
    loads: int = 0
    load_s: float = 0.0
    used_at: float = 0.0
    loaded_at: float = -math.inf
    failed_at: float = -math.inf
    keep_s: float | None = None
    changed: trio.Event = field(factory=trio.Event)
    before_thread: trio.CancelScope | None = None
    configured: Config = field(init=False)
    _facts_lock: trio.Lock = field(factory=trio.Lock)
    _facts: tuple[Hashable, ModelFacts] | None = None

    @configured.default
    def _as_configured(self) -> Config:
        return self.config

    # --- what it is ---

    @property
    def text(self) -> TextModel | None:
        return self.loaded if isinstance(self.loaded, TextModel) else None

    @property
    def encoder(self) -> EncoderModel | None:
        return self.loaded if isinstance(self.loaded, EncoderModel) else None

    @property
    def configured_names(self) -> tuple[str, ...]:
        return configured_names(self.config)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it, whether it is loaded or not; the first one is shown."""
        return (*self.configured_names, *self.file_names) or (str(self.config.model),)

    @property
    def known_adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may use with it."""
        return adapters_of(self.config)

    @property
    def path(self) -> str:
        """Its file as it was configured, by a path or a name; "" for the bundled one."""
        return str(self.config.model or "")

    @property
    def trace(self) -> Path | None:
        """The file for the trace of its next load: each load has one of its own."""
        path, n = self.config.trace, self.loads + 1
        return path if path is None or n < 2 else path.with_name(f"{path.stem}-{n}{path.suffix}")

    @property
    def is_hidden(self) -> bool:
        """Whether lists leave it out. A temporary variant's name may be a word of another user."""
        return self.config.model_hidden or self.is_temporary

    @property
    def size(self) -> int:
        """Estimated bytes of memory, 0 if unknown."""
        return 0 if self.estimate is None else self.estimate.needs.total

    @property
    def n_ctx(self) -> int:
        """Tokens of its context, 0 until it is chosen; of an encoder those of one text, 0 while it is not loaded."""
        if self.kind == "text":
            return self.config.n_ctx or 0
        return 0 if self.loaded is None else self.loaded.bounds.n_ctx_seq

    async def facts(self) -> ModelFacts:
        """Read what its file says, also while it is not loaded; cached while the file stays the same.

        Raises:
            Refusal: the file cannot be read.
        """
        async with self._facts_lock:  # one helper thread, however many clients request them
            try:
                return await trio.to_thread.run_sync(self._read_facts)
            except ModelError as error:
                raise Refusal(Code.E_MODEL_001, str(error)) from None

    def _read_facts(self) -> ModelFacts:
        path = model_path(self.config)
        try:
            found = path.stat()
        except OSError as error:
            raise ModelError(f"Cannot open {path}: {error.strerror}") from None
        identity = (path, found.st_mtime_ns, found.st_size, found.st_ino)
        if self._facts is None or self._facts[0] != identity:
            self._facts = identity, facts_of_file(path)
        try:
            template = chat_template(self.config)
        except ConfigError as error:
            raise ModelError(str(error)) from None
        facts = self._facts[1]
        return facts if template is None else evolve(facts, chat_template=template)

    # --- its state ---

    @property
    def is_unloading(self) -> bool:
        return self.state == "draining" and self.loaded is None

    @property
    def is_in_use(self) -> bool:
        """Whether a request uses it or waits for it."""
        return self.waiting > 0 or (self.loaded is not None and self.loaded.uses.has_requests)

    @property
    def ttl_s(self) -> float | None:
        """Seconds that it stays loaded without a request, None for any time. A variant has the time of its base."""
        if self.base is not None and self.keep_s is None:
            return self.base.ttl_s
        found = self.config.model_ttl_s if self.keep_s is None else self.keep_s
        return None if self.config.model_pin or found == math.inf else found

    @property
    def expires_s(self) -> float | None:
        """Seconds until it is unloaded if no request comes, None for never."""
        ttl_s = self.ttl_s
        if ttl_s is None or self.is_in_use:
            return ttl_s
        return max(0.0, self.used_at + ttl_s - trio.current_time())

    def touch(self) -> None:
        """Record that a request uses it now, and its base with it."""
        self.used_at = trio.current_time()
        if self.base is not None:
            self.base.touch()

    @property
    def wait_reason(self) -> str:
        """What a request for it waits for, or why it cannot be loaded; "" if it is loaded."""
        name = self.names[0]
        match self.state:
            case "loaded":
                return ""
            case "failed":
                return self.error
            case "draining":
                makes_room = f"model {name} makes room for another one, and is loaded again then"
                return self.error or makes_room
            case _:
                return f"model {name} {self.phase or 'is about to be loaded'}"

    def set_state(self, state: State, error: str = "") -> None:
        """Change the state, and wake the tasks that wait for a change."""
        self.state, self.error, self.phase, self.progress = state, error, "", 0.0
        self.is_checked = False
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def wait_for(self, what: str) -> None:
        """Record what the load waits for: a verb phrase for :attr:`wait_reason`."""
        self.is_checked, self.phase = True, what

    def report_progress(self, phase: str, share: float) -> None:
        """Record how far the load is. Called on the loading thread, too.

        Raises:
            Unwanted: no request waits for it, so the load ends.
        """
        if not self.waiting:
            raise Unwanted
        self.progress = share
        self.phase = f"{phase}, {share:.0%}"
