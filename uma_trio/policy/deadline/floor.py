"""The least that background work gets: a grant, where it had less than its floor for too long.

Readers leave what a step is longer than solo, which is more than the floor in most cases. Grants are for
work that no slack suffices for, and for a floor above what readers leave.

While background work is ready beside readers it is *owed* its floor of each tick, less what it had of it. Once
that is as much as a grant adds to a tick, it gets one.
"""

from __future__ import annotations

from uma_trio.policy.state import Contract, GuardMemory, MeasuredTick, SchedulerState, is_newcomer

# Slack is spent in few large ticks: so long nothing is owed to who has just come, or was just served.
PATIENCE_S = 2.0
ENOUGH = 1.1  # a floor that is above what readers leave by less than this is met by that
UNMEASURED = 2  # ticks behind a grant, in which it is not known yet what that gave


def nothing_owed(contract: Contract) -> float:
    """Return where the account of background work begins, in seconds."""
    return -contract.background_floor * PATIENCE_S


def owed_after(guard: GuardMemory, tick: MeasuredTick, contract: Contract, left: float) -> float:
    """Return how many seconds of the machine background work is owed after a measured tick.

    Where the floor is within the part of machine time that readers have `left`, half of it is owed.
    """
    if not tick.work.contended or tick.solo_s <= 0:
        return guard.owed_s
    floor = contract.background_floor
    owed_s = floor * tick.decode_s / (2 if floor <= ENOUGH * left else 1)
    had_s = max(0.0, tick.decode_s - tick.solo_s) * tick.background if tick.mixed else 0.0
    return max(guard.owed_s + owed_s - had_s, nothing_owed(contract))


def waits(state: SchedulerState) -> bool:
    """Whether background work is ready."""
    most = state.contract.newcomer_tokens
    return any(not is_newcomer(view, most) for view in state.best_effort.values())


def is_granted(guard: GuardMemory, adds_s: float) -> bool:
    """Whether background work that waits is granted a tick, to which it adds so many seconds."""
    return guard.since_grant > UNMEASURED and guard.owed_s >= adds_s
