"""`uma-trio pull`: fetch a model from Hugging Face's hub into its cache."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from uma_trio.cli.output import OK, REFUSED, complain, console
from uma_trio.library.download import Download, Progress
from uma_trio.library.hub import Hub, WantedFiles, choose
from uma_trio.library.hub_cache import CachedRepository, cache_folder
from uma_trio.library.reference import MAIN, PullFailed, reference
from uma_trio.words import size

_LINE_EACH_S = 10.0


def pull(
    model: Annotated[
        str,
        Parameter(
            help="The repository, as owner/repo or owner/repo:QUANT, or the address of its page or of a file on the hub."
            " Without QUANT: Q4_K_M, else Q8_0.",
            show=True,
        ),
    ],
    /,
    *,
    mmproj: Annotated[
        bool,
        Parameter(help="Also fetch the model's projector for images.", negative="--no-mmproj"),
    ] = True,
) -> int:
    """Fetch a GGUF model from Hugging Face's hub, whole and checked.

    A fetch that was cut goes on where it ended. The files go to the cache that the hub's own tools
    use. Repositories that need a token get that of `hf auth login`. Environment: HF_ENDPOINT for a
    mirror, HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE.
    """
    try:
        hub = Hub.of(os.environ, Path.home())
        asked = reference(model, hub.endpoint)
        files = hub.files(asked.repository, asked.revision)
        wanted = choose(files, asked.quant, projector=mmproj, path=asked.path)
        name = f"{asked.repository}:{wanted.quant}"
        console().print(
            f"{name}: {_parts(wanted)}, {size(wanted.n_bytes)}.{_against_memory(wanted)}"
        )
        cache = cache_folder(os.environ, Path.home())
        with _shown() as progress:
            repository = CachedRepository.of(cache, asked.repository)
            download = Download(
                hub, asked.repository, repository, progress, revision=asked.revision
            )
            path = download.fetch(wanted)
    except PullFailed as failed:
        complain(f"Cannot pull {model}: {failed}.")
        return REFUSED
    console().print(f"It is at {path}.", soft_wrap=True)
    # A quantisation names no single file where several models are in one repository, or several revisions here.
    served = shlex.quote(str(path)) if asked.path or asked.revision != MAIN else name
    console().print(f"Serve it with: uma-trio serve --model {served}", soft_wrap=True)
    return OK


def _parts(wanted: WantedFiles) -> str:
    return "1 file" if len(wanted.files) == 1 else f"{len(wanted.files)} files"


def _against_memory(wanted: WantedFiles) -> str:
    """Return a sentence about this machine's memory, as far as the size of the files tells."""
    from uma_trio.backend.kv_memory import available_memory

    room = available_memory()
    if room is None:
        return ""
    if room < wanted.n_bytes:
        return (
            f" This machine has {size(room)} of memory free: it will not fit; choose a smaller"
            " quantisation or model."
        )
    return f" This machine has {size(room)} of memory free."


@contextmanager
def _shown() -> Iterator[Progress]:
    """Show a bar on a terminal, otherwise a line every ten seconds."""
    if sys.stderr.isatty():
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task("fetch", total=None)
            yield lambda there, total: bar.update(task, completed=there, total=total)
        return
    told = time.monotonic()

    def tell(there: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _LINE_EACH_S:
            told = time.monotonic()
            console(stderr=True).print(f"{size(there)} of {size(total)}")

    yield tell
