"""`logit_bias` in every form that clients send: by token id or by text, as an object or as pairs.

OpenAI takes an object by token id. llama-server takes an object or a list of pairs, each by id or by
text, and false for a token that must not come. A text stands for all of its tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Final

from uma_protocol.rules import MAX_INT32, FieldFault, Number, Text
from uma_trio.api.context import Context
from uma_trio.http.errors import invalid

MOST: Final = 1024
_FEW: Final = 16  # texts, each with as many tokens as bytes
LIMIT: Final = 100.0  # OpenAI's: as good as a ban, or as a must

_ID = re.compile("0|[1-9][0-9]{0,9}")
_TEXT = Text(1, 256)
_NUMBER = Number(-1000, 1000)


class Biases:
    """The rule of the field."""

    text = (
        f"at most {MOST} biases, by token id or by text, as an object such as "
        '{"15043": -1, " sea": false} or as pairs such as [[15043, -1], [" sea", false]]; '
        f"each is {_NUMBER.text}, or false; a pair may be an object of `token` and `bias`, too"
    )

    def check(self, path: str, value: Any) -> FieldFault | None:
        """A bias at fault is named by its place in a list, in an object by the id."""
        if not isinstance(value, dict | list) or len(value) > MOST:
            return FieldFault(path, f"must be {self.text}")
        if isinstance(value, dict):
            found = (_check(f"{path}.{_shown(key)}", key, bias) for key, bias in value.items())
        else:
            found = (
                _check(f"{path}[{i}]", *pair)
                if (pair := _pair_of(each)) is not None
                else FieldFault(f"{path}[{i}]", "must be a pair such as [15043, -1]")
                for i, each in enumerate(value)
            )
        return next((fault for fault in found if fault is not None), None)


async def by_token(given: Any, context: Context) -> dict[int, float]:
    """Return biases as one number for each token id.

    Several entries of one token are summed, as llama-server does, and limited to ±100.

    Raises:
        Fault: the texts have too many tokens.
    """
    named = isinstance(given, dict)  # an object has no names but texts: digits are an id
    pairs = (
        [(_id_or_text(k), v) for k, v in given.items()]
        if named
        else [pair for each in given if (pair := _pair_of(each)) is not None]
    )
    keys = [key for key, _ in pairs]
    texts = await context.served.tokenize_each([key for key in keys if isinstance(key, str)])

    def add_up() -> dict[int, float]:
        left = iter(texts)
        total: defaultdict[int, float] = defaultdict(float)
        for key, (_, bias) in zip(keys, pairs, strict=True):
            for token in next(left) if isinstance(key, str) else (key,):
                total[token] += -LIMIT if bias is False else _trimmed(bias)
        return {token: _trimmed(bias) for token, bias in total.items()}

    by_id = await context.run_blocking(add_up) if len(texts) > _FEW else add_up()
    if len(by_id) > MOST:
        raise invalid(
            "logit_bias", f"has {len(by_id)} tokens in its texts; at most {MOST} are taken"
        )
    return by_id


def _check(path: str, key: Any, bias: Any) -> FieldFault | None:
    whole = type(key) is int and 0 <= key <= MAX_INT32
    if not whole and (not isinstance(key, str) or _TEXT.check(path, key) is not None):
        return FieldFault(path, "must be of a token id, or of a text of 1 to 256 bytes")
    if isinstance(key, str) and _ID.fullmatch(key) and int(key) > MAX_INT32:
        return FieldFault(path, f"must be of a token id of at most {MAX_INT32}")
    return None if bias is False else _NUMBER.check(path, bias)


def _pair_of(value: Any) -> tuple[Any, Any] | None:
    """Return a bias of a list; None if it is none. An answer's settings tell theirs as objects."""
    if isinstance(value, dict) and value.keys() == {"token", "bias"}:
        bias = value["bias"]
        return value["token"], False if bias is None else bias
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else None


def _id_or_text(name: str) -> int | str:
    return int(name) if _ID.fullmatch(name) else name


def _shown(key: str) -> str:
    """Return a name only where it is an id: texts are the client's, and in no message."""
    return key if _ID.fullmatch(key) else "text"


def _trimmed(bias: float) -> float:
    return float(max(-LIMIT, min(LIMIT, bias)))
