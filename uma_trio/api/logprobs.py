"""Probabilities of tokens, in the two forms that OpenAI's APIs have."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from attrs import frozen

from uma_trio.engine.messages import PromptDone, TokenLogprobs, TokenOut
from uma_trio.models.loaded import LoadedModel

_DIGITS = 6
_FEW = 64  # tokens


def chat_logprobs(tokens: Sequence[TokenOut], served: LoadedModel) -> dict[str, Any] | None:
    """Return the `logprobs` of a chat's choice; None if nobody asked."""
    pack = _packing(len(tokens))
    content = [
        pack(
            {
                **_token(token.token_id, token.logprobs.logprob, served),
                "top_logprobs": [
                    _token(id_, logprob, served) for id_, logprob in token.logprobs.top
                ],
            }
        )
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None} if content else None


def probabilities(
    tokens: Sequence[TokenOut], served: LoadedModel, *, post_sampling: bool
) -> list[dict[str, Any]] | None:
    """Return llama-server's `completion_probabilities`; None if nobody asked.

    With `post_sampling` they are no logarithms, and so are they called.
    """
    if not post_sampling:
        found = chat_logprobs(tokens, served)
        return None if found is None else found["content"]
    pack = _packing(len(tokens))
    content = [
        pack(
            {
                **_drawn(token.token_id, token.logprobs.logprob, served),
                "top_probs": [_drawn(id_, logprob, served) for id_, logprob in token.logprobs.top],
            }
        )
        for token in tokens
        if token.logprobs is not None
    ]
    return content or None


@frozen
class TokenPlace:
    """A token of a text, where in it the token begins, and what the model thought of it, if anything."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


def prompt_places(
    prompt: Sequence[int], done: PromptDone | None, served: LoadedModel
) -> list[TokenPlace]:
    """Return the tokens of a prompt if it was scored. Nothing is known of the first."""
    if done is None or done.logprobs is None:
        return []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    places, offset = [], 0
    for token, logprobs in zip(prompt, (None, *done.logprobs), strict=True):
        places.append(TokenPlace(token, offset, logprobs))
        offset += len(decoder.decode(served.detokenize((token,))))
    return places


def answer_places(tokens: Iterable[TokenOut], offset: int = 0) -> list[TokenPlace]:
    """Return the tokens of an answer whose text begins at `offset`, if their logprobs are known."""
    places = []
    for token in tokens:
        if token.logprobs is not None:
            places.append(TokenPlace(token.token_id, offset, token.logprobs))
        offset += len(token.text)
    return places


def text_logprobs(places: Sequence[TokenPlace], served: LoadedModel) -> dict[str, Any] | None:
    """Return the `logprobs` of a text's choice; None if there are none."""
    if not places:
        return None
    pack = _packing(len(places))
    return {
        "tokens": [served.text_of(place.token_id) for place in places],
        "token_logprobs": [
            None if place.logprobs is None else _rounded(place.logprobs.logprob) for place in places
        ],
        "top_logprobs": [
            None
            if place.logprobs is None
            else pack({served.text_of(id_): _rounded(p) for id_, p in place.logprobs.top})
            for place in places
        ],
        "text_offset": [place.offset for place in places],
    }


def _packing(n_tokens: int) -> Callable[[dict[str, Any]], Any]:
    """Return what is done to each part of a document: in a long one it is encoded on its own.

    The encoder then holds the GIL for one part at a time, and copies them in the end.
    """
    return _plainly if n_tokens <= _FEW else _encoded


def _plainly(part: dict[str, Any]) -> dict[str, Any]:
    return part


def _encoded(part: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(part))


def _token(id_: int, logprob: float, served: LoadedModel) -> dict[str, Any]:
    return {**_named(id_, served), "logprob": _rounded(logprob)}


def _drawn(id_: int, logprob: float, served: LoadedModel) -> dict[str, Any]:
    return {**_named(id_, served), "prob": min(1.0, math.exp(logprob))}


def _named(id_: int, served: LoadedModel) -> dict[str, Any]:
    return {
        "token": served.text_of(id_),
        "bytes": list(served.detokenize((id_,))),
        "id": id_,
    }


def _rounded(logprob: float) -> float:
    return round(logprob, _DIGITS) + 0.0  # never -0.0
