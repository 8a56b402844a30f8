"""A text endpoint: from its decoded body to requests of the service, from the answers to bytes.

Every API takes the same steps: decode the fields, build the requests, submit them, write the answers as a stream or whole.
:func:`answered` takes them; a subclass of :class:`Api` has what is the API's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from attrs import evolve

from uma_trio.api.bias import by_token
from uma_trio.api.bodies import (
    BodySpec,
    Decoded,
    TextBody,
    decode,
    ignored_header,
    run,
    take,
    would_be_ignored,
)
from uma_trio.api.context import Context
from uma_trio.api.headers import awaits_of, lane_of, origin_of, session_of, targets_of
from uma_trio.api.llama.settings import generation_settings
from uma_trio.api.loading import (
    EVENTS,
    LoadTelling,
    ToldInStream,
    as_data,
    keeps_loaded,
    model_for,
)
from uma_trio.api.prompts import FEW, text_of_ids, with_prompts
from uma_trio.api.shapes import refuse_other_shapes, shape_of
from uma_trio.api.streams import MUCH, Encoder, WholeAnswer, stream, whole
from uma_trio.api.tools import headers_of
from uma_trio.engine.messages import SamplingParams
from uma_trio.http import sse
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Headers, Reply
from uma_trio.http.writing import written
from uma_trio.models.loaded import LoadedModel
from uma_trio.service.answers import Answers
from uma_trio.service.ask import (
    Ask,
    Chat,
    Origin,
    Prompt,
    Refusal,
    Salt,
    Shape,
    Sharing,
    adapters_of,
    explicit_of,
    sampling_of,
    speculation_of,
)
from uma_trio.service.generation import Generation
from uma_trio.service.preparing import count_tokens, render
from uma_trio.text.slices import SLICE

B = TypeVar("B", bound=TextBody)


class Api(ABC, Generic[B]):
    """One request to a text endpoint.

    `spec` declares its body, `prefix` is that of its ids, `defaults` are the API's for sampling, and `names` its names
    for fields that the service knows by another. With `takes_ids` its prompts may be token ids; with `tells_loading`
    return_progress reports how much of the model is loaded, too. :meth:`asks` is called first, and finds everything that
    a client can get wrong; the answers are in the order of what it returns. It and the constructor may run in a helper
    thread; everything else runs on trio's.
    """

    spec: ClassVar[BodySpec[Any]]
    prefix: ClassVar[str]
    defaults: ClassVar[SamplingParams] = SamplingParams(temperature=1.0)
    names: ClassVar[Mapping[str, str]] = {}
    takes_ids: ClassVar[bool] = False
    telling: ClassVar[LoadTelling] = EVENTS
    tells_loading: ClassVar[bool] = False

    def __init__(self, decoded: Decoded[B], head: Head, context: Context, origin: Origin) -> None:
        self.body = decoded.body
        self.head = head
        self.context = context
        self.origin = origin
        self.id = origin.name
        self.created = int(time.time())
        named = self.body.model
        self.model = named or context.served.bounds.model
        self._required_model = named if context.settings.strict else None
        self._ignored = [*decoded.ignored]
        self._texts: list[str] = []  # of the prompts, if an answer repeats them

    @classmethod
    def decode(cls, document: Mapping[str, Any], *, strict: bool) -> Decoded[B]:
        """Decode a body. Raises :class:`Fault`."""
        found: Decoded[B] = decode(cls.spec, document, strict=strict)
        return found

    @classmethod
    def without_model(cls, decoded: Decoded[B], context: Context, origin: Origin) -> Reply | None:
        """Return the reply to a request that needs no model; None if it needs one.

        Raises:
            Fault: the request is wrong.
            Refusal: there is no such model.
        """
        return None

    @property
    def served(self) -> LoadedModel:
        """The model of the request."""
        return self.context.served

    @classmethod
    def load_telling(cls, body: B) -> LoadTelling | None:
        """Return how a stream reports that its model is loaded; None for a whole answer."""
        if not body.stream:
            return None
        reports = cls.tells_loading and getattr(body, "return_progress", False)
        return evolve(cls.telling, loading=as_data) if reports else cls.telling

    @property
    def room(self) -> int:
        """The longest answer, in tokens, in an empty context."""
        return self.context.served.bounds.n_ctx_seq

    @property
    def is_background(self) -> bool:
        """Whether the answer is computed in the background lane."""
        return lane_of(self.body, self.head) == "background"

    @property
    def headers(self) -> Headers:
        """Headers of the answer."""
        return ignored_header(self._ignored)

    def ignore(self, name: str) -> None:
        """Note that a part of the body changes nothing here.

        Raises:
            Fault: this daemon is strict.
        """
        if self.context.settings.strict:
            raise would_be_ignored(name)
        self._ignored.append(name)

    @classmethod
    async def tokenised(cls, body: B, context: Context) -> B:
        """Return the body with tokens in place of the texts that stand for them, and its prompts in a list.

        Raises:
            Fault: these texts are too many or too long.
        """
        if body.logit_bias is not None:
            biases = await by_token(body.logit_bias, context)
            body = msgspec.structs.replace(body, logit_bias=biases)
        if cls.takes_ids:
            prompts = await with_prompts(getattr(body, "prompt"), context)  # noqa: B009 - of two Structs
            body = msgspec.structs.replace(body, prompt=prompts)
        return body

    @abstractmethod
    def asks(self) -> Sequence[Ask]:
        """Return the requests to the service; one with `n` has so many answers.

        Without any, the document of no answers is the reply.

        Raises:
            Fault: the body requests what is not supported.
        """

    @property
    def verbose(self) -> bool:
        """Whether the answer says how the request was understood."""
        return bool(getattr(self.body, "verbose", False))

    @property
    def repeats_prompts(self) -> bool:
        """Whether an answer contains its prompt."""
        return self.verbose

    async def render_prompts(self, asks: Sequence[Ask]) -> None:
        """Render the prompts as text, if an answer repeats them.

        Raises:
            Refusal: the template refuses one.
        """
        if self.repeats_prompts:
            self._texts = [await _text_of(ask, self.context) for ask in asks]

    def prompt_text(self, index: int) -> str:
        """Return the prompt of answer `index` as a text; "" if no answer repeats it."""
        return self._texts[index // getattr(self.body, "n", 1)] if self._texts else ""

    @property
    def is_long(self) -> bool:
        """Whether the repeated prompts take long to write."""
        return sum(map(len, self._texts)) > SLICE

    def understood(self, generation: Generation) -> dict[str, Any]:
        """Return how a request was understood, if it is `verbose`, as llama-server names it."""
        if not self.verbose:
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
        """Return the constraint of the answer. Raises :class:`Fault`."""
        return shape_of(self.body)

    def settings(self, ask: Ask) -> dict[str, Any]:
        """Return how an answer is computed, under llama-server's names."""
        served = self.context.served
        return generation_settings(
            ask.sampling,
            n_predict=served.bounds.max_tokens if ask.max_tokens is None else ask.max_tokens,
            stop=ask.stop,
            streams=self.body.stream,
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
        """Return the request for one prompt, with the fields that all APIs have. Raises :class:`Fault`."""
        body, head = self.body, self.head
        return Ask(
            prompt=prompt,
            sampling=evolve(
                sampling_of(body, self.defaults),
                logit_bias=tuple((body.logit_bias or {}).items()),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            max_tokens=max_tokens,
            clamp=True,
            stop=body.stop,
            lane=lane_of(body, head),
            awaits=awaits_of(body, head),
            targets=targets_of(head),
            model=self._required_model,
            session=session if session is not None else session_of(head),
            cache=sharing_of(body),
            speculation=speculation_of(body),
            pace=body.pace,
            shape=self.shape(),
            streamed=body.stream,
            progress=body.stream and getattr(body, "return_progress", False),
            n=getattr(body, "n", 1),
            explicit=frozenset(explicit_of(body)),
        )


def sharing_of(body: TextBody) -> Sharing:
    """Return which requests share cached prefixes with this one; any text is a salt."""
    if not body.cache_prompt:
        return "none"
    return "user" if body.cache_salt is None else Salt(body.cache_salt)


async def _text_of(ask: Ask, context: Context) -> str:
    """Return a prompt as text, one of token ids in slices. Raises :class:`Refusal` if the template refuses it."""
    prompt, served = ask.prompt, context.served
    if isinstance(prompt, Chat):
        return (await render(served, prompt)).text
    if isinstance(prompt, str):
        return prompt
    return await run(context, lambda: text_of_ids(prompt, served), in_thread=len(prompt) > FEW)


class _Replied(Exception):
    """The request has its reply, for which no model was needed."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


Choose = Callable[[Mapping[str, Any]], type[Api[Any]]]
"""Returns the API of a document, where several have the same path."""


async def answered(
    api: type[Api[Any]], exchange: Exchange, context: Context, choose: Choose | None = None
) -> Reply | None:
    """Answer a request as `api` does, or as what `choose` returns; whole or as a stream.

    Raises:
        Fault: the request is wrong, or its answer failed before any of it was sent.
        Refusal: the service refuses it.
    """
    try:
        async with _reading(api, exchange, context, choose) as (request, asks):
            return await _answered(request, asks, exchange)
    except ToldInStream:
        return None
    except _Replied as replied:
        return replied.reply


async def _answered(request: Api[Any], asks: Sequence[Ask], exchange: Exchange) -> Reply | None:
    context, body = request.context, request.body
    keep_alive = getattr(body, "keep_alive", None)
    if not keeps_loaded(keep_alive, context.service, request.origin.principal, body.model):
        request.ignore("keep_alive")
    if not asks:
        return Reply(200, written(request.document((), ())), headers=request.headers)
    async with (
        _renaming(type(request)),
        Answers(context.service, asks, request.origin, request.served) as found,
    ):
        generations = found.generations
        await request.render_prompts(asks)
        headers = (*request.headers, *headers_of(generations))
        if body.stream:
            await stream(exchange, context, found, request.encoder(generations), headers)
            return None
        exchange.expect_document(headers)
        answers = await whole(context, found)

    def write() -> bytes:
        return sse.unsplit(written(request.document(generations, answers)))

    is_long = request.is_long or sum(answer.weight for answer in answers) > MUCH
    data = await run(context, write, in_thread=is_long)
    for generation in generations:
        generation.keep_prefix_after_calls()
    return Reply(200, data, headers=headers)


async def counted(api: type[Api[Any]], exchange: Exchange, context: Context, **more: str) -> Reply:
    """Answer with the number of tokens of a request's prompt, and `more`.

    Raises:
        Fault: the request is wrong.
        Refusal: the service would refuse it.
    """
    async with _reading(api, exchange, context, streams=False) as (request, asks), _renaming(api):
        n = await count_tokens(request.served, asks[0], request.origin)
    document = msgspec.json.encode({**more, "input_tokens": n})
    return Reply(200, document, headers=request.headers)


@asynccontextmanager
async def _reading(
    api: type[Api[Any]],
    exchange: Exchange,
    context: Context,
    choose: Choose | None = None,
    *,
    streams: bool = True,
) -> AsyncIterator[tuple[Api[Any], Sequence[Ask]]]:
    """Return a request as its API reads it, and the requests to the service; until the block ends its model stays loaded.

    Raises :class:`Fault`.
    """

    def read(document: Mapping[str, Any]) -> tuple[type[Api[Any]], Decoded[TextBody]]:
        chosen = api if choose is None else choose(document)
        refuse_other_shapes(chosen.spec, document)
        return chosen, chosen.decode(document, strict=context.settings.strict)

    taken = await take(exchange, context, read, context.limits(with_ids=api.takes_ids))
    chosen, decoded = taken.value
    body = decoded.body
    origin = origin_of(exchange, context, f"{chosen.prefix}{context.name}-{exchange.number}")
    if (reply := chosen.without_model(decoded, context, origin)) is not None:
        raise _Replied(reply)
    lane, telling = lane_of(body, exchange.head), chosen.load_telling(body) if streams else None
    name = context.service.models.with_adapters(body.model, adapters_of(body))
    async with model_for(exchange, context, name, origin, lane, telling) as found:
        tokenised = decoded._replace(body=await chosen.tokenised(body, found))

        def build() -> tuple[Api[Any], Sequence[Ask]]:
            request = chosen(tokenised, exchange.head, found, origin)
            return request, request.asks()

        yield await run(found, build, in_thread=taken.is_long)


@asynccontextmanager
async def _renaming(api: type[Api[Any]]) -> AsyncIterator[None]:
    """Let a refusal name the field as the API does."""
    try:
        yield
    except Refusal as refusal:
        refusal.field = api.names.get(refusal.field or "", refusal.field)
        raise
