"""The options about guessing the next tokens of answers."""

from __future__ import annotations

from attrs import frozen

from uma_trio.config.option import option
from uma_trio.config.replies import ReplyConfig
from uma_trio.words import BY_BACKEND, SPECULATIONS


@frozen(kw_only=True)
class DraftConfig(ReplyConfig):
    """How far guesses may go."""

    speculation: str = option(
        BY_BACKEND,
        flag="--speculation",
        choices=(BY_BACKEND, *SPECULATIONS),
        since="0.1",
        help="Speculative decoding: guess the next tokens of an answer from earlier text and verify "
        "them in one batch (deadline policy). off: never; free: only where the tick takes no "
        "longer; auto: also where it raises the tokens per second; default: auto on a CPU, off "
        "on a GPU. Where graphs are captured (CUDA) nothing is drafted. A request may restrict it. A request with a seed gets no drafts by default.",
    )
