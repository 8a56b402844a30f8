"""The constants of the deadline policy and of the cost model's learning, as one value.

The cost model carries it (:attr:`uma_trio.policy.cost.CostModel.tuning`), and a trace has it in its header. So a
tick is planned again with the constants that it was planned with, whatever today's are. docs/internals/policy.md
has a table of what moved when each of them was halved and doubled in simulations.

No tuning: what the contract promises (:class:`uma_trio.policy.state.Contract`), what is a fact of kernels,
bounds that keep a disturbed machine from being believed (:mod:`uma_trio.policy.cost`), what decides about slots and
cells and not about ticks (:mod:`uma_trio.policy.admission`, :mod:`uma_trio.policy.prefix`), and constants that move no
figure of that table. Those stand beside their rules.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen


@frozen(cache_hash=True)
class Tuning:
    """See the module. Times are in seconds, rates are parts of what one measured tick tells."""

    # --- the limit of a tick ---
    #: mixed ticks in a row before one is isolated: only that measures solo, of which limits are multiples
    mixed_ticks: int = 20
    #: isolated ticks then
    isolated_ticks: int = 1
    #: a tick that spends slack is taken to last longer by so many mean errors of predictions
    margin_errors: float = 4.0
    #: the least mean error that is assumed
    least_error: float = 0.02
    #: newcomers are frequent from this part of machine time on; 500 tokens take a sixth where T(1) is 8 ms
    many_newcomers: float = 0.2
    #: that part is smoothed over so long
    newcomers_over_s: float = 5.0
    #: the longest tick without readers: a tenth of a second is immediate (Miller 1968, Nielsen 1993)
    unread_s: float = 0.1
    #: readers wait for prompts of at most so many tokens that came first; with 512, ITL p95 was 3.5 x for 1.9 x
    together_tokens: int = 64
    # --- the work beside streams ---
    #: a size in use counts as so many times as good as it is
    dead_band: float = 1.03
    #: ticks for newcomers are planned for this part of their limit: half of them last longer than predicted
    aim: float = 0.93
    #: a row that rides along may make a tick so many times as long
    little_longer: float = 1.05
    #: the most that decoding answers are owed of the time in which prompts go first
    answers_share: float = 0.25
    #: answers get ticks of their own once they are owed this part of a turn
    answers_turns: int = 16
    # --- ballast ---
    #: ballast must make a tick take less than this part of the time: measuring is no finer
    ballast_worth: float = 0.97
    #: isolated ticks, which measure solo, have ballast and none in turn, so many each
    isolated_in_turn: int = 8
    # --- rows for drafts ---
    #: tokens that a stream may lose by wrong guesses; three lose 0.4 (Q4_0) to 1.6 (Q8_0, two cores)
    purse_at_start: float = 1.5
    #: a tick that is predicted to take so many times as long takes as long
    free_rows: float = 1.001
    # --- the cost model ---
    #: the scale factor follows within ten ticks, as when another program takes a core
    scale_rate: float = 0.1
    #: a measured batch size follows within twenty ticks of its own
    step_rate: float = 0.05
    #: `scale_rate` of an isolated tick beside readers
    alone_scale_rate: float = 0.2
    #: `step_rate` of it
    alone_step_rate: float = 0.05
    #: `scale_rate` of a mixed one: a size that is too low would raise solo, and every limit with it
    mixed_scale_rate: float = 0.02
    #: `step_rate` of it
    mixed_step_rate: float = 0.15
    #: how quickly the mean error of predictions is followed
    error_rate: float = 0.05
    #: a size that reaches this part of the best rate is as good
    plateau: float = 0.95


#: What the policy is planned with unless a trace or a simulation says otherwise.
TUNING: Final = Tuning()
