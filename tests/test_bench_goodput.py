"""Goodput: traces, limits, the search of a rate, and when a trial has failed. In virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches import arrivals
from benches.arrivals import Asked, BadTrace, Recorded, Scale
from benches.clients import Answer, Job
from benches.limits import Alone, Bound, Limits, bound
from benches.scenes import goodput
from benches.search import Search

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
"""
MOONCAKE = """{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}
{"timestamp": 3000, "input_length": 600, "output_length": 6, "hash_ids": [7, 8]}
"""
ALONE = Alone((100, 200), (0.1, 0.3), (0.01, 0.03))


def written(folder: Path, text: str) -> Path:
    """A trace file."""
    path = folder / "trace"
    path.write_text(text)
    return path


def test_both_public_formats_are_read(tmp_path: Path) -> None:
    """Times become seconds; the names of blocks are kept where there are any."""
    first, second = arrivals.read(written(tmp_path, AZURE))
    assert (first.prompt, first.answer, second.prompt, second.answer) == (374, 44, 396, 109)
    assert second.at_s - first.at_s == pytest.approx(4)
    first, second = arrivals.read(written(tmp_path, MOONCAKE))
    assert (first, second.at_s) == (Recorded(1.5, 700, 5, (7, 9)), 3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests"),
        ("a,b\n1,2\n", "line 2: no field 'TIMESTAMP'"),
        (AZURE + "2023-11-16 18:15:50,x,1\n", "line 4: invalid literal"),
        (AZURE + "2023-11-16 18:15:50,-1,1\n", "line 4: a time that is no number, or a negative"),
        (MOONCAKE + "{\n", "line 3: "),
        ('{"timestamp": 1, "input_length": 2}\n', "line 1: no field 'output_length'"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    """The file, the line, and what is wrong with it."""
    path = written(tmp_path, text)
    with pytest.raises(BadTrace, match=said) as refused:
        arrivals.read(path)
    assert str(path) in str(refused.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """As one that cannot be read."""
    with pytest.raises(BadTrace, match="cannot be read"):
        arrivals.read(tmp_path / "nothing")


def test_scaled_lengths_leave_out_what_is_too_long() -> None:
    """No prompt or answer becomes empty, and a trace of nothing but long requests is refused."""
    trace = [Recorded(0, 1000, 100), Recorded(1, 90_000, 1), Recorded(2, 0, 0)]
    found = arrivals.scaled(trace, Scale(0.1, 0.5, 500))
    assert [(each.prompt, each.answer) for each in found] == [(100, 50), (arrivals.LEAST_TOKENS, 1)]
    with pytest.raises(BadTrace, match="no request is left"):
        arrivals.scaled(trace[:1], Scale(longest=10))


@given(st.integers(2, 60), st.text("ab", max_size=4), st.booleans())
def test_a_seed_draws_one_run_of_which_half_wait_for_the_end(
    n: int, seed: str, by_trace: bool
) -> None:
    """The same requests for the same seed, in order, half of them for the whole answer."""
    trace = arrivals.made_up("x", 100)
    asked = arrivals.drawn(trace, n, seed, by_trace=by_trace)
    assert asked == arrivals.drawn(trace, n, seed, by_trace=by_trace)
    assert len(asked) == n
    assert [each.due for each in asked] == sorted(each.due for each in asked)
    assert sum(each.awaits == "answer" for each in asked) == n // 2


def test_random_arrivals_come_one_a_second() -> None:
    """In the mean of many."""
    asked = arrivals.drawn(arrivals.made_up("x"), 2000, "s")
    assert asked[-1].due / len(asked) == pytest.approx(1, rel=0.1)


def test_arrivals_by_the_trace_keep_its_rhythm() -> None:
    """Three intervals of 1, 1 and 4 keep their proportion at a mean of one a second."""
    trace = [Recorded(at, 10, 2) for at in (5.0, 6.0, 7.0, 11.0)]
    asked = arrivals.drawn(trace, 4, "s", by_trace=True)
    assert [each.due for each in asked] == pytest.approx([0.0, 0.5, 1.0, 3.0])


def test_arrivals_by_a_trace_of_one_moment_are_refused() -> None:
    """They have no rate."""
    with pytest.raises(BadTrace, match="one time"):
        arrivals.drawn([Recorded(1.0, 10, 2)] * 3, 3, "s", by_trace=True)


def test_prompts_share_what_the_trace_shares_and_nothing_else() -> None:
    """Blocks of one name have one text; all the rest is new, also in another trial."""
    asked = [
        Asked(0, 30, 2, "tokens", (7, 8)),
        Asked(1, 30, 2, "answer", (7, 9)),
        Asked(2, 30, 2, "answer"),
    ]
    first, second, third = (job.prompt.split() for job in arrivals.jobs(asked, "s", block=20))
    assert [len(words) for words in (first, second, third)] == [30, 30, 30]
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert third[:20] != first[:20]
    assert arrivals.jobs(asked, "t", block=20)[0].prompt.split()[:20] != first[:20]
    assert [job.awaits for job in arrivals.jobs(asked, "s")] == ["tokens", "answer", "answer"]


def test_limits_are_those_of_a_reader_or_of_the_end() -> None:
    """A reader has 450 and 40 ms or twice the time alone, others three times it for the whole."""
    assert (ALONE.ttft(50), ALONE.ttft(150), ALONE.tpot(900)) == pytest.approx((0.1, 0.2, 0.03))
    short = bound(Asked(0, 100, 11, "tokens"), ALONE, Limits())
    assert (short.ttft_s, short.tpot_s) == (0.450, 0.040)
    slow = bound(Asked(0, 200, 11, "tokens"), ALONE, Limits())
    assert (slow.ttft_s, slow.tpot_s) == pytest.approx((0.6, 0.06))
    end = bound(Asked(0, 200, 11, "answer"), ALONE, Limits())
    assert (end.ttft_s, end.end_s) == (math.inf, pytest.approx(3 * (0.3 + 0.3)))


def test_an_answer_keeps_to_all_limits_or_to_none() -> None:
    """Too late a first token, too slow a rest, too late an end, an error: each is enough."""
    limits = Bound(1.0, 0.1, 5.0)
    assert limits.kept(Answer(10.0, [11.0, 11.1, 11.2]))
    assert not limits.kept(Answer(10.0, [11.1, 11.2]))
    assert not limits.kept(Answer(10.0, [10.5, 10.7]))
    assert not Bound(1.0, 9.0, 5.0).kept(Answer(10.0, [10.5, 15.1]))
    assert not limits.kept(Answer(10.0, [10.5], error="refused"))
    assert not limits.kept(Answer(10.0))


@given(
    st.floats(0.01, 1.0), st.lists(st.floats(0.0, 0.2), max_size=20), st.sampled_from([100, 170])
)
def test_nobody_is_given_up_who_could_still_keep_the_limits(
    first: float, rest: list[float], prompt: int
) -> None:
    """An answer that kept a reader's limits ended before the moment at which it is given up."""
    asked = Asked(0, prompt, 1 + len(rest), "tokens")
    limits = bound(asked, ALONE, Limits())
    answer = Answer(0.0, list(itertools.accumulate([first, *rest])))
    if limits.kept(answer):
        assert answer.times[-1] <= limits.end_s


@given(st.floats(0.01, 100), st.floats(0.05, 20), st.floats(0.05, 1.0))
def test_the_search_ends_just_below_the_largest_rate(
    most: float, start: float, precision: float
) -> None:
    """Within its precision, whatever it began with."""
    found = Search(start, precision, 40).largest(lambda rate: rate <= most)
    assert most / (1 + precision) * 0.999 <= found <= most


def test_a_server_that_keeps_no_rate_has_none() -> None:
    """The search ends after its trials."""
    tried: list[float] = []
    assert Search(1.0, most=3).largest(lambda rate: bool(tried.append(rate))) == 0.0
    assert tried == [1.0, 0.5, 0.25]


@dataclass(eq=False)
class Served:
    """A stream of the fake server."""

    sent: float
    times: list[float]
    reads: list[object] = field(default_factory=list)


class OneAtATime:
    """A server in virtual time that answers one request after another, each in `takes` seconds."""

    def __init__(self, takes: float, refuses: int = 0) -> None:
        self.now, self._takes, self._refuses, self._free = 0.0, takes, refuses, 0.0
        self._ends: list[tuple[float, int, Served, Callable[[Served], None]]] = []
        self.started = 0

    def start(self, job: Job, then: Callable[[Served], None]) -> Served:
        """Queue a request."""
        self.started += 1
        if self.started <= self._refuses:
            raise ConnectionRefusedError
        self._free = max(self._free, self.now) + self._takes
        n = job.max_tokens
        stream = Served(self.now, [self._free - 0.01 * (n - 1 - i) for i in range(n)])
        heapq.heappush(self._ends, (self._free, self.started, stream, then))
        return stream

    def run(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let time pass, in steps of at most 50 ms as a poll does."""
        end = self.now + seconds
        while self.now < end and not enough():
            if self._ends and self._ends[0][0] <= min(end, self.now + 0.05):
                at, _, stream, then = heapq.heappop(self._ends)
                self.now = max(self.now, at)
                stream.reads.append(None)
                then(stream)
            else:
                self.now = min(end, self.now + 0.05)

    def answers(self, streams: Sequence[Served]) -> list[Answer]:
        """What came of them."""
        return [Answer(s.sent, s.times, completion_tokens=len(s.times)) for s in streams]


def tried(server: OneAtATime, rate: float, n: int = 40) -> goodput.Trial:
    """Play `n` requests, one a second at a rate of 1."""
    asked = [Asked(float(i), 100, 3, "tokens" if i % 2 else "answer") for i in range(n)]
    trial = goodput.Trial(rate, asked, [bound(each, ALONE, Limits()) for each in asked])
    goodput.Arriving(server, trial, arrivals.jobs(asked, "s")).run()  # type: ignore[arg-type]
    return trial


def test_a_rate_that_the_server_can_serve_is_kept() -> None:
    """All answers are there, in time."""
    trial = tried(OneAtATime(0.2), 4.0)
    assert (trial.kept, len(trial.answers)) == (1.0, 40)
    row = goodput.served(trial, ALONE)
    assert row["ttft_p95_ms"] == pytest.approx(180)
    assert row["tpot_p95_ms"] == pytest.approx(10)
    assert row["slowdown_p95"] == pytest.approx(0.2 / 0.12)


def test_a_rate_beyond_it_fails_before_all_was_sent() -> None:
    """A trial is given up as soon as more than a twentieth is late."""
    server = OneAtATime(0.3)
    trial = tried(server, 20.0)
    assert trial.failed
    assert server.started < 40


@pytest.mark.parametrize(("refused", "failed"), [(2, False), (3, True)])
def test_one_in_twenty_may_be_late(refused: int, failed: bool) -> None:
    """A request that is refused is late; two of forty are allowed and three are not."""
    trial = tried(OneAtATime(0.1, refuses=refused), 1.0)
    assert (len(trial.late), trial.failed) == (refused, failed)


def test_the_row_has_the_best_rate_and_the_one_beyond() -> None:
    """With the shares that both kept; a first try that failed is neither."""
    trials = [
        tried(OneAtATime(takes), rate)
        for takes, rate in ((0.2, 2.0), (0.2, 50.0), (9.0, 4.0), (0.2, 4.0))
    ]
    row = goodput.figures(trials, 4.0, ALONE)
    assert (row["rate"], row["kept_pct"], row["next_rate"], row["trials"]) == (4.0, 100.0, 50.0, 4)
