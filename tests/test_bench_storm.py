"""The arithmetic of the mixed benchmarks, and the way through their scenes on a fake model."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benches import contest, driver, servers
from benches.clients import Answer, Event, FramedWire, Job, Read, SseWire, frame
from benches.live import Endless, Live
from benches.pace import Pace, Point, judge, pace, rate, ratios, tokens_within
from benches.scenes import storm

SOLO = Pace(n=100, p50=8, p95=10, p99=12, worst=20, worst_startup=20, ttft=50, ttf5=80)


def test_pace_is_of_all_streams_together() -> None:
    """Gaps are pooled, and the fifth token counts from sending the request."""
    found = pace([0.0, 0.0], [[1.0, 1.1, 1.2], [1.0, 1.2, 1.4, 1.6, 1.8]])
    assert found is not None
    assert (found.n, found.p50, found.ttft, found.ttf5) == pytest.approx((6, 200, 1000, 1800))


def test_what_comes_after_the_first_three_seconds_is_told_apart() -> None:
    """A stream's beginning has bounds of its own; what is left is held against the solo's."""
    found = pace([0.0], [[0.0, 2.5, 3.1, 3.4, 3.8]])
    assert found is not None
    assert (found.worst_startup, found.worst_later) == pytest.approx((2500, 400))
    assert found.p95_later == pytest.approx(395)
    assert ratios(found, SOLO)["worst_later_x"] == pytest.approx(20)
    short = pace([0.0], [[0.0, 0.1]])
    assert short is not None
    assert (short.p99_later, short.worst_later) == (None, None)


def test_a_stream_without_gaps_has_no_pace() -> None:
    """One token says nothing about gaps."""
    assert pace([0.0], [[1.0]]) is None
    assert pace([], []) is None


def test_ratios_are_of_like_with_like() -> None:
    """p95 is held against the solo's p95, the worst pause against its worst."""
    twice = Pace(n=9, p50=16, p95=20, p99=24, worst=40, worst_startup=40, ttft=100, ttf5=None)
    found = ratios(twice, SOLO)
    assert (found["p95_x"], found["worst_startup_x"], found["ttft_x"]) == (2, 2, 2)
    assert found["ttf5_x"] is None
    assert set(ratios(None, SOLO).values()) == {None}


def test_a_counter_is_read_between_its_readings() -> None:
    """Work done in a window is known although the counter is read before and after it."""
    series = [(0.0, 0.0), (1.0, 100.0), (3.0, 500.0)]
    assert rate(series, 0.5, 2.0) == pytest.approx((300 - 50) / 1.5)
    assert rate(series, 3.0, 4.0) == 0
    assert rate([], 0, 1) is None
    assert rate(series, 1, 1) is None


def test_tokens_are_counted_inside_of_a_window() -> None:
    """What came before or after is not what the load got meanwhile."""
    assert tokens_within([[0.5, 1.0, 2.0], [2.1]], 1.0, 2.0) == 2


def test_only_peers_with_as_good_a_p95_are_compared() -> None:
    """A server that gives much and hurts the reader more is no rival."""
    ours = Point("uma-trio", "cap 2", 2.0, 0.6)
    peers = [Point("peer", "-b 8", 1.9, 0.5), Point("peer", "-b 64", 9.0, 0.9)]
    assert judge(ours, peers, "prompts/s").endswith(
        "at least as much: peer -b 8 gives 0.50 at 1.90x"
    )
    better = [Point("peer", "-b 4", 1.5, 0.7)]
    assert "LESS: peer -b 4" in judge(ours, better, "prompts/s")
    assert "no other server" in judge(ours, peers[1:], "prompts/s")


def test_the_daemon_is_told_the_lane_and_a_peer_is_not() -> None:
    """A server without lanes gets a request that it knows."""
    job = Job("a", "x", 1, "background", progress=True)
    assert json.loads(FramedWire(Path("x")).request(job)[4:])["priority"] == "background"
    assert b"priority" not in SseWire(1).request(job)
    assert b'"return_progress": true' in SseWire(1).request(job)


class Paired:
    """A framed wire to socket pairs; the test writes the far ends."""

    def __init__(self) -> None:
        self._wire = FramedWire(Path("x"))
        self.far: list[socket.socket] = []

    def connect(self) -> socket.socket:
        """Return one end, keep the other."""
        near, far = socket.socketpair()
        self.far.append(far)
        return near

    def request(self, job: Job) -> bytes:
        """Ask as the real one."""
        return self._wire.request(job)

    def watch(self, interval_ms: int) -> bytes | None:
        """Watch as the real one."""
        return self._wire.watch(interval_ms)

    def end_detector(self) -> Callable[[bytes], bool]:
        """End as the real one."""
        return self._wire.end_detector()

    def events(self, reads: Sequence[Read]) -> Iterator[Event]:
        """Parse as the real one."""
        return self._wire.events(reads)

    def note(self, answer: Answer, at: float, event: dict[str, object]) -> None:
        """Count as the real one."""
        self._wire.note(answer, at, event)


@pytest.fixture
def wire() -> Iterator[Paired]:
    """A wire whose far ends are closed when the test is over."""
    paired = Paired()
    yield paired
    for far in paired.far:
        far.close()


def packed(message: dict[str, object]) -> bytes:
    """The compact JSON of our encoder, framed."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    return len(payload).to_bytes(4, "little") + payload


END = packed(
    {
        "event": "eos",
        "id": "a",
        "reason": "length",
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    }
)


def test_who_has_ended_is_followed_by_the_next(wire: Paired) -> None:
    """A client of the storm sends its next prompt when the last was answered."""
    with Live(wire) as live:
        prompts = Endless(live, lambda: Job("a", "x", 1))
        prompts.send(wire.connect)
        wire.far[0].sendall(packed({"event": "token", "id": "a"}) + END)
        live.run(5.0, lambda: len(prompts.streams) == 2)
    first, second = live.answers(prompts.streams)
    assert (len(first.times), first.error) == (1, None)
    assert second.times == []


def test_a_stream_that_was_given_up_is_no_error(wire: Paired) -> None:
    """A reader who leaves has read fewer tokens than were asked for."""
    with Live(wire) as live:
        stream = live.start(Job("a", "x", 9))
        wire.far[0].sendall(packed({"event": "token", "id": "a"}))
        live.run(5.0, lambda: len(stream.reads) > 0)
    (answer,) = live.answers([stream])
    assert (len(answer.times), answer.error) == (1, None)


def test_the_daemons_own_counter_says_what_was_computed(wire: Paired) -> None:
    """Prompts that are only half done count too."""
    with Live(wire) as live:
        live.watch()
        wire.far[0].sendall(frame({"event": "metrics", "metrics": {"prompt_tokens_total": 7}}))
        live.run(5.0, lambda: bool(live.counters()))
    assert [count for _, count in live.prompt_tokens([])] == [7.0]


def test_a_peer_tells_the_progress_of_each_prompt() -> None:
    """Progress of several prompts adds up, and what a cache held is not work."""
    answers = [
        Answer(0.0, progress=[(1.0, 0), (2.0, 10)]),
        Answer(0.0, progress=[(1.5, 4), (3.0, 6)]),
    ]
    with Live(SseWire(1)) as live:
        pass
    series = live.prompt_tokens(answers)
    assert series == [(1.0, 0.0), (1.5, 4.0), (2.0, 14.0), (3.0, 16.0)]
    answer = Answer(0.0)
    progress = {"total": 9, "cache": 1, "processed": 5, "time_ms": 3}
    SseWire(1).note(answer, 2.0, {"tokens_predicted": 0, "prompt_progress": progress})
    assert answer.progress == [(2.0, 4)]


def asked(scene: str, words: str) -> argparse.Namespace:
    """Return the parsed options of a scene."""
    return driver.load()[scene].parser().parse_args(words.split())


def test_a_quick_run_and_a_whole_one_are_bounded() -> None:
    """Somebody who starts it knows when it is over at the latest."""
    here = driver.Here(1, 2, None, servers.FAKE)
    assert storm.storm(asked("storm", "--quick"), here).minutes < 4
    whole = storm.storm(asked("storm", ""), here)
    assert whole.minutes < 12
    systems = len(storm.CAPS) + 1 + len(storm.BATCHES)
    assert whole.seconds * systems * whole.repetitions / 60 <= whole.minutes


def test_every_scene_fits_into_the_context() -> None:
    """No request may be refused for want of room."""
    script = storm.script_of(asked("storm", "--interactive 3"))
    streams = 6 * (script.stream_tokens + script.chat_tokens)
    assert script.cells >= streams + 3 * script.prompt_tokens
    assert script.slots == 7


def systems(words: str, folder: Path | None = None) -> list[str]:
    """Return the names of what the storm compares."""
    given = asked("storm", words)
    script = storm.script_of(given)
    setup = servers.Setup(Path("m.gguf"), 2, script.cells, script.slots)
    return [s.name for s in storm.systems(setup, folder, given, script)]


def system(family: str, knob: str) -> contest.System:
    """A system that is never started."""
    return contest.System(family, knob, lambda _seed: pytest.fail("started"))


def medians(*p95: tuple[contest.System, float, float]) -> contest.Medians:
    """What one repetition of the storm found: p95 ratio and prompts/s of each."""
    rows = [
        {
            "family": s.family,
            "knob": s.knob,
            "case": "",
            "storm_n": 5,
            "storm_p95_x": x,
            "storm_p95_later_x": x,
            "storm_prompts_s": gain,
        }
        for s, x, gain in p95
    ]
    return contest.Medians([s for s, _, _ in p95], rows)


def test_verdicts_name_targets_and_rivals() -> None:
    """A target that is missed, and a cap that is beaten, are said plainly."""
    ours, peer = system(storm.OURS, "cap 1.2"), system(storm.PEER, "-b 4")
    lines = list(storm.verdicts(medians((ours, 1.3, 0.2), (peer, 1.1, 0.4))))
    assert (
        "uma-trio: storm, after the first 3 s: p95 / solo: 1.30 (target at most 1.2: MISSED)"
        in lines
    )
    assert any("LESS: llama-server -kvu -b 4" in line for line in lines)
    assert any(line.endswith("not measured") for line in lines)
    assert "decoders: no other server was measured" in lines


def test_each_cap_and_batch_is_a_system() -> None:
    """The knobs of the command line are what is compared; without peers there is only us."""
    words = "--caps 2 --batch 0 16 --no-flash 4"
    assert systems(words, Path("bin")) == [
        "uma-trio",
        "uma-trio cap 2",
        "uma-trio baseline",
        "llama-server -kvu -b 2048",
        "llama-server -kvu -b 16",
        "llama-server -kvu -fa off -b 4",
    ]
    assert len(systems(words)) == 3
    assert systems("--caps 2 --no-baseline --policies mine deadline") == [
        "uma-trio",
        "uma-trio mine cap 2",
        "uma-trio cap 2",
    ]
