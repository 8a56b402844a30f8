"""From what a client sent to tokens: prompts as they are, chats by the model's template.

Everything here blocks (64 KiB of text take longer than a tick) and is called in helper
threads; nothing is changed after construction, so any number of them may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

import numpy as np

from uma_trio.backend.base import IntArray, Vocabulary
from uma_trio.text.template import ChatTemplate, Part, Unrenderable

_USE_PROMPT: Final = "send the text as `prompt` instead of `messages`"
_MARKER: Final = "\n"


class Refused(Exception):
    """A request that cannot be served as it is: a wire code, a sentence, the field at fault."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


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


class FrontEnd:
    """Turns text into tokens for one model.

    A text longer than `max_prompt_bytes` is refused before it is tokenised, one that leaves no
    room in a context of `n_ctx_seq` tokens after. Without a template, or with one that cannot
    be rendered safely, messages are refused; `chat_problem` says why, for the log.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        chat_template: str | None,
        *,
        max_prompt_bytes: int = 65_536,
        n_ctx_seq: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_prompt_bytes = max_prompt_bytes
        self._n_ctx_seq = n_ctx_seq
        self._pieces = vocabulary.pieces()
        self._bos = self._find_bos()
        self._adds_space = self._bytes_of(self._plain("a")).startswith(b" ")
        self._template: ChatTemplate | None = None
        #: Why `messages` are refused; None if they are not.
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

    def prepare_prompt(self, text: str) -> IntArray:
        """Return the tokens of a prompt (int32), with the model's first token if it wants one.

        What looks like a special token in `text` stays text. Raises :class:`Refused`.
        """
        if not text:
            raise Refused("E_PROTO_003", "prompt is empty", "prompt")
        self._check_bytes([text], "prompt")
        return self._finished(self._plain(text), "prompt")

    def prepare_messages(self, messages: Sequence[tuple[str, str]]) -> IntArray:
        """Return the tokens (int32) of a chat of (role, content), ready for the answer.

        What looks like a special token in a content stays text. Raises :class:`Refused`.
        """
        if not messages:
            raise Refused("E_PROTO_003", "messages is empty", "messages")
        self._check_bytes([content for _, content in messages], "messages")
        if self._template is None:
            raise Refused("E_MODEL_002", f"{self.chat_problem}; {_USE_PROMPT}", "messages")
        try:
            parts = self._template.render(messages)
        except Unrenderable as error:
            raise Refused(
                "E_MODEL_002", f"the model's chat template refuses this: {error}", "messages"
            ) from error
        tokens: list[IntArray] = []
        after_text = False
        for part in _with_spaces(parts):
            tokens.append(self._part(part.text, special=not part.is_content, joined=after_text))
            if len(tokens[-1]):  # a control token has no bytes
                after_text = bool(self._pieces[int(tokens[-1][-1])])
        return self._finished(np.concatenate(tokens), "messages")

    def _part(self, text: str, *, special: bool, joined: bool) -> IntArray:
        """Return the tokens of one part of a longer text.

        Some vocabularies put a space before any text they begin with. In the middle of a text,
        `joined`, that space would be one too many: then a line end goes first and is cut off
        again, with the space before it.
        """
        tokenize = self._vocabulary.tokenize
        if joined and self._adds_space:
            tokens = tokenize(_MARKER + text, add_special=False, parse_special=special)
            for count in range(1, min(4, len(tokens)) + 1):
                if self._bytes_of(tokens[:count]) == b" " + _MARKER.encode():
                    return tokens[count:]
        return tokenize(text, add_special=False, parse_special=special)

    def _plain(self, text: str) -> IntArray:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _find_bos(self) -> IntArray | None:
        """Return the token that goes first, if the model wants one."""
        text = self._vocabulary.bos_text
        if not self._vocabulary.adds_bos or not text:
            return None
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return tokens if len(tokens) == 1 else None

    def _bytes_of(self, tokens: IntArray) -> bytes:
        return b"".join([self._pieces[token] for token in tokens.tolist()])

    def _check_bytes(self, texts: Sequence[str], field: str) -> None:
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if size > self._max_prompt_bytes:
            raise Refused(
                "E_LIMIT_001",
                f"{field} has {size} bytes, and {self._max_prompt_bytes} are allowed",
                field,
            )

    def _finished(self, tokens: IntArray, field: str) -> IntArray:
        """Put the first token in front if it is not there, and check the length."""
        if self._bos is not None and (not len(tokens) or tokens[0] != self._bos[0]):
            tokens = np.concatenate([self._bos, tokens])
        if not len(tokens):
            raise Refused("E_PROTO_003", f"{field} gives no tokens", field)
        if self._n_ctx_seq is not None and len(tokens) >= self._n_ctx_seq:
            raise Refused(
                "E_LIMIT_004",
                f"{field} takes {len(tokens)} tokens, and the context holds {self._n_ctx_seq}",
                field,
            )
        return tokens
