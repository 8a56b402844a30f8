"""What a request in Ollama's API may contain: its fields, and the `options` that stand in one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve

from uma_protocol.rules import MAX_INT32, Flag, Integer
from uma_trio.api.asking import (
    AWAITS,
    CACHE,
    LANE,
    LORA,
    MODEL,
    PACE,
    SAMPLING,
    SPECULATION,
    Anything,
)
from uma_trio.api.fields import Body, Field, decode, honoured, ignored, refused
from uma_trio.api.loading import KEEP_ALIVE
from uma_trio.engine.messages import SamplingParams
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.settings import Shared

# https://github.com/ollama/ollama/blob/v0.12.11/api/types.go, DefaultOptions
DEFAULTS: Final = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, repeat_penalty=1.1, repeat_last_n=64
)
_SAID: Final[Mapping[str, str]] = {
    "temperature": "0.8",
    "top_k": "40",
    "top_p": "0.9",
    "min_p": "0",
    "repeat_penalty": "1.1",
    "repeat_last_n": "64",
    **dict.fromkeys(("seed", "stop", "presence_penalty", "frequency_penalty"), ""),
}
_OTHER_SAMPLERS: Final = "the samplers are temperature, top_k, top_p and min_p"

OPTIONS: Final[tuple[Field, ...]] = (
    *(evolve(field, default=_SAID[field.name]) for field in SAMPLING if field.name in _SAID),
    honoured(
        "num_predict",
        Integer(-2, MAX_INT32),
        "the longest answer in tokens, limited to the free room in the context; 0 and below: the room",
        default="-1",
    ),
    # Ollama's documented example of all options has it at 0.7; refused, the first call that people copy would fail.
    *ignored("typical_p", note=_OTHER_SAMPLERS),
    refused("tfs_z", _OTHER_SAMPLERS, 0, 0.0, 1, 1.0),
    refused("mirostat", _OTHER_SAMPLERS, 0, 0.0),
    *ignored("mirostat_tau", "mirostat_eta", "penalize_newline", note="without mirostat"),
    *ignored("num_ctx", "num_keep", note="the context is the daemon's: --n-ctx"),
    *ignored(
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
        *("vocab_only", "use_mmap", "use_mlock", "logits_all"),
        note="how the model is loaded is a setting of the daemon",
    ),
)

COMMON: Final[tuple[Field, ...]] = (
    MODEL,
    LORA,
    honoured("stream", Flag(), "a JSON document a line", default="true"),
    honoured(
        "format", Anything("`json` or a JSON Schema"), "the answer is an object, or an instance"
    ),
    honoured("options", Anything("an object"), "see below"),
    honoured(
        "think",
        Anything("true, false, or one of low, medium, high"),
        "whether the model reasons, and how much, if the chat template supports it",
        default="the template's",
    ),
    honoured(
        "logprobs",
        Flag(),
        "return each token's log probability in the model's own distribution",
        default="false",
    ),
    honoured(
        "top_logprobs", Integer(0, 20), "return this many alternatives, too; only with logprobs"
    ),
    LANE,
    *CACHE,
    SPECULATION,
    PACE,
    AWAITS,
    *KEEP_ALIVE,
    *ignored("truncate", "shift", note="a prompt that is too long is refused"),
)

NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "options.num_predict",
    **{field.name: f"options.{field.name}" for field in OPTIONS if field.treatment == "honoured"},
}
"""What the service's names of fields are in a request."""


def with_options(body: Body, *, strict: bool) -> Body:
    """Return the body with its options beside the other fields.

    Raises:
        Fault: they are no object, or one of them is wrong.
    """
    value = body.get("options", {})
    if not isinstance(value, dict):
        raise invalid("options", "must be an object")
    try:
        found = decode(OPTIONS, value, strict=strict)
    except Fault as fault:
        fault.param = f"options.{fault.param}"
        raise
    names = [f"options.{name}" for name in found.ignored]
    return Body({**body.given, **found.given}, (*body.ignored, *names))


def tagged(name: str) -> str:
    """Return a model's name as Ollama lists it: with a tag."""
    return name if ":" in name else f"{name}:latest"


def required_model(named: str | None, shared: Shared) -> str | None:
    """Return which model has to be the loaded one, under a name of it; None if any may be.

    Raises:
        Fault: the daemon is strict, and that is another model.
    """
    if named is None or not shared.settings.strict:
        return None
    bounds = shared.served.bounds
    for name in (named, named.removesuffix(":latest")):
        if bounds.names(name):
            return name
    problem = f"model '{named}' not found: this daemon serves {bounds.model} and nothing else"
    raise Fault(404, problem, code="model_not_found", param="model")


def logprobs_of(body: Body) -> int | None:
    """Return how many alternatives each token comes with; None for no probabilities.

    Raises:
        Fault: there are to be alternatives to nothing.
    """
    top: Any = body.get("top_logprobs", 0)
    if body.get("logprobs", False):
        return int(top)
    if top:
        raise invalid("top_logprobs", "needs logprobs true")
    return None
