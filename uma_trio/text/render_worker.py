"""What runs in the processes that render chat templates. See :mod:`.template`.

Templates come from model files. jinja2's sandbox renders them as transformers does, byte for byte what
the model was trained on. The limits of the process bound what a template takes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec
from attrs import frozen
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from uma_trio.confined.link import WorkerLink
from uma_trio.text.chat import Message
from uma_trio.text.documents import Habits, messages_of, tool_of
from uma_trio.text.prompt import (
    Ending,
    Refused,
    Render,
    Rendered,
    Source,
    Unknown,
    Unrenderable,
    messages_from,
    times_s,
)
from uma_trio.text.reshaping import OF_MESSAGES, OF_TOOLS, Cures, Kinds, render_accepted
from uma_trio.text.slices import in_utf8, slices
from uma_trio.text.spellings import Spellings, free_marks, unmarked

_MOST_SOURCES: Final = 32
# A prompt may be longer than what was sent: templates explain tools, and repeat texts.
_BASE_CHARACTERS, _TIMES = 1 << 20, 8
_WRITES_FUNCTIONS: Final = re.compile(r"(?:\+|\{\{-?)\s*functions\s*(?:\+|-?[}%]\})")
# What some templates read of today, if they name it: Llama 3's, and those of FireFunction. Without
# the time of day, which would change every prompt.
_DATES: Final = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
# What templates look for in tools and calls.
_SCHEMA_WORDS: Final = frozenset(
    [
        *("type", "string", "number", "integer", "object", "array", "boolean", "null", "any"),
        *("name", "parameters", "strict", "properties", "required", "items", "enum", "default"),
        *("description", "title", "format", "const", "nullable"),
        *("additionalProperties", "anyOf", "oneOf", "allOf"),
    ]
)
_REQUESTS: Final = msgspec.msgpack.Decoder(Render)


class _TooMuch(Exception):
    """A limit is exceeded, which another shape of the conversation would not change."""


class _Generation(Extension):
    """``{% generation %}``: marks what the model wrote, for training, as transformers defines it."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_written")
        return nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """Return what filters such as `map` make as a list, as llama.cpp writes it and transformers refuses to."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _environment(kind: type[SandboxedEnvironment]) -> SandboxedEnvironment:
    """Return an environment as ``transformers.utils.chat_template_utils`` makes it."""
    made = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    return made


_IMMUTABLE: Final = _environment(ImmutableSandboxedEnvironment)
_MUTABLE: Final = _environment(SandboxedEnvironment)


def prepare(setup: bytes) -> Callable[[WorkerLink], None]:
    """Return what a worker runs. Called once, in the host."""

    def work(link: WorkerLink) -> None:
        known: OrderedDict[bytes, _Renderer] = OrderedDict()
        gc.enable()  # the host's is off, and this process lives long
        while True:
            frame = link.receive()
            request = _REQUESTS.decode(frame)
            link.allow(*times_s(request, len(frame)))
            answer: Rendered | Refused | Unknown
            try:
                answer = _answer(known, request, _BASE_CHARACTERS + _TIMES * len(frame))
            except (Unrenderable, _TooMuch) as error:
                answer = Refused(str(error))
            link.send(msgspec.msgpack.encode(answer))

    return work


def _answer(known: OrderedDict[bytes, _Renderer], request: Render, most: int) -> Rendered | Unknown:
    renderer = known.get(request.key)
    if renderer is None:
        if request.source is None:
            return Unknown()
        renderer = known[request.key] = _Renderer(request.source)
        _give_memory_back()
        while len(known) > _MOST_SOURCES:
            known.popitem(last=False)
    known.move_to_end(request.key)
    return renderer.render(request, most)


def _give_memory_back() -> None:
    """Give the system what compiling has used: 2 MB of the 10 that an idle process holds."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


@frozen
class _Inputs:
    """A decoded request. `most` limits the characters written; `mark` and `end` occur in no text."""

    tools: Sequence[Any]
    arguments: dict[str, Any]
    habits: Habits
    ending: Ending
    most: int
    mark: str
    end: str
    today: datetime


class _Renderer:
    def __init__(self, source: Source) -> None:
        self._source = source
        try:
            self._template = _IMMUTABLE.from_string(source.template)
        except MemoryError:
            raise
        except Exception as error:  # a compiler of foreign code; it may raise anything
            raise Unrenderable(f"it does not compile: {_one_line(error)}") from error
        text = source.template
        for word in sorted([*source.controls, *source.markers], key=len, reverse=True):
            if word:
                text = text.replace(word, " ")
        self._spellings = Spellings(source.controls, source.markers)
        self._named = frozenset(re.findall(r"\w+", text))
        self._marks = free_marks([source.template])
        self._dates = {n: d for n, d in _DATES.items() if re.search(rf"\b{n}\b", text)}
        self._wants_functions = re.search(r"\bfunctions\b", text) is not None
        self._writes_functions = _WRITES_FUNCTIONS.search(text) is not None
        self._without_tools: list[Any] | None = None
        self._cures: Cures = {}

    def render(self, request: Render, most: int) -> Rendered:
        messages = messages_from(request.messages)
        tools = list(map(json.loads, request.tools))
        arguments = json.loads(str(request.arguments))
        texts = [request.messages, tools, arguments, str(request.ending.reasoning)]
        marks = free_marks(texts, self._marks)
        if len(marks) < 2:
            raise _TooMuch(
                "of the hexagrams (U+4DC0 to U+4DFF), two of which are needed, all occur in the messages"
            )
        habits, today = Habits(*request.habits), datetime.fromtimestamp(request.now)
        mark, end = marks[:2]
        each = _Inputs(tools, arguments, habits, request.ending, most, mark, end, today)
        changes = (*(OF_MESSAGES if request.reshapes else ()), *(OF_TOOLS if tools else ()))
        text, reshaped = render_accepted(messages, partial(self._run, each), self._cures, changes)
        return self._ended(text, messages, each, reshaped)

    def _run(self, request: _Inputs, messages: Sequence[Message], kinds: Kinds) -> str:
        try:
            return self._written(messages, request, kinds)
        except Unrenderable:
            if request.tools or self._without_tools is not None:
                raise
        self._without_tools = []  # maybe it iterates over the tools without checking that there are any
        try:
            return self._written(messages, request, kinds)
        except Unrenderable:
            self._without_tools = None
            raise

    def _written(self, messages: Sequence[Message], request: _Inputs, kinds: Kinds) -> str:
        variables = partial(self._variables, messages, request, kinds)
        try:
            return _generated(self._template, variables(), request.most)
        except _Insecure:
            if self._template.environment is _MUTABLE:
                raise
            mutable = _MUTABLE.from_string(self._source.template)  # it changes lists: Kimi K2's
            text = _generated(mutable, variables(), request.most)
        self._template = mutable
        return text

    def _variables(
        self, messages: Sequence[Message], request: _Inputs, kinds: Kinds
    ) -> dict[str, Any]:
        found = [
            self._marked_message(message, request)
            for message in messages_of(messages, request.habits)
        ]
        if request.ending.continues:
            kept = str(found[-1]["content"]).rstrip()
            found[-1]["content"] = kept + request.end + found[-1]["content"][len(kept) :]
        if request.habits.content_as_parts:
            for message in found:
                message["content"] = [{"type": "text", "text": message["content"] or ""}]
        of_tools = [kind for kind in kinds if kind in OF_TOOLS]
        tools = [
            tool_of(self._marked(tool, request.mark), kinds=of_tools) for tool in request.tools
        ]
        today = request.today
        return {
            "strftime_now": today.strftime,
            **{name: today.strftime(layout) for name, layout in self._dates.items()},
            **self._marked(request.arguments, request.mark, self._named),
            **self._functions_of(tools),
            "messages": found,
            "bos_token": self._source.bos_text,
            "eos_token": self._source.eos_text,
            "add_generation_prompt": request.ending.prompts,
            "tools": tools or self._without_tools,
            "documents": None,
        }

    def _marked_message(self, message: dict[str, Any], request: _Inputs) -> dict[str, Any]:
        """Return a marked message, except markers of reasoning at its beginning, which the model wrote."""
        marked: dict[str, Any] = self._marked_document(message, request.mark)
        if (
            message["role"] == "assistant"
            and request.ending.thought is not None
            and message["content"]
        ):
            opened, closed = request.ending.thought
            head, _, rest = message["content"].partition(opened)
            inside, found, behind = rest.partition(closed)
            if found and not head.strip():
                inner = self._marked([inside, behind], request.mark)
                marked["content"] = f"{head}{opened}{inner[0]}{closed}{inner[1]}"
        return marked

    def _marked_document(self, value: Any, mark: str, key: str = "") -> Any:
        """Return a marked part of a message: keys and types are not the client's, except in arguments."""
        if isinstance(value, dict) and key != "arguments":
            return {
                inner: self._marked_document(each, mark, inner) for inner, each in value.items()
            }
        if isinstance(value, list) and key != "arguments":
            return [self._marked_document(each, mark) for each in value]
        return value if key in ("role", "type") else self._marked(value, mark)

    def _marked(self, value: Any, mark: str, named: Container[str] = _SCHEMA_WORDS) -> Any:
        if isinstance(value, str):
            return self._spellings.marked(value, mark, named)
        if isinstance(value, dict):
            marked = (self._marked(each, mark, named) for pair in value.items() for each in pair)
            return dict(zip(marked, marked, strict=True))
        if isinstance(value, list | tuple):
            return [self._marked(inner, mark, named) for inner in value]
        return value

    def _functions_of(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the tools under their older name, where the template uses it, maybe without a check."""
        if not self._wants_functions or not (tools or self._writes_functions):
            return {}
        functions = [tool["function"] for tool in tools]
        if not self._writes_functions:
            return {"functions": functions}
        return {
            "functions": json.dumps(functions, ensure_ascii=False, indent=2) if functions else ""
        }

    def _ended(
        self, written: str, messages: Sequence[Message], request: _Inputs, reshaped: Sequence[str]
    ) -> Rendered:
        text, places = unmarked(in_utf8(written), (request.mark, request.end))
        marks, ends, ending = places[request.mark], places[request.end], request.ending
        if ending.continues:
            if not ends:
                raise Unrenderable("it does not write the message that is to be continued")
            space = messages[-1].content[len(messages[-1].content.rstrip()) :]
            text = text[: ends[-1] + (len(space) if text.startswith(space, ends[-1]) else 0)]
        thinking = False
        if ending.thought is not None and not ending.continues:
            opened, closed = ending.thought
            last = len(text.rstrip())
            thinking = text.endswith(opened, 0, last) and not any(
                last - len(opened) < mark < last for mark in marks
            )
            if thinking and ending.closes:
                line = "\n" if text.endswith("\n") else ""
                text += f"{line}{closed}{line * 2}"
                thinking = False
            if ending.reasoning:
                text += "" if thinking else f"{opened}\n"
                marked = self._spellings.marked(str(ending.reasoning), request.mark)
                marks = [
                    *marks,
                    *(len(text) + at for at in unmarked(marked, [request.mark])[1][request.mark]),
                ]
                text += str(ending.reasoning)
                thinking = True
        return Rendered(
            [part.encode() for part in slices(text)],
            self._spellings.specials(text, marks),
            self._spellings.cuts(text, marks),
            list(map(str, reshaped)),
            thinking,
        )


class _Insecure(Unrenderable):
    """The sandbox refuses what the template does."""


def _generated(template: Template, variables: dict[str, Any], most: int) -> str:
    parts: list[str] = []
    n = 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            n += len(part)
            if n > most:
                raise _TooMuch(f"it writes more than {most:,} characters")
    except (MemoryError, _TooMuch):
        raise
    except SecurityError as error:
        raise _Insecure(_one_line(error)) from error
    except Exception as error:  # foreign code; it may raise anything
        raise Unrenderable(_one_line(error)) from error
    return "".join(parts)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
