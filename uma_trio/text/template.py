"""A model's chat template, rendered so that nobody's text can pass for the template's own.

The template never sees what people wrote. Each content is replaced by a random word, the
rendered text is cut at these words, and the contents are put into the gaps as *content*, which
is tokenised without special tokens. A template that loses, repeats or alters a word cannot be
rendered this way and is refused.

What else is somebody's text (descriptions and schemas of tools, names, arguments and reasoning) is
replaced in the same way where it holds more than plain prose, of which no special token can be made.
A template may leave it out or repeat it. Where it comes back inside JSON, as the word's escaped
separator tells, it is escaped as often. What is prose goes to the template as it is, which may
compare it (`param.type == "string"`) and which writes it in one piece with its own text.

Templates may strip their contents (``message.content | trim``). The word is therefore padded
with white space on both sides; where the padding comes back stripped, the content is stripped
in the same way: all white space, or line ends only. Two things differ from handing contents to
the template, and both are deliberate. A template cannot look inside a content (to cut the
reasoning out of earlier answers, say). A content of nothing but white space, which cannot
do harm, is handed over as it is, so that "no system message" looks like none.

What a request may say to the template by name (:class:`Manner`) is seen by the template as it is,
because templates compare it. So its texts may hold only what no vocabulary writes a special token
with: letters, digits, and marks of plain prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from attrs import field, frozen
from jinja2 import Template

from uma_trio.text.chat import Message, Tool
from uma_trio.text.documents import NO_HABITS, Habits, messages_of, tools_of
from uma_trio.text.sandbox import Sandbox
from uma_trio.text.slices import is_blank
from uma_trio.text.veil import VT, Part, Unrenderable, Veil, is_prose

MAX_SOURCE: Final = 256 << 10  # characters; the longest published template has 20,000

# What the template is told by others than the request.
_OURS: Final = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents")
SWITCHES: Final[Mapping[str, tuple[Any, Any]]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),  # Command A Reasoning
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
    "thinking_budget": (-1, 0),  # Seed-OSS
}
"""The variables of templates that turn the reasoning on and off, each with its values for both."""
# What some templates are told of today, if they name it: Llama 3's, and those of FireFunction. Without
# the time of day, which would change every prompt.
_DATES: Final = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
_WRITES_FUNCTIONS: Final = re.compile(r"(?:\+|\{\{-?)\s*functions\s*(?:\+|-?[}%]\})")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

_SANDBOX: Final = Sandbox()


@frozen
class Manner:
    """How a chat is rendered, beyond its messages.

    With `continue_final` the rendered text ends inside the last message, which has to be the
    assistant's, so that the model goes on with it. Without `begins` it ends behind the last message,
    where no answer begins. `arguments` are variables of the template;
    `problem_of` says which are allowed. `effort` is how much the model should reason, and `thinks`
    whether it should at all, where that is said by itself; :mod:`uma_trio.text.effort` makes arguments
    of both.
    """

    continue_final: bool = False
    begins: bool = True
    arguments: Mapping[str, Any] = field(factory=dict)
    effort: str | None = None
    thinks: bool | None = None

    @property
    def reasons(self) -> bool | None:
        """Whether the model should reason; None where nothing says."""
        for name, (on, off) in SWITCHES.items():
            if name in self.arguments and (said := self.arguments[name]) in (on, off):
                return bool(said == on)
        if self.thinks is not None:
            return self.thinks
        return None if self.effort is None else self.effort != "none"


PLAINLY: Final = Manner()


def problem_of(arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a request's arguments of the template; None if nothing is."""
    for name in arguments:
        if name in _OURS:
            return f"names {name}, which is the daemon's own: use the request's fields"
        if not _NAME.fullmatch(name):
            return "has a name that is not an identifier of at most 64 letters"
    if not _is_prose(list(arguments.values())):
        return "has a text with other characters than letters, digits, spaces and . , : ; ! ? ' ( ) + / -"
    return None


def _is_prose(value: Any) -> bool:
    """Whether every text in a JSON value is too plain to be part of a special token."""
    if isinstance(value, str):
        return is_prose(value)
    if isinstance(value, Mapping):
        return all(map(_is_prose, [*value.keys(), *value.values()]))
    return all(map(_is_prose, value)) if isinstance(value, list | tuple) else True


class ChatTemplate:
    """One template, compiled and tried. Safe to render from several threads at a time."""

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source` and render a first conversation. Raises :class:`Unrenderable`.

        `now` is the clock that templates are told the date by.
        """
        if len(source) > MAX_SOURCE:
            raise Unrenderable(f"it is longer than {MAX_SOURCE:,} characters")
        if VT in source:
            raise Unrenderable("it contains a vertical tab")
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._now = now
        self._dates = {n: d for n, d in _DATES.items() if re.search(rf"\b{n}\b", source)}
        self._wants_functions = re.search(r"\bfunctions\b", source) is not None
        self._writes_functions = _WRITES_FUNCTIONS.search(source) is not None
        try:
            self._template: Template = _SANDBOX.from_string(source)
        except Exception as error:  # a compiler of foreign code; it may raise anything
            raise Unrenderable(f"it does not compile: {_one_line(error)}") from error
        self._without_tools: list[Any] | None = None
        try:
            self.render([Message("user", "Hello")])
        except Unrenderable:
            self._without_tools = []  # some go through the tools without asking for them
            self.render([Message("user", "Hello")])

    def render(
        self,
        messages: Sequence[Message],
        manner: Manner = PLAINLY,
        *,
        tools: Sequence[Tool] = (),
        habits: Habits = NO_HABITS,
        prompts: bool = True,
    ) -> list[Part]:
        """Render messages, ready for the assistant's answer, unless `prompts` or `begins` is false.

        Raises :class:`Unrenderable` if the template refuses these messages, takes too long, or
        does not bring every content back exactly once; or if there is no final message to go on
        with.
        """
        if manner.continue_final and not _can_go_on(messages):
            raise Unrenderable(
                "the last message to continue must be the assistant's, not empty and without calls"
            )
        veil = Veil()
        shown = messages_of(messages, veil, habits)
        told = tools_of(tools, veil)
        prompts = prompts and manner.begins and not manner.continue_final
        rendered = self._run(shown, told, manner, prompts=prompts)
        pieces = veil.cut(rendered)
        found = [word.index for word in pieces.words if word.index in veil.contents]
        missing = sorted(veil.contents.keys() - found)
        if missing:
            raise Unrenderable(
                f"it leaves out or alters the message of {veil.contents[missing[0]][1]!r}"
            )
        if len(found) > len(veil.contents):
            raise Unrenderable("it repeats a message")
        joined = pieces.parts()
        if not manner.continue_final:
            return joined
        if not found or veil.contents[found[-1]][0] != len(messages) - 1:
            raise Unrenderable("it does not write the last message last")
        return joined if joined[-1].is_content else joined[:-1]

    def _run(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        manner: Manner,
        *,
        prompts: bool,
    ) -> str:
        _SANDBOX.start()
        try:
            return self._template.render(
                {
                    **self._of_today(),
                    **manner.arguments,
                    **self._functions_of(tools),
                    "messages": messages,
                    "bos_token": self._bos_text,
                    "eos_token": self._eos_text,
                    "add_generation_prompt": prompts,
                    "tools": tools or self._without_tools,
                    "documents": None,
                }
            )
        except Exception as error:  # foreign code; it may raise anything
            raise Unrenderable(_one_line(error)) from error

    def _functions_of(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the tools under the older name, if the template names it.

        Templates that write them out do so without looking whether there are any.
        """
        if not self._wants_functions or not (tools or self._writes_functions):
            return {}
        return {"functions": _functions(tools, as_text=self._writes_functions)}

    def _of_today(self) -> dict[str, str]:
        """Return what the template wants to know of the date."""
        if not self._dates:
            return {}
        today = self._now()
        return {name: today.strftime(layout) for name, layout in self._dates.items()}


def _functions(tools: Sequence[Mapping[str, Any]], *, as_text: bool) -> Any:
    """Return tools as older templates know them: functions, one by one or written out as JSON."""
    functions = [tool["function"] for tool in tools]
    if not as_text:
        return functions
    return json.dumps(functions, ensure_ascii=False, indent=2) if functions else ""


def _can_go_on(messages: Sequence[Message]) -> bool:
    last = messages[-1] if messages else Message("")
    return last.role == "assistant" and not is_blank(last.content) and not last.calls


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
