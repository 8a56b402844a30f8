"""``POST /completion``: llama-server's own way to ask, which editors and older tools use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from attrs import evolve

from uma_protocol.requests import MAX_INT32, about, items, limits, text
from uma_trio.api.accounts import progress, timings, timings_until
from uma_trio.api.api import Api, answered
from uma_trio.api.bodies import (
    NO_TOOLS,
    NOT_SUPPORTED,
    TOOLS_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    BodySpec,
    ShapedBody,
)
from uma_trio.api.context import Context
from uma_trio.api.llama.settings import only
from uma_trio.api.logprobs import probabilities
from uma_trio.api.openai.completions import Completions
from uma_trio.api.prompts import PromptField
from uma_trio.api.streams import Encoder, WholeAnswer, failure_of, failure_of_all, without_answer
from uma_trio.engine.messages import Finished, PromptProgress, SamplingParams, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.writing import Part
from uma_trio.service.ask import Ask
from uma_trio.service.generation import Generation

_BARE = "/completions"  # llama-server's own API there, and OpenAI's behind /v1


# A token in llama-server's order of fields, as one format: an encoder takes four times as long.
_CHUNK = b'data: {"index":%d,"content":%b,"tokens":[%d],"stop":false,"tokens_predicted":%d}\n\n'


async def completion(exchange: Exchange, context: Context) -> Reply | None:
    """Continue a text, whole or as a stream."""
    return await answered(Completion, exchange, context)


async def completions(exchange: Exchange, context: Context) -> Reply | None:
    """Continue texts, whole or as a stream."""
    choose = _api_of if exchange.head.path == _BARE else None
    return await answered(Completions, exchange, context, choose)


def _api_of(document: Mapping[str, Any]) -> type[Api[Any]]:
    """Return the API of a body: OpenAI's requires a model, and has no n_predict."""
    return Completion if "model" not in document or "n_predict" in document else Completions


class CompletionBody(ShapedBody, frozen=True, kw_only=True):
    """A text that is continued, in llama-server's API."""

    prompt: PromptField
    n_predict: (
        Annotated[
            int,
            limits(
                "the longest answer; below 0: the free room in the context; 0: compute the prompt and cache it for the next "
                "request; default --max-tokens",
                -2,
                MAX_INT32,
                aliases=("max_tokens",),
            ),
        ]
        | None
    ) = None
    n_probs: Annotated[
        int, limits("return each token's probability and this many alternatives", 0, 20)
    ] = 0
    post_sampling_probs: Annotated[
        bool,
        about(
            "return the probabilities after penalties and filters, as `prob` instead of a logarithm"
        ),
    ] = False
    response_fields: Annotated[
        tuple[Annotated[str, text("", 1, 128)], ...],
        items(
            "the fields of the answer, by path, such as generation_settings/seed; may name prompt",
            0,
            64,
        ),
    ] = ()
    return_tokens: Annotated[bool, about("adds the tokens to an answer that is not streamed")] = (
        False
    )


class Completion(Api[CompletionBody]):
    """A text that is continued."""

    prefix = "completion-"
    takes_ids = tells_loading = True
    # llama-server's own defaults.
    defaults = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    spec = BodySpec(
        CompletionBody,
        refused={**NOT_SUPPORTED, **NO_TOOLS},
        ignored=(
            *WITHOUT_EFFECT,
            *TOOLS_WITHOUT_EFFECT,
            "samplers",
            "n_keep",
            "n_indent",
            "t_max_predict_ms",
        ),
    )

    def asks(self) -> list[Ask]:
        body = self.body
        most = body.n_predict
        if most is not None and most < 0:
            most = self.room
        most = 1 if most == 0 else most
        asks = [
            self.ask(prompt, max_tokens=most, logprobs=body.n_probs or None)
            for prompt in body.prompt
        ]
        return [
            evolve(ask, sampling=evolve(ask.sampling, post_sampling=body.post_sampling_probs))
            for ask in asks
        ]

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is computed for later, and the one token after it is dropped."""
        return self.body.n_predict == 0

    @property
    def repeats_prompts(self) -> bool:
        return "prompt" in self.body.response_fields or super().repeats_prompts

    def encoder(self, generations: Sequence[Generation]) -> Encoder:
        return _Chunks(self, generations)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Return the whole text, and all about it; a list of these where there were several."""
        documents = [
            self._document(index, generation, answer)
            for index, (generation, answer) in enumerate(zip(generations, answers, strict=True))
        ]
        return documents[0] if len(documents) == 1 else documents

    def _document(
        self, index: int, generation: Generation, answer: WholeAnswer
    ) -> Mapping[str, Any]:
        tokens = () if self.only_prompt else answer.tokens
        text = "" if self.only_prompt else answer.text
        more: dict[str, Any] = {}
        if self.body.return_tokens:
            more["tokens"] = [token.token_id for token in tokens]
        found = probabilities(
            tokens, self.context.served, post_sampling=self.body.post_sampling_probs
        )
        if found is not None:
            more["completion_probabilities"] = found
        return self.last(index, generation, answer.end, text=text, lines="\n" in text, more=more)

    def last(
        self,
        index: int,
        generation: Generation,
        end: Finished,
        *,
        text: str,
        lines: bool,
        more: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Return what says all about an answer; `lines` is whether there is a line end in it."""
        ask, wanted = generation.ask, self.body.response_fields
        if self.only_prompt:
            end = without_answer(end)
        document = {
            "index": index,
            "content": text,
            "tokens": [],
            "stop": True,
            "model": self.model,
            "tokens_predicted": end.completion_tokens,
            "tokens_evaluated": end.prompt_tokens,
            "tokens_cached": end.cached_tokens,
            "generation_settings": self.settings(ask),
            "has_new_line": lines,
            "truncated": self._is_full(end),
            "stop_type": _stop_type(end),
            "stopping_word": end.stop or "",
            "timings": timings(end),
        }
        if "prompt" in wanted:
            document["prompt"] = self.prompt_text(index)
        fault = failure_of(end)
        error = {} if fault is None else fault.member(native=True)
        return {**only(wanted, {**document, **more}), **error}

    def _is_full(self, end: Finished) -> bool:
        used = end.prompt_tokens + end.completion_tokens
        return end.reason == "length" and used >= self.room


class _Chunks(Encoder):
    """Chunks as llama-server writes them; the last one says all about the answer."""

    def __init__(self, api: Completion, generations: Sequence[Generation]) -> None:
        self._api = api
        self._served = api.context.served
        self._generations = generations
        self._n = [0] * len(generations)
        self._lines = [False] * len(generations)
        self._timed = api.body.timings_per_token

    def progress(self, index: int, item: PromptProgress) -> bytes:
        chunk: dict[str, Any] = {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": False,
            "tokens_predicted": 0,
            "tokens_evaluated": item.prompt_tokens,
            "prompt_progress": progress(item),
        }
        if self._timed:
            chunk["timings"] = timings_until(item)
        return sse.event(chunk)

    def token(self, index: int, item: TokenOut) -> bytes:
        if self._api.only_prompt:
            return b""
        self._n[index] += 1
        self._lines[index] |= "\n" in item.text
        n = self._n[index]
        if item.logprobs is None and not self._timed:
            return _CHUNK % (index, sse.text(item.text), item.token_id, n)
        chunk: dict[str, Any] = {
            "index": index,
            "content": item.text,
            "tokens": [item.token_id],
            "stop": False,
            "tokens_predicted": n,
        }
        found = probabilities(
            [item], self._served, post_sampling=self._api.body.post_sampling_probs
        )
        if found is not None:
            chunk["completion_probabilities"] = found
        if self._timed:
            chunk["timings"] = timings(self._generations[index].so_far(n))
        return sse.event(chunk)

    def end(self, index: int, finished: Finished) -> Part:
        text = "" if self._api.only_prompt else finished.text
        lines = self._lines[index] or "\n" in text
        generation = self._generations[index]
        last = self._api.last(index, generation, finished, text=text, lines=lines, more={})
        return (lambda: sse.long_event(last)) if self._api.is_long else sse.event(last)

    def failure(self, index: int, fault: Fault, finished: Finished) -> Part:
        # Its clients read no further behind an error: that goes out only if no answer is whole.
        return self.end(index, finished) if len(self._generations) > 1 else b""

    def closing(self, every: Sequence[Finished]) -> bytes:
        fault = failure_of_all(every)
        return b"" if fault is None else b"error: " + fault.body(native=True) + b"\n\n"


def _stop_type(end: Finished) -> str:
    if end.reason in ("cancelled", "error"):
        return "none"
    if end.stop is not None:
        return "word"
    return "limit" if end.reason == "length" else "eos"
