"""Tries an encoder in a process of its own, before it is loaded: llama.cpp ends the process at some files.

``python -m uma_trio.backend.llama_probe FILE`` makes the model and its context without memory for the weights, and
writes what they need.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from attrs import frozen

from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import read_header

_LONGEST_S: Final = 60.0
# llama-context.cpp, sched_reserve: "%10s compute buffer size = %8.2f MiB".
_COMPUTE: Final = re.compile(r"compute buffer size = +([0-9.]+) MiB")
_MIB: Final = 1 << 20
_WRITES: Final = "--writes"


@frozen
class Needs:
    """The memory of an encoder, in bytes. `compute` is with its KV cache, if it has one."""

    weights: int
    compute: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.compute


def probe(path: Path, *, writes: bool = False) -> Needs:
    """Return what an encoder needs, or with `writes` the weights of a model that writes. Takes about a second.

    Raises:
        ModelError: it cannot be loaded.
    """
    command = [sys.executable, "-P", "-m", "uma_trio.backend.llama_probe", str(path)]
    command += [_WRITES] if writes else []
    try:
        tried = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"llama.cpp took more than {_LONGEST_S:g} s to look at {path}.") from None
    try:
        found = json.loads(tried.stdout)
    except ValueError:
        raise ModelError(
            f"llama.cpp ended its process when it read {path}: the file is damaged or not supported; "
            "download it again."
        ) from None
    if "problem" in found:
        raise ModelError(str(found["problem"]))
    return Needs(int(found["weights"]), int(found["compute"]))


def main(path: Path, *, writes: bool) -> None:
    """Try the model and write a line of JSON."""
    from uma_trio.backend import _llama_lib, llama_encoder
    from uma_trio.backend._llama_binding import llama
    from uma_trio.backend._llama_load import refuse_unsuitable

    _llama_lib.start()
    said: list[str] = []
    _llama_lib.set_log_sink(lambda _level, text: said.append(text), with_info=True)
    answer: dict[str, object]
    try:
        model = llama_encoder.load_weights(path, no_alloc=True)
        if writes:
            refuse_unsuitable(model.pointer, path)
            answer = {"weights": int(llama.llama_model_size(model.pointer)), "compute": 0}
        else:
            context, info, room = llama_encoder.make_encoder_context(model, path, threads=1)
            llama.llama_free(context)
            sizes = _COMPUTE.findall("\n".join(said))
            compute = int(sum(map(float, sizes)) * _MIB) + llama_encoder.cache_bytes(
                read_header(path), room
            )
            answer = {"weights": info.size_bytes, "compute": compute}
    except ModelError as error:
        answer = {"problem": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), writes=_WRITES in sys.argv[2:])
