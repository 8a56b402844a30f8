"""What a trace shows of a real run: who asked what, when, and how long ticks of each kind took.

A trace (`uma-trio serve --trace`) has every tick's state, plan and time. From it come the requests
as they were felt, the sessions that would ask them again, and a machine that takes as long.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from attrs import define, field, frozen

from benches.machine import Profile
from benches.workload import ENDLESS, Session, Turn
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import Footer, Header, TracedTick, TraceError, decode
from uma_trio.policy.state import Lane, SchedulerState

ENOUGH = 20  # ticks of a kind from which its own scatter is drawn, and not everybody's
NEIGHBOURS = 8  # ticks before and after one that tell what the machine was like then
TYPICAL = 3  # ticks from which the median of a kind is taken, and not its neighbours'
LEAST = 0.2  # of a tick is not looking back, whatever the slopes say
SPIKE = 1.5  # a tick this many times its kind's median shows the noise, and no slope


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
        whole = (
            text for text in file if text.endswith(b"\n")
        )  # a killed daemon leaves half a line
        lines = [_line(path, number, text) for number, text in enumerate(whole, start=1)]
    ticks = tuple(line for line in lines if isinstance(line, TracedTick))
    if not lines or not isinstance(lines[0], Header) or not ticks:
        message = f"{path}: it does not begin with a trace's header, or has no tick"
        raise TraceError(message)
    last = lines[-1]
    return Recording(lines[0], ticks, last.dropped if isinstance(last, Footer) else None)


def _line(path: Path, number: int, text: bytes) -> object:
    try:
        return decode(text)
    except TraceError as error:
        message = f"{path}, line {number}: {error}"
        raise TraceError(message) from None


# --- what was asked, and how it was felt ---


@define
class Asked:
    """One request, from the ticks that it was in. Seconds on the daemon's clock.

    `ended` is None if it was there in the last tick. `gaps` are those that the daemon measured.
    """

    key: int
    client: int
    lane: Lane
    arrived: float
    prompt: int
    answer: int = 0
    first_token: float | None = None
    ended: float | None = None
    gaps: list[float] = field(factory=list)


def asked(ticks: Sequence[TracedTick]) -> list[Asked]:
    """Return every request that had a slot, in the order of arrival."""
    found: dict[int, Asked] = {}
    last_seen: dict[int, int] = {}
    ends = _ends(ticks)
    for i, tick in enumerate(ticks):
        pending = {}
        for view in tick.state.sequences:
            known = view.pending + view.computed
            request = found.get(view.key)
            if request is None:
                request = found[view.key] = Asked(
                    view.key,
                    view.client,
                    view.lane,
                    view.arrived,
                    prompt=known,
                    first_token=view.first_token_at,
                )
            request.answer = known - request.prompt
            if not tick.state.ahead:  # or it is when that should be
                request.first_token = view.first_token_at
            last_seen[view.key] = i
            pending[view.key] = view.pending
        # What a tick that failed was planned from is told again.
        told = len(ticks[i - 1].state.measured) if i and ticks[i - 1].status != 0 else 0
        for measured in tick.state.measured[told:]:
            for key, gap_s in measured.gaps.items():
                if key in found:
                    found[key].gaps.append(gap_s)
        for item in tick.plan.items if tick.status == 0 else ():
            if item.n_tokens == pending[item.key]:  # it was given a token, perhaps its last
                request = found[item.key]
                request.answer += 1
                request.first_token = request.first_token or ends[i]
    for key, i in last_seen.items():
        if i < len(ticks) - 1:
            found[key].ended = ends[i]
    return sorted(found.values(), key=lambda request: (request.arrived, request.key))


def _ends(ticks: Sequence[TracedTick]) -> list[float]:
    """Return when each decode ended: the trace has only when its plan was begun.

    Decodes that follow one another are counted from the first of them.
    """
    ends: list[float] = []
    for before, tick in zip((None, *ticks), ticks, strict=False):
        follows = before is not None and tick.host_s > 0
        follows = follows and before is not None and tick.state.tick == before.state.tick + 1
        begun = ends[-1] + tick.host_s if follows else tick.state.now
        ends.append(begun + tick.decode_s)
    return ends


@frozen
class Figures:
    """What is predicted. Of interactive streams, or of all where there are none; in seconds.

    `tokens_s` is everything that was computed, prompts and answers, from the first arrival to the
    end of the last tick.
    """

    gap_p50: float
    gap_p95: float
    gap_p99: float
    ttft_p50: float
    tokens_s: float
    gaps: int
    requests: int


def figures(ticks: Sequence[TracedTick], began: float | None = None) -> Figures:
    """Return the figures of a run, from `began` or its first arrival on.

    Raises:
        TraceError: there is no stream of two tokens in it.
    """
    requests = asked(ticks)
    felt = [r for r in requests if r.lane == "interactive" and r.gaps] or requests
    watched = {"interactive"} if felt[0].lane == "interactive" else {"background"}
    gaps = [gap for request in felt for gap in request.gaps]
    ttft = [
        r.first_token - r.arrived
        for r in requests
        if r.lane in watched and r.first_token is not None
    ]
    if not gaps or not ttft:
        message = "no stream in the trace has two tokens: there is no gap to predict"
        raise TraceError(message)
    began = requests[0].arrived if began is None else began
    computed = sum(t.plan.n_tokens for t in ticks if t.status == 0)
    p50, p95, p99 = np.percentile(gaps, (50, 95, 99))
    return Figures(
        float(p50), float(p95), float(p99), median(ttft),
        computed / (_ends(ticks)[-1] - began), len(gaps), len(requests),
    )  # fmt: skip


def sessions(requests: Iterable[Asked], *, closed: bool = True) -> tuple[Session, ...]:
    """Return who would ask the same again, from time 0 on.

    A client that asks after one of its requests has ended asks because of that: its next question
    comes as long after the answer as it did. Of several answers it is the latest that nobody has
    gone on from. Otherwise, or unless `closed`, it comes at its own time. What was not over at the
    end of the trace has no end here either.
    """
    ordered = sorted(requests, key=lambda request: (request.arrived, request.key))
    chains: list[list[Asked]] = []
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


def _leads(before: Asked, after: Asked) -> bool:
    same = (before.client, before.lane) == (after.client, after.lane)
    return same and before.ended is not None and before.ended <= after.arrived


def _turns(chain: Sequence[Asked]) -> Iterable[Turn]:
    ended: float | None = None
    for request in chain:
        think_s = 0.0 if ended is None else request.arrived - ended
        answer = ENDLESS if request.ended is None else max(1, request.answer)
        yield Turn(think_s, request.prompt, answer)
        ended = request.ended


# --- the machine ---

Kind = tuple[int, int]  # tokens of a tick, and how many of them give logits


@frozen
class Load:
    """What of a tick takes time, read from its plan: its kind, and what attention looks at."""

    kind: Kind
    own_cells: float  # by each token of its own sequence, summed
    all_cells: float  # by each token in the whole cache, summed

    @classmethod
    def of(cls, state: SchedulerState, plan: Plan) -> Load:
        """Return the load of a plan."""
        views = {view.key: view for view in state.sequences}
        rows = own = 0
        for item in plan.items:
            view = views[item.key]
            rows += item.n_tokens == view.pending
            own += item.n_tokens * view.computed + item.n_tokens * item.n_tokens // 2
        n = plan.n_tokens + plan.ballast
        resident = sum(view.computed for view in state.sequences)
        return cls((n, rows + plan.ballast), own, float(n * resident))


@frozen
class Fitted:
    """Seconds of a decode: a step for each kind that was seen, and what each cell adds."""

    steps: dict[Kind, float]
    between: Staircase  # by tokens, for kinds that were not seen
    per_cell: tuple[float, float]

    def __call__(self, load: Load) -> float:
        """Return the seconds."""
        step = self.steps.get(load.kind)
        return (self.between(load.kind[0]) if step is None else step) + self.cells_s(load)

    def cells_s(self, load: Load) -> float:
        """Return what looking back takes."""
        return self.per_cell[0] * load.own_cells + self.per_cell[1] * load.all_cells


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> Fitted:
    """Return the machine whose ticks took those `seconds`."""
    kinds: dict[Kind, list[int]] = {}
    for i, load in enumerate(loads):
        kinds.setdefault(load.kind, []).append(i)
    calm = _calm(kinds, seconds)
    per_cell = _per_cell(calm, loads, seconds)
    bare = Fitted({}, Staircase((1,), (0.0,)), per_cell)
    left = [max(LEAST * s, s - bare.cells_s(x)) for x, s in zip(loads, seconds, strict=True)]
    steps = {
        kind: median(left[i] for i in members)
        for kind, members in kinds.items()
        if len(members) >= TYPICAL
    }
    return Fitted(
        steps, _between([(x.kind[0], s) for x, s in zip(loads, left, strict=True)]), per_cell
    )


def _between(ticks: Iterable[tuple[int, float]]) -> Staircase:
    """Return the time by tokens; counts that were seldom seen share a step with their neighbours."""
    steps: dict[int, float] = {}
    together: list[tuple[int, float]] = []
    ordered = sorted(ticks)
    for i, (n, seconds) in enumerate(ordered):
        together.append((n, seconds))
        last = i == len(ordered) - 1
        if last or (len(together) >= TYPICAL and ordered[i + 1][0] > n):
            steps[round(median(n for n, _ in together))] = median(s for _, s in together)
            together = []
    return Staircase(tuple(steps), tuple(steps.values()))


def _calm(kinds: dict[Kind, list[int]], seconds: Sequence[float]) -> list[list[int]]:
    """Return the ticks of each kind without its spikes; kinds with one tick tell no slope."""
    found = []
    for members in kinds.values():
        most = SPIKE * median(seconds[i] for i in members)
        found.append([i for i in members if seconds[i] <= most])
    return [members for members in found if len(members) > 1]


def _per_cell(
    groups: Sequence[Sequence[int]], loads: Sequence[Load], seconds: Sequence[float]
) -> tuple[float, float]:
    """Return what a cell adds, from how ticks of the same kind differ; never less than nothing."""
    x, y = [], []
    for members in groups:
        cells = np.array([(loads[i].own_cells, loads[i].all_cells) for i in members], float)
        took = np.array([seconds[i] for i in members])
        # Each is compared with the one before it: a machine's moods last longer than that.
        x.append(np.diff(cells, axis=0))
        y.append(np.diff(took))
    if not x:
        return 0.0, 0.0
    cells, took = np.concatenate(x), np.concatenate(y)
    for columns in ([0, 1], [0], [1]):
        part = cells[:, columns]
        slopes, _, rank, _ = np.linalg.lstsq(part, took, rcond=None)
        if rank == len(columns) and (slopes >= 0).all():
            own_all = dict(zip(columns, slopes.tolist(), strict=True))
            return own_all.get(0, 0.0), own_all.get(1, 0.0)
    return 0.0, 0.0


class Nearby:
    """What was measured of a machine, by when it was and by the size of the tick.

    Other programs slow a machine for seconds at a time, and make it restless. That is not for a
    simulation of ours to foretell, so it is taken as it was, like the arrivals: a value is drawn
    from those that were measured around the same time, in ticks of like size if there are enough.
    """

    def __init__(self, seen: Iterable[tuple[float, int, float]], otherwise: float) -> None:
        """`seen` has moment, size and value, by moment; `otherwise` is drawn when it is empty."""
        self._all: list[tuple[float, float]] = []
        self._alike: dict[int, list[tuple[float, float]]] = {}
        for at, n, value in seen:
            self._all.append((at, value))
            self._alike.setdefault(_size(n), []).append((at, value))
        self._otherwise = otherwise

    def __call__(self, draw: random.Random, n: int, now: float) -> float:
        """Return a value for a tick of that size at that moment."""
        known = self._alike.get(_size(n), [])
        if len(known) < ENOUGH:
            known = self._all
        if not known:
            return self._otherwise
        i = bisect_right(known, (now, math.inf))
        first = max(0, min(i - NEIGHBOURS, len(known) - 2 * NEIGHBOURS))
        return draw.choice(known[first : first + 2 * NEIGHBOURS])[1]


def profile(ticks: Sequence[TracedTick]) -> Profile:
    """Return the machine of a trace: its steps, how ticks scattered around them, and its pauses.

    A policy believes of it what the one that was recorded did at the start, or else its table.
    """
    good = [tick for tick in ticks if tick.status == 0]
    loads = [Load.of(tick.state, tick.plan) for tick in good]
    fitted = fit(loads, [tick.decode_s for tick in good])
    zero = min((view.arrived for view in ticks[0].state.sequences), default=ticks[0].state.now)
    scatter = Nearby(
        (
            (tick.state.now - zero, load.kind[0], tick.decode_s / fitted(load))
            for tick, load in zip(good, loads, strict=True)
        ),
        1.0,
    )
    pauses = [
        (tick.state.now - zero, len(tick.state.sequences), tick.host_s)
        for tick in ticks
        if tick.host_s > 0
    ]
    typical = median([host_s for _, _, host_s in pauses] or [0.0])

    def cost(_work: Work, state: SchedulerState, plan: Plan) -> float:
        return fitted(Load.of(state, plan))

    believed = ticks[0].state.memory.cost or CostModel(fitted.between, host_s=typical)
    name = f"a trace of {len(ticks)} ticks"
    return Profile(name, cost, believed, scatter, Nearby(pauses, typical))


def _size(n: int) -> int:
    """Ticks of like size scatter alike: 1, 2 to 3, 4 to 7, and so on."""
    return n.bit_length()
