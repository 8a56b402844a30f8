"""One loaded model as front ends see it: its text, its limits, and the questions to its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar, cast

import numpy as np
import trio

from uma_protocol.errors import Code
from uma_trio.backend.base import IntArray, ModelFacts
from uma_trio.engine.inbox import EngineStopped, Inbox
from uma_trio.engine.messages import Explain, Prefix
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import PrefixReport, Recorded, Snapshot
from uma_trio.service.ask import Ask, Chat, Door, Origin, Refusal, whose_texts
from uma_trio.service.checks import (
    Bounds,
    check_fits,
    check_untokenised,
    check_vocabulary,
    is_large,
    refusing_depth,
)
from uma_trio.service.compiling import COMPILE_S as COMPILE_S
from uma_trio.service.compiling import RunFor, unqueued
from uma_trio.service.embedding import Embedder
from uma_trio.service.fair import RunBlocking, UserProgram, program_of
from uma_trio.service.pulse import Pulse
from uma_trio.service.snapshots import Answered, Snapshots
from uma_trio.sockets.principal import Principal
from uma_trio.text.derivation import Derivation as Derivation
from uma_trio.text.frontend import FrontEnd, Preparation, Prepared
from uma_trio.text.prompt import NoTemplate, Prompt, Unrenderable
from uma_trio.text.shape import NotChecked, Unconstrainable, Unknown
from uma_trio.text.template import NotRendered
from uma_trio.words import Gives

Answer = TypeVar("Answer")

_AGAIN_S: Final = 1.0
_STOPPED: Final = "the model's engine has stopped; ask again when it is loaded again"
_USE_PROMPT: Final = "send the text as `prompt` instead of `messages`"
_UNLOADED: Final = "this model was unloaded; ask again, and it is loaded again"


def no_history() -> Recorded:
    """Return no records."""
    return Recorded(0.0, (), ())


class Uses:
    """The uses of one model: requests, and what helper threads compute of its text.

    Its memory is freed only while there is none. :meth:`begin` and :meth:`during` are for trio's thread. A helper
    thread that was abandoned still reads the model's vocabulary, so that its use ends with the thread and not with the
    request.
    """

    def __init__(self) -> None:
        # Helper threads end uses, too: changes of a set are atomic.
        self._uses: set[object] = set()
        self._holds: set[object] = set()

    def __bool__(self) -> bool:
        """Whether the memory of the model is used."""
        return bool(self._uses) or bool(self._holds)

    @property
    def are_requests(self) -> bool:
        """Whether something is computed for a client: a variant that is idle only holds the memory."""
        return bool(self._uses)

    @property
    def held(self) -> int:
        """How many hold the memory only: the variants that are loaded."""
        return len(self._holds)

    def begin(self, *, holds: bool = False) -> Callable[[], None]:
        """Begin a use, or one that only `holds` the memory; what is returned ends it, and is idempotent."""
        use, kind = object(), self._holds if holds else self._uses
        kind.add(use)
        return lambda: kind.discard(use)

    def during(self, run: RunBlocking) -> RunBlocking:
        """Return what runs functions as `run` does, each of which uses the model until it returns."""

        async def run_using(function: Callable[[], Answer], /) -> Answer:
            use, begun = object(), []

            def call() -> Answer:
                begun.append(True)
                self._uses.add(use)
                try:
                    return function()
                finally:
                    self._uses.discard(use)

            self._uses.add(use)
            try:
                return await run(call)
            finally:
                if not begun:
                    self._uses.discard(use)

        return run_using


class _Retired:
    """In place of the text of a model that is unloaded."""

    def __getattr__(self, name: str) -> object:
        raise Refusal(Code.E_MODEL_001, _UNLOADED, retry_after_s=_AGAIN_S)


class ServedModel:
    """One loaded model. For trio's thread only.

    `slots` is the number of requests that are computed at once. `run_compiling` runs what compiles
    shapes; without it `run_blocking` does. `telemetry` counts what is shown of its answers. One with an `embedder` makes vectors or
    scores, and writes no text.
    """

    def __init__(
        self,
        *,
        model: ModelFacts,
        slots: int,
        bounds: Bounds,
        front_end: FrontEnd,
        inbox: Inbox,
        telemetry: Metrics,
        run_blocking: RunBlocking,
        run_compiling: RunFor | None = None,
        defaults: Mapping[str, float] | None = None,
        embedder: Embedder | None = None,
        history: Callable[[], Recorded] = no_history,
    ) -> None:
        self.model = model
        self.slots = slots
        self.bounds = bounds
        self.inbox = inbox
        self._embedder = embedder
        self.telemetry = telemetry
        #: Returns the latest records and ticks of its engine, which must have ended.
        self.history = history
        self._snapshots = snapshots = Snapshots(inbox)
        #: The load, for routers.
        self.pulse = Pulse(self.snapshot, lambda: snapshots.latest, telemetry.outlook, slots)
        #: How tokens are chosen where a request does not say.
        self.defaults: Mapping[str, float] = defaults or {}
        #: While there is one, the model is not unloaded.
        self.uses = Uses()
        self._front_end = front_end
        self._run_blocking = self.uses.during(run_blocking)
        if embedder is not None:
            embedder.run_blocking = self.uses.during(embedder.run_blocking)
        self._run_compiling = self._compiling_by(run_compiling or unqueued(run_blocking))

    def _compiling_by(self, run: RunFor) -> RunFor:
        """Return what compiles as `run` does, and uses the model meanwhile."""

        async def run_using(function: Callable[[], Answer], client: UserProgram, /) -> Answer:
            return await self.uses.during(lambda call: run(call, client))(function)

        return run_using

    def retire(self) -> None:
        """Note that its memory is about to be freed: what needs it is refused from now on."""
        self._front_end = cast("FrontEnd", _Retired())

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it; the first one is shown."""
        return (self.bounds.model, *self.bounds.aliases)

    @property
    def configured(self) -> tuple[str, ...]:
        """Those of them that the operator gave it."""
        return self.bounds.configured

    @property
    def gives(self) -> Gives:
        """What it makes of a text."""
        return "text" if self._embedder is None else self._embedder.gives

    @property
    def hidden(self) -> bool:
        """Whether it is left out of messages: where it may be, its entry among the configured models says so."""
        return False

    @property
    def encoder(self) -> Embedder:
        """What makes vectors or scores of texts.

        Raises:
            Refusal: it writes text.
        """
        if self._embedder is None:
            raise Refusal(Code.E_MODEL_002, f"{self.bounds.model} writes text")
        return self._embedder

    @property
    def room(self) -> int:
        """How many tokens it takes at once, at the most."""
        if self._embedder is not None:
            return self._embedder.info.n_ctx * self._embedder.info.max_inputs
        return self.bounds.n_ctx_seq * self.slots

    @property
    def is_alive(self) -> bool:
        """Whether its engine takes requests."""
        return not self.inbox.closed

    # --- text ---

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""
        return self._front_end.end_tokens

    async def prepare(self, ask: Ask, origin: Origin) -> list[Prepared]:
        """Return what engine and reader of each answer need, made in one call of a helper thread.

        Only what has to be compiled waits for one of the compilers, which are shared fairly between clients. What was
        tokenised before is not again, where the request may use what is cached.

        Raises:
            Refusal: the model does not support the request, a constraint cannot be enforced, or its
                compilation takes too long.
        """
        client, whose = program_of(origin.principal, origin.app), whose_texts(ask, origin)
        preparation = Preparation(
            *(self._front_end, ask.prompt),
            shape=ask.shape,
            budget=ask.reasoning_budget,
            n=ask.n,
            whose=whose,
        )
        if not isinstance(ask.prompt, Chat | str) and ask.shape is None:
            return preparation.finish()  # there is nothing to be made of tokens
        try:
            while True:
                try:
                    return await self._run_blocking(preparation.finish)
                except Unknown:
                    await self._run_compiling(preparation.compile, client)
        except NotChecked as error:
            said = f"{preparation.field} {error}"
            raise Refusal(
                Code.E_LIMIT_003, said, field=preparation.field, retry_after_s=_AGAIN_S
            ) from None
        except Unconstrainable as error:
            said = f"{preparation.field} {error}"
            raise Refusal(Code.E_PROTO_003, said, field=preparation.field) from None
        except Unrenderable as error:
            raise _unrendered(error) from None

    async def check(self, ask: Ask, door: Door, *, fits: bool = True) -> None:
        """Check what can be checked without tokens: a large request in a helper thread.

        With `fits` a prompt that has several times the tokens of the context is refused, too.

        Raises:
            Refusal: the request is not to be had, as :func:`check_untokenised` says.
        """

        def check() -> None:
            check_untokenised(ask, door, self.bounds)
            if fits:
                check_fits(ask, self.bounds, self._front_end.longest_piece)

        with refusing_depth():
            if is_large(ask):
                await self._run_blocking(check)
            else:
                check()

    async def count_tokens(self, ask: Ask, origin: Origin) -> int:
        """Return the number of tokens of a request's prompt.

        Raises:
            Refusal: the request would be refused, whatever its number of tokens.
        """
        await self.check(ask, origin.door, fits=False)
        prompt, whose = ask.prompt, whose_texts(ask, origin)
        with refusing_depth():
            if isinstance(prompt, Chat):
                found = await self._rendered(lambda: self._front_end.tokens_of(prompt, whose))
            else:
                found = await self._run_blocking(lambda: self._front_end.tokens_of(prompt, whose))
            return len(found[0])

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens (int32) of a text, made in a helper thread."""
        return await self._run_blocking(
            lambda: self._front_end.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )
        )

    async def tokenize_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, made in one thread. Control tokens are text."""
        if not texts:
            return []
        tokenize = partial(self._front_end.tokenize, add_special=False, parse_special=False)
        return await self._run_blocking(lambda: [tokenize(text).tolist() for text in texts])

    async def tokens_of_mixed(self, parts: Sequence[str | int], field: str) -> IntArray:
        """Return the tokens (int32) of a prompt of texts and token ids, made in a helper thread.

        Raises:
            Refusal: a token is not in the vocabulary; `field` names the prompt.
        """

        def prepare() -> IntArray:
            ids = [part for part in parts if not isinstance(part, str)]
            n_vocab = self.bounds.n_vocab
            ends = [max(min(ids), -1), min(max(ids), n_vocab)]  # maybe too large for an array
            check_vocabulary(np.array(ends), self.bounds, field)
            return self._front_end.prepare_mixed(parts)

        return await self._run_blocking(prepare)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens. They may end inside a character.

        Raises:
            Refusal: a token is not in the vocabulary.
        """
        check_vocabulary(np.asarray(tokens, np.int64), self.bounds, "tokens")
        return self._front_end.detokenize(tokens)

    def text_of(self, token: int) -> str:
        """Return the text of one token; U+FFFD replaces bytes that are not a whole character."""
        return self._front_end.detokenize((token,)).decode("utf-8", "replace")

    async def derivation(self) -> Derivation | None:
        """Return the reply format derived from the chat template; None if chats are refused."""
        with suppress(NotRendered):
            return await self._run_blocking(self._front_end.derivation)
        return None

    async def chat_problem(self) -> str | None:
        """Return why chats are refused, if they are, and find out what the template can do.

        That takes a while, in which the model may be unloaded.
        """
        finding = await self._run_blocking(lambda: self._front_end.finding)
        with suppress(NotRendered):
            return (await trio.to_thread.run_sync(finding.get, abandon_on_cancel=True))[2]
        return None

    async def render(self, chat: Chat) -> Prompt:
        """Return a chat as the model's chat template renders it.

        Raises:
            Refusal: the template refuses the chat, or the model has none.
        """
        return await self._rendered(
            lambda: self._front_end.prompt(chat.messages, chat.manner, chat.tools)
        )

    async def _rendered(self, render: Callable[[], Answer]) -> Answer:
        try:
            return await self._run_blocking(render)
        except Unrenderable as error:
            raise _unrendered(error) from None

    # --- questions to its engine ---

    async def snapshot(self) -> Snapshot:
        """Return how things stand in the engine, not before now.

        Raises:
            Refusal: the engine has stopped.
        """
        try:
            return await self._snapshots.fresh()
        except EngineStopped:
            raise Refusal(Code.E_LIFECYCLE_001, _STOPPED) from None

    @property
    def on_snapshot(self) -> Callable[[Snapshot], None]:
        """Receives every snapshot, in order."""
        return self._snapshots.on_snapshot

    @on_snapshot.setter
    def on_snapshot(self, take: Callable[[Snapshot], None]) -> None:
        self._snapshots.on_snapshot = take

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self._snapshots.latest

    async def explain(self, handle: int | None, ticks: int) -> Recorded:
        """Return how one request, or the latest ones, spent their time, with `ticks` ticks.

        Raises:
            Refusal: the engine has stopped.
        """
        return await self._asked(lambda reply: Explain(reply, handle, ticks))

    async def prefixes(
        self,
        whose: Principal,
        *,
        clear: bool = False,
        session: str | None = None,
        pin_s: float = 0.0,
    ) -> PrefixReport:
        """Return the cached prefixes of a principal, after clearing them or pinning a session.

        With them goes what is remembered of its texts.

        Raises:
            Refusal: the engine has stopped.
        """
        if clear:
            self._front_end.forget(whose.shares_as)
        return await self._asked(lambda reply: Prefix(reply, whose.owns, clear, session, pin_s))

    async def _asked(
        self, question: Callable[[Callable[[Answer], None]], Explain | Prefix]
    ) -> Answer:
        """Put a question to the engine and wait for the answer. Cancelled, it drops the answer.

        Raises:
            Refusal: the engine has stopped.
        """
        answers: list[Answer] = []
        answered = Answered()

        def reply(answer: Answer) -> None:
            answers.append(answer)
            answered.set()

        self.inbox.put(question(reply))
        try:
            await answered.wait(self.inbox)
        except EngineStopped:
            raise Refusal(Code.E_LIFECYCLE_001, _STOPPED) from None
        return answers[0]


def _unrendered(error: Unrenderable) -> Refusal:
    """Return the refusal of a chat that cannot be rendered."""
    if isinstance(error, NotRendered):
        said = f"the chat template: {error}"
        return Refusal(Code.E_LIMIT_003, said, field="messages", retry_after_s=_AGAIN_S)
    if isinstance(error, NoTemplate):
        return Refusal(Code.E_MODEL_002, f"{error}; {_USE_PROMPT}", field="messages")
    return Refusal(
        Code.E_MODEL_002, f"the model's chat template refuses this: {error}", field="messages"
    )
