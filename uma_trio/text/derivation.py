"""What a model's chat template can do, found out by rendering before the first chat waits for it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, product
from typing import Any, Final

from attrs import evolve, field, frozen

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.documents import NO_HABITS, Habits, nests_results
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.replies.derive import PROBING_S, derive
from uma_trio.text.replies.format import PLAIN, ReplyFormat
from uma_trio.text.replies.known import format_of
from uma_trio.text.reshaping import Kind
from uma_trio.text.template import SWITCHES, ChatTemplate, Manner, NotRendered

_MEASURES: Final = ("reasoning_effort", "thinking_effort")
_WORDS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NONE: Final = "no_think"  # another word for "none": Hy3
# A template in harmony writes any word; the model knows these.
# https://cookbook.openai.com/articles/openai-harmony
_HARMONY: Final = ("low", "medium", "high")

Render = Callable[[Mapping[str, Any]], str]
"""Renders a prompt with these variables; "" if the template refuses them."""


@frozen
class Efforts:
    """What a template understands of reasoning: its `switches`, and their state `by_default`, if any.

    `words` maps, for each variable of the amount, a request's words to the template's.
    """

    switches: tuple[str, ...] = ()
    by_default: bool | None = None
    words: Mapping[str, Mapping[str, str]] = field(factory=dict)

    def apply(self, manner: Manner) -> Manner:
        """Return a manner with these arguments; those of the request have precedence."""
        arguments: dict[str, Any] = {}
        if manner.reasons is not None:
            arguments |= {name: SWITCHES[name][not manner.reasons] for name in self.switches}
        word = "none" if manner.effort is None and manner.thinks is False else manner.effort
        for name, words in self.words.items():
            if word is not None and word in words:
                arguments[name] = words[word]
        return evolve(manner, arguments={**arguments, **manner.arguments})


def efforts_of(render: Render, source: str, *, harmony: bool) -> Efforts:
    """Probe a template. Renders at most 27 prompts."""
    plain = render({})
    switches: list[str] = []
    by_default: bool | None = None
    for name in _named(SWITCHES, source):
        on, off = [render({name: value}) for value in SWITCHES[name]]
        if on and off and on != off:
            switches.append(name)
            by_default = {on: True, off: False}.get(plain, by_default)
    words: dict[str, dict[str, str]] = {}
    for name in _named(_MEASURES, source):
        turned_on = {switch: SWITCHES[switch][0] for switch in switches}
        taken = _HARMONY if harmony else [w for w in _WORDS if render({**turned_on, name: w})]
        words[name] = _nearest(taken, switched=bool(switches))
        if not harmony and "none" not in taken and render({**turned_on, name: _NONE}):
            words[name] |= {"none": _NONE}
    return Efforts(tuple(switches), by_default, words)


def _named(names: Iterable[str], source: str) -> list[str]:
    return [name for name in names if re.search(rf"\b{name}\b", source)]


def _nearest(taken: Sequence[str], *, switched: bool) -> dict[str, str]:
    """Return for each word the nearest one of `taken`, of two the larger one; only "none" becomes "none"."""
    places = [_WORDS.index(word) for word in taken if word != "none"]
    found: dict[str, str] = {}
    for place, word in enumerate(_WORDS):
        if word in taken:
            found[word] = word
        elif places and (word != "none" or not switched):
            found[word] = _WORDS[min(places, key=lambda other: (abs(other - place), -other))]
    return found


_TOOL = Tool(
    "look",
    "Look.",
    {"type": "object", "properties": {"what": {"type": "string", "description": "What."}}},
)
_ARGUMENTS = ("qzone", "qztwo")  # arguments of calls, in no template's own text


@frozen
class Derivation:
    """What was found out: how the model writes replies, and what the template expects.

    `renders_tools`: the template shows tools to the model. `refused` are the shapes of answers that the
    template does not take back (none, in a good one); one with `takes_parallel_calls` takes several calls.
    """

    format: ReplyFormat = PLAIN
    habits: Habits = NO_HABITS
    renders_tools: bool = False
    efforts: Efforts = field(factory=Efforts)
    takes_parallel_calls: bool = True
    refused: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, template: ChatTemplate, source: str, override: ReplyFormat | None = None
    ) -> Derivation:
        """Probe a template. Takes tens of milliseconds, and bounded time in any case. Blocks."""
        has_parts = _needs_parts(template)

        def render(messages: Sequence[Message], tools: Sequence[Tool], habits: Habits) -> str:
            habits = evolve(habits, content_as_parts=has_parts)
            return template.render(
                messages, tools=tools, habits=habits, prompts=False, reshapes=False
            ).text

        derived = derive(render, source, Unrenderable)
        made, ids = format_of(derived, source)
        until, hello = time.monotonic() + PROBING_S, [Message("user", "Hello")]

        def prompt(arguments: Mapping[str, Any]) -> str:
            if time.monotonic() > until:
                return ""
            try:
                return template.render(hello, Manner(arguments=arguments), reshapes=False).text
            except Unrenderable:
                return ""

        efforts = efforts_of(prompt, source, harmony=made.name == "harmony")
        habits = evolve(
            derived.habits,
            ids=ids,
            results_inside=nests_results(source),
            content_as_parts=has_parts,
        )
        found = cls(override or made, habits, derived.renders_tools, efforts)
        return found if found.in_words else found._tried(template, until)

    @property
    def can_reason(self) -> bool:
        return self.format.thought is not None or self.format.name == "harmony"

    @property
    def in_words(self) -> bool:
        """Whether calls and their results are shown to the model as text."""
        return self.format.source == "generic"

    def _tried(self, template: ChatTemplate, until: float) -> Derivation:
        parallel, refused = True, list[str]()
        tools = [_TOOL] if self.renders_tools else []
        for name, chat in _answers():
            if time.monotonic() > until:
                parallel = False  # not all shapes were tried: one call is what every template takes
                break
            try:
                prompt = template.render(chat, tools=tools, habits=self.habits)
            except Unrenderable:
                refused.append(name)
                continue
            first, second = (word in prompt.text for word in _ARGUMENTS)
            if name.endswith("two calls"):
                parallel &= Kind.SPLIT_CALLS not in prompt.reshaped and first <= second
        return evolve(self, takes_parallel_calls=parallel, refused=tuple(refused))


class Finding:
    """A template and its derivation, computed on the first request. Safe to use from any thread."""

    def __init__(
        self, source: str, template: Callable[[], ChatTemplate], override: ReplyFormat | None
    ) -> None:
        self._source, self._make, self._override = source, template, override
        self._lock = threading.Lock()
        self._found: tuple[Derivation, ChatTemplate | None, str | None] | None = None

    def get(self) -> tuple[Derivation, ChatTemplate | None, str | None]:
        """Return the derivation, the template, why there is none. Raises :class:`NotRendered`. May block."""
        with self._lock:
            if self._found is None:
                self._found = self._find()
            return self._found

    def _find(self) -> tuple[Derivation, ChatTemplate | None, str | None]:
        problem = "the model has no chat template"
        if self._source:
            try:
                template = self._make()
                template.check()
                return Derivation.of(template, self._source, self._override), template, None
            except NotRendered:
                raise
            except Unrenderable as error:
                problem = f"the model's chat template cannot be used: {error}"
        none = Derivation() if self._override is None else Derivation(self._override)
        return none, None, problem


def _answers() -> Iterator[tuple[str, list[Message]]]:
    for thought, text, n, cut in product(
        ("", "I think."), ("", "Let me look."), (0, 1, 2), (False, True)
    ):
        if (cut and not n) or not (thought or text or n):
            continue
        calls = [
            Call(f"call0000{number}", "look", f'{{"what": "{word}"}}')
            for number, word in enumerate(_ARGUMENTS[:n])
        ]
        if cut:
            calls[-1] = evolve(calls[-1], arguments=calls[-1].arguments[:-2])
        results = [Message("tool", "Seen.", call_id=call.id, name="look") for call in calls]
        answer = Message("assistant", text, tuple(calls), reasoning=thought)
        parts = ("thoughts", "text", "one call", "two calls", "cut")
        name = ", ".join(compress(parts, (thought, text, n == 1, n == 2, cut)))
        yield name, [Message("user", "Look."), answer, *(results or [Message("user", "Well?")])]


def _needs_parts(template: ChatTemplate) -> bool:
    """Whether a template writes a content only where it is a list of parts."""
    shown: list[bool] = []
    for habits in (NO_HABITS, Habits(content_as_parts=True)):
        try:
            prompt = template.render(
                [Message("user", _ARGUMENTS[0])], habits=habits, reshapes=False
            )
        except Unrenderable:
            shown.append(False)
        else:
            shown.append(_ARGUMENTS[0] in prompt.text)
    return shown == [False, True]
