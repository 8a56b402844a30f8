"""`uma-trio doctor --template`: what is derived from a model's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from uma_trio.cli.output import OK, USAGE, complain, console, print_json
from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.derivation import Derivation
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.replies import collect
from uma_trio.text.replies.format import document_of
from uma_trio.text.replies.parser import ReplyParser
from uma_trio.text.template import ChatTemplate

_KEY: Final = "tokenizer.chat_template"
_TOOL: Final = Tool(
    "get_weather",
    "Return the weather of a place.",
    {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
)
_ASKED: Final = Message("user", "How is the weather in Oslo?")
_CALLED: Final = Message(
    "assistant", calls=(Call("c00000001", "get_weather", '{"place": "Oslo"}'),)
)


def show_template(path: Path, *, as_json: bool) -> int:
    """Describe the template in a GGUF file, or in a file of its own."""
    try:
        source = _source_of(path)
    except (OSError, ValueError) as error:
        complain(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
        return USAGE
    found = about(source)
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            console().print(f"{name}: {_shown(value)}", markup=False, soft_wrap=True)
    return OK if found["usable"] is True else USAGE


def _shown(value: object) -> str:
    """Return a value for a reader; a record is JSON, as `--reply-format` takes it from a file."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def about(source: str) -> dict[str, Any]:
    """Return what was derived from a template."""
    try:
        template = ChatTemplate(source)
        template.check()
    except Unrenderable as error:
        return {"usable": f"no: {error}"}
    found = Derivation.of(template, source)
    rendered = _rendered(template, found)
    return {
        "usable": True,
        "reply_format": document_of(found.format),
        "found": found.format.source,
        "tells_tools": found.renders_tools,
        "arguments": "as text" if found.habits.arguments_as_text else "as an object",
        "ids": found.habits.ids,
        "reasoning_of_earlier_turns": found.habits.reasoning_key or "left out",
        "reasoning_is_turned_on_by": ", ".join(found.efforts.switches) or "nothing",
        "reasoning_by_default": _by_default(found),
        "words_for_effort": found.efforts.words,
        "parallel_calls": found.takes_parallel_calls,
        "answers_refused": list(found.refused),
        "rendered_call": rendered,
        "read_back": _read_back(found, rendered),
    }


def _by_default(found: Derivation) -> str:
    """Return what the template does about reasoning where a request says nothing."""
    if found.efforts.by_default is None:
        return "up to the model"
    return "on" if found.efforts.by_default else "off, unless serve --reasoning says on"


def _rendered(template: ChatTemplate, found: Derivation) -> str:
    try:
        return template.render(
            [_ASKED, _CALLED], tools=[_TOOL], habits=found.habits, prompts=False
        ).text
    except Unrenderable as error:
        return f"refused: {error}"


def _read_back(found: Derivation, rendered: str) -> bool:
    """Whether the parser finds the call in what the template wrote."""
    calls = found.format.calls
    start = "" if calls is None else calls.start.strip()
    at = rendered.rfind(start or '{"name"')
    parser = ReplyParser(found.format, tools=[_TOOL])
    read = collect([*parser.feed(rendered[max(0, at) :]), *parser.finish()])
    return [call.name for call in read.calls] == [_TOOL.name]


def _source_of(path: Path) -> str:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        return path.read_text(encoding="utf-8")
    from uma_trio.backend.gguf_header import read_header

    source = read_header(path).metadata.get(_KEY)
    if not isinstance(source, str):
        raise ValueError("the model has no chat template")
    return source
