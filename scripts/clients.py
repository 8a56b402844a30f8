"""Play one session with tools and a schema by clients that nobody has changed: ``make clients``.

    .venv/bin/python scripts/clients.py [CLIENT ...]

The session is that of ``tests/client_session.py``; the model says what ``tests/sessions_kit.py`` has. Clients that are not of
the extra ``sdk`` are installed, each in an environment of its own, in the cache beside llama.cpp's wheels: 2 GB
in all, of which aiperf takes 1.2. Prints one line for each client; the exit status is 1 if one heard something else than
was said, and 2 if one could not be installed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from setup import CACHE, NODE, PYTHON, ROOT, uv_path
from watched import Failed, watched

sys.path[:0] = [str(ROOT / name) for name in ("tests", "", "sim", "cluster")]

from sessions_kit import (  # noqa: E402 - it is found there
    CHECKED_OUT,
    NODE_CLIENTS,
    NODE_PACKAGES,
    VENVS,
    play,
    play_aiperf,
)

Place = Callable[[], str]
"""Installs what a client needs, unless it is there; returns the interpreter, or npm's folder."""


def main(wanted: Sequence[str]) -> int:
    """Play the session with every client, or with those wanted; return the exit status."""
    places = dict(_places())
    unknown = [name for name in wanted if name not in places]
    if unknown:
        print(f"There is no client {unknown[0]}; there are {', '.join(places)}.", file=sys.stderr)
        return 2
    status = 0
    for name in wanted or places:
        started = time.monotonic()
        try:
            place = places[name]()
        except Failed as failed:
            status, said = 2, f"could not be installed: {failed}"
        else:
            ok, said = _played(name, place)
            status = status or int(not ok)
        print(f"{name:18} {time.monotonic() - started:4.0f} s  {said}", flush=True)
    return status


def _places() -> Iterator[tuple[str, Place]]:
    for name in CHECKED_OUT:
        yield name, lambda: str(PYTHON)
    if shutil.which("node") and shutil.which("npm"):
        yield "openai-node", lambda: str(NODE)
        for name in NODE_CLIENTS[1:]:
            yield name, _npm
    else:
        print("There is no npm: the clients for Node are left out.", file=sys.stderr)
    for folder, (requirement, names) in VENVS.items():
        for name in names:
            yield name, lambda folder=folder, requirement=requirement: _venv(folder, requirement)


def _venv(name: str, requirement: str) -> str:
    """Return the interpreter of an environment with a requirement in it."""
    folder = CACHE / "clients" / f"{name}-{_digest(requirement)}"
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        uv = uv_path()
        create = [uv, "venv", str(folder)] if uv else [sys.executable, "-m", "venv", str(folder)]
        install = [uv, "pip", "install", "--python", str(python)] if uv else []
        install = install or [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        watched(f"Creating an environment for {name}", create)
        watched(f"Installing {requirement}", [*install, requirement])
        done.touch()
    return str(python)


def _npm() -> str:
    """Return the folder with the packages for Node."""
    folder = CACHE / "clients" / f"node-{_digest(*NODE_PACKAGES)}"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-fund"]
        watched("Installing clients for Node", [*command, "--no-audit", *NODE_PACKAGES])
        (folder / "installed").touch()
    return str(folder)


def _digest(*words: str) -> str:
    return hashlib.sha256(json.dumps([sys.version, *words]).encode()).hexdigest()[:12]


def _played(name: str, place: str) -> tuple[bool, str]:
    """Play the session; return whether all went well, and a line about it."""
    plays: dict[str, Callable[[], dict[str, Any]]] = {
        "whole": lambda: play(name, stream=False, python=place),
        "streamed": lambda: play(name, stream=True, python=place),
    }
    if name == "aiperf":
        plays = {"chat, streaming, tools": lambda: play_aiperf(place)}
    said: list[str] = []
    version = ""
    ok = True
    for kind, act in plays.items():
        try:
            version = str(act()["version"])
        except Exception as error:
            ok = False
            last = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
            said.append(f"{kind} FAILED: {last[-1].strip()[:300]}")
        else:
            said.append(f"{kind} ok")
    return ok, f"{version:8} {', '.join(said)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
