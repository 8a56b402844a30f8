"""The answer to `explain`, and the ticks of `top`, in the words of the protocol.

A frame is limited, and the requests and ticks of a busy daemon are not, so the answer is counted in bytes while it is
built: requests first, then ticks, starting with the most relevant one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from typing import Final

import msgspec
import trio

from uma_protocol import (
    DEFAULT_MAX_FRAME_BYTES,
    BeginningInfo,
    Explain,
    Explanation,
    GapInfo,
    ItemInfo,
    PhaseInfo,
    SkipInfo,
    StoryInfo,
    TickInfo,
)
from uma_trio.observe.records import Drafted, Phase, Recorded, RequestRecord, TickRecord, Wait
from uma_trio.observe.view import Viewer

TICKS_OF_ONE_REQUEST = 15
MAX_BYTES: Final = DEFAULT_MAX_FRAME_BYTES - (1 << 16)
_AT_ONCE: Final = 16  # requests and ticks between two checkpoints: about a millisecond
_MAX_REASON: Final = 160  # characters; a custom policy may write anything

TextOf = Callable[[RequestRecord, int], str | None]
"""Returns the text of a token; None if the viewer may not see it."""


def no_text(_record: RequestRecord, _token: int) -> None:
    """Return no text."""


def ticks_for(request: Explain) -> int:
    """Return the number of ticks that a request asks for."""
    if request.ticks is not None:
        return request.ticks
    return 0 if request.request is None else TICKS_OF_ONE_REQUEST


async def explanation(
    recorded: Recorded, viewer: Viewer, *, one: bool, text: TextOf = no_text
) -> Explanation | None:
    """Return the part of `recorded` that `viewer` may see, as much as fits into a frame.

    None if it is of `one` request, and that is not recorded or not the viewer's.
    """
    steps = explanation_in_steps(recorded, viewer, one=one, text=text)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Explanation | None = end.value
            return found
        await trio.lowlevel.checkpoint()


async def tick_infos(
    newest: Iterable[tuple[str, TickRecord]], viewer: Viewer, now: float, *, name_models: bool
) -> tuple[TickInfo, ...]:
    """Return ticks, newest first, as infos, oldest first: as many as fit into half a frame."""
    room, found = MAX_BYTES // 2, []
    for n, (model, record) in enumerate(newest, 1):
        tick = _tick(record, now, viewer, model if name_models else None)
        room -= len(msgspec.json.encode(tick)) + 1
        if room < 0:
            break
        found.append(tick)
        if n % _AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    return tuple(reversed(found))


def explanation_in_steps(
    recorded: Recorded, viewer: Viewer, *, one: bool, text: TextOf = no_text
) -> Generator[None, None, Explanation | None]:
    """Compute :func:`explanation`; yield after every few requests and ticks."""
    shown = [record for record in recorded.requests if viewer.sees_request(record.handle)]
    if one and not shown:
        return None
    room = MAX_BYTES
    requests: list[StoryInfo] = []
    for n, record in enumerate(reversed(shown), 1):
        request = _request(record, recorded.now, viewer, text)
        room -= len(msgspec.json.encode(request)) + 1
        if room < 0:
            break
        requests.append(request)
        if n % _AT_ONCE == 0:
            yield
    ticks: dict[int, TickInfo] = {}
    for n, i in enumerate(_by_relevance(recorded, one=one), 1):
        tick = _tick(recorded.ticks[i], recorded.now, viewer)
        room -= len(msgspec.json.encode(tick)) + 1
        if room < 0:
            break
        ticks[i] = tick
        if n % _AT_ONCE == 0:
            yield
    return Explanation(
        tuple(reversed(requests)),
        tuple(ticks[i] for i in sorted(ticks)),
        len(recorded.ticks) - len(ticks),
    )


def _by_relevance(recorded: Recorded, *, one: bool) -> list[int]:
    """Return the indices of the ticks: outwards from the worst gap of one request, or from the latest."""
    middle = len(recorded.ticks) - 1
    if one and (gap := recorded.requests[0].worst_gap) is not None:
        numbers = [tick.tick for tick in recorded.ticks]
        middle = numbers.index(gap.tick.tick) if gap.tick.tick in numbers else middle
    return sorted(range(len(recorded.ticks)), key=lambda i: abs(i - middle))


def _request(record: RequestRecord, now: float, viewer: Viewer, text: TextOf) -> StoryInfo:
    until = now if record.ended is None else record.ended
    admitted = until if record.admitted is None else record.admitted
    first, gap, named = record.first_token, record.worst_gap, viewer.names(record.handle)
    queued = Wait(record.queue_reason, record.queue_by) if record.queue_reason else None
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
        queue_reason=_clipped(viewer.wait(queued)) or None,
        passed_over=record.passed_over,
        ttft_ms=None if first is None else _ms(first - record.submitted),
        parked_ms=_ms(record.parked_s),
        held_ms=_ms(record.held_s),
        prefix_ms=_ms(record.prefix_s),
        aside_ms=_ms(record.aside_s),
        mask_ms=_ms(record.mask_s),
        waits=_clipped(viewer.wait(record.wait)),
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
        beginning=_beginning(record, text),
        choice=named.choice,
    )


def _beginning(record: RequestRecord, text: TextOf) -> BeginningInfo | None:
    found = record.beginning
    if found is None:
        return None
    return BeginningInfo(
        tokens=found.tokens,
        source=found.source,
        saved_ms=_ms(found.saved_s),
        apart=found.apart,
        mine=text(record, found.mine),
        other=text(record, found.other),
    )


def _phase(phase: Phase) -> PhaseInfo:
    return PhaseInfo(
        tokens=phase.tokens,
        ticks=phase.ticks,
        computing_ms=_ms(phase.computing_s),
        waiting_ms=_ms(phase.waiting_s),
        skipped={_clipped(reason): n for reason, n in phase.skipped.items()},
        drafted=phase.drafted,
        accepted=phase.accepted,
    )


def _tick(record: TickRecord, now: float, viewer: Viewer, model: str | None = None) -> TickInfo:
    limit = record.limit
    drafted = {one.key: one for one in record.drafted}
    items = [item for item in record.items if viewer.sees_request(item.key)]
    others = len(items) < len(record.items)
    return TickInfo(
        tick=record.tick,
        age_ms=_ms(now - record.at),
        items=tuple(
            _with_drafts(
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
            if viewer.sees_request(skip.key)
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
        model=model,
    )


def _with_drafts(drafted: Drafted | None, item: ItemInfo) -> ItemInfo:
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
    """Return a reason that can be sent whatever a policy wrote."""
    text = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"
    return text if text.isascii() else text.encode(errors="replace").decode()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
