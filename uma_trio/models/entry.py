"""One configured model: its state, who waits for it, and what they are told.

A model is *unloaded*, *loading*, *loaded*, *draining*, *unloading* or *failed*.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Literal

import trio
from attrs import define, evolve, field

from uma_protocol.errors import Code
from uma_trio.app.deployment import Deployment, KeptPrefixes
from uma_trio.app.wiring import adapters_of, chat_template, configured_names, model_path
from uma_trio.app.wiring_encoders import EncoderDeployment
from uma_trio.backend.base import Adapter, ModelError, ModelFacts
from uma_trio.backend.gguf_header import facts_of_file
from uma_trio.backend.needs import Estimate
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.observe.metrics import Metrics
from uma_trio.service.ask import Refusal
from uma_trio.service.served import ServedModel
from uma_trio.words import Gives

AnyDeployment = Deployment | EncoderDeployment
State = Literal["unloaded", "loading", "loaded", "draining", "unloading", "failed"]


class Unwanted(Exception):
    """Nobody waits for the model any more."""


@define(eq=False)
class Entry:
    """One configured model. `held` closes what was opened for it, until its memory is free; `used_at` is when a request had it last.

    It `gives` text, vectors or scores. `waiting` requests wait for it. While it is loaded `phase` says what is done, as far
    as `progress`. It was loaded at `loaded_at`, in `took_s`, for `payer`, and `loads` times in all. `keep_s` is how long a request said that it
    stays. `file_names` are what its file calls it, without those that are `reserved`: the operator gave them to other models. `metrics` count on when it is loaded again. `estimate` is what memory it takes, once
    that was found out, and `prefixes` are what was saved before it was unloaded. It failed at `failed_at`, because of `why`.

    A *variant* is the model `base` with some of its `known` adapters, in a context of its own on the same weights; one that
    a request made up is `passing`, and forgotten when it is not loaded. `files` are those of a variant's adapters as it has them.
    """

    config: Config
    gives: Gives = "text"
    base: Entry | None = None
    adapters: tuple[Adapter, ...] = ()
    passing: bool = False
    files: tuple[Hashable, ...] = ()
    state: State = "unloaded"
    deployment: AnyDeployment | None = None
    held: ExitStack | None = None
    used_at: float = 0.0
    why: str = ""
    estimate: Estimate | None = None
    failed_at: float = 0.0
    waiting: int = 0
    phase: str = ""
    progress: float = 0.0
    is_tried: bool = False
    loaded_at: float = -math.inf
    took_s: float = 0.0
    loads: int = 0
    keep_s: float | None = None
    file_names: tuple[str, ...] = ()
    reserved: frozenset[str] = frozenset()
    metrics: Metrics = field(factory=Metrics)
    prefixes: KeptPrefixes | None = None
    payer: str = ""
    changed: trio.Event = field(factory=trio.Event)
    _reading: trio.Lock = field(factory=trio.Lock)
    _read: tuple[Hashable, ModelFacts] | None = None
    before_thread: trio.CancelScope | None = None

    @property
    def known(self) -> tuple[Adapter, ...]:
        """The adapters that requests may use with it."""
        return adapters_of(self.config)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it: the same before and after it is loaded, as far as its file stays the same."""
        if self.deployment is not None:
            return self.deployment.served.names
        return (*self.configured, *self.file_names) or (str(self.config.model),)

    @property
    def configured(self) -> tuple[str, ...]:
        """Those of them that the operator gave it."""
        return configured_names(self.config)

    @property
    def served(self) -> ServedModel | None:
        """The model, if it is loaded and takes requests."""
        return None if self.deployment is None else self.deployment.served

    @property
    def path(self) -> str:
        """Its file as it was configured, by a path or a name; "" for the bundled one."""
        return str(self.config.model or "")

    async def facts(self) -> ModelFacts:
        """Return what its file says, also while it is not loaded; read once, while the file stays the same.

        Raises :class:`Refusal`.
        """
        async with self._reading:  # one thread, however many ask
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
        seen = (path, found.st_mtime_ns, found.st_size, found.st_ino)
        if self._read is None or self._read[0] != seen:
            self._read = seen, facts_of_file(path)
        facts = self._read[1]
        try:
            given = chat_template(self.config)
        except ConfigError as error:
            raise ModelError(str(error)) from None
        return facts if given is None else evolve(facts, chat_template=given)

    @property
    def size(self) -> int:
        """About how many bytes it takes, 0 if that is not known."""
        return 0 if self.estimate is None else self.estimate.needs.total

    @property
    def n_ctx(self) -> int:
        """The tokens of its context; of an encoder those of a text, 0 while it is not loaded."""
        if self.gives == "text":
            return self.config.n_ctx
        return 0 if self.deployment is None else self.deployment.served.bounds.n_ctx_seq

    @property
    def hidden(self) -> bool:
        """Whether it is left out of lists, as what a request made up is, too: its name may be another user's word."""
        return self.config.model_hidden or self.passing

    @property
    def is_asked(self) -> bool:
        """Whether a request has it, or is about to: the time that it stays begins when that is over."""
        return self.waiting > 0 or (
            self.deployment is not None and self.deployment.served.uses.are_requests
        )

    @property
    def lives_s(self) -> float | None:
        """How long it stays loaded while nobody uses it; None: until its memory is needed. A variant stays as long as its model."""
        if self.base is not None and self.keep_s is None:
            return self.base.lives_s
        found = self.config.model_ttl_s if self.keep_s is None else self.keep_s
        return None if self.config.model_pin or found == math.inf else found

    def touch(self) -> None:
        """Note that a request has it now. A request of a variant is one of its model, too."""
        self.used_at = trio.current_time()
        if self.base is not None:
            self.base.touch()

    @property
    def expires_s(self) -> float | None:
        """How long it stays loaded from now on if nobody asks it; None: until its memory is needed."""
        lives_s = self.lives_s
        if lives_s is None or self.is_asked:
            return lives_s
        return max(0.0, self.used_at + lives_s - trio.current_time())

    @property
    def wait(self) -> str:
        """What a request for it waits for, or why it could not be loaded; "" where it is loaded."""
        name = self.names[0]
        match self.state:
            case "loaded":
                return ""
            case "failed":
                return self.why
            case "draining" | "unloading":
                return (
                    self.why or f"model {name} makes room for another one, and is loaded again then"
                )
            case _:
                return f"model {name} {self.phase or 'is about to be loaded'}"

    def become(self, state: State, why: str = "") -> None:
        """Change the state, and wake who waits for a change."""
        self.state, self.why, self.phase, self.progress = state, why, "", 0.0
        self.is_tried = False
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def show(self, phase: str, share: float) -> None:
        """Say what is done and how far it is. Called on the loading thread, too.

        Raises:
            Unwanted: it is for nobody.
        """
        if not self.waiting:
            raise Unwanted
        self.progress = share
        self.phase = f"{phase}, {share:.0%}"
