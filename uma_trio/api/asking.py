"""What all text endpoints have in common: the fields of sampling, and who asks how urgently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from attrs import evolve

from uma_protocol.requests import (
    MAX_LABEL_BYTES,
    MAX_N,
    MAX_STOP_BYTES,
    MAX_STOPS,
    Effort,
    Speculation,
)
from uma_protocol.rules import (
    MAX_INT32,
    MAX_INT64,
    FieldFault,
    Flag,
    Integer,
    ListOf,
    Number,
    Object,
    OneOf,
    Rule,
    Text,
)
from uma_protocol.schema import model_defaults
from uma_trio.api import bias
from uma_trio.api.fields import Body, Field, aside, honoured, ignored, refused
from uma_trio.api.tokens import FEW, text_of_ids
from uma_trio.engine.messages import SamplingParams, Targets
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head
from uma_trio.http.settings import Shared
from uma_trio.service.ask import Ask, Chat, Origin, chosen, seeded
from uma_trio.words import AWAITS as AWAITED
from uma_trio.words import LANES, PACES, Awaits, Lane

_HOUR_MS = 3_600_000.0
_LABEL = Text(1, 256, printable=True)
# Behind ours are those of llm-d-router, the newer ones first.
_TTFT_HEADERS = ("x-uma-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_TBT_HEADERS = ("x-uma-slo-tbt-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


class Either:
    """One of two kinds of value."""

    def __init__(self, one: Rule, other: Rule) -> None:
        self._one, self._other = one, other

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"{self._one.text}, or {self._other.text}"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """What is neither is told both."""
        if self._one.check(path, value) is None:
            return None
        fault = self._other.check(path, value)
        if fault is None:
            return None
        return fault if isinstance(value, list) else FieldFault(path, f"must be {self.text}")


class Anything:
    """A value that whoever asked for it judges."""

    def __init__(self, text: str) -> None:
        self.text = text

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Accept it."""
        return None


_STOP = Text(0, MAX_STOP_BYTES)
STOPS = Either(_STOP, ListOf(0, MAX_STOPS, _STOP, f"strings of at most {MAX_STOP_BYTES} bytes"))
_PENALTY = Number(-2, 2)

MODEL = honoured(
    "model",
    _LABEL,
    "chooses one of several models, and an unknown name is refused; with one model any name is accepted and repeated "
    "in the answer (--http-strict, --alias)",
)

LORA = honoured(
    "lora",
    ListOf(0, 64, Object(1024), 'objects such as {"id": 0, "scale": 0.5}'),
    "the adapters of the model that are used, by number as in /lora-adapters or by `name`; others are not (--lora)",
)

SAMPLING: tuple[Field, ...] = (
    honoured("temperature", Number(0, 100), "0 always takes the most likely token", default="1"),
    honoured("top_p", Number(0, 1), "1 is off", default="1"),
    honoured("top_k", Integer(-1, MAX_INT32), "0 and -1 are off", default="off"),
    honoured("min_p", Number(0, 1), "0 is off", default="0"),
    honoured(
        "seed",
        Integer(-MAX_INT64, MAX_INT64),
        "the same seed gives the same draws; below 0: a random seed",
    ),
    honoured(
        "stop",
        STOPS,
        "the content ends before the first occurrence of one of these strings; reasoning and tool calls do not; "
        "empty ones are ignored",
    ),
    honoured(
        "presence_penalty",
        _PENALTY,
        "subtracted from the logit of each token that occurs in the answer",
    ),
    honoured(
        "frequency_penalty",
        _PENALTY,
        "subtracted once for each occurrence of the token in the answer",
    ),
    honoured(
        "repeat_penalty",
        Number(0.01, 100),
        "divides the positive logits of recent tokens and multiplies the negative ones",
    ),
    honoured("repetition_penalty", Number(0.01, 100), "another name of repeat_penalty"),
    honoured(
        "repeat_last_n",
        Integer(-1, MAX_INT32),
        "number of latest tokens that count as recent; -1 is all",
        default="64",
    ),
    honoured(
        bias.FIELD, bias.Biases(), "limited to ±100; false means -100; a text means its tokens"
    ),
    honoured(
        "min_tokens",
        Integer(0, MAX_INT32),
        "the model cannot end the answer before this many tokens",
    ),
    honoured(
        "stop_token_ids",
        ListOf(0, 64, Integer(0, MAX_INT32), "token ids"),
        "tokens that end the answer",
    ),
    honoured(
        "ignore_eos", Flag(), "true never samples an end-of-generation token", default="false"
    ),
)

LANE = honoured(
    "priority",
    Either(OneOf(LANES), Integer(-MAX_INT32, MAX_INT32)),
    "the lane; a number above 0 is background",
    default="interactive",
)

URGENCY: tuple[Field, ...] = (
    LANE,
    honoured("service_tier", OneOf(_TIERS), "flex selects the background lane", default="auto"),
)

TIMINGS = honoured(
    "timings_per_token", Flag(), "with stream: each chunk contains the timings", default="false"
)

PROGRESS = honoured(
    "return_progress",
    Flag(),
    "with stream: chunks with `prompt_progress` while the prompt is computed",
    default="false",
)

STREAM: tuple[Field, ...] = (
    TIMINGS,
    PROGRESS,
    honoured(
        "verbose",
        Flag(),
        "adds `__verbose` with the rendered prompt and the settings",
        default="false",
    ),
    honoured("stream", Flag(), "server-sent events", default="false"),
    honoured(
        "stream_options",
        Anything("an object"),
        "`include_usage` adds a last chunk with the usage; only with stream",
    ),
    honoured(
        "n",
        Integer(1, MAX_N),
        "number of answers, up to the number of slots; the prompt is computed once",
        default="1",
    ),
)

CACHE: tuple[Field, ...] = (
    honoured("cache_salt", _LABEL, "only requests with the same text share cached prefixes"),
    honoured(
        "cache_prompt",
        Flag(),
        "false: the prefix cache is neither read nor written for this request",
        default="true",
    ),
)

SPECULATION = honoured(
    "speculation",
    OneOf(get_args(Speculation)),
    "speculative decoding, up to the daemon's --speculation",
    default="auto, or off for a request with a seed",
)

EFFORTS = (*get_args(Effort), "max")

KWARGS = honoured("chat_template_kwargs", Object(4096), "variables for the chat template")

PACE = honoured(
    "pace",
    OneOf(PACES),
    "with stream: asap sends each token when it is computed; smooth may delay tokens to send them at even intervals",
    default="smooth",
)

AWAITS = honoured(
    "awaits",
    OneOf(AWAITED),
    "what somebody waits for: tokens as they come, the end of the answer, or nothing (in the background "
    "lane); default: answer if not streamed, with tools, a schema or n above 1, else tokens",
)

TEMPLATE: tuple[Field, ...] = (
    KWARGS,
    honoured(
        "reasoning_effort",
        OneOf(EFFORTS),
        "passed to the chat template if it supports it; max means xhigh",
    ),
    honoured(
        "continue_final_message",
        Either(Flag(), OneOf(("content", "reasoning_content"))),
        "continues the last message, which must be the assistant's and have no calls: its content, or the "
        "reasoning of one that has no content",
    ),
    honoured(
        "add_generation_prompt",
        Flag(),
        "false: the prompt ends behind the last message, without the beginning of an answer",
        default="true, or false with continue_final_message",
    ),
)

STATELESS: tuple[Field, ...] = (
    refused("previous_response_id", "the daemon stores no conversations; send all messages"),
    refused("conversation", "the daemon stores no conversations; send all messages"),
    refused("background", "the daemon stores no answers", False),
)

NOT_HERE: tuple[Field, ...] = (
    refused("functions", "functions is the older name of tools; send tools", []),
    refused("modalities", "the model generates text only", ["text"]),
    refused("audio", "the model generates text only"),
    refused("web_search_options", "the daemon makes no network requests"),
    *STATELESS,
    refused("use_beam_search", "beam search is not implemented; tokens are sampled", False),
    refused("best_of", "use n; the daemon returns every answer that it computes", 1),
    refused("mirostat", "the samplers are temperature, top_k, top_p and min_p", 0),
    refused("typical_p", "the samplers are temperature, top_k, top_p and min_p", 1, 1.0),
    refused("xtc_probability", "the samplers are temperature, top_k, top_p and min_p", 0, 0.0),
    refused("dry_multiplier", "the samplers are temperature, top_k, top_p and min_p", 0, 0.0),
)

NO_TOOLS: tuple[Field, ...] = (
    refused("tools", "use /v1/chat/completions for tools", []),
    *ignored("tool_choice", "parallel_tool_calls", note="without tools"),
)

NO_MATTER: tuple[Field, ...] = (
    *ignored("user", "metadata", "store", "safety_identifier", "moderation", note="a label"),
    *ignored("function_call", note="without functions"),
    *ignored("verbosity", "prediction", note="the model does not know it"),
    *ignored(
        "prompt_cache_key",
        "prompt_cache_retention",
        "id_slot",
        note="a hint",
    ),
)


def sampling_of(body: Body, defaults: SamplingParams) -> SamplingParams:
    """Return how tokens are chosen; what was left out is as in `defaults`.

    Biases have to be by token id: see :func:`uma_trio.api.bias.by_token`.
    """
    plain = {
        name: body.get(name)
        for name in (
            *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
            *("repeat_penalty", "repeat_last_n", "min_tokens", "ignore_eos"),
        )
        if body.get(name) is not None
    }
    if body.get("repetition_penalty") is not None:
        plain.setdefault("repeat_penalty", body.get("repetition_penalty"))
    if body.get("top_k") is not None:
        plain["top_k"] = max(0, body.get("top_k"))
    return evolve(
        defaults,
        **plain,
        seed=seeded(_seed(body)),
        seed_named=_seed(body) is not None,
        logit_bias=tuple(body.get(bias.FIELD, {}).items()),
        stop_token_ids=tuple(body.get("stop_token_ids", ())),
    )


def said_of(body: Body) -> frozenset[str]:
    """Return what the client itself says of how tokens are chosen, as far as a model may have defaults for it."""
    said = {name for name in model_defaults() if body.get(name) is not None}
    if body.get("repetition_penalty") is not None:
        said.add("repeat_penalty")
    return frozenset(said)


def speculation_of(body: Body) -> Speculation:
    """Return what drafts a request may have."""
    return chosen(body.get("speculation"), seeded=_seed(body) is not None)


def _seed(body: Body) -> int | None:
    """Return the seed that a request names; one below 0 stands for a random one."""
    seed: int | None = body.get("seed")
    return None if seed is None or seed < 0 else seed


def effort_of(field: str, value: Any) -> Effort | None:
    """Return how much the model should think; None if nobody says.

    Raises:
        Fault: it is no word for that.
    """
    if value is not None and value not in EFFORTS:
        raise invalid(field, f"must be one of {', '.join(EFFORTS)}")
    effort: Effort | None = "xhigh" if value == "max" else value
    return effort


async def text_of(ask: Ask, shared: Shared) -> str:
    """Return the text of a prompt as the model reads it; one of token ids is made in slices.

    Raises:
        Refusal: the template does not take it.
    """
    prompt, served = ask.prompt, shared.served
    if isinstance(prompt, Chat):
        return (await served.render(prompt)).text
    if isinstance(prompt, str):
        return prompt
    return await aside(shared, lambda: text_of_ids(prompt, served), apart=len(prompt) > FEW)


def stops_of(body: Body, name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings in a field; empty ones stop nothing."""
    stop = body.get(name, ())
    every = (stop,) if isinstance(stop, str) else stop
    return tuple(each for each in every if each)


def lane_of(body: Body, head: Head) -> Lane:
    """Return the lane that was asked for: by header, by `priority`, or by the tier."""
    named = head.headers.get("x-uma-priority")
    objective = head.headers.get("x-llm-d-inference-objective")
    if named is None and objective in LANES:
        named = objective
    if named is not None:
        if named not in LANES:
            raise invalid("X-UMA-Priority", f"must be one of {', '.join(LANES)}")
        return "background" if named == "background" else "interactive"
    priority = body.get("priority")
    if isinstance(priority, int):
        return "background" if priority > 0 else "interactive"
    if priority is None:
        return "background" if body.get("service_tier") == "flex" else "interactive"
    return "background" if priority == "background" else "interactive"


def awaits_of(body: Body, head: Head) -> Awaits | None:
    """Return what is waited for, by the header ``X-UMA-Awaits`` or by `awaits`; None if it is not said.

    Raises:
        Fault: there is no such word.
    """
    value = head.headers.get("x-uma-awaits")
    if value is not None and value not in AWAITED:
        raise invalid("X-UMA-Awaits", f"must be one of {', '.join(AWAITED)}")
    awaits: Awaits | None = body.get("awaits") if value is None else value
    return awaits


def targets_of(head: Head) -> Targets:
    """Return what the client would like, from ``X-UMA-SLO-TTFT-MS`` and ``-TBT-MS`` or llm-d's names of them."""
    return Targets(_first_of(head, _TTFT_HEADERS), _first_of(head, _TBT_HEADERS))


def session_of(head: Head) -> str | None:
    """Return the conversation that the request is a turn of, from ``X-Session-Id``; None if it is not said.

    Raises:
        Fault: it is no name for one.
    """
    named = head.headers.get("x-session-id")
    if named is not None and not (0 < len(named) <= MAX_LABEL_BYTES and named.isprintable()):
        raise invalid("X-Session-Id", f"must have 1 to {MAX_LABEL_BYTES} printable characters")
    return named


def origin_of(exchange: Exchange, shared: Shared, name: str) -> Origin:
    """Say who asks; `name` is what the answer calls the request."""
    return Origin(principal=exchange.principal, door=shared.door, name=name, app=exchange.head.app)


def wants_usage(body: Body) -> bool:
    """Return whether a stream ends with the usage."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise invalid("stream_options", 'must be an object such as {"include_usage": true}')
    if not body.get("stream", False):
        raise invalid("stream_options", "needs stream true")
    return options.get("include_usage", False) is True


def model_of(body: Body, shared: Shared) -> tuple[str, str | None]:
    """Return the name that the answer repeats, and the one that has to be the loaded model's."""
    named: str | None = body.get("model")
    return named or shared.served.bounds.model, named if shared.settings.strict else None


def _first_of(head: Head, names: Sequence[str]) -> float | None:
    """Return the first of these headers that is there, in seconds."""
    found = next((name for name in names if name in head.headers), None)
    return None if found is None else _milliseconds(head, found)


def _milliseconds(head: Head, name: str) -> float | None:
    text = head.headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= _HOUR_MS:
        raise invalid(name, f"must be a number from 1 to {_HOUR_MS:g}")
    return value / 1e3
