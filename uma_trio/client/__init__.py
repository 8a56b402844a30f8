"""The client that applications import: stream text from the local daemon.

    async with connect() as client:
        async with client.generate("Once upon a time", max_tokens=50) as story:
            async for token in story:
                print(token.text, end="")

Scripts without trio use :func:`generate_sync`.
"""

from uma_protocol import Eos, Explanation, Message, SessionInfo, Slo, Token
from uma_trio.client.errors import ConnectionFailed, ServerError
from uma_trio.client.link import DEFAULT_SOCKET
from uma_trio.client.request import HELD_BACK, Chat, Params
from uma_trio.client.script import generate_sync
from uma_trio.client.streaming import Client, Generation, connect

__all__ = [
    "DEFAULT_SOCKET",
    "HELD_BACK",
    "Chat",
    "Client",
    "ConnectionFailed",
    "Eos",
    "Explanation",
    "Generation",
    "Message",
    "Params",
    "ServerError",
    "SessionInfo",
    "Slo",
    "Token",
    "connect",
    "generate_sync",
]
