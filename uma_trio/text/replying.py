"""How a model's replies are read and constrained. Everything blocks, but for `parser`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from attrs import evolve, frozen

from uma_trio.backend.base import Vocabulary
from uma_trio.text.chat import Tool, ToolChoice
from uma_trio.text.constraint import Compiler, Constraint
from uma_trio.text.derivation import Derivation
from uma_trio.text.replies import ReplyParser
from uma_trio.text.replies.bodies import atoms
from uma_trio.text.replies.framed import MARKERS
from uma_trio.text.replies.grammar import Offer, answer_in_frame, answer_of, grammar_of
from uma_trio.text.schemas import closed
from uma_trio.text.shape import NotChecked, Shape, Unconstrainable
from uma_trio.text.slices import digest, json_text
from uma_trio.text.thinking import CLOSE, Bounded, Framing, Markers, Thinking

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
# Of a tool without parameters: in OpenAI's API it takes none.
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_REMEMBERED: Final = 512


@frozen
class Loosened:
    """What the arguments of a request's tools are held to, and the `names` of tools not wholly enforced."""

    offers: tuple[Offer, ...]
    names: tuple[str, ...]


NOTHING_LOOSENED: Final = Loosened((), ())


class Replies:
    """The replies of one model. Safe to use from any thread."""

    def __init__(self, vocabulary: Vocabulary, found: Derivation) -> None:
        self._vocabulary = vocabulary
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        #: What was found out.
        self.found = found
        self.format = found.format

    def parser(
        self, tools: Sequence[Tool], choice: ToolChoice, *, thinking: bool, continued: bool = False
    ) -> ReplyParser | None:
        """Return the parser of one reply; None if a reply is only text."""
        calls = bool(tools) and choice.mode != "none"
        syntax = self.format.calls
        framed = syntax is not None and syntax.framed
        if not calls and self.format.thought is None and not framed:
            return None
        return ReplyParser(
            self.format, thinking=thinking, continued=continued, tools=tools, calls=calls
        )

    @cached_property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token; markers that are special tokens have theirs."""
        pieces = list(self._vocabulary.pieces())
        for marker in self._marker_words:
            token = self.special(marker)
            if token is not None:
                pieces[token] = marker.encode()
        return tuple(pieces)

    @cached_property
    def _marker_words(self) -> Sequence[str]:
        thought, calls = self.format.thought, self.format.calls
        text = "" if calls is None else MARKERS.get(calls.style, calls.markers)
        if thought is not None:
            text += f" {thought.open} {thought.close}"
        return list(dict.fromkeys(atoms(text)))

    def special(self, text: str) -> int | None:
        """Return the id of the special token, without text of its own, that is written like this."""
        tokens = self._tokens_of(text)
        return tokens[0] if len(tokens) == 1 and not self._vocabulary.pieces()[tokens[0]] else None

    def constraint(
        self,
        compiler: Compiler,
        shape: Shape | None,
        loosened: Loosened,
        choice: ToolChoice,
        budget: int | None,
        *,
        thinking: bool,
    ) -> Constraint | None:
        """Return the constraint of one reply; None if there is none. Raises :class:`Unconstrainable`."""
        inner: Constraint | None = None
        calls = self.format.calls
        if loosened.offers and choice.mode != "none" and calls is not None:
            if not self.found.takes_parallel_calls:
                choice = evolve(choice, parallel=False)
            answer = self._answer_of(compiler, shape)
            more = () if answer is None else (answer,)
            text = grammar_of(calls, loosened.offers, choice, self.special, *more)
            inner = compiler.follow(Shape("reply", text, "tools"))
        elif shape is not None:
            inner = self._follow(compiler, shape)
        if budget is not None and calls is not None and calls.style == "harmony":
            return Bounded(self._framing, inner, budget)
        markers = self._thought_markers
        if markers is None or (inner is None and budget is None):
            return inner
        return Thinking(markers, inner, budget, thinking=thinking)

    def _follow(self, compiler: Compiler, shape: Shape) -> Constraint:
        calls = self.format.calls
        answer = self._answer_of(compiler, shape)
        if calls is None or not calls.framed or answer is None:
            return compiler.follow(shape)
        framed = answer_in_frame(calls, answer, self.special)
        return compiler.follow(Shape("reply", framed, shape.field))

    def _answer_of(self, compiler: Compiler, shape: Shape | None) -> str | None:
        """Return the grammar of an answer of this shape as a part of another; None if there is none."""
        from uma_trio.text.grammars import JSON

        if shape is None:
            return None
        compiler.follow(shape)  # which raises what is wrong with the shape
        return answer_of(shape, JSON)

    def loosened(self, compiler: Compiler, tools: Sequence[Tool], choice: ToolChoice) -> Loosened:
        """Return what the tools' arguments are held to. Raises :class:`Unconstrainable` for strict tools."""
        offers: list[Offer] = []
        names: list[str] = []
        wanted = [tool for tool in tools if not choice.names or tool.name in choice.names]
        for tool in wanted if choice.mode != "none" else ():
            schema, whole = self._schema_of(compiler, tool)
            offers.append(Offer(tool.name, schema))
            if not whole:
                names.append(tool.name)
        return Loosened(tuple(offers), tuple(names))

    def _schema_of(self, compiler: Compiler, tool: Tool) -> tuple[Mapping[str, Any], bool]:
        from uma_trio.text.grammars import JSON, LOOSE

        schema = _NO_ARGUMENTS
        if tool.parameters:
            schema = closed({"type": "object", **tool.parameters})
        text = json_text(schema)
        problem = self._problem_of(compiler, Shape("schema", text))
        if not problem:
            return {**schema, "x-guidance": JSON}, True
        if tool.strict:
            raise Unconstrainable(f"holds the strict tool {tool.name}, whose schema {problem}")
        if not self._problem_of(compiler, Shape("loose schema", text)):
            return {**schema, "x-guidance": LOOSE}, False
        return {**_ANY_OBJECT, "x-guidance": JSON}, False

    def _problem_of(self, compiler: Compiler, shape: Shape) -> str:
        """Return why a schema cannot be enforced, or ""; the latest answers are remembered."""
        key = digest(shape.kind, shape.text)
        found = self._problems.get(key)
        if found is None:
            found = ""
            try:
                compiler.check(shape)
            except NotChecked:
                raise
            except Unconstrainable as error:
                found = str(error)
            self._problems[key] = found
        while len(self._problems) > _REMEMBERED:
            with suppress(KeyError):  # another thread has dropped the last one
                self._problems.popitem(last=False)
        return found

    def _tokens_of(self, marker: str) -> tuple[int, ...]:
        found = self._vocabulary.tokenize(marker, add_special=False, parse_special=True)
        return tuple(map(int, found))

    @cached_property
    def _framing(self) -> Framing:
        return Framing.of(self.pieces, self._tokens_of(CLOSE))

    @cached_property
    def _thought_markers(self) -> Markers | None:
        thought, calls = self.format.thought, self.format.calls
        if thought is None or (calls is not None and calls.thought_header):
            return None

        def tokens(marker: bytes) -> tuple[int, ...]:
            return self._tokens_of(marker.decode())

        return Markers(
            tokens,
            self.pieces,
            thought.open.encode(),
            thought.close.encode(),
            tokens(thought.close.encode()),
            self._vocabulary.end_tokens,
        )
