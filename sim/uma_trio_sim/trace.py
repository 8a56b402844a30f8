"""What a trace shows of a real run: who sent what, when, and what each request saw.

A trace (``uma-trio serve --trace``) has every tick's state, plan and time. From it come the
requests, and the sessions that would send them again. The machine that it shows is in
:mod:`uma_trio_sim.fitted`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from attrs import define, field, frozen

from uma_trio.policy.portable import Footer, Header, TracedTick, TraceError, decode
from uma_trio.words import Lane
from uma_trio_sim.guesses import Guesses
from uma_trio_sim.latency import percentile
from uma_trio_sim.traced_guesses import guesses_of
from uma_trio_sim.workload import ENDLESS, Session, Turn


@frozen
class Recording:
    """A trace in memory. `dropped` ticks are missing in it; None if its end is."""

    header: Header
    ticks: tuple[TracedTick, ...]
    dropped: int | None


def read(path: Path) -> Recording:
    """Read a trace.

    Raises:
        OSError: the file cannot be read.
        TraceError: it is no trace of this version, or has no tick.
    """
    with path.open("rb") as file:
        # A killed daemon leaves half a line.
        whole = (text for text in file if text.endswith(b"\n"))
        lines = [_line(path, number, text) for number, text in enumerate(whole, start=1)]
    ticks = tuple(line for line in lines if isinstance(line, TracedTick))
    if not lines or not isinstance(lines[0], Header) or not ticks:
        message = f"{path}: it does not begin with a trace's header, or has no tick"
        raise TraceError(message)
    header, last = lines[0], lines[-1]
    ticks = tuple([header.tuned(tick) for tick in ticks])
    return Recording(header, ticks, last.dropped if isinstance(last, Footer) else None)


def _line(path: Path, number: int, text: bytes) -> object:
    try:
        return decode(text)
    except TraceError as error:
        message = f"{path}, line {number}: {error}"
        raise TraceError(message) from None


@define
class TracedRequest:
    """One request, from the ticks that it was in. Seconds on the daemon's clock.

    `ended` is None if it was there in the last tick. `itl` is the time for each token and `gaps`
    the time between deliveries of one or several, as the daemon measured both. `guesses` are what
    its drafter had.
    """

    key: int
    client: int
    lane: Lane
    arrived: float
    prompt: int
    answer: int = 0
    first_token: float | None = None
    ended: float | None = None
    itl: list[float] = field(factory=list)
    gaps: list[float] = field(factory=list)
    guesses: Guesses | None = None


def requests_of(ticks: Sequence[TracedTick]) -> list[TracedRequest]:
    """Return every request that had a slot, in the order of arrival."""
    found: dict[int, TracedRequest] = {}
    last_seen: dict[int, int] = {}
    ends = _ends(ticks)
    for i, tick in enumerate(ticks):
        due = {}
        for view in tick.state.sequences:
            known = view.due + view.computed
            request = found.get(view.key)
            if request is None:
                request = found[view.key] = TracedRequest(
                    view.key,
                    view.client,
                    view.lane,
                    view.arrived,
                    prompt=known,
                    first_token=view.first_token_at,
                )
            request.answer = known - request.prompt
            if not tick.state.prepared:  # a prepared tick has the predicted time
                request.first_token = view.first_token_at
            last_seen[view.key] = i
            due[view.key] = view.due
        # The measurements that a failed tick was planned from are in the next state again.
        seen = len(ticks[i - 1].state.measured) if i and ticks[i - 1].status != 0 else 0
        measured = tick.state.measured[seen:]
        for n, one in enumerate(measured, start=1):
            # Behind drafts no tick is prepared, so the latest measurement is that of the tick before.
            of_before = i and n == len(measured) and not tick.state.prepared
            for key, itl_s in one.itl.items():
                if key in found:
                    given = ticks[i - 1].gave(key) if of_before else 1
                    found[key].itl += [itl_s] * given
                    found[key].gaps.append(itl_s * given)
        for item in tick.plan.items if tick.status == 0 else ():
            given, ready = tick.gave(item.key), item.n_tokens - item.n_drafts == due[item.key]
            if ready and given:  # it got tokens, perhaps its last
                request = found[item.key]
                request.answer += given
                request.first_token = request.first_token or ends[i]
    guesses = guesses_of(ticks)
    for key, i in last_seen.items():
        found[key].guesses = guesses.get(key)
        if i < len(ticks) - 1:
            found[key].ended = ends[i]
    return sorted(found.values(), key=lambda request: (request.arrived, request.key))


def _ends(ticks: Sequence[TracedTick]) -> list[float]:
    """Return when each decode ended; the trace has only when its plan was begun.

    Times of decodes that follow one another are summed from the first of them. What was done beside
    ticks (moving cells) shows in when the next plan was begun.
    """
    ends: list[float] = []
    for before, tick in zip((None, *ticks), ticks, strict=False):
        follows = before is not None and tick.host_s > 0
        follows = follows and before is not None and tick.state.tick == before.state.tick + 1
        begun = ends[-1] + tick.host_s if follows else tick.state.now
        if not tick.state.prepared:
            begun = max(begun, tick.state.now)
        ends.append(begun + tick.decode_s)
    return ends


@frozen
class Figures:
    """Figures of interactive streams, or of all where there are none. Seconds.

    `itl` is the time for each token, `gap_p95` between deliveries, in which there are
    `delivered` tokens on average. `tokens_s` is everything that was computed, prompts and answers,
    by the time from the first arrival to the end of the last tick; wrong guesses are no tokens. Of
    those that were computed `accepted` is the share that was right, and `drafted` how many there were a
    tick. `latencies` is how many inter-token latencies there are.
    """

    itl_p50: float
    itl_p95: float
    itl_p99: float
    gap_p95: float
    delivered: float
    ttft_p50: float
    tokens_s: float
    drafted: float
    accepted: float
    latencies: int
    requests: int


def figures(ticks: Sequence[TracedTick], began: float | None = None) -> Figures:
    """Return the figures of a run, from `began` or its first arrival on.

    Raises:
        TraceError: there is no stream of two tokens in it.
    """
    requests = requests_of(ticks)
    read = [r for r in requests if r.lane == "interactive" and r.itl] or requests
    watched = {"interactive"} if read[0].lane == "interactive" else {"background"}
    latencies = [latency for request in read for latency in request.itl]
    ttft = [
        r.first_token - r.arrived
        for r in requests
        if r.lane in watched and r.first_token is not None
    ]
    if not latencies or not ttft:
        message = "no stream in the trace has two tokens: there is no latency to predict"
        raise TraceError(message)
    began = requests[0].arrived if began is None else began
    gaps = [gap for request in read for gap in request.gaps]
    good = [tick for tick in ticks if tick.status == 0]
    drafted = sum(item.n_drafts for tick in good for item in tick.plan.items)
    accepted = sum(sum(tick.accepted.values()) for tick in good)
    computed = sum(tick.plan.n_tokens for tick in good) - drafted + accepted
    return Figures(
        percentile(latencies, 50),
        percentile(latencies, 95),
        percentile(latencies, 99),
        percentile(gaps, 95),
        len(latencies) / len(gaps),
        median(ttft),
        computed / (_ends(ticks)[-1] - began),
        drafted / len(good),
        accepted / max(1, drafted),
        len(latencies),
        len(requests),
    )


def sessions(requests: Iterable[TracedRequest], *, closed: bool = True) -> tuple[Session, ...]:
    """Return the sessions that would send `requests` again, from time 0 on.

    A request that follows the end of another one of the same client and lane is taken to be its
    consequence: it comes the same time after the simulated end. Of several that ended it follows
    the latest that nothing else follows. All others, and all unless `closed`, come at their own
    times. A request that was not over at the end of the trace does not end here either.
    """
    ordered = sorted(requests, key=lambda request: (request.arrived, request.key))
    chains: list[list[TracedRequest]] = []
    for request in ordered:
        before = max(
            (c for c in chains if closed and _leads(c[-1], request)),
            key=lambda c: c[-1].ended or 0.0,
            default=None,
        )
        if before is None:
            chains.append([request])
        else:
            before.append(request)
    zero = ordered[0].arrived if ordered else 0.0
    return tuple(
        Session(chain[0].client, chain[0].lane, chain[0].arrived - zero, tuple(_turns(chain)))
        for chain in chains
    )


def _leads(before: TracedRequest, after: TracedRequest) -> bool:
    same = (before.client, before.lane) == (after.client, after.lane)
    return same and before.ended is not None and before.ended <= after.arrived


def _turns(chain: Sequence[TracedRequest]) -> Iterable[Turn]:
    ended: float | None = None
    for request in chain:
        think_s = 0.0 if ended is None else request.arrived - ended
        answer = ENDLESS if request.ended is None else max(1, request.answer)
        yield Turn(think_s, request.prompt, answer, guesses=request.guesses)
        ended = request.ended
