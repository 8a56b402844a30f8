"""From what a client sent to what the engine needs.

Everything blocks (64 KiB of text take longer than a tick). Safe to use from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from attrs import evolve, frozen

from uma_trio.backend.base import IntArray, SpecialToken, Vocabulary
from uma_trio.text import tool_prompt
from uma_trio.text.chat import AUTO, Message, Tool, ToolChoice
from uma_trio.text.constraint import Compiler, Constraint
from uma_trio.text.derivation import Derivation, Finding
from uma_trio.text.prompt import NoTemplate, Unrenderable
from uma_trio.text.prompt import Prompt as Rendered
from uma_trio.text.replies import ReplyFormat, ReplyParser
from uma_trio.text.replying import NOTHING_LOOSENED, Loosened, Replies
from uma_trio.text.shape import Shape
from uma_trio.text.slices import is_blank
from uma_trio.text.template import PLAINLY, ChatTemplate, Manner, NotRendered
from uma_trio.text.tokeniser import TextOwner, Tokeniser

if TYPE_CHECKING:
    from uma_trio.text.confinement import Confinement
    from uma_trio.text.constrain import Grammarian


@frozen
class Chat:
    """A conversation to render by the model's chat template, with the `tools` that the model may call."""

    messages: tuple[Message, ...]
    manner: Manner = PLAINLY
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO


Prompt = str | Chat | IntArray
"""Text, a conversation, or tokens (int32), which are taken as they are."""


@frozen(eq=False)
class Prepared:
    """Everything that one answer needs before it is submitted; without a `parser` all of it is text.

    `loosened` are tools not wholly enforced, `reshaped` the changes that the chat template needed.
    """

    tokens: IntArray
    constraint: Constraint | None = None
    parser: ReplyParser | None = None
    loosened: tuple[str, ...] = ()
    pieces: Sequence[bytes] | None = None
    reshaped: tuple[str, ...] = ()


_SPACE: Final = " \t\n\v\f\r"  # isspace(3), as llama.cpp strips


class Tokenised(NamedTuple):
    """A prompt's tokens (int32), whether they end inside reasoning, and the changes for the template."""

    tokens: IntArray
    is_thinking: bool = False
    reshaped: tuple[str, ...] = ()


def _is_thought(messages: Sequence[Message]) -> bool:
    """Whether the last message is an answer that ends inside its reasoning."""
    last = messages[-1] if messages else Message("")
    has_answer = not is_blank(last.content) or last.calls
    return last.role == "assistant" and bool(last.reasoning) and not has_answer


class FrontEnd:
    """Turns prompts into tokens for one model; :meth:`chat_problem` is the reason why messages have none.

    `confine` makes the confinement of shapes on first use; without it they are compiled here.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        chat_template: str | None,
        reply_format: ReplyFormat | None = None,
        confine: Callable[[Vocabulary], Confinement] | None = None,
        *,
        reasons: bool | None = None,
    ) -> None:
        """Prepare for a model. `reasons` applies where a request does not set reasoning."""
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces()
        #: The bytes of the longest token.
        self.longest_piece = max(map(len, self._pieces), default=1)
        self._tokeniser = Tokeniser(vocabulary, self._pieces)
        self._bos = self._find_bos()
        self._confine = confine
        self._reasons = reasons
        self._making = threading.Lock()
        self._grammarian: Grammarian | None = None
        self._finding: Finding | None = None
        self._source = chat_template or ""
        self._reply_format = reply_format

    @property
    def end_tokens(self) -> frozenset[int]:
        return self._vocabulary.end_tokens

    def chat_problem(self) -> str | None:
        """Return why messages cannot be rendered; None if they can. Blocks."""
        return self.finding.get()[2]

    def derivation(self) -> Derivation | None:
        """Return what was found out of the template; None if messages cannot be rendered. Blocks."""
        found, template, _ = self.finding.get()
        return None if template is None else found

    def tokens_of(self, prompt: Prompt, owner: TextOwner | None = None) -> Tokenised:
        """Return the tokens of any prompt. Raises :class:`Unrenderable`."""
        if isinstance(prompt, str):
            return Tokenised(self.prepare_prompt(prompt, owner))
        if isinstance(prompt, Chat):
            return self.prepare_chat(prompt.messages, prompt.manner, prompt.tools, owner)
        return Tokenised(prompt)

    def prepare_prompt(self, text: str, owner: TextOwner | None = None) -> IntArray:
        """Return the tokens of a text (int32), after the model's BOS token; special tokens in it are text."""
        return self._finished(self._tokeniser.tokens(text, owner))

    def prepare_mixed(self, parts: Sequence[str | int]) -> IntArray:
        """Return the tokens of a prompt of texts and tokens. Only a text is preceded by the first token."""
        found: list[IntArray] = []
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:
                found += [self._tokeniser.tokens(str(text)) for text in run]
            else:
                found.append(np.array([*run], np.int32))
        tokens = np.concatenate(found)
        return self._finished(tokens) if isinstance(parts[0], str) else tokens

    def prepare_chat(
        self,
        messages: Sequence[Message],
        manner: Manner,
        tools: Sequence[Tool],
        owner: TextOwner | None = None,
    ) -> Tokenised:
        """Return the tokens of a chat, up to the beginning of an answer. Raises :class:`Unrenderable`."""
        prompt = self.prompt(messages, manner, tools)
        _ = self.replies.pieces  # made here, in a helper thread
        tokens = np.concatenate([np.empty(0, np.int32), *self._tokens(prompt, owner)])
        return Tokenised(self._finished(tokens), prompt.is_thinking, prompt.reshaped)

    def forget(self, principal: str) -> None:
        self._tokeniser.forget(principal)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        return self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self._pieces[token] for token in tokens])

    def render(
        self, messages: Sequence[Message], manner: Manner = PLAINLY, tools: Sequence[Tool] = ()
    ) -> str:
        """Return a chat as the template writes it. Raises :class:`Unrenderable`."""
        return self.prompt(messages, manner, tools).text

    def prompt(
        self, messages: Sequence[Message], manner: Manner = PLAINLY, tools: Sequence[Tool] = ()
    ) -> Rendered:
        """Return a chat as the template writes it, the rest described as text. Raises :class:`Unrenderable`."""
        found, template, problem = self.finding.get()
        if template is None:
            raise NoTemplate(problem)
        if manner.reasons is None:
            manner = evolve(manner, thinks=self._reasons)
        manner = found.efforts.apply(manner)
        reasoning = ""
        if manner.continue_final and _is_thought(messages):
            if found.format.thought is None:
                raise Unrenderable("no reasoning that could be continued is known of the model")
            reasoning, messages = messages[-1].reasoning, messages[:-1]
            manner = evolve(manner, continue_final=False, begins=True)
        is_off = manner.thinks is False or manner.effort == "none"
        refusal: Unrenderable | None = None
        prompt: Rendered | None = None
        for variant in tool_prompt.template_inputs(
            messages, tools, found.format, renders_tools=found.renders_tools
        ):
            try:
                prompt = template.render(
                    variant.messages,
                    manner,
                    tools=variant.tools,
                    habits=found.habits,
                    thought=found.format.thought,
                    closes=is_off and not reasoning and not manner.continue_final,
                    reasoning=reasoning,
                )
            except NotRendered:
                raise
            except Unrenderable as error:
                refusal = refusal or error
            else:
                if variant.block in prompt.text:  # some templates drop a system message
                    return prompt
        if prompt is None:
            raise refusal or Unrenderable("there is nothing to render")
        return prompt

    @property
    def finding(self) -> Finding:
        """What the template can do. Independent of the vocabulary from now on. Blocks the first time."""
        with self._making:
            if self._finding is None:
                self._finding = self._new_finding()
            return self._finding

    def _new_finding(self) -> Finding:
        vocabulary, source = self._vocabulary, self._source
        bos_text, eos_text, specials = vocabulary.bos_text, vocabulary.eos_text, self._specials

        def template() -> ChatTemplate:
            return ChatTemplate(source, bos_text=bos_text, eos_text=eos_text, specials=specials)

        return Finding(source, template, self._reply_format)

    @cached_property
    def replies(self) -> Replies:
        """How the model writes its replies. Blocks the first time."""
        return Replies(self._vocabulary, self.finding.get()[0])

    @property
    def grammarian(self) -> Grammarian:
        from uma_trio.text.constrain import Grammarian  # megabytes that few daemons need

        with self._making:
            if self._grammarian is None:
                confinement = None if self._confine is None else self._confine(self._vocabulary)
                self._grammarian = Grammarian(self._vocabulary, confinement=confinement)
            return self._grammarian

    def warm(self) -> None:
        """Prepare for the first shape. Blocks with the GIL."""
        self.grammarian.prepare()

    def close(self) -> None:
        if self._grammarian is not None:
            self._grammarian.close()

    @cached_property
    def _specials(self) -> Sequence[SpecialToken]:
        return self._vocabulary.specials()

    @cached_property
    def _controls(self) -> dict[str, SpecialToken]:
        return {special.text: special for special in self._specials if special.is_control}

    def _tokens(self, prompt: Rendered, owner: TextOwner | None) -> Iterator[IntArray]:
        edges = [0, *prompt.specials, len(prompt.text)]
        texts = [prompt.text[start:end] for start, end in pairwise(edges)]
        for number, text in enumerate(texts):
            if number % 2:
                yield np.array([self._controls[text].id], np.int32)
                continue
            start, end = edges[number], edges[number + 1]
            if number and self._controls[texts[number - 1]].strips_right:
                start += len(text) - len(text.lstrip(_SPACE))
            if number + 1 < len(texts) and self._controls[texts[number + 1]].strips_left:
                end -= len(text) - len(text.rstrip(_SPACE))
            first, last = bisect_right(prompt.cuts, start), bisect_left(prompt.cuts, end)
            for a, b in pairwise([start, *prompt.cuts[first:last], end]):
                if a < b:
                    yield self._tokeniser.tokens(prompt.text[a:b], owner, joined=a > start)

    def _find_bos(self) -> IntArray | None:
        text = self._vocabulary.bos_text
        if not self._vocabulary.adds_bos or not text:
            return None
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return tokens if len(tokens) == 1 else None

    def _finished(self, tokens: IntArray) -> IntArray:
        if self._bos is not None and (not len(tokens) or tokens[0] != self._bos[0]):
            return np.concatenate([self._bos, tokens])
        return tokens


class Preparation:
    """One request being prepared: `n` answers to `prompt`, held to `shape`. Blocks; for one thread at a time.

    :meth:`finish` raises :class:`uma_trio.text.shape.Unknown` where a shape has to be compiled: then call
    :meth:`compile`, once a compiler is free, and `finish` again. Nothing is done twice. `field` is what
    was processed last, for messages.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        prompt: Prompt,
        *,
        shape: Shape | None = None,
        budget: int | None = None,
        n: int = 1,
        owner: TextOwner | None = None,
    ) -> None:
        self._front_end, self._prompt, self._owner = front_end, prompt, owner
        self._shape, self._budget, self._n = shape, budget, n
        self._chat = prompt if isinstance(prompt, Chat) else None
        self.field = "tools"
        has_tools = self._chat is not None and len(self._chat.tools) > 0
        self._loosened: Loosened | None = None if has_tools else NOTHING_LOOSENED
        self._read: Tokenised | None = None
        self._constraints: Sequence[Constraint | None] | None = None

    def finish(self) -> list[Prepared]:
        """Return what each answer needs. Raises `Unknown`, `Unconstrainable` or `Unrenderable`."""
        front_end, chat = self._front_end, self._chat
        if self._loosened is None:
            self._loosened = self._loosen(front_end.grammarian.known)
        if self._read is None:
            self._read = front_end.tokens_of(self._prompt, self._owner)
        (tokens, thinking, reshaped), loosened = self._read, self._loosened
        if self._constraints is None:
            bounded = chat is not None and self._budget is not None
            if self._shape is not None or loosened.offers or bounded:
                self._constraints = self._constrain(front_end.grammarian.known)
            else:
                self._constraints = [None] * self._n
        if chat is None:
            return [Prepared(tokens, constraint) for constraint in self._constraints]
        found: list[Prepared] = []
        for constraint in self._constraints:
            parser = front_end.replies.parser(
                chat.tools, chat.choice, thinking=thinking, continued=chat.manner.continue_final
            )
            pieces = None if parser is None else front_end.replies.pieces
            names = loosened.names if self._shape is None else self._shape.loosened
            found.append(Prepared(tokens, constraint, parser, names, pieces, reshaped))
        return found

    def compile(self) -> None:
        """Compile what :meth:`finish` did not know. Raises :class:`uma_trio.text.shape.Unconstrainable`."""
        if self._loosened is None:
            self._loosened = self._loosen(self._front_end.grammarian)
        else:
            self._constraints = self._constrain(self._front_end.grammarian)

    def _loosen(self, compiler: Compiler) -> Loosened:
        if self._chat is None:
            return NOTHING_LOOSENED
        return self._front_end.replies.loosened(compiler, self._chat.tools, self._chat.choice)

    def _constrain(self, compiler: Compiler) -> list[Constraint | None]:
        shape, chat = self._shape, self._chat
        if shape is not None:
            self.field = shape.field
        if chat is None:
            return [None if shape is None else compiler.follow(shape) for _ in range(self._n)]
        thinking = self._read is not None and self._read[1]
        return [
            self._front_end.replies.constraint(
                *(compiler, shape, self._loosened or NOTHING_LOOSENED),
                *(chat.choice, self._budget),
                thinking=thinking,
            )
            for _ in range(self._n)
        ]
