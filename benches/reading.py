"""What one server goes through: reading alone, in a storm of prompts, beside streams.

All scenes of one repetition run on one server process, one after another, so that every ratio is
of figures that are seconds apart. Between scenes a short request shows that the server is done
with the one before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benches import clients
from benches.clients import Answer, Job, NotServed, Wire, checked
from benches.live import Endless, Live, Stream, drive
from benches.pace import Pace, pace, rate, ratios, tokens_within
from uma_trio_sim.latency import median

Figures = dict[str, object]
_AFTER_S = 0.8  # reading alone once more, after the load: the machine may have drifted
_FIRST_S = 20.0  # how long a first token is waited for before its stream counts as starved
_MOST_STRETCH = 2.0  # a stream that stalls is watched this many times longer
_SETTLE_S = 60.0


@dataclass(frozen=True)
class Script:
    """How long each scene is, and who is in it. Seconds and tokens."""

    solo_s: float = 3.2
    storm_s: float = 7.0
    newcomers_s: float = 2.0
    decoders_s: float = 3.0
    interactive: int = 1
    background: int = 3
    prompt_tokens: int = 506
    chat_tokens: int = 30
    stream_tokens: int = 2000

    @property
    def seconds(self) -> float:
        """About how long it all takes, the start of the server included."""
        lone = 2.0 if self.interactive > 1 else 0.0
        return (
            3.5 + self.solo_s + lone + _AFTER_S + 1 + self.storm_s + self.newcomers_s
            + 0.5 + self.decoders_s
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """How many requests are in flight at once at the most."""
        return self.background + self.interactive + 1

    @property
    def cells(self) -> int:
        """A context that holds the largest scene."""
        streams = (self.background + self.interactive) * (self.stream_tokens + self.chat_tokens)
        storm = self.background * (self.prompt_tokens + 8)
        return -(-(streams + storm + 64) // 1024) * 1024


class Scenes:
    """One server, one script, one seed; each method is a scene and returns its figures."""

    def __init__(self, wire: Wire, script: Script, seed: str) -> None:
        self._wire = wire
        self._script = script
        self._seed = seed
        self._random = random.Random(f"{seed}/when")
        self._n = 0

    def play(self) -> Figures:
        """Go through all scenes. Raises :class:`benches.clients.NotServed`."""
        self._settle()
        solo, newcomer_ms = self._alone()
        found = self._storm(solo, newcomer_ms)
        if not found["storm_n"]:
            found |= self.overtaken(solo)
        found |= self._again(solo)
        if self._script.decoders_s:
            found |= self._decoders(solo)
        return found

    def _job(self, prompt_tokens: int, max_tokens: int, lane: str, **more: bool) -> Job:
        """Return a request with a prompt that nobody has sent before."""
        self._n += 1
        (job,) = clients.jobs(1, prompt_tokens, max_tokens, f"{self._seed}/{self._n}")
        return Job(f"{lane}-{self._n}", job.prompt, max_tokens, lane, **more)

    def _chat(self) -> Job:
        return self._job(self._script.chat_tokens, self._script.stream_tokens, "interactive")

    def _settle(self) -> None:
        """Wait until the server has nothing left of what came before."""
        (answer,) = drive(self._wire, [self._job(8, 2, "interactive")], timeout_s=_SETTLE_S)
        if answer.error:
            raise NotServed(f"between scenes: {answer.error}")

    @contextlib.contextmanager
    def _scene(self) -> Iterator[Live]:
        with Live(self._wire) as live:
            yield live
        self._settle()

    def _read(self, live: Live, n: int, seconds: float, stretch: float = 1.0) -> list[Stream]:
        """Have `n` interactive streams read for so long after their first tokens.

        Streams that stall are read up to `stretch` times longer, till each had a few tokens.
        """
        people = [live.start(self._chat()) for _ in range(n)]
        live.run(_FIRST_S, lambda: all(len(s.reads) > 1 or s.over for s in people))
        live.run(seconds, lambda: all(s.over for s in people))
        few = lambda: all(len(s.reads) > 6 or s.over for s in people)  # noqa: E731
        live.run(seconds * (stretch - 1), few)
        return people

    def _alone(self) -> tuple[Pace, float]:
        """Return the pace of the interactive streams with nothing else, and a newcomer's TTFT."""
        script = self._script
        with self._scene() as live:
            people = self._read(live, script.interactive, script.solo_s)
        solo = _pace(checked(live.answers(people)))
        ttfts: list[float] = []
        for _ in range(5):
            job = self._job(script.chat_tokens, 1, "interactive")
            (answer,) = drive(self._wire, [job])
            ttfts.append(1e3 * (checked([answer])[0].ttft_s or 0.0))
        if solo is None:
            raise NotServed("no tokens came although nothing else ran")
        return solo, median(ttfts)

    def _again(self, before: Pace) -> Figures:
        """Return how far the machine has drifted since the solo that everything is held against."""
        with self._scene() as live:
            people = self._read(live, self._script.interactive, _AFTER_S)
        after = _pace(checked(live.answers(people)))
        found: Figures = {"drift": after.p50 / before.p50 if after else None}
        if self._script.interactive > 1:
            with self._scene() as live:
                lone = _pace(checked(live.answers(self._read(live, 1, 2.0))))
            found["together_x"] = before.p50 / lone.p50 if lone else None
        return found

    def _storm(self, solo: Pace, newcomer_ms: float) -> Figures:
        """Read while clients send prompts one after another; then let newcomers come."""
        script = self._script
        with self._scene() as live:
            live.watch()
            prompts = Endless(live, self._prompt)
            for _ in range(script.background):
                prompts.send()
            live.run(self._random.uniform(0.7, 1.0))  # till prompts are really being computed
            people = self._read(live, script.interactive, script.storm_s, _MOST_STRETCH)
            end = _last_read(people)
            for stream in people:
                live.stop(stream)
            newcomers = self._newcomers(live)
        read, sent = checked(live.answers(people)), checked(live.answers(prompts.streams))
        begin = max((a.times[0] for a in read if a.times), default=end)
        come = [1e3 * t for a in checked(live.answers(newcomers)) if (t := a.ttft_s) is not None]
        counters = live.counters()
        return {
            **{f"solo_{k}": v for k, v in vars(solo).items()},
            **_loaded("storm", _pace(read), solo),
            **self._computed(live, sent, begin, end),
            "newcomers": len(come),
            "newcomer_solo_ms": newcomer_ms,
            "newcomer_ms": median(come) if come else None,
            "newcomer_x": median(come) / newcomer_ms if come else None,
            "newcomer_worst_x": max(come) / newcomer_ms if come else None,
            **_daemon_says(counters, end),
        }

    def overtaken(self, solo: Pace) -> Figures:
        """Return what a storm does to a reader who was there before it.

        For a server that lets nobody in who comes during the storm: its knob is then judged by the
        streams that run already. Such a reader's beginning says nothing of the storm.
        """
        script = self._script
        with self._scene() as live:
            live.watch()
            people = self._read(live, script.interactive, 1.0)
            prompts = Endless(live, self._prompt)
            for _ in range(script.background):
                prompts.send()
            live.run(self._random.uniform(0.7, 1.0))
            begin = live.now
            live.run(script.storm_s)
            few = lambda: all(_last_read([s]) > begin + 0.5 for s in people)  # noqa: E731
            live.run(script.storm_s, few)
            end = _last_read(people)
        read, sent = checked(live.answers(people)), checked(live.answers(prompts.streams))
        beside = [during for a in read if (during := _during(a.times, begin, end))]
        found = pace([t[0] for t in beside], beside)
        return {
            **_loaded(
                "storm", replace(found, ttf5=None, worst_startup=None) if found else None, solo
            ),
            **self._computed(live, sent, begin, end),
            "reader_first": 1,
        }

    def _computed(self, live: Live, sent: Sequence[Answer], begin: float, end: float) -> Figures:
        """Return what the clients of a storm got of it in a window."""
        per_s = rate(live.prompt_tokens(sent), begin, end)
        return {
            "storm_tokens_s": per_s,
            "storm_prompts_s": None if per_s is None else per_s / self._script.prompt_tokens,
            "storm_prompts": tokens_within([a.times[:1] for a in sent], begin, end),
        }

    def _prompt(self) -> Job:
        return self._job(self._script.prompt_tokens, 1, "background", progress=True)

    def _newcomers(self, live: Live) -> list[Stream]:
        """Ask short questions, one after another at odd moments; at least one is answered."""
        left, newcomers = self._script.newcomers_s, []
        while left > 0:
            pause = self._random.uniform(0.05, 0.3)
            live.run(pause)
            newcomer = live.start(self._job(self._script.chat_tokens, 1, "interactive"))
            newcomers.append(newcomer)
            live.run(_SETTLE_S, lambda newcomer=newcomer: newcomer.over)  # type: ignore[misc]
            left -= pause + newcomer.reads[-1][0] - newcomer.sent if newcomer.reads else _SETTLE_S
        return newcomers

    def _decoders(self, solo: Pace) -> Figures:
        """Read while background streams decode."""
        script = self._script
        with self._scene() as live:
            others = [
                live.start(self._job(script.chat_tokens, script.stream_tokens, "background"))
                for _ in range(script.background)
            ]
            live.run(2.0, lambda: all(len(s.reads) > 2 for s in others))
            people = self._read(live, script.interactive, script.decoders_s, _MOST_STRETCH)
            end = _last_read(people)
        read, streams = checked(live.answers(people)), checked(live.answers(others))
        begin = max((a.times[0] for a in read if a.times), default=end)
        tokens = tokens_within([a.times for a in streams], begin, end)
        return {
            **_loaded("decoders", _pace(read), solo),
            "decoders_tokens_s": tokens / (end - begin) if end > begin else None,
            "decoders_tokens": tokens,
        }


def _during(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the tokens of a window, with the last one before it: the latency that a paste cuts counts."""
    first = max((i for i, at in enumerate(times) if at <= begin), default=0)
    after = [at for at in times[first:] if at <= end]
    # The latency in which the window ends counts too: it may be the longest.
    later = times[first + len(after) : first + len(after) + 1]
    return [*after, *later]


def _loaded(name: str, found: Pace | None, solo: Pace) -> Figures:
    p95 = found.p95 / solo.p50 if found else None
    above = {f"{name}_{k}": v for k, v in ratios(found, solo).items()}
    plain = {f"{name}_{k}": v for k, v in vars(found).items()} if found else {f"{name}_n": 0}
    return {**plain, **above, f"{name}_p95_of_p50": p95}


def _pace(answers: Sequence[Answer]) -> Pace | None:
    return pace([a.sent for a in answers if a.times], [a.times for a in answers if a.times])


def _last_read(streams: Sequence[Stream]) -> float:
    return max((s.reads[-1][0] for s in streams if s.reads), default=0.0)


SAYS = (
    "step_ms", "cost_error", "cost_scale", "guard_infeasible_total", "ticks_over_budget", "batch_calls_total",
)  # fmt: skip


def _daemon_says(counters: Sequence[tuple[float, dict[str, object]]], end: float) -> Figures:
    """Return what the daemon said of itself last while somebody read."""
    while_read = [found for at, found in counters if at <= end]
    if not while_read:
        return {}
    return {f"says_{name}": while_read[-1].get(name) for name in SAYS}
