"""The configured models, loaded or not, as the service sees what loads and unloads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from uma_trio.backend.base import Adapter
from uma_trio.backend.base import ModelFacts as ModelFacts
from uma_trio.service.served import ServedModel
from uma_trio.words import Gives


class ShelfEntry(Protocol):
    """A configured model, loaded or not."""

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it."""

    @property
    def configured(self) -> tuple[str, ...]:
        """Those of them that the operator gave it; the others are its file's."""

    @property
    def served(self) -> ServedModel | None:
        """The model, if it is loaded and takes requests."""

    @property
    def gives(self) -> Gives:
        """What it makes of a text."""

    @property
    def path(self) -> str:
        """Its file as it was configured, by a path or a name; "" for the bundled one."""

    async def facts(self) -> ModelFacts:
        """Return what its file says, also while it is not loaded. Raises :class:`Refusal`."""

    @property
    def known(self) -> Sequence[Adapter]:
        """The adapters that requests may use with it."""

    @property
    def state(self) -> str:
        """Whether it is unloaded, loading, loaded, draining, unloading or failed."""

    @property
    def progress(self) -> float:
        """How much of it is loaded, 0 to 1."""

    @property
    def size(self) -> int:
        """About how many bytes it takes, 0 if that is not known."""

    @property
    def n_ctx(self) -> int:
        """The tokens of its context."""

    @property
    def is_tried(self) -> bool:
        """Whether its file was found to be sound, and is about to be loaded."""

    @property
    def hidden(self) -> bool:
        """Whether it is left out of lists."""

    @property
    def wait(self) -> str:
        """What a request for it waits for, as a sentence without an end; "" where it is loaded."""

    @property
    def expires_s(self) -> float | None:
        """How long it stays loaded if nobody asks it; None: as long as nobody needs its memory."""


EntryT = TypeVar("EntryT", bound=ShelfEntry)


class Shelf(Protocol[EntryT]):
    """What loads and unloads models. The first of `entries` answers requests that name none."""

    entries: Sequence[EntryT]

    @property
    def bases(self) -> Sequence[EntryT]:
        """The models without adapters."""

    def with_adapters(self, entry: EntryT, asked: Sequence[Mapping[str, object]]) -> str:
        """Return the name of a model with these adapters in place of its own. Raises :class:`Refusal`."""

    def find(self, name: str, gives: Gives | None = None) -> EntryT | None:
        """Return the model of this name, of several that a file calls so one that `gives` what is asked. Raises :class:`Refusal`."""

    async def ready(self, entry: EntryT, payer: str = "", *, by_name: bool = False) -> ServedModel:
        """Return a model once it is loaded. It stays so at least until whoever asked can begin a use of it.

        `payer` is whose machine time a loading is. `by_name`: somebody asks to have it loaded, and not for an
        answer. Raises :class:`Refusal`.
        """

    async def unload(self, entry: EntryT, *, with_variants: bool = False) -> bool:
        """Unload a model that no request, and no variant, has; False if it is in use or not loaded.

        Idle variants may go `with_variants`.
        """

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop the saved prefixes of unloaded models in the namespaces that are `mine`."""

    def keep(self, entry: EntryT, seconds: float) -> None:
        """Keep a model loaded for so long behind its latest request."""
