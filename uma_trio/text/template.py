"""A model's chat template, rendered in worker processes that all models share.

A template that takes too much ends its process, and only its own request.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotInTime
from datetime import datetime
from functools import cache
from typing import Any, Final

import msgspec
from attrs import astuple, define, field, frozen

from uma_trio.backend.base import SpecialToken
from uma_trio.confined import workers
from uma_trio.confined.link import WorkerLimits
from uma_trio.confined.post import WorkerGone
from uma_trio.confined.workers import Unavailable, Worker, Workers
from uma_trio.text.chat import Message, Tool
from uma_trio.text.documents import NO_HABITS, Habits
from uma_trio.text.prompt import (
    Ending,
    Prompt,
    Refused,
    Render,
    Rendered,
    Source,
    Unknown,
    Unrenderable,
    packed,
    packed_json,
    packed_messages,
    packed_tools,
    times_s,
)
from uma_trio.text.replies.format import Thought
from uma_trio.text.slices import is_blank

PROGRAM: Final = "uma_trio.text.render_worker:prepare"
# To decode a request; the worker sets the time for rendering, in proportion to its size.
_LIMITS: Final = WorkerLimits(cpu_s=10.0, wall_s=60.0, memory_bytes=256 << 20, niceness=0)
_KEPT: Final = 2
_ANSWER: Final = msgspec.msgpack.Decoder(Rendered | Refused | Unknown)
_TAKES_TOO_MUCH: Final = {
    workers.OUT_OF_CPU: "it takes more time than is allowed for so many messages",
    workers.OUT_OF_MEMORY: f"it takes more than {_LIMITS.memory_bytes >> 20} MiB of memory",
}
_LATE: Final = "it was not rendered in time; try again"


class NotRendered(Unrenderable):
    """The template was not rendered for an unrelated reason; a retry may help."""


class _Lost(NotRendered):
    """The process was ended by none of its limits."""


@define
class _Process:
    worker: Worker
    known: set[bytes] = field(factory=set)


class Renderer:
    """A pool of processes that are started on demand. Safe to use from any thread."""

    def __init__(self) -> None:
        self._workers = Workers(PROGRAM, lambda: b"")
        self._idle: list[_Process] = []
        self._lock = threading.Lock()

    def render(self, request: Render, source: Source) -> Prompt:
        """Render a conversation. Blocks. Raises `Unrenderable`, or `NotRendered` where it failed for now."""
        try:
            answer = self._answered(self._idle_process() or self._new_process(), request, source)
        except _Lost:  # maybe it waited for a request then
            answer = self._answered(self._new_process(), request, source)
        if isinstance(answer, Rendered):
            return answer.prompt()
        raise Unrenderable(answer.why if isinstance(answer, Refused) else "it is unknown")

    def _answered(
        self, process: _Process, request: Render, source: Source
    ) -> Rendered | Refused | Unknown:
        try:
            answer = self._answer(process, request, source)
            if isinstance(answer, Unknown):
                process.known.discard(request.key)
                answer = self._answer(process, request, source)
        except BaseException:
            process.worker.close()
            raise
        process.known.add(request.key)
        self._give_back(process)
        return answer

    def _idle_process(self) -> _Process | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.worker.is_idle:
                    return process
        return None

    def _new_process(self) -> _Process:
        try:
            return _Process(self._workers.start(_LIMITS))
        except Unavailable as error:
            raise NotRendered(f"it cannot be rendered: {error}") from None

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < _KEPT:
                self._idle.append(process)
                return
        process.worker.close()

    def _answer(
        self, process: _Process, request: Render, source: Source
    ) -> Rendered | Refused | Unknown:
        if request.key not in process.known:
            request = msgspec.structs.replace(request, source=source)
        payload = msgspec.msgpack.encode(request)
        # A stopped process keeps none of its own limits.
        most_s = _LIMITS.wall_s + times_s(request, len(payload))[1]
        try:
            answer = process.worker.ask(payload).result(most_s)
        except NotInTime:
            raise NotRendered(_LATE) from None
        except WorkerGone as error:
            why = str(error)
            if why in _TAKES_TOO_MUCH:
                raise Unrenderable(_TAKES_TOO_MUCH[why]) from None
            if why == workers.OUT_OF_TIME:
                raise NotRendered(_LATE) from None
            raise _Lost(f"the process that rendered it has ended ({why}); try again") from None
        found: Rendered | Refused | Unknown = _ANSWER.decode(answer)
        return found


def key_of(source: Source) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(source)).digest()


@cache
def renderer() -> Renderer:
    """Return the pool that all models of this process share."""
    return Renderer()


MAX_SOURCE: Final = 256 << 10  # characters; the longest published template has 20,000

# What the template reads of others than the request.
_OURS: Final = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents")
SWITCHES: Final[Mapping[str, tuple[Any, Any]]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),  # Command A Reasoning
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
    "thinking_budget": (-1, 0),  # Seed-OSS
}
"""The variables of templates that turn the reasoning on and off, each with its values for both."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Tokens that are recognised in any text, and that look like control tokens: a template may put them together.
_LIKE_CONTROL: Final = re.compile(r"<[|\uff5c].+>|<.+[|\uff5c]>|\[/?[A-Z_]{3,}\]")


@frozen
class Manner:
    """How a chat is rendered, beyond its messages.

    With `continue_final` the text ends inside the assistant's last message, which the model continues.
    Without `begins` no answer begins behind the last message. `arguments` are variables of the template;
    :mod:`uma_trio.text.derivation` adds those of `effort` and `thinks` (whether to reason at all).
    """

    continue_final: bool = False
    begins: bool = True
    arguments: Mapping[str, Any] = field(factory=dict)
    effort: str | None = None
    thinks: bool | None = None

    @property
    def reasons(self) -> bool | None:
        """Whether the model should reason; None if unset."""
        for name, (on, off) in SWITCHES.items():
            if name in self.arguments and (value := self.arguments[name]) in (on, off):
                return bool(value == on)
        if self.thinks is not None:
            return self.thinks
        return None if self.effort is None else self.effort != "none"


PLAINLY: Final = Manner()


def problem_of(arguments: Mapping[str, Any]) -> str | None:
    for name in arguments:
        if name in _OURS:
            return f"names {name}, which is the daemon's own: use the request's fields"
        if not _NAME.fullmatch(name):
            return "has a name that is not an identifier of at most 64 letters"
    return None


class ChatTemplate:
    """One template. Safe to use from several threads, all of which block. `now` is the clock for dates."""

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        specials: Sequence[SpecialToken] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise Unrenderable(f"it is longer than {MAX_SOURCE:,} characters")
        self._now = now
        self._source = Source(
            source,
            bos_text,
            eos_text,
            [special.text for special in specials if special.is_control],
            [one.text for one in specials if not one.is_control and _is_marker(one.text, source)],
        )
        self._key = key_of(self._source)

    def check(self) -> None:
        """Compile the source and render a first conversation. Raises :class:`Unrenderable`."""
        self.render([Message("user", "Hello")])

    def render(
        self,
        messages: Sequence[Message],
        manner: Manner = PLAINLY,
        *,
        tools: Sequence[Tool] = (),
        habits: Habits = NO_HABITS,
        prompts: bool = True,
        thought: Thought | None = None,
        closes: bool = False,
        reasoning: str = "",
        reshapes: bool = True,
    ) -> Prompt:
        """Render messages and, unless `prompts` or `begins` is false, the beginning of an answer.

        `thought`, `closes` and `reasoning` are those of :class:`.prompt.Ending`. With `reshapes` messages that
        the template refuses are changed. Raises :class:`Unrenderable`, or `NotRendered` if it failed for now.
        """
        if manner.continue_final and not _can_go_on(messages):
            raise Unrenderable(
                "the last message to continue must be the assistant's, not empty and without calls"
            )
        request = Render(
            key=self._key,
            source=None,
            messages=packed_messages(messages),
            tools=packed_tools(tools),
            arguments=packed_json(manner.arguments),
            habits=list(astuple(habits)),
            now=self._now().timestamp(),
            ending=Ending(
                prompts=prompts and manner.begins and not manner.continue_final,
                continues=manner.continue_final,
                thought=None if thought is None else (thought.open, thought.close),
                closes=closes,
                reasoning=packed(reasoning),
            ),
            reshapes=reshapes,
        )
        return renderer().render(request, self._source)


def _is_marker(text: str, source: str) -> bool:
    return not text.isspace() and (text in source or _LIKE_CONTROL.fullmatch(text) is not None)


def _can_go_on(messages: Sequence[Message]) -> bool:
    last = messages[-1] if messages else Message("")
    return last.role == "assistant" and not is_blank(last.content) and not last.calls
