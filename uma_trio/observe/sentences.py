"""How a request spent its time, in sentences and in shares. Pure: values in, text out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from uma_trio.words import duration, harmless, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uma_protocol import BeginningInfo, GapInfo, PhaseInfo, StoryInfo, TickInfo

PARTS = ("queued", "prefix", "prefill", "decode", "mask", "aside", "parked", "preempted")
_SLOW = 1.3  # times its prediction: twice the error from which a cost model is not trusted (policy/cost.py)
_MOST = 0.4  # of its time: a part of at least this is the verdict
_LEAST_VERDICT_MS = 200.0  # a shorter request has no verdict: nobody has waited
_ADMITTED_LATE = "what was computed when it came had to end"
_LEAST_MS = 0.5  # shorter than this is not worth a sentence


def parts_ms(timeline: StoryInfo) -> dict[str, float]:
    """Return the milliseconds that each of `PARTS` took."""
    return {
        "queued": timeline.queue_ms,
        "prefix": timeline.prefix_ms,
        "prefill": timeline.prefill.computing_ms + timeline.prefill.waiting_ms,
        "decode": timeline.decode.computing_ms + timeline.decode.waiting_ms,
        "mask": timeline.mask_ms,
        "aside": timeline.aside_ms,
        "parked": timeline.parked_ms,
        "preempted": timeline.preempted_ms,
    }


def shares(timeline: StoryInfo) -> dict[str, float]:
    """Return the share of the request's time that each of `PARTS` took, 0 to 1."""
    whole = max(timeline.total_ms, 1e-9)
    return {name: min(1.0, ms / whole) for name, ms in parts_ms(timeline).items()}


def sentences(timeline: StoryInfo, ticks: Sequence[TickInfo] = ()) -> list[str]:
    """Return the story of one request: the head, what it waits for, the verdict, then each part of its time.

    `ticks` are those that are known; the one of its worst gap may be among them.
    """
    lines = [_head(timeline)]
    if timeline.waits:
        lines.append(f"now: {harmless(timeline.waits)}")
    lines += verdict(timeline)
    lines += _parts(timeline)
    if timeline.worst_gap is not None:
        lines.append(f"worst gap {worst_gap(timeline.worst_gap, ticks)}")
    if (rest_ms := timeline.total_ms - sum(parts_ms(timeline).values())) >= _LEAST_MS:
        lines.append(f"{time_ms(rest_ms)} in none of these parts")
    if slow := slowdown(timeline.request, ticks):
        lines.append(slow)
    return lines


def verdict(timeline: StoryInfo) -> list[str]:
    """Return what most of its time was, in a sentence; nothing where it had no long part."""
    prefill, decode = timeline.prefill, timeline.decode
    left_out: Counter[str] = Counter({**prefill.skipped})
    left_out.update(decode.skipped)
    ((reason, _),) = left_out.most_common(1) or (("", 0),)
    why = harmless(timeline.queue_reason or "")
    what = {
        "it waited for a slot" + (f": {why}" if why else ""): timeline.queue_ms,
        "it waited for its beginning": timeline.prefix_ms,
        "it had lost its slot": timeline.preempted_ms,
        "its reader was behind": timeline.parked_ms,
        f"ticks left it out: {harmless(reason)}": prefill.waiting_ms + decode.waiting_ms,
        "what its schema or grammar allows was not known yet": timeline.mask_ms,
        "the engine did other work between ticks, or computed another model": timeline.aside_ms,
        "its prompt was computed": prefill.computing_ms,
        "its answer was computed": decode.computing_ms,
    }
    most = max(what, key=lambda name: what[name])
    if timeline.total_ms < _LEAST_VERDICT_MS or what[most] < _MOST * timeline.total_ms:
        return []
    return [f"mostly, {time_ms(what[most])} of {time_ms(timeline.total_ms)}, {most}"]


def _parts(timeline: StoryInfo) -> list[str]:
    """Return a sentence for each part of its time that there was."""
    lines = []
    if timeline.queue_ms >= _LEAST_MS or timeline.queue_reason:
        lines.append(_queued(timeline))
    if timeline.prefix_ms >= _LEAST_MS:
        lines.append(
            f"waited {time_ms(timeline.prefix_ms)} until its beginning was restored from memory or disk, or computed by "
            "another request"
        )
    if timeline.beginning is not None:
        lines.append(_began(timeline.beginning, timeline.prompt_tokens))
    lines += _phase("prefill", timeline.prefill)
    if timeline.ttft_ms is not None:
        lines.append(f"first token after {time_ms(timeline.ttft_ms)}")
    lines += _phase("decode", timeline.decode)
    if timeline.mask_ms >= _LEAST_MS:
        lines.append(
            f"waited {time_ms(timeline.mask_ms)} for masks: what its schema or grammar allows was not known yet"
        )
    if timeline.aside_ms >= _LEAST_MS:
        lines.append(
            f"{time_ms(timeline.aside_ms)} between ticks: prefixes were saved or restored, texts encoded, "
            "or another model was computed"
        )
    if timeline.parked_ms >= _LEAST_MS:
        lines.append(f"parked {time_ms(timeline.parked_ms)}: its reader was behind")
    if timeline.held_ms >= _LEAST_MS:
        lines.append(
            f"computed up to {time_ms(timeline.held_ms)} ahead of its reader: "
            "tokens were held so that they came evenly"
        )
    if timeline.preemptions:
        lines.append(
            f"preempted {_times(timeline.preemptions)}, {time_ms(timeline.preempted_ms)} without a slot: "
            "the KV cache had no room, or a person needed its place; "
            "what of that was not in the cache any more was computed again"
        )
    return lines


def slowdown(request: int, ticks: Sequence[TickInfo]) -> str:
    """Say that the machine was slower than it is known to be; "" if it was not."""
    timed = [
        (tick.measured_ms, tick.predicted_ms)
        for tick in ticks
        if tick.predicted_ms and any(item.request == request for item in tick.items)
    ]
    took, predicted = (sum(times) for times in zip(*timed, strict=True)) if timed else (0.0, 0.0)
    if took < _SLOW * predicted or not predicted:
        return ""
    return (
        f"the machine took {took / predicted:.1f} x its prediction in the {several(len(timed), 'tick')} "
        "below: another program may use the processor (`uma-trio doctor`)"
    )


_SOURCES = {
    "running": "shared with a request that ran",
    "leaf": "still in the KV cache",
    "saved": "restored from memory",
    "disk": "read from the disk",
    "fork": "computed by another request at the time",
}


def _began(found: BeginningInfo, prompt_tokens: int) -> str:
    """Say what of the prompt was cached, and where it and the most similar one differ."""
    if found.tokens:
        where = _SOURCES.get(found.source, harmless(found.source))
        text = f"{found.tokens:,} of {prompt_tokens:,} prompt tokens were cached, {where}: "
        text += f"{time_ms(found.saved_ms)} saved"
    else:
        text = f"nothing of the prompt was cached; the most similar one has the same first {found.apart:,} tokens"
    if found.apart >= prompt_tokens - 1 or found.mine is None:
        return text
    other = "ends" if found.other is None else f"has {harmless(found.other)!r}"
    return f"{text}; token {found.apart:,} is {harmless(found.mine)!r} where the most similar one {other}"


def worst_gap(gap: GapInfo, ticks: Sequence[TickInfo] = ()) -> str:
    """Return how long it was and where, and what kept it waiting or how its tick was planned."""
    why = harmless(gap.reason)
    if gap.skipped:
        left_out = f"left out of {several(gap.skipped, 'tick')} before it"
        return f"{time_ms(gap.gap_ms)} until tick {gap.tick}, {left_out}: {why}"
    text = f"{time_ms(gap.gap_ms)} in tick {gap.tick}" + (f" (plan: {why})" if why else "")
    for tick in ticks:
        if tick.tick == gap.tick:
            limit = "no limit" if tick.limit_ms is None else f"limit {time_ms(tick.limit_ms)}"
            text += f": {limit}, predicted {maybe_ms(tick.predicted_ms)}, "
            text += f"took {time_ms(tick.measured_ms)}"
    return text


def _head(timeline: StoryInfo) -> str:
    names = [harmless(name) for name in (timeline.app, timeline.id) if name]
    if timeline.choice:
        names.append(f"choice {timeline.choice}")
    if timeline.model:
        names.append(f"model {harmless(timeline.model)}")
    who = f"Request {timeline.request}" + (f" ({', '.join(names)})" if names else "")
    if timeline.reason is None:
        how = f"{timeline.state}, {time_ms(timeline.total_ms)} old"
    else:
        code = f" {timeline.code}" if timeline.code else ""
        how = f"ended ({timeline.reason}{code}) after {time_ms(timeline.total_ms)}"
    return (
        f"{who}, {timeline.lane}{_waits(timeline)}: {how}; {several(timeline.prompt_tokens, 'token')} of prompt, "
        f"{timeline.completion_tokens} of answer."
    )


def _waits(timeline: StoryInfo) -> str:
    """Say what somebody waits for, where it is not what the lane says."""
    return ", its end is waited for" if timeline.awaits == "answer" else ""


def _queued(timeline: StoryInfo) -> str:
    text = f"queued {time_ms(timeline.queue_ms)}"
    text += f": {harmless(timeline.queue_reason or _ADMITTED_LATE)}"
    if timeline.passed_over:
        text += f"; later requests were let in before it {_times(timeline.passed_over)}"
    return text


def _phase(name: str, phase: PhaseInfo) -> list[str]:
    if not phase.ticks and not phase.skipped:
        return []
    text = f"{name} {several(phase.tokens, 'token')} in {several(phase.ticks, 'tick')} over "
    text += time_ms(phase.computing_ms)
    if phase.drafted:
        text += f", {phase.accepted} of them guessed right of {phase.drafted} drafted"
    if phase.skipped:
        left_out = several(sum(phase.skipped.values()), "tick")
        text += f", left out of {left_out} over {time_ms(phase.waiting_ms)}: "
        text += _reasons(phase.skipped)
    return [text]


def _reasons(skipped: Mapping[str, int]) -> str:
    """Return the reasons, the most frequent first, each with its count if there are several."""
    if len(skipped) == 1:
        return harmless(next(iter(skipped)))
    ordered = sorted(skipped.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{n} x {harmless(reason)}" for reason, n in ordered)


def maybe_ms(ms: float | None) -> str:
    """Return a time as it is said; "-" where there is none."""
    return "-" if ms is None else time_ms(ms)


def time_ms(ms: float) -> str:
    """Return a time as it is said: 3.4 ms, 120 ms, 4.0 s."""
    return duration(ms / 1e3) if ms >= 100 else f"{ms:.1f} ms"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
