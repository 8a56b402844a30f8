"""``POST /v1/responses``: OpenAI's newer API, as far as it goes without keeping anything.

Each request brings its whole conversation, and nothing of it is kept: `store` is answered false,
and what stands for something kept is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from attrs import evolve

from uma_protocol.requests import MAX_INT32, about, items, label, limits
from uma_protocol.requests import text as string
from uma_trio.api.accounts import timings
from uma_trio.api.api import Api, answered, counted
from uma_trio.api.blocks import blocks_of
from uma_trio.api.bodies import (
    STATELESS,
    BodySpec,
    Kwargs,
    Parallel,
    ReasoningBudget,
    TextBody,
    ToolChoiceField,
    TopLogprobs,
    effort_of,
    free,
)
from uma_trio.api.context import Context
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
from uma_trio.api.tools import budget_of
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.service.ask import Ask, Chat, Manner, Shape, ToolChoice
from uma_trio.service.generation import Generation

_LOGPROBS: Final = "message.output_text.logprobs"
_SEALED: Final = "reasoning.encrypted_content"
_MAX_SUMMARY: Final = 4096  # tokens of a summary, where the client does not say


async def responses(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a conversation with items: text, reasoning and tool calls, or one compaction item."""

    def choose(document: Mapping[str, Any]) -> type[Responses]:
        items = document.get("input")
        compacts = isinstance(items, list) and any(map(is_trigger, items))
        return Compaction if compacts else Responses

    return await answered(Responses, exchange, context, choose)


async def compact(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a conversation with the compaction item that stands for it."""
    return await answered(Compact, exchange, context)


async def input_tokens(exchange: Exchange, context: Context) -> Reply:
    """Count the tokens of a conversation without answering it."""
    return await counted(Responses, exchange, context, object="response.input_tokens")


async def stored_response(exchange: Exchange, context: Context) -> Reply:
    """Answer 404: the daemon stores no responses."""
    raise Fault(
        404,
        "the daemon stores no responses; send the whole input each time",
        code="response_not_found",
    )


class ResponsesBody(TextBody, frozen=True, kw_only=True):
    """A conversation that is answered with items."""

    input: Annotated[
        Any,
        free(
            "messages, function calls, their outputs, and reasoning; text parts only",
            "a text or a list of items",
        ),
    ]
    instructions: Annotated[str, string("the beginning of the system message", 0)] | None = None
    max_output_tokens: (
        Annotated[
            int, limits("the longest answer; default: the free room in the context", 1, MAX_INT32)
        ]
        | None
    ) = None
    return_progress: Annotated[
        bool,
        about(
            "with stream: `response.in_progress` with `prompt_progress` while the prompt is computed"
        ),
    ] = False
    timings_per_token: Annotated[bool, about("with stream: each delta contains the timings")] = (
        False
    )
    tools: Annotated[Any, free("functions; other tools are ignored", "a list of tools")] = []
    tool_choice: ToolChoiceField = "auto"
    parallel_tool_calls: Parallel = True
    text: Annotated[Any, free("`format`: text, json_object or json_schema", "an object")] = {}
    reasoning: Annotated[
        Any,
        free(
            "`effort`, if the chat template supports it; with `summary` the reasoning is returned as its summary",
            "an object",
        ),
    ] = {}
    include: Annotated[
        tuple[Annotated[str, label("")], ...], items(f"`{_SEALED}`, `{_LOGPROBS}`", 0, 32, "names")
    ] = ()
    top_logprobs: TopLogprobs = 0
    metadata: Annotated[dict[str, Any], about("returned unchanged", max_bytes=16_384)] = {}
    store: Annotated[bool, about("the daemon stores nothing and returns false")] = False
    prompt_cache_key: (
        Annotated[str, label("the key of the conversation in the prefix cache")] | None
    ) = None
    chat_template_kwargs: Kwargs = {}
    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "scale", "priority", "fast"],
            about("flex selects the background lane"),
        ]
        | None
    ) = None
    reasoning_budget: ReasoningBudget = -1


_REFUSED: Final = {
    **STATELESS,
    "prompt": ("the daemon stores no prompt templates; send the input",),
}
_IGNORED: Final = (
    *("user", "safety_identifier", "client_metadata", "moderation", "truncation", "max_tool_calls"),
    *("context_management", "stream_options", "prompt_cache_retention", "prompt_cache_options"),
)


class Responses(Api[ResponsesBody]):
    """A conversation that is answered with items."""

    prefix = "resp_"
    telling = TELLING
    names: ClassVar = {"messages": "input", "max_tokens": "max_output_tokens"}
    spec = BodySpec(ResponsesBody, _REFUSED, _IGNORED)

    def asks(self) -> list[Ask]:
        body = self.body
        choice = choice_of(body.tool_choice, parallel=body.parallel_tool_calls)
        messages = messages_of(body.instructions, self.items(), self.ignore)
        effort = effort_of("reasoning.effort", self._reasoning.get("effort"))
        manner = Manner(arguments=body.chat_template_kwargs, effort=effort)
        chat = Chat(messages, manner, self.tools.functions, choice)
        for name in body.include:
            if name not in (_LOGPROBS, _SEALED):
                self.ignore("include")
        ask = self.ask(
            chat,
            max_tokens=self.room if body.max_output_tokens is None else body.max_output_tokens,
            logprobs=self._logprobs(),
            session=body.prompt_cache_key,
        )
        _ = self.form  # made here: this may be a helper thread, and there may be many tools
        return [evolve(ask, reasoning_budget=budget_of(body.reasoning_budget))]

    def items(self) -> Any:
        """Return the items of the conversation, or its text."""
        return self.body.input

    def shape(self) -> Shape | None:
        wanted = self._text.get("format")
        return None if wanted is None else format_of("text.format", wanted)

    def encoder(self, generations: Sequence[Generation]) -> Events:
        (generation,) = generations
        so_far = generation.so_far if self.body.timings_per_token else None
        return Events(self.form, generation.reading, so_far)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        (generation,), (answer,) = generations, answers
        done = blocks_of(answer, generation.reading)
        response = self.form.ended(done, answer.end, generation.reading)
        return {**response, "timings": timings(answer.end)}

    @cached_property
    def tools(self) -> Tools:
        """The functions that may be called."""
        offered = self.body.tools
        if isinstance(offered, list):
            offered = [*offered, *tools_in(self.body.input)]
        return tools_of(offered, self.ignore)

    @cached_property
    def form(self) -> Form:
        """How the response is written."""
        items = Items(
            self.id.removeprefix(self.prefix),
            self.context.served,
            self.tools,
            summarises=not {"summary", "generate_summary"}.isdisjoint(self._reasoning),
            seals=_SEALED in self.body.include,
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
            "frequency_penalty": body.frequency_penalty or 0,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "presence_penalty": body.presence_penalty or 0,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **self._reasoning},
            "safety_identifier": None,
            "service_tier": "flex" if self.is_background else "default",
            "store": False,
            "temperature": own.get("temperature", self.defaults.temperature)
            if body.temperature is None
            else body.temperature,
            "text": {"format": {"type": "text"}, **self._text},
            "tool_choice": body.tool_choice,
            "tools": [_repeated_tool(tool) for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": own.get("top_p", self.defaults.top_p) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
        }

    @cached_property
    def _text(self) -> dict[str, Any]:
        return self._inside("text")

    @cached_property
    def _reasoning(self) -> dict[str, Any]:
        return self._inside("reasoning")

    def _inside(self, name: str) -> dict[str, Any]:
        """Return what is in an object, as far as it is not null."""
        value = getattr(self.body, name)
        if not isinstance(value, dict):
            raise invalid(name, "must be an object")
        return {key: inner for key, inner in value.items() if inner is not None}

    def _logprobs(self) -> int | None:
        top: int = self.body.top_logprobs
        if _LOGPROBS in self.body.include:
            return top
        if top:
            raise invalid("top_logprobs", f"needs include {_LOGPROBS}")
        return None


class Compaction(Responses):
    """A conversation that is answered with one compaction item, which holds the model's summary of it.

    The tools stay in the prompt, so that the cached prefix is used, but are not called.
    """

    def asks(self) -> list[Ask]:
        (ask,) = super().asks()
        chat = ask.prompt
        if not isinstance(chat, Chat):
            raise TypeError(chat)
        manner = chat.manner if chat.manner.effort else evolve(chat.manner, thinks=False)
        chat = evolve(chat, choice=ToolChoice("none"), manner=manner)
        most = self.body.max_output_tokens or min(self.room, _MAX_SUMMARY)
        return [evolve(ask, prompt=chat, max_tokens=most)]

    def shape(self) -> Shape | None:
        """Return nothing: a summary is text, whatever shape answers have."""
        return None

    def encoder(self, generations: Sequence[Generation]) -> Events:
        (generation,) = generations
        return CompactionEvents(self.form, generation.reading)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
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

    spec = BodySpec(
        ResponsesBody,
        _REFUSED,
        (*_IGNORED, *_NO_ANSWER),
        only=lambda name: name not in _NO_ANSWER,
    )

    def items(self) -> Any:
        """Return the items of the conversation, behind which it is to be summarised."""
        value = self.body.input
        items = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(items, list) or not items or is_trigger(items[-1]):
            return items
        return [*items, TRIGGER]

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        response = super().document(generations, answers)
        kept = ("id", "created_at", "output", "usage", "timings")
        return {"object": "response.compaction", **{name: response[name] for name in kept}}


def _repeated_tool(tool: Any) -> Any:
    """Return a tool as it was sent, a function with the members that clients with strict types read."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}
