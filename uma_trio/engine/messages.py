"""The messages of the inbox and the items of the outlet. All are frozen values.

Into the engine: :class:`Submit`, :class:`Cancel`, :class:`SetLane`, :class:`Credit`,
:class:`Inspect`, :class:`Explain`, :class:`Prefix`, :class:`Encode`. Out of it, on a request's own stream: any
number of :class:`PromptProgress` (if requested), :class:`PromptDone`, any number of
:class:`TokenOut`, and exactly one :class:`Finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from attrs import field, frozen

from uma_trio.backend.base import FloatArray, IntArray
from uma_trio.observe.records import PrefixReport, Recorded, Snapshot
from uma_trio.policy.abort import Newcomer
from uma_trio.policy.evolving import value
from uma_trio.text.constraint import Constraint
from uma_trio.words import Awaits, Lane, Speculation

FinishReason = Literal["stop", "length", "cancelled", "error"]


@frozen
class SamplingParams:
    """How the next token is sampled. ``temperature`` 0 is greedy; ``top_k`` 0 and below is off.

    - `seed_named` says that the client chose `seed`, so that it may ask for the same answer again.
    - `presence_penalty` and `frequency_penalty` count tokens of the answer. `repeat_penalty` counts
      the last `repeat_last_n` tokens of prompt and answer (0: none, -1: all).
    - `logit_bias` pairs token ids, each at most once, with the value added to their logits.
    - Before `min_tokens` tokens only a stop string ends the answer. `stop_token_ids` end it like
      the model's own end tokens, also with `ignore_eos`.
    - `logprobs` is the number of alternatives for each token, None for no probabilities.
      `prompt_logprobs` is the same for the tokens of the prompt except the first.
    - With `post_sampling` the `logprobs` are the final probabilities of the draw, after all of
      these.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    seed_named: bool = False
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


@frozen
class Targets:
    """The requested latencies in seconds: to the first token, between tokens."""

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
    """One tokenised request. `handle` is unique for the life of the daemon.

    - `credit` is the number of tokens that its stream takes before the first :class:`Credit`.
    - `client` is the innermost of those whose shares of machine time it uses, `within` the others,
      the outermost first (:mod:`uma_trio.policy.fairness`). They grant no rights.
    - `submitted` is a time on the engine's clock.
    - `constraint` belongs to this request only.
    - With `smooth` the tokens of an interactive request may be held to be sent at even intervals.
    - `namespace` is the namespace of cached prefixes that the request reads and extends; None: it
      does neither. Unless it `keeps`, only requests that run at the same time find its prefix there:
      nothing of it is kept when it ends or is preempted.
    - `session` names the conversation that it is a turn of.
    - `speculation` restricts speculative decoding.
    - `pieces` are the bytes of each token, if the answer's text needs more than those of the
      vocabulary.
    - `awaits` says what of it is waited for, in the interactive lane.
    - With `progress` its stream reports the progress of its prompt.
    - `owes_s` is machine time that it cost before it came: its model was loaded for it.
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
    keeps: bool = True
    session: str | None = None
    speculation: Speculation = "auto"
    smooth: bool = False
    awaits: Awaits = "tokens"
    pieces: Sequence[bytes] | None = None
    progress: bool = False
    within: tuple[int, ...] = ()
    owes_s: float = 0.0

    @property
    def program(self) -> tuple[int, ...]:
        """The two outermost shares: what is counted of its conversations together."""
        return (*self.within, self.client)[:2]

    @property
    def newcomer(self) -> Newcomer:
        """What of it decides whether a tick is given up for it."""
        n = len(self.prompt)
        return Newcomer(self.lane, n + self.max_tokens, n)


@frozen
class Cancel:
    """End this request in any state. Unknown handles are ignored.

    Without a code it ends for `reason`, with a code as an error.
    """

    handle: int
    code: str | None = None
    message: str | None = None
    reason: FinishReason = "cancelled"


@frozen
class SetLane:
    """Move a waiting or running request to a lane."""

    handle: int
    lane: Lane


@frozen
class Credit:
    """The client has received `n` more tokens of this stream."""

    handle: int
    n: int


@frozen
class Inspect:
    """Request a snapshot, with the ticks after the one numbered `after`.

    `reply` is called on trio's thread.
    """

    reply: Callable[[Snapshot], None]
    after: int = -1


@frozen
class Explain:
    """Request how one request, or the latest ones, spent their time.

    `ticks` is the number of ticks to return. `reply` is called on trio's thread.
    """

    reply: Callable[[Recorded], None]
    handle: int | None = None
    ticks: int = 0


@frozen
class Prefix:
    """List or change the prefix cache, in the namespaces that are `mine`.

    `clear` drops their content; otherwise `session`, if it is given, is pinned for `pin_s`. `reply`
    is called on trio's thread.
    """

    reply: Callable[[PrefixReport], None]
    mine: Callable[[str], bool]
    clear: bool = False
    session: str | None = None
    pin_s: float = 0.0


@frozen
class Keep:
    """Keep the cached prefix of an ended request for longer, because it called a tool.

    It has no effect for a request without a cached prefix.
    """

    handle: int


@frozen
class Encoded:
    """The vectors of a request, ``[n_inputs, width]``, or the code and the message of its error."""

    vectors: FloatArray | None
    code: str = ""
    message: str = ""


@frozen
class Encode:
    """Make a vector of each input, in the order of `order`, whose last is first; `order` is used up.

    `user` is whom turns are counted for, and `owes_s` what it is charged besides. It was `submitted` at this time. `reply`
    is called once, on trio's thread.
    """

    handle: int
    user: str
    inputs: Sequence[IntArray]
    order: list[int]
    reply: Callable[[Encoded], None]
    submitted: float = 0.0
    owes_s: float = 0.0


@frozen
class StopEncoding:
    """Forget an :class:`Encode`, whose `reply` is not called then. Unknown handles are ignored."""

    handle: int


InboxMessage = (
    Submit | Cancel | SetLane | Credit | Inspect | Explain | Prefix | Keep | Encode | StopEncoding
)


def changes_a_plan(message: InboxMessage) -> bool:
    """Whether a tick that is planned without knowing of `message` may be another one with it.

    Questions change nothing. Keeping a prefix for longer, or pinning it, drops no cell.
    """
    match message:
        case Inspect() | Explain() | Keep() | Encode() | StopEncoding():
            return False
        case Prefix(clear=clear):
            return clear
    return True


@frozen
class TokenLogprobs:
    """The log probability of a sampled token, in the model's own distribution.

    If the request asked for `post_sampling`, it is the probability of the draw. `logprob` is a
    natural logarithm. `top` has the most likely tokens by id, most likely first; it may contain the
    sampled token.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class PromptProgress:
    """The progress of a prompt: `computed_tokens` of `prompt_tokens` are in the KV cache.

    `cached_tokens` of these came from the prefix cache. The request waited `queue_s` seconds for a
    slot and has had one for `prompt_s`. The first item of a stream reports the cached tokens, each
    later one more computed tokens, and the last one all tokens. A later item may replace one that
    the reader has not taken.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    queue_s: float = 0.0
    prompt_s: float = 0.0


@frozen
class PromptDone:
    """The whole prompt is in the KV cache; the next item is a token or the end.

    `at` is the time of its logits, on the engine's clock. `cached_tokens` of the prompt were not
    computed. The request waited `queue_s` seconds for a slot. `logprobs` has the log probabilities
    of the prompt's tokens except the first, if the request asked for them.
    """

    at: float = 0.0
    cached_tokens: int = 0
    queue_s: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] | None = None


@value
class TokenOut:
    """One sampled token. `text` is valid UTF-8 and may be empty (held back).

    `logprobs` is present if the request asked for it. The token is shown to its reader at `show_at`
    on the engine's clock, and not later than the item after it; 0 means at once.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    show_at: float = 0.0


@frozen
class Finished:
    """The one terminal item. Times are in seconds; `ttft_s` is None if no token was sampled.

    `text` is the text that was held back. `stop` is the stop string that ended the answer, if one
    did. `code` and `message` are set if `reason` is error. Of `drafted_tokens` guesses at the answer
    `accepted_tokens` were right.
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0


StreamItem = PromptProgress | PromptDone | TokenOut | Finished
