"""What is in memory of one model while it is loaded: its engine, its text, its limits, and the uses that keep it there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
import trio
from attrs import define, field, frozen
from numpy.typing import NDArray

from uma_protocol.errors import Code
from uma_trio.backend.base import Backend, IntArray, ModelError, ModelFacts, Vocabulary
from uma_trio.backend.encoder import EncoderInfo
from uma_trio.backend.gguf_header import mark_of
from uma_trio.engine.cells import PageStore
from uma_trio.engine.encoder import EncoderEngine
from uma_trio.engine.inbox import EngineStopped, Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Explain, Inspect, Prefix
from uma_trio.models.refusal import Refusal
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import PrefixReport, Recorded, Snapshot
from uma_trio.policy.cost import CostModel
from uma_trio.policy.costing.calibrate import Neighbour
from uma_trio.policy.costing.store import cost_file, remember
from uma_trio.sockets.principal import Principal
from uma_trio.text.derivation import Derivation
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.template import NotRendered
from uma_trio.words import Gives

Result = TypeVar("Result")
AnyEngine = Engine | EncoderEngine

_RETRY_S: Final = 1.0
_STOPPED: Final = "the model's engine has stopped; ask again when it is loaded again"
_UNLOADED: Final = "this model was unloaded; ask again, and it is loaded again"
#: Seconds between two snapshots of one engine, however many clients request them.
SNAPSHOT_INTERVAL_S: Final = 0.1


class RunBlocking(Protocol):
    """Runs a slow function without holding up the event loop."""

    def __call__(self, function: Callable[[], Result], /) -> Awaitable[Result]:
        """Return the function's result or raise its exception. If cancelled, abandon it."""


@frozen(kw_only=True)
class Bounds:
    """Names and limits of a loaded model.

    Attributes:
        model: the name that is shown; `aliases` are its other names.
        n_ctx_seq: context of one request, in tokens.
        credit: tokens that a reader gets after it stopped taking them, in addition to the content of the kernel's buffer:
            a frame of 80 bytes takes about 768 bytes of it, so with 8 KiB these are about twenty more.
        longer: a sentence on how to get a longer context.
        from_file: those of the names that the operator did not choose.
    """

    model: str
    n_ctx_seq: int
    n_vocab: int
    max_tokens: int = 512
    max_tokens_cap: int | None = None
    credit: int = 20
    aliases: tuple[str, ...] = ()
    longer: str = ""
    from_file: tuple[str, ...] = ()

    @property
    def configured(self) -> tuple[str, ...]:
        return tuple(name for name in (self.model, *self.aliases) if name not in self.from_file)

    def names(self, model: str) -> bool:
        """Whether this is a name of the model."""
        return model == self.model or model in self.aliases

    def check_vocabulary(self, tokens: NDArray[np.integer[Any]], field: str) -> None:
        """Check that every token of a request's `field` exists.

        Raises:
            Refusal: one does not.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_vocab:
            raise Refusal(
                Code.E_PROTO_003,
                f"{field} holds a token that is not in the vocabulary; "
                f"ids go from 0 to {self.n_vocab - 1}",
                field=field,
            )


class Uses:
    """The uses of one loaded model: requests, calls in helper threads, and loaded variants. Its memory is freed when there is none.

    :meth:`begin` and :meth:`during` are for trio's thread. A use by a helper thread ends with the thread and not with the
    request that abandoned it, because the thread still reads the vocabulary.
    """

    def __init__(self) -> None:
        # Helper threads end uses, too: changes of a set are atomic.
        self._requests: set[object] = set()
        self._variants: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._requests or self._variants)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def n_variants(self) -> int:
        return len(self._variants)

    def begin(self, *, by_variant: bool = False) -> Callable[[], None]:
        """Begin a use and return the idempotent function that ends it."""
        use, kind = object(), self._variants if by_variant else self._requests
        kind.add(use)
        return lambda: kind.discard(use)

    def during(self, run: RunBlocking) -> RunBlocking:
        """Return `run` with a use of the model for each call, until the function returns."""

        async def run_using(function: Callable[[], Result], /) -> Result:
            use, began = object(), []

            def call() -> Result:
                began.append(True)
                self._requests.add(use)
                try:
                    return function()
                finally:
                    self._requests.discard(use)

            self._requests.add(use)
            try:
                return await run(call)
            finally:
                if not began:
                    self._requests.discard(use)

        return run_using


class Pending:
    """A reply of an engine that tasks wait for, as long as the engine runs."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._has_come = False

    def set(self) -> None:
        self._has_come = True
        self._event.set()

    async def wait(self, inbox: Inbox) -> None:
        """Wait for the reply.

        Raises:
            EngineStopped: the inbox is closed, so that no reply comes.
        """
        with inbox.when_closed(self._event.set):
            await self._event.wait()
        if not self._has_come:
            raise EngineStopped


class Snapshots:
    """Snapshots of one engine, shared by all clients that request them: at most one in :data:`SNAPSHOT_INTERVAL_S`.

    For trio's thread. The engine makes none while no task waits in :meth:`fresh`. `on_snapshot` receives each one, in order.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.latest: Snapshot | None = None
        self._requested = 0  # number of requests to the engine
        self._answered = 0  # the number of the request that `latest` answers
        self._next_at = float("-inf")  # on trio's clock
        self._reply = Pending()
        self.on_snapshot: Callable[[Snapshot], None] = lambda _snapshot: None

    async def fresh(self) -> Snapshot:
        """Return a snapshot made after this call, within the interval and a tick.

        Raises:
            EngineStopped: the engine ended before it could answer.
        """
        wanted = self._requested + 1
        while self.latest is None or self._answered < wanted:
            if self._requested >= wanted:
                await self._reply.wait(self._inbox)
            elif trio.current_time() < self._next_at:
                await trio.sleep_until(self._next_at)
            else:
                self._request()
        return self.latest

    def _request(self) -> None:
        self._requested += 1
        self._next_at = trio.current_time() + SNAPSHOT_INTERVAL_S
        after = -1 if self.latest is None else self.latest.tick
        self._inbox.put(Inspect(partial(self._take, self._requested), after))

    def _take(self, number: int, snapshot: Snapshot) -> None:
        self.latest, self._answered = snapshot, number
        self.on_snapshot(snapshot)
        reply, self._reply = self._reply, Pending()
        reply.set()


def no_history() -> Recorded:
    """Return no records."""
    return Recorded(0.0, (), ())


@frozen(eq=False)
class SavedPrefixes:
    """Saved prefixes of an unloaded model, in host memory; valid for the `file` and library that computed them."""

    file: tuple[object, ...]
    store: PageStore


class _Retired:
    """Stands for the text of a model that is being unloaded: any use is refused."""

    def __getattr__(self, name: str) -> object:
        raise Refusal(Code.E_MODEL_001, _UNLOADED, retry_after_s=_RETRY_S)


@define(eq=False, kw_only=True)
class LoadedModel(ABC):
    """What both kinds of loaded models have. For trio's thread.

    Attributes:
        facts: what its file says.
        slots: requests that are computed at the same time.
        defaults: sampling fields for requests that do not set them.
        engine: what the compute thread runs; None when its memory is being freed.
        history: returns the latest records and ticks of its engine, which must have ended.
        has_died: its engine raised.
    """

    facts: ModelFacts
    bounds: Bounds
    inbox: Inbox
    telemetry: Metrics
    run_blocking: RunBlocking
    front_end: FrontEnd
    slots: int = 1
    defaults: Mapping[str, float] = field(factory=dict)
    engine: AnyEngine | None = None
    history: Callable[[], Recorded] = no_history
    has_died: bool = False
    uses: Uses = field(factory=Uses)
    snapshots: Snapshots = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.snapshots = Snapshots(self.inbox)
        self.run_blocking = self.uses.during(self.run_blocking)

    @property
    @abstractmethod
    def kind(self) -> Gives: ...

    @property
    @abstractmethod
    def max_tokens_at_once(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """Whether its engine takes requests."""
        return not self.inbox.closed

    # --- the end ---

    def retire(self) -> None:
        """Refuse what needs its memory, which is about to be freed."""
        self.front_end = cast("FrontEnd", _Retired())

    def release(self) -> None:
        """Keep nothing of its memory: names and facts may be listed until another model is loaded."""
        self.engine = None

    @property
    def needs_cores(self) -> bool:
        """Whether the ticks of its readers compute on the cores that a load of another model needs."""
        return False

    @property
    def is_saving(self) -> bool:
        """Whether prefixes are to be saved before it is unloaded."""
        return False

    def as_neighbour(self) -> Neighbour | None:
        """Return what is known of this machine's speed from this model."""
        return None

    def saved_prefixes(self) -> SavedPrefixes | None:
        """Return its saved prefixes for when it is loaded again. The engine has to have ended."""
        return None

    def remember_cost(self) -> None:  # noqa: B027 - an encoder has none
        """Store what ticks cost here. The engine has to have ended in order; for a helper thread."""

    # --- requests to its engine ---

    async def snapshot(self) -> Snapshot:
        """Return a snapshot taken after this call.

        Raises:
            Refusal: the engine has stopped.
        """
        try:
            return await self.snapshots.fresh()
        except EngineStopped:
            raise Refusal(Code.E_LIFECYCLE_001, _STOPPED) from None

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self.snapshots.latest

    async def explain(self, handle: int | None, ticks: int) -> Recorded:
        """Return how one request, or the latest ones, spent their time, with `ticks` ticks.

        Raises:
            Refusal: the engine has stopped.
        """
        return await self._request(lambda reply: Explain(reply, handle, ticks))

    async def prefixes(
        self,
        owner: Principal,
        *,
        clear: bool = False,
        session: str | None = None,
        pin_s: float = 0.0,
    ) -> PrefixReport:
        """Return the cached prefixes of a principal, after clearing them and its remembered texts, or pinning a session.

        Raises:
            Refusal: the engine has stopped.
        """
        if clear:
            self.front_end.forget(owner.shares_as)
        return await self._request(lambda reply: Prefix(reply, owner.owns, clear, session, pin_s))

    async def _request(
        self, message: Callable[[Callable[[Result], None]], Explain | Prefix]
    ) -> Result:
        replies: list[Result] = []
        pending = Pending()

        def reply(result: Result) -> None:
            replies.append(result)
            pending.set()

        self.inbox.put(message(reply))
        try:
            await pending.wait(self.inbox)
        except EngineStopped:
            raise Refusal(Code.E_LIFECYCLE_001, _STOPPED) from None
        return replies[0]

    # --- text ---

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""
        return self.front_end.end_tokens

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens (int32) of a text, made in a helper thread."""
        return await self.run_blocking(
            lambda: self.front_end.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )
        )

    async def tokenize_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, made in one helper thread. Control tokens are text."""
        if not texts:
            return []
        tokenize = partial(self.front_end.tokenize, add_special=False, parse_special=False)
        return await self.run_blocking(lambda: [tokenize(text).tolist() for text in texts])

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens, which may end inside a character.

        Raises:
            Refusal: a token is not in the vocabulary.
        """
        self.bounds.check_vocabulary(np.asarray(tokens, np.int64), "tokens")
        return self.front_end.detokenize(tokens)

    def text_of(self, token: int) -> str:
        """Return the text of one token; U+FFFD replaces bytes that are not a whole character."""
        return self.front_end.detokenize((token,)).decode("utf-8", "replace")

    async def derivation(self) -> Derivation | None:
        """Return the reply format derived from the chat template; None if chats are refused."""
        with suppress(NotRendered):
            return await self.run_blocking(self.front_end.derivation)
        return None

    async def chat_problem(self) -> str | None:
        """Try the chat template, which takes a while, and return why chats are refused, if they are.

        Raises:
            Refusal: the model was unloaded meanwhile.
        """
        finding = await self.run_blocking(lambda: self.front_end.finding)
        with suppress(NotRendered):
            return (await trio.to_thread.run_sync(finding.get, abandon_on_cancel=True))[2]
        return None


@define(eq=False, kw_only=True)
class TextModel(LoadedModel):
    """A loaded model that writes text.

    Attributes:
        backend: None when its memory is being freed.
    """

    backend: Backend | None = None

    @property
    def kind(self) -> Gives:
        return "text"

    @property
    def max_tokens_at_once(self) -> int:
        return self.bounds.n_ctx_seq * self.slots

    @property
    def needs_cores(self) -> bool:
        return self.backend is not None and not self.backend.traits.overlaps

    @property
    def is_saving(self) -> bool:
        return isinstance(self.engine, Engine) and self.engine.cells.is_saving

    def as_neighbour(self) -> Neighbour | None:
        if not isinstance(self.engine, Engine) or self.backend is None:
            return None
        cost = self.engine.memory.cost
        return None if cost is None else Neighbour(cost, self.backend)

    def saved_prefixes(self) -> SavedPrefixes | None:
        if not isinstance(self.engine, Engine):
            return None
        store = self.engine.cells.store
        if not store.n_pages or self.backend is None:
            return None
        return SavedPrefixes(identity_of(self.backend), store)

    def remember_cost(self) -> None:
        cost = self.engine.memory.cost if isinstance(self.engine, Engine) else None
        if cost is not None and cost.trusted and self.backend is not None:
            store_cost(self.backend, cost)

    def release(self) -> None:
        super().release()
        self.backend = None


@define(eq=False, kw_only=True)
class EncoderModel(LoadedModel):
    """A loaded model that makes vectors or scores.

    Attributes:
        n_waiting: requests that wait for it, with `n_held` tokens and numbers.
    """

    info: EncoderInfo
    vocabulary: Vocabulary
    n_waiting: int = 0
    n_held: int = 0

    @property
    def kind(self) -> Gives:
        return "scores" if self.info.ranks else "vectors"

    @property
    def max_tokens_at_once(self) -> int:
        return self.info.n_ctx * self.info.max_inputs


def identity_of(backend: Backend) -> tuple[object, ...]:
    """Return what has to be equal for saved cells to be valid for another backend: the file, and how it is computed."""
    try:
        file = mark_of(Path(backend.model.path))
    except ModelError:
        file = (0, 0, 0, 0)  # it was removed while it was loaded
    return (*file, cost_file(backend))


def store_cost(backend: Backend, cost: CostModel) -> None:
    """Store what ticks cost here. Called from the compute thread, too."""
    remember(cost_file(backend), cost.for_storage(), backend.model.weight_bytes)
