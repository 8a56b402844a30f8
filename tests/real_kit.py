"""A real daemon with llama.cpp in this process, asked over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import trio

from uma_trio.app import daemon
from uma_trio.backend.base import Backend
from uma_trio.config.settings import load


async def asked(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Ask a daemon over HTTP; return the status and the document."""

    def ask() -> tuple[int, Any]:
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    return await trio.to_thread.run_sync(ask)


@asynccontextmanager
async def served(
    tmp_path: Path, models: str, backend: Backend | None = None, **more: str
) -> AsyncIterator[int]:
    """Serve the models of this section, with `more` options; return the HTTP port. A `backend` is the first of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = tmp_path / "uma.yaml"
    settings.write_text(f"models:\n{models}" if models else "")
    flags = {"config": str(settings), "socket": str(tmp_path / "s"), "policy": "baseline", **more}
    config = load({**flags, "http": f"127.0.0.1:{port}", "n_ctx": "512"}, {})
    ready = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            serve = partial(daemon.serve, config, backend=backend)
            nursery.start_soon(partial(serve, on_ready=lambda _info: ready.set()))
            await ready.wait()
            yield port
            nursery.cancel_scope.cancel()
