"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: the API of Anthropic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from attrs import evolve

from uma_protocol.requests import MAX_INT32, MAX_SHAPE_BYTES, about, limits
from uma_protocol.rules import Integer
from uma_trio.api.anthropic.events import TELLING, Events, Form
from uma_trio.api.anthropic.messages import choice_of, goes_on, messages_of, tools_of
from uma_trio.api.api import Api, answered, counted
from uma_trio.api.blocks import blocks_of
from uma_trio.api.bodies import (
    STOPS,
    BodySpec,
    Kwargs,
    Refused,
    TextBody,
    effort_of,
    free,
    stops_of,
)
from uma_trio.api.context import Context
from uma_trio.api.shapes import format_of
from uma_trio.api.streams import WholeAnswer
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers, Reply
from uma_trio.service.ask import Ask, Chat, Manner, Shape
from uma_trio.service.generation import Generation


class MessagesBody(TextBody, frozen=True, kw_only=True):
    """A conversation that is answered with a message."""

    messages: Annotated[
        Any,
        free(
            "text, tool_use, tool_result and thinking blocks, and text documents; the answer continues a last message of "
            "the assistant",
            "a list of messages",
        ),
    ]
    system: Annotated[Any, free("the system message", "a string or a list of text blocks")] = None
    tools: Annotated[
        Any, free("tools with an `input_schema`; others are ignored", "a list of tools")
    ] = None
    tool_choice: Annotated[
        Any,
        free(
            "of type auto, any, tool or none; `disable_parallel_tool_use`; default auto",
            "an object",
        ),
    ] = None
    thinking: Annotated[
        Any,
        free(
            "of type enabled with `budget_tokens`, adaptive or disabled (default), if the chat template supports it",
            "an object",
        ),
    ] = None
    output_config: Annotated[
        dict[str, Any],
        about("`effort`, and `format` of type json_schema", max_bytes=MAX_SHAPE_BYTES),
    ] = {}
    output_format: (
        Annotated[
            dict[str, Any],
            about("the older name of the `format` of output_config", max_bytes=MAX_SHAPE_BYTES),
        ]
        | None
    ) = None
    chat_template_kwargs: Kwargs = {}
    max_tokens: (
        Annotated[
            int, limits("the longest answer; default: the free room in the context", 1, MAX_INT32)
        ]
        | None
    ) = None
    stop_sequences: Annotated[
        tuple[str, ...],
        about(
            "the answer ends before the first occurrence of one of these strings; empty ones are ignored",
            rule=STOPS,
            read=stops_of,
        ),
    ] = ()
    service_tier: (
        Annotated[
            Literal["auto", "standard_only", "flex"], about("flex selects the background lane")
        ]
        | None
    ) = None


_REFUSED: Final[Refused] = {
    "mcp_servers": (
        "the daemon makes no network requests; connect the client to the MCP servers",
        [],
    )
}
_IGNORED: Final = (
    *("cache_control", "context_management", "speed", "metadata", "container", "inference_geo"),
    *("betas", "diagnostics"),
)
_COUNTED: Final = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
        *("output_format", "chat_template_kwargs"),
    }
)


async def messages(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a conversation with a message of content blocks."""
    return await answered(Messages, exchange, context)


async def count_tokens(exchange: Exchange, context: Context) -> Reply:
    """Count the tokens of a conversation without answering it."""
    return await counted(CountTokens, exchange, context)


class Messages(Api[MessagesBody]):
    """A conversation that is answered with a message."""

    prefix = "msg_"
    telling = TELLING
    names: ClassVar = {"reasoning_budget": "thinking"}
    spec = BodySpec(
        MessagesBody, refused=_REFUSED, ignored=(*_IGNORED, "user_profile_id", "workspace_id")
    )

    @property
    def headers(self) -> Headers:
        return (*super().headers, ("request-id", self.id))

    def asks(self) -> list[Ask]:
        body = self.body
        messages = messages_of(body.system, body.messages, self.ignore)
        manner = self._manner(continue_final=goes_on(body.messages))
        tools = tools_of(body.tools, self.ignore)
        chat = Chat(messages, manner, tools, choice_of(body.tool_choice))
        ask = self.ask(chat, max_tokens=self.room if body.max_tokens is None else body.max_tokens)
        stop = (*ask.stop, *body.stop_sequences)
        return [evolve(ask, stop=stop, reasoning_budget=self._budget)]

    def shape(self) -> Shape | None:
        for field, wanted in (
            ("output_config.format", self.body.output_config.get("format")),
            ("output_format", self.body.output_format),
        ):
            if wanted is not None:
                return format_of(field, wanted)
        return None

    def encoder(self, generations: Sequence[Generation]) -> Events:
        (generation,) = generations
        return Events(self._form(generation), generation.reading)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        (generation,), (answer,) = generations, answers
        done = blocks_of(answer, generation.reading)
        return self._form(generation).whole(done, answer.end, generation.reading)

    def _form(self, generation: Generation) -> Form:
        return Form(self.id, self.model, len(generation.prompt))

    # --- how the model answers ---

    @cached_property
    def _thinking(self) -> str | None:
        """How the model thinks; None where nobody says."""
        thinking = self.body.thinking
        if thinking is None:
            return None
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind not in ("enabled", "disabled", "adaptive"):
            raise invalid("thinking", "must be an object of type enabled, adaptive or disabled")
        return str(kind)

    @property
    def _budget(self) -> int | None:
        if self._thinking != "enabled":
            return None
        budget = self.body.thinking.get("budget_tokens")
        fault = Integer(1, MAX_INT32).check("thinking.budget_tokens", budget)
        if fault is not None:
            raise invalid(fault.field, fault.problem)
        return int(budget)

    def _manner(self, *, continue_final: bool) -> Manner:
        """Return how the chat is rendered. Without a word on thinking there is none, by the API."""
        effort = effort_of("output_config.effort", self.body.output_config.get("effort"))
        thinks = self._thinking in ("enabled", "adaptive")
        if self._thinking is None and effort is not None:
            thinks = effort != "none"
        return Manner(
            continue_final=continue_final,
            arguments=self.body.chat_template_kwargs,
            effort=effort if thinks else "none",
            thinks=thinks,
        )


class CountTokens(Messages):
    """A conversation whose tokens are counted."""

    spec = BodySpec(MessagesBody, _REFUSED, _IGNORED, only=_COUNTED.__contains__)
