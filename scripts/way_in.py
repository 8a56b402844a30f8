"""Which modules a chat with a schema, a cached prefix and drafts passes on its way in: from its accept to the first decode.

    .venv/bin/python scripts/way_in.py

A daemon on the fake model, with the deadline policy and HTTP, runs in this process. Each of several chats comes on a
connection of its own. A module counts if a function of it is called, in whatever thread, for each of them; one that only
holds values does not. The order is that of the first call.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType

import trio

import uma_protocol
import uma_trio
from uma_trio.app import daemon
from uma_trio.backend.base import Overlap, nothing
from uma_trio.config.settings import load
from uma_trio.observe import log
from uma_trio_sim.fake import FakeBackend

ROOTS = [Path(str(package.__file__)).parent for package in (uma_trio, uma_protocol)]
CHATS = 7
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
SYSTEM = f"You are {'very ' * 60}kind."


class Watch:
    """Notes the files of the functions that are called while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call, as :func:`sys.setprofile` says it."""
        if self.on and event == "call":
            self.files.setdefault(frame.f_code.co_filename)


class UntilDecode(FakeBackend):
    """Ends the watch at a decode."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(n_ctx=16_384, n_slots=4, n_batch=512, n_rows=64)
        self.watch = watch

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute."""
        self.watch.on = False
        return super().decode(n_tokens, while_computing)


def ask(port: int, text: str) -> None:
    """Send a chat and read its answer."""
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    body = {"messages": said, "stream": True, "max_tokens": 40, "response_format": shape}
    client = HTTPConnection("127.0.0.1", port)
    client.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    client.getresponse().read()
    client.close()


def passed(port: int, watch: Watch) -> list[str]:
    """Return the names of the modules that each of the chats passes, in their order."""
    for _ in range(2):  # the schema is compiled, the prefix cached, and the daemon at rest
        ask(port, "hello")
    runs: list[dict[str, None]] = []
    for n in range(CHATS):
        time.sleep(0.2)  # the chat before has ended, and what is done behind it
        watch.files, watch.on = {}, True
        ask(port, f"hello again, {n}")
        runs.append(watch.files)
    always = set.intersection(*map(set, runs))
    return [name for file in runs[-1] if file in always and (name := name_of(file))]


def name_of(file: str) -> str:
    """Return the name of one of our modules, "" for any other."""
    root = next((root for root in ROOTS if Path(file).is_relative_to(root)), None)
    return (
        "" if root is None else ".".join(Path(file).relative_to(root.parent).with_suffix("").parts)
    )


async def main() -> None:
    """Print the list by package."""
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as folder:
        port = free.getsockname()[1]
        free.close()
        given = {"socket": f"{folder}/s", "http": str(port), "speculation": "auto"}
        watch, ready = Watch(), trio.Event()
        threading.setprofile(watch)
        sys.setprofile(watch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(
                    daemon.serve,
                    load(given, env={}),
                    backend=UntilDecode(watch),
                    on_ready=lambda _: ready.set(),
                )
            )
            await ready.wait()
            names = await trio.to_thread.run_sync(passed, port, watch)
            nursery.cancel_scope.cancel()
    sys.setprofile(None)
    packages: dict[str, list[str]] = {}
    for name in names:
        packages.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for package, inside in packages.items():
        print(
            f"{len(inside):4} {package}: {', '.join(name.removeprefix(f'{package}.') for name in inside)}"
        )
    print(f"{len(names):4} modules")


if __name__ == "__main__":
    log.configure("error")
    trio.run(main)
