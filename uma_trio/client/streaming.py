"""A connection, and the generations that run on it one after another, under any :class:`Loop`.

The client starts no background task and needs no nursery. An exception of the caller's code leaves
the blocks of `connect` and :class:`Generation` unchanged, never inside an exception group.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, Unpack

from uma_protocol import (
    Cancel,
    End,
    Eos,
    Error,
    Event,
    Explain,
    Explanation,
    Generate,
    GetMetrics,
    ListSessions,
    Loading,
    LoadModel,
    Metrics,
    Prefix,
    PrefixAction,
    Prefixes,
    Priority,
    Request,
    Score,
    Scores,
    SessionInfo,
    Sessions,
    SetPriority,
    Token,
    ToolCall,
    UnloadModel,
    Vectors,
    Work,
)
from uma_trio.client.encoding import (
    Embeddings,
    Item,
    Ranking,
    counted,
    embed_requests,
    prompt_tokens,
    rerank_requests,
    scores_of,
    vectors_of,
)
from uma_trio.client.errors import ConnectionFailed, ServerError
from uma_trio.client.link import Link, pauses
from uma_trio.client.loop import Loop
from uma_trio.client.reach import socket_path_of
from uma_trio.client.request import Chat, Params, build_request, held_back

_LEAVE_S = 2.0
OnLoading = Callable[[Loading], object]
"""Receives the progress of loading the model that a request waits for."""


class AnyClient:
    """A connection to the daemon, for one task. `connect` opens and closes it.

    :meth:`metrics`, :meth:`sessions`, :meth:`explain`, :meth:`prefix`, :meth:`load`, :meth:`unload` and :meth:`set_priority` use
    a separate connection for each call. A program that calls only these can create a client without
    opening it.
    """

    loop: ClassVar[Loop]

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, reconnect: bool = False
    ) -> None:
        self._path = socket_path_of(path)
        self._reconnect = reconnect
        self._link: Link | None = None
        self._run: Run | None = None
        self.last: Eos | None = None
        """The terminal event of the latest generation that had one."""

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Chat | None = None,
        on_loading: OnLoading | None = None,
        **params: Unpack[Params],
    ) -> Generation:
        """Request text that continues `prompt`, or that answers the chat `messages`.

        `on_loading` is called with what it waits for while its model is not loaded yet, in the task that iterates; it must
        not wait. A daemon of an older version refuses a request that has it (``E_PROTO_003``).

        Nothing is sent before the first iteration. Use ``async with`` if the caller may leave
        before the end; see :class:`Generation`.

        Raises:
            TypeError: a parameter does not exist.
            uma_protocol.LocalProtocolError: the protocol does not allow a value.
        """
        request = build_request(prompt, messages, params, progress=on_loading is not None)
        return Generation(self, request, on_loading)

    async def embed(
        self,
        texts: str | Iterable[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        on_loading: OnLoading | None = None,
    ) -> Embeddings:
        """Return a vector of each text. Many texts are sent in several requests, one after another.

        With `dimensions` vectors keep their first numbers, normalised again. With `truncate` a text that is too
        long for the model loses its end. `on_loading` is as that of :meth:`generate`. Cancelled, it ends what the daemon computes for it.

        Raises:
            ServerError: no model makes vectors, a text is too long, or the daemon could not compute it.
            uma_protocol.LocalProtocolError: the protocol does not allow a value, such as an empty text.
            trio.BusyResourceError (trio), RuntimeError (asyncio): a generation runs on this connection.
        """
        every: list[array[float]] = []
        n_tokens = 0
        given = (texts,) if isinstance(texts, str) else texts
        options = {"model": model, "truncate": truncate, "progress": on_loading is not None}
        for request in embed_requests(given, dimensions=dimensions, **options):
            run = Run(request, on_loading)
            every += vectors_of(await self._items(run, len(every)))
            n_tokens += prompt_tokens(run.eos)
        return Embeddings(every, n_tokens)

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        model: str | None = None,
        top_n: int | None = None,
        truncate: bool = False,
        on_loading: OnLoading | None = None,
    ) -> Ranking:
        """Return the scores of documents for a query, the best first; with `top_n` only so many.

        Raises:
            ServerError: no model makes scores, a text is too long, or the daemon could not compute it.
            uma_protocol.LocalProtocolError, trio.BusyResourceError, RuntimeError: as :meth:`embed`.
        """
        scores: list[Score] = []
        n_tokens = first = 0
        options = {"model": model, "truncate": truncate, "progress": on_loading is not None}
        for request in rerank_requests(query, documents, top_n=top_n, **options):
            run = Run(request, on_loading)
            scores += scores_of(await self._items(run, first), first)
            n_tokens, first = n_tokens + prompt_tokens(run.eos), first + len(request.documents)
        scores.sort(key=lambda score: -score.score)
        return Ranking(scores[:top_n], n_tokens)

    async def metrics(self) -> dict[str, Any]:
        """Return the daemon's metrics. May be called while a generation runs."""
        answer = await self._ask(GetMetrics())
        return answer.metrics if isinstance(answer, Metrics) else {}

    async def sessions(self) -> tuple[SessionInfo, ...]:
        """Return all requests that run or wait in the daemon.

        May be called while a generation runs.
        """
        return (await self.overview()).sessions

    async def overview(self, *, ticks: int | None = None) -> Sessions:
        """Return what runs and waits, memory and models, and so many of the latest ticks.

        May be called while a generation runs.
        """
        answer = await self._ask(ListSessions(ticks))
        return answer if isinstance(answer, Sessions) else Sessions(())

    async def explain(self, request: int | None = None, *, ticks: int | None = None) -> Explanation:
        """Return how the latest requests, or the one with this handle, spent their time.

        `ticks` is the number of ticks to return, up to 1000: around the worst gap of that request,
        or else the latest. By default a few ticks are returned for one request and none otherwise.
        May be called while a generation runs.

        Raises:
            ServerError: no record of the request is kept any more (``E_PROTO_005``).
        """
        answer = await self._ask(Explain(request=request, ticks=ticks))
        return answer if isinstance(answer, Explanation) else Explanation(())

    async def prefix(
        self,
        action: PrefixAction = "list",
        *,
        session: str | None = None,
        seconds: int | None = None,
    ) -> Prefixes:
        """Return the cached prefixes of this user, after clearing them or pinning a session.

        Raises:
            ServerError: `pin` without a session (``E_PROTO_003``).
        """
        answer = await self._ask(Prefix(action=action, session=session, seconds=seconds))
        return answer if isinstance(answer, Prefixes) else Prefixes(0, 0)

    async def load(self, model: str) -> None:
        """Load a configured model, and return when it is loaded. For operators. Cancelled, other waiters keep the loading.

        Raises:
            ServerError: there is no such model (``E_MODEL_002``), or it cannot be loaded (``E_MODEL_001``).
        """
        await self._ask(LoadModel(model))

    async def unload(self, model: str) -> None:
        """Have a configured model unloaded that no request uses; returns when its memory is free. For operators.

        Raises:
            ServerError: there is no such model (``E_MODEL_002``), or it is in use (``E_MODEL_003``).
        """
        await self._ask(UnloadModel(model))

    async def set_priority(self, request: int, priority: Priority) -> None:
        """Move a request to another lane. `request` is the handle that :meth:`sessions` returns.

        Raises:
            ServerError: the request does not run any more (``E_PROTO_005``).
        """
        await self._ask(SetPriority(request=request, priority=priority))

    async def cancel(self, request: int) -> None:
        """End a request of this user's. `request` is the handle that :meth:`sessions` returns.

        Raises:
            ServerError: none of this user's requests runs under that handle (``E_PROTO_005``).
        """
        await self._ask(Cancel(request=request))

    async def open(self) -> None:
        """Connect; `connect` calls this. Raises :class:`ConnectionFailed`."""
        retries = pauses()
        while True:
            try:
                self._link = await Link.dial(self.loop, self._path)
            except ConnectionFailed:
                pause = next(retries, None)
                if not self._reconnect or pause is None:
                    raise
                await self.loop.sleep(pause)
            else:
                return

    def close(self) -> None:
        """Close the connection; the daemon cancels its request. Idempotent."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _ask(self, request: Request) -> Event:
        # On a connection of its own: the daemon closes it after metrics, and this one may be busy.
        link = await Link.dial(self.loop, self._path)
        try:
            await link.send(request)
            answer = await link.next_event()
        finally:
            link.close()
        if isinstance(answer, Error):
            raise ServerError.of(answer)
        return answer

    async def _items(self, run: Run, first: int) -> list[Item]:
        """Return all events before the end of a request; interrupted, it ends the request.

        Its texts are those from number `first` on, which errors count from.
        """
        found: list[Item] = []
        try:
            while (item := await self.next_item(run)) is not None:
                found.append(item)
        except ServerError as error:
            raise counted(error, first) from None
        except BaseException:
            await self.leave(run)
            raise
        return found

    # --- for Generation ---

    async def next_item(self, run: Run) -> Item | None:
        """Return the next item of `run`, or None at its end. Sends the request first if necessary.

        Raises:
            ServerError, ConnectionFailed: the request ended with this error.
            trio.BusyResourceError (trio), RuntimeError (asyncio): another generation runs on this connection.
        """
        retries = pauses()
        while True:
            try:
                if not run.started:
                    await self._start(run)
                return await self._receive(run)
            except (ServerError, ConnectionFailed) as exc:
                pause = next(retries, None)
                if pause is None or not self._may_retry(run, exc):
                    run.over = True
                    raise
                if isinstance(exc, ServerError) and exc.retry_after_ms is not None:
                    pause = max(pause, exc.retry_after_ms / 1e3)
                run.started = False
                await self.loop.sleep(pause)

    async def leave(self, run: Run) -> None:
        """Cancel `run` in the daemon and read until its terminal event.

        Shielded from cancellation, for two seconds at most; then the connection is closed, which
        cancels it, too.
        """
        run.abandoned = True
        link = self._link
        if not run.started or run.over or link is None or link.broken:
            run.over = True
            return
        try:
            await self.loop.shielded(_LEAVE_S, lambda: self._read_to_end(run, link))
        finally:
            if not run.over:
                link.close()
            run.over = True

    def abandon(self, run: Run) -> None:
        """Cancel `run` without waiting for its end; the next generation reads until that end."""
        run.abandoned = True
        if run.started and not run.over and not run.cancel_sent and self._link is not None:
            run.cancel_sent = self._link.send_nowait(Cancel(run.request.id))

    async def _start(self, run: Run) -> None:
        before = self._run
        if before is not None and before.started and not before.over:
            if not before.abandoned:
                raise self.loop.busy(
                    "a generation runs on this connection: finish it, leave its block, "
                    "or open another connection"
                )
            await self.leave(before)
        if self._link is None or self._link.broken:
            if not self._reconnect:
                raise ConnectionFailed(
                    "the connection is closed, as after each fatal error; connect again, "
                    "or use connect(reconnect=True)"
                )
            self._link = await Link.dial(self.loop, self._path)
        self._run = run
        await self._link.send(run.request)
        run.started = True

    async def _read_to_end(self, run: Run, link: Link) -> None:
        with contextlib.suppress(ServerError, ConnectionFailed):
            if not run.cancel_sent:
                run.cancel_sent = True
                await link.send(Cancel(run.request.id))
            while not run.over:
                await self._receive(run)

    async def _receive(self, run: Run) -> Item | None:
        link = self._link
        if link is None:
            raise ConnectionFailed("the client is closed")
        while True:
            event = await link.next_event()
            if isinstance(event, Token | Vectors | Scores):
                run.n_items += 1
                return event
            if isinstance(event, Loading) and run.on_loading is not None and not run.abandoned:
                run.on_loading(event)
            if isinstance(event, End):
                run.ends[event.choice] = event
                if (token := held_back(event)) is not None:
                    return token
            if isinstance(event, Eos):
                return self._ended(run, event)
            if isinstance(event, Error) and (event.fatal or event.id == run.request.id):
                if event.fatal:
                    link.close()
                raise ServerError.of(event)
            # Otherwise it answers a cancel that was too late for an earlier generation.

    def _ended(self, run: Run, eos: Eos) -> Token | None:
        run.eos, run.over = eos, True
        self.last = eos
        if eos.reason == "error" and not run.abandoned:
            raise ServerError.of(eos)
        return held_back(eos)

    def _may_retry(self, run: Run, exc: Exception) -> bool:
        if not self._reconnect or run.n_items or run.ends or run.eos is not None:
            return False
        return not isinstance(exc, ServerError) or exc.retryable


class Generation:
    """One request. Iterate over it to get its tokens.

    The texts of all tokens together are the answer, also with ``stream=False``. The last
    :class:`Token` may have the `token_id` ``HELD_BACK``: text that was held back until the end.
    `reasoning` of a token is the model's reasoning. `calls` of a token are pieces of tool calls;
    :meth:`calls` returns complete ones.

    With `n` above 1 there are several answers with interleaved tokens. `choice` of a token is the
    number of its answer, :meth:`texts` collects all answers, and `ends` has the end of each.

    Leaving early: use the generation as a context manager. Leaving the block in any way, or
    cancelling it while it waits for a token, cancels the request in the daemon within a short
    shielded time; the connection remains usable. Without the block, a loop that breaks drops the
    object; the request is then cancelled without waiting, and the next generation on the connection
    first reads until the end of this one.
    """

    def __init__(
        self,
        client: AnyClient,
        request: Generate,
        on_loading: OnLoading | None = None,
    ) -> None:
        self._client = client
        self._run, self._n = Run(request, on_loading), request.n
        self._thread = threading.get_ident()

    @property
    def id(self) -> str:
        """The request's id."""
        return self._run.request.id

    @property
    def eos(self) -> Eos | None:
        """The terminal event, when it has arrived."""
        return self._run.eos

    @property
    def ends(self) -> tuple[End, ...]:
        """The ends of the answers that have ended, by `choice`. With `n` 1 use `eos`."""
        return tuple(end for _, end in sorted(self._run.ends.items()))

    async def text(self) -> str:
        """Return the rest of the text.

        Raises:
            ValueError: the request has several answers.
        """
        self._only("texts()")
        return "".join([token.text async for token in self])

    async def texts(self) -> list[str]:
        """Return the rest of the text of each answer, by `choice`.

        Raises:
            ServerError: one of the answers failed; `ends` has the end of each.
        """
        texts: list[list[str]] = [[] for _ in range(self._n)]
        async for token in self:
            texts[token.choice].append(token.text)
        return ["".join(pieces) for pieces in texts]

    async def calls(self) -> tuple[ToolCall, ...]:
        """Read until the end and return the tool calls of the answer, each complete.

        Raises:
            ValueError: the request has several answers.
        """
        self._only("`ends` after the last token")
        async for _ in self:
            pass
        return () if self.eos is None else self.eos.calls

    def _only(self, instead: str) -> None:
        n = self._n
        if n > 1:
            raise ValueError(f"there are {n} answers to this request; use {instead}")

    async def aclose(self) -> None:
        """Cancel the request if it still runs. Shielded, see the class. Idempotent."""
        await self._client.leave(self._run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        run = self._run
        if run.over:
            await self._client.loop.checkpoint()
            raise StopAsyncIteration
        try:
            token = await self._client.next_item(run)
        except self._client.loop.cancelled:
            await self._client.leave(run)
            raise
        if not isinstance(token, Token):  # None: nothing else answers a `generate`
            raise StopAsyncIteration
        return token

    def __del__(self) -> None:
        # An async generator would need the loop's hooks and a task to be closed here. We need one
        # send that does not wait, but only on the thread that the connection belongs to.
        if threading.get_ident() == self._thread:
            self._client.abandon(self._run)
        else:
            self._run.abandoned = True


class Run:
    """The state of one request, shared by the client and the task that waits for its answer."""

    __slots__ = (
        "abandoned",
        "cancel_sent",
        "ends",
        "eos",
        "n_items",
        "on_loading",
        "over",
        "request",
        "started",
    )

    def __init__(self, request: Work, on_loading: OnLoading | None = None) -> None:
        self.request = request
        self.on_loading = on_loading
        self.started = False  # it is sent, and the daemon works on it
        self.over = False  # nothing more will come
        self.abandoned = False  # its reader has left
        self.cancel_sent = False
        self.n_items = 0
        self.ends: dict[int, End] = {}
        self.eos: Eos | None = None
