"""Probabilities of tokens, in the two forms that OpenAI's APIs have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uma_trio.engine.messages import TokenOut
from uma_trio.service.service import Service

_DIGITS = 6


def chat_logprobs(tokens: Sequence[TokenOut], service: Service) -> dict[str, Any] | None:
    """Return the `logprobs` of a chat's choice; None if nobody asked."""
    content = [
        {
            **_token(token.token_id, token.logprobs.logprob, service),
            "top_logprobs": [_token(id_, logprob, service) for id_, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None} if content else None


def text_logprobs(
    tokens: Sequence[TokenOut], service: Service, offset: int = 0
) -> dict[str, Any] | None:
    """Return the `logprobs` of a text's choice, whose first token stands at `offset`."""
    found = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    if not found:
        return None
    offsets = []
    for token, _ in found:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [service.text_of(token.token_id) for token, _ in found],
        "token_logprobs": [_rounded(logprobs.logprob) for _, logprobs in found],
        "top_logprobs": [
            {service.text_of(id_): _rounded(p) for id_, p in logprobs.top} for _, logprobs in found
        ],
        "text_offset": offsets,
    }


def _token(id_: int, logprob: float, service: Service) -> dict[str, Any]:
    return {
        "token": service.text_of(id_),
        "logprob": _rounded(logprob),
        "bytes": list(service.detokenize((id_,))),
        "id": id_,
    }


def _rounded(logprob: float) -> float:
    return round(logprob, _DIGITS) + 0.0  # never -0.0
