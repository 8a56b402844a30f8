"""What the engine does with each message that arrives."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from functools import partial

from attrs import Factory, field, frozen

from uma_trio.backend.base import Backend
from uma_trio.engine.chunk import Chunk, TickResult
from uma_trio.engine.drafts import Drafting
from uma_trio.engine.kv import admin
from uma_trio.engine.messages import (
    Cancel,
    Credit,
    Explain,
    InboxMessage,
    Inspect,
    Keep,
    Prefix,
    SetLane,
    Submit,
)
from uma_trio.engine.planner import Planner
from uma_trio.engine.publisher import FAILED_AT, FAILED_CODE, Answer, Publisher
from uma_trio.engine.recorder import AWAY, NEEDED, Recorder
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import Sampler
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.snapshot import snapshot, wait_of
from uma_trio.observe import log
from uma_trio.policy.admission import (
    admit,
    preempt_for_first_token,
    preempt_for_interactive,
    preempt_parked,
)
from uma_trio.policy.floor import bucket_after
from uma_trio.policy.state import Contract
from uma_trio.text.stream import TokenText


@frozen(eq=False)
class Handler:
    """Does what messages ask for. For the engine's thread, once the latest tick is committed.

    What they are answered with is added to the publisher.
    """

    backend: Backend
    registry: Registry
    publisher: Publisher
    recorder: Recorder
    planner: Planner
    drafter: Drafting
    _pieces: Ordered[bytes] = field(
        default=Factory(lambda self: self.backend.vocabulary.pieces(), takes_self=True), init=False
    )

    def handle(self, message: InboxMessage, now: float) -> None:
        """Do what a message asks for at the time `now`."""
        registry, recorder, publisher = self.registry, self.recorder, self.publisher
        prefix = registry.cells.prefix
        match message:
            case Credit(handle, n):
                registry.give_credit(handle, n)
            case Submit():
                self._enqueue(message, now)
            case Cancel():
                registry.cancel(message, now)
            case SetLane(handle, lane):
                registry.set_lane(handle, lane)
            case Inspect(reply, after):
                seen = snapshot(registry, recorder, self.backend.limits.n_ctx, now, after)
                publisher.add(Answer(partial(reply, seen)))
            case Explain(answer, handle, ticks):
                recorded = recorder.explain(
                    now, handle, ticks, lambda sequence: wait_of(sequence, registry, recorder, now)
                )
                publisher.add(Answer(partial(answer, recorded)))
            case Keep(handle):
                prefix.keep(handle)
            case Prefix():
                reported = admin.handle(prefix, message)
                if message.clear:
                    publisher.publish()  # what has ended is kept, and then forgotten
                    self.drafter.forget(message.mine)
                publisher.add(Answer(partial(message.reply, reported)))

    def _enqueue(self, submit: Submit, now: float) -> None:
        try:
            ends = self.backend.vocabulary.end_tokens
            sampler = Sampler(submit.params, ends, submit.prompt, submit.constraint)
            sequence = Sequence(
                submit, sampler, TokenText(submit.pieces or self._pieces, submit.stop)
            )
        except Exception as error:
            log.get("engine").error(FAILED_AT, request=submit.handle, exc_info=error)
            self.registry.refuse(submit, now, FAILED_CODE, FAILED_AT)
        else:
            self.registry.enqueue(sequence)
            if submit.owes_s:
                self.planner.charge({submit.program: submit.owes_s})


class SlotAdmission:
    """Gives slots to those that wait, and takes them from others. For the engine's thread."""

    def __init__(self, registry: Registry, recovery: Recovery, contract: Contract) -> None:
        self._registry = registry
        self._recovery = recovery
        self._floor = contract.background_floor

    def admit(self, now: float) -> None:
        """Admit those that get a slot, and preempt those that make room for them."""
        registry = self._registry
        registry.note_waiting(now)
        made_room = self._recovery.just_made_room()
        if not registry.may_admit(now):
            return
        # Admission right after room was made would undo it, unless no request needed it.
        if made_room and any(sequence.credit > 0 for sequence in registry.running.values()):
            return
        state = registry.admission(now)
        chosen = admit(state)
        if not chosen and registry.lend(now):
            state = registry.admission(now)
            chosen = admit(state)
        for making_room, reason in (
            (preempt_parked, AWAY),
            (preempt_for_interactive, NEEDED),
            (preempt_for_first_token, NEEDED),
        ):
            places = () if chosen else making_room(state)
            for place in places:
                registry.preempt(place, reason)
            if places:
                state = registry.admission(now)
                chosen = admit(state)
                registry.made_way(places, chosen)
        registry.admit(chosen, now)

    def charge(self, completed: TickResult, chunks: Iterable[tuple[Sequence, Chunk]]) -> None:
        """Note what background requests had of a tick that is not committed yet."""
        chunks = list(chunks)
        tick_s, had_s = completed.decode_s + completed.host_s, 0.0
        n_tokens = sum([chunk.n_tokens for _, chunk in chunks])
        for sequence, chunk in chunks:
            if sequence.lane == "background":
                share_s, decoding = tick_s * chunk.n_tokens / n_tokens, sequence.view.decoding
                had_s += sequence.tenancy.spend(chunk, share_s, decoding=decoding)
        registry = self._registry
        contended = registry.is_contended
        registry.owe(
            bucket_after(registry.bucket_s, self._floor, tick_s, had_s, contended=contended)
        )
