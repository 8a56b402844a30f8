"""Processes that try model files: whose they are, when they end, what is remembered of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damage_kit import asserting, called, refused, with_float

from uma_trio.backend import gguf_header, llama_probe
from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import read_header
from uma_trio.backend.llama_probe import Untried, header, probing
from uma_trio.cli.doctor import check_computing
from uma_trio.config.options import Config
from uma_trio.models import bundled_model, files
from uma_trio.models.files import estimate, try_computing


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Return the tasks of the probes that were started; nothing is known at first, in memory or on disk."""
    tasks: list[str] = []
    real = llama_probe._run

    def run(words: Any, looked_at: Path, longest_s: float) -> Any:
        tasks.append(words[0])
        return real(words, looked_at, longest_s)

    monkeypatch.setattr(llama_probe, "_run", run)
    monkeypatch.setattr(gguf_header, "_SETTLED_NS", 0)  # files are made by the test itself
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for known in (llama_probe._remembered, gguf_header._known):
        known.clear()
    yield tasks
    for known in (llama_probe._remembered, gguf_header._known):
        known.clear()


def of(path: Path, **more: Any) -> Config:
    """Return the settings of a model with little context."""
    return Config(model=path, n_ctx=256, gpu_layers=0, **more)


def test_a_sound_model_is_tried_once(started: list[str]) -> None:
    """For its head, its needs and its computing; a daemon that starts again knows the latter two."""
    config = of(bundled_model())
    for _ in range(3):
        estimate(config)
        try_computing(config)
    assert started == ["head", "needs", "compute"]
    llama_probe._remembered.clear()
    estimate(config)
    try_computing(config)
    assert started == ["head", "needs", "compute"]


def test_a_head_is_read_in_the_process_alone(
    monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    """A large vocabulary takes 0.1 s, with the interpreter's lock held."""
    read = read_header(bundled_model())
    gguf_header._known.clear()

    def reads(_path: Path) -> None:
        raise AssertionError("it is read in this process")

    monkeypatch.setattr(gguf_header, "_read_all", reads)
    assert header(bundled_model()) == read
    assert read_header(bundled_model()) == read
    assert started == ["head"]


@pytest.mark.parametrize("gpu_layers", [0, -1])
@pytest.mark.parametrize("damaged", [asserting, refused])
def test_a_file_that_is_refused_is_not_tried_again(
    tmp_path: Path, started: list[str], damaged: Callable[[Path], Path], gpu_layers: int
) -> None:
    """Also where layers may lie on a GPU; another file of the same name is."""
    file = damaged(tmp_path / "m.gguf")
    config = Config(model=file, n_ctx=256, gpu_layers=gpu_layers)

    def tried() -> None:
        estimate(config)
        try_computing(config)

    with pytest.raises(ModelError):
        tried()
    before = len(started)
    for _ in range(3):
        with pytest.raises(ModelError):
            tried()
    assert len(started) == before
    file.write_bytes(bundled_model().read_bytes())
    tried()


@pytest.mark.parametrize("epsilon", [-1e-5, float("nan")])
def test_what_asserts_only_while_it_computes_is_found(tmp_path: Path, epsilon: float) -> None:
    """With the assertion, and `doctor` says the same."""
    file = tmp_path / "m.gguf"
    file.write_bytes(bundled_model().read_bytes())
    config = of(with_float(file, "layer_norm_rms_epsilon", epsilon))
    estimate(config)
    with pytest.raises(ModelError, match=r"GGML_ASSERT\(eps >= 0.0f\) failed: the file is damaged"):
        try_computing(config)
    (found,) = check_computing(config)
    assert (found.weight, "GGML_ASSERT" in found.what) == ("blocks", True)


def test_a_model_is_tried_with_the_context_that_would_be_chosen() -> None:
    """None is given by default."""
    try_computing(Config(model=bundled_model()))


@pytest.mark.parametrize("more", [{}, {"flash_attention": "on"}, {"kv_type": "q8_0"}])
def test_the_bundled_model_computes(more: dict[str, Any]) -> None:
    """As it would be loaded."""
    try_computing(of(bundled_model(), **more))


def test_nothing_is_started_where_only_what_is_known_is_asked(started: list[str]) -> None:
    """So nobody waits for another model's probe who needs none."""
    config = of(bundled_model())
    with probing(starts=False), pytest.raises(Untried):
        estimate(config)
    estimate(config)
    with probing(starts=False):
        estimate(config)
    assert started == ["head", "needs"]


def test_a_file_that_is_replaced_while_it_is_tried_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is not of the file that is there."""
    file = tmp_path / "m.gguf"
    file.write_bytes(bundled_model().read_bytes())
    config = of(file)
    estimate(config)
    real = llama_probe._run

    def replaced(*words: Any) -> Any:
        found = real(*words)
        (tmp_path / "new.gguf").write_bytes(bundled_model().read_bytes())
        (tmp_path / "new.gguf").replace(file)
        return found

    monkeypatch.setattr(llama_probe, "_run", replaced)
    try_computing(config)
    with probing(starts=False), pytest.raises(Untried):
        try_computing(config)


def children(pid: int) -> list[int]:
    """Return the probes that a process runs."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return [each for each in found if b"llama_probe" in Path(f"/proc/{each}/cmdline").read_bytes()]


def stopped_from_the_start(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop the next probe as soon as it exists; return where its number is then."""
    real, pids = subprocess.Popen, list[int]()

    def popen(*words: Any, **options: Any) -> Any:
        process = real(*words, **options)
        if not pids:
            os.kill(process.pid, signal.SIGSTOP)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(llama_probe.subprocess, "Popen", popen)
    return pids


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def test_a_probe_that_stands_still_is_ended(
    monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    """After a time that is stated; the file is not to blame, and is tried again."""
    monkeypatch.setattr(llama_probe, "SILENT_S", 0.5)
    pids = stopped_from_the_start(monkeypatch)
    with pytest.raises(ModelError, match=r"stood still for 0\.5 s"):
        header(bundled_model())
    with pytest.raises(ProcessLookupError):  # it was waited for, too
        os.kill(pids[0], 0)
    monkeypatch.setattr(llama_probe, "SILENT_S", 60.0)
    assert header(bundled_model()).architecture
    assert started == ["head", "head"]


def test_a_probe_is_ended_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread's poll raises, also where the probe is stopped."""
    pids = stopped_from_the_start(monkeypatch)

    def poll() -> None:
        raise InterruptedError

    with probing(poll=poll), pytest.raises(InterruptedError):
        header(bundled_model())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


DAEMON = f"""
import signal, subprocess, os, sys
from pathlib import Path
from uma_trio.backend import llama_probe
real = subprocess.Popen
def popen(*words, **options):
    process = real(*words, **options)
    if sys.argv[1:]:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    print(process.pid, flush=True)
    return process
subprocess.Popen = popen
llama_probe._run(["compute", {str(bundled_model())!r}, "nonsense"], Path("x"), 60.0)
"""


@linux
@pytest.mark.parametrize("stops", [(), ("stops",)])
def test_a_probe_dies_with_its_daemon(stops: tuple[str, ...]) -> None:
    """Killed by SIGKILL, which nothing can be done about; also where the probe stands still since its first moment."""
    command = [sys.executable, "-c", DAEMON, *stops]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        probe = os.pidfd_open(int(daemon.stdout.readline()))
        daemon.kill()
        daemon.wait()
    ended, _, _ = select.select([probe], [], [], 60)
    os.close(probe)
    assert ended


def test_names_from_a_file_steer_no_terminal(tmp_path: Path) -> None:
    """Wherever they are shown: in the banner, in lists, in the log, in messages."""
    found = read_header(called(tmp_path / "m.gguf", b"\x1b]0;OWN\x07\r\n"))
    assert found.name.isprintable()
    assert found.name.startswith("]0;OWN")
    assert all(
        str(value).isprintable() for key, value in found.metadata.items() if "token" not in key
    )
    assert str(ModelError("no \x1b[2Jsuch model")) == "no [2Jsuch model"
    assert files.names_in_file(of(found.path)) == (found.name, "m")


def test_a_file_without_a_name_is_called_by_its_path(tmp_path: Path) -> None:
    """So it is where nothing of its name can be shown."""
    assert read_header(called(tmp_path / "m.gguf", b"\x1b" * 99)).name == "m"
