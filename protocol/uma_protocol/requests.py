"""All requests of the protocol: the type, the bounds and the meaning of each field, declared once.

`schema.fields_of` derives from these classes what the codec checks in both directions, the tables of the documentation,
the values that a model's configuration may set, and command-line options. HTTP bodies extend :class:`GenerateOptions`.
The fields of a request are sent in the order of `__struct_fields__`. The classes themselves check nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_ID_BYTES = 128
MAX_LABEL_BYTES = 256
MAX_TOKEN_BYTES = 256
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
MAX_MESSAGES = 1024
MAX_TEXTS = 4000
MAX_TOOLS = 512
MAX_ADAPTERS = 64
_MAX_PIN_S = 86_400
_HOUR_MS = 3_600_000

Speaker = Literal["system", "user", "assistant", "tool"]
ToolMode = Literal["auto", "required", "none"]
Priority = Literal["interactive", "background"]
Pace = Literal["smooth", "asap"]
Awaits = Literal["tokens", "answer", "nothing"]
Speculation = Literal["off", "free", "auto"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
PrefixAction = Literal["list", "clear", "pin"]


def about(description: str, **extra: Any) -> Meta:
    """Describe a field whose type says everything else. `extra` is read by `schema`."""
    return Meta(description=description, extra=extra)


def text(description: str, low: int = 1, high: int | None = None, **extra: Any) -> Meta:
    """Describe a string of `low` to `high` bytes of UTF-8."""
    return Meta(description=description, min_length=low, max_length=high, extra=extra)


def label(description: str, high: int = MAX_LABEL_BYTES, **extra: Any) -> Meta:
    """Describe a short string without control characters."""
    return text(description, 1, high, printable=True, **extra)


def items(description: str, low: int, high: int, plural: str = "") -> Meta:
    """Describe a list of `low` to `high` items; `plural` names them in messages if their type does not."""
    return Meta(description=description, min_length=low, max_length=high, extra={"plural": plural})


def limits(description: str, low: float, high: float, **extra: Any) -> Meta:
    """Describe a number from `low` to `high`."""
    return Meta(description=description, ge=low, le=high, extra=extra)


def sampling(description: str, low: float, high: float, *aliases: str) -> Meta:
    """Describe a number that controls sampling. A model's configuration may set it (`defaults`).

    HTTP accepts it under its `aliases`, too.
    """
    return limits(description, low, high, model_default=True, aliases=aliases)


# --- parts of requests ---------------------------------------------------------------------------

_Label = Annotated[str, label("")]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of the model. `arguments` is JSON, usually an object."""

    id: Annotated[str, label("id of the call")]
    name: Annotated[str, label("name of the tool")]
    arguments: Annotated[str, text("JSON", 0)]


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters` is a JSON Schema of its arguments."""

    name: Annotated[str, label("name of the function")]
    description: Annotated[str, text("what it does", 0)] = ""
    parameters: Annotated[
        dict[str, Any], about("a JSON Schema of its arguments", max_bytes=MAX_SHAPE_BYTES)
    ] = {}
    strict: Annotated[
        bool, about("default false; true refuses a schema that cannot be enforced in full")
    ] = False


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat.

    A message of the assistant may have `calls` and the `reasoning` before them. The result of a
    tool names its call by `call_id`, and may name the tool by `name`.
    """

    role: Annotated[Speaker, about("the speaker")]
    content: Annotated[str, text("the text", 0)]
    calls: Annotated[
        tuple[ToolCall, ...],
        items(
            "the assistant's calls of tools",
            0,
            MAX_TOOLS,
            "objects with `id`, `name` and `arguments`",
        ),
    ] = ()
    call_id: Annotated[str, label("the call that a tool's result belongs to")] | None = None
    name: Annotated[str, label("the tool that returned the result")] | None = None
    reasoning: Annotated[str, text("the assistant's reasoning before the content", 0)] | None = None


class LoraScale(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter of the model, by `name` or by its number (`id`)."""

    name: Annotated[str, label("its name; give either this or `id`")] | None = None
    id: Annotated[int, limits("its number among those of the model", 0, MAX_INT32)] | None = None
    scale: (
        Annotated[float, limits("rounded to 0.01; default that of its declaration", -100, 100)]
        | None
    ) = None


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The latencies that a client requests: time to first token, and time between tokens."""

    target_ttft_ms: Annotated[float, limits("time to the first token", 1, _HOUR_MS)] | None = None
    target_tbt_ms: Annotated[float, limits("time between tokens", 1, _HOUR_MS)] | None = None


# --- text ----------------------------------------------------------------------------------------


class GenerateOptions(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Options of a text request that the socket and the HTTP APIs share.

    A sampling option that is None has the model's own value, or else the front end's.
    """

    temperature: (
        Annotated[float, sampling("0 always samples the most likely token", 0, 100)] | None
    ) = None
    default_temperature: (
        Annotated[
            float,
            limits(
                "the temperature if neither the request nor the model's configuration sets one, as a front end prefers it",
                0,
                100,
            ),
        ]
        | None
    ) = None
    top_p: (
        Annotated[
            float,
            sampling(
                "sample from the most likely tokens whose probabilities sum to this; 1 is off", 0, 1
            ),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int,
            sampling("sample from this many most likely tokens; 0 and -1 are off", -1, MAX_INT32),
        ]
        | None
    ) = None
    min_p: (
        Annotated[
            float,
            sampling(
                "exclude tokens with less than this share of the most likely token's probability; 0 is off",
                0,
                1,
            ),
        ]
        | None
    ) = None
    presence_penalty: (
        Annotated[
            float,
            sampling("subtracted from the logit of each token that occurs in the answer", -2, 2),
        ]
        | None
    ) = None
    frequency_penalty: (
        Annotated[
            float,
            sampling("subtracted once for each occurrence of the token in the answer", -2, 2),
        ]
        | None
    ) = None
    repeat_penalty: (
        Annotated[
            float,
            sampling(
                "divides the positive logits of recent tokens and multiplies the negative ones; 1 is off",
                0.01,
                100,
                "repetition_penalty",
            ),
        ]
        | None
    ) = None
    repeat_last_n: (
        Annotated[
            int,
            sampling(
                "number of latest tokens of prompt and answer that count as recent; default 64, -1: all",
                -1,
                MAX_INT32,
            ),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int,
            limits(
                "the same seed gives the same draws; absent or below 0: a random seed",
                -MAX_INT64,
                MAX_INT64,
            ),
        ]
        | None
    ) = None
    min_tokens: Annotated[
        int, limits("the model cannot end the answer before this many tokens", 0, MAX_INT32)
    ] = 0
    stop_token_ids: Annotated[
        tuple[Annotated[int, limits("", 0, MAX_INT32)], ...],
        items(
            "tokens that end the answer, like the model's own end of generation",
            0,
            MAX_STOP_TOKENS,
            "token ids",
        ),
    ] = ()
    ignore_eos: Annotated[
        bool, about("default false; true never samples an end-of-generation token")
    ] = False
    speculation: (
        Annotated[
            Speculation,
            about(
                "speculative decoding, up to the daemon's own setting: `off`; `free`: only drafts that "
                "make no tick longer; default `auto`, or `off` for a request with a `seed`"
            ),
        ]
        | None
    ) = None
    pace: Annotated[
        Pace,
        about(
            "default `smooth`: while other requests use the machine, tokens of an interactive stream "
            "may be delayed to arrive at even intervals; `asap`: each is sent when it is computed"
        ),
    ] = "smooth"
    awaits: (
        Annotated[
            Awaits,
            about(
                "what the client waits for: `tokens`, to show them one by one; `answer`, its end; "
                "`nothing`, in the background lane and only there; default: `answer` if it is not "
                "streamed, has a schema or grammar, tools, or `n` above 1, else `tokens`"
            ),
        ]
        | None
    ) = None
    lora: (
        Annotated[
            tuple[LoraScale, ...],
            items(
                "the adapters of the model that are used, and no others; default: those that `model` names",
                0,
                MAX_ADAPTERS,
                "objects with `name` or `id`, and `scale`",
            ),
        ]
        | None
    ) = None


class _Head(GenerateOptions, frozen=True):
    """Routing fields of `generate`, which are sent first so that a router finds them in the head of a frame."""

    id: Annotated[
        str, label("chosen by the client; every event of the request repeats it", MAX_ID_BYTES)
    ]
    session: Annotated[str, label("sticky key of a conversation")] | None = None
    cache: (
        Annotated[
            str,
            label(
                "the requests that share cached prefixes with this one: default those of every process of this user; "
                "`private`: of this process only; any other text: those with the same text"
            ),
        ]
        | None
    ) = None
    model: Annotated[str, label("one of several models; an unknown name is refused")] | None = None
    app: (
        Annotated[str, label("the name of the program, shown in listings; grants no rights")] | None
    ) = None
    priority: Annotated[
        Priority,
        about("the lane: `interactive` if a person waits for the answer; default `interactive`"),
    ] = "interactive"
    max_tokens: (
        Annotated[int, limits("default and upper limit are settings of the daemon", 1, MAX_INT32)]
        | None
    ) = None


class Generate(
    _Head, frozen=True, kw_only=True, omit_defaults=True, tag="generate", tag_field="type"
):
    """Request text. Exactly one of `prompt` and `messages` is given.

    With `progress` the client receives :class:`Loading` events while the model is loaded.
    """

    logit_bias: Annotated[
        dict[int, Annotated[float, limits("", -MAX_BIAS, MAX_BIAS)]],
        Meta(
            description="added to the logits; -100 forbids a token, 100 nearly forces it",
            max_length=MAX_BIASES,
        ),
    ] = {}
    n: Annotated[
        int,
        limits(
            "number of choices (answers to the prompt); the prompt is computed once; default 1",
            1,
            MAX_N,
        ),
    ] = 1
    stop: Annotated[
        tuple[Annotated[str, text("", 1, MAX_STOP_BYTES)], ...],
        items(
            "the content ends before the first occurrence of one of these strings; reasoning and tool calls do not",
            0,
            MAX_STOPS,
        ),
    ] = ()
    logprobs: (
        Annotated[
            int,
            limits(
                "return each token's log probability and this many alternatives; default: none are returned",
                0,
                MAX_LOGPROBS,
            ),
        ]
        | None
    ) = None
    schema: (
        Annotated[
            dict[str, Any],
            about(
                'the answer is an instance of this JSON Schema; `{"type": "object"}` allows any JSON object',
                max_bytes=MAX_SHAPE_BYTES,
            ),
        ]
        | None
    ) = None
    regex: (
        Annotated[str, text("the whole answer matches this regular expression", 1, MAX_SHAPE_BYTES)]
        | None
    ) = None
    choice: Annotated[
        tuple[Annotated[str, text("", 1, MAX_CHOICE_BYTES)], ...],
        items("the answer is one of these strings", 1, MAX_CHOICES),
    ] = ()
    grammar: (
        Annotated[
            str,
            text("the answer matches this grammar, in GBNF or Lark", 1, MAX_GRAMMAR_BYTES),
        ]
        | None
    ) = None
    stream: Annotated[
        bool, about("default true; false sends the whole text in the terminal event")
    ] = True
    progress: Annotated[
        bool,
        about(
            "default false; true sends `loading` events while the model of the request is loaded"
        ),
    ] = False
    continue_final_message: Annotated[
        bool,
        about(
            "default false; true continues the last of `messages`, which must be the assistant's"
        ),
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any],
        about(
            "variables of the chat template, such as `enable_thinking`",
            max_bytes=MAX_METADATA_BYTES,
        ),
    ] = {}
    reasoning_effort: (
        Annotated[Effort, about("how much the model reasons, if its chat template supports it")]
        | None
    ) = None
    reasoning_budget: (
        Annotated[
            int,
            limits("maximum number of reasoning tokens; default: no separate limit", 0, MAX_INT32),
        ]
        | None
    ) = None
    tools: Annotated[
        tuple[Tool, ...],
        items(
            "functions that the model may call",
            0,
            MAX_TOOLS,
            "objects with `name`, `description`, `parameters`",
        ),
    ] = ()
    tool_choice: Annotated[
        ToolMode, about("default `auto`; `required`: at least one call; `none`: no call")
    ] = "auto"
    allowed_tools: Annotated[
        tuple[_Label, ...],
        items("the tools that may be called; default: all", 0, MAX_TOOLS, "names of tools"),
    ] = ()
    parallel_tool_calls: Annotated[bool, about("default true; false: at most one call")] = True
    slo: Annotated[Slo, about("the latencies that the client requests")] | None = None
    metadata: (
        Annotated[
            dict[str, Any],
            about("echoed in the terminal event", max_bytes=MAX_METADATA_BYTES),
        ]
        | None
    ) = None
    prompt: (
        Annotated[str, text("the prompt, used unchanged; give either this or `messages`")] | None
    ) = None
    messages: (
        Annotated[
            tuple[Message, ...],
            items(
                "a chat, rendered with the model's chat template",
                1,
                MAX_MESSAGES,
                "objects with `role` and `content`",
            ),
        ]
        | None
    ) = None


# --- vectors and scores --------------------------------------------------------------------------


class _Request(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """The common shape of requests: `type` comes first, and what is at its default is left out."""


_RequestId = Annotated[
    str, label("chosen by the client; every event of the request repeats it", MAX_ID_BYTES)
]
_EncoderModel = (
    Annotated[str, label("if given, must be a name of the loaded model for this")] | None
)
_Progress = Annotated[
    bool,
    about("default false; true sends `loading` events while the model of the request is loaded"),
]
_Texts = Annotated[
    tuple[Annotated[str, text("")], ...],
    items("the texts", 1, MAX_TEXTS, "strings that are not empty"),
]


class Embed(_Request, frozen=True, kw_only=True, tag="embed"):
    """Request a vector of each text, of length 1. The answer is :class:`Vectors`, then :class:`Eos`."""

    id: _RequestId
    model: _EncoderModel = None
    progress: _Progress = False
    dimensions: (
        Annotated[
            int,
            limits(
                "keeps the first numbers of each vector, normalised again: for models that were trained for it",
                1,
                MAX_INT32,
            ),
        ]
        | None
    ) = None
    truncate: Annotated[
        bool, about("default false; true cuts the end of a text that is too long for the model")
    ] = False
    input: _Texts


class Rerank(_Request, frozen=True, kw_only=True, tag="rerank"):
    """Request how well each document fits a query. The answer is :class:`Scores`, then :class:`Eos`."""

    id: _RequestId
    model: _EncoderModel = None
    progress: _Progress = False
    top_n: (
        Annotated[int, limits("how many documents to return; default: all", 1, MAX_INT32)] | None
    ) = None
    truncate: Annotated[
        bool,
        about("default false; true cuts the end of a document that is too long for the model"),
    ] = False
    query: Annotated[str, text("what documents are compared with")]
    documents: _Texts


# --- administration ------------------------------------------------------------------------------

_OwnId = (
    Annotated[str, label("`id` of the running request of this connection", MAX_ID_BYTES)] | None
)
_Handle = Annotated[int, limits("the daemon's handle of a request", 1, MAX_INT64)] | None
_Model = Annotated[str, label("a name of a configured model")]


class Hello(_Request, frozen=True, tag="hello"):
    """Present the daemon's token: the first frame where the daemon requires one, of no use elsewhere."""

    token: Annotated[str, label("the content of the daemon's token file", MAX_TOKEN_BYTES)]

    def __repr__(self) -> str:
        """Hide the token from logs."""
        return "Hello(token=...)"


class Cancel(_Request, frozen=True, tag="cancel"):
    """End a request, by its id on this connection or by the server's handle; exactly one is given."""

    id: _OwnId = None
    request: _Handle = None


class SetPriority(_Request, frozen=True, kw_only=True, tag="priority"):
    """Move a request to another lane, by the server's handle or by its id on this connection."""

    request: _Handle = None
    id: _OwnId = None
    priority: Annotated[Priority, about("the lane to move to")]


class ListSessions(_Request, frozen=True, tag="sessions"):
    """Request the list of live requests of the whole daemon, with so many of the latest ticks."""

    ticks: (
        Annotated[
            int,
            limits("number of the latest ticks to return; default: none", 0, MAX_TICKS),
        ]
        | None
    ) = None


class Explain(_Request, frozen=True, tag="explain"):
    """Request an explanation of how one request, or the latest ones, spent their time."""

    request: (
        Annotated[
            int,
            limits("the daemon's handle of the request; absent: the latest requests", 1, MAX_INT64),
        ]
        | None
    ) = None
    ticks: (
        Annotated[
            int,
            limits(
                "number of ticks to return: around the worst gap of `request`, or else the latest; "
                "default: a few for one request, otherwise none",
                0,
                MAX_TICKS,
            ),
        ]
        | None
    ) = None


class Prefix(_Request, frozen=True, kw_only=True, tag="prefix"):
    """List or clear this user's part of the prefix cache, or pin one of its sessions."""

    action: Annotated[PrefixAction, about("default `list`")] = "list"
    session: Annotated[str, label("the conversation whose latest turn `pin` keeps")] | None = None
    seconds: (
        Annotated[
            int,
            limits("duration of the pin; 0 removes it; default 300", 0, _MAX_PIN_S),
        ]
        | None
    ) = None


class LoadModel(_Request, frozen=True, tag="load"):
    """Load a configured model. The answer, an `ok`, comes when it is loaded. For operators."""

    model: _Model


class UnloadModel(_Request, frozen=True, tag="unload"):
    """Unload a configured model that no request uses. The answer comes when its memory is free. For operators."""

    model: _Model


class GetMetrics(_Request, frozen=True, tag="metrics"):
    """Request the metrics: once, or every `interval_ms` until the client disconnects."""

    interval_ms: (
        Annotated[
            int,
            limits(
                "repeat the answer at this interval; absent: answer once and close", 10, _HOUR_MS
            ),
        ]
        | None
    ) = None


Work = Generate | Embed | Rerank
"""What a connection may have one of at a time."""

Request = (
    Work
    | Hello
    | Cancel
    | SetPriority
    | ListSessions
    | Explain
    | Prefix
    | LoadModel
    | UnloadModel
    | GetMetrics
)

BY_TYPE: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        str(kind.__struct_config__.tag): kind
        for kind in (
            *(Generate, Embed, Rerank, Hello, Cancel, SetPriority, ListSessions),
            *(Explain, Prefix, LoadModel, UnloadModel, GetMetrics),
        )
    }
)
"""The requests by their `type`."""

EXACTLY_ONE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"generate": ("prompt", "messages"), "priority": ("request", "id"), "cancel": ("id", "request")}
)
"""Pairs of fields of which a request has exactly one."""

SHAPES = ("schema", "regex", "choice", "grammar")
"""Fields of `generate` that constrain the answer; a request has at most one."""

CHAT_ONLY = (
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning_budget",
    "tools",
)
"""Fields of `generate` that control how `messages` are rendered; refused with a `prompt`."""
