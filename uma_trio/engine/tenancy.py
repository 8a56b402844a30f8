"""What a request made of its slot: the books behind tenure (:mod:`uma_trio.policy.floor`)."""

from __future__ import annotations

from attrs import define

from uma_trio.engine.chunk import Chunk


@define
class Tenancy:
    """Of one request. `tenured` and `unearned_s` are those of :class:`~uma_trio.policy.state.Holder`.

    The first `furthest` of its tokens were computed before it lost a slot.
    """

    furthest: int = 0
    tenured: bool = False
    unearned_s: float = 0.0

    def begin(self) -> None:
        """Note that it has a slot."""
        self.tenured, self.unearned_s = False, 0.0

    def lose(self, computed: int) -> None:
        """Note that it loses its slot, and `computed` tokens with it."""
        self.furthest = max(self.furthest, computed)

    def spend(self, chunk: Chunk, seconds: float, *, decoding: bool) -> float:
        """Note that it had `seconds` of a tick for `chunk`; return what of that is not spent again."""
        again = min(max(0, self.furthest - chunk.start), chunk.n_tokens)
        self.unearned_s += -seconds if decoding and not again else seconds
        return seconds * (1.0 - again / chunk.n_tokens)
