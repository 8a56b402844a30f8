"""What the clients for trio and for asyncio have in common: a program imports it from either."""

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

__all__ = [
    "HELD_BACK",
    "Alternative",
    "CallPiece",
    "Chat",
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
    "default_socket",
    "generate_sync",
]
