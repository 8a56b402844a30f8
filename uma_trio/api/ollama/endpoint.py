"""``POST /api/chat`` and ``/api/generate``: Ollama's API."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from uma_protocol.requests import MAX_TOOLS
from uma_protocol.rules import Flag, Text
from uma_trio.api.api import Api, answered
from uma_trio.api.asking import Anything, effort_of
from uma_trio.api.blocks import blocks_of
from uma_trio.api.fields import (
    Body,
    honoured,
    ignored,
    ignored_header,
    refused,
    would_be_ignored,
)
from uma_trio.api.loading import LoadTelling, keep_alive_of, keeps_loaded
from uma_trio.api.ollama.fields import (
    COMMON,
    DEFAULTS,
    NAMES,
    logprobs_of,
    required_model,
    with_options,
)
from uma_trio.api.ollama.lines import Form, Lines, scores, telling
from uma_trio.api.ollama.messages import goes_on, messages_of, no_images
from uma_trio.api.shapes import word_or_schema
from uma_trio.api.streams import WholeAnswer
from uma_trio.api.tools import tools_of
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Reply
from uma_trio.http.settings import Shared
from uma_trio.http.writing import written
from uma_trio.service.ask import Ask, Chat, Manner, Message, Origin, Prompt, Shape
from uma_trio.service.generation import Generation

_TEXT: Final = Text(0)


async def chat(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a chat in Ollama's API; it streams by default."""
    return await answered(OllamaChat, exchange, shared)


async def generate(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a prompt in Ollama's API; it streams by default."""
    return await answered(OllamaGenerate, exchange, shared)


def _form(model: str, *, to_chat: bool) -> Form:
    return Form(model, datetime.now(UTC).isoformat().replace("+00:00", "Z"), to_chat)


class _Ollama(Api):
    """What both have in common. A request without a prompt asks for nothing: the model is loaded."""

    prefix = "ollama-"
    defaults = DEFAULTS
    names = NAMES
    streams_by_default = True
    to_chat: ClassVar[bool]

    def __init__(self, body: Body, head: Head, shared: Shared, origin: Origin) -> None:
        super().__init__(with_options(body, strict=shared.settings.strict), head, shared, origin)
        self._required_model = required_model(body.get("model"), shared)
        self._form = _form(self.model, to_chat=self.to_chat)

    @classmethod
    def told(cls, body: Body) -> LoadTelling | None:
        """Return how a client that reads a stream is told that its model is loaded."""
        if super().told(body) is None:
            return None
        return telling(_form(body.get("model") or "", to_chat=cls.to_chat))

    @classmethod
    def without_model(cls, body: Body, shared: Shared, origin: Origin) -> Reply | None:
        """Unload a model for a request that asks nothing of it and keeps it for no time, if it is its client's to say."""
        if body.get("messages" if cls.to_chat else "prompt") or keep_alive_of(body) != 0:
            return None
        body = with_options(body, strict=shared.settings.strict)
        named, service = body.get("model"), shared.service
        entry = service.configured(named, "text", exact=True)
        ignored = list(body.ignored)
        if entry is None:
            required_model(named, shared.of(named))
        if not keeps_loaded(body, service, origin.principal, named):
            if shared.settings.strict:
                raise would_be_ignored("keep_alive")
            ignored.append("keep_alive")
        is_loaded = entry is None or (not origin.principal.is_operator and not entry.wait)
        model = named or (shared.served.bounds.model if entry is None else entry.names[0])
        form = _form(model, to_chat=cls.to_chat)
        document = form.loaded("load" if is_loaded else "unload")
        return Reply(200, written(document), headers=ignored_header(ignored))

    def asks(self) -> Sequence[Ask]:
        """Return what is asked; nothing without a prompt."""
        prompt = self.prompt()
        if prompt is None:
            return []
        most = self.body.get("num_predict", -1)
        return [
            self.ask(
                prompt,
                max_tokens=most if most > 0 else self.room,
                logprobs=logprobs_of(self.body),
            )
        ]

    @abstractmethod
    def prompt(self) -> Prompt | None:
        """Return what is to be answered; None if there is nothing.

        Raises:
            Fault: a field is wrong.
        """

    def shape(self) -> Shape | None:
        """Return what the format asks for."""
        return word_or_schema("format", self.body.get("format"))

    def manner(self, *, continue_final: bool = False) -> Manner:
        """Return how the chat is rendered.

        Raises:
            Fault: there is no such way to think.
        """
        think = self.body.get("think")
        if think is None or isinstance(think, bool):
            return Manner(continue_final=continue_final, thinks=think)
        effort = effort_of("think", think)
        return Manner(continue_final=continue_final, effort=effort, thinks=effort != "none")

    def encoder(self, generations: Sequence[Generation]) -> Lines:
        """Return what writes the lines."""
        (generation,) = generations
        return Lines(self._form, generation, self.shared.served)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return the answer as one document."""
        if not generations:
            return self._form.loaded("load")
        (generation,), (answer,) = generations, answers
        done = blocks_of(answer, generation.reading)
        return self._form.whole(done, answer.end, scores(answer.tokens, self.shared.served))


class OllamaChat(_Ollama):
    """A chat that is answered with a message."""

    to_chat = True
    fields = (
        honoured(
            "messages",
            Anything("a list of messages"),
            "text, `thinking`, `tool_calls` and their results; the answer continues a last message of the "
            "assistant; without messages the reply says that the model is loaded",
        ),
        honoured(
            "tools",
            Anything(f"a list of at most {MAX_TOOLS} functions"),
            "functions that the model may call",
        ),
        *COMMON,
    )

    def prompt(self) -> Chat | None:
        """Return the chat."""
        messages = messages_of(self.body.get("messages", []), self.set_aside)
        if not messages:
            return None
        manner = self.manner(continue_final=goes_on(messages))
        return Chat(messages, manner, tools_of(self.body.get("tools", [])))


class OllamaGenerate(_Ollama):
    """A prompt that is answered: as a chat of one message, or with `raw` a text that is continued."""

    to_chat = False
    names: ClassVar = {**NAMES, "messages": "prompt"}
    fields = (
        honoured(
            "prompt",
            _TEXT,
            "what the user says; without it the reply says that the model is loaded",
        ),
        honoured("system", _TEXT, "the system message"),
        honoured(
            "raw",
            Flag(),
            "true: the prompt is continued as it is, without the chat template",
            default="false",
        ),
        honoured("images", Anything("an empty list"), "the model reads only text"),
        refused("suffix", "the daemon continues texts; it does not fill gaps", ""),
        refused("template", "the chat template is the daemon's: --chat-template-file", ""),
        *ignored("context", note="send the conversation to /api/chat"),
        *COMMON,
    )

    def prompt(self) -> Prompt | None:
        """Return the text, or the chat that it is the user's part of."""
        body = self.body
        no_images(body.get("images"), "images")
        text, system = body.get("prompt", ""), body.get("system", "")
        if not text:
            return None
        if body.get("raw", False):
            if system:
                raise invalid("system", "cannot be combined with raw")
            return str(text)
        said = (Message("system", system),) if system else ()
        return Chat((*said, Message("user", text)), self.manner())
