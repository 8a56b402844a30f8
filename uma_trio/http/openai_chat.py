"""``POST /v1/chat/completions``: a chat, as the clients of OpenAI send and expect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uma_protocol.rules import MAX_INT32, Flag, Integer
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http import sse
from uma_trio.http.api import answered, numbered
from uma_trio.http.asking import (
    CACHE,
    MODEL,
    NO_MATTER,
    NOT_HERE,
    PACE,
    SAMPLING,
    SPECULATION,
    STREAM,
    TEMPLATE,
    URGENCY,
    Anything,
)
from uma_trio.http.chats import messages_of
from uma_trio.http.errors import invalid
from uma_trio.http.fields import Body, honoured
from uma_trio.http.logprobs import chat_logprobs
from uma_trio.http.message import Exchange, Reply
from uma_trio.http.openai import Choices, Chunks
from uma_trio.http.settings import Shared
from uma_trio.http.shapes import FIELDS as SHAPES
from uma_trio.http.streams import Answer
from uma_trio.service.ask import Ask, Chat, Manner
from uma_trio.service.generation import Generation


async def chat_completions(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a chat, whole or as a stream."""
    return await answered(ChatCompletions, exchange, shared)


class ChatCompletions(Choices):
    """A chat whose answers are messages."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    fields = (
        MODEL,
        honoured("messages", Anything("a list of messages"), "text parts only", required=True),
        honoured(
            "max_completion_tokens", Integer(1, MAX_INT32), "trimmed to the room in the context"
        ),
        honoured("max_tokens", Integer(-1, MAX_INT32), "the same, by its older name; -1: the room"),
        *STREAM,
        *SAMPLING,
        honoured("logprobs", Flag(), "each token's probability, of the model's own distribution"),
        honoured("top_logprobs", Integer(0, 20), "and of so many alternatives; only with logprobs"),
        *TEMPLATE,
        *URGENCY,
        CACHE,
        SPECULATION,
        PACE,
        *SHAPES,
        *NOT_HERE,
        *NO_MATTER,
    )

    def asks(self) -> list[Ask]:
        """Return the chat, once for each answer that is wanted; they differ by their seeds."""
        chat = Chat(messages_of(self.body.get("messages")), manner_of(self.body))
        first = self.ask(chat, max_tokens=self.max_tokens(), logprobs=self._logprobs())
        return numbered(first, self.n)

    def encoder(self, generations: Sequence[Generation]) -> Chunks:
        """Return what writes the messages in parts."""
        return _Chunks(self)

    def choice(self, index: int, generation: Generation, answer: Answer) -> dict[str, Any]:
        """Return a whole message."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.tokens, self.shared.service),
            "finish_reason": answer.end.reason,
        }

    def _logprobs(self) -> int | None:
        """Return how many alternatives each token comes with; None for no probabilities."""
        if self.body.get("logprobs", False):
            top: int = self.body.get("top_logprobs", 0)
            return top
        if self.body.get("top_logprobs"):
            raise invalid("top_logprobs", "goes with logprobs true only")
        return None


def manner_of(body: Body) -> Manner:
    """Return how a chat is rendered."""
    manner = Manner(
        continue_final=body.get("continue_final_message", False),
        arguments=body.get("chat_template_kwargs", {}),
        effort=body.get("reasoning_effort"),
    )
    if not body.get("add_generation_prompt", True) and not manner.continue_final:
        raise invalid("add_generation_prompt", "may be false only with continue_final_message")
    return manner


class _Chunks(Chunks):
    """Chunks of a chat. The first of each answer names the role, the last only its end."""

    def __init__(self, api: ChatCompletions) -> None:
        super().__init__(api, api.n)
        self._service = api.shared.service
        self._frames = [sse.Frame(self._chunk(i, {"content": sse.HOLE})) for i in range(api.n)]

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(sse.event(self._chunk(i, role)) for i in range(len(self._frames)))

    def token(self, index: int, item: TokenOut) -> bytes:
        if item.logprobs is not None:
            found = chat_logprobs([item], self._service)
            return sse.event(self._chunk(index, {"content": item.text}, None, found))
        return self._frames[index].fill(item.text) if item.text else b""

    def end(self, index: int, finished: Finished) -> bytes:
        rest = self._frames[index].fill(finished.text) if finished.text else b""
        return rest + sse.event(self.last(self._chunk(index, {}, finished.reason), finished))

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self.api.part([choice])
