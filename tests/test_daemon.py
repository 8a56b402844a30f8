"""The daemon as a process: real sockets, real signals, real clients that die.

The model is the fake one (:mod:`fake_daemon`). Time is real here, so waiting is always for
something, with a deadline, and never for a while.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from uma_trio.cli.doctor import examine
from uma_trio.cli.explain import explain as explain_verb
from uma_trio.cli.ps import ps as ps_verb
from uma_trio.client import Client, ConnectionFailed, ServerError, connect, generate_sync
from uma_trio_sim.commands.replay import replay as replay_verb

pytestmark = pytest.mark.daemon

HERE = Path(__file__).parent
PATIENCE_S = 60.0
QUICK_START = HERE / "data" / "quick_start_client.txt"


class Daemon:
    """A daemon process, and what the system says about it."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = str(path)
        self._dialled: list[socket.socket] = []
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_daemon.py"), self.path, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests may ignore it, under nohup; the daemon would then too.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509  no threads
        )

    def next_line(self) -> str:
        """Wait for what it says next: ready, then computing."""
        if self.process.stdout is None:
            raise AssertionError
        return self.process.stdout.readline().strip()

    def next_error(self) -> str:
        """Wait for the next line of its log, which is then no fault."""
        if self.process.stderr is None:
            raise AssertionError
        return self.process.stderr.readline()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for its end; whatever it logged is a fault."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        if errors:
            raise AssertionError(errors)
        return self.process.returncode

    def descriptors(self) -> int:
        """Count its open files."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def settled_descriptors(self) -> int:
        """Count its open files once the processes that render templates have been started."""
        with self.dial() as sock:
            chat = [{"role": "user", "content": "Hi"}]
            send(sock, {"type": "generate", "id": "t", "messages": chat, "max_tokens": 1})
            while receive(sock).get("event") not in ("eos", "error"):
                pass
        self.until_idle()
        return self.descriptors()

    def metrics(self) -> dict[str, object]:
        """Ask it."""
        with self.dial() as sock:
            send(sock, {"type": "metrics"})
            return receive(sock)["metrics"]  # type: ignore[return-value]

    def dial(self) -> socket.socket:
        """Connect to it."""
        sock = socket.socket(socket.AF_UNIX)
        self._dialled.append(sock)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.path)
        return sock

    def bury(self) -> None:
        """Leave nothing of it, or of its clients, behind."""
        for sock in self._dialled:
            sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def until_idle(self, descriptors: int | None = None) -> None:
        """Wait until nothing runs and as many files are open as before."""
        eventually(
            lambda: (
                (m := self.metrics())["active_sessions"] == m["queued_sessions"] == 0
                and m["kv_cells_used"] == 0
                and (descriptors is None or self.descriptors() <= descriptors)
            )
        )


@contextmanager
def daemon(*options: str) -> Iterator[Daemon]:
    """Run a daemon that is ready; at the end it must not have logged anything."""
    with tempfile.TemporaryDirectory(prefix="uma") as folder:
        running = Daemon(Path(folder) / "s", *options)
        try:
            if running.next_line() != "ready":
                raise AssertionError("the daemon is not ready")
            yield running
            if running.process.poll() is None:
                running.signal()
                if running.exit_code() != 0:
                    raise AssertionError("the daemon did not end well")
        finally:
            running.bury()


def eventually(check: Callable[[], object]) -> None:
    """Wait until `check` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError("it never happened")
        time.sleep(0.01)


def send(sock: socket.socket, request: dict[str, object]) -> None:
    """Write a frame."""
    payload = json.dumps(request).encode()
    sock.sendall(struct.pack("<I", len(payload)) + payload)


def receive(sock: socket.socket) -> dict[str, object]:
    """Read a frame; an empty event at the end of file."""
    header = _exactly(sock, 4)
    return json.loads(_exactly(sock, struct.unpack("<I", header)[0])) if header else {}


def receive_all(sock: socket.socket) -> list[dict[str, object]]:
    """Read to the terminal event, or to the end of file."""
    events = []
    while event := receive(sock):
        events.append(event)
        if event["event"] == "eos":
            break
    return events


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            return b""
        data += more
    return data


READER = """
import socket, struct, json, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    p = json.dumps({"id": "r", "prompt": "x" * int(sys.argv[2]), "max_tokens": 3000}).encode()
    s.sendall(struct.pack("<I", len(p)) + p)
    while s.recv(4096):
        print("read", flush=True)
"""


def reader(daemon: Daemon, prompt_bytes: int = 5) -> subprocess.Popen[str]:
    """Start a process that asks for a long text and reads it."""
    return subprocess.Popen(
        [sys.executable, "-c", READER, daemon.path, str(prompt_bytes)],
        stdout=subprocess.PIPE,
        text=True,
    )


def first_read(process: subprocess.Popen[str]) -> None:
    """Wait until it has read something."""
    if process.stdout is None or not process.stdout.readline():
        raise AssertionError("it read nothing")


def kill(process: subprocess.Popen[str]) -> None:
    """Kill it as the system would."""
    process.kill()
    process.communicate()


# --- serving ---


def test_the_seeds_quick_start_client_works_unchanged() -> None:
    """The program of the seeds' README: only the path of its socket is another here."""
    with daemon() as running:
        program = QUICK_START.read_text().replace("/tmp/uma.sock", running.path)  # noqa: S108
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('"event": "token"') == 20
        assert done.stdout.count('"event": "eos"') == 1


def test_doctor_judges_the_settings_of_the_daemon_that_runs() -> None:
    """Not those that it was called with itself; with an option it is about a daemon with that option."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with daemon(f"http={port}", "parallel=3", "prefix_ram=1GiB") as running:
        report = examine({"socket": running.path})
        assert report.is_running
        assert "--parallel=3" in report.system[-1]
        assert [each for each in report.findings if each.about == "http"] == []
        report = examine({"socket": running.path, "n_ctx": "512"})
        assert "--parallel=3" not in report.system[-1]


def test_two_hundred_clients_one_after_another() -> None:
    """Each gets its answer, and no slot, cell or descriptor stays behind."""
    with daemon("parallel=4", "max_sessions=64") as running:
        list(generate_sync("warm up", running.path, max_tokens=2))
        running.until_idle()
        before = running.settled_descriptors()
        texts = {
            "".join(token.text for token in generate_sync("hello", running.path, max_tokens=5))
            for _ in range(200)
        }
        assert len(texts) == 1
        running.until_idle(before)


async def test_forty_clients_at_once() -> None:
    """Over four slots: forty terminal events, and everything is free again."""
    with daemon("parallel=4", "max_sessions=64", "n_ctx=4096", "cost=0.001") as running:
        before = running.settled_descriptors()
        reasons: list[str] = []

        async def one(n: int) -> None:
            async with connect(running.path) as client:
                await client.generate(f"prompt {n}", max_tokens=20).text()
                reasons.append(client.last.reason if client.last else "none")

        async with trio.open_nursery() as nursery:
            for n in range(40):
                nursery.start_soon(one, n)
        assert reasons == ["length"] * 40
        running.until_idle(before + 1)


def test_a_client_too_many_is_told() -> None:
    """The sixth of five, while the five go on."""
    with daemon("max_sessions=5") as running:
        others = [running.dial() for _ in range(5)]
        with running.dial() as late:
            assert receive(late)["code"] == "E_LIMIT_002"
            assert receive(late) == {}
        send(others[0], {"id": "a", "prompt": "p", "max_tokens": 1})
        assert receive(others[0])["event"] == "token"
        for sock in others:
            sock.close()


def test_garbage_is_answered_with_one_sentence() -> None:
    """Somebody types into the socket."""
    with daemon() as running:
        with running.dial() as sock:
            sock.sendall(b"hello, is anybody there?\n")
            error = receive(sock)
            assert (error["code"], error["fatal"]) == ("E_PROTO_002", True)
            assert receive(sock) == {}
        running.until_idle()


# --- clients that die or stop ---


@pytest.mark.parametrize("prompt_bytes", [5, 3000], ids=["decode", "prefill"])
def test_a_killed_client_leaves_nothing(prompt_bytes: int) -> None:
    """Kill -9 in the middle of a prompt or of a stream frees slot, cells and descriptor."""
    with daemon("n_ctx=8192", "cost=0.02") as running:
        before = running.settled_descriptors()
        process = reader(running, prompt_bytes)
        if prompt_bytes == 5:
            first_read(process)
        else:
            eventually(lambda: running.metrics()["active_sessions"])
        kill(process)
        running.until_idle(before + 1)


def test_a_stopped_reader_parks_alone() -> None:
    """SIGSTOP one client: it parks after tens of tokens, and goes on at SIGCONT."""
    with daemon("n_ctx=8192", "cost=0.002") as running:
        process = reader(running)
        first_read(process)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: running.metrics()["parked_sessions"] == 1)
        with running.dial() as sock:
            send(sock, {"type": "sessions"})
            (info,) = receive(sock)["sessions"]  # type: ignore[misc]
            assert info["state"] == "parked"  # type: ignore[index]
        text = [t.text for t in generate_sync("beside it", running.path, max_tokens=50)]
        assert len(text) >= 50
        process.send_signal(signal.SIGCONT)
        eventually(lambda: running.metrics()["parked_sessions"] == 0)
        kill(process)
        running.until_idle()


# --- the end ---


def test_sigterm_under_load_finishes_what_runs() -> None:
    """Everybody gets the whole answer, then the daemon is gone, with its socket."""
    with daemon("cost=0.005") as running:
        socks = [running.dial() for _ in range(4)]
        for n, sock in enumerate(socks):
            send(sock, {"id": f"r{n}", "prompt": "p", "max_tokens": 100})
            assert receive(sock)["event"] == "token"
        late = running.dial()
        running.signal()
        eventually(lambda: _refused(running))
        send(late, {"id": "late", "prompt": "p"})
        assert receive(late)["code"] == "E_LIFECYCLE_001"
        for sock in socks:
            events = receive_all(sock)
            assert (events[-1]["event"], events[-1]["reason"]) == ("eos", "length")
            assert sum(event["event"] == "token" for event in events) == 99
            sock.close()
        late.close()
        assert running.exit_code() == 0
        assert not Path(running.path).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_drain_that_takes_too_long_ends_the_rest_with_a_code(number: signal.Signals) -> None:
    """After ``drain_s`` what still runs gets its terminal event, and the exit code is still 0."""
    with daemon("cost=0.02", "drain_s=0.2", "n_ctx=8192") as running:
        sock = running.dial()
        send(sock, {"id": "r", "prompt": "p", "max_tokens": 4000})
        receive(sock)
        running.signal(number)
        events = receive_all(sock)
        assert (events[-1]["reason"], events[-1]["code"]) == ("error", "E_LIFECYCLE_001")
        sock.close()
        assert running.exit_code() == 0


def test_a_second_signal_does_not_wait() -> None:
    """Told twice, the daemon leaves at once; its socket goes with it."""
    with daemon("cost=0.02", "drain_s=600", "n_ctx=8192") as running:
        with running.dial() as sock:
            send(sock, {"id": "r", "prompt": "p", "max_tokens": 4000})
            receive(sock)
            running.signal()
            eventually(lambda: _refused(running))
            running.signal()
            assert running.exit_code() == 130
        assert not Path(running.path).exists()


def test_a_second_signal_does_not_wait_for_a_long_tick() -> None:
    """Nor for a computation that nobody can interrupt."""
    with daemon("cost=600", "drain_s=600") as running:
        with running.dial() as sock:
            send(sock, {"id": "r", "prompt": "p", "max_tokens": 4000})
            assert running.next_line() == "computing"
            running.signal()
            eventually(lambda: _refused(running))
            running.signal()
            assert running.exit_code() == 130
        assert not Path(running.path).exists()


def test_an_idle_daemon_does_not_drain() -> None:
    """With clients connected that say nothing: a drain would outlast every limit of this test."""
    with daemon(f"drain_s={100 * PATIENCE_S}") as running:
        with running.dial() as sock:
            running.signal()
            assert receive(sock) == {}
        assert running.exit_code() == 0


def test_a_dead_engine_tells_everybody_and_ends_loudly() -> None:
    """Each stream gets its terminal event before the process exits with 70."""
    with daemon("cost=0.005", "die=40") as running:
        socks = [running.dial() for _ in range(3)]
        for sock in socks:
            send(sock, {"id": "r", "prompt": "p", "max_tokens": 500})
        for sock in socks:
            events = receive_all(sock)
            assert (events[-1]["event"], events[-1]["code"]) == ("eos", "E_RUNTIME_004")
            sock.close()
        assert running.process.wait(PATIENCE_S) == 70
        assert not Path(running.path).exists()
        _, errors = running.process.communicate()
        assert "Traceback" in json.loads(errors)["exception"]
        assert "told to" in errors


# --- ownership ---


def test_the_second_daemon_learns_that_it_is_one() -> None:
    """Exit 75, naming the process that serves; the first does not notice."""
    with daemon() as running:
        second = Daemon(Path(running.path))
        said = second.next_line()
        assert re.search(rf"pid {running.process.pid}\b", said)
        assert second.exit_code() == 75
        assert len(list(generate_sync("still here", running.path, max_tokens=3))) >= 3


def test_a_daemon_tells_that_its_socket_was_removed() -> None:
    """Who is connected stays; the log says why nobody else comes, and what to do."""
    with daemon() as running:
        sock = running.dial()
        Path(running.path).unlink()
        line = json.loads(running.next_error())
        assert line["socket"] == running.path
        assert "restart" in line["fix"]
        send(sock, {"id": "r", "prompt": "p", "max_tokens": 3})
        assert receive_all(sock)[-1]["event"] == "eos"


def test_after_kill_nine_the_next_daemon_starts() -> None:
    """The stale socket is replaced."""
    with daemon() as running:
        running.process.kill()
        running.process.communicate()
        assert Path(running.path).exists()
        again = Daemon(Path(running.path))
        assert again.next_line() == "ready"
        list(generate_sync("hello", again.path, max_tokens=2))
        again.signal()
        assert again.exit_code() == 0


# --- the trio client against the process ---


async def test_a_client_lives_through_a_restart() -> None:
    """With ``reconnect`` an idle client does not notice that the daemon was replaced."""
    with daemon() as running:
        async with connect(running.path, reconnect=True) as client:
            before = await client.generate("hello", max_tokens=5).text()
            running.signal()
            assert running.exit_code() == 0
            again = Daemon(Path(running.path))
            try:
                assert again.next_line() == "ready"  # a client tries again for a few seconds only
                assert await client.generate("hello", max_tokens=5).text() == before
            finally:
                again.signal()
                assert again.exit_code() == 0


async def test_without_a_daemon_the_error_says_how_to_start_one() -> None:
    """Nobody serves there."""
    with pytest.raises(ConnectionFailed, match="uma-trio serve"):
        async with connect("/nowhere/s"):
            pass


async def test_a_refusal_is_an_error_with_its_code() -> None:
    """And the client is told that the connection is closed if it goes on."""
    with daemon() as running:
        async with connect(running.path) as client:
            with pytest.raises(ServerError, match="E_MODEL_002"):
                await client.generate("hello", model="another").text()
            with pytest.raises(ConnectionFailed):
                await client.generate("hello").text()


async def test_many_streams_left_early_leave_nothing() -> None:
    """A hundred generations, each left in another way, on one connection."""
    with daemon("cost=0.001") as running:
        async with connect(running.path) as client:
            for n in range(100):
                await _leave(client, n % 3)
            assert await client.sessions() == ()
        running.until_idle()


# --- explain ---


def test_a_request_is_explained_and_its_ticks_are_planned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what `serve --trace` wrote, after the daemon has stopped in order."""
    trace = tmp_path / "trace"
    with daemon("cost=0.001", f"trace={trace}", "parallel=1") as running:
        with running.dial() as first, running.dial() as second:
            send(first, {"id": "a", "prompt": "SECRET", "max_tokens": 20, "app": "editor"})
            receive(first)
            send(second, {"id": "b", "prompt": "SECRET", "max_tokens": 20})
            handle = receive_all(second)[-1]["request"]
            receive_all(first)
        assert explain_verb(socket=running.path) == 0
        listed = capsys.readouterr().out
        assert "editor" in listed
        assert "QUEUED" in listed
        assert explain_verb(int(str(handle)), ticks=5, socket=running.path) == 0
        told = capsys.readouterr().out
        assert "the slot was busy: by request 1 (editor)" in " ".join(told.split())
        assert "prefill 7 tokens in 1 tick over" in told
        assert "PREDICTED" in told
        assert explain_verb(99, socket=running.path) == 2
        assert "E_PROTO_005" in capsys.readouterr().err
    assert b"SECRET" not in trace.read_bytes()
    assert replay_verb(trace) == 0
    assert "All 40 plans are reproduced." in capsys.readouterr().out


def test_a_wait_is_told_while_it_lasts_with_who_causes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By `ps`, and by `explain --follow` until the request has ended."""
    with daemon("cost=0.01", "parallel=1") as running:
        first, second = running.dial(), running.dial()
        send(first, {"id": "a", "prompt": "x", "max_tokens": 150, "app": "editor"})
        reads = threading.Thread(target=receive_all, args=(first,))
        reads.start()
        eventually(lambda: running.metrics()["active_sessions"] == 1)
        send(second, {"id": "b", "prompt": "x", "max_tokens": 3, "app": "batch"})
        eventually(lambda: running.metrics()["queued_sessions"] == 1)
        assert ps_verb(socket=running.path) == 0
        waits = "the slot is taken: by request 1 (editor)"
        assert f"Request 2: {waits}\n" in capsys.readouterr().out
        assert explain_verb(2, follow=True, socket=running.path) == 0
        first_line, *rest = capsys.readouterr().out.splitlines()
        assert first_line.endswith(f": queued; {waits}")
        assert any(line.startswith("Request 2 (batch") for line in rest)
        reads.join()


def test_a_trace_that_cannot_be_written_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    """Whoever wants one should not find out at the end that there is none."""
    running = Daemon(tmp_path / "s", f"trace={tmp_path / 'no' / 'trace'}")
    try:
        _, errors = running.process.communicate(timeout=PATIENCE_S)
        assert "--trace" in errors
        assert "No such file or directory" in errors
        assert not (tmp_path / "s").exists()
    finally:
        running.bury()


# --- the scorecard ---


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_scorecard_grows_while_the_daemon_serves_and_once_more_when_it_stops(
    tmp_path: Path, kind: str
) -> None:
    """Its lines add up to the whole life of the daemon, and the metrics show the latest."""
    card = tmp_path / f"card.{kind}"
    options = (f"scorecard={card}", "scorecard_interval_s=0.2")
    with daemon("cost=0.005", *options) as running:
        list(generate_sync("hello", running.path, max_tokens=30))
        eventually(lambda: card.read_text(encoding="utf-8").count("\n") >= 3)
        assert running.metrics()["scorecard"]["interval_s"] >= 0.2  # type: ignore[index]
        computed = int(str(running.metrics()["tokens_total"]))
        before = card.read_text(encoding="utf-8")
        running.signal()
        assert running.exit_code() == 0
    after = card.read_text(encoding="utf-8")
    if kind == "jsonl":
        lines = [json.loads(line) for line in after.splitlines()]
    else:
        lines = list(csv.DictReader(after.splitlines()))
    assert after.count("\n") > before.count("\n")
    told = sum(float(line["tokens_per_s"]) * float(line["interval_s"]) for line in lines)
    assert told == pytest.approx(computed, rel=0.001)


def test_a_scorecard_that_cannot_be_written_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    """Nor is a table of somebody else's spoiled."""
    strange = tmp_path / "strange.csv"
    strange.write_text("a,b\n", encoding="utf-8")
    for path, said in ((tmp_path / "no" / "c", "No such file"), (strange, "other columns")):
        running = Daemon(tmp_path / "s", f"scorecard={path}")
        try:
            _, errors = running.process.communicate(timeout=PATIENCE_S)
            assert "--scorecard" in errors
            assert said in errors
            assert not (tmp_path / "s").exists()
        finally:
            running.bury()


async def _leave(client: Client, way: int) -> None:
    if way == 0:
        async with client.generate("hello", max_tokens=500) as generation:
            async for _ in generation:
                break
    elif way == 1:
        async for _ in client.generate("hello", max_tokens=500):
            break
    else:
        with trio.move_on_after(0.01):
            await client.generate("hello", max_tokens=500).text()


def _refused(running: Daemon) -> bool:
    """Whether the daemon has stopped accepting."""
    try:
        running.dial().close()
    except OSError:
        return True
    return False
