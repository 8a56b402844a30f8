"""The answer to `explain`: what the engine recorded, in the words of the wire.

A frame has its limit and the requests and ticks of a busy daemon do not, so what is said is
counted in bytes while it is put together. Requests come first, then ticks from the one that
matters outwards. What is another principal's is left out, as :mod:`uma_trio.service.visibility` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Final

import msgspec
import trio
from attrs import frozen

from uma_protocol import (
    DEFAULT_MAX_FRAME_BYTES,
    BeginningInfo,
    Code,
    Error,
    Explain,
    Explanation,
    GapInfo,
    ItemInfo,
    PhaseInfo,
    SkipInfo,
    StoryInfo,
    TickInfo,
)
from uma_trio.engine.records import Drafted, Recorded, RequestRecord, Spent, TickRecord, Wait
from uma_trio.service.directory import Directory
from uma_trio.service.service import Service
from uma_trio.service.visibility import Viewer
from uma_trio.sockets.principal import Principal
from uma_trio.uds.wire import error_event

TICKS_OF_ONE_REQUEST = 15
MAX_BYTES = DEFAULT_MAX_FRAME_BYTES - (1 << 16)
_AT_ONCE = 16  # requests and ticks; they take about a millisecond
_MAX_REASON = 160  # characters; a policy may come from anybody


async def answer(request: Explain, service: Service, viewer: Principal) -> Explanation | Error:
    """Ask the engine, and return what to tell `viewer`, in the words of the wire; it fits into a frame."""
    recorded = await service.explain(request.request, ticks_for(request))
    looks = Looks(service.directory, Viewer(viewer), partial(_text, service, viewer))
    steps = _telling(request, recorded, looks)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            answer: Explanation | Error = end.value
            return answer
        await trio.lowlevel.checkpoint()


async def latest(service: Service, viewer: Viewer, ticks: int, now: float) -> tuple[TickInfo, ...]:
    """Return the latest ticks of all models, of the snapshots so far, oldest first; what `viewer` may not see is left out.

    Of long ones fewer: together they fit into a frame.
    """
    looks, room, found = Looks(service.directory, viewer), MAX_BYTES // 2, []
    several = sum(served.gives == "text" for served in service.models) > 1
    every = [
        (record.at, served.bounds.model if several else None, record)
        for served in service.models
        for record in served.ticks_after(-1, ticks)
    ]
    newest = sorted(every, key=lambda one: one[0], reverse=True)[:ticks]
    for n, (_, model, record) in enumerate(newest, 1):
        tick = msgspec.structs.replace(_tick(record, now, looks), model=model)
        room -= len(msgspec.json.encode(tick)) + 1
        if room < 0:
            break
        found.append(tick)
        if n % _AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    return tuple(reversed(found))


#: Sees everything.
OPERATOR: Final = Viewer(Principal(connection=0, is_operator=True))


def untold(_record: RequestRecord, _token: int) -> None:
    """Return no text."""


@frozen
class Looks:
    """What a viewer is told: names, which requests, and the text of which tokens.

    `text` returns None for a token that is not for whom the answer goes to.
    """

    directory: Directory
    viewer: Viewer = OPERATOR
    text: Callable[[RequestRecord, int], str | None] = untold

    def wait(self, wait: Wait | None) -> str:
        """Return what a request waits for, in words."""
        return self.viewer.wait(wait, self.directory)

    def shows(self, handle: int) -> bool:
        """Whether a request may be told of."""
        return self.viewer.sees(self.directory.name_of(handle))


def _text(service: Service, viewer: Principal, record: RequestRecord, token: int) -> str | None:
    namespace = record.namespace
    if token < 0 or namespace is None or not viewer.owns(namespace):
        return None
    model = service.model_of(record.handle)
    if model is None:
        return None  # its vocabulary is gone with it
    # A control token has no text.
    return model.detokenize([token]).decode("utf-8", "replace") or f"<token {token}>"


def ticks_for(request: Explain) -> int:
    """Return how many ticks to show."""
    if request.ticks is not None:
        return request.ticks
    return 0 if request.request is None else TICKS_OF_ONE_REQUEST


def _telling(
    request: Explain, recorded: Recorded, looks: Looks
) -> Generator[None, None, Explanation | Error]:
    """Put what was recorded into the words of the wire, as much of it as fits into a frame.

    It yields after every few requests and ticks: their number is the client's.
    """
    shown = [record for record in recorded.requests if looks.shows(record.handle)]
    if request.request is not None and not shown:
        return error_event(
            Code.E_PROTO_005,
            "no record of that request is kept; `uma-trio explain` lists the recorded ones",
        )
    room = MAX_BYTES
    timelines: list[StoryInfo] = []
    for n, record in enumerate(reversed(shown), 1):
        timeline = _timeline(record, recorded.now, looks)
        room -= len(msgspec.json.encode(timeline)) + 1
        if room < 0:
            break
        timelines.append(timeline)
        if n % _AT_ONCE == 0:
            yield
    ticks: dict[int, TickInfo] = {}
    for n, i in enumerate(_from_the_middle(request, recorded), 1):
        tick = _tick(recorded.ticks[i], recorded.now, looks)
        room -= len(msgspec.json.encode(tick)) + 1
        if room < 0:
            break
        ticks[i] = tick
        if n % _AT_ONCE == 0:
            yield
    return Explanation(
        tuple(reversed(timelines)),
        tuple(ticks[i] for i in sorted(ticks)),
        len(recorded.ticks) - len(ticks),
    )


def _from_the_middle(request: Explain, recorded: Recorded) -> list[int]:
    """Return the positions of the ticks, what matters most first."""
    middle = len(recorded.ticks) - 1
    if request.request is not None and (gap := recorded.requests[0].worst_gap) is not None:
        numbers = [tick.tick for tick in recorded.ticks]
        middle = numbers.index(gap.tick.tick) if gap.tick.tick in numbers else middle
    return sorted(range(len(recorded.ticks)), key=lambda i: abs(i - middle))


def _timeline(record: RequestRecord, now: float, looks: Looks) -> StoryInfo:
    until = now if record.ended is None else record.ended
    admitted = until if record.admitted is None else record.admitted
    first = record.first_token
    gap = record.worst_gap
    named = looks.directory.name_of(record.handle)
    return StoryInfo(
        request=record.handle,
        id=named.name,
        app=named.app,
        model=named.model,
        state=record.state,
        lane=record.lane,
        awaits=record.awaits,
        age_ms=_ms(now - record.submitted),
        total_ms=_ms(until - record.submitted),
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        queue_ms=_ms(admitted - record.submitted),
        queue_reason=_clipped(looks.wait(_queued(record))) or None,
        passed_over=record.passed_over,
        ttft_ms=None if first is None else _ms(first - record.submitted),
        parked_ms=_ms(record.parked_s),
        held_ms=_ms(record.held_s),
        prefix_ms=_ms(record.prefix_s),
        aside_ms=_ms(record.aside_s),
        mask_ms=_ms(record.mask_s),
        waits=_clipped(looks.wait(record.wait)),
        preemptions=record.preemptions,
        preempted_ms=_ms(record.preempted_s),
        prefill=_phase(record.prefill),
        decode=_phase(record.decode),
        worst_gap=None
        if gap is None
        else GapInfo(
            gap_ms=_ms(gap.seconds),
            tick=gap.tick.tick,
            reason=_clipped(gap.reason),
            skipped=gap.skipped,
        ),
        reason=record.reason or None,
        code=record.code,
        beginning=_beginning(record, looks),
        choice=named.choice,
    )


def _queued(record: RequestRecord) -> Wait | None:
    """Return what it had to wait for when it came, if it had."""
    return Wait(record.queue_reason, record.queue_by) if record.queue_reason else None


def _beginning(record: RequestRecord, looks: Looks) -> BeginningInfo | None:
    found = record.beginning
    if found is None:
        return None
    return BeginningInfo(
        tokens=found.tokens,
        source=found.source,
        saved_ms=_ms(found.saved_s),
        apart=found.apart,
        mine=looks.text(record, found.mine),
        other=looks.text(record, found.other),
    )


def _phase(spent: Spent) -> PhaseInfo:
    return PhaseInfo(
        tokens=spent.tokens,
        ticks=spent.ticks,
        computing_ms=_ms(spent.computing_s),
        waiting_ms=_ms(spent.waiting_s),
        skipped={_clipped(reason): n for reason, n in spent.skipped.items()},
        drafted=spent.drafted,
        accepted=spent.accepted,
    )


def _tick(record: TickRecord, now: float, looks: Looks) -> TickInfo:
    limit = record.limit
    drafted = {one.key: one for one in record.drafted}
    items = [item for item in record.items if looks.shows(item.key)]
    others = len(items) < len(record.items)
    return TickInfo(
        tick=record.tick,
        age_ms=_ms(now - record.at),
        items=tuple(
            _with(
                drafted.get(item.key),
                ItemInfo(
                    int(item.key),
                    item.phase,
                    int(item.n_tokens),
                    _clipped(item.reason),
                    late=item.key in record.late,
                ),
            )
            for item in items
        ),
        skipped=tuple(
            SkipInfo(int(skip.key), _clipped(skip.reason))
            for skip in record.skipped
            if looks.shows(skip.key)
        ),
        ballast=0 if others else record.ballast,
        limit_ms=_ms(limit.seconds) if math.isfinite(limit.seconds) else None,
        limit_reason=_clipped(limit.reason),
        predicted_ms=_ms(record.predicted_s) if record.predicted_s > 0 else None,
        measured_ms=_ms(record.measured_s),
        host_ms=_ms(record.host_s),
        moved_bytes=record.moved_bytes if math.isfinite(record.moved_bytes) else 0.0,
        status=record.status,
        recovery=record.recovery or None,
        others=others,
    )


def _with(drafted: Drafted | None, item: ItemInfo) -> ItemInfo:
    """Return what a request got in a tick with what was guessed of its answer."""
    if drafted is None:
        return item
    return msgspec.structs.replace(
        item,
        drafted=drafted.n,
        accepted=drafted.right,
        source=drafted.source,
        match=drafted.match,
    )


def _clipped(reason: str) -> str:
    """Return what a policy gave as its reason, as something that can surely be sent."""
    text = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"
    return text if text.isascii() else text.encode(errors="replace").decode()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
