"""The two orders of a tick: when it is planned, submitted, committed and published.

A tick passes through the same parts wherever it is computed (docs/TICK.md):

- *prepare*: plan the next tick from the predicted state and batch it, while one is computed;
- *submit*: hand the batch to the backend, which computes it (:meth:`uma_trio.engine.loop.Engine.compute`);
- *commit*: move the sequences on by what was sampled;
- *publish*: hand texts, metrics and the trace to the outside.

They come in one of two orders. A CPU computes on the engine's own thread, so whatever the host does delays the next
decode or has to wait: :class:`Serial`. A GPU computes beside that thread: :class:`Overlapped`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from attrs import frozen

from uma_trio.engine.chunk import Tick


@frozen
class TickParts:
    """The parts of a tick, which the engine has. All are for its thread.

    `take_in` handles messages and admits; `plan` asks the policy for the next tick from what is so now, and
    `take_prepared` returns the prepared one if it comes next for sure. `commit_beside` is a commit while the next tick
    is computed: then no cell may be dropped. `masks_here` and `masks_elsewhere` start to find the masks that the tokens of
    a tick may need, in any process or in others only. `decode_begins` notes that all before is no part of the decode.
    """

    commit: Callable[[], None]
    commit_beside: Callable[[], None]
    take_in: Callable[[float], None]
    side_work: Callable[[], None]
    plan: Callable[[float], Tick | None]
    take_prepared: Callable[[], Tick | None]
    prepare: Callable[[Tick], None]
    publish: Callable[[], None]
    masks_here: Callable[[Tick], None]
    masks_elsewhere: Callable[[Tick], None]
    decode_begins: Callable[[], None]


class Order(Protocol):
    """What the engine's thread does between two decodes, and what beside one."""

    def next_tick(self, now: float) -> Tick | None:
        """Return the tick to submit next; None if there is nothing to compute. No decode runs."""

    def beside(self, tick: Tick) -> None:
        """Do what is left of the tick before. The backend calls this while it computes `tick`, or right before."""


@frozen
class Serial:
    """The order where the decode needs the engine's thread, and all cores: on a CPU.

    ::

        engine    commit 1, plan 2 | publish 1, decode 2 | sample 2 | commit 2, plan 3 | publish 2, decode 3 | ...
        trio                         ...writes tokens of 1...                            ...of 2...

    A tick is planned from what is so, never from a prediction. Publishing comes last before the decode: the decode
    releases the interpreter's lock, and the thread that was just woken writes the tokens meanwhile.
    """

    do: TickParts

    def next_tick(self, now: float) -> Tick | None:
        """Commit the tick before, and plan."""
        self.do.commit()
        self.do.take_in(now)
        self.do.side_work()
        return self.do.plan(now)

    def beside(self, tick: Tick) -> None:
        """Publish the tick before; the decode begins when this returns."""
        self.do.publish()
        self.do.masks_elsewhere(tick)
        self.do.decode_begins()


@frozen
class Overlapped:
    """The order where the decode goes on without the host: on a GPU.

    ::

        GPU       | decode 2                         |          | decode 3                         |
        engine    | commit 1, publish 1, prepare 3   | sample 2 | commit 2, publish 2, prepare 4   | sample 3

    Tick 3 is prepared from the predicted state: every sequence of tick 2 one token further. It lacks only the tokens of
    tick 2, which are written into its batch when they are sampled. If something else happened meanwhile (a request
    came, an answer ended, a draft is likely), the order of a CPU is kept for this once: commit 2, plan 3.
    """

    do: TickParts
    unforeseen: Serial

    def next_tick(self, now: float) -> Tick | None:
        """Return the prepared tick, whose predecessor is committed beside it; plan anew if it does not fit."""
        tick = self.do.take_prepared()
        if tick is None:
            return self.unforeseen.next_tick(now)
        self.do.side_work()
        return tick

    def beside(self, tick: Tick) -> None:
        """Commit and publish the tick before, and prepare the one behind `tick`."""
        self.do.commit_beside()
        self.do.publish()
        self.do.masks_here(tick)
        self.do.prepare(tick)
