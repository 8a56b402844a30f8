"""Prefixes on disk with llama.cpp: both layouts of the cache, and daemons that end, die and replace each other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backend_kit import text as letters
from engine_kit import Bench

from models.adapters import write_adapter
from models.synthetic import PRESETS, write_model
from uma_trio.backend.base import Adapter, Overlap, nothing
from uma_trio.backend.llama import LlamaBackend
from uma_trio.engine.kv.disk import PrefixDisk
from uma_trio.engine.planner import EngineSettings

pytestmark = pytest.mark.real

PATIENCE_S = 60.0
MINE = "uid 1000"


class Counting(LlamaBackend):
    """Counts the tokens that it computes."""

    computed = 0

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute."""
        self.computed += n_tokens
        return super().decode(n_tokens, while_computing)


def load(path: Path, layout: str, **options: str) -> Counting:
    """Load the model with streams, or in one cache without flash attention."""
    flash = "on" if layout == "streams" else "off"
    settings = {"kv_layout": layout, "flash_attention": flash, **options}
    return Counting.load(path, n_ctx=2048, n_slots=2, n_batch=64, threads=1, **settings)


def answered(backend: Counting, folder: Path | None, prompt: list[int], n: int) -> list[int]:
    """Return the answer to one prompt; what is kept of it is in the folder afterwards, and nowhere else."""
    woken = Semaphore(0)
    disk = None if folder is None else PrefixDisk(folder, 1 << 30)
    if disk is not None:
        disk.scan()
    settings = EngineSettings(prefix_bytes=16 << 20 if disk else 0)
    made = Bench(backend, settings=settings, disk=disk, wake=woken.release)  # type: ignore[arg-type]
    _, sink = made.submit(prompt, n, namespace=MINE)
    while not sink.ends:
        if not made.engine.tick() and not sink.ends:
            assert woken.acquire(timeout=PATIENCE_S)
    while made.engine.cells.prefix.saving.one():
        pass
    if disk is not None:
        disk.close(PATIENCE_S)
    return sink.tokens


@pytest.mark.parametrize("layout", ["streams", "unified"])
def test_a_conversation_goes_on_after_a_restart(layout: str, tmp_path: Path) -> None:
    """What is computed is what is new, and the answers are those of a daemon without files."""
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    past, asked = letters(1, 300), letters(2, 20)
    plain = load(path, layout)
    wanted = answered(plain, None, past, 8)
    wanted_next = answered(plain, None, [*past, *wanted, *asked], 8)
    first = load(path, layout)
    assert answered(first, tmp_path / "prefix", past, 8) == wanted
    first.close()
    second = load(path, layout)
    assert answered(second, tmp_path / "prefix", [*past, *wanted, *asked], 8) == wanted_next
    # The last token of an answer is in no cell, and of the new one eight are chosen.
    assert second.computed == 1 + len(asked) + 7
    second.close()
    plain.close()


def test_cells_are_told_apart_by_all_that_they_depend_on(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", PRESETS["tiny"])
    adapter = write_adapter(tmp_path / "adapter.gguf", seed=1)
    same, again = load(path, "streams"), load(path, "streams")
    assert same.kv_identity() == again.kv_identity() != ""
    others = [load(path, "unified"), load(path, "streams", kv_type="q8_0")]
    others += [same.variant([Adapter("a", adapter, scale)]) for scale in (1.0, 0.5)]
    found = [each.kv_identity() for each in (same, *others)]
    assert len(set(found)) == len(found)
    os.utime(path, ns=(0, 0))
    assert again.kv_identity() not in found, "the file was written again"
    path.unlink()
    assert again.kv_identity() == ""
    for each in (again, *others, same):
        each.close()


class Served:
    """A daemon with the bundled model, as a process, with a cache folder of its own."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.folder, self.port = folder, port
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uma_trio", "serve", "--socket", str(folder / "s")),
                *("--http", f"127.0.0.1:{port}", "--prefix-disk", "1GiB", "--n-ctx", "4096"),
                *("--policy", "baseline", "--threads", "1", *flags),
            ],
            env={**os.environ, "XDG_CACHE_HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: self.process.poll() is None and self._answers())

    def _answers(self) -> bool:
        try:
            with closing(HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except OSError:
            return False

    def cached(self, messages: list[dict[str, str]]) -> tuple[int, int]:
        """Ask, and go on with the answer; return the tokens of the prompt, and how many were cached."""
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), kind)
            answer = json.loads(connection.getresponse().read())
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def files(self) -> list[Path]:
        """Return the files of pages."""
        return list((self.folder / "uma-trio" / "prefix").glob("*.kv"))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def eventually(check: Callable[[], object]) -> None:
    """Wait until `check` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@contextmanager
def daemons() -> Iterator[Callable[..., Served]]:
    """Start daemons at one place, one behind the other."""
    running: list[Served] = []
    with TemporaryDirectory(prefix="uma") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()

        def start(*flags: str) -> Served:
            running.append(Served(Path(folder), port, *flags))
            return running[-1]

        try:
            yield start
        finally:
            for each in running:
                each.process.kill()
                each.process.wait()


@pytest.mark.daemon
def test_conversations_outlive_the_daemon() -> None:
    """Ended, killed while it may write, and replaced: what was computed is not computed again."""
    story = " ".join(f"The fox number {n} finds a lantern by the sea." for n in range(40))
    messages = [{"role": "user", "content": story}]
    with daemons() as start:
        first = start()
        prompt, cached = first.cached(messages)
        assert cached == 0
        assert first.end() == 0
        least = prompt
        second = start()
        prompt, cached = second.cached(messages)
        assert cached >= least
        second.end(signal.SIGKILL)
        third = start()
        prompt, cached = third.cached(messages)
        assert cached >= least, "at least what was written before the kill"
        least = prompt
        fourth = start("--replace")
        third.process.wait(PATIENCE_S)
        prompt, cached = fourth.cached(messages)
        assert cached >= least
        clear = [sys.executable, "-m", "uma_trio", "prefix", "clear"]
        subprocess.run([*clear, "--socket", str(fourth.folder / "s")], check=True)
        assert not fourth.files()
        assert fourth.end() == 0
