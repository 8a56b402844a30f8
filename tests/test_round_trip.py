"""What a model answers can be sent back, and what agents send is rendered, by every template of llama.cpp's archive."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from reply_kit import chatml
from template_kit import archived_templates

from uma_trio.text.chat import AUTO, Call, Message, Tool
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.replies.format import GENERIC_CALLS, ReplyFormat
from uma_trio_sim.fake import FakeVocabulary

TOOLS = [
    Tool("look", "Look.", {"type": "object", "properties": {"what": {"type": ["string", "null"]}}}),
    Tool("stop"),
]
TEMPLATES = [pytest.param(path, id=path.stem) for path in archived_templates()]


def generated(seed: int) -> list[Message]:
    """Return a conversation as agents send them: with calls that were cut, and roles in any order."""
    chance = random.Random(seed)
    chat: list[Message] = []
    for n in range(chance.randint(1, 8)):
        kind = chance.choice(("system", "user", "user", "assistant", "calls", "calls"))
        text = chance.choice(("", "Some text.", " a\n", "{}", "é 😀"))
        if kind == "calls":
            arguments = (
                '{"what": "it"}',
                "",
                '{"what": "i',
                "[1]",
                "null",
                '{"what": {"a": [1, null]}}',
            )
            calls = tuple(
                Call(f"call{n}{m}", chance.choice(("look", "stop")), chance.choice(arguments))
                for m in range(chance.randint(1, 3))
            )
            thought = chance.choice(("", "Hm."))
            chat.append(Message("assistant", text, calls, reasoning=thought))
            chat += [Message("tool", json.dumps({"n": n}), call_id=call.id) for call in calls]
        else:
            chat.append(Message(kind, text or "x" if kind == "user" else text))
    if chat[-1].role == "assistant":
        chat.append(Message("user", "And?"))
    return chat


@pytest.mark.parametrize("path", TEMPLATES)
def test_every_answer_can_be_sent_back(path: Path) -> None:
    """With thoughts, text, no, one or two calls, and with a call that was cut."""
    found, _, problem = FrontEnd(FakeVocabulary(), path.read_text()).finding.get()
    assert (problem, found.refused) == (None, ())


@pytest.mark.parametrize("path", TEMPLATES)
def test_generated_conversations_are_rendered(path: Path) -> None:
    """Whatever their roles are, and their calls."""
    front = FrontEnd(FakeVocabulary(), path.read_text())
    for seed in range(12):
        chat = generated(seed)
        assert front.prompt(chat, tools=TOOLS if seed % 3 else ()).text, chat


ONE_CALL = chatml(
    "{{ m.content }}{% for c in m.tool_calls or [] %}{% if not loop.first %}{{ raise_exception('one call') }}{% endif %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>{% endfor %}'
)


@pytest.mark.parametrize(
    ("call", "takes"),
    [
        ("{{ c.function.arguments.items() | list }}", True),  # not where the arguments were cut
        ("{{ c.function.arguments if c.function.arguments is mapping else '' }}", True),
        ("{{ c.function.arguments if loop.first else '' }}", False),
        ("{{ c.function.arguments if loop.first else raise_exception('one call') }}", False),
    ],
)
def test_calls_are_parallel_where_a_template_writes_two(call: str, takes: bool) -> None:
    source = chatml("{{ m.content }}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}")
    made = ReplyFormat("file", "file", calls=GENERIC_CALLS)
    found, _, _ = FrontEnd(FakeVocabulary(), source, made).finding.get()
    assert (found.takes_parallel_calls, found.refused) == (takes, ())


def test_a_template_that_takes_one_call_has_answers_of_one() -> None:
    """As with parallel_tool_calls false; two that a client sends become two messages."""
    front = FrontEnd(FakeVocabulary(), ONE_CALL)
    found, _, _ = front.finding.get()
    assert (found.takes_parallel_calls, found.refused) == (False, ())
    grammarian = front.grammarian
    loosened = front.replies.loosened(grammarian, TOOLS, AUTO)
    constraint = front.replies.constraint(grammarian, None, loosened, AUTO, None, thinking=False)
    assert constraint is not None
    call = '<call>{"name": "stop", "arguments": {}}</call>'
    for byte in call.encode():
        assert constraint.allows(byte)
        constraint.accept(byte)
    assert not constraint.allows(ord("<"))
    calls = (Call("1", "stop", "{}"), Call("2", "stop", "{}"))
    prompt = front.prompt([Message("user", "a"), Message("assistant", calls=calls)])
    assert prompt.reshaped == ("split-calls",)
