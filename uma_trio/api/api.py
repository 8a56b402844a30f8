"""An endpoint that gives text: from its decoded body to what is asked, from the answers to bytes.

Every API has the same way through: decode the fields, read what is asked, submit it, write the
answers as a stream or whole. :func:`answered` is that way; a subclass of :class:`Api` says what is
the API's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
from attrs import evolve

from uma_trio.api.asking import (
    awaits_of,
    lane_of,
    model_of,
    origin_of,
    said_of,
    sampling_of,
    session_of,
    speculation_of,
    stops_of,
    targets_of,
    text_of,
)
from uma_trio.api.bias import by_token
from uma_trio.api.fields import (
    Body,
    Field,
    aside,
    decode,
    ignored_header,
    take,
    would_be_ignored,
)
from uma_trio.api.llama.settings import generation_settings
from uma_trio.api.loading import (
    EVENTS,
    LoadTelling,
    ToldInStream,
    as_data,
    keeps_loaded,
    model_for,
)
from uma_trio.api.prompts import PROMPT, with_prompts
from uma_trio.api.shapes import refuse_other_shapes, shape_of
from uma_trio.api.streams import MUCH, Encoder, WholeAnswer, stream, whole
from uma_trio.api.tools import headers_of
from uma_trio.engine.messages import SamplingParams
from uma_trio.http import sse
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Headers, Reply
from uma_trio.http.settings import Shared
from uma_trio.http.writing import written
from uma_trio.service.ask import Ask, Origin, Prompt, Refusal, Salt, Shape, Sharing
from uma_trio.service.generation import Generation
from uma_trio.service.served import ServedModel
from uma_trio.text.slices import SLICE


class Api(ABC):
    """One request to an endpoint that gives text.

    `fields` is what its body may have, `prefix` what its ids begin with, `defaults` how tokens are
    chosen where nothing is said, and `names` what it calls the fields that the service knows by
    another name. `takes_ids` is whether its prompts may be token ids, `tells_loading` whether return_progress
    tells how much of the model is loaded, too. :meth:`asks` is called first,
    and finds everything that a client can get wrong; the answers are in the order of what it returns.
    It and the constructor may run in a helper thread; everything else runs on trio's.
    """

    fields: ClassVar[tuple[Field, ...]]
    prefix: ClassVar[str]
    defaults: ClassVar[SamplingParams] = SamplingParams(temperature=1.0)
    names: ClassVar[Mapping[str, str]] = {}
    takes_ids: ClassVar[bool] = False
    streams_by_default: ClassVar[bool] = False
    telling: ClassVar[LoadTelling] = EVENTS
    tells_loading: ClassVar[bool] = False

    def __init__(self, body: Body, head: Head, shared: Shared, origin: Origin) -> None:
        self.body = body
        self.head = head
        self.shared = shared
        self.origin = origin
        self.id = origin.name
        self.created = int(time.time())
        self.model, self._required_model = model_of(body, shared)
        self._set_aside: list[str] = []
        self._texts: list[str] = []  # of the prompts, if an answer repeats them

    @classmethod
    def without_model(cls, body: Body, shared: Shared, origin: Origin) -> Reply | None:
        """Return the reply to a request that no model is needed for; None if one is, as mostly.

        Raises:
            Fault: the request is wrong.
            Refusal: there is no such model.
        """
        return None

    @property
    def served(self) -> ServedModel:
        """The model that it is for."""
        return self.shared.served

    @property
    def streams(self) -> bool:
        """Whether the answers are sent as they come."""
        return bool(self.body.get("stream", self.streams_by_default))

    @classmethod
    def told(cls, body: Body) -> LoadTelling | None:
        """Return how a client that asked for a stream is told that its model is loaded; None if it is not."""
        if not body.get("stream", cls.streams_by_default):
            return None
        wants = cls.tells_loading and body.get("return_progress", False)
        return evolve(cls.telling, loading=as_data) if wants else cls.telling

    @property
    def room(self) -> int:
        """How many tokens an answer has at the most, in an empty context."""
        return self.shared.served.bounds.n_ctx_seq

    @property
    def is_background(self) -> bool:
        """Whether the answer is computed in the background lane."""
        return lane_of(self.body, self.head) == "background"

    @property
    def headers(self) -> Headers:
        """What is said of the request beside its answer."""
        return ignored_header([*self.body.ignored, *self._set_aside])

    def set_aside(self, name: str) -> None:
        """Note that something in the body changes nothing here.

        Raises:
            Fault: this daemon is strict about it.
        """
        if self.shared.settings.strict:
            raise would_be_ignored(name)
        self._set_aside.append(name)

    @classmethod
    async def tokenised(cls, body: Body, shared: Shared) -> Body:
        """Return the body with tokens in place of the texts that stand for them, and its prompts in a list.

        Raises:
            Fault: these texts are too many or too long.
        """
        body = await by_token(body, shared)
        return await with_prompts(body, shared) if PROMPT in cls.fields else body

    @abstractmethod
    def asks(self) -> Sequence[Ask]:
        """Return what is asked of the service; an ask with `n` has so many answers.

        Where nothing is asked, the document of no answers is the reply.

        Raises:
            Fault: the body asks for what is not to be had.
        """

    @property
    def repeats_prompts(self) -> bool:
        """Whether an answer has its prompt in it."""
        return bool(self.body.get("verbose", False))

    async def look_closer(self, asks: Sequence[Ask]) -> None:
        """Write the prompts down as the model reads them, if an answer repeats them.

        Raises:
            Refusal: the template does not take it.
        """
        if self.repeats_prompts:
            self._texts = [await text_of(ask, self.shared) for ask in asks]

    def prompt_text(self, index: int) -> str:
        """Return the prompt of answer `index` as a text; "" if no answer repeats it."""
        return self._texts[index // self.body.get("n", 1)] if self._texts else ""

    @property
    def is_long(self) -> bool:
        """Whether what is repeated of the prompts is long to write."""
        return sum(map(len, self._texts)) > SLICE

    def asked(self, generation: Generation) -> dict[str, Any]:
        """Return how a request was understood, for whoever wants to know, as llama-server calls it."""
        if not self.body.get("verbose", False):
            return {}
        return {
            "__verbose": {
                "prompt": self.prompt_text(0),
                "tokens_evaluated": len(generation.prompt),
                "generation_settings": self.settings(generation.ask),
            }
        }

    @abstractmethod
    def encoder(self, generations: Sequence[Generation]) -> Encoder:
        """Return what writes the answers as a stream."""

    @abstractmethod
    def document(self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]) -> Any:
        """Return all answers as one JSON document."""

    def shape(self) -> Shape | None:
        """Return what the answer has to look like.

        Raises:
            Fault: it is said in a wrong way.
        """
        return shape_of(self.body)

    def settings(self, ask: Ask) -> dict[str, Any]:
        """Return how an answer is computed, under llama-server's names."""
        served = self.shared.served
        return generation_settings(
            ask.sampling,
            n_predict=served.bounds.max_tokens if ask.max_tokens is None else ask.max_tokens,
            stop=ask.stop,
            streams=self.streams,
            ends=served.end_tokens,
        )

    def ask(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        session: str | None = None,
    ) -> Ask:
        """Return what is asked of one prompt, as far as all APIs ask it alike.

        Raises:
            Fault: a field is wrong.
        """
        body, head = self.body, self.head
        return Ask(
            prompt=prompt,
            sampling=evolve(
                sampling_of(body, self.defaults), logprobs=logprobs, prompt_logprobs=prompt_logprobs
            ),
            max_tokens=max_tokens,
            clamp=True,
            stop=stops_of(body),
            lane=lane_of(body, head),
            awaits=awaits_of(body, head),
            targets=targets_of(head),
            model=self._required_model,
            session=session if session is not None else session_of(head),
            cache=_sharing(body),
            speculation=speculation_of(body),
            pace=body.get("pace", "smooth"),
            shape=self.shape(),
            streamed=self.streams,
            progress=self.streams and body.get("return_progress", False),
            n=body.get("n", 1),
            explicit=said_of(body),
        )


def _sharing(body: Body) -> Sharing:
    """Return who shares cached prefixes with a request; a salt is a text, whatever it says."""
    if not body.get("cache_prompt", True):
        return "none"
    salt = body.get("cache_salt")
    return "user" if salt is None else Salt(salt)


class _Replied(Exception):
    """The request has its reply, for which no model was needed."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


Choose = Callable[[Mapping[str, Any]], type[Api]]
"""Says which API a document is for, where several have the same path."""


async def answered(
    api: type[Api], exchange: Exchange, shared: Shared, choose: Choose | None = None
) -> Reply | None:
    """Answer a request as `api` does, or as what `choose` returns; whole or as a stream.

    Raises:
        Fault: the request is wrong, or its answer failed before any of it was sent.
        Refusal: the service does not take it.
    """
    try:
        async with _reading(api, exchange, shared, choose) as (asked, asks):
            return await _answered(asked, asks, exchange)
    except ToldInStream:
        return None
    except _Replied as replied:
        return replied.reply


async def _answered(asked: Api, asks: Sequence[Ask], exchange: Exchange) -> Reply | None:
    """Answer a request whose model is loaded."""
    shared = asked.shared
    _keep_loaded(asked)
    if not asks:
        return Reply(200, written(asked.document((), ())), headers=asked.headers)
    async with (
        _renaming(type(asked)),
        shared.service.generate(asks, asked.origin, asked.served) as found,
    ):
        generations = found.generations
        await asked.look_closer(asks)
        headers = (*asked.headers, *headers_of(generations))
        if asked.streams:
            encoder = asked.encoder(generations)
            await stream(exchange, shared, found, encoder, headers)
            return None
        exchange.expect_document(headers)
        answers = await whole(shared, found)

    def write() -> bytes:
        return sse.unsplit(written(asked.document(generations, answers)))

    much = asked.is_long or sum(answer.weight for answer in answers) > MUCH
    body = await aside(shared, write, apart=much)
    for generation in generations:
        generation.tell_of_calls()
    return Reply(200, body, headers=headers)


def _keep_loaded(asked: Api) -> None:
    """Keep the model for as long as the request says, where that is for its client to say."""
    body, by = asked.body, asked.origin.principal
    if not keeps_loaded(body, asked.shared.service, by, body.get("model")):
        asked.set_aside("keep_alive")


async def counted(api: type[Api], exchange: Exchange, shared: Shared, **said: str) -> Reply:
    """Answer with how many tokens the prompt of a request has, and what else is `said`.

    Raises:
        Fault: the request is wrong.
        Refusal: the service would not take it.
    """
    async with _reading(api, exchange, shared, streams=False) as (asked, asks), _renaming(api):
        n = await asked.served.count_tokens(asks[0], asked.origin)
    return Reply(200, msgspec.json.encode({**said, "input_tokens": n}), headers=asked.headers)


@asynccontextmanager
async def _reading(
    api: type[Api],
    exchange: Exchange,
    shared: Shared,
    choose: Choose | None = None,
    *,
    streams: bool = True,
) -> AsyncIterator[tuple[Api, Sequence[Ask]]]:
    """Return a request as its API reads it, and what is asked; until the block ends its model stays loaded.

    Raises :class:`Fault`.
    """

    def read(document: Mapping[str, Any]) -> tuple[type[Api], Body]:
        chosen = api if choose is None else choose(document)
        refuse_other_shapes(chosen.fields, document)
        return chosen, decode(chosen.fields, document, strict=shared.settings.strict)

    taken = await take(exchange, shared, read, shared.limits(with_ids=api.takes_ids))
    chosen, body = taken.value
    origin = origin_of(exchange, shared, f"{chosen.prefix}{shared.name}-{exchange.number}")
    if (reply := chosen.without_model(body, shared, origin)) is not None:
        raise _Replied(reply)
    lane, telling = lane_of(body, exchange.head), chosen.told(body) if streams else None
    name = shared.service.with_adapters(body.get("model"), body.get("lora"))
    async with model_for(exchange, shared, name, origin, lane, telling) as found:
        body = await chosen.tokenised(body, found)

        def build() -> tuple[Api, Sequence[Ask]]:
            asked = chosen(body, exchange.head, found, origin)
            return asked, asked.asks()

        yield await aside(found, build, apart=taken.apart)


@asynccontextmanager
async def _renaming(api: type[Api]) -> AsyncIterator[None]:
    """Let a refusal name the field as the API does."""
    try:
        yield
    except Refusal as refusal:
        refusal.field = api.names.get(refusal.field or "", refusal.field)
        raise
