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
        help="Guess the next tokens of an answer from the text before it and check them together "
        "(deadline policy): off, free (only where a tick takes no longer), or auto (also "
        "where that gives more tokens a second); default is auto on a CPU, off on a GPU. A request may "
        "ask for less. It changes no answer.",
    )
    draft_model: Path | None = option(
        None,
        flag="--draft-model",
        env=("UMA_DRAFT_MODEL",),
        shown_default="none",
        metavar="PATH",
        since="0.1",
        help="A small GGUF model with the same vocabulary, which guesses the next tokens where nothing in the "
        "text does. It is asked only where that gives more tokens a second, by what both were measured "
        "to take; `uma-trio doctor --draft-model` says whether it would. It changes no answer.",
    )
