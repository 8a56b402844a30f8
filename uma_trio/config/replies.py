"""The options about what clients call the model, what it is told, and what it writes."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from uma_trio.config.encoders import EncoderConfig
from uma_trio.config.option import option

MAX_ALIAS = 256


def _aliases(raw: object) -> tuple[str, ...]:
    """Read names: of repeated flags, of a list in YAML, or of one text with commas."""
    given = raw if isinstance(raw, list | tuple) else [raw]
    if not all(isinstance(each, str | int | float) for each in given):
        raise ValueError("a name, or a list of names")
    names = [name.strip() for each in given for name in str(each).split(",")]
    if not all(0 < len(name) <= MAX_ALIAS and name.isprintable() for name in names):
        raise ValueError(f"a name of 1 to {MAX_ALIAS} printable characters")
    return tuple(dict.fromkeys(names))


@frozen(kw_only=True)
class ReplyConfig(EncoderConfig):
    """What the model is called, how it is told of a conversation, and how its replies are read."""

    alias: tuple[str, ...] = option(
        (),
        flag="--alias",
        read=_aliases,
        shown_default="the name of the model's file",
        metavar="NAME",
        since="0.1",
        help="A name that requests may call the model by, besides that of its file; may be given "
        "several times, or with commas. Answers that repeat no name of the request, and "
        "/v1/models, use the first.",
    )
    chat_template_file: Path | None = option(
        None,
        flag="--chat-template-file",
        shown_default="the template in the model's file",
        metavar="FILE",
        since="0.1",
        help="A file with the Jinja template that chats are rendered by, instead of the model's own. "
        "`uma-trio doctor --template FILE` tells about it.",
    )
    reasoning: str = option(
        "on",
        flag="--reasoning",
        choices=("on", "off", "template"),
        since="0.1",
        help="Whether the model reasons where a request says nothing of it, if its chat template can "
        "be told; template leaves it to the template.",
    )
    reply_format: Path | None = option(
        None,
        flag="--reply-format",
        shown_default="derived from the model's template",
        metavar="FILE",
        since="0.1",
        help="A JSON file with the model's format of tool calls and reasoning, if the format cannot "
        "be derived. `uma-trio doctor --template` prints the derived one.",
    )
