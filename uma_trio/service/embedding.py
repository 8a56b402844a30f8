"""Requests for vectors and scores: validate, tokenise in a helper thread, queue for the engine, log.

A request is answered when the last of its inputs is encoded. Cancelled, it leaves the engine's queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import trio
from attrs import define, frozen

from uma_protocol.errors import Code
from uma_trio.backend.base import FloatArray, IntArray, Vocabulary
from uma_trio.backend.encoder import EncoderInfo
from uma_trio.engine.messages import Encode, Encoded, StopEncoding
from uma_trio.models.loaded import EncoderModel
from uma_trio.models.model import Model
from uma_trio.service.ask import Origin, Refusal
from uma_trio.service.directory import WaitsForModel
from uma_trio.words import Gives, Lane

if TYPE_CHECKING:
    from uma_trio.service.service import Service

MAX_INPUTS: Final = 16_384
"""Texts of one request."""
MAX_NUMBERS: Final = 1 << 22
"""Numbers of one answer: inputs times the width of a vector. As JSON they are about 45 MB."""
MAX_WAITING: Final = 256
"""Requests that wait for one encoder."""
MAX_TOKENS: Final = 1 << 23
"""Of one request: 16,384 texts of 512. A query is counted once for each document."""
MAX_HELD: Final = 1 << 26
"""Tokens and numbers of all requests that wait for one encoder: 256 MiB."""
EUCLID: Final = 2
"""The norm by which vectors have length 1, unless a request sets another."""
_INT16: Final = np.float32(32_760)
_AGAIN_S: Final = 1.0

Input = str | IntArray | tuple[str | IntArray, ...]
"""A text, its tokens, or an alternation of both."""


@frozen
class VectorRows:
    """``[n_inputs, width]`` numbers, and the number of tokens of the inputs."""

    values: FloatArray
    n_tokens: int

    def best(self, most: int | None = None) -> list[tuple[int, float]]:
        """Return the numbers and the scores of the best documents, the best first; None: of all."""
        scores = self.values[:, 0]
        order = np.argsort(-scores, kind="stable")[:most]
        return list(zip(order.tolist(), scores[order].tolist(), strict=True))


@define(eq=False)
class Embedder:
    """Requests of one loaded encoder. For trio's thread.

    `debts` maps users to the machine seconds that their next request is charged.
    """

    model: EncoderModel
    debts: dict[str, float]

    @property
    def info(self) -> EncoderInfo:
        return self.model.info

    @property
    def vocabulary(self) -> Vocabulary:
        return self.model.vocabulary

    @property
    def name(self) -> str:
        return self.model.bounds.model

    def width(self, dimensions: int | None) -> int:
        """Return the width of a requested vector; None is all of it.

        Raises:
            Refusal: the encoder's vectors are narrower.
        """
        most = self.info.width
        if dimensions is not None and dimensions > most:
            why = f"dimensions must be at most {most}, what {self.name} makes"
            raise Refusal(Code.E_PROTO_003, why, field="dimensions")
        return dimensions or most

    async def vectors(
        self, inputs: Sequence[Input], request: EncodeRequest, *, truncate: bool = False
    ) -> VectorRows:
        """Return a vector of each text or list of tokens, in order. With `truncate` long inputs lose their end.

        Raises:
            Refusal: there are too many, one is empty or too long, too many requests wait, or the engine failed.
        """
        self._check_number(len(inputs), "input")
        tokens = await self.model.run_blocking(
            lambda: _bounded(
                (self._tokens(each, at, truncate) for at, each in enumerate(inputs)), "input"
            )
        )
        return await self._encoded(tokens, request)

    async def scores(
        self,
        query: str,
        documents: Sequence[str],
        request: EncodeRequest,
        *,
        truncate: bool = False,
    ) -> VectorRows:
        """Return the scores of documents for a query, in order: the first number of each row.

        Raises:
            Refusal: as :meth:`vectors`.
        """
        self._check_number(len(documents), "documents")
        tokens = await self.model.run_blocking(
            lambda: _bounded(self._pairs(query, documents, truncate=truncate), "documents")
        )
        return await self._encoded(tokens, request)

    # --- tokens; in a helper thread ---

    def _tokens(self, given: Input, at: int, truncate: bool) -> IntArray:
        if isinstance(given, str):
            found = self.vocabulary.tokenize(given, add_special=True, parse_special=False)
        else:
            found = given if isinstance(given, np.ndarray) else self._joined(given)
            if len(found) and int(found.max()) >= self.vocabulary.n_vocab:
                why = f"holds a token that is not in the vocabulary of {self.vocabulary.n_vocab}"
                raise Refusal(Code.E_PROTO_003, f"input[{at}] {why}", field=f"input[{at}]")
        if not len(found):
            raise Refusal(Code.E_PROTO_003, f"input[{at}] is empty", field=f"input[{at}]")
        return self._fitting(found, f"input[{at}]", truncate)

    def _pairs(self, query: str, documents: Sequence[str], *, truncate: bool) -> Iterator[IntArray]:
        pair = self.info.pair
        before, after_query = pair.around_query
        asked = self._plain(before + query + after_query)
        room = self.info.n_ctx - pair.n_tokens - len(asked)
        if room < 1:
            raise self._too_long("query", len(asked), self.info.n_ctx - pair.n_tokens - 1)
        front = np.concatenate([pair.before, asked, pair.between]).astype(np.int32)
        behind = np.array(pair.behind, np.int32)
        left, right = pair.around_document
        for at, document in enumerate(documents):
            tokens = self._plain(left + document + right)
            if len(tokens) > room and not truncate:
                raise self._too_long(f"documents[{at}]", len(tokens), room)
            yield np.concatenate([front, tokens[:room], behind])

    def _joined(self, parts: Sequence[str | IntArray]) -> IntArray:
        """Return the tokens of alternating texts and tokens; only the first text gets the special tokens."""
        return np.concatenate(
            [
                self.vocabulary.tokenize(part, add_special=not at, parse_special=False)
                if isinstance(part, str)
                else part
                for at, part in enumerate(parts)
            ]
        )

    def _plain(self, text: str) -> IntArray:
        return self.vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _fitting(self, tokens: IntArray, field: str, truncate: bool) -> IntArray:
        most = self.info.n_ctx
        if len(tokens) <= most:
            return tokens
        if not truncate:
            raise self._too_long(field, len(tokens), most)
        return np.concatenate([tokens[: most - 1], tokens[-1:]])  # the last one ends the text

    def _too_long(self, field: str, tokens: int, most: int) -> Refusal:
        return Refusal(
            Code.E_LIMIT_004,
            f"{field} is too large: it has {tokens} tokens, and {self.name} takes {most}; split it, or set truncate",
            field=field,
            prompt_tokens=tokens,
            context=most,
        )

    # --- submission ---

    def _check_number(self, n: int, field: str) -> None:
        most = min(MAX_INPUTS, MAX_NUMBERS // self.info.width)
        if not n:
            raise Refusal(
                Code.E_PROTO_003, f"{field} is empty; send at least one text", field=field
            )
        if n > most:
            why = f"{field} has {n} texts, more than {most}; send fewer at once"
            raise Refusal(Code.E_LIMIT_001, why, field=field)
        if self.model.n_waiting >= MAX_WAITING:
            why = f"{self.model.n_waiting} requests wait for {self.name}; try again"
            raise Refusal(Code.E_LIMIT_003, why, retry_after_s=_AGAIN_S)

    async def _encoded(self, inputs: list[IntArray], request: EncodeRequest) -> VectorRows:
        order = await self.model.run_blocking(
            lambda: sorted(range(len(inputs)), key=lambda at: len(inputs[at]), reverse=True)
        )
        n_tokens = await self.model.run_blocking(lambda: sum(map(len, inputs)))
        held = n_tokens + len(inputs) * self.info.width
        if self.model.n_held + held > MAX_HELD:
            why = f"long requests wait for {self.name}, and there is no memory for more; try again"
            raise Refusal(Code.E_LIMIT_003, why, retry_after_s=_AGAIN_S)
        handle, user = request.handle, request.origin.principal.counts_as
        answers: list[Encoded] = []
        answered = trio.Event()

        def reply(answer: Encoded) -> None:
            answers.append(answer)
            answered.set()

        self.model.n_waiting += 1
        self.model.n_held += held
        try:
            if self.model.inbox.closed:
                raise Refusal(Code.E_RUNTIME_004, "the engine has stopped")
            request.accept(n_tokens)
            owes_s = self.debts.pop(user, 0.0)
            self.model.inbox.put(
                Encode(handle, user, inputs, order, reply, request.arrived, owes_s)
            )
            await answered.wait()
        finally:
            self.model.n_waiting -= 1
            self.model.n_held -= held
            if not answers:
                self.model.inbox.put(StopEncoding(handle))
        found = answers[0]
        request.reason = "error" if found.code else "stop"
        if found.vectors is None:
            raise Refusal(Code(found.code), found.message)
        return VectorRows(found.vectors, n_tokens)


def normalised(vectors: FloatArray, norm: int = EUCLID) -> FloatArray:
    """Return the vectors normalised as by llama.cpp's common_embd_normalize; zeros stay."""
    if norm < 0:
        return vectors
    sizes = np.abs(vectors)
    if norm == 0:
        lengths = sizes.max(axis=1, keepdims=True) / _INT16
    else:
        lengths = (sizes**norm).sum(axis=1, keepdims=True) ** np.float32(1 / norm)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)


def _bounded(inputs: Iterable[IntArray], field: str) -> list[IntArray]:
    """Return the tokens of all inputs, tokenised one by one. Raises :class:`Refusal` beyond MAX_TOKENS."""
    found: list[IntArray] = []
    n_tokens = 0
    for tokens in inputs:
        n_tokens += len(tokens)
        if n_tokens > MAX_TOKENS:
            why = f"{field} has more than {MAX_TOKENS} tokens together; send fewer texts at once"
            raise Refusal(Code.E_LIMIT_001, why, field=field)
        found.append(tokens)
    return found


class RequestEnded(Exception):
    """The request was ended: as cancelled, or with an error code and a message."""

    def __init__(self, code: str | None, message: str | None) -> None:
        super().__init__(message or "the request was cancelled")
        self.code, self.message = code, message


class EncodeRequest(WaitsForModel):
    """One request for vectors or scores. Its texts are computed in time that streams do not need."""

    def __init__(self, service: Service, origin: Origin) -> None:
        super().__init__(service.new_handle(), origin, "background", None, service.clock())
        self._service = service
        #: Number of tokens, once the texts are accepted; and how it ended: stop or error.
        self.n_tokens, self.reason = 0, ""
        #: Called when the wait for the model begins, and when the texts are queued for the engine.
        self.on_wait: Callable[[], object] = lambda: None
        self.on_accept: Callable[[], object] = lambda: None

    def move_to(self, lane: Lane) -> None:
        """Do nothing: texts are background work in any lane."""

    def accept(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.on_accept()

    def _log(self) -> None:
        service, ended = self._service, self.ended is not None
        service.log_request(
            {
                "id": self.handle,
                "app": self.origin.app or "-",
                "lane": self.lane,
                **({} if self.model is None else {"model": self.model}),
                "prompt_tokens": self.n_tokens,
                "total_s": round(service.clock() - self.arrived, 3),
                "reason": self.reason or ("cancelled" if ended else "left"),
            }
        )

    def _wait_for(self, awaited: Model) -> None:
        self.awaited = awaited
        self.on_wait()

    @asynccontextmanager
    async def encoder(
        self, kind: Gives, name: str | None, *, exact: bool = False
    ) -> AsyncIterator[Embedder]:
        """Return the encoder, once it is loaded. Until the block ends, it stays loaded and the request is listed.

        Unless `exact`, an unknown name means the only model of this kind.

        Raises:
            Refusal: there is none, it cannot be loaded, or the daemon ends.
            RequestEnded: the request was ended.
        """
        service = self._service
        if service.draining:
            raise Refusal(Code.E_LIFECYCLE_001, "the daemon is stopping", retry_after_s=_AGAIN_S)
        service.directory.add(self)
        try:
            with self.scope:
                payer = self.origin.principal.counts_as
                served = await service.ready(name, self._wait_for, payer, kind=kind, exact=exact)
                if not isinstance(served, EncoderModel):
                    raise TypeError(f"{served.bounds.model} writes text")  # `kind` is text
                end = served.uses.begin()
                try:
                    self.model, self.awaited = served.bounds.model, None
                    yield Embedder(served, service.models.debts)
                finally:
                    end()
        finally:
            self.awaited = None
            service.directory.remove(self)
            if self.n_tokens > 0:  # else it was refused, or ended before it was queued
                self._log()
        if self.ended is not None:
            raise RequestEnded(*self.ended)
