"""Room in the KV cache: leaves are dropped when it is needed, or when they have cost too much.

A leaf pays rent while other requests compute: the time that its cells add to each of their tokens.
It leaves when its rent equals the cost of its return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define, evolve

from uma_trio.backend.base import Backend
from uma_trio.engine.kv.leaves import Leaf, Leaves
from uma_trio.engine.kv.saving import Saving
from uma_trio.engine.kv.usage import Reuse
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.prefix import Prices, moves_out, rent

# So many ticks of one token may be spent on saving leaves before a request that is alone.
_EMPTYING: Final = 10
_TICK_S: Final = 0.01  # where no tick was measured
#: llama.cpp rounds the cells that a decode spans up to this (`get_n_kv`), so that fewer change nothing.
_LEAST_GAP: Final = 256
#: So long after its last use a conversation leaves its stream for measurements of an idle machine. To have 30,000 tokens
#: of an 8B model back from memory takes 0.5 to 1.6 s on an H200.
_PAUSE_S: Final = 120.0


@define(eq=False)
class Room:
    """The cells that leaves hold. `rent_s` is the rent of all leaves together.

    In a unified cache leaves are dropped by their last use. A stream is free only as a whole, so there the leaf goes
    that is computed again soonest, measured from `level`, which rises with each leaf that goes (GreedyDual). No decode
    spans it, so it pays no rent.
    """

    backend: Backend
    leaves: Leaves
    saving: Saving
    reuse: Reuse
    rent_s: float = 0.0
    level: float = 0.0
    _mark_s: float = 0.0  # what free cells below the high-water mark have cost since it was lowered

    def make(self, slots: Sequence[int], n_tokens: int) -> None:
        """Drop leaves until these slots have cells for `n_tokens` more, saved leaves first."""
        if not len(self.leaves) or not self.backend.kv_shortage(slots, n_tokens):
            return
        for leaf in self._droppable():
            if self.backend.limits.n_streams > 1:
                self.level = max(self.level, self._worth(leaf))
            self.drop(leaf)
            if not self.backend.kv_shortage(slots, n_tokens):
                break

    def drop_all(self) -> bool:
        """Drop all leaves with cells, after a decode found no room; False if there are none."""
        order = self._droppable()
        for leaf in order:
            self.drop(leaf)
        return len(order) > 0

    def _droppable(self) -> list[Leaf]:
        """Return the leaves that free cells, the saved ones first.

        A leaf whose cells are all held by requests stays, because dropping it would free nothing.
        """
        if self.backend.limits.n_streams > 1:
            self.leaves.recount()  # what only leaves hold changes as requests compute
        self.leaves.count()
        order = [leaf for leaf in self.leaves if leaf.cells]
        if self.backend.limits.n_streams > 1:
            order.sort(key=self._worth)
        else:
            order.sort(key=lambda leaf: (leaf.to_save > 0, leaf.used_at))
        return order

    def _worth(self, leaf: Leaf) -> float:
        n, saving = len(leaf.tokens), self.saving
        return leaf.level + (saving.token_s * n if leaf.is_saved else saving.again_s(leaf))

    def used(self, leaf: Leaf) -> None:
        """Note that a request left a leaf, or continues from it."""
        leaf.level = self.level

    def empty(self, most_s: float) -> None:
        """Save all leaves and take them out of the KV cache, before a request begins that is alone in it.

        Its cells then lie in order from the first on, whatever was computed before it, and logits depend
        on the places of cells (docs/explained/memory.md). Leaves would soon leave anyway: a few ticks of
        rent pay for their return. Those stay that cannot be saved, or not within `most_s`.
        """
        left_s = min(_EMPTYING * self._tick_s(), most_s)
        for leaf in self.leaves:
            left_s -= self.saving.at_once(leaf, left_s)
            if leaf.is_saved:
                self.drop(leaf)

    def _tick_s(self) -> float:
        cost = self.saving.cost
        return _TICK_S if cost is None else cost.seconds(Work(1, 1))

    def drop(self, leaf: Leaf) -> None:
        self.saving.forget(leaf)
        self.leaves.drop(leaf)

    def lingers(self) -> bool:
        """Take leaves out of the KV cache, in which no request is; whether any stays.

        Unsaved ones stay. So does in streams what was used lately or cannot be saved, such as a conversation larger than
        `--prefix-ram`: it is the only copy, and costs nobody anything.
        """
        streams, now = self.backend.limits.n_streams > 1, self.saving.now()
        for leaf in self.leaves:
            rests = leaf.is_saved and now - leaf.used_at > _PAUSE_S
            if rests if streams else not leaf.to_save:
                self.drop(leaf)
        return len(self.leaves) > 0

    def charge(self, n_tokens: int, cost: CostModel | None) -> None:
        """Charge each leaf for a tick of `n_tokens`, and decide whether it leaves.

        :meth:`release_leaves` drops it later: the next decode may be running, and the places of its cells
        were chosen beside those of the leaf.
        """
        self.saving.cost = cost
        gap = self.backend.kv_high_water() - self.backend.kv_used()
        self._mark_s = self._mark_s + gap * self._cell_s(n_tokens) if gap >= _LEAST_GAP else 0.0
        prices = self._prices()
        if prices is None:
            return
        cell_s = rent(prices, n_tokens)
        self.leaves.count()
        for leaf in self.leaves:
            if not leaf.cells:
                continue
            paid = cell_s * leaf.cells
            leaf.paid_s += cell_s
            self.rent_s += paid
            if not leaf.leaving and self._has_paid(leaf, prices, leaf.paid_s):
                leaf.leaving = True
                if leaf.to_save and not moves_out(prices, leaf.paid_s):
                    self.saving.give_up(leaf)
                self.saving.first(leaf)
            if leaf.leaving:
                self.saving.earn(paid)

    def make_way(self, n_tokens: int, but_for: Leaf | None) -> None:
        """Take out leaves before a request computes `n_tokens`, if they would leave meanwhile.

        The request's cells then use their places, and the high-water mark falls. An unsaved leaf is
        saved first if the requests that begin would otherwise pay more for it; it is dropped if it
        cannot be saved. The request itself uses `but_for`, which stays.
        """
        prices = self._prices()
        if prices is None:
            return
        coming = evolve(prices, save_s=0.0)
        self.leaves.count()
        for leaf in self.leaves:
            if leaf is but_for or not leaf.cells:
                continue
            leaf.coming_s += rent(coming, n_tokens)
            leaf.leaving = leaf.leaving or self._has_paid(leaf, coming, leaf.coming_s)
            if not leaf.leaving or not leaf.to_save:
                continue
            price_s = self.saving.price_s(leaf)
            if self.saving.will_save(leaf) and leaf.coming_s * leaf.cells >= price_s:
                self.saving.first(leaf)
                self.saving.earn(price_s)
            elif self._not_worth(leaf, leaf.coming_s):
                self.drop(leaf)
        self.release_leaves()

    def release_leaves(self) -> None:
        """Drop the leaves that are to leave, as soon as they are saved. Call it between decodes."""
        for leaf in self.leaves:
            if leaf.leaving and not leaf.to_save:
                self.drop(leaf)

    def mark_costs(self) -> bool:
        """Return whether the high-water mark, where it is kept, has cost as much as a change of it does.

        Where graphs are captured, the cells that a decode spans are part of its shape.
        """
        cost = self.saving.cost
        return cost is not None and cost.recapture_s > 0 and self._mark_s >= cost.change_s

    def mark_fell(self) -> None:
        self._mark_s = 0.0

    def _prices(self) -> Prices | None:
        """Return what a leaf costs, None if there is none or it costs nothing."""
        cost = self.saving.cost
        if self.backend.limits.n_streams > 1 or not len(self.leaves):
            return None
        if cost is None or not self._cell_s(1):
            return None
        saving, scale = self.saving, cost.scale
        return Prices(
            saving.save_s, saving.token_s, scale * cost.used_cell_s, scale * cost.spanned_cell_s
        )

    def _cell_s(self, n_tokens: int) -> float:
        """Return what each cell below the mark adds to a tick of so many tokens."""
        cost = self.saving.cost
        return cost.scale * cost.cell_s(n_tokens) if cost is not None else 0.0

    def _has_paid(self, leaf: Leaf, prices: Prices, paid_s: float) -> bool:
        """Whether a leaf has paid what doing without it costs: moving it, or computing it again.

        Of what it shares with other leaves it pays its part, and its part of doing without counts.
        """
        if not leaf.given_up and moves_out(prices, paid_s):
            return True
        return self._not_worth(leaf, paid_s)

    def _not_worth(self, leaf: Leaf, paid_s: float) -> bool:
        likely_s = self.reuse.of(leaf.owner) * self.saving.again_s(leaf)
        return paid_s * len(leaf.tokens) > likely_s
