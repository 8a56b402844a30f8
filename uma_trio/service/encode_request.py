"""A request for vectors or scores: listed, explained and ended by its handle like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from uma_protocol.errors import Code
from uma_trio.models.loaded import EncoderModel
from uma_trio.models.model import Model
from uma_trio.service.ask import Origin, Refusal
from uma_trio.service.embedding import Embedder
from uma_trio.service.loading import WaitsForModel
from uma_trio.words import Gives, Lane

if TYPE_CHECKING:
    from uma_trio.service.service import Service

_AGAIN_S: Final = 1.0


class RequestEnded(Exception):
    """Somebody ended the request: as cancelled, or with an error code and a message."""

    def __init__(self, code: str | None, message: str | None) -> None:
        super().__init__(message or "the request was cancelled")
        self.code, self.message = code, message


class EncodeRequest(WaitsForModel):
    """One request for vectors or scores, from when it came. Its texts are computed in the time that readers leave."""

    def __init__(self, service: Service, origin: Origin) -> None:
        super().__init__(service.new_handle(), origin, "background", None, service.clock())
        self._service = service
        #: How many tokens its texts have, once they are accepted, and how it was answered.
        self.n_tokens, self.reason = 0, ""
        #: Called when it begins to wait for its model, and when its texts wait for the engine.
        self.on_wait: Callable[[], object] = lambda: None
        self.on_accept: Callable[[], object] = lambda: None

    def move_to(self, lane: Lane) -> None:
        """Do nothing: texts are computed in the time that streams leave, in any lane."""

    def accept(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.on_accept()

    def _log(self) -> None:
        """Write the line of the request, as each answer has one: who asked, how much, how long it took. Never text."""
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
        """Return the model that is asked for, once it is loaded; until the block ends it stays so, and this is listed.

        A name that no model has is that of the only one that gives this, but not if it has to be `exact`.

        Raises:
            Refusal: there is none, it cannot be loaded, or the daemon ends.
            RequestEnded: it was ended meanwhile.
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
            if self.n_tokens > 0:  # else it was refused, or left before it was computed
                self._log()
        if self.ended is not None:
            raise RequestEnded(*self.ended)
