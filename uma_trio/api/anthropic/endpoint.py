"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: the API of Anthropic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from attrs import evolve

from uma_protocol.rules import MAX_INT32, Flag, Integer, Object, OneOf
from uma_trio.api.anthropic.events import TELLING, Events, Form
from uma_trio.api.anthropic.messages import choice_of, goes_on, messages_of, tools_of
from uma_trio.api.api import Api, answered, counted
from uma_trio.api.asking import (
    AWAITS,
    CACHE,
    KWARGS,
    LANE,
    LORA,
    MODEL,
    PACE,
    SAMPLING,
    SPECULATION,
    STOPS,
    Anything,
    effort_of,
    stops_of,
)
from uma_trio.api.blocks import blocks_of
from uma_trio.api.fields import honoured, ignored, refused
from uma_trio.api.shapes import format_of
from uma_trio.api.streams import WholeAnswer
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers, Reply
from uma_trio.http.settings import Shared
from uma_trio.service.ask import Ask, Chat, Manner, Shape
from uma_trio.service.generation import Generation

_CONVERSATION: Final = (
    MODEL,
    honoured(
        "messages",
        Anything("a list of messages"),
        "text, tool_use, tool_result and thinking blocks, and text documents; the answer continues a "
        "last message of the assistant",
        required=True,
    ),
    honoured("system", Anything("a string or a list of text blocks"), "the system message"),
    honoured(
        "tools", Anything("a list of tools"), "tools with an `input_schema`; others are ignored"
    ),
    honoured(
        "tool_choice",
        Anything("an object"),
        "of type auto, any, tool or none; `disable_parallel_tool_use`",
        default="auto",
    ),
    honoured(
        "thinking",
        Anything("an object"),
        "of type enabled with `budget_tokens`, adaptive or disabled, if the chat template supports it",
        default="disabled",
    ),
    honoured(
        "output_config",
        Object(65_536),
        "`effort`, and `format` of type json_schema",
    ),
    honoured("output_format", Object(65_536), "the older name of the `format` of output_config"),
    KWARGS,
    refused(
        "mcp_servers",
        "the daemon makes no network requests; connect the client to the MCP servers",
        [],
    ),
    *ignored("cache_control", "context_management", "speed", note="nothing to do"),
    *ignored("metadata", "container", "inference_geo", "betas", "diagnostics", note="a label"),
)


async def messages(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a conversation with a message of content blocks."""
    return await answered(Messages, exchange, shared)


async def count_tokens(exchange: Exchange, shared: Shared) -> Reply:
    """Count the tokens of a conversation without answering it."""
    return await counted(CountTokens, exchange, shared)


class Messages(Api):
    """A conversation that is answered with a message."""

    prefix = "msg_"
    telling = TELLING
    names: ClassVar = {"reasoning_budget": "thinking"}
    fields = (
        *_CONVERSATION,
        honoured(
            "max_tokens",
            Integer(1, MAX_INT32),
            "limited to the free room in the context",
            default="the room",
        ),
        honoured("stream", Flag(), "server-sent events", default="false"),
        honoured(
            "stop_sequences",
            STOPS,
            "the answer ends before the first occurrence of one of these strings; empty ones are "
            "ignored",
        ),
        *SAMPLING,
        LORA,
        LANE,
        honoured(
            "service_tier",
            OneOf(("auto", "standard_only", "flex")),
            "flex selects the background lane",
        ),
        *CACHE,
        SPECULATION,
        PACE,
        AWAITS,
        *ignored("user_profile_id", "workspace_id", note="a label"),
    )

    @property
    def headers(self) -> Headers:
        """What is said of the request beside its answer."""
        return (*super().headers, ("request-id", self.id))

    def asks(self) -> list[Ask]:
        """Return the conversation."""
        body = self.body
        said = body.get("messages")
        messages = messages_of(body.get("system"), said, self.set_aside)
        manner = self._manner(continue_final=goes_on(said))
        tools = tools_of(body.get("tools"), self.set_aside)
        chat = Chat(messages, manner, tools, choice_of(body.get("tool_choice")))
        ask = self.ask(chat, max_tokens=body.get("max_tokens", self.room))
        stops = stops_of(body, "stop_sequences")
        return [evolve(ask, stop=(*ask.stop, *stops), reasoning_budget=self._budget)]

    def shape(self) -> Shape | None:
        """Return what the format asks for, by its name of today or before."""
        for field, wanted in (
            ("output_config.format", self._config.get("format")),
            ("output_format", self.body.get("output_format")),
        ):
            if wanted is not None:
                return format_of(field, wanted)
        return None

    def encoder(self, generations: Sequence[Generation]) -> Events:
        """Return what writes the blocks as they grow."""
        (generation,) = generations
        return Events(self._form(generation), generation.reading)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return the message with its blocks."""
        (generation,), (answer,) = generations, answers
        done = blocks_of(answer, generation.reading)
        return self._form(generation).whole(done, answer.end, generation.reading)

    def _form(self, generation: Generation) -> Form:
        return Form(self.id, self.model, len(generation.prompt))

    # --- how the model answers ---

    @cached_property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.body.get("output_config", {})
        return config

    @cached_property
    def _thinking(self) -> str | None:
        """How the model thinks; None where nobody says."""
        thinking = self.body.get("thinking")
        if thinking is None:
            return None
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind not in ("enabled", "disabled", "adaptive"):
            raise invalid("thinking", "must be an object of type enabled, adaptive or disabled")
        return str(kind)

    @property
    def _budget(self) -> int | None:
        """How many tokens of thought there may be."""
        if self._thinking != "enabled":
            return None
        budget = self.body.get("thinking").get("budget_tokens")
        fault = Integer(1, MAX_INT32).check("thinking.budget_tokens", budget)
        if fault is not None:
            raise invalid(fault.field, fault.problem)
        return int(budget)

    def _manner(self, *, continue_final: bool) -> Manner:
        """Return how the chat is rendered. Without a word on thinking there is none, by the API."""
        effort = effort_of("output_config.effort", self._config.get("effort"))
        thinks = self._thinking in ("enabled", "adaptive")
        if self._thinking is None and effort is not None:
            thinks = effort != "none"
        return Manner(
            continue_final=continue_final,
            arguments=self.body.get("chat_template_kwargs", {}),
            effort=effort if thinks else "none",
            thinks=thinks,
        )


class CountTokens(Messages):
    """A conversation whose tokens are counted."""

    fields = _CONVERSATION
