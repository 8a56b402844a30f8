"""The JSON body of an HTTP request as a msgspec Struct: what it may contain, and how it is decoded.

Each endpoint has a :class:`BodySpec`: the fields of a Struct are honoured, `refused` ones are answered with 400 unless they
request nothing, and all others are ignored and named in the header ``X-UMA-Ignored`` (`ignored` lists what clients are known
to send). The documents, ``/openapi.json`` and the tests come from these declarations. `null` counts as absent. Of
`Meta.extra` this module reads, besides what :mod:`uma_protocol.schema` does, `read`: it converts a valid value.

A small body is decoded in less than a millisecond or two, so it is decoded where it is. Any other is decoded in a
helper thread, and in pieces, so that no step holds the GIL for longer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
from attrs import field, frozen
from msgspec import Meta

from uma_protocol.requests import (
    MAX_INT32,
    MAX_SHAPE_BYTES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_TOOLS,
    Effort,
    GenerateOptions,
    about,
    label,
    limits,
)
from uma_protocol.rules import (
    AnyValue,
    Either,
    Field,
    FieldFault,
    Flag,
    Integer,
    ListOf,
    OneOf,
    Text,
    shown,
)
from uma_protocol.schema import fields_of as schema_of
from uma_trio.api import bias
from uma_trio.api.context import Context
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.pieces import (
    USUAL,
    Excessive,
    JsonLimits,
    NotJson,
    TooDeep,
    TooLong,
    TooManyDigits,
    decoded,
    is_blank,
    is_small,
)
from uma_trio.words import LANES, Lane

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)
Refused = Mapping[str, tuple[Any, ...]]
"""Each field that is refused: the reason, and the values at which it is accepted since they request nothing."""

_MAX_NAMED: Final = 16


@frozen
class BodySpec(Generic[B]):
    """What the body of an endpoint may contain. `only` limits the fields of the Struct that it may have."""

    struct: type[B]
    refused: Refused = field(factory=dict)
    ignored: Collection[str] = ()
    only: Callable[[str], bool] = lambda _name: True

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that are honoured."""
        return tuple(one for one in schema_of(self.struct) if self.only(one.name))

    @functools.cached_property
    def by_name(self) -> Mapping[str, Field]:
        """The fields that are honoured by their names and aliases."""
        return {name: one for one in self.fields for name in (one.name, *one.aliases)}

    @functools.cached_property
    def readers(self) -> Mapping[str, Callable[[Any], Any]]:
        """What converts the values of some fields."""
        return {one.name: one.read for one in self.fields if one.read is not None}


class Decoded(NamedTuple, Generic[T]):
    """A body, and the names of the fields that were ignored."""

    body: T
    ignored: tuple[str, ...]


def document_of(body: bytes, within: JsonLimits = USUAL) -> dict[str, Any]:
    """Return the JSON object in a body, decoded in pieces.

    Raises:
        Fault: it is no JSON, or no object, or exceeds the limits or the digits of a number.
    """
    if is_blank(body):
        raise invalid(None, "the body is empty; send a JSON object", code="invalid_json")
    try:
        document = decoded(body, within)
    except NotJson as error:
        raise invalid(None, f"the body is not JSON: {error}", code="invalid_json") from None
    except (TooDeep, TooManyDigits) as error:
        raise invalid(None, f"the body {error}; simplify it", code="invalid_json") from None
    except TooLong as error:
        why = f"the body {error}; shorten it, or raise the daemon's --http-max-prompt-bytes"
        raise Fault(413, why, code="prompt_too_large") from None
    except Excessive as error:
        raise Fault(413, f"the body {error}; send less at once", code="body_too_large") from None
    if not isinstance(document, dict):
        raise invalid(None, "the body must be a JSON object", code="invalid_json")
    return document


def decode(spec: BodySpec[B], document: Mapping[str, Any], *, strict: bool) -> Decoded[B]:
    """Decode a document.

    Raises:
        Fault: a field is wrong, refused or missing; with `strict`, one would be ignored.
    """
    given, ignored = given_in(spec, document, strict=strict)
    return Decoded(spec.struct(**given), ignored)


def given_in(
    spec: BodySpec[Any], document: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the honoured fields of a document by their names, and the names of those ignored. Raises as :func:`decode`."""
    given: dict[str, Any] = {}
    unused: list[str] = []
    for name, value in document.items():
        if value is None:
            continue
        known = spec.by_name.get(name)
        if known is not None:
            checked = _checked(known, name, value)
            if name == known.name:
                given[name] = checked
            else:
                given.setdefault(known.name, checked)
        elif name in spec.refused:
            note, *harmless = spec.refused[name]
            if not any(value == fine and type(value) is type(fine) for fine in harmless):
                raise invalid(name, f"is not supported: {note}", code="unsupported_parameter")
        else:
            unused.append(shown(name))
    for each in spec.fields:
        if each.required and each.name not in given:
            raise invalid(each.name, f"is missing: {each.rule.text}", code="missing_parameter")
    if strict and unused:
        raise would_be_ignored(unused[0])
    for name in spec.readers.keys() & given.keys():
        given[name] = spec.readers[name](given[name])
    return given, tuple(unused)


def would_be_ignored(name: str) -> Fault:
    """Return the answer of a strict daemon to what changes nothing."""
    return invalid(
        name,
        "would be ignored; this daemon refuses such fields (--http-strict)",
        code="unsupported_parameter",
    )


def ignored_header(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the header that names what was ignored, as far as it stays short."""
    return (("X-UMA-Ignored", ", ".join(names[:_MAX_NAMED])),) if names else ()


def _checked(field: Field, name: str, value: Any) -> Any:
    fault = field.rule.check(name, value)
    # JavaScript and Lua write whole numbers as they like.
    if fault is not None and type(value) is float and value.is_integer() and math.isfinite(value):
        value = int(value)
        fault = field.rule.check(name, value)
    if fault is not None:
        raise invalid(fault.field, fault.problem)
    return value


@frozen
class Taken(Generic[T]):
    """What was made of a body. `is_long` is whether more work on it belongs in a helper thread."""

    value: T
    is_long: bool


async def take(
    exchange: Exchange,
    context: Context,
    read: Callable[[dict[str, Any]], T],
    within: JsonLimits | None = None,
) -> Taken[T]:
    """Return what `read` makes of the JSON object in the body, whose memory is released then.

    `read` may run in a helper thread. `within` are the endpoint's limits, if they are not the usual ones.

    Raises:
        Fault: it is no JSON object, exceeds a limit, or `read` raises it.
    """
    within = context.limits() if within is None else within
    with exchange.body() as body:
        small = is_small(body)
        if small:
            return Taken(read(document_of(body, within)), is_long=False)
        holder = [body]
        del body

        def work() -> T:
            return read(document_of(holder.pop(), within))

        return Taken(await context.run_blocking(work), is_long=True)


async def decode_body(
    exchange: Exchange, context: Context, spec: BodySpec[B], within: JsonLimits | None = None
) -> B:
    """Return the body of a request. Raises :class:`Fault` as :func:`take` and :func:`decode`."""
    strict = context.settings.strict
    taken = await take(
        exchange, context, lambda found: decode(spec, found, strict=strict).body, within
    )
    return taken.value


async def run(context: Context, work: Callable[[], T], *, in_thread: bool) -> T:
    """Return what `work` returns, in a helper thread or here."""
    return await context.run_blocking(work) if in_thread else work()


# --- what the bodies of text requests have in common ---


def free(description: str, takes: str, **extra: Any) -> Meta:
    """Describe a field whose value is checked by its endpoint; `takes` says what it should be."""
    return about(description, rule=AnyValue(takes), **extra)


def lane_of(priority: Any) -> Lane:
    """Return the lane of a `priority`: a name, or a number, of which those above 0 are background, as in vLLM."""
    if isinstance(priority, int):
        return "background" if priority > 0 else "interactive"
    return "background" if priority == "background" else "interactive"


def stops_of(value: Any) -> tuple[str, ...]:
    """Return the stop strings in a field; empty ones stop nothing."""
    every = (value,) if isinstance(value, str) else value
    return tuple(each for each in every if each)


_STOP: Final = Text(0, MAX_STOP_BYTES)
STOPS: Final = Either(
    _STOP, ListOf(0, MAX_STOPS, _STOP, f"strings of at most {MAX_STOP_BYTES} bytes")
)
EFFORTS: Final = (*get_args(Effort), "max")


def effort_of(field: str, value: Any) -> Effort | None:
    """Return how much the model should reason; None where the request does not say.

    Raises:
        Fault: it is not one of :data:`EFFORTS`.
    """
    if value is not None and value not in EFFORTS:
        raise invalid(field, f"must be one of {', '.join(EFFORTS)}")
    effort: Effort | None = "xhigh" if value == "max" else value
    return effort


class Duration:
    """A number of seconds, or a text such as 10m or 1h30m, as Ollama reads it (https://pkg.go.dev/time#ParseDuration)."""

    text = "a number of seconds or a duration such as 10m, up to 100 years; below 0: for ever"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Refuse what is no duration."""
        return None if seconds_of(value) is not None else FieldFault(path, f"must be {self.text}")


_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)")
_NUMBER: Final = re.compile(r"-?\d{1,12}(\.\d{1,9})?")
_CENTURY_S: Final = 3.2e9


def seconds_of(value: Any) -> float | None:
    """Return the seconds of a duration, infinite for a negative one; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = _seconds_of_text(value.strip())
    if not isinstance(value, int | float) or value != value or value > _CENTURY_S:
        return None
    return math.inf if value < 0 else float(value)


def _seconds_of_text(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    rest = text.removeprefix("-")
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -1.0 if rest != text and seconds else seconds


_LONG_TEXT: Final = Text(0, MAX_SHAPE_BYTES)
_SCHEMA: Final = Either(AnyValue("an object"), _LONG_TEXT)
CHOICES: Final = ListOf(1, 256, Text(1, 4096), "strings of 1 to 4096 bytes")

Model = (
    Annotated[
        str,
        label(
            "chooses one of several models, and an unknown name is refused; with one model any name is accepted and "
            "repeated in the answer (--http-strict, --alias)"
        ),
    ]
    | None
)
KeepAlive = Annotated[
    float | None,
    about(
        "how long the model stays loaded after its latest request (default: its ttl); 0 unloads it at once, below 0 it "
        "stays until its memory is needed; for operators, where there are several models",
        rule=Duration(),
        read=seconds_of,
    ),
]
Kwargs = Annotated[dict[str, Any], about("variables of the chat template", max_bytes=4096)]
ContinueFinal = Annotated[
    bool | str,
    about(
        "continues the last message, which must be the assistant's and have no calls: its content, or the reasoning of "
        "one that has no content",
        rule=Either(Flag(), OneOf(("content", "reasoning_content"))),
    ),
]
BeginsAnswer = (
    Annotated[
        bool,
        about(
            "false: the prompt ends after the last message, without the beginning of an answer; default true, or false "
            "with continue_final_message"
        ),
    ]
    | None
)
MessagesField = Annotated[
    Any, free("text parts, tool calls and their results", "a list of messages")
]
ReasoningBudget = Annotated[
    int, limits("maximum number of reasoning tokens; -1: no separate limit", -1, MAX_INT32)
]
ToolChoiceField = Annotated[
    Any,
    free(
        "the object names a function, or `allowed_tools`; default auto",
        "none, auto, required, or an object",
    ),
]
Parallel = Annotated[bool, about("false: at most one call; default true")]
TopLogprobs = Annotated[int, limits("return this many alternatives, too", 0, 20)]
ReasoningEffort = Annotated[
    str | None,
    about(
        "how much the model reasons, if its chat template supports it; max means xhigh",
        rule=OneOf(EFFORTS),
    ),
]
Tools = Annotated[
    list[Any], free("functions that the model may call", f"a list of at most {MAX_TOOLS} functions")
]


class TextBody(GenerateOptions, frozen=True, kw_only=True):
    """Fields of every text endpoint; of a chat of Ollama those of sampling stand in `options`."""

    model: Model = None
    stream: Annotated[bool, about("the answer is sent as server-sent events")] = False
    stop: Annotated[
        tuple[str, ...],
        about(
            "the content ends before the first occurrence of one of these strings; reasoning and tool calls do not; "
            "empty ones are ignored",
            rule=STOPS,
            read=stops_of,
        ),
    ] = ()
    logit_bias: Annotated[
        Any,
        about("limited to ±100; false means -100; a text means its tokens", rule=bias.Biases()),
    ] = None
    priority: Annotated[
        Lane | None,
        about(
            "the lane; a number above 0 is background; default interactive",
            rule=Either(OneOf(LANES), Integer(-MAX_INT32, MAX_INT32)),
            read=lane_of,
        ),
    ] = None
    cache_salt: (
        Annotated[str, label("only requests with the same text share cached prefixes")] | None
    ) = None
    cache_prompt: Annotated[
        bool,
        about("false: the prefix cache is neither read nor written for this request; default true"),
    ] = True


class ShapedBody(TextBody, frozen=True, kw_only=True):
    """Fields of chats and completions of OpenAI's and llama-server's APIs: also those that constrain the answer."""

    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "scale", "priority", "fast"],
            about("flex selects the background lane"),
        ]
        | None
    ) = None
    timings_per_token: Annotated[bool, about("with stream: each chunk contains the timings")] = (
        False
    )
    return_progress: Annotated[
        bool, about("with stream: chunks with `prompt_progress` while the prompt is computed")
    ] = False
    response_format: Annotated[
        Any,
        free(
            "of type `text`, `json_object`, or `json_schema` with `json_schema.schema`, or `schema` as llama-server documents it",
            "an object",
        ),
    ] = None
    json_schema: Annotated[
        Any, about("the answer is an instance of this JSON Schema", rule=_SCHEMA)
    ] = None
    grammar: Annotated[
        str | None, about("the answer matches this grammar, in GBNF or Lark", rule=_LONG_TEXT)
    ] = None
    structured_outputs: Annotated[
        Any, free("one of `json`, `json_object`, `regex`, `choice` and `grammar`", "an object")
    ] = None
    guided_json: Annotated[Any, about("another name of json_schema", rule=_SCHEMA)] = None
    guided_regex: Annotated[
        str | None, about("the whole answer matches this regular expression", rule=_LONG_TEXT)
    ] = None
    guided_choice: Annotated[
        list[str] | None, about("the answer is one of these strings", rule=CHOICES)
    ] = None
    guided_grammar: Annotated[str | None, about("another name of grammar", rule=_LONG_TEXT)] = None


STATELESS: Final[Refused] = {
    "previous_response_id": ("the daemon stores no conversations; send all messages",),
    "conversation": ("the daemon stores no conversations; send all messages",),
    "background": ("the daemon stores no answers", False),
}
OTHER_SAMPLERS: Final = "the samplers are temperature, top_k, top_p and min_p"
NOT_SUPPORTED: Final[Refused] = {
    "functions": ("functions is the older name of tools; send tools", []),
    "modalities": ("the model generates text only", ["text"]),
    "audio": ("the model generates text only",),
    "web_search_options": ("the daemon makes no network requests",),
    **STATELESS,
    "use_beam_search": ("beam search is not implemented; tokens are sampled", False),
    "best_of": ("use n; the daemon returns every answer that it computes", 1),
    "mirostat": (OTHER_SAMPLERS, 0),
    "typical_p": (OTHER_SAMPLERS, 1, 1.0),
    "xtc_probability": (OTHER_SAMPLERS, 0, 0.0),
    "dry_multiplier": (OTHER_SAMPLERS, 0, 0.0),
}
WITHOUT_EFFECT: Final = (
    *("user", "metadata", "store", "safety_identifier", "moderation", "function_call"),
    *("verbosity", "prediction", "prompt_cache_key", "prompt_cache_retention", "id_slot"),
)
NO_TOOLS: Final[Refused] = {"tools": ("use /v1/chat/completions for tools", [])}
TOOLS_WITHOUT_EFFECT: Final = ("tool_choice", "parallel_tool_calls")
