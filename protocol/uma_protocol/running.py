"""The request that runs on a connection: which of its answers are open, and what may be said of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .events import (
    End,
    Eos,
    Event,
    Loading,
    Scores,
    Vectors,
)
from .requests import (
    Embed,
    Generate,
    Request,
    Rerank,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_RESULTS: Mapping[type, type] = MappingProxyType({Embed: Vectors, Rerank: Scores})
"""What comes before the `eos` of a request that has no choices."""
_ARE_RESULTS = frozenset(_RESULTS.values())


class OpenRequest:
    """What both ends know of the request that runs, if one does. `id` stays behind in ERROR."""

    __slots__ = ("_n", "_result", "_told", "id", "open")

    def __init__(self) -> None:
        self.id: str | None = None
        self.open: set[int] = set()  # choices that are not at their end
        self._n = 0
        self._result: type | None = None
        self._told = False  # how far the loading of its model is

    def begin(self, request: Work) -> None:
        """Note which request runs from now on."""
        self.id, self._result = request.id, _RESULTS.get(type(request))
        self._n = request.n if isinstance(request, Generate) else 0
        self._told = request.progress
        self.open = set(range(self._n))

    def astray(self, event: Any) -> str | None:
        """What is wrong with an event that is said to be of the request that runs, in words."""
        if event.id != self.id:
            return "an event of a request that does not run here"
        if type(event) is Eos:
            return "eos before the end of each choice" if self._n > 1 and self.open else None
        if type(event) is Loading:
            return None if self._told else "the progress of a loading, for which nobody asked"
        if type(event) in _ARE_RESULTS:
            return None if type(event) is self._result else "a result that nobody asked for"
        if event.choice not in self.open:
            return "an event of a choice that is over, or that nobody asked for"
        if type(event) is End and self._n == 1:
            return "the end of a choice that is the only one"
        return None

    def follow(self, event: Request | Event) -> None:
        """Note which choice, or that the request, is over with an event."""
        if type(event) is End:
            self.open.discard(event.choice)
        elif type(event) is Eos:
            self.id = None
            self.open = set()
