"""Downloads from Hugging Face's hub, with `huggingface_hub`. Imported by `uma-trio pull` alone."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

from attrs import frozen
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers
from huggingface_hub.utils import logging as hub_logging
from tqdm import tqdm

from uma_trio.library.names import (
    PREFERRED,
    PullFailed,
    Reference,
    is_model,
    part_of,
    quant_of,
    stem_of,
)

constants.HF_HUB_DISABLE_TELEMETRY = True  # a local program reports nothing
_CHUNK: Final = 1 << 20
_SPARE_BYTES: Final = 256 << 20  # left free on the disk
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
_LOGIN: Final = "accept its licence on its page, and run `hf auth login` or set HF_TOKEN"

Progress = Callable[[int, int], None]  # bytes present, bytes in all


@frozen
class HubFile:
    """A file of a repository. `sha256` is "" for a small file, for which the hub has none."""

    path: str
    size: int
    sha256: str


@frozen
class Listing:
    """The files of a repository at a commit."""

    commit: str
    files: tuple[HubFile, ...]


@frozen
class Selection:
    """The files of one model, its parts in order."""

    quant: str
    files: tuple[HubFile, ...]

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files)


def endpoint() -> str:
    """Return the hub's address, or that of the mirror in HF_ENDPOINT."""
    return str(constants.ENDPOINT)


def list_files(asked: Reference) -> Listing:
    """List the files of a repository. Raises :class:`PullFailed`."""
    hub_logging.set_verbosity_error()
    try:
        info = HfApi().model_info(asked.repository, revision=asked.revision, files_metadata=True)
        files = tuple(_file(sibling, asked.repository) for sibling in info.siblings or ())
    except (TypeError, LookupError, AttributeError) as error:
        raise _unreadable(asked) from error
    except Exception as error:
        raise _explained(error, asked) from error
    if not _COMMIT.fullmatch(info.sha or ""):
        raise _unreadable(asked)
    return Listing(str(info.sha), files)


def _unreadable(asked: Reference) -> PullFailed:
    return PullFailed(f"the list of {asked.repository}'s files cannot be read; check HF_ENDPOINT")


def select(files: Iterable[HubFile], quant: str, path: str = "") -> Selection:
    """Select the files of one model.

    Without `quant` it is Q4_K_M, else Q8_0, else the first; a `quant` may be a part of the file's name. `path`
    is a file of the model, or a folder that it is in. Raises :class:`PullFailed`.
    """
    models: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if is_model(file.path):
            folder = str(PurePosixPath(file.path).parent)
            models.setdefault(f"{folder}/{stem_of(file.path)}", []).append(file)
    if not models:
        raise PullFailed(
            "there is no GGUF file in it; look for a repository whose name ends in -GGUF"
        )
    if path:
        models = _at(models, path)
    parts = models[_named(models, quant) if quant else _preferred(models)]
    _, count = part_of(parts[0].path)
    if [part_of(file.path)[0] for file in parts] != [*range(1, count + 1)]:
        raise PullFailed(f"it has {len(parts)} of the {count} parts of {parts[0].path}")
    return Selection(quant_of(parts[0].path) or stem_of(parts[0].path), tuple(parts))


def download(
    asked: Reference, commit: str, selection: Selection, cache: Path, progress: Progress
) -> Path:
    """Download what is missing into the hub's cache folder and return the model's first file.

    Files get their names when all of them are complete and their SHA-256 is right. An interrupted download resumes,
    also in another process, which `hf_hub_download` does not.

    Raises:
        PullFailed: there is no room, the hub refuses or fails, or sends wrong bytes twice.
    """
    folder = cache / f"models--{asked.repository.replace('/', '--')}"
    blobs, finished = folder / "blobs", 0
    try:
        _check_room(blobs, selection)
        for file in selection.files:
            if _size(blobs / file.sha256) != file.size:
                counter = _counter(progress, finished, selection.n_bytes)
                _fetch(asked, file, blobs / file.sha256, counter)
            finished += file.size
            progress(finished, selection.n_bytes)
        places = [_place(folder, commit, file) for file in selection.files]
        ref = folder / "refs" / asked.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        if asked.revision != commit:
            ref.write_text(commit, encoding="ascii")
    except OSError as error:
        raise PullFailed(f"{error.filename or folder}: {error.strerror}") from error
    return places[0]


def _place(folder: Path, commit: str, file: HubFile) -> Path:
    """Link the name of a file at a commit to its blob, as the hub's tools do."""
    place = folder / "snapshots" / commit / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f".{place.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(folder / "blobs" / file.sha256, place.parent))
    new.replace(place)
    return place


def _file(sibling: Any, repository: str) -> HubFile:
    path, lfs = str(sibling.rfilename), sibling.lfs
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or not pure.name:
        raise PullFailed(f"{repository} lists a file at {path!r}, which leads out of its folder")
    digest = "" if lfs is None else str(lfs.sha256)
    if digest and not _SHA256.fullmatch(digest):
        raise PullFailed(f"{repository} gives {digest!r} as a SHA-256; check HF_ENDPOINT")
    size = int(sibling.size or 0)
    if size < 0:
        raise ValueError(size)
    return HubFile(path, size, digest)


def _at(models: Mapping[str, list[HubFile]], path: str) -> dict[str, list[HubFile]]:
    """Return the model that a file belongs to, or those in a folder."""
    parts = {stem: [file.path for file in files] for stem, files in models.items()}
    found = {stem: models[stem] for stem, paths in parts.items() if path in paths}
    if not found:
        folder = f"{path.rstrip('/')}/"
        found = {
            stem: models[stem] for stem, (first, *_) in parts.items() if first.startswith(folder)
        }
    if not found:
        others = ", ".join(paths[0] for paths in parts.values())
        raise PullFailed(f"it has no model at {path}; it has {others}")
    return found


def _named(models: Mapping[str, list[HubFile]], quant: str) -> str:
    exact = [stem for stem in models if quant_of(stem) == quant.upper()]
    loose = [stem for stem in models if quant.lower() in PurePosixPath(stem).name.lower()]
    if not (exact or loose):
        kinds = ", ".join(
            f"{quant_of(stem) or stem_of(stem)} ({sum(file.size for file in parts) / 1e9:.1f} GB)"
            for stem, parts in models.items()
        )
        raise PullFailed(f"it has no {quant}; it has {kinds}")
    return min(exact or loose, key=len)


def _preferred(models: Mapping[str, list[HubFile]]) -> str:
    for quant in PREFERRED:
        if fitting := [stem for stem in models if quant_of(stem) == quant]:
            return min(fitting, key=len)
    return next(iter(models))


def _fetch(asked: Reference, file: HubFile, blob: Path, counter: type[tqdm]) -> None:
    partial, digest = blob.with_name(f"{blob.name}.incomplete"), ""
    for _ in range(2):
        with partial.open("a+b") as written:
            try:
                fcntl.flock(written, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PullFailed(f"another process downloads {file.path}; wait for it") from None
            _append(asked, file, written, counter)
            digest = _digest(written)
            if digest == file.sha256:
                os.fsync(written.fileno())
                partial.replace(blob)
                return
        partial.unlink()
    raise PullFailed(
        f"{file.path} arrived with other bytes than the hub lists, twice (SHA-256 {digest[:12]}… and not"
        f" {file.sha256[:12]}…); nothing of it was kept: try again later, or another HF_ENDPOINT"
    )


def _append(asked: Reference, file: HubFile, written: BinaryIO, counter: type[tqdm]) -> None:
    """Bring a file that is present in part to its size."""
    present = written.seek(0, os.SEEK_END)
    if present > file.size:
        present = written.truncate(written.seek(0))
    try:
        http_get(
            hf_hub_url(asked.repository, file.path, revision=asked.revision),
            written,
            resume_size=present,
            headers=build_hf_headers(),
            expected_size=file.size,
            tqdm_class=counter,
        )
    except Exception as error:
        raise _explained(error, asked, file.path) from error
    finally:
        written.flush()


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _counter(progress: Progress, finished: int, total: int) -> type[tqdm]:
    """Return a progress bar that draws nothing and reports the bytes of one file."""

    class Counter(tqdm):  # type: ignore[misc]  # the package has no types
        def __init__(self, *arguments: Any, **named: Any) -> None:
            named.pop("name", None)
            self._present = int(named.get("initial") or 0)
            super().__init__(*arguments, **{**named, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._present += int(n or 0)
            progress(finished + self._present, total)

    return Counter


def _check_room(blobs: Path, selection: Selection) -> None:
    """Refuse before the first byte what cannot be checked, or the disk cannot hold."""
    for file in selection.files:
        if not file.sha256:
            raise PullFailed(
                f"the hub gives no SHA-256 for {file.path}, so that it cannot be checked; download it by hand"
            )
    blobs.mkdir(parents=True, exist_ok=True)
    present = sum(
        _size(blobs / file.sha256) + _size(blobs / f"{file.sha256}.incomplete")
        for file in selection.files
    )
    needed, free = selection.n_bytes - present, shutil.disk_usage(blobs).free
    if needed + _SPARE_BYTES > free > 0 and needed > 0:
        raise PullFailed(
            f"{needed / 1e9:.1f} GB are to be downloaded and the disk of {blobs} has {free / 1e9:.1f} GB free;"
            " free some, set HF_HUB_CACHE to a folder on another disk, or choose a smaller quantisation"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _explained(error: Exception, asked: Reference, path: str = "") -> PullFailed:
    """Return what to do about an error of the library, whose HTTP client, Xet and locks raise their own."""
    if isinstance(error, PullFailed):
        return error
    name = asked.repository
    kept = f"; what is present of {path} is kept" if path else ""
    if isinstance(error, OfflineModeIsEnabled):
        return PullFailed("HF_HUB_OFFLINE is set; unset it to download")
    if isinstance(error, GatedRepoError):
        return PullFailed(f"{name} is not open to everybody; {_LOGIN}")
    if isinstance(error, RevisionNotFoundError):
        return PullFailed(f"{name} has no revision {asked.revision!r}; omit it, or check its name")
    if isinstance(error, EntryNotFoundError):
        return PullFailed(f"{name} has no file {path}; check HF_ENDPOINT")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return PullFailed(
            f"there is no {name} on the hub, or it is not open to everybody; check the name, or {_LOGIN}"
        )
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return PullFailed(f"the hub answered {status} for {name}; {_LOGIN}")
        return PullFailed(f"the hub answered {status}; try again later{kept}")
    if isinstance(error, OSError) and error.filename:
        return PullFailed(f"{error.filename}: {error.strerror}")
    why = " ".join(str(error).split()) or type(error).__name__
    return PullFailed(
        f"{endpoint()} cannot be reached: {why}; check the network, or set HF_ENDPOINT{kept}"
    )
