"""The client that applications import: stream text from the local daemon.

    async with connect() as client:
        async with client.generate("Once upon a time", max_tokens=50) as story:
            async for token in story:
                print(token.text, end="")

Scripts without trio use :func:`generate_sync`, and asyncio programs :mod:`uma_trio.client.aio`. Trio is
imported when :func:`connect` or :class:`Client` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uma_protocol import (
    Alternative,
    CallPiece,
    End,
    Eos,
    Explanation,
    Logprobs,
    Message,
    Score,
    SessionInfo,
    Slo,
    Token,
    Tool,
    ToolCall,
)
from uma_trio.client.encoding import Embeddings, Ranking
from uma_trio.client.errors import ConnectionFailed, ServerError
from uma_trio.client.request import HELD_BACK, Chat, Params
from uma_trio.client.script import generate_sync
from uma_trio.client.streaming import Generation
from uma_trio.sockets.path import default_socket

if TYPE_CHECKING:
    from uma_trio.client.on_trio import Client, connect

__all__ = [
    "HELD_BACK",
    "Alternative",
    "CallPiece",
    "Chat",
    "Client",
    "ConnectionFailed",
    "Embeddings",
    "End",
    "Eos",
    "Explanation",
    "Generation",
    "Logprobs",
    "Message",
    "Params",
    "Ranking",
    "Score",
    "ServerError",
    "SessionInfo",
    "Slo",
    "Token",
    "Tool",
    "ToolCall",
    "connect",
    "default_socket",
    "generate_sync",
]


def __getattr__(name: str) -> Any:
    if name not in ("Client", "connect"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uma_trio.client import on_trio

    globals()[name] = found = getattr(on_trio, name)
    return found
