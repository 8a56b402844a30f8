"""From rows of logits to tokens: a :class:`Choice` for a whole tick, a :class:`Sampler` per sequence.

`choice` is where to begin; it reads all rows at once. `shortlist` finds the likeliest tokens,
`drawing` draws one of a list. `adjusting` changes a row by its request and its history (bias,
penalties, masks), `logprobs` describes it as the model gave it; both only where they are asked for.
"""

from uma_trio.engine.sampling.choice import (
    IMPOSSIBLE,
    NO_GUESS,
    UNREACHED,
    Choice,
    Choices,
    NonFinite,
    Sampler,
    choose,
)
from uma_trio.engine.sampling.likeliest import NOT_FINITE, greedy

__all__ = [
    "IMPOSSIBLE",
    "NOT_FINITE",
    "NO_GUESS",
    "UNREACHED",
    "Choice",
    "Choices",
    "NonFinite",
    "Sampler",
    "choose",
    "greedy",
]
