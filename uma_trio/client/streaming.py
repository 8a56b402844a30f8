"""The trio client: a connection, and the generations that run on it one after the other.

Nothing runs in the background, so there is no nursery: what your code raises leaves the blocks
of :func:`connect` and :class:`Generation` as it is, never in a group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self, Unpack

import trio

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
    Metrics,
    Prefix,
    PrefixAction,
    Prefixes,
    Priority,
    Request,
    SessionInfo,
    Sessions,
    SetPriority,
    Token,
    ToolCall,
)
from uma_trio.client.errors import ConnectionFailed, ServerError
from uma_trio.client.link import Link, pauses, socket_path_of
from uma_trio.client.request import Chat, Params, build_request, held_back

_LEAVE_S = 2.0


@asynccontextmanager
async def connect(
    socket_path: str | os.PathLike[str] | None = None, *, reconnect: bool = False
) -> AsyncIterator[Client]:
    """Connect to the daemon; leaving the block closes the connection and ends what runs.

    Args:
        socket_path: where the daemon serves; by default ``$UMA_SOCK``, or ``/tmp/uma.sock``.
        reconnect: try again, a few times with a growing and jittered pause, when the daemon
            cannot be reached, the connection is lost or the daemon says "later"; for a
            generation only as long as no token of it has come.

    Raises:
        ConnectionFailed: nobody serves there, or another user does.
    """
    client = Client(socket_path, reconnect=reconnect)
    try:
        await client.open()
        yield client
    finally:
        client.close()


class Client:
    """A connection to the daemon, for one task. Made by :func:`connect`, which also closes it.

    A program that only asks (:meth:`metrics`, :meth:`sessions`, :meth:`explain`,
    :meth:`set_priority`) may make one by itself and need not open it: each question has a
    connection of its own.
    """

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
        self, prompt: str | None = None, *, messages: Chat | None = None, **params: Unpack[Params]
    ) -> Generation:
        """Ask for text that continues `prompt`, or that answers the chat `messages`.

        Nothing is sent until it is iterated. Use it with ``async with`` if you may leave before
        its end; see :class:`Generation`.

        Raises:
            TypeError: a parameter that does not exist.
            uma_protocol.LocalProtocolError: a value that the protocol does not allow.
        """
        return Generation(self, build_request(prompt, messages, params))

    async def metrics(self) -> dict[str, Any]:
        """Return the daemon's metrics. May be called while a generation runs."""
        answer = await self._ask(GetMetrics())
        return answer.metrics if isinstance(answer, Metrics) else {}

    async def sessions(self) -> tuple[SessionInfo, ...]:
        """Return all requests that run or wait in the daemon, like `metrics`."""
        answer = await self._ask(ListSessions())
        return answer.sessions if isinstance(answer, Sessions) else ()

    async def explain(self, request: int | None = None, *, ticks: int | None = None) -> Explanation:
        """Return how the latest requests spent their time, or the one with this handle.

        `ticks` ticks come with it, up to 1000: around the worst gap of that request, or the
        latest; by default a few for one request and else none. Like `metrics` otherwise.

        Raises:
            ServerError: nothing is known of that request (``E_PROTO_005``).
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
        """Return what of this user's prompts the daemon has; clear it before, or pin a session.

        Raises:
            ServerError: `pin` without a session (``E_PROTO_003``).
        """
        answer = await self._ask(Prefix(action=action, session=session, seconds=seconds))
        return answer if isinstance(answer, Prefixes) else Prefixes(0, 0)

    async def set_priority(self, request: int, priority: Priority) -> None:
        """Move a request, named by the handle that :meth:`sessions` shows, to another lane.

        Raises:
            ServerError: it does not run any more (``E_PROTO_005``).
        """
        await self._ask(SetPriority(request=request, priority=priority))

    async def open(self) -> None:
        """Connect; :func:`connect` does it for you. Raises :class:`ConnectionFailed`."""
        retries = pauses()
        while True:
            try:
                self._link = await Link.dial(self._path)
            except ConnectionFailed:
                pause = next(retries, None)
                if not self._reconnect or pause is None:
                    raise
                await trio.sleep(pause)
            else:
                return

    def close(self) -> None:
        """Close the connection; the daemon ends what runs on it. Idempotent."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _ask(self, request: Request) -> Event:
        # On a connection of its own: the daemon closes it after metrics, and ours may be busy.
        link = await Link.dial(self._path)
        try:
            await link.send(request)
            answer = await link.next_event()
        finally:
            link.close()
        if isinstance(answer, Error):
            raise ServerError.of(answer)
        return answer

    # --- for Generation ---

    async def next_token(self, run: Run) -> Token | None:
        """Return the next token of `run`, sending it first if need be; None at its end.

        Raises:
            ServerError, ConnectionFailed: it ended that way.
            trio.BusyResourceError: another generation runs on this connection.
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
                await trio.sleep(pause)

    async def leave(self, run: Run) -> None:
        """End `run` at the daemon, and read on to its terminal event.

        Shielded, for two seconds at most; then the connection is closed, which ends it too.
        """
        run.abandoned = True
        link = self._link
        if not run.started or run.over or link is None or link.broken:
            run.over = True
            return
        with trio.move_on_after(_LEAVE_S, shield=True) as scope:
            try:
                if not run.cancel_sent:
                    run.cancel_sent = True
                    await link.send(Cancel(run.request.id))
                while not run.over:
                    await self._receive(run)
            except (ServerError, ConnectionFailed):
                link.close()
        if scope.cancelled_caught:
            link.close()
        run.over = True

    def abandon(self, run: Run) -> None:
        """Ask for the end of `run` without waiting for it: the next generation will."""
        run.abandoned = True
        if run.started and not run.over and not run.cancel_sent and self._link is not None:
            run.cancel_sent = self._link.send_nowait(Cancel(run.request.id))

    async def _start(self, run: Run) -> None:
        before = self._run
        if before is not None and before.started and not before.over:
            if not before.abandoned:
                raise trio.BusyResourceError(
                    "a generation runs on this connection: finish it, leave its block, "
                    "or open another connection"
                )
            await self.leave(before)
        if self._link is None or self._link.broken:
            if not self._reconnect:
                raise ConnectionFailed("the connection is closed; connect again")
            self._link = await Link.dial(self._path)
        self._run = run
        await self._link.send(run.request)
        run.started = True

    async def _receive(self, run: Run) -> Token | None:
        link = self._link
        if link is None:
            raise ConnectionFailed("the client is closed")
        while True:
            event = await link.next_event()
            if isinstance(event, Token):
                run.n_tokens += 1
                return event
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
            # Else it answers a cancel that came too late for an earlier generation.

    def _ended(self, run: Run, eos: Eos) -> Token | None:
        run.eos, run.over = eos, True
        self.last = eos
        if eos.reason == "error" and not run.abandoned:
            raise ServerError.of(eos)
        return held_back(eos)

    def _may_retry(self, run: Run, exc: Exception) -> bool:
        if not self._reconnect or run.n_tokens or run.ends or run.eos is not None:
            return False
        return not isinstance(exc, ServerError) or exc.retryable


class Generation:
    """One request: iterate it for its tokens.

    The last :class:`Token` may have the `token_id` ``HELD_BACK``: text that waited for the end.
    The texts of all tokens together are the answer, also with ``stream=False``. What the model thinks
    before it answers is in their `reasoning`; calls of tools come in pieces in their `calls`, and
    whole from :meth:`calls`.

    With `n` above 1 there are several answers, whose tokens come in between each other: `choice` says
    whose each is, :meth:`texts` collects them, and `ends` says how each ended.

    Leaving early. Used as a context manager, it is ended at the daemon when the block is left,
    whichever way, within a short shielded time, and the connection stays usable. The same
    happens when it is cancelled while it waits for a token. Without the block, a loop that
    breaks leaves it to Python to drop the object; the daemon is then told at once, without
    waiting, and the next generation on the connection reads to the end of this one first.
    """

    def __init__(self, client: Client, request: Generate) -> None:
        self._client = client
        self._run = Run(request)
        self._thread = threading.get_ident()

    @property
    def id(self) -> str:
        """The request's id."""
        return self._run.request.id

    @property
    def eos(self) -> Eos | None:
        """The terminal event, once it has come."""
        return self._run.eos

    @property
    def ends(self) -> tuple[End, ...]:
        """How the answers ended that are at their end, by `choice`; with `n` 1 `eos` says it."""
        return tuple(end for _, end in sorted(self._run.ends.items()))

    async def text(self) -> str:
        """Return all the text that is still to come.

        Raises:
            ValueError: there are several answers.
        """
        self._only("texts()")
        return "".join([token.text async for token in self])

    async def texts(self) -> list[str]:
        """Return all the text of each answer that is still to come, by `choice`.

        Raises:
            ServerError: one of the answers failed; `ends` says which, and how the others ended.
        """
        texts: list[list[str]] = [[] for _ in range(self._run.request.n)]
        async for token in self:
            texts[token.choice].append(token.text)
        return ["".join(pieces) for pieces in texts]

    async def calls(self) -> tuple[ToolCall, ...]:
        """Read on to the end; return the calls of tools that the answer makes, each whole.

        Raises:
            ValueError: there are several answers.
        """
        self._only("`ends` behind the last token")
        async for _ in self:
            pass
        return () if self.eos is None else self.eos.calls

    def _only(self, instead: str) -> None:
        n = self._run.request.n
        if n > 1:
            raise ValueError(f"there are {n} answers to this request; use {instead}")

    async def aclose(self) -> None:
        """End the request if it still runs. Shielded, see the class. Idempotent."""
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
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        try:
            token = await self._client.next_token(run)
        except trio.Cancelled:
            await self._client.leave(run)
            raise
        if token is None:
            raise StopAsyncIteration
        return token

    def __del__(self) -> None:
        # An async generator would need trio's hooks and a task to be closed here. We need one
        # send that does not wait, but only on the thread that the connection belongs to.
        if threading.get_ident() == self._thread:
            self._client.abandon(self._run)
        else:
            self._run.abandoned = True


class Run:
    """What a client and a generation both know of one request."""

    __slots__ = (
        "abandoned",
        "cancel_sent",
        "ends",
        "eos",
        "n_tokens",
        "over",
        "request",
        "started",
    )

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.started = False  # it is sent, and the daemon works on it
        self.over = False  # nothing more will come
        self.abandoned = False  # nobody reads it any more
        self.cancel_sent = False
        self.n_tokens = 0
        self.ends: dict[int, End] = {}
        self.eos: Eos | None = None
