"""Replies with calls as many model families write them, to be cut off anywhere.

Each holds text or reasoning, and calls whose arguments look whole before they are: a path that ends a
shorter command, several arguments, a call without any.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen
from reply_kit import FORMATS, HERMES, THINK, TYPED, XML

from uma_trio.text.replies import ReplyFormat
from uma_trio.text.replies.format import CallSyntax, Thought
from uma_trio.text.replies.framed import CHANNEL_THOUGHT

COMMAND: Final = '{"command": "rm -rf /tmp/build.sh", "timeout": 3}'
STOP: Final = "{}"


@frozen
class Reply:
    """A reply in a format, with what it says: its content, its reasoning, its calls."""

    format: ReplyFormat
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = (("bash", COMMAND), ("stop", STOP))
    thinking: bool = False


GLM: Final = CallSyntax(
    style="tagged",
    open="<tool_call>",
    after_name="\n",
    key_open="<arg_key>",
    key_close="</arg_key>\n<arg_value>",
    value_close="</arg_value>\n",
    close="</tool_call>",
    between="\n",
)
_D: Final = "｜DSML｜"  # noqa: RUF001 - DeepSeek writes its markers with wide bars
DSML: Final = CallSyntax(
    style="tagged",
    section_open=f"<{_D}function_calls>\n",
    section_close=f"</{_D}function_calls>",
    open=f'<{_D}invoke name="',
    after_name='">\n',
    key_open=f'<{_D}parameter name="',
    key_close='" string="true">',
    key_close_json='" string="false">',
    value_close=f"</{_D}parameter>\n",
    close=f"</{_D}invoke>\n",
)
MINIMAX: Final = CallSyntax(
    style="tagged",
    section_open="<minimax:tool_call>\n",
    section_close="</minimax:tool_call>",
    open='<invoke name="',
    after_name='">\n',
    key_open='<parameter name="',
    key_close='">',
    value_close="</parameter>\n",
    close="</invoke>\n",
)
COMMAND_R: Final = CallSyntax(
    section_open="<|START_ACTION|>[",
    section_close="]<|END_ACTION|>",
    between=",",
    name_key="tool_name",
    arguments_key="parameters",
    id_key="tool_call_id",
)
CHANNEL: Final = Thought("<|channel>thought", "<channel|>")
_XML_CALLS: Final = (
    "<tool_call>\n<function=bash>\n<parameter=command>\nrm -rf /tmp/build.sh\n</parameter>\n"
    "<parameter=timeout>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
)
_HARMONY_CALL: Final = (
    "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>" + COMMAND
)

REPLIES: Final = {
    "hermes": Reply(
        HERMES,
        f'<think>\nWhy?\n</think>\n\nI look.\n<tool_call>\n{{"name": "bash", "arguments": {COMMAND}}}'
        '\n</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "I look.",
        "Why?",
    ),
    "hermes, arguments as a string": Reply(
        HERMES,
        '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"rm -rf /tmp/build.sh\\", '
        '\\"timeout\\": 3}"}</tool_call>',
        calls=(("bash", COMMAND),),
    ),
    "qwen-xml": Reply(ReplyFormat("xml", calls=XML), f"I look.\n\n{_XML_CALLS}", "I look."),
    "qwen-xml, thinking": Reply(
        ReplyFormat("xml", thought=THINK, calls=XML),
        f"Why?\n</think>\n\n{_XML_CALLS}",
        reasoning="Why?",
        thinking=True,
    ),
    "seed": Reply(
        ReplyFormat(
            "seed",
            thought=Thought("<seed:think>", "</seed:think>"),
            calls=CallSyntax(
                style="tagged",
                open="<seed:tool_call>\n<function=",
                after_name=">\n",
                key_open="<parameter=",
                key_close=">",
                value_close="</parameter>\n",
                close="</function>\n</seed:tool_call>",
            ),
        ),
        "<seed:think>Why?</seed:think>I look.\n<seed:tool_call>\n<function=bash>\n<parameter=command>"
        "rm -rf /tmp/build.sh</parameter>\n<parameter=timeout>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        "I look.",
        "Why?",
        (("bash", COMMAND),),
    ),
    "glm": Reply(
        ReplyFormat("glm", thought=THINK, calls=GLM),
        "<think>Why?</think>\nI look.\n<tool_call>bash\n<arg_key>command</arg_key>\n"
        "<arg_value>rm -rf /tmp/build.sh</arg_value>\n<arg_key>timeout</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
        "I look.",
        "Why?",
    ),
    "dsml": Reply(
        ReplyFormat("dsml", calls=DSML),
        f'I look.\n\n<{_D}function_calls>\n<{_D}invoke name="bash">\n'
        f'<{_D}parameter name="command" string="true">rm -rf /tmp/build.sh</{_D}parameter>\n'
        f'<{_D}parameter name="timeout" string="false">3</{_D}parameter>\n</{_D}invoke>\n'
        f'<{_D}invoke name="stop">\n</{_D}invoke>\n</{_D}function_calls>',
        "I look.",
    ),
    "minimax": Reply(
        ReplyFormat("minimax", thought=THINK, calls=MINIMAX),
        "Why?\n</think>\n\nI look.\n<minimax:tool_call>\n"
        '<invoke name="bash">\n<parameter name="command">rm -rf /tmp/build.sh</parameter>\n'
        '<parameter name="timeout">3</parameter>\n</invoke>\n'
        '<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        "Why?",
        thinking=True,
    ),
    "typed tags": Reply(
        ReplyFormat("typed", calls=TYPED),
        'So <f n="bash"><p n="command" text="true">rm -rf /tmp/build.sh</p>'
        '<p n="timeout" text="false">3</p></f>',
        "So",
        calls=(("bash", COMMAND),),
    ),
    "mistral, an array": Reply(
        FORMATS["[TOOL_CALLS]"],
        f'[TOOL_CALLS][{{"name": "bash", "arguments": {COMMAND}, "id": "123456789"}}, '
        '{"name": "stop", "arguments": {}, "id": "abcdefghi"}]',
    ),
    "mistral, names": Reply(
        FORMATS["[TOOL_CALLS][ARGS]"],
        f"I look.[TOOL_CALLS]bash[ARGS]{COMMAND}[TOOL_CALLS]stop[ARGS]{{}}",
        "I look.",
    ),
    "mistral, ids": Reply(
        FORMATS["[TOOL_CALLS][CALL_ID]"],
        f"[TOOL_CALLS]bash[CALL_ID]123456789[ARGS]{COMMAND}[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{{}}",
    ),
    "deepseek": Reply(
        FORMATS["<｜tool▁calls▁begin｜>"],  # noqa: RUF001
        "<think>Why?</think>I look.<｜tool▁calls▁begin｜>"  # noqa: RUF001
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{COMMAND}\n```<｜tool▁call▁end｜>\n"  # noqa: RUF001
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
        "I look.",
        "Why?",
    ),
    "kimi": Reply(
        FORMATS["<|tool_calls_section_begin|>"],
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        f"<|tool_call_argument_begin|>{COMMAND}<|tool_call_end|><|tool_call_begin|>functions.stop:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
    ),
    "llama": Reply(
        FORMATS["<|python_tag|>"],
        f'{{"name": "bash", "parameters": {COMMAND}}}',
        calls=(("bash", COMMAND),),
    ),
    "command-r": Reply(
        ReplyFormat(
            "command-r",
            thought=Thought("<|START_THINKING|>", "<|END_THINKING|>"),
            calls=COMMAND_R,
        ),
        "<|START_THINKING|>Why?<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "bash", "parameters": {COMMAND}}},\n'
        '    {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>',
        reasoning="Why?",
    ),
    "nemotron": Reply(
        ReplyFormat(
            "nemotron",
            calls=CallSyntax(
                section_open="<TOOLCALL>[", section_close="]</TOOLCALL>", between=", "
            ),
        ),
        f'<TOOLCALL>[{{"name": "bash", "arguments": {COMMAND}}}, '
        '{"name": "stop", "arguments": {}}]</TOOLCALL>',
    ),
    "harmony": Reply(
        FORMATS["<|channel|><|message|><|start|>"],
        f"<|channel|>analysis<|message|>Why?<|end|><|start|>assistant{_HARMONY_CALL}<|call|>",
        reasoning="Why?",
        calls=(("bash", COMMAND),),
    ),
    "harmony, a recipient first": Reply(
        FORMATS["<|channel|><|message|><|start|>"],
        f" to=functions.bash<|channel|>commentary json<|message|>{COMMAND}<|call|>",
        calls=(("bash", COMMAND),),
    ),
    "harmony, a preamble": Reply(
        FORMATS["<|channel|><|message|><|start|>"],
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{_HARMONY_CALL}<|call|>",
        "I look.",
        calls=(("bash", COMMAND),),
    ),
    "gemma": Reply(
        ReplyFormat("gemma", thought=CHANNEL, calls=FORMATS["<|tool_call>call:"].calls),
        "<|channel>thought\nWhy?\n<channel|>I look.\n<|tool_call>call:bash{command:"
        '<|"|>rm -rf /tmp/build.sh<|"|>,timeout:3}<tool_call|><|tool_call>call:stop{}<tool_call|>',
        "I look.",
        "Why?",
    ),
    "functiongemma": Reply(
        FORMATS["<start_function_call>"],
        "<start_function_call>call:bash{command:<escape>rm -rf /tmp/build.sh<escape>,timeout:3}"
        "<end_function_call><start_function_call>call:stop{}<end_function_call>",
    ),
    "lfm": Reply(
        FORMATS["<|tool_call_start|>"],
        'I look.<|tool_call_start|>[bash(command="rm -rf /tmp/build.sh", timeout=3), stop()]'
        "<|tool_call_end|>",
        "I look.",
    ),
    "pythonic": Reply(
        FORMATS["[func_name1(params_name1="],
        "[bash(command='rm -rf /tmp/build.sh', timeout=3), stop()]",
    ),
    "kimi-k3": Reply(
        ReplyFormat("kimi-k3", thought=CHANNEL_THOUGHT, calls=CallSyntax(style="channels")),
        "Why?<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>'
        '<|open|>argument key="command" type="string"<|sep|>rm -rf /tmp/build.sh'
        '<|close|>argument<|sep|><|open|>argument key="timeout" type="number"<|sep|>3'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="stop" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "I look.",
        "Why?",
        thinking=True,
    ),
    "kimi-k3, arguments as JSON": Reply(
        ReplyFormat("kimi-k3", thought=CHANNEL_THOUGHT, calls=CallSyntax(style="channels")),
        '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|><|open|>json type="object"<|sep|>'
        f"{COMMAND}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        calls=(("bash", COMMAND),),
    ),
}
