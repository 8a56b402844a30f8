"""`/ui/`: the page for people. Three files of this package, served as they are.

The page is public and has no data: it asks for everything with the same requests as any program, and with
the key that a person types into it. It may load nothing from another host and run nothing that is not in
its one script (:data:`POLICY`). The script writes what comes from models, programs and people with
``textContent`` only.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Final

from attrs import frozen

from uma_trio.http.errors import not_found
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers, Reply
from uma_trio.http.settings import Shared

#: The content security policy of the page.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES: Final = {
    "index.html": "text/html; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
}
_HEADERS: Headers = (
    ("Content-Security-Policy", POLICY),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)
_HERE: Final = "/ui/"


@frozen
class File:
    """One file of the page; `etag` changes with its bytes."""

    data: bytes
    kind: str
    etag: str


@cache
def files() -> dict[str, File]:
    """Return the files by their names. They are read once: 60 kB at most."""
    found = {}
    for name, kind in _TYPES.items():
        data = resources.files(__package__).joinpath(name).read_bytes()
        found[name] = File(data, kind, f'"{sha256(data).hexdigest()[:24]}"')
    return found


async def page(exchange: Exchange, shared: Shared) -> Reply:
    """Return the page for people, or one of its files."""
    head = exchange.head
    name = head.path.partition(_HERE)[2] or "index.html"
    found = files().get(name)
    if found is None:
        raise not_found()
    headers = (("ETag", found.etag), *_HEADERS)
    if found.etag in head.headers.get("if-none-match", ""):
        return Reply(304, headers=headers)
    return Reply(200, found.data, content_type=found.kind, headers=headers)


async def to_page(exchange: Exchange, shared: Shared) -> Reply:
    """Send a browser to the page."""
    return Reply(307, headers=(("Location", "ui/"), ("Vary", "Accept")))


def is_browser(exchange: Exchange) -> bool:
    """Whether a person looks: browsers ask for HTML, programs do not."""
    return "text/html" in exchange.head.headers.get("accept", "")
