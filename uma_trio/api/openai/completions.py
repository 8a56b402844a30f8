"""``POST /v1/completions``: text that goes on, from text or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from attrs import evolve

from uma_protocol.requests import MAX_INT32, about, limits
from uma_trio.api.bodies import (
    NO_TOOLS,
    NOT_SUPPORTED,
    TOOLS_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    BodySpec,
)
from uma_trio.api.logprobs import answer_places, prompt_places, text_logprobs
from uma_trio.api.openai.choices import ChoicesApi, ChoicesBody, Chunks
from uma_trio.api.prompts import PromptField
from uma_trio.api.streams import WholeAnswer, without_answer
from uma_trio.engine.messages import Finished, PromptDone, TokenOut
from uma_trio.http import sse
from uma_trio.http.writing import Part
from uma_trio.service.ask import Ask
from uma_trio.service.generation import Generation

_MANY = 64  # tokens of a prompt with their probabilities
_DEFAULT_TOKENS = 16  # the API's own


class CompletionsBody(ChoicesBody, frozen=True, kw_only=True):
    """Texts that are continued."""

    prompt: PromptField
    max_tokens: (
        Annotated[
            int,
            limits("default 16; -1: the free room in the context; 0 only with echo", -1, MAX_INT32),
        ]
        | None
    ) = None
    logprobs: (
        Annotated[int, limits("return each token's probability and this many alternatives", 0, 20)]
        | None
    ) = None
    echo: Annotated[
        bool,
        about(
            "the answer begins with the prompt; with logprobs the tokens of the prompt are scored, too"
        ),
    ] = False


class Completions(ChoicesApi[CompletionsBody]):
    """Texts that are continued."""

    prefix = "cmpl-"
    takes_ids = True
    kind = chunk = "text_completion"
    spec = BodySpec(
        CompletionsBody,
        refused={
            **NOT_SUPPORTED,
            **NO_TOOLS,
            "suffix": ("the daemon continues texts; it does not fill gaps", ""),
        },
        ignored=(*WITHOUT_EFFECT, *TOOLS_WITHOUT_EFFECT),
    )

    def asks(self) -> list[Ask]:
        body = self.body
        max_tokens = 1 if self.only_prompt else self.max_tokens(body.max_tokens)
        first = self.ask(
            "",
            max_tokens=_DEFAULT_TOKENS if max_tokens is None else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        return [evolve(first, prompt=prompt) for prompt in body.prompt]

    def encoder(self, generations: Sequence[Generation]) -> Chunks:
        return _Chunks(self, generations)

    def document(
        self, generations: Sequence[Generation], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        """Return all answers; they are empty where only the prompt was wanted."""
        if self.only_prompt:
            answers = [evolve(one, tokens=(), end=without_answer(one.end)) for one in answers]
        return super().document(generations, answers)

    def choice(self, index: int, generation: Generation, answer: WholeAnswer) -> dict[str, Any]:
        echo, served = self.echo(index), self.context.served
        places = prompt_places(generation.prompt.tolist(), answer.prompt, served)
        places += answer_places(answer.tokens, len(echo))
        return _choice(index, echo + answer.text, answer.end.reason, text_logprobs(places, served))

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is echoed, and the one token behind it given to nobody."""
        return self.body.echo and self.body.max_tokens == 0

    @property
    def repeats_prompts(self) -> bool:
        return self.body.echo or super().repeats_prompts

    def echo(self, index: int) -> str:
        """Return what goes before answer `index`: nothing, or its prompt."""
        return self.prompt_text(index) if self.body.echo else ""


class _Chunks(Chunks):
    """Chunks of a text."""

    def __init__(self, api: Completions, generations: Sequence[Generation]) -> None:
        super().__init__(api, generations)
        self._served = api.context.served
        self._echoes = echoes = [api.echo(index) for index in range(len(generations))]
        self._frames = [sse.Frame(self._chunk(i, sse.HOLE)) for i in range(len(echoes))]
        self._offsets = [len(echo) for echo in echoes]
        self._only_prompt = api.only_prompt
        self._scored = api.body.echo and api.body.logprobs is not None

    def opening(self) -> Part:
        if self._scored:
            return b""  # the prompt goes out with its logprobs

        def write() -> bytes:
            pairs = zip(self._frames, self._echoes, strict=True)
            return b"".join(frame.fill(echo) for frame, echo in pairs if echo)

        return write if self.api.is_long else write()

    def prompt(self, index: int, item: PromptDone) -> Part:
        if not self._scored:
            return b""
        prompt = self._generations[index].prompt

        def write() -> bytes:
            places = prompt_places(prompt.tolist(), item, self._served)
            found = text_logprobs(places, self._served)
            return sse.long_event(self._chunk(index, self._echoes[index], logprobs=found))

        return write if len(prompt) > _MANY else write()

    def token(self, index: int, item: TokenOut) -> bytes:
        if self._only_prompt:
            return b""
        self._n[index] += 1
        if item.logprobs is not None or (self.each_timed and item.text):
            found = text_logprobs(answer_places([item], self._offsets[index]), self._served)
            self._offsets[index] += len(item.text)
            chunk = self._chunk(index, item.text, logprobs=found)
            return sse.event(self.counted(index, chunk) if self.each_timed else chunk)
        return self._frames[index].fill(item.text) if item.text else b""

    def empty(self, index: int) -> dict[str, Any]:
        return self._chunk(index, "")

    def end(self, index: int, finished: Finished) -> Part:
        if self._only_prompt:
            finished = without_answer(finished)
        return self.written(self.last(self._chunk(index, finished.text, finished.reason), finished))

    def closing(self, every: Sequence[Finished]) -> bytes:
        if self._only_prompt:
            every = [without_answer(end) for end in every]
        return super().closing(every)

    def _chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return self.api.part([_choice(index, text, reason, logprobs)])


def _choice(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
