"""What a request may contain: every field, its type and its bounds, declared once.

The codec checks both directions against these declarations, so what `encode_request` lets out
`decode_request` lets in, and the documentation's table of fields is rendered from them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from . import events
from .rules import (
    MAX_INT32,
    MAX_INT64,
    ByToken,
    Field,
    FieldFault,
    Flag,
    Integer,
    ListOf,
    Number,
    Object,
    OneOf,
    Record,
    Text,
    check,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ID_BYTES = 128
MAX_LABEL_BYTES = 256
MAX_N = 128
MAX_STOPS = 128
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_LOGPROBS = 20
MAX_SHAPE_BYTES = 65_536
MAX_GRAMMAR_BYTES = 16_384
MAX_CHOICES = 256
MAX_CHOICE_BYTES = 4096
MAX_METADATA_BYTES = 4096
MAX_TICKS = 1000
MAX_TEXTS = 4000
MAX_TOOLS = 512
MAX_ADAPTERS = 64
_MOST_PIN_S = 86_400
_HOUR_MS = 3_600_000

MAX_TOKEN_BYTES = 256
"""The longest `token` of a hello."""

_ID = Text(1, MAX_ID_BYTES, printable=True)
_LABEL = Text(1, MAX_LABEL_BYTES, printable=True)
_LANE = OneOf(get_args(events.Priority))
_MILLISECONDS = Number(1, _HOUR_MS)
_SLO = Record(
    Field("target_ttft_ms", _MILLISECONDS, "time to the first token"),
    Field("target_tbt_ms", _MILLISECONDS, "time between tokens"),
)
_SHAPE = Text(1, MAX_SHAPE_BYTES)
_TEXTS = ListOf(1, MAX_TEXTS, Text(1), "strings that are not empty")
_WHOSE = Field("id", _ID, "chosen by the client; every event of the request repeats it", True)
_ENCODER = Field("model", _LABEL, "if given, must be a name of the loaded model for this")
_PROGRESS = Field(
    "progress",
    Flag(),
    "default false; true sends `loading` events while the model of the request is loaded",
)
_PENALTY = Number(-2, 2)
_BIAS = ByToken(MAX_BIASES, Number(-MAX_BIAS, MAX_BIAS))
_CALL = Record(
    Field("id", _LABEL, "id of the call", required=True),
    Field("name", _LABEL, "name of the tool", required=True),
    Field("arguments", Text(0), "JSON", required=True),
)
_MESSAGE = Record(
    Field("role", OneOf(get_args(events.Speaker)), "who speaks", required=True),
    Field("content", Text(0), "what is said", required=True),
    Field(
        "calls",
        ListOf(0, MAX_TOOLS, _CALL, "objects with `id`, `name` and `arguments`"),
        "the assistant's calls of tools",
    ),
    Field("call_id", _LABEL, "the call that a tool's result belongs to"),
    Field("name", _LABEL, "the tool that gave the result"),
    Field("reasoning", Text(0), "the assistant's reasoning before the content"),
)
_TOOL = Record(
    Field("name", _LABEL, "what the model calls it", required=True),
    Field("description", Text(0), "what it does"),
    Field("parameters", Object(MAX_SHAPE_BYTES), "a JSON Schema of its arguments"),
    Field("strict", Flag(), "default false; true refuses a schema that cannot be enforced in full"),
)

_ADAPTER = Record(
    Field("name", _LABEL, "its name; give either this or `id`"),
    Field("id", Integer(0, MAX_INT32), "its number among those of the model"),
    Field("scale", Number(-100, 100), "rounded to 0.01; default that of its declaration"),
)

FIELDS: Mapping[str, tuple[Field, ...]] = MappingProxyType(
    {
        "generate": (
            _WHOSE,
            Field("session", _LABEL, "sticky key of a conversation"),
            Field(
                "cache",
                _LABEL,
                "who shares cached prefixes with this request: default every process of this user; "
                "`private`: this process only; any other text: requests with the same text",
            ),
            Field("model", _LABEL, "if given, must be the loaded model"),
            Field("app", _LABEL, "the name of the program, shown in listings; grants no rights"),
            Field(
                "priority",
                _LANE,
                "the lane: `interactive` if a person waits for the answer; default `interactive`",
            ),
            Field(
                "max_tokens",
                Integer(1, MAX_INT32),
                "default and upper limit are settings of the daemon",
            ),
            Field(
                "temperature",
                Number(0, 100),
                "0: always the most likely token; default the model's, or 0",
            ),
            Field("top_p", Number(0, 1), "default the model's, or 1: off"),
            Field("top_k", Integer(0, MAX_INT32), "default the model's, or 0: off"),
            Field("min_p", Number(0, 1), "default the model's, or 0: off"),
            Field(
                "presence_penalty",
                _PENALTY,
                "subtracted from the logit of each token that occurs in the answer",
            ),
            Field(
                "frequency_penalty",
                _PENALTY,
                "subtracted once for each occurrence of the token in the answer",
            ),
            Field(
                "repeat_penalty",
                Number(0.01, 100),
                "divides the positive logits of recent tokens and multiplies the negative ones; default the model's, or 1: off",
            ),
            Field(
                "repeat_last_n",
                Integer(-1, MAX_INT32),
                "number of latest tokens of prompt and answer that count as recent; default 64, -1: all",
            ),
            Field(
                "logit_bias",
                _BIAS,
                "added to the logits; -100 forbids a token, 100 nearly forces it",
            ),
            Field(
                "seed",
                Integer(0, MAX_INT64),
                "the same seed gives the same draws; default: a random seed; see docs/REPRODUCIBILITY.md",
            ),
            Field(
                "n",
                Integer(1, MAX_N),
                "number of choices (answers to the prompt); the prompt is computed once; default 1",
            ),
            Field(
                "stop",
                ListOf(
                    0,
                    MAX_STOPS,
                    Text(1, MAX_STOP_BYTES),
                    f"strings of 1 to {MAX_STOP_BYTES} bytes",
                ),
                "the content ends before the first occurrence of one of these strings; reasoning and tool calls do not",
            ),
            Field(
                "stop_token_ids",
                ListOf(0, MAX_STOP_TOKENS, Integer(0, MAX_INT32), "token ids"),
                "tokens that end the answer, like the model's own end of generation",
            ),
            Field(
                "min_tokens",
                Integer(0, MAX_INT32),
                "the model cannot end the answer before this many tokens",
            ),
            Field(
                "logprobs",
                Integer(0, MAX_LOGPROBS),
                "return each token's log probability and this many alternatives; default: none are returned",
            ),
            Field(
                "schema",
                Object(MAX_SHAPE_BYTES),
                'the answer is an instance of this JSON Schema; `{"type": "object"}` allows any JSON object',
            ),
            Field("regex", _SHAPE, "the whole answer matches this regular expression"),
            Field(
                "choice",
                ListOf(
                    1,
                    MAX_CHOICES,
                    Text(1, MAX_CHOICE_BYTES),
                    f"strings of 1 to {MAX_CHOICE_BYTES} bytes",
                ),
                "the answer is one of these strings",
            ),
            Field(
                "grammar",
                Text(1, MAX_GRAMMAR_BYTES),
                "the answer matches this grammar, in GBNF or Lark",
            ),
            Field(
                "stream", Flag(), "default true; false sends the whole text in the terminal event"
            ),
            Field(
                "ignore_eos", Flag(), "default false; true never samples an end-of-generation token"
            ),
            Field(
                "speculation",
                OneOf(get_args(events.Speculation)),
                "speculative decoding, up to the daemon's own setting: `off`; `free`: only drafts that "
                "make no tick longer; default `auto`, or `off` for a request with a `seed`",
            ),
            Field(
                "pace",
                OneOf(get_args(events.Pace)),
                "default `smooth`: while other requests use the machine, tokens of an interactive stream "
                "may be delayed to arrive at even intervals; `asap`: each is sent when it is computed",
            ),
            Field(
                "awaits",
                OneOf(get_args(events.Awaits)),
                "what somebody waits for: `tokens`, a person reads them as they come; `answer`, its end; "
                "`nothing`, in the background lane and only there; default: `answer` if it is not "
                "streamed, has a schema or grammar, tools, or `n` above 1, else `tokens`",
            ),
            _PROGRESS,
            Field(
                "lora",
                ListOf(0, MAX_ADAPTERS, _ADAPTER, "objects with `name` or `id`, and `scale`"),
                "the adapters of the model that are used, and no others; default: those that `model` names",
            ),
            Field(
                "continue_final_message",
                Flag(),
                "default false; true continues the last of `messages`, which must be the assistant's",
            ),
            Field(
                "chat_template_kwargs",
                Object(MAX_METADATA_BYTES),
                "variables of the chat template, such as `enable_thinking`",
            ),
            Field(
                "reasoning_effort",
                OneOf(get_args(events.Effort)),
                "how much the model reasons, if its chat template supports it",
            ),
            Field(
                "reasoning_budget",
                Integer(0, MAX_INT32),
                "maximum number of reasoning tokens; default: no separate limit",
            ),
            Field(
                "tools",
                ListOf(0, MAX_TOOLS, _TOOL, "objects with `name`, `description`, `parameters`"),
                "functions that the model may call",
            ),
            Field(
                "tool_choice",
                OneOf(get_args(events.ToolMode)),
                "default `auto`; `required`: at least one call; `none`: no call",
            ),
            Field(
                "allowed_tools",
                ListOf(0, MAX_TOOLS, _LABEL, "names of tools"),
                "the tools that may be called; default: all",
            ),
            Field("parallel_tool_calls", Flag(), "default true; false: at most one call"),
            Field("slo", _SLO, "the latencies that the client asks for"),
            Field("metadata", Object(MAX_METADATA_BYTES), "echoed in the terminal event"),
            Field("prompt", Text(1), "the prompt, used unchanged; give either this or `messages`"),
            Field(
                "messages",
                ListOf(1, 1024, _MESSAGE, "objects with `role` and `content`"),
                "a chat, rendered with the model's chat template",
            ),
        ),
        "embed": (
            _WHOSE,
            _ENCODER,
            _PROGRESS,
            Field(
                "dimensions",
                Integer(1, MAX_INT32),
                "keeps the first numbers of each vector, normalised again: for models that were trained for it",
            ),
            Field(
                "truncate",
                Flag(),
                "default false; true cuts the end of a text that is too long for the model",
            ),
            Field("input", _TEXTS, "the texts", True),
        ),
        "rerank": (
            _WHOSE,
            _ENCODER,
            _PROGRESS,
            Field("top_n", Integer(1, MAX_INT32), "how many documents to return; default: all"),
            Field(
                "truncate",
                Flag(),
                "default false; true cuts the end of a document that is too long for the model",
            ),
            Field("query", Text(1), "what documents are compared with", True),
            Field("documents", _TEXTS, "the documents", True),
        ),
        "hello": (
            Field(
                "token",
                Text(1, MAX_TOKEN_BYTES, printable=True),
                "the content of the daemon's token file",
                required=True,
            ),
        ),
        "cancel": (
            Field(
                "id",
                _ID,
                "`id` of the running request of this connection; give either this or `request`",
            ),
            Field("request", Integer(1, MAX_INT64), "the daemon's handle of a request"),
        ),
        "priority": (
            Field(
                "request",
                Integer(1, MAX_INT64),
                "the daemon's handle of the request; give either this or `id`",
            ),
            Field("id", _ID, "`id` of the running request of this connection"),
            Field("priority", _LANE, "the lane to move to", True),
        ),
        "sessions": (
            Field(
                "ticks",
                Integer(0, MAX_TICKS),
                "number of the latest ticks to return; default: none",
            ),
        ),
        "explain": (
            Field(
                "request",
                Integer(1, MAX_INT64),
                "the daemon's handle of the request; absent: the latest requests",
            ),
            Field(
                "ticks",
                Integer(0, MAX_TICKS),
                "number of ticks to return: around the worst gap of `request`, or else the latest; "
                "default: a few for one request, otherwise none",
            ),
        ),
        "prefix": (
            Field("action", OneOf(get_args(events.PrefixAction)), "default `list`"),
            Field("session", _LABEL, "the conversation whose latest turn `pin` keeps"),
            Field(
                "seconds", Integer(0, _MOST_PIN_S), "duration of the pin; 0 removes it; default 300"
            ),
        ),
        "load": (Field("model", _LABEL, "a name of a configured model", required=True),),
        "unload": (Field("model", _LABEL, "a name of a configured model", required=True),),
        "metrics": (
            Field(
                "interval_ms",
                Integer(10, _HOUR_MS),
                "repeat the answer at this interval; absent: answer once and close",
            ),
        ),
    }
)
"""The fields of each type of request, in the order in which they are written."""

EITHER: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"generate": ("prompt", "messages"), "priority": ("request", "id"), "cancel": ("id", "request")}
)
"""Pairs of fields of which a request has exactly one."""

SHAPES = ("schema", "regex", "choice", "grammar")
"""Fields of `generate` that constrain the answer; a request has at most one."""

ABOUT_MESSAGES = (
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning_budget",
    "tools",
)
"""Fields of `generate` that control how `messages` are rendered; refused beside `prompt`."""


def check_request(kind: str, document: dict[str, Any]) -> FieldFault | None:
    """The first fault of a request of a known type, without its `type` field."""
    fault = check(FIELDS[kind], document)
    if fault is None and kind in EITHER:
        one, other = EITHER[kind]
        if (one in document) is (other in document):
            both = "both are given" if one in document else "neither is given"
            return FieldFault(one, f"or {other} must be given, exactly one of them, but {both}")
    return fault or (_together(document) if kind == "generate" else None)


def _together(document: dict[str, Any]) -> FieldFault | None:
    """The first field of a `generate` request that contradicts another field, or None."""
    for name in ABOUT_MESSAGES:
        if document.get(name) and "prompt" in document:
            return FieldFault(name, "applies to messages, but the request has a prompt: omit it")
    shapes = [name for name in SHAPES if name in document]
    if len(shapes) > 1:
        return FieldFault(shapes[1], f"cannot be combined with {shapes[0]}: give one of them")
    if "logprobs" in document and document.get("stream") is False:
        return FieldFault("logprobs", "is sent with each token, but stream is false: omit stream")
    return None


def is_id(value: Any) -> bool:
    """Whether a value could be a request's id."""
    return _ID.check("id", value) is None
