"""Finds the prefix of a request: in another request's cells, in a leaf, or in saved pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

from uma_trio.backend.base import IntArray
from uma_trio.engine.kv.disk import ModelDisk
from uma_trio.engine.kv.leaves import Leaf, Leaves
from uma_trio.engine.kv.pages import Page, common
from uma_trio.engine.kv.store import PageStore
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.prefix import LEAST_FORK, LEAST_HIT, PAGE

Source = Literal["running", "leaf", "saved", "disk", "fork"]


@frozen(eq=False)
class FoundPrefix:
    """The result of a search, in tokens.

    `resident` tokens are in the KV cache, in the cells of `seq`; `saved` tokens are in pages up to
    `page`; more of them, `on_disk`, are in files up to `stored`. `leader` is a request that will have computed `coming` of them. The nearest cached
    prefix differs after `apart` tokens, where it has the token `other`, -1 if it ends there.
    """

    resident: int = 0
    seq: int = -1
    leaf: Leaf | None = None
    page: Page | None = None
    saved: int = 0
    stored: Page | None = None
    on_disk: int = 0
    leader: Sequence | None = None
    coming: int = 0
    apart: int = 0
    other: int = -1

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages after the resident part that are worth restoring."""
        if self.page is None or self.saved - self.resident < LEAST_HIT:
            return ()
        return self.page.path[self.resident // PAGE :]

    @property
    def stored_pages(self) -> tuple[Page, ...]:
        """The pages after the ones in memory that are worth reading."""
        if self.stored is None or self.on_disk - max(self.resident, self.saved) < LEAST_HIT:
            return ()
        return self.stored.path[self.saved // PAGE :]

    @property
    def there(self) -> int:
        return max(self.resident, self.saved, self.on_disk)

    @property
    def covered(self) -> int:
        """How many tokens need not be computed for this request alone."""
        return max(self.there, self.coming)

    def waits(self, n_tokens: int) -> bool:
        """Whether a request that needs `n_tokens` without the last should wait for the leader."""
        gained = self.coming - self.there
        # Samples of one short prompt share all of it.
        least = LEAST_FORK if self.coming < n_tokens else LEAST_HIT
        return gained >= least


def search(
    sequence: Sequence,
    running: Iterable[Sequence],
    leaves: Leaves,
    store: PageStore,
    disk: ModelDisk | None = None,
) -> FoundPrefix:
    """Return the cached part of the tokens that `sequence` has to compute, without the last token.

    The last token is always computed, because no cell has its logits. Only the request's own
    namespace is searched.
    """
    namespace, tokens = sequence.submit.namespace, sequence.tokens[: sequence.known - 1]
    if namespace is None or not len(tokens):
        return FoundPrefix()
    best, seq, best_leaf, coming, leader = 0, -1, None, 0, None
    nearest: tuple[int, int] = (0, -1)
    for leaf in leaves:
        if leaf.namespace == namespace:
            n = common(leaf.tokens, tokens)
            nearest = max(nearest, _parting(leaf.tokens, n))
            if n > best:
                best, seq, best_leaf = n, leaf.seq, leaf
    for other in running:
        if other is sequence or other.submit.namespace != namespace:
            continue
        n = common(other.tokens[: other.known], tokens)
        nearest = max(nearest, _parting(other.tokens[: other.known], n))
        if min(n, other.computed) > best:
            best, seq, best_leaf = min(n, other.computed), other.slot, None
        if n > max(coming, other.computed) and other.credit > 0:
            coming, leader = n, other
    page, saved = store.match(namespace, tokens)
    if page is not None:
        nearest = max(nearest, (saved, _behind(page, saved)))
    stored, on_disk = _more(disk, namespace, tokens, saved)
    if stored is not None:
        nearest = max(nearest, (on_disk, _behind(stored, on_disk)))
    if best < LEAST_HIT:
        best, seq, best_leaf = 0, -1, None
    return FoundPrefix(best, seq, best_leaf, page, saved, stored, on_disk, leader, coming, *nearest)


def _more(
    disk: ModelDisk | None, namespace: str, tokens: IntArray, saved: int
) -> tuple[Page | None, int]:
    """Return what is on disk, if that is more than what is saved in memory."""
    stored, n = (None, 0) if disk is None else disk.match(namespace, tokens)
    return (stored, n) if n > saved else (None, 0)


def shared_with(sequence: Sequence, running: Iterable[Sequence]) -> int:
    """Return the number of cells that `sequence` would share with a running one."""
    namespace, tokens = sequence.submit.namespace, sequence.tokens[: sequence.known - 1]
    if namespace is None:
        return 0
    found = [
        common(other.tokens[: other.computed], tokens)
        for other in running
        if other.submit.namespace == namespace
    ]
    most = max(found, default=0)
    return most if most >= LEAST_HIT else 0


def _parting(tokens: IntArray, n: int) -> tuple[int, int]:
    """Return after how many tokens a beginning is another, and which token it has there."""
    return n, int(tokens[n]) if n < len(tokens) else -1


def _behind(page: Page, end: int) -> int:
    at = end - page.start
    return int(page.tokens[at]) if at < len(page.tokens) else -1
