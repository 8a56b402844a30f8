"""What comes in and what goes out over HTTP, as values."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

Headers = tuple[tuple[str, str], ...]


@frozen
class Head:
    """A request as far as its empty line. Header names are in lower case.

    `path` is decoded, without doubled slashes and without one at its end; `is_folder` is whether one was there. `app` is what the program calls itself: a label for people, which grants nothing.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    version: str = "1.1"
    app: str | None = None
    is_folder: bool = False


@frozen
class Reply:
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = field(default=())
