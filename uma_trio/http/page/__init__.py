"""`/ui/`: the chat page, static files of this package.

The page is public and contains no data: it sends the same requests as any program, with the key that a person types into it. It may
load nothing from another host (:data:`POLICY`), and markup is made from text in one place only, by DOMPurify: browsers with Trusted
Types refuse it everywhere else.
"""

from __future__ import annotations

import gzip
import re
from functools import cache
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import trio
from attrs import frozen

from uma_trio.http.errors import not_found
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Headers, Reply

#: The content security policy of the page.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify uma-worker"
)
#: What is served, by suffix. Licences and checksums of the libraries are in the package, and not served.
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_HEADERS: Headers = (
    ("Content-Security-Policy", POLICY),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
    ("Vary", "Accept-Encoding"),
)
_HERE: Final = "/ui/"


@frozen
class File:
    """One file of the page. `packed` is `data` by gzip, or None where that is no smaller; `digest` changes with the bytes."""

    data: bytes
    packed: bytes | None
    content_type: str
    digest: str


_files: Final[dict[str, File]] = {}


@cache
def names() -> frozenset[str]:
    """Return the paths below `/ui/` that are served."""
    return frozenset(_walk(resources.files(__package__) / "static"))


def _walk(folder: Traversable, prefix: str = "") -> list[str]:
    found = []
    for each in folder.iterdir():
        if each.is_dir():
            found += _walk(each, f"{prefix}{each.name}/")
        elif each.name.rpartition(".")[2] in _TYPES:
            found.append(prefix + each.name)
    return found


def read(name: str) -> File:
    """Read and compress a file of :func:`names`; takes up to 20 ms."""
    data = (resources.files(__package__) / "static").joinpath(*name.split("/")).read_bytes()
    packed = gzip.compress(data, 9, mtime=0)
    return File(
        data=data,
        packed=packed if len(packed) < len(data) else None,
        content_type=_TYPES[name.rpartition(".")[2]],
        digest=sha256(data).hexdigest()[:24],
    )


async def page(exchange: Exchange) -> Reply:
    """Return the page for people, or one of its files."""
    head = exchange.head
    name = head.path.partition(_HERE)[2] or "index.html"
    if name not in names():
        raise not_found()
    if name not in _files:
        _files[name] = await trio.to_thread.run_sync(read, name)
    file = _files[name]
    packed = file.packed if _accepts_gzip(head) else None
    # The two encodings are different representations, with different tags (RFC 9110, 8.8.3.3).
    headers = (("ETag", f'"{file.digest}{"" if packed is None else "-gzip"}"'), *_HEADERS)
    if file.digest in head.headers.get("if-none-match", ""):
        return Reply(304, headers=headers)
    if packed is None:
        return Reply(200, file.data, content_type=file.content_type, headers=headers)
    headers += (("Content-Encoding", "gzip"),)
    return Reply(200, packed, content_type=file.content_type, headers=headers)


def _accepts_gzip(head: Head) -> bool:
    for each in head.headers.get("accept-encoding", "").lower().split(","):
        coding, _, weight = each.partition(";")
        if coding.strip() == "gzip":
            return re.fullmatch(r"\s*q=0(\.0*)?\s*", weight) is None
    return False


async def to_page(_exchange: Exchange) -> Reply:
    """Send a browser to the page."""
    return Reply(307, headers=(("Location", "ui/"), ("Vary", "Accept")))


def is_browser(exchange: Exchange) -> bool:
    """Whether the client is a browser: browsers ask for HTML, programs do not."""
    return "text/html" in exchange.head.headers.get("accept", "")
