"""The bytes that a model moves through memory in a tick, computed from its file."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Traffic:
    """The sizes of a model, in bytes, from its file.

    `expert_bytes` is the size of one expert over all layers; 0 experts is a dense model.
    """

    weight_bytes: float = 0.0
    cell_bytes: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 0
    experts_used: int = 0

    def distinct_experts(self, n_tokens: int) -> float:
        """Return the expected number of experts that `n_tokens` reach, with independent routing.

        Neighbouring tokens share experts, so this is an upper bound.
        """
        if self.experts <= 0:
            return 0.0
        missed = (1.0 - self.experts_used / self.experts) ** n_tokens
        return self.experts * (1.0 - missed)

    def moved(self, n_tokens: int, cells: int) -> float:
        """Return the bytes of a tick of `n_tokens` that reads and writes `cells` KV cells."""
        if n_tokens <= 0:
            return 0.0
        experts = self.distinct_experts(n_tokens) * self.expert_bytes
        return self.weight_bytes + experts + cells * self.cell_bytes

    def bandwidth(self, seconds: Mapping[int, float]) -> float:
        """Return the bytes a second that this machine moves, by what ticks of n tokens take there.

        The most that any tick moves: decoding is bound by memory, but one token may be too few to
        show it. Of a mixture of experts four move twice the weights in less than twice the time.
        """
        return max((self.moved(n, 0) / s for n, s in seconds.items() if s > 0), default=0.0)
