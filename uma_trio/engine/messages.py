"""The words that pass the two doors. All frozen: values cross borders, objects do not.

Into the engine: :class:`Submit`, :class:`Cancel`, :class:`SetLane`, :class:`Credit`,
:class:`Inspect`, :class:`Explain`, :class:`Prefix`. Out of it, on a request's own stream: any
number of :class:`PromptProgress` if it asked for that, :class:`PromptDone`, any number of
:class:`TokenOut`, and exactly one :class:`Finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from uma_trio.backend.base import IntArray
from uma_trio.engine.records import PrefixReport, Recorded
from uma_trio.lanes import Lane
from uma_trio.policy.abort import Newcomer
from uma_trio.policy.evolving import value
from uma_trio.speculation import Speculation

FinishReason = Literal["stop", "length", "cancelled", "error"]
SequenceState = Literal["queued", "prefill", "decode", "parked", "preempted"]


@frozen
class SamplingParams:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 is off.

    `presence_penalty` and `frequency_penalty` look at the answer, `repeat_penalty` at the last
    `repeat_last_n` tokens of prompt and answer (0: at none, -1: at all). `logit_bias` pairs token
    ids, each named once, with what is added to their logits. Before there are `min_tokens` nothing
    ends the answer but a stop string; `stop_token_ids` end it like the model's own end tokens, also
    with `ignore_eos`. `logprobs` is how many alternatives each token comes with, None for no
    probability at all; `prompt_logprobs` is the same of the prompt's tokens but the first. With
    `post_sampling` the `logprobs` are those that the token was drawn by, after all of these.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    post_sampling: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Constraint(Protocol):
    """What an answer has to keep to, a token at a time. For the engine's thread once submitted."""

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`; with an end token, whether it may end."""

    def allowed(self) -> NDArray[np.intp]:
        """Return all tokens that it may go on with, ascending; none if there is no way on."""

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        """Return what `allowed` is here and now, to be called later, in any thread, once."""

    def accept(self, token: int) -> None:
        """Go on behind `token`, which is no end."""

    def take_back(self) -> None:
        """Go back to before the latest `accept`. As many can be taken back as were accepted."""


@frozen
class Targets:
    """What an application asked for: seconds to the first token, seconds between tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None


class Sink(Protocol):
    """The sending end of one request's stream. Called on trio's thread only."""

    def send_nowait(self, item: StreamItem) -> None:
        """Put `item` into the stream, whose reader takes it with :meth:`flush`; never blocks."""

    def flush(self) -> None:
        """Have the reader take what is to be shown by now; never blocks, never raises."""


@frozen(eq=False)
class Submit:
    """One request, tokenised. `handle` is unique for the life of the daemon.

    `credit` is how many tokens its stream takes before the first :class:`Credit`. `client`
    names the peer for fairness and is never an authority. `submitted` is on the engine's clock.
    `constraint` belongs to this request alone.
    With `smooth` its tokens may be held back so that they come evenly, while it is interactive.
    What was computed in its `namespace` may be used for it, and what is computed for it there again;
    None: neither. `session` names the conversation that it is a turn of. `speculation` says which
    guesses at its answer are computed ahead. `pieces` are the bytes of each token where the answer's
    text has to show more than the vocabulary's own. With `progress` its stream is told how much of its
    prompt is computed.
    """

    handle: int
    prompt: IntArray
    max_tokens: int
    params: SamplingParams
    stop: tuple[str, ...]
    lane: Lane
    client: int
    credit: int
    sink: Sink
    submitted: float
    targets: Targets = field(factory=Targets)
    constraint: Constraint | None = None
    namespace: str | None = None
    session: str | None = None
    speculation: Speculation = "auto"
    smooth: bool = False
    pieces: Sequence[bytes] | None = None
    progress: bool = False

    @property
    def newcomer(self) -> Newcomer:
        """What of it decides whether a tick is given up for it."""
        return Newcomer(self.lane, len(self.prompt) + self.max_tokens)


@frozen
class Cancel:
    """End this request now, whatever it is doing; unknown handles are ignored.

    Without a code it ends as cancelled, with one as an error.
    """

    handle: int
    code: str | None = None
    message: str | None = None


@frozen
class SetLane:
    """Promote or demote a request, waiting or running."""

    handle: int
    lane: Lane


@frozen
class Credit:
    """`n` more tokens of this stream have been flushed to the client."""

    handle: int
    n: int


@frozen
class Inspect:
    """Ask for a picture of every request; `reply` is called on trio's thread."""

    reply: Callable[[tuple[SequenceReport, ...]], None]


@frozen
class Explain:
    """Ask how one request spent its time, or the latest; `reply` is called on trio's thread.

    `ticks` is how many ticks should come with it.
    """

    reply: Callable[[Recorded], None]
    handle: int | None = None
    ticks: int = 0


@frozen
class Prefix:
    """Look at the prefix cache, or change it, in namespaces that are `mine`.

    `clear` drops what is there; otherwise `session` is pinned for `pin_s`, if one is named. `reply` is
    called on trio's thread.
    """

    reply: Callable[[PrefixReport], None]
    mine: Callable[[str], bool]
    clear: bool = False
    session: str | None = None
    pin_s: float = 0.0


@frozen
class Keep:
    """Keep what an ended request has computed for longer: a tool was called, and its result will come.

    Nothing happens for a request that left nothing.
    """

    handle: int


InboxMessage = Submit | Cancel | SetLane | Credit | Inspect | Explain | Prefix | Keep


@frozen
class TokenLogprobs:
    """What the model thought of a chosen token, before anything the request changed.

    If the request asked for `post_sampling`: how likely it was when it was drawn.

    `logprob` is the natural logarithm of its probability, `top` those of the likeliest tokens, by
    id and likeliest first; the chosen one may be among them or not.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class PromptProgress:
    """How much of a prompt of `prompt_tokens` is in the KV cache: `computed_tokens`, cached ones included.

    `cached_tokens` of it needed not be computed. It waited `queue_s` seconds for a slot, and has
    had one for `prompt_s`. The first of a stream says what was cached; each later one has more
    computed tokens, and the last one all. An item that its reader has not taken may be replaced by
    a later one.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    queue_s: float = 0.0
    prompt_s: float = 0.0


@frozen
class PromptDone:
    """The whole prompt is in the KV cache; the next item is a token or the end.

    `at` is when its logits were there, on the engine's clock. `cached_tokens` of it needed not be
    computed, and it waited `queue_s` seconds for a slot. `logprobs` is what the model thought of each
    token of the prompt behind the first, if the request asked for that.
    """

    at: float = 0.0
    cached_tokens: int = 0
    queue_s: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] | None = None


@value
class TokenOut:
    """One sampled token. `text` is valid UTF-8 and may be empty (held back).

    `logprobs` is there if the request asked for it. Its reader is shown it at `show_at` on the
    engine's clock, and no later than what follows it; at 0 it is shown at once.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    show_at: float = 0.0


@frozen
class Finished:
    """The one terminal item. Times in seconds; `ttft_s` is None if no token was sampled.

    `text` is what had been held back, `stop` the stop string that ended the answer, if one did. `code`
    and `message` are set when `reason` is error.
    """

    reason: FinishReason
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    code: str | None = None
    message: str | None = None
    stop: str | None = None


StreamItem = PromptProgress | PromptDone | TokenOut | Finished


@frozen
class SequenceReport:
    """What ``ps`` shows of one request; joined by the handle with what its connection knows.

    It is computed `ahead_s` of what its reader is shown.
    """

    handle: int
    state: SequenceState
    lane: Lane
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    tokens_per_s: float
    age_s: float
    ahead_s: float = 0.0
