# ruff: noqa: RUF001 - DeepSeek writes its markers with wide bars
"""Formats of model families whose templates do not show them, or not wholly."""

from __future__ import annotations

from typing import Final, Literal

from attrs import evolve, frozen

from uma_trio.text.replies.derive import Derived
from uma_trio.text.replies.format import GENERIC_CALLS, CallSyntax, ReplyFormat, Thought
from uma_trio.text.replies.framed import CHANNEL_THOUGHT

Ids = Literal["any", "nine", "numbered"]


@frozen
class Family:
    """A family, recognised by `marks`. `thought`: markers of reasoning in framed replies."""

    name: str
    marks: tuple[str, ...]
    calls: CallSyntax
    ids: Ids = "any"
    thought: Thought | None = None


_MISTRAL: Final = CallSyntax(style="named", open="[TOOL_CALLS]", after_name="[ARGS]")

_PYTHON: Final = CallSyntax(
    style="literal",
    section_open="[",
    section_close="]",
    between=", ",
    after_name="(",
    key_close="=",
    quote='"',
)
_LFM: Final = evolve(
    _PYTHON, section_open="<|tool_call_start|>[", section_close="]<|tool_call_end|>"
)
FAMILIES: Final = (
    Family("harmony", ("<|channel|>", "<|message|>", "<|start|>"), CallSyntax(style="harmony")),
    Family(
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|sep|>", "'call'"),
        CallSyntax(style="channels"),
        thought=CHANNEL_THOUGHT,
    ),
    Family(
        "muse",
        ("<|start|>assistant", " to=self<|message|>", "<atem:invoke"),
        CallSyntax(
            style="tagged",
            open='<atem:function_calls>\n<atem:invoke name="',
            after_name='">\n',
            key_open='<atem:parameter name="',
            key_close='">',
            value_close="</atem:parameter>\n",
            close="</atem:invoke>\n</atem:function_calls>",
            between="<|eom|><|start|>assistant",
            message_open="<|start|>assistant",
            text_header=" to=user<|message|>",
            call_header=" to={}<|message|>",
            thought_header=" to=self<|message|>",
            message_ends="<|eom|> <|eot|>",
        ),
        thought=Thought(" to=self<|message|>", "<|eom|>"),
    ),
    Family(
        "solar",
        ("<|begin|>assistant", "<|think|>", "<|tool_call:begin|>"),
        CallSyntax(
            style="named",
            open="<|tool_call:begin|>",
            id_close="<|tool_call:name|>",
            after_name="<|tool_call:args|>",
            close="<|tool_call:end|>",
            message_open="<|begin|>assistant",
            text_header="<|content|>",
            call_header="<|tool_calls|>",
            message_ends="<|end|> <|calls|>",
        ),
        thought=Thought("<|think|>", "<|end|>"),
    ),
    Family(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        CallSyntax(
            style="named",
            section_open="<|tool_calls_section_begin|>",
            section_close="<|tool_calls_section_end|>",
            open="<|tool_call_begin|>",
            after_name="<|tool_call_argument_begin|>",
            close="<|tool_call_end|>",
            name_in_id=True,
        ),
        "numbered",
    ),
    Family("mistral", ("[TOOL_CALLS]", "[CALL_ID]"), evolve(_MISTRAL, id_open="[CALL_ID]"), "nine"),
    Family("mistral", ("[TOOL_CALLS]", "[ARGS]"), _MISTRAL, "nine"),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        CallSyntax(section_open="[TOOL_CALLS][", section_close="]", between=", ", id_key="id"),
        "nine",
    ),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>",),
        CallSyntax(
            style="named",
            section_open="<｜tool▁calls▁begin｜>",
            section_close="<｜tool▁calls▁end｜>",
            between="\n",
            open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after_name="\n```json\n",
            close="\n```<｜tool▁call▁end｜>",
        ),
    ),
    Family(
        "qwen-xml",
        ("<function=", "<parameter="),
        CallSyntax(
            style="tagged",
            open="<tool_call>\n<function=",
            after_name=">\n",
            key_open="<parameter=",
            key_close=">\n",
            value_close="\n</parameter>\n",
            close="</function>\n</tool_call>",
            between="\n",
        ),
    ),
    Family(
        "minimax-m3",
        ("']<]minimax[>['",),
        CallSyntax(
            style="tagged",
            section_open="]<]minimax[>[<tool_call>\n",
            section_close="]<]minimax[>[</tool_call>",
            open=']<]minimax[>[<invoke name="',
            after_name='">',
            key_open="]<]minimax[>[<",
            key_close=">",
            value_close="]<]minimax[>[</{}>",
            close="]<]minimax[>[</invoke>\n",
        ),
    ),
    Family(
        "gemma",
        ("<|tool_call>call:",),
        CallSyntax(
            style="literal",
            open="<|tool_call>call:",
            after_name="{",
            key_close=":",
            quote='<|"|>',
            close="<tool_call|>",
        ),
    ),
    Family(
        "functiongemma",
        ("<start_function_call>",),
        CallSyntax(
            style="literal",
            open="<start_function_call>call:",
            after_name="{",
            key_close=":",
            quote="<escape>",
            close="<end_function_call>",
        ),
    ),
    Family("lfm", ("<|tool_call_start|>",), _LFM),
    Family("lfm", ("<|tool_list_start|>",), _LFM),
    Family("lfm", ("List of tools: [",), _LFM),
    Family(
        "granite",
        ("available_tools", "<|tool_call|>"),
        CallSyntax(section_open="<|tool_call|>[", section_close="]", between=", "),
    ),
    Family("pythonic", ("[func_name1(params_name1=",), evolve(_PYTHON, bare=True)),
    Family("llama", ("<|python_tag|>",), CallSyntax(arguments_key="parameters", bare=True)),
    Family("hermes", ("<tool_call>", "<function-name>"), GENERIC_CALLS),
)


def format_of(derived: Derived, source: str) -> tuple[ReplyFormat, Ids]:
    """Return a model's format (its template's, its family's, or a generic one) and the ids it expects."""
    family = next((f for f in FAMILIES if all(mark in source for mark in f.marks)), None)
    if family is not None and family.calls.framed:
        return ReplyFormat(family.name, "built in", family.thought, family.calls), family.ids
    if derived.calls is not None:
        return ReplyFormat("derived", "derived", derived.thought, derived.calls), derived.habits.ids
    if family is not None:
        return ReplyFormat(family.name, "built in", derived.thought, family.calls), family.ids
    return ReplyFormat("generic", "generic", derived.thought, GENERIC_CALLS), "any"
