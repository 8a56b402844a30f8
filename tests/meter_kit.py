"""Counts the work of each slice: of each step of a task on trio's thread, and of each call in a helper thread.

A virtual clock cannot see a call that holds the GIL, so its work is counted instead: the calls that Python
makes, how long the texts are whose methods are called, and what the JSON decoder and encoder get at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest
import trio
from attrs import Factory, define, frozen
from net_kit import at_once

from uma_trio.api import bodies, prompts
from uma_trio.http import sse, writing
from uma_trio.http.pieces import decoded
from uma_trio_sim.fake import FakeVocabulary

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_MARKS = (b",", b":", b"[", b"]", b"{", b"}")
# What takes no time by the length, or copies memory: 8 MiB take a millisecond.
_CHEAP = {
    *("isascii", "join", "startswith", "endswith", "removeprefix", "removesuffix"),
    *("append", "extend", "find", "rfind", "release"),
}

# It stands for llama.cpp's tokeniser, which works without the GIL.
_TOKENIZES = FakeVocabulary.tokenize.__code__


@frozen(repr=False)
class Document:
    """What is sent. It is shown in a few words, however large it is."""

    value: dict[str, Any]

    def __repr__(self) -> str:
        """Show the beginning of each member."""
        return str(
            {name: f"{value!r:.80}, {len(str(value))}" for name, value in self.value.items()}
        )


@define
class Work:
    """The largest slice of each kind: calls, characters of one method, bytes and marks of JSON."""

    calls: int = 0
    characters: int = 0
    read: int = 0
    marks: int = 0
    written: int = 0


@define(eq=False)
class Meter(trio.abc.Instrument):
    """Counts what is done on trio's thread and in helper threads, whose work runs here at once."""

    on_loop: Work = Factory(Work)
    in_helper: Work = Factory(Work)
    #: What had most characters: the method and the text's length.
    where: dict[int, str] = Factory(dict)
    #: Parts of the names of tasks that are no front end's: the engine, and the test's own client.
    others: tuple[str, ...] = ("run_inline", "run_encoder_inline")
    _aside: bool = False
    _calls: int = 0

    @property
    def _work(self) -> Work:
        return self.in_helper if self._aside else self.on_loop

    # --- trio's thread ---

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Begin to count a step."""
        self._calls = 0
        if not any(other in task.name for other in self.others):
            sys.setprofile(self._profile)  # only now: it makes all of Python several times slower

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Keep the step if it is the largest of a front end's."""
        sys.setprofile(None)
        self.on_loop.calls = max(self.on_loop.calls, self._calls)

    async def run_blocking(self, function: Callable[[], Any]) -> Any:
        """Run a function as a helper thread does."""

        def apart() -> Any:
            self._aside = True
            try:
                return function()
            finally:
                self._aside = False

        return await at_once(apart)

    # --- what is counted ---

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        self._calls += not self._aside
        of = getattr(argument, "__self__", None)
        if event == "call" or not isinstance(of, str | bytes | bytearray):
            return
        code = frame.f_code
        if code is _TOKENIZES:
            return
        if len(of) > self._work.characters and argument.__name__ not in _CHEAP:
            self._work.characters = len(of)
            self.where[len(of)] = f"{argument.__name__} {code.co_filename}:{frame.f_lineno}"

    def _load(self, piece: bytes) -> Any:
        work = self._work
        work.read = max(work.read, len(piece))
        value = msgspec.json.decode(piece)
        bare = _STRING.sub(b"", piece)
        work.marks = max(work.marks, sum(map(bare.count, _MARKS)))
        return value

    def _encode(self, value: Any) -> bytes:
        data = msgspec.json.encode(value)
        raw = sum(map(len, _raws(value)))
        self._work.written = max(self._work.written, len(data) - raw)
        return data

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count everything within the block."""
        monkeypatch.setattr(
            bodies, "decoded", lambda body, limits: decoded(body, limits, self._load)
        )
        for module in (writing, sse, prompts):
            monkeypatch.setattr(module, "_encode", self._encode)
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)


def _raws(value: Any) -> Iterator[bytes]:
    """Yield the parts of a document that are copied only."""
    if isinstance(value, msgspec.Raw):
        yield bytes(value)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _raws(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _raws(part)
