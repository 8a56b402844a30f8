"""From what a client sent to tokens: prompts as they are, chats by the model's template.

All that a request needs is put together by :mod:`uma_trio.text.preparing`.

Everything here blocks (64 KiB of text take longer than a tick) and is called in helper
threads; any number of them may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from uma_trio.backend.base import IntArray, Vocabulary
from uma_trio.text import telling
from uma_trio.text.asked import Chat, Prompt
from uma_trio.text.chat import Message, Tool
from uma_trio.text.replies import ReplyFormat
from uma_trio.text.replying import Replies
from uma_trio.text.slices import Forgeable, is_blank
from uma_trio.text.template import PLAINLY, ChatTemplate, Manner
from uma_trio.text.tokeniser import Tokeniser, Whose
from uma_trio.text.veil import Part, Unrenderable

if TYPE_CHECKING:
    from uma_trio.text.confinement import Confinement
    from uma_trio.text.constrain import Grammarian


def _with_spaces(parts: Sequence[Part]) -> Iterator[Part]:
    """Move a space at the end of the template's text to the content behind it.

    Vocabularies hold words with the space before them: ``[INST] Hello`` is ``[INST]`` and
    `` Hello`` wherever the model was trained, not a lone space and ``Hello``.
    """
    space = ""
    for part, following in zip_longest(parts, parts[1:]):
        text, space = space + part.text, ""
        if following is not None and following.is_content and text.endswith(" "):
            text, space = text[:-1], " "
        if text:
            yield Part(text, part.is_content)


def _without_markers(parts: Iterable[Part], forgeable: Forgeable | None) -> Iterator[Part]:
    """Cut every marker in somebody's text behind its first character, so that it is no token."""
    for part in parts:
        if forgeable is None or not part.is_content:
            yield part
            continue
        for text in forgeable.cut(part.text):
            yield Part(text, is_content=True)


def _is_thought(messages: Sequence[Message]) -> bool:
    """Whether the last message is an answer that has not come further than its reasoning."""
    last = messages[-1] if messages else Message("")
    said = not is_blank(last.content) or last.calls
    return last.role == "assistant" and bool(last.reasoning) and not said


class FrontEnd:
    """Turns text into tokens for one model.

    Without a template, or with one that cannot be rendered safely, there is no way from messages
    to tokens; `chat_problem` says why. `confine` makes what shapes are checked in, when the first one
    comes; without it they are compiled in this process only.
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
        """Prepare for a model. `reasons` is what is said of reasoning where a request says nothing."""
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces()
        #: The bytes of the longest token: no token stands for more of a text.
        self.longest_piece = max(map(len, self._pieces), default=1)
        self._tokeniser = Tokeniser(vocabulary, self._pieces)
        self._bos = self._find_bos()
        self._template: ChatTemplate | None = None
        self._reply_format = reply_format
        self._source = chat_template or ""
        self._confine = confine
        self._reasons = reasons
        self._making = threading.Lock()
        self._grammarian: Grammarian | None = None
        #: Why messages cannot be rendered; None if they can.
        self.chat_problem: str | None = None
        if not chat_template:
            self.chat_problem = "the model has no chat template"
            return
        try:
            self._template = ChatTemplate(
                chat_template, bos_text=vocabulary.bos_text, eos_text=vocabulary.eos_text
            )
        except Unrenderable as error:
            self.chat_problem = f"the model's chat template cannot be used: {error}"

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""
        return self._vocabulary.end_tokens

    def tokens_of(self, prompt: Prompt, whose: Whose | None = None) -> tuple[IntArray, bool]:
        """Return the tokens (int32) of what is asked, and whether the answer begins inside its reasoning.

        Raises :class:`Unrenderable` as :meth:`prepare_chat` does.
        """
        if isinstance(prompt, str):
            return self.prepare_prompt(prompt, whose), False
        if isinstance(prompt, Chat):
            return self.prepare_chat(prompt.messages, prompt.manner, prompt.tools, whose)
        return prompt, False

    def prepare_prompt(self, text: str, whose: Whose | None = None) -> IntArray:
        """Return the tokens of a prompt (int32), with the model's first token if it wants one.

        What looks like a special token in `text` stays text. `whose` text it is may be remembered.
        """
        return self._finished(self._tokeniser.tokens(text, whose))

    def prepare_mixed(self, parts: Sequence[str | int]) -> IntArray:
        """Return the tokens of a prompt whose `parts` are texts and tokens, one or more.

        The model's first token goes in front of a text only: tokens are taken as they are.
        """
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
        whose: Whose | None = None,
    ) -> tuple[IntArray, bool]:
        """Return the tokens (int32) of a chat, ready for the answer, and whether that is inside its reasoning.

        What looks like a special token in somebody's text stays text. Raises :class:`Unrenderable` if
        the template refuses these messages, or there is none that can be used. `whose` texts these are
        may be remembered: each message is tokenised once.
        """
        parts = self._parts(messages, manner, tools)
        tokens: list[IntArray] = []
        after_text = False
        for part in _without_markers(_with_spaces(parts), self.replies.forgeable):
            tokens.append(
                self._tokeniser.tokens(
                    part.text, whose, special=not part.is_content, joined=after_text
                )
            )
            if len(tokens[-1]):  # a control token has no bytes
                after_text = bool(self._pieces[int(tokens[-1][-1])])
        _ = self.replies.pieces  # made here, in a helper thread
        thinking = self.replies.opens_thought(parts)
        if manner.continue_final:
            thinking = _is_thought(messages)
        return self._finished(np.concatenate(tokens)), thinking

    def forget(self, principal: str) -> None:
        """Drop what is remembered of a principal's texts."""
        self._tokeniser.forget(principal)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens (int32) of `text` alone, as :meth:`Vocabulary.tokenize` does."""
        return self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens of the vocabulary; control tokens have none."""
        return b"".join([self._pieces[token] for token in tokens])

    def render(
        self, messages: Sequence[Message], manner: Manner = PLAINLY, tools: Sequence[Tool] = ()
    ) -> str:
        """Return a chat as the template writes it. Raises :class:`Unrenderable`."""
        return "".join(part.text for part in self._parts(messages, manner, tools))

    @cached_property
    def replies(self) -> Replies:
        """How the model writes its replies; found out when it is asked for first."""
        return Replies(self._vocabulary, self._template, self._source, self._reply_format)

    @property
    def grammarian(self) -> Grammarian:
        """The compiler of grammars, made once, by the first helper thread that asks."""
        from uma_trio.text.constrain import Grammarian  # megabytes that few daemons need

        with self._making:
            if self._grammarian is None:
                confinement = None if self._confine is None else self._confine(self._vocabulary)
                self._grammarian = Grammarian(self._vocabulary, confinement=confinement)
            return self._grammarian

    def warm(self) -> None:
        """Prepare what the first shape would wait for. Blocks; holds the interpreter's lock."""
        self.grammarian.prepare()

    def close(self) -> None:
        """End the processes that check and follow shapes."""
        if self._grammarian is not None:
            self._grammarian.close()

    def _parts(
        self, messages: Sequence[Message], manner: Manner, tools: Sequence[Tool]
    ) -> list[Part]:
        found = self.replies.found
        if manner.reasons is None:
            manner = evolve(manner, thinks=self._reasons)
        manner = found.efforts.told(manner)
        if manner.continue_final and _is_thought(messages):
            return self._within_thought(messages, manner, tools)
        parts = self._rendered(messages, manner, tools)
        if manner.reasons is False and not manner.continue_final:
            parts += self.replies.closing(parts)
        return parts

    def _within_thought(
        self, messages: Sequence[Message], manner: Manner, tools: Sequence[Tool]
    ) -> list[Part]:
        """Render the messages up to the end of the last one's reasoning, with which the model goes on."""
        thought = self.replies.format.thought
        if thought is None:
            raise Unrenderable("no reasoning that could be continued is known of the model")
        parts = self._rendered(
            messages[:-1], evolve(manner, continue_final=False, begins=True), tools
        )
        if not self.replies.opens_thought(parts):
            parts.append(Part(f"{thought.open}\n", is_content=False))
        return [*parts, Part(messages[-1].reasoning, is_content=True)]

    def _rendered(
        self, messages: Sequence[Message], manner: Manner, tools: Sequence[Tool]
    ) -> list[Part]:
        """Render the messages, with what the template has no place for told in words."""
        if self._template is None:
            raise Unrenderable(self.chat_problem or "the model has no chat template")
        found = self.replies.found
        said = telling.written(messages, tools, found.format, tells_tools=found.tells_tools)
        told = tools if found.tells_tools and not found.in_words else ()
        try:
            return self._template.render(said, manner, tools=told, habits=found.habits)
        except Unrenderable:
            if said == list(messages):
                raise
        # Some templates have no place for a system message of ours.
        return self._template.render(
            telling.without_system(said), manner, tools=told, habits=found.habits
        )

    def _find_bos(self) -> IntArray | None:
        """Return the token that goes first, if the model wants one."""
        text = self._vocabulary.bos_text
        if not self._vocabulary.adds_bos or not text:
            return None
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return tokens if len(tokens) == 1 else None

    def _finished(self, tokens: IntArray) -> IntArray:
        """Put the first token in front if it is not there."""
        if self._bos is not None and (not len(tokens) or tokens[0] != self._bos[0]):
            return np.concatenate([self._bos, tokens])
        return tokens
