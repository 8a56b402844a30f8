"""``POST /api/chat`` and ``/api/generate``: Ollama's API."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

from uma_trio.api.api import Api, answered
from uma_trio.api.blocks import blocks_of
from uma_trio.api.bodies import Decoded, effort_of, ignored_header, would_be_ignored
from uma_trio.api.context import Context
from uma_trio.api.loading import LoadTelling, keeps_loaded
from uma_trio.api.ollama.bodies import (
    CHAT,
    DEFAULTS,
    GENERATE,
    NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    decode,
    required_model,
)
from uma_trio.api.ollama.lines import Form, Lines, scores, telling
from uma_trio.api.ollama.messages import goes_on, messages_of, no_images
from uma_trio.api.openai.chat import logprobs_of
from uma_trio.api.shapes import word_or_schema
from uma_trio.api.streams import WholeAnswer
from uma_trio.api.tools import tools_of
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Reply
from uma_trio.http.writing import written
from uma_trio.service.ask import Ask, Chat, Manner, Message, Origin, Prompt, Shape
from uma_trio.service.generation import Generation


async def chat(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a chat in Ollama's API; it streams by default."""
    return await answered(OllamaChat, exchange, context)


async def generate(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a prompt in Ollama's API; it streams by default."""
    return await answered(OllamaGenerate, exchange, context)


def _form(model: str, *, to_chat: bool) -> Form:
    return Form(model, datetime.now(UTC).isoformat().replace("+00:00", "Z"), to_chat)


B = TypeVar("B", bound=OllamaBody)


class _Ollama(Api[B]):
    """What both have in common. A request without a prompt only loads the model."""

    prefix = "ollama-"
    defaults = DEFAULTS
    names = NAMES
    is_chat: ClassVar[bool]

    def __init__(self, decoded: Decoded[B], head: Head, context: Context, origin: Origin) -> None:
        super().__init__(decoded, head, context, origin)
        self._required_model = required_model(self.body.model, context)
        self._form = _form(self.model, to_chat=self.is_chat)

    @classmethod
    def decode(cls, document: Mapping[str, Any], *, strict: bool) -> Decoded[B]:
        return decode(cls.spec, document, strict=strict)

    @classmethod
    def load_telling(cls, body: B) -> LoadTelling | None:
        return telling(_form(body.model or "", to_chat=cls.is_chat)) if body.stream else None

    @classmethod
    def without_model(cls, decoded: Decoded[B], context: Context, origin: Origin) -> Reply | None:
        """Unload a model for a request without a prompt whose `keep_alive` is 0, if its client may."""
        body = decoded.body
        if getattr(body, "messages" if cls.is_chat else "prompt") or body.keep_alive != 0:
            return None
        named, service = body.model, context.service
        model = service.models.resolve(named, "text", exact=service.models.can_swap)
        ignored = list(decoded.ignored)
        if not service.models.can_swap:
            required_model(named, context.of(named))
        if not keeps_loaded(body.keep_alive, service, origin.principal, named):
            if context.settings.strict:
                raise would_be_ignored("keep_alive")
            ignored.append("keep_alive")
        stays = not service.models.can_swap or not origin.principal.is_operator
        is_loaded = stays and not model.wait_reason
        form = _form(named or model.names[0], to_chat=cls.is_chat)
        document = form.loaded("load" if is_loaded else "unload")
        return Reply(200, written(document), headers=ignored_header(ignored))

    def asks(self) -> Sequence[Ask]:
        """Return the request; none without a prompt."""
        prompt = self.prompt()
        if prompt is None:
            return []
        body = self.body
        return [
            self.ask(
                prompt,
                max_tokens=body.num_predict if body.num_predict > 0 else self.room,
                logprobs=logprobs_of(logprobs=body.logprobs, top=body.top_logprobs),
            )
        ]

    @abstractmethod
    def prompt(self) -> Prompt | None:
        """Return what is to be answered; None if there is nothing.

        Raises:
            Fault: a field is wrong.
        """

    def shape(self) -> Shape | None:
        return word_or_schema("format", self.body.format)

    def manner(self, *, continue_final: bool = False) -> Manner:
        """Return how the chat is rendered.

        Raises:
            Fault: there is no such way to think.
        """
        think = self.body.think
        if think is None or isinstance(think, bool):
            return Manner(continue_final=continue_final, thinks=think)
        effort = effort_of("think", think)
        return Manner(continue_final=continue_final, effort=effort, thinks=effort != "none")

    def encoder(self, generations: Sequence[Generation]) -> Lines:
        (generation,) = generations
        return Lines(self._form, generation, self.context.served)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        if not generations:
            return self._form.loaded("load")
        (generation,), (answer,) = generations, answers
        done = blocks_of(answer, generation.reading)
        return self._form.whole(done, answer.end, scores(answer.tokens, self.context.served))


class OllamaChat(_Ollama[OllamaChatBody]):
    """A chat that is answered with a message."""

    is_chat = True
    spec = CHAT

    def prompt(self) -> Chat | None:
        messages = messages_of(self.body.messages, self.ignore)
        if not messages:
            return None
        manner = self.manner(continue_final=goes_on(messages))
        return Chat(messages, manner, tools_of(self.body.tools))


class OllamaGenerate(_Ollama[OllamaGenerateBody]):
    """A prompt that is answered as a chat of one message, or with `raw` a text that is continued."""

    is_chat = False
    names: ClassVar = {**NAMES, "messages": "prompt"}
    spec = GENERATE

    def prompt(self) -> Prompt | None:
        body = self.body
        no_images(body.images, "images")
        text, system = body.prompt, body.system
        if not text:
            return None
        if body.raw:
            if system:
                raise invalid("system", "cannot be combined with raw")
            return text
        said = (Message("system", system),) if system else ()
        return Chat((*said, Message("user", text)), self.manner())
