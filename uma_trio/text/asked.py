"""What is asked of a model, and what is made of it, as values."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from uma_trio.backend.base import IntArray
from uma_trio.text.chat import AUTO, Message, Tool, ToolChoice
from uma_trio.text.inner import Constraint
from uma_trio.text.replies import ReplyParser
from uma_trio.text.template import PLAINLY, Manner


@frozen
class Chat:
    """A conversation to be rendered by the model's chat template.

    `manner` says how to render it; :meth:`Service.generate` checks its arguments. `tools` are the
    functions that the model may call, and `choice` restricts the calls.
    """

    messages: tuple[Message, ...]
    manner: Manner = PLAINLY
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO


Prompt = str | Chat | IntArray
"""Text, a conversation, or tokens (int32), which are taken as they are."""


@frozen(eq=False)
class Prepared:
    """What the engine and the reader of one answer need, before it is submitted.

    `parser` reads the answer (None: all of it is text), and `loosened` are the tools whose arguments are not held to
    their whole schema. `pieces` are the bytes of each token, if the reader needs the text of special tokens.
    `reshaped` says what was changed in the conversation for the chat template.
    """

    tokens: IntArray
    constraint: Constraint | None = None
    parser: ReplyParser | None = None
    loosened: tuple[str, ...] = ()
    pieces: Sequence[bytes] | None = None
    reshaped: tuple[str, ...] = ()
