"""The benchmarks' own arithmetic: a wrong figure is worse than none."""

from __future__ import annotations

import argparse
import csv
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benches import clients, contest, driver, peers, report, servers
from benches.clients import Answer, Dechunker, FramedWire, Job, SseWire, frame
from benches.live import drive
from benches.metered import Meter, Reading
from benches.rates import end_to_end, steady
from benches.scenes import overhead, throughput
from uma_trio_sim.latency import itl, median, percentile

JOB = Job("a", "once upon", 2)


def test_percentile_is_linear_between_neighbours() -> None:
    """Half way between two values is their mean, and the ends are the extremes."""
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, q) for q in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert median([3.0]) == 3.0


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentile_refuses_nonsense(values: list[float], q: float) -> None:
    """No values, or a percentile out of range, is an error and not a number."""
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


def test_gaps_are_between_tokens() -> None:
    """Three tokens have two gaps."""
    assert itl([1.0, 1.5, 3.0]) == [0.5, 1.5]


def test_steady_rate_is_that_of_one_stream() -> None:
    """A token every 10 ms is 100 tokens/s, whatever the first token took."""
    window = steady([[5 + i / 100 for i in range(11)]])
    assert window is not None
    assert window.rate == pytest.approx(100)
    assert window.fewest_tokens == 11


def test_steady_rate_leaves_out_what_is_not_shared() -> None:
    """Only the time in which both streams decode counts, so neither end pulls the rate."""
    slow_start = [0.0, *[10 + i / 10 for i in range(21)]]
    late = [10.5 + i / 10 for i in range(31)]
    window = steady([slow_start, late])
    assert window is not None
    assert window.rate == pytest.approx(20)
    assert window.seconds == pytest.approx(1.5)


def test_steady_rate_needs_a_shared_window() -> None:
    """Streams that ran one after another have no common rate."""
    assert steady([[0.0, 1.0, 2.0], [3.0, 4.0]]) is None
    assert steady([[1.0, 2.0], []]) is None
    assert steady([]) is None


def test_end_to_end_counts_from_the_first_request() -> None:
    """Prompts are in the end-to-end rate."""
    assert end_to_end([0.0, 1.0], [[2.0, 3.0], [2.0, 4.0]]) == pytest.approx(1.0)
    assert end_to_end([0.0], [[]]) is None


def test_table_lines_up_and_shows_gaps_in_the_data() -> None:
    """Columns have one width, and what was not measured is a dash."""
    lines = report.table(("system", "k"), [("ours", 1.234), ("theirs", None)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2] == "| ours   | 1.23 |"
    assert lines[3].endswith("   - |")


def test_csv_carries_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine and seed are in the file, and columns that only some rows have are kept."""
    monkeypatch.setattr(report, "OUT", tmp_path)
    path = report.write_csv("x", [{"a": 1}, {"a": 2, "b": 0.5}], {"seed": "7"})
    lines = path.read_text().splitlines()
    assert lines[0] == "# seed: 7"
    assert list(csv.DictReader(lines[1:])) == [{"a": "1", "b": ""}, {"a": "2", "b": "0.5"}]


def test_batched_bench_is_read_from_its_json_line() -> None:
    """The decode rate is S_TG, and the end-to-end rate has the prompts in it."""
    line = {"pp": 64, "tg": 128, "pl": 4, "speed_tg": 286.0, "t": 2.0, "speed": 400.0}
    result = throughput.ceiling(contest.json_line(f"a warning\n{json.dumps(line)}\n\n", "", "x"))
    assert (result["decode"], result["whole"]) == (286.0, 256.0)


def test_batched_bench_without_a_result_is_an_error() -> None:
    """A run that printed no figure is reported with what it printed."""
    with pytest.raises(clients.NotServed, match="failed to load model"):
        contest.json_line("failed to load model", "", "llama-batched-bench")


class Scripted:
    """A wire to a server whose whole answer is in the socket before it is asked."""

    def __init__(self, wire: clients.Wire, *parts: bytes) -> None:
        self._wire, self._parts = wire, parts
        self.peer: socket.socket | None = None

    def connect(self) -> socket.socket:
        """Return a socket that holds the answer."""
        ours, self.peer = socket.socketpair()
        for part in self._parts:
            self.peer.sendall(part)
        return ours

    def request(self, job: Job) -> bytes:
        """Ask as the real one."""
        return self._wire.request(job)

    def end_detector(self) -> Callable[[bytes], bool]:
        """End as the real one."""
        return self._wire.end_detector()

    def events(self, reads: Sequence[clients.Read]) -> Iterator[clients.Event]:
        """Parse as the real one."""
        return self._wire.events(reads)

    def note(self, answer: Answer, at: float, event: dict[str, Any]) -> None:
        """Count as the real one."""
        self._wire.note(answer, at, event)


def ask(wire: Scripted, job: Job = JOB, timeout_s: float = 10) -> Answer:
    """Send one job and return what became of it."""
    try:
        (answer,) = drive(wire, [job], timeout_s=timeout_s)
    finally:
        if wire.peer is not None:
            wire.peer.close()
    return answer


def token(text: str, token_id: int = 1) -> bytes:
    """A token event as the daemon sends it."""
    return packed({"event": "token", "id": "a", "text": text, "token_id": token_id})


def eos(n: int, reason: str = "length", **more: object) -> bytes:
    """A terminal event as the daemon sends it."""
    usage = {"prompt_tokens": 2, "completion_tokens": n}
    return packed({"event": "eos", "id": "a", "reason": reason, "usage": usage, **more})


def packed(message: dict[str, object]) -> bytes:
    """The compact JSON of our encoder, framed."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    return len(payload).to_bytes(4, "little") + payload


def test_framed_stream_counts_token_events() -> None:
    """Each token event is a token, also with empty text or text that looks like an end."""
    wire = Scripted(FramedWire(Path("x")), token('{"event":"eos"}'), token(""), eos(2))
    answer = ask(wire)
    assert answer.error is None
    assert len(answer.times) == 2
    assert answer.prompt_tokens == 2
    assert answer.ttft_s is not None


def test_framed_request_is_greedy_and_of_fixed_length() -> None:
    """What is asked for makes every run generate the same number of tokens."""
    request = FramedWire(Path("x")).request(JOB)
    asked = json.loads(request[4:])
    assert int.from_bytes(request[:4], "little") == len(request) - 4
    assert (asked["temperature"], asked["ignore_eos"], asked["max_tokens"]) == (0, True, 2)


def test_stream_that_ends_early_is_an_error() -> None:
    """Fewer tokens than asked for must not pass as a fast run."""
    answer = ask(Scripted(FramedWire(Path("x")), token("a"), eos(1, "stop")))
    assert "asked for 2" in str(answer.error)


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (eos(0, "error", code="E_RUNTIME_001"), "error E_RUNTIME_001"),
        (frame({"event": "error", "code": "E_LIMIT_004", "message": "too long"}), "E_LIMIT_004"),
    ],
)
def test_what_the_daemon_refuses_is_told(last: bytes, error: str) -> None:
    """An error event ends a stream and is reported with its code."""
    answer = ask(Scripted(FramedWire(Path("x")), last))
    assert error in str(answer.error)


def test_silent_server_is_given_up() -> None:
    """A stream that brings nothing in time is an error and not a hang."""
    answer = ask(Scripted(FramedWire(Path("x"))), timeout_s=0)
    assert answer.error is not None


def sse(*events: dict[str, object], status: str = "200 OK") -> bytes:
    """A chunked answer as llama-server sends it."""
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    bodies = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies)
    return head + chunks + b"0\r\n\r\n"


STREAM = sse(
    {"tokens_predicted": 1, "stop": False},
    {"tokens_predicted": 3, "stop": False},
    {"tokens_predicted": 3, "tokens_evaluated": 9, "stop": True},
)


def ended(wire: Scripted) -> Scripted:
    """Close the far end right after connecting, as a server does that is done."""
    connect = wire.connect

    def connect_and_close() -> socket.socket:
        sock = connect()
        assert wire.peer is not None
        wire.peer.shutdown(socket.SHUT_WR)
        return sock

    wire.connect = connect_and_close  # type: ignore[method-assign]
    return wire


def test_sse_tokens_are_counted_by_the_server_and_not_by_chunk() -> None:
    """A chunk that brings two tokens counts as two."""
    answer = ask(ended(Scripted(SseWire(1), STREAM)), Job("a", "x", 3))
    assert answer.error is None
    assert (len(answer.times), answer.prompt_tokens) == (3, 9)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_sse_is_read_alike_however_it_is_cut(size: int) -> None:
    """Where reads cut the bytes changes nothing but the times."""
    reads = [(float(i), STREAM[i : i + size]) for i in range(0, len(STREAM), size)]
    counts = [event["tokens_predicted"] for _, event in SseWire(1).events(reads)]
    assert counts == [1, 3, 3]


def test_http_refusal_is_told() -> None:
    """Anything but 200 is an error with what the server said."""
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: 7\r\n\r\nloading"
    answer = ask(ended(Scripted(SseWire(1), refusal)))
    assert answer.error == "HTTP 503: loading"


def test_plain_body_passes_through() -> None:
    """A body without chunks is handed on as it is."""
    body = Dechunker()
    assert body.feed(b"HTTP/1.1 200 OK\r\n\r\nab") + body.feed(b"cd") == b"abcd"


def test_prompts_are_unique_and_come_back_with_their_seed() -> None:
    """No prompt repeats, so nobody's prefix cache helps; the same seed gives the same ones."""
    work = clients.jobs(16, 64, 8, "1/a")
    assert len({job.prompt for job in work}) == 16
    assert work == clients.jobs(16, 64, 8, "1/a") != clients.jobs(16, 64, 8, "2/a")
    assert {len(job.prompt.split()) for job in work} == {64}


def test_every_second_repetition_runs_backwards() -> None:
    """A machine that drifts favours nobody: A B C is followed by C B A; cases stay together."""
    systems = [
        contest.System(name, "", lambda _seed: {}, case) for case in ("1", "2") for name in "abcd"
    ]
    first, second = (contest.order(systems, repetition, 5) for repetition in (0, 1))
    assert second == first[::-1]
    assert [s.case for s in first] == ["1"] * 4 + ["2"] * 4
    assert {s.family for s in first[:4]} == {*"abcd"}


def measured(
    ours: float | None, top: float, rival: float, k: int = 4, others: float = 0.0
) -> contest.Medians:
    """One repetition at `k` streams."""
    rates = {throughput.OURS: ours, throughput.CEILING: top, contest.PEER: rival}
    rows: list[contest.Row] = [
        {"repetition": 0, "family": name, "knob": "", "case": f"k={k}", "decode": rate,
         "others_pct": others}
        for name, rate in rates.items()
    ]  # fmt: skip
    systems = [contest.System(name, "", lambda _seed: {}, f"k={k}") for name in rates]
    return contest.Medians(systems, throughput.complete(rows))


@pytest.mark.parametrize(
    ("ours", "rival", "words"),
    [(93.0, 80.0, ["0.93", "met", "met"]), (91.0, 95.0, ["0.91", "MISSED", "MISSED"])],
)
def test_verdict_names_both_targets(ours: float, rival: float, words: list[str]) -> None:
    """A missed target is printed as plainly as one that is met."""
    (line,) = throughput.verdicts(measured(ours, 100.0, rival))
    assert [word for word in line.replace(")", " ").split() if word in words] == words


def test_three_decoders_have_to_beat_the_ceiling() -> None:
    """Where a row more is quicker, as fast as llama.cpp alone is not enough."""
    (line,) = throughput.verdicts(measured(110.0, 100.0, 80.0, k=3))
    assert "share of llama-batched-bench: 1.10 (target at least 1.35: MISSED)" in line


def given(*words: str) -> argparse.Namespace:
    """Return parsed options of the scene."""
    return driver.load()["throughput"].parser().parse_args(words)


def test_streams_ask_in_the_lane_of_the_load() -> None:
    """What is measured as background work is sent as such."""
    work = throughput.jobs(given("--lane", "background"), 2, 4, "1")
    assert [job.priority for job in work] == ["background"] * 2
    assert {job.priority for job in throughput.jobs(given(), 2, 4, "1")} == {None}


def test_both_kinds_of_server_are_told_the_same_way_to_choose(tmp_path: Path) -> None:
    """Drawn tokens are drawn alike, and greedy ones are the likeliest at both."""
    for words in ([], ["--sampled"]):
        (job,) = throughput.jobs(given(*words), 1, 4, "1")
        ours = json.loads(FramedWire(tmp_path / "s").request(job)[4:])
        theirs = json.loads(SseWire(1).request(job).partition(b"\r\n\r\n")[2])
        for name in ("temperature", "top_k", "top_p", "min_p"):
            assert ours.get(name) == theirs.get(name)
        assert (ours["temperature"] > 0) == bool(words)


def test_verdict_on_a_disturbed_machine_says_so() -> None:
    """When others took a share of the cores, the verdict carries it."""
    (line,) = throughput.verdicts(measured(93.0, 100.0, 80.0, others=30.0))
    assert "DISTURBED, others took 30 %" in line


def test_nothing_is_decided_without_a_measurement() -> None:
    """A system that failed gives no verdict."""
    (line,) = throughput.verdicts(measured(None, 100.0, 80.0))
    assert "not decided" in line


def test_a_token_is_held_against_the_ceilings() -> None:
    """As a share of its rate, and in the microseconds that it takes longer."""
    found = measured(80.0, 100.0, 50.0)
    ours = found.systems[0]
    assert found(ours, "share") == pytest.approx(0.8)
    assert found(ours, "above_us") == pytest.approx(2500)


def test_too_small_a_context_is_refused() -> None:
    """A load that could not fit into the KV cache is refused before anything is started."""
    here = driver.Here(1, 1, None, servers.FAKE)
    with pytest.raises(SystemExit, match="raise --n-ctx"):
        throughput.throughput(given("--k", "16", "--prompt-tokens", "512"), here)


def test_overhead_leaves_out_what_is_ggml() -> None:
    """Time inside of the decode call and threads that are not Python's are not the daemon's."""
    python = frozenset({10, 11})
    before = overhead.Usage({10: 1.0, 11: 1.0}, Reading(0.5, 0, 0, 11, python))
    after = overhead.Usage(
        {10: 1.1, 11: 3.0, 12: 0.05, 77: 9.0}, Reading(2.4, 0.04, 9, 11, python | {12})
    )
    found = overhead.cost(10, before, after, tokens=1000)
    assert found == pytest.approx(
        {"trio": 100, "engine": 60, "choosing": 40, "helpers": 50, "outside": 250, "ggml": 10_900}
    )


def test_meter_counts_calls_and_knows_its_thread(tmp_path: Path) -> None:
    """The meter passes the call through and shows what another process has to know."""
    meter = Meter(tmp_path / "meter", lambda n: n + 1)
    assert [meter(1), meter(2)] == [2, 3]
    reading = Reading.of(tmp_path / "meter")
    assert reading.calls == 2
    assert reading.engine in reading.threads


def test_missing_peers_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    """Who has no peers is told which and what to type."""
    with pytest.raises(peers.NoPeers, match=r"llama-server.*benches\.peers --build"):
        peers.programs(tmp_path)


def test_peers_that_are_here_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the environment is used when the command line names none."""
    for name in peers.PROGRAMS:
        (tmp_path / name).touch()
    monkeypatch.setenv("UMA_PEERS", str(tmp_path))
    assert peers.programs() == tmp_path


def test_the_ceiling_shares_one_kv_cache_and_our_threads() -> None:
    """The ceiling is measured as the daemon runs: unified KV, the same context and threads."""
    setup = servers.Setup(Path("m.gguf"), threads=3, n_ctx=2048)
    command = throughput.ceiling_command(Path("bin"), setup, given("--gen-tokens", "128"), 8)
    assert "--kv-unified" in command
    for flag, value in (("-t", "3"), ("-c", "2048"), ("-npl", "8"), ("-ntg", "128")):
        assert command[command.index(flag) + 1] == value
