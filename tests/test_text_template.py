"""Chat templates: rendered as stock jinja2 does, continued where they are to be, and stopped where they run away."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from uma_trio.text.chat import Call, Message, Tool
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.template import ChatTemplate, Manner, NotRendered, problem_of
from uma_trio_sim.fake import CHATML

HI = [Message("user", "Hi")]


def around(content: str) -> str:
    """Return a template that writes `content` for each message, and one that is complete."""
    return "{% for m in messages %}[{{ " + content + " }}]{% endfor %}"


def rendered(source: str, messages: list[Message] = HI, **how: Any) -> str:
    """Return what a template writes."""
    return ChatTemplate(source).render(messages, **how).text


@pytest.mark.parametrize(
    "content", ["{{ messages }}", "{% raw %}", "q0q", "\x0b", "\x00", "䷀", "\\u4dc0"]
)
def test_contents_are_written_as_they_are(content: str) -> None:
    """Template code, control characters, and the characters that mark spellings."""
    assert rendered(CHATML, [Message("user", content)]) == (
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_half_a_character_is_replaced() -> None:
    """JSON may escape one; it is no text."""
    call = Call("1", "f", '{"x": "\\ud83d"}')
    source = around("m.content ~ (m.tool_calls or '')")
    written = rendered(source, [Message("user", "a\ud83d"), Message("assistant", calls=(call,))])
    assert written.startswith("[a\ufffd][")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("m.content", " \n a b \n\n "),
        ("m.content | trim", "a b"),
        ("m.content.lstrip('\\n')", " \n a b \n\n "),
        ("m.content | upper", " \n A B \n\n "),
        ("m.content[:3]", " \n "),
        ("m.content | length", "10"),
        ("'' if 'a' in m.content else 'no'", ""),
        ("['string', 'null'] | upper", "['STRING', 'NULL']"),
        ("{'a': ['é']} | tojson", '{"a": ["é"]}'),
        ("[{'a': 1}] | map(attribute='a') | tojson", "[1]"),
    ],
)
def test_a_template_sees_the_contents(code: str, expected: str) -> None:
    """It may strip, compare, cut and count them, and write what is no text."""
    assert rendered(around(code), [Message("user", " \n a b \n\n ")]) == f"[{expected}]"


def test_a_text_may_be_dropped_or_repeated() -> None:
    """As a template does it that knows no such messages."""
    source = "{% for m in messages if m.role != 'tool' %}{{ m.content * 2 }};{% endfor %}"
    assert rendered(source, [Message("user", "a"), Message("tool", "b")]) == "aa;"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[0].content | nosuchfilter }}"],
)
def test_a_template_that_cannot_be_used_is_found_out(source: str) -> None:
    """Before anybody chats."""
    with pytest.raises(Unrenderable):
        ChatTemplate(source).check()


def test_a_template_has_a_longest_length() -> None:
    """It is compiled, which takes time by its length."""
    with pytest.raises(Unrenderable, match="longer than"):
        ChatTemplate("x" * 300_000)


def test_a_template_that_goes_through_tools_without_asking_for_them_gets_none() -> None:
    """And one that asks is told that there are none at all."""
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    assert rendered(source) == "Hi"
    assert rendered("{% if tools is none %}-{% endif %}{{ messages[0].content }}") == "-Hi"


def test_the_templates_own_objection_is_passed_on() -> None:
    """What the template raises is what the client reads."""
    with pytest.raises(Unrenderable, match="not today"):
        rendered("{{ raise_exception('not today') }}")


def test_what_templates_use_is_there() -> None:
    """Loop controls, namespaces, tojson as transformers writes it, generation blocks, dates."""
    source = (
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"
        "{{ {'b': '<é>', 'a': none} | tojson }}{{ '<{}>'.format('f') }}{{ 'a' ~ 1 ~ 'b' }}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ [1, 2] | join('-') }}"
    )
    template = ChatTemplate(source, bos_text="<s>")
    written = template.render([Message("user", "x")]).text
    assert written == '<s>x1{"b": "<é>", "a": null}<f>a1b4True1-2'


def test_a_list_may_be_changed_where_a_template_insists() -> None:
    """Kimi K2's appends messages to lists of its own, which the immutable sandbox refuses."""
    source = "{% set l = [] %}{% for m in messages %}{{ l.append(m.content) or '' }}{% endfor %}{{ l | join }}"
    assert rendered(source) == "Hi"


def test_members_that_templates_read_without_a_look_are_there() -> None:
    """Only where the template would raise: else a tool is written as the client wrote it."""
    reads = "{% for t in tools %}{{ t.function.name + t.function.description }}{% for k in t.function.parameters.properties.keys() %}{% endfor %}{% endfor %}"
    assert rendered(reads, tools=[Tool("f")]) == "f"
    writes = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}"
    assert rendered(writes, tools=[Tool("f")]) == '{"name": "f"}'


BOMBS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "times": "{{ 'a' * 10**10 }}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "include": "{% include '/etc/passwd' %}",
    "deep": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_template_that_runs_away_is_stopped_and_others_are_rendered(bomb: str) -> None:
    """Neither time nor memory runs out, whatever a model file brings; the next prompt has another process."""
    with pytest.raises(Unrenderable) as caught:
        ChatTemplate(bomb + "{{ messages[0].content }}").check()
    assert not isinstance(caught.value, NotRendered)
    assert rendered(around("m.content")) == "[Hi]"


def test_a_long_conversation_has_more_time() -> None:
    """A template that looks at all messages for each one takes time by the square of their number."""
    source = "{% for m in messages %}{% for n in messages %}{% for k in range(99) %}{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"
    assert len(rendered(source, HI * 600)) == 2 * 600


def test_a_final_message_is_continued_where_it_ends() -> None:
    """Nothing of the template follows it: neither its end marker nor the next turn's beginning."""
    chat = [Message("user", "Count."), Message("assistant", "One, two,")]
    written = rendered(CHATML, chat, manner=Manner(continue_final=True))
    assert written == "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two,"


@pytest.mark.parametrize(
    ("code", "expected"), [("m.content", "[ One, "), ("m.content | trim", "[One,")]
)
def test_a_continued_message_is_stripped_as_the_template_does(code: str, expected: str) -> None:
    """Its end is where the template would have gone on."""
    chat = [Message("assistant", " One, ")]
    assert rendered(around(code), chat, manner=Manner(continue_final=True)) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [Message("user", "Hi")],
        [Message("assistant", "x"), Message("user", "Hi")],
        [Message("assistant", " ")],
        [Message("assistant", "x", calls=(Call("c", "f", "{}"),))],
    ],
)
def test_only_an_answer_that_was_begun_can_be_continued(messages: list[Message]) -> None:
    """Another speaker's message, or none, is refused with a sentence."""
    with pytest.raises(Unrenderable, match="must be the assistant's, not empty and without calls"):
        rendered(CHATML, messages, manner=Manner(continue_final=True))


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    """The answer would begin somewhere else."""
    with pytest.raises(Unrenderable, match="does not write the message"):
        rendered(
            "{{ messages[0].content }}",
            [*HI, Message("assistant", "b")],
            manner=Manner(continue_final=True),
        )


def test_arguments_are_variables_of_the_template() -> None:
    """Of any JSON type; a template that does not know them is not disturbed."""
    source = around("m.content") + "{{ effort if deep else 'no' }}{{ levels | d([]) | last }}"
    manner = Manner(arguments={"effort": "high", "deep": True, "levels": [1, 2], "unknown": None})
    template = ChatTemplate(source)
    assert template.render([Message("user", "x")], manner).text == "[x]high2"


def test_a_template_is_told_the_date_if_it_names_it() -> None:
    """As Llama 3's do, and FireFunction's; a request may say another one."""
    source = around("m.content") + "{% if date_string is not defined %}26 Jul 2024{% endif %}"
    source += "{{ date_string }}, {{ datetime }}"
    template = ChatTemplate(source, now=lambda: datetime(2026, 3, 4, 5, 6))
    asked = [Message("user", "x")]
    assert template.render(asked).text == "[x]04 Mar 2026, Mar 04 2026"
    told = Manner(arguments={"date_string": "today"})
    assert template.render(asked, told).text == "[x]today, Mar 04 2026"


def test_functions_are_written_out_without_looking_whether_there_are_any() -> None:
    """As FireFunction does: without tools it gets no text, and not an error."""
    template = ChatTemplate(around("m.content") + "{{ 'Spec: ' + functions + '.' }}")
    asked = [Message("user", "x")]
    assert template.render(asked).text == "[x]Spec: ."
    assert '"name": "greet"' in template.render(asked, tools=[Tool("greet")]).text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ functions }}", '"description": "Say \\"hi\\"."'),
        ("{{ functions | tojson }}", '"description": "Say \\"hi\\"."'),
        ("{% for f in functions %}{{ f.description }}{% endfor %}", 'Say "hi".'),
    ],
)
def test_tools_are_functions_where_a_template_calls_them_so(written: str, expected: str) -> None:
    """Written out as JSON, or one by one; nobody's words become the template's own."""
    template = ChatTemplate(around("m.content") + f"{{% if functions %}}{written}{{% endif %}}")
    tool = Tool("greet", 'Say "hi".', {"type": "object", "properties": {}})
    assert expected in template.render([Message("user", "x")], tools=[tool]).text


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"a b": 1},
        {"": 1},
        {"x" * 65: 1},
    ],
    ids=str,
)
def test_arguments_that_are_the_daemons_are_refused(arguments: dict[str, object]) -> None:
    """So are names that are none."""
    assert problem_of(arguments) is not None


def test_a_prompt_says_what_was_changed_for_the_template() -> None:
    """The unchanged conversation is tried first."""
    source = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{{ m.content }};{% endfor %}"
    template = ChatTemplate(source)
    unchanged = template.render([Message("system", "a"), *HI])
    assert (unchanged.text, unchanged.reshaped) == ("a;Hi;", ())
    changed = template.render([*HI, Message("system", "a")])
    assert (changed.text, changed.reshaped) == ("Hi;a;", ("system-to-user",))


_PYTHON_TYPES = """
{%- macro type(s) -%}
{%- if s.type in ['string', 'integer', 'number', 'boolean'] -%}{{ s.type }}
{%- elif s.type == 'array' -%}list[{{ type(s['items']) }}]
{%- elif s.type == 'object' -%}dict[{{ type(s.additionalProperties) }}]
{%- else -%}{%- for t in s.type -%}{{ type({'type': t}) }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools -%}{{ tool.function.name + ': ' + tool.function.description }}
{%- for name, s in tool.function.parameters.properties.items() %} {{ name }}={{ type(s) }}{% endfor -%}
{%- endfor -%}
{%- if messages[0].role == 'assistant' -%}{{ raise_exception('no user') }}{%- endif -%}
"""


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": ["null", "string"]}, "string"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "integer"}]}},
            "list[integer]",
        ),
        ({"type": "array"}, "list[string]"),
        ({"type": "object", "additionalProperties": False}, "dict[string]"),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "number"}}, "dict[number]"),
        ({"$ref": "#/$defs/x", "anyOf": 3, "required": True}, "string"),
        (True, "string"),
    ],
)
def test_schemas_are_simple_where_a_template_follows_them_without_an_end(
    schema: Any, expected: str
) -> None:
    """As Command R+'s and Hermes' do for types that they do not know."""
    tool = Tool("f", "", {"properties": {"x": schema, "y": {"type": "any"}}})
    prompt = ChatTemplate(_PYTHON_TYPES).render(HI, tools=[tool])
    assert prompt.text == f"f:  x={expected} y=string"
    assert prompt.reshaped == ("simplified-tools",)


def test_tools_are_not_changed_for_what_a_template_refuses_in_messages() -> None:
    tool = Tool("f", "", {"properties": {"x": {"type": "string"}}})
    template = ChatTemplate(
        "{{ tools | tojson }}{% if messages[0].role == 'assistant' %}{{ raise_exception('') }}{% endif %}"
    )
    prompt = template.render([Message("assistant", "Hi")], tools=[tool])
    assert prompt.reshaped == ("empty-user",)
    assert "description" not in prompt.text


def test_a_function_is_shown_as_the_client_wrote_it() -> None:
    """Members that the daemon does not know, and empty ones, too, in their order; completed only where it must be."""
    function = {"parameters": {}, "name": "f", "strict": True, "description": None, "returns": []}
    tool = Tool("f", "", {}, strict=True, written=function)
    writes = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}"
    assert rendered(writes, tools=[tool]) == (
        '{"parameters": {}, "name": "f", "strict": true, "description": null, "returns": []}'
    )
    prompt = ChatTemplate(
        "{% for t in tools %}{{ t.function.description + t.function.name }}{% endfor %}"
    ).render(HI, tools=[tool])
    assert (prompt.text, prompt.reshaped) == ("f", ("completed-tools",))
