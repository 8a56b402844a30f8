"""Prompts are those of stock jinja2, configured as transformers configures it, for every template of llama.cpp's archive."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from template_kit import archived_templates

from uma_trio.text.chat import Message
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.template import ChatTemplate

BOS, EOS = "<bos>", "<eos>"
TEMPLATES = [pytest.param(path, id=path.stem) for path in archived_templates()]
CONVERSATIONS = [
    [Message("user", "Hello")],
    [Message("system", "Be brief."), Message("user", "  Hello\n")],
    [Message("user", "Hello"), Message("assistant", "\nHi 😀 "), Message("user", "<b>&'\"</b>")],
    [Message("user", "{{ 1 }} {% x %}\n\n"), Message("assistant", "a"), Message("user", "\tb")],
    [Message("user", f"{n}") if n % 2 == 0 else Message("assistant", f"{n}") for n in range(21)],
]


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def stock(source: str, chat: list[Message]) -> str:
    """Render as transformers does (utils/chat_template_utils.py). Raises what a template raises."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return env.from_string(source).render(
        messages=[{"role": each.role, "content": each.content} for each in chat],
        add_generation_prompt=True,
        bos_token=BOS,
        eos_token=EOS,
        tools=None,
        documents=None,
        **({"date_string": datetime.now().strftime("%d %b %Y")} if "date_string" in source else {}),
    )


@pytest.mark.parametrize("path", TEMPLATES)
def test_a_prompt_is_that_of_stock_jinja2(path: Path) -> None:
    source = path.read_text()
    template = ChatTemplate(source, bos_text=BOS, eos_text=EOS)
    for chat in CONVERSATIONS:
        try:
            want = stock(source, chat)
        except (TemplateError, TypeError):
            continue  # then it is reshaped, or refused
        try:
            found = template.render(chat)
        except Unrenderable as error:
            pytest.fail(f"refused: {error}")
        assert found.text == want
        assert not found.reshaped
