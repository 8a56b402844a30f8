"""The options about guessing the next tokens of answers."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from uma_trio.config.option import option
from uma_trio.config.replies import ReplyConfig
from uma_trio.speculation import BY_BACKEND, SPECULATIONS


@frozen(kw_only=True)
class DraftConfig(ReplyConfig):
    """How far guesses may go, and who makes them."""

    speculation: str = option(
        BY_BACKEND,
        flag="--speculation",
        choices=(BY_BACKEND, *SPECULATIONS),
        since="0.1",
        help="Speculative decoding: guess the next tokens of an answer from earlier text and verify "
        "them in one batch (deadline policy). off: never; free: only where the tick takes no "
        "longer; auto: also where it raises the tokens per second; default: auto on a CPU, off "
        "on a GPU. A request may restrict it. A request with a seed gets no drafts by default.",
    )
    draft_model: Path | None = option(
        None,
        flag="--draft-model",
        env=("UMA_DRAFT_MODEL",),
        shown_default="none",
        metavar="PATH",
        since="0.1",
        help="A small GGUF model with the same vocabulary, which guesses the next tokens where no "
        "earlier text does. It is used only where the measured times of both models give more "
        "tokens per second; `uma-trio doctor --draft-model` predicts this.",
    )
