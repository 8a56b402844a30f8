"""The account of background work beside readers: what it is owed where slack never suffices for it.

A step is so long that readers leave the others their floor
(:func:`~uma_trio.policy.deadline.slack.step_s`), and they get it as slack. But slack may never suffice:

- readers can only be ahead by little (`playout_s`, few free places), and one row more takes longer;
- newcomers who come without end spend it all;
- ticks take so much longer than predicted that readers never get ahead.

So while background work is ready it is *owed* half of its floor of each tick, less what it had of it. Once
that is as much as a grant adds to a tick, it gets one, and tokens are late.
"""

from __future__ import annotations

from uma_trio.policy.state import SchedulerState, is_newcomer


def owed_after(state: SchedulerState, solo_s: float, tick_s: float, background: float) -> float:
    """Return how many seconds of the machine background work is owed after a tick.

    The tick takes `tick_s`; `background` is its part of what that is more than `solo_s`.
    """
    contract, most = state.contract, state.contract.newcomer_tokens
    # Readers who leave the floor need `playout_s` over the floor to get as far ahead as they can.
    nothing_s = -contract.playout_s / 2
    if solo_s <= 0 or all(is_newcomer(view, most) for view in state.best_effort.values()):
        return nothing_s
    owed_s = contract.background_floor / 2 * tick_s
    had_s = max(0.0, tick_s - solo_s) * background
    return max(state.memory.guard.owed_s + owed_s - had_s, nothing_s)
