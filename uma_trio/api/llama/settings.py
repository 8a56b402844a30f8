"""What llama-server tells a client of its own request: its settings, and only the fields it wants. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from uma_protocol.schema import model_defaults
from uma_trio.engine.messages import SamplingParams


def generation_settings(
    sampling: SamplingParams,
    *,
    n_predict: int,
    stop: Sequence[str] = (),
    streams: bool = False,
    ends: Iterable[int] = (),
) -> dict[str, Any]:
    """Return how an answer is computed, under llama-server's names.

    `ends` are the tokens that end an answer. A bias of null is a ban.
    """
    bias: list[dict[str, Any]] = [
        {"token": token, "bias": value} for token, value in sampling.logit_bias
    ]
    if sampling.ignore_eos:
        bias += [{"token": token, "bias": None} for token in sorted(ends)]
    return {
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "seed": sampling.seed,
        **{name: getattr(sampling, name) for name in model_defaults()},
        "adaptive_target": -1.0,  # off: the daemon has no such sampler
        "adaptive_decay": 0.9,
        "stop": list(stop),
        "ignore_eos": sampling.ignore_eos,
        "stream": streams,
        "logit_bias": bias,
        "n_probs": sampling.logprobs or 0,
        "post_sampling_probs": sampling.post_sampling,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def only(wanted: Sequence[str], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the members of a document that are wanted, each by its path; all of them if none is.

    A path such as ``generation_settings/n_predict`` is the member's name in what is returned. One that
    leads nowhere is left out.
    """
    if not wanted:
        return document
    found: dict[str, Any] = {}
    for path in wanted:
        value: Any = document
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found
