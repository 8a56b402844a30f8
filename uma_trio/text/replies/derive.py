"""A model's reply format, found out from its chat template, which writes earlier replies as trained.

Replies with one and with two calls of known names and arguments are rendered; what surrounds these names
is the format, if a parser driven by it reads the same calls back. Reasoning is found in the same way, or
by its usual markers in the source.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import evolve, frozen

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.documents import Habits, nine
from uma_trio.text.replies.format import CallSyntax, ReplyFormat, Thought
from uma_trio.text.replies.maker import collect
from uma_trio.text.replies.parser import ReplyParser
from uma_trio.text.replies.source import compact
from uma_trio.text.slices import json_value

PROBING_S: Final = 10.0  # a large template takes 0.2
_USER: Final = Message("user", "Hello")
_SAID: Final = "qzcontent"
_THOUGHT: Final = "qzthought"
_TOOL: Final = Tool(
    "qztoola",
    "qzdescription",
    {
        "type": "object",
        "properties": {"qzkeya": {"type": "string"}, "qzkeyb": {"type": "string"}},
        "required": ["qzkeya", "qzkeyb"],
    },
)
_TOOLS: Final = (_TOOL, evolve(_TOOL, name="qztoolb"))
_CALLS: Final = (
    Call("qzid00001", "qztoola", '{"qzkeya": "qzvala", "qzkeyb": "qzvalb"}'),
    Call("qzid00002", "qztoolb", '{"qzkeya": "qzvalc", "qzkeyb": "qzvald"}'),
)
_LONGER: Final = "longer"  # an id of another length than nine, which some templates insist on
_NUMBER: Final = 7193
_HABITS: Final = tuple(
    Habits(arguments_as_text=text, null_content=null)
    for null, text in itertools.product((False, True), repeat=2)
)
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
_PAIRS: Final = (
    Thought("<think>", "</think>"),
    Thought("[THINK]", "[/THINK]"),
    Thought("<seed:think>", "</seed:think>"),
    Thought("<|START_THINKING|>", "<|END_THINKING|>"),
    Thought("<|inner_prefix|>", "<|inner_suffix|>"),
    Thought("<|channel>thought", "<channel|>"),
)
_ATOM: Final = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|[^\s<\[]+|.")
_TAG: Final = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")

Render = Callable[[Sequence[Message], Sequence[Tool], Habits], str]
"""Renders a chat without the beginning of an answer. Raises what it likes."""


@frozen
class Derived:
    """What a template shows: the format, its habits, and whether it shows tools to the model."""

    thought: Thought | None
    calls: CallSyntax | None
    habits: Habits
    renders_tools: bool


def derive(render: Render, source: str, refused: type[Exception]) -> Derived:
    """Probe a template; `refused` is what `render` raises for what it does not accept."""
    probe = _Probe(render, refused)
    thought, key = probe.thought()
    if thought is None:
        thought = next((pair for pair in _PAIRS if pair.close in source), None)
    habits, calls = probe.calls(thought)
    return Derived(thought, calls, evolve(habits, reasoning_key=key), probe.renders_tools())


class _Probe:
    """Renders for the derivation; "" where the template refuses, or the time is up."""

    def __init__(self, render: Render, refused: type[Exception]) -> None:
        self._render, self._refused = render, refused
        self._until = time.monotonic() + PROBING_S

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), habits: Habits = _HABITS[0]
    ) -> str:
        if time.monotonic() > self._until:
            return ""
        try:
            return self._render(messages, tools, habits)
        except self._refused:
            return ""

    def renders_tools(self) -> bool:
        return _TOOL.name in self.text([_USER], _TOOLS)

    def thought(self) -> tuple[Thought | None, str]:
        """Return what surrounds reasoning, and its key in a message."""
        for key in _REASONING_KEYS:
            habits = Habits(reasoning_key=key)
            answer = Message("assistant", _SAID, reasoning=_THOUGHT)
            text = self.text([_USER, answer], (), habits)
            if _THOUGHT in text:
                before, _, after = text.partition(_THOUGHT)
                opens, closes = _TAG.findall(before), _TAG.findall(after.partition(_SAID)[0])
                plain = self.text([_USER, Message("assistant", _SAID)])
                found = [*opens[-1:], *closes[:1]]
                if len(found) == 2 and not _surround(found, plain):
                    name = before.rpartition(found[0])[2].strip()  # of a channel, in the marker
                    return Thought(found[0] + name, found[1]), key
                return None, key
        return None, ""

    def calls(self, thought: Thought | None) -> tuple[Habits, CallSyntax | None]:
        """Return how calls are written, and the habits that the template needs for it."""
        known: Habits | None = None
        for habits in (*_HABITS, *(evolve(each, ids="nine") for each in _HABITS)):
            one = self._reply(_CALLS[:1], habits, thought)
            if not one or "qzvala" not in one:
                continue
            two = self._reply(_CALLS, habits, thought)
            if "qzvalc" not in two:  # it refuses a second call, or leaves it out
                two = ""
            found = (find(one, two) for find in (_as_object, _as_named, _as_tagged))
            for syntax in filter(None, found):
                if not _is_ours(syntax.markers) and _reads_back(syntax, one, two):
                    return habits, self._with_json_keys(syntax, habits, thought)
            known = known or habits
        return known or Habits(), None

    def _with_json_keys(
        self, syntax: CallSyntax, habits: Habits, thought: Thought | None
    ) -> CallSyntax:
        if syntax.style != "tagged":
            return syntax
        number = evolve(_CALLS[0], arguments=f'{{"qzkeya": {_NUMBER}, "qzkeyb": "qzvalb"}}')
        found = re.search(
            f"qzkeya(.*?){_NUMBER}", self._reply([number], habits, thought), re.DOTALL
        )
        if found is None or compact(found[1]) == compact(syntax.key_close):
            return syntax
        return evolve(syntax, key_close_json=found[1])

    def _reply(self, calls: Sequence[Call], habits: Habits, thought: Thought | None) -> str:
        """Return how the template writes a reply of calls, without what it also writes for text."""
        calls = [evolve(call, id=_LONGER + call.id) for call in calls]
        text = self.text([_USER, Message("assistant", calls=tuple(calls))], _TOOLS, habits)
        plain = self.text([_USER, Message("assistant", _SAID)], _TOOLS, habits)
        before, found, after = plain.partition(_SAID)
        if not text or not found:
            return ""
        written = _atoms(text)
        start = _n_common(_atoms(before), written)
        end = len(written) - _n_common(_atoms(after)[::-1], written[start:][::-1])
        reply = "".join(written[start:end])
        if thought is not None and thought.close in reply.partition(calls[0].name)[0]:
            reply = reply.partition(thought.close)[2]
        return reply.strip()


def _is_ours(markers: str) -> bool:
    """Whether a part of the rendered calls, such as an id, is in what should be markers."""
    return "qz" in markers or any(nine(_LONGER + call.id) in markers for call in _CALLS)


def _surround(tags: Sequence[str], plain: str) -> bool:
    """Whether two tags also surround a text without reasoning; empty thoughts before it do not count."""
    before, _, after = plain.rpartition(_USER.content)[2].partition(_SAID)
    before = before.rstrip().removesuffix(tags[1]).rstrip().removesuffix(tags[0])
    return any(tag in before + after for tag in tags)


def _reads_back(syntax: CallSyntax, one: str, two: str) -> bool:
    made = ReplyFormat("derived", calls=syntax)
    for text, calls in ((one, _CALLS[:1]), (two, _CALLS)):
        if not text:
            continue
        parser = ReplyParser(made, tools=_TOOLS)
        reply = collect([*parser.feed(text), *parser.finish()])
        found = [(call.name, json_value(call.arguments)) for call in reply.calls]
        if reply.content or found != [(call.name, json.loads(call.arguments)) for call in calls]:
            return False
    return True


@frozen
class _Around:
    """What is before the first call, between two (None if there is one), and after the last."""

    before: str
    between: str | None
    behind: str

    def syntax(self, **members: Any) -> CallSyntax:
        """Separate what belongs to each call from what belongs to all."""
        if self.between is None:
            return CallSyntax(
                open=self.before, close=self.behind, bare=not self.before.strip(), **members
            )
        before, between, behind = map(_atoms, (self.before, self.between, self.behind))
        n_open = _n_common(before[::-1], between[::-1])
        between, own = between[: len(between) - n_open], between[len(between) - n_open :]
        n_close = _n_common(behind, between)
        return CallSyntax(
            open="".join(own),
            close="".join(behind[:n_close]),
            section_open="".join(before[: len(before) - n_open]),
            section_close="".join(behind[n_close:]),
            between="".join(between[n_close:]),
            bare=not self.before.strip(),
            **members,
        )


def _atoms(text: str) -> list[str]:
    return _ATOM.findall(text)


def _n_common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _as_object(one: str, two: str) -> CallSyntax | None:
    first = _object_with(one, _CALLS[0].name)
    if first is None:
        return None
    keys = {
        field: next((key for key, value in first.value.items() if match(value)), "")
        for field, match in (
            ("name_key", lambda value: value == _CALLS[0].name),
            ("arguments_key", lambda value: "qzvala" in json.dumps(value)),
            ("id_key", lambda value: isinstance(value, str) and value != _CALLS[0].name),
        )
    }
    if keys["id_key"] in (keys["arguments_key"], "type"):
        keys["id_key"] = ""
    return None if not keys["arguments_key"] else _around(one, two, _object_with).syntax(**keys)


@frozen
class _Found:
    start: int
    end: int
    value: dict[str, Any]


def _around(one: str, two: str, find: Callable[[str, str], _Found | None]) -> _Around:
    names = [call.name for call in _CALLS]
    first = find(one, names[0])
    pair = [find(two, name) for name in names] if two else [None]
    before = "" if first is None else one[: first.start]
    behind = "" if first is None else one[first.end :]
    if None in pair:
        return _Around(before, None, behind)
    (a, b) = [found for found in pair if found is not None]
    return _Around(two[: a.start], two[a.end : b.start], two[b.end :])


def _object_with(text: str, name: str) -> _Found | None:
    at = text.find(json.dumps(name))
    start = text.rfind("{", 0, at) if at >= 0 else -1
    while start >= 0:
        value, end = _object_at(text, start)
        if value is not None and name in value.values():
            return _Found(start, end, value)
        start = text.rfind("{", 0, start)
    return None


def _object_at(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, start
    return (value, end) if isinstance(value, dict) else (None, start)


def _named_call(text: str, name: str) -> _Found | None:
    start = text.find(name)
    at = text.find("{", start) if start >= 0 else -1
    value, end = _object_at(text, at) if at >= 0 else (None, 0)
    if value is None or "qzkeya" not in value:
        return None
    return _Found(start, end, {"after_name": text[start + len(name) : at]})


def _as_named(one: str, two: str) -> CallSyntax | None:
    found = _named_call(one, _CALLS[0].name)
    if found is None or not found.start:
        return None
    return _around(one, two, _named_call).syntax(style="named", **found.value)


_TAGGED: Final = re.compile(r"qzkeya(.*?)qzval[ac](.*?)qzkeyb(.*?)qzval[bd]", re.DOTALL)


def _tagged_call(text: str, name: str) -> _Found | None:
    start = text.find(name)
    found = _TAGGED.search(text, start) if start >= 0 else None
    if found is None or found[1] != found[3]:
        return None
    after_name = text[start + len(name) : found.start()]
    return _Found(start, found.end(), {"after": after_name, "of": found[1], "next": found[2]})


def _as_tagged(one: str, two: str) -> CallSyntax | None:
    found = _tagged_call(one, _CALLS[0].name)
    if found is None or not found.start:
        return None
    around = _around(one, two, _tagged_call)
    following, behind = _atoms(found.value["next"]), _atoms(one[found.end :])
    n_close = _n_common(following, behind)
    value_close = "".join(following[:n_close])
    key_open = "".join(following[n_close:])
    if not (value_close.strip() and key_open.strip() and found.value["of"].strip()):
        return None
    between = None if around.between is None else around.between.removeprefix(value_close)
    return _Around(around.before, between, around.behind.removeprefix(value_close)).syntax(
        style="tagged",
        after_name=found.value["after"].removesuffix(key_open),
        key_open=key_open,
        key_close=found.value["of"],
        value_close=value_close,
    )
