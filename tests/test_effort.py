"""Whether and how much a model reasons: what its template is told, found out by rendering."""

from __future__ import annotations

from typing import Any

import pytest
from http_kit import http_house
from net_kit import TICK_S
from reply_kit import PREFILLED_TEMPLATE, chatml
from trio.testing import MockClock

from uma_trio.text.chat import Message
from uma_trio.text.frontend import FrontEnd
from uma_trio.text.template import Manner
from uma_trio_sim.fake import FakeVocabulary, linear_cost
from uma_trio_sim.scripted import ScriptedBackend

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n$</think>{% endif %}"


def written(manner: Manner, source: str) -> str:
    """Return what a template writes behind the start of the answer, without the marker it ends with."""
    front = FrontEnd(FakeVocabulary(), source)
    prompt = front.render([Message("user", "x")], manner)
    return prompt.rpartition("<|im_start|>assistant\n")[2].removesuffix("</think>")


def template(written_behind: str) -> str:
    """Return a template that writes this behind the start of an answer."""
    return chatml("{{ m.content }}", prompt=_PROMPT.replace("$", written_behind))


OFF_UNLESS_TOLD = template("{{ 'on' if enable_thinking | default(false) else 'off' }}")
OFF_BY_ANOTHER_NAME = template(
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ 'on' if thinking else 'off' }}"
)
ON_UNLESS_TOLD = template(
    "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }}"
)
WORDS = template("{{ reasoning_effort or '-' }}")
TWO_WORDS = template(
    "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('no') }}{% endif %}{{ reasoning_effort or '-' }}"
)
ANOTHER_MEASURE = template(
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking and thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}"
    "{{ raise_exception('no') }}{% endif %}{{ thinking }} {{ thinking_effort if thinking else '' }}"
)
OTHER_WORDS = template(
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}{% endif %}"
    "{{ reasoning_effort }}"
)
MODES = template("{{ thinking_mode or 'adaptive' }}")
BUDGETS = template("{{ 'off' if thinking_budget == 0 else 'on' }}")
COMMAND_A = template("{{ 'off' if reasoning is defined and not reasoning else 'on' }}")
HARMONY = chatml(
    "{{ m.content }}", prompt=_PROMPT.replace("$", "{{ reasoning_effort | d('medium') }}")
) + ("{# <|channel|><|message|><|start|> #}")


@pytest.mark.parametrize(
    ("source", "manner", "expected"),
    [
        (OFF_UNLESS_TOLD, Manner(), "off"),
        (OFF_UNLESS_TOLD, Manner(effort="low"), "on"),
        (OFF_UNLESS_TOLD, Manner(thinks=True), "on"),
        (OFF_UNLESS_TOLD, Manner(effort="none"), "off"),
        (OFF_UNLESS_TOLD, Manner(effort="low", arguments={"enable_thinking": False}), "off"),
        (OFF_BY_ANOTHER_NAME, Manner(), "off"),
        (OFF_BY_ANOTHER_NAME, Manner(effort="high"), "on"),
        (ON_UNLESS_TOLD, Manner(), "on"),
        (ON_UNLESS_TOLD, Manner(effort="low"), "on"),
        (ON_UNLESS_TOLD, Manner(effort="none"), "off"),
        (ON_UNLESS_TOLD, Manner(thinks=False), "off"),
        (WORDS, Manner(), "-"),
        (WORDS, Manner(effort="xhigh"), "xhigh"),
        (WORDS, Manner(effort="none"), "none"),
        (WORDS, Manner(effort="low", arguments={"reasoning_effort": "max"}), "max"),
        (TWO_WORDS, Manner(effort="low"), "high"),
        (TWO_WORDS, Manner(effort="none"), "none"),
        (ANOTHER_MEASURE, Manner(effort="xhigh"), "True max"),
        (ANOTHER_MEASURE, Manner(effort="minimal"), "True low"),
        (ANOTHER_MEASURE, Manner(effort="none"), "False "),
        (OTHER_WORDS, Manner(effort="none"), "no_think"),
        (OTHER_WORDS, Manner(thinks=False), "no_think"),
        (OTHER_WORDS, Manner(effort="minimal"), "low"),
        (MODES, Manner(), "adaptive"),
        (MODES, Manner(effort="low"), "enabled"),
        (MODES, Manner(thinks=False), "disabled"),
        (MODES, Manner(effort="low", arguments={"thinking_mode": "disabled"}), "disabled"),
        (BUDGETS, Manner(effort="low"), "on"),
        (BUDGETS, Manner(effort="none"), "off"),
        (BUDGETS, Manner(effort="none", arguments={"thinking_budget": 512}), "on"),
        (COMMAND_A, Manner(effort="none"), "off"),
        (HARMONY, Manner(effort="minimal"), "low"),
        (HARMONY, Manner(effort="none"), "low"),
        (HARMONY, Manner(effort="xhigh"), "high"),
    ],
)
def test_a_template_is_told_what_it_understands(source: str, manner: Manner, expected: str) -> None:
    """By its own name, and the word of its own that comes nearest; what is told outright goes first."""
    assert written(manner, source) == expected


@pytest.mark.parametrize(
    ("source", "switches", "by_default"),
    [
        (OFF_UNLESS_TOLD, ("enable_thinking",), False),
        (OFF_BY_ANOTHER_NAME, ("thinking",), False),
        (ON_UNLESS_TOLD, ("enable_thinking",), True),
        (WORDS, (), None),
    ],
)
def test_what_nothing_said_means_is_found_out(
    source: str, switches: tuple[str, ...], by_default: bool | None
) -> None:
    """Templates differ in it."""
    efforts = FrontEnd(FakeVocabulary(), source).replies.found.efforts
    assert (efforts.switches, efforts.by_default) == (switches, by_default)


@pytest.mark.parametrize(
    ("source", "reasons", "expected"),
    [
        (OFF_UNLESS_TOLD, True, "on"),
        (OFF_BY_ANOTHER_NAME, True, "on"),
        (ON_UNLESS_TOLD, True, "on"),
        (WORDS, True, "-"),
        (OFF_UNLESS_TOLD, False, "off"),
        (ON_UNLESS_TOLD, False, "off"),
        (WORDS, False, "none"),
        (OFF_UNLESS_TOLD, None, "off"),
        (ON_UNLESS_TOLD, None, "on"),
    ],
)
def test_the_operator_says_what_holds_where_a_request_says_nothing(
    source: str, reasons: bool | None, expected: str
) -> None:
    """The template itself if the operator leaves it to that; a request always goes first."""
    front = FrontEnd(FakeVocabulary(), source, reasons=reasons)

    def end(manner: Manner) -> str:
        return front.render([Message("user", "x")], manner).rpartition("assistant\n")[2]

    assert end(Manner()) == f"{expected}</think>"
    if reasons is not None and source != WORDS:
        assert end(Manner(thinks=not reasons)) == f"{'off' if reasons else 'on'}</think>"


@pytest.mark.parametrize(
    ("manner", "thinking", "end"),
    [
        (Manner(), True, "assistant\n<think>\n"),
        (Manner(effort="low"), True, "assistant\n<think>\n"),
        (Manner(effort="none"), False, "assistant\n<think>\n\n</think>\n\n"),
        (Manner(arguments={"enable_thinking": False}), True, "assistant\n<think>\n"),
    ],
)
def test_reasoning_that_a_template_always_opens_is_closed_where_none_is_wanted(
    manner: Manner, thinking: bool, end: str
) -> None:
    """As QwQ's and R1's do: an empty thought keeps a model from reasoning."""
    front = FrontEnd(FakeVocabulary(), PREFILLED_TEMPLATE)
    asked = [Message("user", "x")]
    assert front.render(asked, manner).endswith(end)
    assert front.prepare_chat(asked, manner, ())[1] is thinking


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WITH = "on, of course: how does it end? "  # as long as nothing else


@pytest.mark.parametrize(
    ("path", "fields", "reasons"),
    [
        ("/v1/chat/completions", {}, False),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, True),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, False),
        ("/v1/responses", {}, False),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, True),
        ("/v1/messages", {}, False),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 64}}, True),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, True),
        ("/v1/messages", {"output_config": {"effort": "low"}}, True),
        (
            "/v1/messages",
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            False,
        ),
    ],
)
async def test_every_api_turns_reasoning_on_where_a_template_has_it_off(
    autojump_clock: MockClock, path: str, fields: dict[str, Any], reasons: bool
) -> None:
    """The length of the prompt tells which of the two the template wrote."""
    backend = ScriptedBackend(
        [list(b"So.")],
        n_ctx=4096,
        n_batch=512,
        chat_template=OFF_UNLESS_TOLD.replace("'on'", f"'{WITH}'"),
        cost=linear_cost(TICK_S, 0.0),
    )
    body = {**({"input": "hi"} if path.endswith("responses") else BODY), **fields, "temperature": 0}
    async with http_house(backend=backend) as daemon:
        told = (await daemon.ask("POST", path, body)).json["usage"]
        plain = (await daemon.ask("POST", "/v1/chat/completions", BODY)).json["usage"]
        n_prompt = told.get("prompt_tokens", told.get("input_tokens"))
        assert n_prompt - plain["prompt_tokens"] == reasons * (len(WITH) - len("off"))
