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
    """A conversation to render by the model's chat template, with the `tools` that the model may call."""

    messages: tuple[Message, ...]
    manner: Manner = PLAINLY
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO


Prompt = str | Chat | IntArray
"""Text, a conversation, or tokens (int32), which are taken as they are."""


@frozen(eq=False)
class Prepared:
    """Everything that one answer needs before it is submitted.

    Without a `parser` the whole answer is text. `loosened` names the tools whose schema is not wholly
    enforced, `pieces` are the bytes of each token where the reader needs special tokens as text, and
    `reshaped` lists the changes that the chat template needed.
    """

    tokens: IntArray
    constraint: Constraint | None = None
    parser: ReplyParser | None = None
    loosened: tuple[str, ...] = ()
    pieces: Sequence[bytes] | None = None
    reshaped: tuple[str, ...] = ()
