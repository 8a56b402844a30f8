"""The option about what a model writes."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from uma_trio.config.option import option


@frozen(kw_only=True)
class ReplyConfig:
    """How the model's replies are read."""

    reply_format: Path | None = option(
        None,
        flag="--reply-format",
        yaml=("model.reply_format",),
        shown_default="derived from the model's template",
        metavar="FILE",
        since="0.1",
        help="A JSON file with the model's format of tool calls and reasoning, if the format cannot "
        "be derived. `uma-trio doctor --template` prints the derived one.",
    )
