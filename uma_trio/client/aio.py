"""The client for asyncio: the names of :mod:`uma_trio.client`, without trio.

    async with connect() as client:
        async with client.generate("Once upon a time", max_tokens=50) as story:
            async for token in story:
                print(token.text, end="")

The same classes, parameters, errors and guarantees under cancellation. Two generations at once on
one connection raise RuntimeError.
"""

from uma_trio.client import (
    HELD_BACK,
    Alternative,
    CallPiece,
    Chat,
    ConnectionFailed,
    Embeddings,
    End,
    Eos,
    Explanation,
    Generation,
    Logprobs,
    Message,
    Params,
    Ranking,
    Score,
    ServerError,
    SessionInfo,
    Slo,
    Token,
    Tool,
    ToolCall,
    default_socket,
    generate_sync,
)
from uma_trio.client.on_asyncio import Client, connect

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
