"""Leaves: prefixes whose cells are in the KV cache without a running request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from attrs import define, field

from uma_trio.backend.base import Backend, IntArray
from uma_trio.engine.kv.pages import Page, below_root, common
from uma_trio.policy.fairness import Path

#: A request that continues before the end of a leaf needs a copy of its stream, and the two hold two streams from then
#: on. So an end of few tokens, or of a small part of the prefix, is dropped: most are answers that the client has cut.
SHORT_END: Final = 1024
SHORT_PART: Final = 8


@define(eq=False)
class Leaf:
    """`tokens` whose cells the KV sequence `seq` holds, with their namespace and owner (a program).

    - The first `saved` tokens are in pages; `page` is the last of these.
    - `cells` is the number of cells that it keeps: a cell held by n leaves counts 1/n, and a cell
      that a request holds, too, counts 0.
    - `paid_s` is the rent paid for each cell since its last use. `coming_s` is the rent that the
      requests which began since will add.
    - `given_up` says that it is never saved. `again_s` is the time to compute it again, 0 if
      unknown.
    - `handle` is the request that left it. `called` says that its answer ended with a tool call.
    """

    seq: int
    tokens: IntArray
    namespace: str
    owner: Path
    session: str | None
    used_at: float
    handle: int = -1
    called: bool = False
    page: Page | None = None
    cells: float = 0.0
    paid_s: float = 0.0
    coming_s: float = 0.0
    leaving: bool = False
    given_up: bool = False
    again_s: float = 0.0
    level: float = 0.0  # of Room, when it was used last

    @property
    def saved(self) -> int:
        """The number of its tokens that are in pages."""
        return 0 if self.page is None else self.page.end

    @property
    def unsaved(self) -> int:
        """The number of its tokens that are in no page."""
        return len(self.tokens) - self.saved

    @property
    def is_saved(self) -> bool:
        """Whether all of its tokens are in pages that are still there."""
        return not self.unsaved and self.page is not None and self.page.saved is not None

    @property
    def to_save(self) -> int:
        """The number of its tokens that are still to be saved."""
        return 0 if self.given_up else self.unsaved


@define(eq=False)
class Leaves:
    """All leaves of one backend, least recently used first."""

    backend: Backend
    _leaves: dict[int, Leaf] = field(factory=dict)
    n_tokens: int = 0  # of all of them
    _counted: bool = True

    def __iter__(self) -> Iterator[Leaf]:
        return iter(tuple(self._leaves.values()))

    def __len__(self) -> int:
        return len(self._leaves)

    def free_id(self) -> int | None:
        """Return a sequence id that no leaf has."""
        return next((i for i in self.backend.limits.leaf_ids if i not in self._leaves), None)

    def keep(self, leaf: Leaf, slot: int) -> bool:
        """Let `leaf` hold the cells of `slot`; False if they cannot be shared."""
        if not self.backend.kv_copy(slot, leaf.seq, 0, len(leaf.tokens)):
            self.backend.kv_remove(leaf.seq)
            return False
        self._leaves[leaf.seq] = leaf
        self.n_tokens += len(leaf.tokens)
        self._counted = False
        return True

    def shorten(self, leaf: Leaf, n: int) -> None:
        """Drop the end of a leaf behind `n` tokens, if it is short."""
        excess = len(leaf.tokens) - n
        if not 0 < excess <= max(SHORT_END, n // SHORT_PART):
            return
        leaf.tokens = leaf.tokens[:n]
        self.n_tokens -= excess
        self.backend.kv_remove(leaf.seq, n)
        page = leaf.page
        while page is not None and page.end > n:
            page = page.parent
        leaf.page = below_root(page)
        self._counted = False

    def recount(self) -> None:
        """Note that cells were shared or dropped; `cells` of each leaf is counted when needed."""
        self._counted = False

    def count(self) -> None:
        """Update the `cells` of all leaves. Does work only after :meth:`recount`."""
        if self._counted:
            return
        self._counted = True
        portions = self.backend.kv_portions(list(self._leaves))
        for leaf, cells in zip(self._leaves.values(), portions, strict=True):
            leaf.cells = cells

    def use(self, leaf: Leaf, now: float) -> None:
        self._leaves[leaf.seq] = self._leaves.pop(leaf.seq)
        leaf.used_at, leaf.paid_s, leaf.coming_s, leaf.leaving = now, 0.0, 0.0, False

    def drop(self, leaf: Leaf) -> None:
        """Free its cells. Its saved pages stay."""
        del self._leaves[leaf.seq]
        self.n_tokens -= len(leaf.tokens)
        self.backend.kv_remove(leaf.seq)
        self._counted = False

    def covering(self, namespace: str, tokens: IntArray) -> bool:
        """Whether a leaf holds all of `tokens`."""
        return any(
            leaf.namespace == namespace and common(leaf.tokens, tokens) == len(tokens)
            for leaf in self._leaves.values()
        )

    def within(self, leaf: Leaf) -> list[Leaf]:
        """Return the other leaves that are a prefix of `leaf`."""
        return [
            other
            for other in self._leaves.values()
            if other is not leaf
            and other.namespace == leaf.namespace
            and common(other.tokens, leaf.tokens) == len(other.tokens)
        ]
