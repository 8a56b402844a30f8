"""``POST /v1/responses``: OpenAI's newer API, as far as it goes without keeping anything.

Each request brings its whole conversation, and nothing of it is kept: `store` is answered false,
and what stands for something kept is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from attrs import evolve

from uma_protocol.rules import MAX_INT32, Flag, Integer, ListOf, Object, Text
from uma_trio.api.accounts import timings
from uma_trio.api.api import Api, answered, counted
from uma_trio.api.asking import (
    AWAITS,
    CACHE,
    KWARGS,
    LORA,
    MODEL,
    PACE,
    SAMPLING,
    SPECULATION,
    STATELESS,
    URGENCY,
    Anything,
    effort_of,
)
from uma_trio.api.blocks import blocks_of
from uma_trio.api.fields import honoured, ignored, refused
from uma_trio.api.responses.events import TELLING, CompactionEvents, Events
from uma_trio.api.responses.items import Form, Items, compacted
from uma_trio.api.responses.messages import (
    TRIGGER,
    Tools,
    choice_of,
    is_trigger,
    messages_of,
    tools_in,
    tools_of,
)
from uma_trio.api.shapes import format_of
from uma_trio.api.streams import WholeAnswer
from uma_trio.api.tools import BUDGET, budget_of
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.settings import Shared
from uma_trio.service.ask import Ask, Chat, Manner, Shape, ToolChoice
from uma_trio.service.generation import Generation

_LABEL: Final = Text(1, 256, printable=True)
_LOGPROBS: Final = "message.output_text.logprobs"
_SEALED: Final = "reasoning.encrypted_content"
_MAX_SUMMARY: Final = 4096  # tokens of a summary, where the client does not say


async def responses(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a conversation with items: text, reasoning and tool calls, or one compaction item."""

    def choose(document: Mapping[str, Any]) -> type[Responses]:
        items = document.get("input")
        compacts = isinstance(items, list) and any(map(is_trigger, items))
        return Compaction if compacts else Responses

    return await answered(Responses, exchange, shared, choose)


async def compact(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a conversation with the compaction item that stands for it."""
    return await answered(Compact, exchange, shared)


async def input_tokens(exchange: Exchange, shared: Shared) -> Reply:
    """Count the tokens of a conversation without answering it."""
    return await counted(Responses, exchange, shared, object="response.input_tokens")


async def stored_response(exchange: Exchange, shared: Shared) -> Reply:
    """Answer 404: the daemon stores no responses."""
    raise Fault(
        404,
        "the daemon stores no responses; send the whole input each time",
        code="response_not_found",
    )


class Responses(Api):
    """A conversation that is answered with items."""

    prefix = "resp_"
    telling = TELLING
    names: ClassVar = {"messages": "input", "max_tokens": "max_output_tokens"}
    fields = (
        MODEL,
        LORA,
        honoured(
            "input",
            Anything("a text or a list of items"),
            "messages, function calls, their outputs, and reasoning; text parts only",
            required=True,
        ),
        honoured("instructions", Text(0), "the beginning of the system message"),
        honoured(
            "max_output_tokens",
            Integer(1, MAX_INT32),
            "limited to the free room in the context",
            default="the room",
        ),
        honoured("stream", Flag(), "server-sent events", default="false"),
        honoured(
            "return_progress",
            Flag(),
            "with stream: `response.in_progress` with `prompt_progress` while the prompt is computed",
            default="false",
        ),
        honoured(
            "timings_per_token",
            Flag(),
            "with stream: each delta contains the timings",
            default="false",
        ),
        honoured("tools", Anything("a list of tools"), "functions; other tools are ignored"),
        honoured(
            "tool_choice",
            Anything("auto, required, none, or an object"),
            "the object names a function, or `allowed_tools`",
            default="auto",
        ),
        honoured("parallel_tool_calls", Flag(), "false: at most one call", default="true"),
        honoured("text", Anything("an object"), "`format`: text, json_object or json_schema"),
        honoured(
            "reasoning",
            Anything("an object"),
            "`effort`, if the chat template supports it; with `summary` the reasoning is returned as its summary",
        ),
        honoured("include", ListOf(0, 32, _LABEL, "names"), f"`{_SEALED}`, `{_LOGPROBS}`"),
        honoured("top_logprobs", Integer(0, 20), f"only with `{_LOGPROBS}`", default="0"),
        honoured("metadata", Object(16_384), "returned unchanged"),
        honoured("store", Flag(), "accepted; the daemon stores nothing and returns false"),
        honoured("prompt_cache_key", _LABEL, "the key of the conversation in the prefix cache"),
        *SAMPLING,
        KWARGS,
        *URGENCY,
        *CACHE,
        BUDGET,
        SPECULATION,
        PACE,
        AWAITS,
        *STATELESS,
        refused("prompt", "the daemon stores no prompt templates; send the input"),
        *ignored("user", "safety_identifier", "client_metadata", "moderation", note="a label"),
        *ignored("truncation", "max_tool_calls", "context_management", note="nothing to do"),
        *ignored("stream_options", "prompt_cache_retention", "prompt_cache_options", note="a hint"),
    )

    def asks(self) -> list[Ask]:
        """Return the conversation."""
        body = self.body
        parallel = body.get("parallel_tool_calls", True)
        choice = choice_of(body.get("tool_choice"), parallel=parallel)
        messages = messages_of(body.get("instructions"), self.items(), self.set_aside)
        effort = effort_of("reasoning.effort", self._reasoning.get("effort"))
        manner = Manner(arguments=body.get("chat_template_kwargs", {}), effort=effort)
        chat = Chat(messages, manner, self.tools.functions, choice)
        for name in self._includes:
            if name not in (_LOGPROBS, _SEALED):
                self.set_aside("include")
        ask = self.ask(
            chat,
            max_tokens=body.get("max_output_tokens", self.room),
            logprobs=self._logprobs(),
            session=body.get("prompt_cache_key"),
        )
        _ = self.form  # made here: this may be a helper thread, and there may be many tools
        return [evolve(ask, reasoning_budget=budget_of(body))]

    def items(self) -> Any:
        """Return the items of the conversation, or its text."""
        return self.body.get("input")

    def shape(self) -> Shape | None:
        """Return what `text.format` asks for."""
        wanted = self._text.get("format")
        return None if wanted is None else format_of("text.format", wanted)

    def encoder(self, generations: Sequence[Generation]) -> Events:
        """Return what writes the items as they grow."""
        (generation,) = generations
        timed = self.body.get("timings_per_token", False)
        return Events(self.form, generation.reading, generation.so_far if timed else None)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return the response with its items."""
        (generation,), (answer,) = generations, answers
        done = blocks_of(answer, generation.reading)
        response = self.form.ended(done, answer.end, generation.reading)
        return {**response, "timings": timings(answer.end)}

    # --- what the response says of itself ---

    @cached_property
    def tools(self) -> Tools:
        """The functions that may be called."""
        offered = self.body.get("tools", [])
        if isinstance(offered, list):
            offered = [*offered, *tools_in(self.body.get("input"))]
        return tools_of(offered, self.set_aside)

    @cached_property
    def form(self) -> Form:
        """How the response is written."""
        items = Items(
            self.id.removeprefix(self.prefix),
            self.shared.served,
            self.tools,
            summarises=not {"summary", "generate_summary"}.isdisjoint(self._reasoning),
            seals=_SEALED in self._includes,
        )
        return Form(self._repeated(), items)

    def _repeated(self) -> dict[str, Any]:
        body, own = self.body, self.served.defaults
        return {
            "id": self.id,
            "object": "response",
            "access_programs": None,
            "created_at": self.created,
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "frequency_penalty": body.get("frequency_penalty", 0),
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": None,
            "metadata": body.get("metadata", {}),
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "presence_penalty": body.get("presence_penalty", 0),
            "previous_response_id": None,
            "prompt_cache_key": body.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None, **self._reasoning},
            "safety_identifier": None,
            "service_tier": "flex" if self.is_background else "default",
            "store": False,
            "temperature": body.get(
                "temperature", own.get("temperature", self.defaults.temperature)
            ),
            "text": {"format": {"type": "text"}, **self._text},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": [_repeated_tool(tool) for tool in body.get("tools", [])],
            "top_logprobs": body.get("top_logprobs", 0),
            "top_p": body.get("top_p", own.get("top_p", self.defaults.top_p)),
            "truncation": "disabled",
            "usage": None,
            "user": None,
        }

    # --- fields with something in them ---

    @property
    def _includes(self) -> Sequence[str]:
        included: Sequence[str] = self.body.get("include", ())
        return included

    @cached_property
    def _text(self) -> dict[str, Any]:
        return self._inside("text")

    @cached_property
    def _reasoning(self) -> dict[str, Any]:
        return self._inside("reasoning")

    def _inside(self, name: str) -> dict[str, Any]:
        """Return what is in an object, as far as it is not null."""
        value = self.body.get(name, {})
        if not isinstance(value, dict):
            raise invalid(name, "must be an object")
        return {key: inner for key, inner in value.items() if inner is not None}

    def _logprobs(self) -> int | None:
        top: int = self.body.get("top_logprobs", 0)
        if _LOGPROBS in self._includes:
            return top
        if top:
            raise invalid("top_logprobs", f"needs include {_LOGPROBS}")
        return None


class Compaction(Responses):
    """A conversation that is answered with one compaction item, which holds the model's summary of it.

    The tools stay in the prompt, so that the cached prefix is used, but are not called.
    """

    def asks(self) -> list[Ask]:
        """Return the conversation, and the request to summarise it at its end."""
        (ask,) = super().asks()
        chat = ask.prompt
        if not isinstance(chat, Chat):
            raise TypeError(chat)
        manner = chat.manner if chat.manner.effort else evolve(chat.manner, thinks=False)
        chat = evolve(chat, choice=ToolChoice("none"), manner=manner)
        most = self.body.get("max_output_tokens", min(self.room, _MAX_SUMMARY))
        return [evolve(ask, prompt=chat, max_tokens=most)]

    def shape(self) -> Shape | None:
        """Return nothing: a summary is text, whatever shape answers have."""
        return None

    def encoder(self, generations: Sequence[Generation]) -> Events:
        """Return what writes the item once it is whole."""
        (generation,) = generations
        return CompactionEvents(self.form, generation.reading)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return the response with its one item."""
        (generation,), (answer,) = generations, answers
        done = [compacted(blocks_of(answer, generation.reading))]
        response = self.form.ended(done, answer.end, generation.reading)
        return {**response, "timings": timings(answer.end)}


_NO_ANSWER: Final = (
    *("stream", "stream_options", "return_progress", "timings_per_token", "include"),
    *("top_logprobs", "metadata", "store", "text", "tool_choice"),
)


class Compact(Compaction):
    """The same as an endpoint of its own, without a stream."""

    fields = (
        *(field for field in Responses.fields if field.name not in _NO_ANSWER),
        *ignored(*_NO_ANSWER, note="there is no answer but the compaction item"),
    )

    def items(self) -> Any:
        """Return the items of the conversation, behind which it is to be summarised."""
        value = self.body.get("input")
        items = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(items, list) or not items or is_trigger(items[-1]):
            return items
        return [*items, TRIGGER]

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return the item, as the API of compaction writes it."""
        response = super().document(generations, answers)
        kept = ("id", "created_at", "output", "usage", "timings")
        return {"object": "response.compaction", **{name: response[name] for name in kept}}


def _repeated_tool(tool: Any) -> Any:
    """Return a tool as it was sent, a function with the members that clients with strict types read."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}
