"""The synchronous client: a blocking socket, for scripts."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Unpack

import uma_protocol
from uma_protocol import End, Eos, Error, Event, Role, Token
from uma_trio.client.errors import ConnectionFailed, ServerError
from uma_trio.client.link import parsed
from uma_trio.client.reach import DaemonAddress, socket_path_of
from uma_trio.client.request import Chat, Params, build_request, held_back


def generate_sync(
    prompt: str | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    *,
    messages: Chat | None = None,
    **params: Unpack[Params],
) -> Iterator[Token]:
    """Yield the tokens of one request. Closing the generator cancels the request.

    The last token may have the `token_id` ``HELD_BACK``: text that was held back until the end.
    With `n` above 1 the tokens of the answers are interleaved; `choice` is the number of the
    answer.

    Raises:
        ServerError: the daemon refused the request or could not finish it.
        ConnectionFailed: no daemon serves there, another user's process does, or the connection broke.
    """
    request = build_request(prompt, messages, params)
    place = DaemonAddress(socket_path_of(socket_path))
    protocol = uma_protocol.Connection(Role.CLIENT, token=place.token)
    with place.new_socket() as sock:
        place.connect(sock)
        # The daemon's last events before it closed can still be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(protocol.opening() + protocol.send(request))
        for event in _events(sock, protocol):
            if isinstance(event, Token):
                yield event
            elif isinstance(event, Eos | End):
                if isinstance(event, Eos) and event.reason == "error":
                    raise ServerError.of(event)
                if (last := held_back(event)) is not None:
                    yield last
                if isinstance(event, Eos):
                    return
            elif isinstance(event, Error):
                raise ServerError.of(event)


def _events(sock: socket.socket, protocol: uma_protocol.Connection) -> Iterator[Event]:
    while True:
        event = parsed(protocol)
        if event is not None:
            yield event
            continue
        try:
            protocol.receive_data(sock.recv(65536))
        except ConnectionResetError:
            raise ConnectionFailed("the daemon closed the connection") from None
