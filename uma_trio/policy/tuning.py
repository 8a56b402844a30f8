"""The constants of the deadline policy and of the cost model's learning, as one value.

The cost model carries it (:attr:`uma_trio.policy.cost.CostModel.tuning`), and a trace has it in its header. So a
tick is planned again with the constants that it was planned with, whatever today's are. `python -m benches tuning`
halves and doubles each of them in simulations; docs/POLICY.md has the table.

No tuning: what the contract promises (:class:`uma_trio.policy.state.Contract`), what is a fact of kernels, and
bounds that keep a disturbed machine from being believed (:mod:`uma_trio.policy.cost`).
"""

from __future__ import annotations

from typing import Any, Final

from attrs import field, fields_dict, frozen


def _at(value: float, why: str) -> Any:
    """Return a field with its value, and where that comes from or what it does."""
    return field(default=value, metadata={"why": why})


@frozen(cache_hash=True)
class Tuning:
    """See the module. Times are in seconds, rates are parts of what one measured tick tells."""

    # --- the limit of a tick ---
    mixed_ticks: int = _at(
        20,
        "mixed ticks in a row before one is isolated: only that measures solo, of which limits are multiples",
    )
    isolated_ticks: int = _at(1, "isolated ticks then")
    mixed_ticks_captured: int = _at(
        1000, "`mixed_ticks` where graphs are captured: a change of shape makes two ticks slow"
    )
    isolated_ticks_captured: int = _at(
        4, "`isolated_ticks` there: the first two are slow, and paid from slack"
    )
    margin_errors: float = _at(
        4.0,
        "a tick that spends slack is taken to last longer by so many mean errors of predictions",
    )
    least_error: float = _at(0.02, "the least mean error that is assumed")
    most_error: float = _at(0.25, "the largest mean error that is assumed")
    many_newcomers: float = _at(
        0.2,
        "newcomers are frequent from this part of machine time on; 500 tokens take a sixth where T(1) is 8 ms",
    )
    newcomers_over_s: float = _at(5.0, "that part is smoothed over so long")
    unread_s: float = _at(
        0.1,
        "the longest tick that nobody reads: a tenth of a second is immediate (Miller 1968, Nielsen 1993)",
    )
    together_tokens: int = _at(
        64,
        "readers wait for prompts of at most so many tokens that came first; with 512, ITL p95 was 3.5 x for 1.9 x",
    )
    linger_s: float = _at(
        0.5,
        "tokens are still held so long after other work: who asks again and again is away for a moment",
    )
    # --- the work beside streams ---
    dead_band: float = _at(1.03, "a size in use counts as so many times as good as it is")
    probe_every: int = _at(
        64, "one tick in so many tries a neighbouring size: only ticks correct a step"
    )
    finest: float = _at(
        0.02,
        "what adds less than this part of a tick is priced as if it added so much: predictions are no finer",
    )
    full: float = _at(0.9, "from this part of what slack may become nothing is waited for")
    worth_a_change: float = _at(
        0.7,
        "the same for the first mixed tick behind an isolated one, where a change of shape costs",
    )
    aim: float = _at(
        0.93,
        "ticks for newcomers are planned for this part of their limit: half of them last longer than predicted",
    )
    little_longer: float = _at(1.05, "a row that rides along may make a tick so many times as long")
    decoder_turns: int = _at(
        16, "decoders get ticks of their own once they lag by this part of a turn"
    )
    burst: int = _at(16, "ticks that background decoders are served before others have their turn")
    equal_s: float = _at(0.05, "prompts of one sender that are due so close together are equals")
    answers_share: float = _at(
        0.25, "the most that decoding answers are owed of the time in which prompts go first"
    )
    answers_turns: int = _at(
        16, "answers get ticks of their own once they are owed this part of a turn"
    )
    # --- ballast ---
    ballast_worth: float = _at(
        0.97, "ballast must make a tick take less than this part of the time: measuring is no finer"
    )
    try_without: int = _at(
        256, "one tick in so many has none, or a step that is too high would stay"
    )
    isolated_in_turn: int = _at(
        8, "isolated ticks, which measure solo, have ballast and none in turn, so many each"
    )
    # --- rows for drafts ---
    purse_at_start: float = _at(
        1.5,
        "tokens that a stream may lose by wrong guesses; three lose 0.4 (Q4_0) to 1.6 (Q8_0, two cores)",
    )
    purse_earned: float = _at(0.01, "what each token of a stream adds to that")
    purse_most: float = _at(16.0, "of what was won no more than this is lost again")
    free_rows: float = _at(
        1.001, "a tick that is predicted to take so many times as long takes as long"
    )
    least_gain: float = _at(0.1, "guesses that give fewer tokens cost more to compute and to check")
    least_chance: float = _at(0.05, "a guess that is right less often is not looked at")
    paid_worth: float = _at(
        1.05, "tokens a second must rise by this for rows that take time: predictions are no finer"
    )
    drafted_rate: float = _at(0.1, "how quickly the gain of a reader's own drafts is followed")
    drafted_gone: float = _at(
        0.99, "a gain that leaves more than this part of the time is forgotten"
    )
    # --- the cost model ---
    scale_rate: float = _at(
        0.1, "the scale factor follows within ten ticks, as when another program takes a core"
    )
    step_rate: float = _at(0.05, "a step of the staircase follows within twenty ticks of its own")
    alone_scale_rate: float = _at(0.2, "`scale_rate` of an isolated tick beside readers")
    alone_step_rate: float = _at(0.05, "`step_rate` of it")
    mixed_scale_rate: float = _at(
        0.02,
        "`scale_rate` of a mixed one: a step that is too low would raise solo, and every limit with it",
    )
    mixed_step_rate: float = _at(0.15, "`step_rate` of it")
    depth_rate: float = _at(
        0.2,
        "the rate of attention's terms, times their part of the tick: half of a tick, half of this",
    )
    error_rate: float = _at(0.05, "how quickly the mean error of predictions is followed")
    outlier: float = _at(
        3.0,
        "a tick so many times off teaches nothing while predictions are good: a page fault, a frozen machine",
    )
    least_change: float = _at(
        0.02, "a change of shape costs at least this part of a tick, where it costs anything"
    )
    small_change: float = _at(
        0.1, "a tick of a new shape teaches more than the change if that is at most this part of it"
    )
    plateau: float = _at(0.95, "a size that reaches this part of the best rate is as good")
    untrusted_error: float = _at(
        0.15,
        "with a larger mean error predictions promise nothing, and the table as measured is used",
    )


#: What the policy is planned with unless a trace or a simulation says otherwise.
TUNING: Final = Tuning()


def why(name: str) -> str:
    """Return where the value of a field comes from, or what it does."""
    text: str = fields_dict(Tuning)[name].metadata["why"]
    return text
