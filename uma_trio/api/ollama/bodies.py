"""What a request in Ollama's API may contain: its fields, and the `options` that stand in one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from uma_protocol.requests import MAX_INT32, about, limits, text
from uma_protocol.schema import model_defaults
from uma_trio.api.bodies import (
    OTHER_SAMPLERS,
    BodySpec,
    Decoded,
    KeepAlive,
    Refused,
    TextBody,
    Tools,
    TopLogprobs,
    free,
    given_in,
)
from uma_trio.api.context import Context
from uma_trio.engine.messages import SamplingParams
from uma_trio.http.errors import Fault, invalid

# https://github.com/ollama/ollama/blob/v0.12.11/api/types.go, DefaultOptions
DEFAULTS: Final = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repeat_penalty=1.1)


class OllamaBody(TextBody, frozen=True, kw_only=True):
    """Fields of a chat and of a prompt. Those of :data:`OPTIONS` stand in the object `options`."""

    stream: Annotated[bool, about("a JSON document a line; default true")] = True
    format: Annotated[
        Any, free("the answer is an object, or an instance", "`json` or a JSON Schema")
    ] = None
    options: Annotated[Any, free("see below", "an object")] = None
    think: Annotated[
        Any,
        free(
            "whether the model reasons, and how much, if the chat template supports it; default the template's",
            "true, false, or one of low, medium, high",
        ),
    ] = None
    logprobs: Annotated[
        bool, about("return each token's log probability in the model's own distribution")
    ] = False
    top_logprobs: TopLogprobs = 0
    keep_alive: KeepAlive = None
    num_predict: Annotated[
        int,
        limits(
            "the longest answer in tokens; default -1; 0 and below: the free room in the context",
            -2,
            MAX_INT32,
        ),
    ] = -1


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """A chat."""

    messages: Annotated[
        Any,
        free(
            "text, `thinking`, `tool_calls` and their results; the answer continues a last message of the "
            "assistant; without messages the reply says that the model is loaded",
            "a list of messages",
        ),
    ] = []
    tools: Tools = []


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """A prompt."""

    prompt: Annotated[
        str,
        text("what the user says; without it the reply says that the model is loaded", 0),
    ] = ""
    system: Annotated[str, text("the system message", 0)] = ""
    raw: Annotated[
        bool, about("true: the prompt is continued as it is, without the chat template")
    ] = False
    images: Annotated[Any, free("the model reads only text", "an empty list")] = None


_IN_OPTIONS: Final = frozenset({*model_defaults(), "seed", "stop", "num_predict"})
_HTTP_ONLY: Final = frozenset(
    {"logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", *_IN_OPTIONS}
)
_IGNORED: Final = ("truncate", "shift")


def _at_top(name: str) -> bool:
    return name not in _HTTP_ONLY


CHAT: Final = BodySpec(OllamaChatBody, ignored=_IGNORED, only=_at_top)
GENERATE: Final = BodySpec(
    OllamaGenerateBody,
    refused={
        "suffix": ("the daemon continues texts; it does not fill gaps", ""),
        "template": ("the chat template is the daemon's: --chat-template-file", ""),
    },
    ignored=("context", *_IGNORED),
    only=_at_top,
)
_MIROSTAT: Final[Refused] = {
    "tfs_z": (OTHER_SAMPLERS, 0, 0.0, 1, 1.0),
    "mirostat": (OTHER_SAMPLERS, 0, 0.0),
}
OPTIONS: Final = BodySpec(
    OllamaBody,
    refused=_MIROSTAT,
    ignored=(
        # Ollama's documented example of all options has typical_p 0.7; refused, the first call that people copy would fail.
        *("typical_p", "mirostat_tau", "mirostat_eta", "penalize_newline", "num_ctx", "num_keep"),
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
        *("vocab_only", "use_mmap", "use_mlock", "logits_all"),
    ),
    only=_IN_OPTIONS.__contains__,
)
NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "options.num_predict",
    **{name: f"options.{name}" for name in sorted(_IN_OPTIONS)},
}
"""The names of fields of the service in a request."""


def decode(spec: BodySpec[Any], document: Mapping[str, Any], *, strict: bool) -> Decoded[Any]:
    """Decode a body and its options. Raises :class:`Fault`."""
    given, ignored = given_in(spec, document, strict=strict)
    options = given.get("options", {})
    if not isinstance(options, dict):
        raise invalid("options", "must be an object")
    try:
        chosen, others = given_in(OPTIONS, options, strict=strict)
    except Fault as fault:
        fault.param = f"options.{fault.param}"
        raise
    names = (*ignored, *(f"options.{name}" for name in others))
    return Decoded(spec.struct(**given, **chosen), names)


def tagged(name: str) -> str:
    """Return a model's name as Ollama lists it: with a tag."""
    return name if ":" in name else f"{name}:latest"


def required_model(named: str | None, context: Context) -> str | None:
    """Return the name of the only model that may answer, as the daemon knows it; None if any may.

    Raises:
        Fault: the daemon is strict, and the loaded model is another.
    """
    if named is None or not context.settings.strict:
        return None
    bounds = context.served.bounds
    for name in (named, named.removesuffix(":latest")):
        if bounds.names(name):
            return name
    problem = f"model '{named}' not found: this daemon serves {bounds.model} and nothing else"
    raise Fault(404, problem, code="model_not_found", param="model")
