"""Saved pages of prompts and answers: a trie for each namespace, exact to the token.

A node is a page of up to 64 tokens with its cells, below the page before it. All edges have one
page, so saving and restoring a page takes a bounded time, and nothing is ever split. A namespace
cannot see the pages of another, nor whether there are any.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from attrs import define, field, frozen

from uma_trio.backend.base import IntArray, Saved
from uma_trio.policy.fairness import Path
from uma_trio.policy.prefix import PAGE


@frozen
class StoredFile:
    """The file in which a page is, by its name, and its size."""

    name: str
    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes


@define(eq=False)
class Page:
    """One saved page, in memory or in a file. `start` is the position of its first token; computing it took `cost_s`.

    `uses` counts restores and hits in the KV cache. Until `pinned_until` (engine's clock) it is
    evicted last. `locked` is the number of restores that still need it. Of a page in memory `stored` is the same one in a
    file, and `queued` says that it waits to be written.
    """

    tokens: IntArray
    start: int
    parent: Page | None
    owner: Path = ()
    saved: Saved | StoredFile | None = None  # None for the root of a namespace
    cost_s: float = 0.0
    uses: int = 1
    pinned_until: float = 0.0
    locked: int = 0
    value: float = 0.0
    version: int = 0
    children: dict[int, list[Page]] = field(factory=dict)
    digest: bytes = b""
    stored: Page | None = None
    queued: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def n_bytes(self) -> int:
        """The size of its cells and its tokens."""
        return (len(self.saved) if self.saved is not None else 0) + self.tokens.nbytes

    @property
    def is_stored(self) -> bool:
        """Whether it is in a file, too."""
        return self.stored is not None and self.stored.saved is not None

    @property
    def namespace(self) -> str:
        page = self
        while page.parent is not None:
            page = page.parent
        return page.digest.decode()

    @property
    def path(self) -> tuple[Page, ...]:
        pages: list[Page] = []
        page: Page | None = self
        while page is not None and page.parent is not None:
            pages.append(page)
            page = page.parent
        return tuple(reversed(pages))


def below_root(page: Page | None) -> Page | None:
    """Return a page; None for the root of a trie, which has no tokens."""
    return page if page is not None and page.parent is not None else None


def common(one: IntArray, two: IntArray) -> int:
    """Return the length of the common prefix of two token sequences."""
    n = min(len(one), len(two))
    if not n or one[0] != two[0]:
        return 0
    differs = one[:n] != two[:n]
    at = int(differs.argmax())
    return at if differs[at] else n


def digest(before: bytes, tokens: IntArray) -> bytes:
    """Return a name for a page, from its own tokens and all before them."""
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()


class PageTrie:
    """All saved pages by namespace. It evicts nothing by itself."""

    def __init__(self) -> None:
        self._roots: dict[str, Page] = {}

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(self._roots)

    def match(self, namespace: str, tokens: IntArray) -> tuple[Page | None, int]:
        """Return the page in which the longest saved prefix of `tokens` ends, and its length.

        The prefix may end within that page.
        """
        page, found, at = self._match_whole(namespace, tokens)
        while page is not None and at < len(tokens):
            child, n = _longest(page, tokens[at : at + PAGE])
            if child is None:
                break
            at += n
            found = child, at
            page = child if n == PAGE else None
        return found

    def _match_whole(
        self, namespace: str, tokens: IntArray
    ) -> tuple[Page | None, tuple[Page | None, int], int]:
        """Follow full pages; return the last one, the same as what is found so far, and its end.

        A conversation has hundreds of them. Their bytes are compared, in a tenth of the time of :func:`common`.
        """
        page, at, n = self._roots.get(namespace), 0, len(tokens) // PAGE
        raw, firsts, size = tokens.tobytes(), tokens[::PAGE].tolist(), PAGE * tokens.itemsize
        while page is not None and at < n:
            same = raw[at * size : (at + 1) * size]
            for child in page.children.get(firsts[at], ()):
                if child.tokens.tobytes() == same:
                    page, at = child, at + 1
                    break
            else:
                break
        return page, (page if at else None, at * PAGE), at * PAGE

    def add(
        self, namespace: str, parent: Page | None, tokens: IntArray, saved: Saved | StoredFile
    ) -> Page:
        """Put a page behind `parent` (None: at the beginning), which is full.

        Raises ValueError if `parent` is not, or if the page is empty, too long, or there already.
        """
        above = parent or self._roots.get(namespace)
        if above is None:
            above = Page(np.empty(0, np.int32), 0, None, digest=namespace.encode())
            self._roots[namespace] = above
        if not 0 < len(tokens) <= PAGE or (above.parent is not None and len(above.tokens) < PAGE):
            raise ValueError("a page has 1 to 64 tokens, and only full ones are gone on from")
        if self.get(namespace, parent, tokens) is not None:
            raise ValueError("this page is there already")
        page = Page(tokens.copy(), above.end, above, saved=saved)
        page.digest = digest(above.digest, tokens)
        above.children.setdefault(int(tokens[0]), []).append(page)
        return page

    def get(self, namespace: str, parent: Page | None, tokens: IntArray) -> Page | None:
        """Return the page of these very tokens behind `parent`, if it is there."""
        above = parent or self._roots.get(namespace)
        siblings = () if above is None else above.children.get(int(tokens[0]), ())
        return next((p for p in siblings if np.array_equal(p.tokens, tokens)), None)

    def beginnings(self, page: Page) -> list[Page]:
        """Return the shorter pages at the same place that are a prefix of `page`."""
        if page.parent is None:
            return []
        return [
            other
            for other in page.parent.children[int(page.tokens[0])]
            if len(other.tokens) < len(page.tokens)
            and common(other.tokens, page.tokens) == len(other.tokens)
        ]

    def remove(self, page: Page) -> None:
        """Remove a page that has no page after it."""
        above = page.parent
        if above is None or page.children:
            raise ValueError("only a page behind which there is none can go")
        siblings = above.children[int(page.tokens[0])]
        siblings.remove(page)
        if not siblings:
            del above.children[int(page.tokens[0])]
        page.saved = None
        if above.parent is None and not above.children:
            del self._roots[above.digest.decode()]

    def pages(self, namespace: str) -> Iterator[Page]:
        """Yield every page of a namespace, each before the pages after it."""
        root = self._roots.get(namespace)
        left = [] if root is None else [root]
        while left:
            page = left.pop()
            if page.parent is not None:
                yield page
            for siblings in page.children.values():
                left.extend(siblings)

    def absent(self, namespace: str, page: Page | None, tokens: IntArray) -> Iterator[bytes]:
        """Yield the names of the full pages of `tokens` after `page` that are not saved."""
        before = page.digest if page is not None else namespace.encode()
        at = page.end if page is not None else 0
        while at + PAGE <= len(tokens):
            before = digest(before, tokens[at : at + PAGE])
            yield before
            at += PAGE


def _longest(page: Page, tokens: IntArray) -> tuple[Page | None, int]:
    """Return the page behind `page` that shares most with `tokens`, and how much."""
    best: Page | None = None
    most = 0
    for child in page.children.get(int(tokens[0]), ()):
        n = common(child.tokens, tokens)
        if n > most or (n == most and best is not None and len(child.tokens) < len(best.tokens)):
            best, most = child, n
    return best, most
