"""Tries a model in a process of its own, before it is loaded: llama.cpp ends the process at some files.

``python -m uma_trio.backend.llama_probe FILE QUESTION`` writes what the model needs as a line of JSON. With ``--adapter ADAPTER`` for the
question it computes two tokens of the model with that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from uma_trio.backend.base import ModelError
from uma_trio.backend.needs import Estimate, Needs, Question
from uma_trio.backend.polite import POLITE

_LONGEST_S: Final = 60.0
_ADAPTER: Final = "--adapter"


def probe(path: Path) -> Needs:
    """Return what an encoder needs. Takes about a second. Raises ModelError if it cannot be loaded."""
    return Needs(**_asked(path, None)["needs"])


def estimate(path: Path, question: Question | None) -> Estimate:
    """Return what a model that writes needs, or, without a question, an encoder. Raises as :func:`probe`."""
    if question is None:
        needs = probe(path)
        return Estimate(needs, needs, (needs,))
    found = _asked(path, question)
    curve = tuple(Needs(**each) for each in found["curve"])
    return Estimate(Needs(**found["needs"]), Needs(**found["least"]), curve, found["trained"])


def probe_adapter(path: Path, adapter: Path) -> None:
    """Try an adapter with the model that it is for. Takes seconds, as the model is read.

    Raises:
        ModelError: it cannot be used.
    """
    _answer(path, [_ADAPTER, str(adapter)], adapter)


def _asked(path: Path, question: Question | None) -> dict[str, Any]:
    return _answer(path, [json.dumps(None if question is None else asdict(question))], path)


def _answer(path: Path, words: Sequence[str], looked_at: Path) -> dict[str, Any]:
    """Return what a process of its own says. Raises :class:`ModelError`."""
    command = [sys.executable, "-P", "-m", "uma_trio.backend.llama_probe", str(path), *words]
    try:
        tried = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"llama.cpp took more than {_LONGEST_S:g} s to look at {looked_at}."
        ) from None
    try:
        found: dict[str, Any] = json.loads(tried.stdout)
    except ValueError:
        raise ModelError(
            f"llama.cpp ended its process when it read {looked_at}: the file is damaged or not supported; "
            "download it again."
        ) from None
    if "problem" in found:
        raise ModelError(str(found["problem"]))
    return found


def main(path: Path, asked: str, adapter: Path | None = None) -> None:
    """Try the model and write a line of JSON, behind all who compute for readers."""
    os.nice(POLITE)
    from uma_trio.backend import _llama_adapters, llama_needs

    wanted = None if adapter is not None else json.loads(asked)
    answer: dict[str, object] = {}
    try:
        if adapter is not None:
            _llama_adapters.try_adapter(path, adapter)
        elif wanted is None:
            answer = {"needs": asdict(llama_needs.of_encoder(path))}
        else:
            wanted["others"] = tuple(wanted["others"])
            answer = asdict(llama_needs.of_model(path, Question(**wanted)))
    except ModelError as error:
        answer = {"problem": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    file, word, *further = sys.argv[1:]
    main(Path(file), word, Path(further[0]) if word == _ADAPTER else None)
