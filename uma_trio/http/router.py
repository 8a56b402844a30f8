"""Which handler answers which path, and what is said where none does. Pure.

Every path is served with ``/v1`` before it once, several times or not at all, and with slashes at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from attrs import frozen

from uma_trio.http.errors import ErrorForm, Fault, not_found, openai_error
from uma_trio.http.guard import Access
from uma_trio.http.message import Head, Reply

Handler = Callable[..., Coroutine[Any, Any, Reply | None]]
"""Answers a request, given its :class:`Exchange`: with a whole reply, or with None after it has streamed one."""

_PREFIX = "/v1"


@frozen
class Route:
    """One method of one path. `errors` writes what goes wrong as its API does; `body` declares the body, for documents.

    One that `watches` has an answer without an end: it takes a turn for each message, and ends when
    the daemon wants the connection back.
    A path that ends in a slash takes whatever stands behind it; if it is `whole`, nothing as well. One that
    is `alone` takes nothing else.
    """

    method: str
    path: str
    handler: Handler
    access: Access = "key"
    errors: ErrorForm = openai_error
    body: object = None
    watches: bool = False
    whole: bool = False
    alone: bool = False

    @property
    def takes_more(self) -> bool:
        """Whether the path is the beginning of those that it stands for."""
        return self.path.endswith("/") and not self.alone


class Router:
    """All routes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._exact.setdefault(route.path, {})[route.method] = route
        self._open_ended = tuple({route.path: None for route in routes if route.takes_more})
        self._whole = {route.path for route in routes if not route.takes_more or route.whole}

    def methods(self, head: Head) -> tuple[str, ...]:
        """Return what can be asked of a path.

        Raises:
            Fault: there is no such path.
        """
        known = tuple(self._at(head))
        return (*known, *(("HEAD",) if "GET" in known else ()), "OPTIONS")

    def find(self, head: Head) -> Route:
        """Return what answers a request; HEAD is answered by GET's.

        Raises:
            Fault: there is no such path, or not with this method.
        """
        routes = self._at(head)
        method = "GET" if head.method == "HEAD" else head.method
        if method not in routes:
            allowed = ", ".join(self.methods(head))
            raise Fault(
                405,
                f"{head.path} takes {allowed}",
                code="method_not_allowed",
                headers=(("Allow", allowed),),
            )
        return routes[method]

    def form(self, head: Head) -> ErrorForm:
        """Return how what goes wrong at a path is written, with any method and also if there is nothing."""
        routes = self._routes(head) or {}
        return next((route.errors for route in routes.values()), openai_error)

    def _at(self, head: Head) -> dict[str, Route]:
        routes = self._routes(head)
        if routes is None:
            raise not_found()
        return routes

    def _routes(self, head: Head) -> dict[str, Route] | None:
        bare = head.path
        while bare == _PREFIX or bare.startswith(f"{_PREFIX}/"):
            bare = bare.removeprefix(_PREFIX) or "/"
        for whole in (f"{bare}/", bare) if head.is_folder else (bare,):
            if whole in self._whole:
                return self._exact[whole]
        for start in self._open_ended:
            if bare.startswith(start) and len(bare) > len(start):
                return self._exact[start]
        return None
