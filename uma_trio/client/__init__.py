"""The client that applications import: stream text from the local daemon.

    async with connect() as client:
        async with client.generate("Once upon a time", max_tokens=50) as story:
            async for token in story:
                print(token.text, end="")

Scripts without trio use :func:`generate_sync`.
"""

from uma_protocol import (
    Alternative,
    CallPiece,
    End,
    Eos,
    Explanation,
    Logprobs,
    Message,
    SessionInfo,
    Slo,
    Token,
    Tool,
    ToolCall,
)
from uma_trio.client.errors import ConnectionFailed, ServerError
from uma_trio.client.request import HELD_BACK, Chat, Params
from uma_trio.client.script import generate_sync
from uma_trio.client.streaming import Client, Generation, connect
from uma_trio.sockets.path import default_socket

__all__ = [
    "HELD_BACK",
    "Alternative",
    "CallPiece",
    "Chat",
    "Client",
    "ConnectionFailed",
    "End",
    "Eos",
    "Explanation",
    "Generation",
    "Logprobs",
    "Message",
    "Params",
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
