"""What the handlers of all requests share: the service, the settings, and the model that a request names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from attrs import evolve, frozen

from uma_trio.http.errors import Fault, fault_of
from uma_trio.http.pieces import JsonLimits
from uma_trio.http.settings import Settings
from uma_trio.models.loaded import LoadedModel
from uma_trio.service.ask import Door, Refusal
from uma_trio.service.fair import RunBlocking
from uma_trio.service.service import Service
from uma_trio.words import MIB

_MAX_IDS: Final = MIB


@frozen(kw_only=True, eq=False)
class Context:
    """What a handler needs. `name` is the daemon's in this life, part of ids; `started` is in seconds since the epoch.

    `named` is the model that the request names; without it the default one is `served`.
    """

    settings: Settings
    service: Service
    name: str
    started: int
    run_blocking: RunBlocking
    named: LoadedModel | None = None

    def limits(self, *, with_ids: bool = False) -> JsonLimits:
        """Return the bounds of a body; `with_ids`: and as many token ids as the slots hold."""
        ids = max(one.max_tokens_at_once for one in self.service.models.loaded) if with_ids else 0
        settings = self.settings
        return JsonLimits(
            values=settings.body_values + min(ids, _MAX_IDS), text=settings.max_prompt_bytes
        )

    @property
    def served(self) -> LoadedModel:
        """The model of the request."""
        return self.service.models.default if self.named is None else self.named

    def of(self, name: str | None) -> Context:
        """Return the context of a request that names a loaded model. Raises :class:`Refusal`."""
        return evolve(self, named=self.service.models.loaded_model(name))

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Context]:
        """Return the context of a request once its model is loaded; it stays so until the block ends.

        Raises:
            Refusal: there is no model of this name, or it cannot be loaded.
        """
        with self.using_loaded(await self.service.ready(name)) as found:
            yield found

    @contextmanager
    def using_loaded(self, served: LoadedModel) -> Iterator[Context]:
        """Return the context of a request of a loaded model, which stays so until the block ends."""
        end = served.uses.begin()
        try:
            yield evolve(self, named=served)
        finally:
            end()

    def each(self) -> tuple[Context, ...]:
        """Return the context of each loaded model, the default one first."""
        return tuple(evolve(self, named=served) for served in self.service.models.loaded)

    @property
    def door(self) -> Door:
        """What holds for every request over HTTP."""
        most = self.settings.max_prompt_bytes
        return Door(max_prompt_bytes=most, option="--http-max-prompt-bytes")


def fault_of_refusal(refusal: Refusal) -> Fault:
    """Return how a request that the service refuses is answered."""
    if refusal.field == "model":
        return Fault(404, refusal.message, code="model_not_found", param="model")
    more = {}
    if refusal.prompt_tokens is not None:
        more = {"n_prompt_tokens": refusal.prompt_tokens, "n_ctx": refusal.context}
    return fault_of(
        refusal.code,
        refusal.message,
        param=refusal.field,
        retry_after_s=refusal.retry_after_s,
        more=more,
    )
