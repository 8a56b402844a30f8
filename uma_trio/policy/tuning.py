"""The constants of the deadline policy and of the cost model's learning, as one value.

The cost model carries it (:attr:`uma_trio.policy.cost.CostModel.tuning`), and a trace has it in its header. So a
tick is planned again with the constants that it was planned with, whatever today's are. docs/POLICY.md
has a table of what moved when each of them was halved and doubled in simulations.

No tuning: what the contract promises (:class:`uma_trio.policy.state.Contract`), what is a fact of kernels,
bounds that keep a disturbed machine from being believed (:mod:`uma_trio.policy.cost`), what decides about slots and
cells and not about ticks (:mod:`uma_trio.policy.admission`, :mod:`uma_trio.policy.prefix`), and constants that move no
figure of that table. Those stand beside their rules.
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
    margin_errors: float = _at(
        4.0,
        "a tick that spends slack is taken to last longer by so many mean errors of predictions",
    )
    least_error: float = _at(0.02, "the least mean error that is assumed")
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
    # --- the work beside streams ---
    dead_band: float = _at(1.03, "a size in use counts as so many times as good as it is")
    aim: float = _at(
        0.93,
        "ticks for newcomers are planned for this part of their limit: half of them last longer than predicted",
    )
    little_longer: float = _at(1.05, "a row that rides along may make a tick so many times as long")
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
    isolated_in_turn: int = _at(
        8, "isolated ticks, which measure solo, have ballast and none in turn, so many each"
    )
    # --- rows for drafts ---
    purse_at_start: float = _at(
        1.5,
        "tokens that a stream may lose by wrong guesses; three lose 0.4 (Q4_0) to 1.6 (Q8_0, two cores)",
    )
    free_rows: float = _at(
        1.001, "a tick that is predicted to take so many times as long takes as long"
    )
    # --- the cost model ---
    scale_rate: float = _at(
        0.1, "the scale factor follows within ten ticks, as when another program takes a core"
    )
    step_rate: float = _at(0.05, "a measured batch size follows within twenty ticks of its own")
    alone_scale_rate: float = _at(0.2, "`scale_rate` of an isolated tick beside readers")
    alone_step_rate: float = _at(0.05, "`step_rate` of it")
    mixed_scale_rate: float = _at(
        0.02,
        "`scale_rate` of a mixed one: a size that is too low would raise solo, and every limit with it",
    )
    mixed_step_rate: float = _at(0.15, "`step_rate` of it")
    error_rate: float = _at(0.05, "how quickly the mean error of predictions is followed")
    plateau: float = _at(0.95, "a size that reaches this part of the best rate is as good")


#: What the policy is planned with unless a trace or a simulation says otherwise.
TUNING: Final = Tuning()


def why(name: str) -> str:
    """Return where the value of a field comes from, or what it does."""
    text: str = fields_dict(Tuning)[name].metadata["why"]
    return text
