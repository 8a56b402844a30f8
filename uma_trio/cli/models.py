"""`uma-trio models`, `list`, `show` and `rm`: the models on this machine, and which of them fit and are served."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from attrs import asdict, evolve, frozen

from uma_trio.cli.attempt import accepts, answer_of
from uma_trio.cli.output import (
    OK,
    REFUSED,
    USAGE,
    JsonFlag,
    SocketFlag,
    Trouble,
    complain,
    console,
    print_json,
    say,
    socket_path,
)
from uma_trio.cli.parser import Parameter
from uma_trio.config import settings
from uma_trio.config.hardware import physical_cores
from uma_trio.config.options import Config
from uma_trio.library.names import part_of, quant_of, stem_of
from uma_trio.library.stores import Found, cache_folder, matching_models
from uma_trio.words import count, harmless, nearest, size

if TYPE_CHECKING:
    from uma_protocol import ModelInfo
    from uma_trio.backend.needs import Estimate

    Estimating = Callable[[Config], Estimate]

_OWNERS: Final = {"ollama": "`ollama rm`", "lmstudio": "LM Studio"}


@frozen
class Row:
    """One model. `problem` says why it cannot be served, "" if nothing is known against it.

    `n_ctx_fits` is the largest context for which the free memory suffices, 0 if there is none. `served` is its
    state in the running daemon.
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
    served: str = ""


@frozen
class Daemon:
    """What the running daemon serves, and its settings (None unless it is this user's)."""

    models: Sequence[ModelInfo] = ()
    settings: Mapping[str, str] | None = None
    is_ours: bool = True

    def state_of(self, model: Found) -> str:
        """Return the state of a model in the daemon, "" if it does not serve it."""
        return next((each.state for each in self.models if self._is_file_of(each, model)), "")

    def elsewhere(self, found: Sequence[Found]) -> list[ModelInfo]:
        """Return the daemon's models whose files are not in `found`, such as those named by their path."""
        return [each for each in self.models if not any(self._is_file_of(each, m) for m in found)]

    def _is_file_of(self, served: ModelInfo, model: Found) -> bool:
        # The first model may be called as its file says, whatever the file's name.
        given = (self.settings or {}).get("model")
        if given and served is self.models[0]:
            return given in (model.name, str(model.path.absolute()))
        return served.name in (model.name, model.path.stem, stem_of(model.path.name))


ModelDirFlag = Annotated[
    tuple[str, ...], Parameter(help="A further folder with GGUF files.", metavar="FOLDER")
]


def models(
    *, model_dir: ModelDirFlag = (), json: JsonFlag = False, socket: SocketFlag = None
) -> int:
    """List the models on this machine: folders, Hugging Face's cache, Ollama, LM Studio, and the bundled one.

    SERVED is the state in the running daemon. NEEDS is the memory at the daemon's --n-ctx: weights, KV cache,
    buffers. FITS is yes, or the largest context for which the free memory suffices, or what is wrong with the file.
    Each model is tried in a process of its own, which takes about a second, and the result is stored. Any NAME can
    be given to `uma-trio serve --model`.
    """
    daemon = daemon_at(socket_path(socket))
    config = _config(daemon, model_dir)
    found = _found(config)
    rows = rows_of(found, config, _room(), served=daemon.state_of)
    rows += map(_row_elsewhere, daemon.elsewhere(found))
    if json:
        print_json([asdict(row) for row in rows])
        return OK
    _table(rows, config)
    if all(row.source == "bundled" for row in rows):
        say("Fetch another model with `uma-trio pull owner/repo`.")
    return OK


def list_models(
    *, model_dir: ModelDirFlag = (), json: JsonFlag = False, socket: SocketFlag = None
) -> int:
    """List the models on this machine: the same as `uma-trio models`."""
    return models(model_dir=model_dir, json=json, socket=socket)


_NameArgument = Annotated[str, Parameter(help="A name that `uma-trio models` lists.")]


def show(
    model: _NameArgument,
    /,
    *,
    model_dir: ModelDirFlag = (),
    json: JsonFlag = False,
    socket: SocketFlag = None,
) -> int:
    """Describe one model: its file, what it needs, and its state in the running daemon."""
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.gguf_header import read_header

    daemon = daemon_at(socket_path(socket))
    config = _config(daemon, model_dir)
    try:
        one = _named(model, _found(config))
    except Trouble as trouble:
        complain(str(trouble))
        return REFUSED
    (row,) = rows_of([one], config, _room(), served=daemon.state_of)
    about = asdict(row)
    try:
        metadata = read_header(one.path).metadata
        about |= {
            "architecture": str(metadata.get("general.architecture", "")),
            "chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
            "license": str(metadata.get("general.license", "")),
        }
    except ModelError:
        pass  # the row has the problem
    if json:
        print_json(about)
        return OK
    shown = {
        "name": row.name,
        "file": row.path,
        "kept by": row.source,
        "size": size(row.size_bytes),
        "quantisation": row.quant,
        "architecture": about.get("architecture", ""),
        "trained context": f"{row.n_ctx_train:,} tokens" if row.n_ctx_train else "",
        "chat template": "yes" if about.get("chat_template") else "no",
        "license": about.get("license", ""),
        "memory": f"{size(row.needs_bytes)} {_at_context(config)}" if row.needs_bytes else "",
        "fits": row.problem or _fits(row),
        "served": row.served or "no",
    }
    for name, value in shown.items():
        if value:
            console().print(f"{name + ':':<17}{harmless(str(value))}", soft_wrap=True)
    return OK


def remove(
    model: _NameArgument,
    /,
    *,
    yes: Annotated[bool, Parameter(help="Do not ask for a confirmation.")] = False,
    model_dir: ModelDirFlag = (),
    socket: SocketFlag = None,
) -> int:
    """Delete a model that `uma-trio pull` downloaded, or one in a model folder, after a confirmation.

    For the user that runs the daemon. Models of other programs and the bundled one are not deleted, and neither is
    a model that the daemon has loaded.
    """
    daemon = daemon_at(socket_path(socket))
    config = _config(daemon, model_dir)
    try:
        one = _named(model, _found(config))
        files = files_to_remove(one, cache_folder(os.environ, Path.home()), config.model_dir)
        _check_removable(one, files, daemon)
    except Trouble as trouble:
        complain(str(trouble))
        return REFUSED
    total = size(sum(path.lstat().st_size for path in files))
    if not yes and not _is_confirmed(f"Delete {one.name}: {', '.join(map(str, files))} ({total})?"):
        return USAGE
    try:
        for path in files:
            path.unlink()
    except OSError as error:
        complain(f"{error.filename} cannot be deleted: {error.strerror}.")
        return REFUSED
    say(f"Deleted {one.name}: {total} are free.")
    return OK


def files_to_remove(model: Found, cache: Path, folders: Iterable[Path]) -> list[Path]:
    """Return the files of a model: its parts, and in the hub's cache the blobs with all links to them.

    Raises:
        Trouble: the model is bundled, belongs to another program, or is outside the model folders.
    """
    if model.source == "bundled":
        raise Trouble(f"{model.name} is a part of this package and cannot be deleted.")
    if model.source in _OWNERS:
        raise Trouble(
            f"{model.name} belongs to another program; delete it with {_OWNERS[model.source]}."
        )
    first = Path(os.path.abspath(model.path))
    roots = [cache] if model.source == "hf" else [*folders]
    if not any(first.is_relative_to(os.path.abspath(root)) for root in roots):
        raise Trouble(f"{first} is in no model folder; delete it by hand.")
    _, count_ = part_of(first.name)
    stem = stem_of(first.name)
    parts = [first]
    if count_ > 1:
        every = (
            first.with_name(f"{stem}-{n:05}-of-{count_:05}.gguf") for n in range(1, count_ + 1)
        )
        parts = [path for path in every if os.path.lexists(path)]
    if model.source != "hf":
        return parts  # of a symbolic link, the link
    repository = cache / first.relative_to(os.path.abspath(cache)).parts[0]
    blobs = {part.resolve() for part in parts if part.is_symlink()}
    links = (path for path in (repository / "snapshots").rglob("*") if path.is_symlink())
    named = {*parts, *(link for link in links if link.resolve() in blobs)}
    own = [blob for blob in blobs if blob.is_file() and blob.is_relative_to(repository.resolve())]
    return sorted(named) + sorted(own)


def _check_removable(model: Found, files: Sequence[Path], daemon: Daemon) -> None:
    if not daemon.is_ours:
        raise Trouble("Another user runs the daemon here; only that user may delete models.")
    if daemon.state_of(model) not in ("", "unloaded"):
        raise Trouble(
            f"The daemon has {model.name} loaded; unload it with `uma-trio stop {model.name}`, or stop the daemon."
        )
    uid = os.geteuid()
    others = [path for path in files if path.lstat().st_uid != uid]
    if others and uid:
        raise Trouble(f"{others[0]} belongs to user {others[0].lstat().st_uid}, who may delete it.")


def _is_confirmed(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        complain(f"{question} Give --yes.")
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def daemon_at(path: Path) -> Daemon:
    """Return what the daemon on a socket serves; nothing if none answers soon."""
    if not accepts(path):
        return Daemon()
    found = answer_of(path, lambda client: client.overview())
    if found is None:
        return Daemon()
    return Daemon(found.models, found.settings, is_ours=found.settings is not None)


def _config(daemon: Daemon, model_dir: tuple[str, ...]) -> Config:
    """Return the daemon's own settings, or those that one would start with."""
    own = settings.load({"model_dir": model_dir or None})
    if daemon.settings is None:
        return own
    running = settings.load(daemon.settings, env={})
    folders = dict.fromkeys((*running.model_dir, *own.model_dir))
    return evolve(running, model_dir=tuple(folders))


def _found(config: Config) -> list[Found]:
    from uma_trio.models.files import found_models

    return found_models(config)


def _named(name: str, found: Sequence[Found]) -> Found:
    """Return the only model that a name means. Raises :class:`Trouble`."""
    matching = matching_models(name, found)
    exact = [model for model in matching if model.name.lower() == name.lower()]
    if len(exact or matching) == 1:
        return (exact or matching)[0]
    if matching:
        names = ", ".join(model.name for model in matching)
        raise Trouble(f"{name} may mean {names}; name one of them.")
    hint = nearest(name, [model.name for model in found], cutoff=0.5)
    raise Trouble(f"There is no model {name!r} here{hint}; `uma-trio models` lists them.")


def rows_of(
    found: Sequence[Found],
    config: Config,
    room: int | None,
    estimate: Estimating | None = None,
    served: Callable[[Found], str] = lambda _: "",
) -> list[Row]:
    """Return what is known of each model, with `room` bytes of memory free.

    Each is tried in a process of its own, as many at once as there are cores.
    """
    from uma_trio.models import files

    row = partial(
        _row, config=config, room=room, estimate=estimate or files.estimate, served=served
    )
    with ThreadPoolExecutor(max_workers=physical_cores()) as tries:
        return list(tries.map(row, found))


def _row_elsewhere(served: ModelInfo) -> Row:
    return Row(
        harmless(served.name),
        "the daemon",
        "",
        size_bytes=served.size_bytes,
        n_ctx_train=served.n_ctx,
        served=served.state,
    )


def _room() -> int | None:
    from uma_trio.backend.kv_memory import available_memory

    return available_memory()


def _row(
    model: Found,
    config: Config,
    room: int | None,
    estimate: Estimating,
    served: Callable[[Found], str],
) -> Row:
    from uma_trio.backend.base import ModelError
    from uma_trio.backend.gguf_header import read_header

    known: dict[str, Any] = {
        "name": model.name,
        "source": model.source,
        "path": str(model.path),
        "served": served(model),
    }
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
    ("SERVED", lambda row: row.served or "-"),
)


def _fits(row: Row) -> str:
    """Return up to which context a model fits."""
    trained = row.n_ctx_train or 0
    if row.served == "loaded" or 0 < trained <= (row.n_ctx_fits or 0):
        return "yes"
    if row.n_ctx_fits is None:
        return "?"
    return f"{row.n_ctx_fits:,} tokens" if row.n_ctx_fits else "no"


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
        say(f"{size(room)} of memory are free; NEEDS is {_at_context(config)}.")


def _at_context(config: Config) -> str:
    if config.n_ctx is None:
        return "with the context that serve would choose"
    return f"with --n-ctx {config.n_ctx}"
