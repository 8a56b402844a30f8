"""`uma-trio pull`: download a model from Hugging Face's hub into its cache."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

from uma_trio.cli.output import OK, REFUSED, complain, console, say
from uma_trio.cli.parser import Parameter
from uma_trio.library.names import MAIN, PullFailed, reference
from uma_trio.library.stores import cache_folder
from uma_trio.words import several, size

_LINE_EACH_S: Final = 10.0


def pull(
    model: Annotated[
        str,
        Parameter(
            help="The repository, as owner/repo or owner/repo:QUANT, or the address of its page or of a file on the hub."
            " Without QUANT: Q4_K_M, else Q8_0."
        ),
    ],
    /,
) -> int:
    """Download a GGUF model from Hugging Face's hub, and check its SHA-256.

    An interrupted download resumes. The files go to the cache that the hub's own tools use. Repositories that
    need a token get that of `hf auth login` or HF_TOKEN. The environment of those tools counts: HF_ENDPOINT for a
    mirror, HF_HUB_CACHE, HF_HUB_OFFLINE, HTTPS_PROXY. Images are not supported, so projectors are not fetched.
    """
    from uma_trio.library import hub

    try:
        asked = reference(model, hub.endpoint())
        listing = hub.list_files(asked)
        selection = hub.select(listing.files, asked.quant, asked.path)
        name = f"{asked.repository}:{selection.quant}"
        about = f"{several(len(selection.files), 'file')}, {size(selection.n_bytes)}"
        say(f"{name}: {about}.{_against_memory(selection.n_bytes)}")
        with _progress() as progress:
            cache = cache_folder(os.environ, Path.home())
            path = hub.download(asked, listing.commit, selection, cache, progress)
    except PullFailed as failed:
        complain(f"Cannot pull {model}: {failed}.")
        return REFUSED
    say(f"It is at {path}.")
    # The name is ambiguous if several models are in one repository, or several revisions here.
    served = shlex.quote(str(path)) if asked.path or asked.revision != MAIN else name
    say(f"Serve it with: uma-trio serve --model {served}")
    return OK


def _against_memory(n_bytes: int) -> str:
    """Return a sentence about this machine's memory, as far as the size of the files tells."""
    from uma_trio.backend.kv_memory import available_memory

    room = available_memory()
    if room is None:
        return ""
    if room < n_bytes:
        return (
            f" This machine has {size(room)} of memory free: it will not fit; choose a smaller"
            " quantisation or model."
        )
    return f" This machine has {size(room)} of memory free."


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, otherwise a line every ten seconds."""
    if sys.stderr.isatty():
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task("download", total=None)
            yield lambda present, total: bar.update(task, completed=present, total=total)
        return
    reported = time.monotonic()

    def report(present: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _LINE_EACH_S:
            reported = time.monotonic()
            complain(f"{size(present)} of {size(total)}")

    yield report
