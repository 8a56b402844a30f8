"""`uma-trio models`: the models on this machine, and which of them fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import asdict, evolve, frozen

from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import OK, console, print_json
from uma_trio.config import settings
from uma_trio.config.hardware import physical_cores
from uma_trio.config.options import Config
from uma_trio.library.stores import Found, models_here
from uma_trio.library.weights_names import quant_of
from uma_trio.words import count, size

if TYPE_CHECKING:
    from uma_trio.backend.needs import Estimate

    Estimating = Callable[[Config], Estimate]


@frozen
class Row:
    """One model. `problem` says why it cannot be served; "" if nothing is known against it.

    `n_ctx_fits` is the largest context for which the free memory suffices, 0 if there is none.
    """

    name: str
    source: str
    path: str
    size_bytes: int = 0
    quant: str = ""
    n_ctx_train: int = 0
    needs_bytes: int = 0
    fits: bool | None = None
    n_ctx_fits: int | None = None
    problem: str = ""


def models(
    *,
    model_dir: Annotated[
        tuple[str, ...] | None,
        Parameter(help="A further folder with GGUF files.", metavar="FOLDER", negative=""),
    ] = None,
    json: Annotated[bool, Parameter(help="Print JSON.", negative="")] = False,
) -> int:
    """List the models on this machine: folders, Hugging Face's cache, Ollama, LM Studio.

    NEEDS is the memory at the daemon's --n-ctx: weights, KV cache, buffers. FITS is the largest --n-ctx for which the free
    memory suffices, or what is wrong with the file. Each model is tried in a process of its own, which takes
    about a second; what was found is kept until the file changes. Any NAME can be given to `uma-trio serve --model`.
    """
    config = settings.load({"model_dir": model_dir})
    rows = rows_of(models_here(config.model_dir, os.environ, Path.home()), config, _room())
    if json:
        print_json([asdict(row) for row in rows])
    elif not rows:
        console().print(
            "There is no model here but the bundled one. Fetch one with `uma-trio pull owner/repo`."
        )
    else:
        _table(rows, config)
    return OK


def rows_of(
    found: Sequence[Found], config: Config, room: int | None, estimate: Estimating | None = None
) -> list[Row]:
    """Return what is known of each model, with `room` bytes of memory free.

    Each is tried in a process of its own, as many at once as there are cores.
    """
    from uma_trio.app import wiring

    row = partial(_row, config=config, room=room, estimate=estimate or wiring.estimate)
    with ThreadPoolExecutor(max_workers=physical_cores()) as tries:
        return list(tries.map(row, found))


def _room() -> int | None:
    from uma_trio.backend.kv_memory import available_memory

    return available_memory()


def _row(model: Found, config: Config, room: int | None, estimate: Estimating) -> Row:
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.gguf_header import read_header

    known: dict[str, Any] = {"name": model.name, "source": model.source, "path": str(model.path)}
    try:
        header = read_header(model.path)
        known |= {
            "size_bytes": header.size_bytes,
            "quant": quant_of(model.path.name) or quant_of(model.name),
            "n_ctx_train": header.number("context_length"),
        }
        needed = estimate(evolve(config, model=model.path))
    except ModelError as error:
        return Row(**known, problem=str(error).removeprefix(f"{model.path} "))
    return Row(
        **known,
        needs_bytes=needed.needs.total,
        fits=None if room is None else needed.needs.total <= room,
        n_ctx_fits=None if room is None else needed.largest_context(room),
    )


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("NAME", lambda row: row.name),
    ("SOURCE", lambda row: row.source),
    ("SIZE", lambda row: size(row.size_bytes) if row.size_bytes else "-"),
    ("QUANT", lambda row: row.quant or "-"),
    ("CONTEXT", lambda row: count(row.n_ctx_train) if row.n_ctx_train else "-"),
    ("NEEDS", lambda row: size(row.needs_bytes) if row.needs_bytes else "-"),
    ("FITS", lambda row: row.problem or _fits(row)),
)


def _fits(row: Row) -> str:
    """Say up to which context a model fits."""
    if row.n_ctx_fits is None:
        return "?"
    return f"--n-ctx {row.n_ctx_fits}" if row.n_ctx_fits else "no"


def _table(rows: Sequence[Row], config: Config) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, _ in _COLUMNS:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(text(row) for _, text in _COLUMNS))
    console().print(table)
    room = _room()
    if room is not None:
        console().print(f"{size(room)} of memory are free; NEEDS is for --n-ctx {config.n_ctx}.")
