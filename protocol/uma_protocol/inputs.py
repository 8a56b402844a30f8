"""Which input of the tables of states each message is."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from .events import (
    End,
    Eos,
    Error,
    Event,
    Explanation,
    Loading,
    Metrics,
    Ok,
    Prefixes,
    Scores,
    Sessions,
    Token,
    Vectors,
)
from .requests import (
    Cancel,
    Embed,
    Explain,
    Generate,
    GetMetrics,
    Hello,
    ListSessions,
    LoadModel,
    Prefix,
    Request,
    Rerank,
    SetPriority,
    UnloadModel,
)
from .states import Input

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUESTS: Mapping[type, Input] = MappingProxyType(
    {
        Hello: Input.HELLO,
        Generate: Input.REQUEST,
        Embed: Input.REQUEST,
        Rerank: Input.REQUEST,
        Cancel: Input.ADMIN,
        SetPriority: Input.ADMIN,
        ListSessions: Input.ADMIN,
        Explain: Input.ADMIN,
        Prefix: Input.ADMIN,
        LoadModel: Input.ADMIN,
        UnloadModel: Input.ADMIN,
        GetMetrics: Input.ADMIN,
    }
)
"""What a client sends."""

EVENTS: Mapping[type, Input] = MappingProxyType(
    {
        Token: Input.TOKEN,
        End: Input.END,
        Loading: Input.LOADING,
        Vectors: Input.RESULT,
        Scores: Input.RESULT,
        Eos: Input.EOS,
        Error: Input.REPLY,  # unless it is fatal
        Ok: Input.REPLY,
        Sessions: Input.REPLY,
        Explanation: Input.REPLY,
        Prefixes: Input.REPLY,
        Metrics: Input.REPLY,
    }
)
"""What a server sends."""


def input_of(message: Request | Event, inputs: Mapping[type, Input]) -> Input:
    """Which input of the tables a message is, which must be one of `inputs`."""
    if isinstance(message, Error) and message.fatal:
        return Input.FATAL
    return inputs[type(message)]
