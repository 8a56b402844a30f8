"""From rows of logits to tokens: a :class:`TickSampler` for a whole tick, a :class:`Sampler` per sequence.

`sampler` is where to begin; it reads all rows at once. `shortlist` finds the likeliest tokens,
`drawing` has a random number for each place of an answer, and draws one token of a list.
`adjusting` changes a row by its request and its history (bias, penalties), `logprobs` describes it as
the model gave it, or as it was drawn from; both only where they are asked for. `checking` replaces
tokens that a constraint refuses, with the masks of `masks`.
"""

from uma_trio.engine.sampling.checking import IMPOSSIBLE, LATE, UNREACHED
from uma_trio.engine.sampling.logprobs import NOT_FINITE, greedy
from uma_trio.engine.sampling.masks import AT_ONCE, Mask, Masks, MaskThreads
from uma_trio.engine.sampling.sampler import (
    NO_GUESS,
    NonFinite,
    SampledTokens,
    Sampler,
    TickSampler,
    choose,
)

__all__ = [
    "AT_ONCE",
    "IMPOSSIBLE",
    "LATE",
    "NOT_FINITE",
    "NO_GUESS",
    "UNREACHED",
    "Mask",
    "MaskThreads",
    "Masks",
    "NonFinite",
    "SampledTokens",
    "Sampler",
    "TickSampler",
    "choose",
    "greedy",
]
