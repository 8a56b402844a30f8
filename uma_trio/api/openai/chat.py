"""``POST /v1/chat/completions``: a chat, as the clients of OpenAI send and expect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from attrs import evolve

from uma_protocol.requests import MAX_INT32, about, limits
from uma_trio.api.api import answered, counted
from uma_trio.api.bodies import (
    NOT_SUPPORTED,
    WITHOUT_EFFECT,
    BeginsAnswer,
    BodySpec,
    ContinueFinal,
    Kwargs,
    MessagesField,
    Parallel,
    ReasoningBudget,
    ReasoningEffort,
    ToolChoiceField,
    Tools,
    TopLogprobs,
    effort_of,
)
from uma_trio.api.chats import messages_of
from uma_trio.api.context import Context
from uma_trio.api.logprobs import chat_logprobs
from uma_trio.api.openai.choices import ChoicesApi, ChoicesBody, Chunks
from uma_trio.api.streams import WholeAnswer, read
from uma_trio.api.tools import budget_of, call_of, choice_of, tools_of
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.writing import Part, joined
from uma_trio.service.ask import Ask, Call, Chat, Manner
from uma_trio.service.generation import Generation
from uma_trio.service.reading import Reading
from uma_trio.text.replies import Arguments, CallStart, Content, Event, ParsedReply, Reasoning


async def chat_completions(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a chat, whole or as a stream."""
    return await answered(ChatCompletions, exchange, context)


async def chat_tokens(exchange: Exchange, context: Context) -> Reply:
    """Count the tokens of a chat without answering it."""
    return await counted(ChatCompletions, exchange, context)


class ChatBody(ChoicesBody, frozen=True, kw_only=True):
    """A chat."""

    messages: MessagesField
    max_completion_tokens: (
        Annotated[
            int,
            limits(
                "the longest answer; -1 and default: the free room in the context",
                -1,
                MAX_INT32,
                aliases=("max_tokens",),
            ),
        ]
        | None
    ) = None
    logprobs: Annotated[
        bool, about("return each token's log probability in the model's own distribution")
    ] = False
    top_logprobs: TopLogprobs = 0
    chat_template_kwargs: Kwargs = {}
    reasoning_effort: ReasoningEffort = None
    continue_final_message: ContinueFinal = False
    add_generation_prompt: BeginsAnswer = None
    tools: Tools = []
    tool_choice: ToolChoiceField = "auto"
    parallel_tool_calls: Parallel = True
    reasoning_budget: ReasoningBudget = -1


class ChatCompletions(ChoicesApi[ChatBody]):
    """A chat whose answers are messages."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    spec = BodySpec(ChatBody, refused=NOT_SUPPORTED, ignored=WITHOUT_EFFECT)

    def asks(self) -> list[Ask]:
        body = self.body
        tools = tools_of(body.tools)
        messages = messages_of(body.messages, self.ignore)
        choice = choice_of(body.tool_choice, parallel=body.parallel_tool_calls)
        manner = manner_of(
            kwargs=body.chat_template_kwargs,
            effort=body.reasoning_effort,
            continues=body.continue_final_message,
            begins=body.add_generation_prompt,
        )
        chat = Chat(messages, manner, tools, choice)
        most = self.max_tokens(body.max_completion_tokens)
        ask = self.ask(
            chat,
            max_tokens=self.room if most is None else most,
            logprobs=logprobs_of(logprobs=body.logprobs, top=body.top_logprobs),
        )
        return [evolve(ask, reasoning_budget=budget_of(body.reasoning_budget))]

    def encoder(self, generations: Sequence[Generation]) -> Chunks:
        return _Chunks(self, generations)

    def choice(self, index: int, generation: Generation, answer: WholeAnswer) -> dict[str, Any]:
        reading = generation.reading
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        if not reading.plain:
            said = read(answer.tokens, answer.end, reading)
            message |= self._parsed(said)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.tokens, self.context.served),
            "finish_reason": reading.reason(answer.end),
        }

    def _parsed(self, said: ParsedReply) -> dict[str, Any]:
        message: dict[str, Any] = {"content": said.content}
        if said.reasoning:
            message |= dict.fromkeys(self.context.settings.reasoning_fields, said.reasoning)
        if said.calls:
            message["tool_calls"] = [call_of(call) for call in said.calls]
            message["content"] = said.content or None
        return message


def logprobs_of(*, logprobs: bool, top: int) -> int | None:
    """Return the number of alternatives of each token; None for no probabilities. Raises :class:`Fault`."""
    if logprobs:
        return top
    if top:
        raise invalid("top_logprobs", "needs logprobs true")
    return None


def manner_of(
    *, kwargs: dict[str, Any], effort: str | None, continues: bool | str, begins: bool | None
) -> Manner:
    """Return how a chat is rendered. Raises :class:`Fault`."""
    is_continued = continues is not False
    if is_continued and begins:
        raise invalid("add_generation_prompt", "must be false with continue_final_message")
    return Manner(
        continue_final=is_continued,
        begins=not is_continued if begins is None else begins,
        arguments=kwargs,
        effort=effort_of("reasoning_effort", effort),
    )


class _Chunks(Chunks):
    """Chunks of a chat. The first of each answer names the role, the last only its end."""

    def __init__(self, api: ChatCompletions, generations: Sequence[Generation]) -> None:
        super().__init__(api, generations)
        self._served = api.context.served
        self._readings = [generation.reading for generation in generations]
        self._thoughts = api.context.settings.reasoning_fields
        self._frames = [sse.Frame(self._chunk(i, {"content": sse.HOLE})) for i in range(api.n)]

    @property
    def readings(self) -> Sequence[Reading]:
        """What has read the answers."""
        return self._readings

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(sse.event(self._chunk(i, role)) for i in range(len(self._frames)))

    def token(self, index: int, item: TokenOut) -> bytes:
        reading = self._readings[index]
        self._n[index] += 1
        if reading.plain and item.logprobs is None and not self.each_timed:
            return self._frames[index].fill(item.text) if item.text else b""
        return self._events(index, reading.token(item), chat_logprobs([item], self._served))

    def empty(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {})

    def end(self, index: int, finished: Finished) -> Part:
        reading = self._readings[index]
        rest = self._events(index, reading.end(finished))
        chunk = self._chunk(index, {}, reading.reason(finished))
        return joined([rest, self.written(self.last(chunk, finished))])

    def _events(self, index: int, events: Sequence[Event], logprobs: Any = None) -> bytes:
        """Return a chunk for each event; the first has the probabilities of the token."""
        plain = logprobs is None and not self.each_timed and len(events) == 1
        if plain and isinstance(events[0], Content):
            return self._frames[index].fill(events[0].text)
        deltas = [delta for event in events if (delta := self._delta(event))]
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        parts: list[bytes] = []
        for delta in deltas:
            chunk = self._chunk(index, delta, None, logprobs)
            parts.append(sse.event(self.counted(index, chunk) if self.each_timed else chunk))
            logprobs = None
        return b"".join(parts)

    def _delta(self, event: Event) -> dict[str, Any]:
        """Return what an event adds to the message: clients join texts, so nothing else repeats."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return dict.fromkeys(self._thoughts, event.text)
        if isinstance(event, CallStart):
            call = call_of(Call(event.id, event.name, ""))
            return {"tool_calls": [{"index": event.index, **call}]}
        if isinstance(event, Arguments):
            piece = {"index": event.index, "function": {"arguments": event.text}}
            return {"tool_calls": [piece]}
        return {}

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self.api.part([choice])
